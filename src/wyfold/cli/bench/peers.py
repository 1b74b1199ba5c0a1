"""Other libraries' versions of our operators: an adapter of a few lines each, for `bench` to run beside ours.

An adapter imports its library when asked, takes the arguments of one call and returns the output. It says by name what
ran, since libraries exchange their functions for others when further packages are installed; on a GPU the names of the
kernels are recorded as well, and what `dispatched` heard. Ours and theirs do the same work: norms, gates and states are
inside or outside for both. Where a library wants an argument in another form, that form is made outside of the time,
and its row says so.
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

if TYPE_CHECKING:
    from torch import Tensor

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Loaded:
    """A library's function, imported.

    Attributes:
        ran: Its full name.
        call: Takes the arguments of ours, and what `prepare` adds to them; returns the output.
        prepare: Makes further arguments, once, outside of all times.
    """

    ran: str
    call: Callable[[Arguments], Tensor]
    prepare: Callable[[Arguments], Arguments] = lambda arguments: {}


@dataclass(frozen=True)
class Adapter:
    """One way to call a library.

    Attributes:
        load: Imports what is needed.
        way: What distinguishes it from another way of the same library.
        backward: Whether the library has one.
    """

    load: Callable[[], Loaded]
    way: str = ""
    backward: bool = True


@dataclass(frozen=True)
class Peer:
    """One library.

    Attributes:
        name: As `--peers` has it.
        module: What is imported.
        install: What brings it.
        adapters: Public operator of ours -> ways to call theirs.
        device: Type of device it is for.
        packages: Whose versions a result needs.
        shares: Makes of boundaries and a process group what their `cp_context` is; None: they share no sequence.
    """

    name: str
    module: str
    install: str
    adapters: Mapping[str, tuple[Adapter, ...]]
    device: str = "cuda"
    packages: tuple[str, ...] = ()
    shares: Callable[[Tensor, Any], Any] | None = None

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None

    @property
    def ways(self) -> list[str]:
        """What `narrowed` takes."""
        found = (adapter.way for adapters in self.adapters.values() for adapter in adapters)
        return list(dict.fromkeys(way for way in found if way))

    def narrowed(self, way: str) -> Peer:
        """The peer with one of several ways to call an operator; with all of them if way is empty."""
        if not way:
            return self
        kept = {op: tuple(a for a in adapters if a.way in ("", way)) for op, adapters in self.adapters.items()}
        return replace(self, adapters=kept)

    @property
    def versions(self) -> dict[str, str]:
        """Package -> version, of those that are installed."""
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
    """Calls a function that has our signature; of several results the first."""

    def call(arguments: Arguments) -> Tensor:
        returned = function(**arguments, **fixed)
        return returned[0] if isinstance(returned, tuple) else returned

    return call


# --- transformers: what it falls back to on a CPU --------------------------------------------------------------------


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

_heard: dict[str, None] = {}


class _Listener(logging.Handler):
    """Keeps what fla says about the backends it hands calls to, and about those it refuses."""

    def emit(self, record: logging.LogRecord) -> None:
        _heard[record.getMessage()] = None


def dispatched() -> list[str]:
    """What fla has said so far in this process; it says each thing once."""
    return list(_heard)


def _fla(module: str, name: str, **fixed: Any) -> Callable[[], Loaded]:
    """A function of fla that takes our keywords."""

    def load() -> Loaded:
        _listen()
        function = _imported(f"fla.{module}", name)
        return Loaded(_named(function), _keywords(function, **fixed))

    return load


def _listen() -> None:
    logger = logging.getLogger("fla.backends")
    if not any(isinstance(handler, _Listener) for handler in logger.handlers):
        logger.addHandler(_Listener())
        logger.setLevel(logging.INFO)
        logger.propagate = False


def _fla_shares(boundaries: Tensor, group: Any) -> Any:
    return _imported("fla.ops.cp", "build_cp_context")(boundaries, group=group)


def _fla_kkt() -> Loaded:
    """Its gate is summed within chunks, and in base 2."""
    _listen()
    function = _imported("fla.ops.common.chunk_scaled_dot_kkt", "chunk_scaled_dot_kkt_fwd")

    def prepare(arguments: Arguments) -> Arguments:
        if "g" not in arguments:
            return {}
        if "cu_seqlens" in arguments:
            raise NotImplementedError("this adapter sums gates of dense batches only")
        return {"g": _summed(arguments["g"], arguments["chunk_size"])}

    return Loaded(f"{_named(function)}, gate summed outside", _keywords(function), prepare)


def _summed(g: Tensor, chunk_size: int) -> Tensor:
    """Running sums of g [B, T, HV] within chunks, base 2."""
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
    """[N+1] int32 boundaries of the sequences of a batch laid one after another."""
    import torch

    if "cu_seqlens" in arguments:
        packed: Tensor = arguments["cu_seqlens"]
        return packed.to(torch.int32)
    B, T = arguments["q"].shape[:2]
    return torch.arange(0, B * T + 1, T, device=arguments["q"].device, dtype=torch.int32)


def _laid_out(arguments: Arguments, *names: str) -> list[Tensor]:
    """[B * T, ...] views."""
    return [arguments[name].flatten(0, 1) for name in names]


def _cudnn_kda() -> Loaded:
    kimi_delta_attention = _imported("cudnn.linear_attention", "kimi_delta_attention")

    def call(arguments: Arguments) -> Tensor:
        o: Tensor = kimi_delta_attention(
            *_laid_out(arguments, "q", "k", "v", "g", "beta"),
            arguments["boundaries"],
            use_qk_l2norm_in_kernel=arguments.get("use_qk_l2norm_in_kernel", False),
            plan_name="kda_hopper_cuda",
        )[0]
        return o.view_as(arguments["v"])

    name = "cudnn.linear_attention.kimi_delta_attention, kda_hopper_cuda"
    return Loaded(name, call, lambda arguments: {"boundaries": _boundaries(arguments)})


def _flashinfer_gdn() -> Loaded:
    """Its gate is the factor itself."""
    chunk_gated_delta_rule = _imported("flashinfer.gdn_prefill", "chunk_gated_delta_rule")

    def prepare(arguments: Arguments) -> Arguments:
        return {"boundaries": _boundaries(arguments), "alpha": arguments["g"].float().exp().flatten(0, 1)}

    def call(arguments: Arguments) -> Tensor:
        o: Tensor = chunk_gated_delta_rule(
            *_laid_out(arguments, "q", "k", "v"),
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
            'pip install "wyfold[bench]"',
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
                "chunk_ttt_linear": (
                    Adapter(_fla("ops.ttt", "chunk_ttt_linear"), "staged"),
                    Adapter(_fla("ops.ttt", "fused_chunk_ttt_linear"), "fused"),
                ),
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
            shares=_fla_shares,
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
