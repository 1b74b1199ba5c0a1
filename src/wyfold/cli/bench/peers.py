"""Peers: adapters that call other libraries' versions of the operators, for `bench`.

An adapter imports its library on use, takes the arguments of one call and returns the output. It records the full name
of the function that ran, because libraries replace functions when further packages are installed. On a GPU the kernel
names are recorded as well, and the messages of `dispatch_messages`. All implementations do the same work: norms, gates
and states are inside the operator for all of them, or outside for all. If a library needs an argument in another form,
the conversion is outside the timed region, and the row says so.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from wyfold.runtime.extras import install_command

if TYPE_CHECKING:
    from torch import Tensor

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Loaded:
    """A library's function, imported.

    Attributes:
        ran: Full name of the function.
        call: Maps Wyfold's keyword arguments, extended by `prepare`, to the output.
        prepare: Makes further arguments, once, outside the timed region.
    """

    ran: str
    call: Callable[[Arguments], Tensor]
    prepare: Callable[[Arguments], Arguments] = lambda arguments: {}


@dataclass(frozen=True)
class Adapter:
    """One way to call an operator of a library.

    Attributes:
        load: Imports the function.
        variant: Name of this variant, if the library has several for the operator; else empty.
        backward: Whether it is differentiable.
    """

    load: Callable[[], Loaded]
    variant: str = ""
    backward: bool = True


@dataclass(frozen=True)
class Peer:
    """A library to compare with.

    Attributes:
        name: Name in `--peers`.
        module: Module to import.
        install: Command that installs it.
        adapters: Public operator of Wyfold -> adapters of the library.
        device: Type of device the library runs on.
        packages: Packages whose versions are recorded with a result.
        make_cp_context: (boundaries, process group) -> the library's `cp_context`; None without context parallelism.
    """

    name: str
    module: str
    install: str
    adapters: Mapping[str, tuple[Adapter, ...]]
    device: str = "cuda"
    packages: tuple[str, ...] = ()
    make_cp_context: Callable[[Tensor, Any], Any] | None = None

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None

    @property
    def variants(self) -> list[str]:
        """Variants of all operators, the values that `with_variant` accepts."""
        found = (adapter.variant for adapters in self.adapters.values() for adapter in adapters)
        return list(dict.fromkeys(variant for variant in found if variant))

    def with_variant(self, variant: str) -> Peer:
        """The peer restricted to one variant of each operator; unrestricted if `variant` is empty."""
        if not variant:
            return self
        kept = {op: tuple(a for a in adapters if a.variant in ("", variant)) for op, adapters in self.adapters.items()}
        return replace(self, adapters=kept)

    @property
    def versions(self) -> dict[str, str]:
        """Installed package -> version."""
        found = {}
        for package in self.packages:
            try:
                found[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        return found


def _imported(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _named(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _keywords(function: Callable[..., Any], **fixed: Any) -> Callable[[Arguments], Tensor]:
    """Call a function that has Wyfold's signature, and return its first result."""

    def call(arguments: Arguments) -> Tensor:
        returned = function(**arguments, **fixed)
        return returned[0] if isinstance(returned, tuple) else returned

    return call


# --- transformers: its fallbacks on a CPU ----------------------------------------------------------------------------


def _transformers(function: Callable[..., Any]) -> Loaded:
    def call(arguments: Arguments) -> Tensor:
        rest = {name: x for name, x in arguments.items() if name not in ("q", "k", "v")}
        o: Tensor = function(arguments["q"], arguments["k"], arguments["v"], **rest)[0]
        return o

    return Loaded(_named(function), call)


def _transformers_gdn() -> Loaded:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    return _transformers(torch_chunk_gated_delta_rule)


def _transformers_kda() -> Loaded:
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

    return _transformers(chunk_kimi_delta_attention)


# --- fla -------------------------------------------------------------------------------------------------------------

_dispatch_messages: dict[str, None] = {}


class _DispatchLogHandler(logging.Handler):
    """Collects fla's log messages about the backends that it selects or rejects."""

    def emit(self, record: logging.LogRecord) -> None:
        _dispatch_messages[record.getMessage()] = None


def dispatch_messages() -> list[str]:
    """Messages that fla has logged so far in this process; each occurs once."""
    return list(_dispatch_messages)


def _fla(module: str, name: str, **fixed: Any) -> Callable[[], Loaded]:
    """Loader of an fla function that takes Wyfold's keywords."""

    def load() -> Loaded:
        _capture_dispatch_log()
        function = _imported(f"fla.{module}", name)
        return Loaded(_named(function), _keywords(function, **fixed))

    return load


def _capture_dispatch_log() -> None:
    logger = logging.getLogger("fla.backends")
    if not any(isinstance(handler, _DispatchLogHandler) for handler in logger.handlers):
        logger.addHandler(_DispatchLogHandler())
        logger.setLevel(logging.INFO)
        logger.propagate = False


def _fla_cp_context(boundaries: Tensor, group: Any) -> Any:
    return _imported("fla.ops.cp", "build_cp_context")(boundaries, group=group)


def _fla_kkt() -> Loaded:
    """Load fla's `chunk_scaled_dot_kkt_fwd`, which expects a gate in base 2, already summed within chunks."""
    _capture_dispatch_log()
    function = _imported("fla.ops.common.chunk_scaled_dot_kkt", "chunk_scaled_dot_kkt_fwd")

    def prepare(arguments: Arguments) -> Arguments:
        if "g" not in arguments:
            return {}
        if "cu_seqlens" in arguments:
            raise NotImplementedError("this adapter sums gates of dense batches only")
        return {"g": _gate_sums(arguments["g"], arguments["chunk_size"])}

    return Loaded(f"{_named(function)}, gate summed outside", _keywords(function), prepare)


def _gate_sums(g: Tensor, chunk_size: int) -> Tensor:
    """Cumulative sums of g [B, T, HV] within chunks, in base 2."""
    import torch

    B, T, HV = g.shape
    padded = torch.nn.functional.pad(g, (0, 0, 0, -T % chunk_size))
    sums = padded.view(B, -1, chunk_size, HV).cumsum(2).view(B, -1, HV)[:, :T]
    return (sums * math.log2(math.e)).contiguous()


# --- FlashQLA, the frontend of cuDNN, FlashInfer ---------------------------------------------------------------------


def _flash_qla_gdn() -> Loaded:
    function = _imported("flash_qla", "chunk_gated_delta_rule")
    return Loaded(_named(function), _keywords(function))


def _boundaries(arguments: Arguments) -> Tensor:
    """[N+1] int32 boundaries of the sequences of a batch that is flattened to one row."""
    import torch

    if "cu_seqlens" in arguments:
        packed: Tensor = arguments["cu_seqlens"]
        return packed.to(torch.int32)
    B, T = arguments["q"].shape[:2]
    return torch.arange(0, B * T + 1, T, device=arguments["q"].device, dtype=torch.int32)


def _flattened(arguments: Arguments, *names: str) -> list[Tensor]:
    """Arguments as [B * T, ...] views."""
    return [arguments[name].flatten(0, 1) for name in names]


def _cudnn_kda() -> Loaded:
    kimi_delta_attention = _imported("cudnn.linear_attention", "kimi_delta_attention")

    def call(arguments: Arguments) -> Tensor:
        o: Tensor = kimi_delta_attention(
            *_flattened(arguments, "q", "k", "v", "g", "beta"),
            arguments["boundaries"],
            use_qk_l2norm_in_kernel=arguments.get("use_qk_l2norm_in_kernel", False),
            plan_name="kda_hopper_cuda",
        )[0]
        return o.view_as(arguments["v"])

    name = "cudnn.linear_attention.kimi_delta_attention, kda_hopper_cuda"
    return Loaded(name, call, lambda arguments: {"boundaries": _boundaries(arguments)})


def _flashinfer_gdn() -> Loaded:
    """Load FlashInfer's GDN, which expects the decay factor exp(g) as its gate."""
    chunk_gated_delta_rule = _imported("flashinfer.gdn_prefill", "chunk_gated_delta_rule")

    def prepare(arguments: Arguments) -> Arguments:
        return {"boundaries": _boundaries(arguments), "alpha": arguments["g"].float().exp().flatten(0, 1)}

    def call(arguments: Arguments) -> Tensor:
        o: Tensor = chunk_gated_delta_rule(
            *_flattened(arguments, "q", "k", "v"),
            arguments["alpha"],
            arguments["beta"].flatten(0, 1),
            cu_seqlens=arguments["boundaries"],
            use_qk_l2norm_in_kernel=arguments.get("use_qk_l2norm_in_kernel", False),
        )
        return o.view_as(arguments["v"])

    return Loaded("flashinfer.gdn_prefill.chunk_gated_delta_rule, exp(g) outside", call, prepare)


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "transformers",
            "transformers",
            install_command("bench"),
            {
                "chunk_gated_delta_rule": (Adapter(_transformers_gdn),),
                "chunk_kda": (Adapter(_transformers_kda),),
            },
            device="cpu",
            packages=("transformers",),
        ),
        Peer(
            "fla",
            "fla",
            "pip install fla-core",
            {
                "chunk_delta_rule": (Adapter(_fla("ops.delta_rule", "chunk_delta_rule")),),
                "chunk_gated_delta_rule": (Adapter(_fla("ops.gated_delta_rule", "chunk_gated_delta_rule")),),
                "chunk_kda": (
                    Adapter(_fla("ops.kda", "chunk_kda"), "generic"),
                    Adapter(_fla("ops.kda", "chunk_kda", safe_gate=True), "safe_gate"),
                ),
                "chunk_gated_delta_product": (Adapter(_fla("ops.gated_delta_product", "chunk_gated_delta_product")),),
                "chunk_gla": (Adapter(_fla("ops.gla", "chunk_gla")),),
                "chunk_ttt_linear": (
                    Adapter(_fla("ops.ttt", "chunk_ttt_linear"), "staged"),
                    Adapter(_fla("ops.ttt", "fused_chunk_ttt_linear"), "fused"),
                ),
                "parallel_path_attn": (Adapter(_fla("ops.path_attn", "parallel_path_attn")),),
                "fused_recurrent_delta_rule": (Adapter(_fla("ops.delta_rule", "fused_recurrent_delta_rule")),),
                "fused_recurrent_gated_delta_rule": (
                    Adapter(_fla("ops.gated_delta_rule", "fused_recurrent_gated_delta_rule")),
                ),
                "fused_recurrent_kda": (Adapter(_fla("ops.kda", "fused_recurrent_kda")),),
                "solve_tril": (Adapter(_fla("ops.utils.solve_tril", "solve_tril")),),
                "chunk_scaled_dot_kkt": (Adapter(_fla_kkt),),
                "causal_conv1d": (Adapter(_fla("modules.causal_conv1d", "causal_conv1d")),),
                "rms_norm_gated": (Adapter(_fla("modules.norm.fused_norm_gate", "rms_norm_gated", bias=None)),),
                "l2norm": (Adapter(_fla("modules.norm.l2norm", "l2norm")),),
                "fused_gdn_gate": (Adapter(_fla("ops.gated_delta_rule.gate", "fused_gdn_gate")),),
                "fused_kda_gate": (Adapter(_fla("ops.kda.gate", "fused_kda_gate")),),
            },
            packages=("fla-core", "tilelang", "flash-qla"),
            make_cp_context=_fla_cp_context,
        ),
        Peer(
            "flash-qla",
            "flash_qla",
            "pip install flash-qla",
            {"chunk_gated_delta_rule": (Adapter(_flash_qla_gdn),)},
            packages=("flash-qla", "tilelang", "apache-tvm-ffi"),
        ),
        Peer(
            "cudnn",
            "cudnn",
            "pip install nvidia-cudnn-frontend",
            {"chunk_kda": (Adapter(_cudnn_kda),)},
            packages=("nvidia-cudnn-frontend",),
        ),
        Peer(
            "flashinfer",
            "flashinfer",
            'pip install flashinfer-python "nvidia-cutlass-dsl[cu13]"',
            {"chunk_gated_delta_rule": (Adapter(_flashinfer_gdn, backward=False),)},
            packages=("flashinfer-python", "nvidia-cutlass-dsl"),
        ),
    )
}
