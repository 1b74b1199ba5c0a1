"""Peers: adapters that call other libraries' versions of the operators, for `bench`.

An adapter imports its library on use, takes the arguments of one call and returns the output. It records the full name
of the function that ran, because libraries replace functions when further packages are installed. On a GPU the kernel
names are recorded as well, and the messages of `dispatch_messages`. All implementations do the same work: norms, gates
and states are inside the operator for all of them, or outside for all. If a library needs an argument in another form,
the conversion is outside the timed region, and the row says so.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from wyfold.cli.bench.peer import Adapter, Arguments, Loaded, Peer
from wyfold.cli.catalog import LAYERS
from wyfold.runtime.extras import install_command

if TYPE_CHECKING:
    from torch import Tensor


def _imported(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _named(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _keywords(function: Callable[..., Any], **fixed: Any) -> Callable[[Arguments], Tensor]:
    """Call a function that has Wyfold's signature, and return its first result."""

    def call(arguments: Arguments) -> Tensor:
        returned = function(**{**arguments, **fixed})
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


def _fla_low_rank() -> dict[str, tuple[Adapter, ...]]:
    """Adapters of the rules whose transition is diagonal plus low rank.

    With "safe_gate" fla's DPLR assumes decays of at least -5 a token, and its RWKV-7 those of RWKV-7's layer, which
    allow it chunks of 64. Its token forms of DPLR have no backward, and neither has its chunk form of IPLR.
    """
    general, rwkv7 = "ops.generalized_delta_rule", {"scale": 1.0}
    bounded = {**rwkv7, "safe_gate": True, "lower_bound": -math.exp(-0.5)}
    return {
        "chunk_dplr_delta_rule": (
            Adapter(_fla(general, "chunk_dplr_delta_rule"), "generic", tuned=True),
            Adapter(_fla(general, "chunk_dplr_delta_rule", safe_gate=True), "safe_gate", tuned=True),
        ),
        "chunk_rwkv7": (
            Adapter(_fla("ops.rwkv7", "chunk_rwkv7", **rwkv7), "generic", tuned=True),
            Adapter(_fla("ops.rwkv7", "chunk_rwkv7", **bounded), "safe_gate", tuned=True),
        ),
        "chunk_iplr_delta_rule": (Adapter(_fla(general, "chunk_iplr_delta_rule"), backward=False, tuned=True),),
        "chunk_gdn2": (Adapter(_fla("ops.gdn2", "chunk_gdn2"), tuned=True),),
        "chunk_comba": (Adapter(_fla("ops.comba", "chunk_comba"), tuned=True),),
        "fused_recurrent_dplr_delta_rule": (Adapter(_fla(general, "fused_recurrent_dplr_delta_rule"), backward=False),),
        "fused_recurrent_rwkv7": (
            Adapter(_fla("ops.rwkv7", "fused_recurrent_rwkv7", **rwkv7, output_final_state=False), backward=False),
        ),
        "fused_recurrent_iplr_delta_rule": (Adapter(_fla(general, "fused_recurrent_iplr_delta_rule")),),
        "fused_recurrent_gdn2": (Adapter(_fla("ops.gdn2", "fused_recurrent_gdn2"), backward=False),),
        "fused_recurrent_comba": (Adapter(_fla("ops.comba", "fused_recurrent_comba")),),
    }


def _fla_recurrent_gla() -> Loaded:
    """Load fla's `fused_recurrent_gla`, whose decays have another name."""
    function = _imported("fla.ops.gla", "fused_recurrent_gla")
    rename = _keywords(function)
    return Loaded(
        _named(function),
        lambda arguments: rename({"gk" if name == "g" else name: x for name, x in arguments.items()}),
    )


def _capture_dispatch_log() -> None:
    logger = logging.getLogger("fla.backends")
    if not any(isinstance(handler, _DispatchLogHandler) for handler in logger.handlers):
        logger.addHandler(_DispatchLogHandler())
        logger.setLevel(logging.INFO)
        logger.propagate = False


def _fla_cp_context(boundaries: Tensor, group: Any) -> Any:
    return _imported("fla.ops.cp", "build_cp_context")(boundaries, group=group)


def _fla_layer(name: str) -> Callable[[], Loaded]:
    """Loader of a layer of fla, whose parameters are views of the case's."""

    def load() -> Loaded:
        _capture_dispatch_log()
        made = _imported("fla.layers", name)

        def prepare(arguments: Arguments) -> Arguments:
            from wyfold.cli.bench.layers import fla_layer

            return {"call": fla_layer(name, made, arguments)}

        return Loaded(_named(made), lambda arguments: arguments["call"](arguments), prepare)

    return load


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
    rename = _keywords(function)

    def call(arguments: Arguments) -> Tensor:
        _require_given(arguments)
        return rename(arguments)

    return Loaded(_named(function), call)


def _boundaries(arguments: Arguments) -> Tensor:
    """[N+1] int32 boundaries of the sequences of a batch that is flattened to one row."""
    import torch

    if "cu_seqlens" in arguments:
        return torch.as_tensor(arguments["cu_seqlens"], dtype=torch.int32)
    B, T = arguments["q"].shape[:2]
    return torch.arange(0, B * T + 1, T, device=arguments["q"].device, dtype=torch.int32)


def _flattened(arguments: Arguments, *names: str) -> list[Tensor]:
    """Arguments as [B * T, ...] views."""
    return [arguments[name].flatten(0, 1) for name in names]


def _require_given(arguments: Arguments, *, norm: bool = False) -> None:
    """Refuse a gate that the operator has to activate, and with `norm` also keys that it has to normalise.

    Raises:
        NotImplementedError: for such arguments.
    """
    if arguments.get("use_gate_in_kernel"):
        raise NotImplementedError("takes decays that are given, without an activation inside")
    if norm and arguments.get("use_qk_l2norm_in_kernel"):
        raise NotImplementedError("takes rows of q and k that are normalised: --norm outside")


def _cudnn_kda() -> Loaded:
    kimi_delta_attention = _imported("cudnn.linear_attention", "kimi_delta_attention")

    def call(arguments: Arguments) -> Tensor:
        _require_given(arguments)
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
        _require_given(arguments)
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


# --- FlashKDA, attention-gym -----------------------------------------------------------------------------------------


def _flash_kda() -> Loaded:
    """Load FlashKDA, which has norm, bounded gate and sigmoid inside, and nothing else."""
    fwd = _imported("flash_kda", "fwd")

    def call(arguments: Arguments) -> Tensor:
        inside = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
        if arguments.get("lower_bound") is None or not all(arguments.get(name) for name in inside):
            raise NotImplementedError("has norm, bounded gate and sigmoid inside: --gates bounded --norm inside")
        q, v = arguments["q"], arguments["v"]
        o = v.new_empty(v.shape)
        tensors = (q, arguments["k"], v, arguments["g"], arguments["beta"])
        options = [arguments[name] for name in ("A_log", "dt_bias", "lower_bound")]
        fwd(*tensors, q.shape[-1] ** -0.5, o, *options, cu_seqlens=arguments.get("cu_seqlens"))
        return o

    return Loaded("flash_kda.fwd", call)


def _attention_gym(name: str) -> Callable[[], Loaded]:
    """Loader of an operator of attention-gym, which takes normalised keys and decays that are given."""

    def load() -> Loaded:
        function = _imported("attn_gym.linear", name)

        def call(arguments: Arguments) -> Tensor:
            _require_given(arguments, norm=True)
            cu_seqlens = _boundaries(arguments) if "cu_seqlens" in arguments else None
            o: Tensor = function(*(arguments[of] for of in ("q", "k", "v", "g", "beta")), cu_seqlens=cu_seqlens)[0]
            return o

        return Loaded(_named(function), call)

    return load


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
                "chunk_gated_delta_product": (
                    Adapter(_fla("ops.gated_delta_product", "chunk_gated_delta_product"), tuned=True),
                ),
                "chunk_gla": (Adapter(_fla("ops.gla", "chunk_gla"), tuned=True),),
                **_fla_low_rank(),
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
                "fused_recurrent_gla": (Adapter(_fla_recurrent_gla),),
                "solve_tril": (Adapter(_fla("ops.utils.solve_tril", "solve_tril")),),
                "chunk_scaled_dot_kkt": (Adapter(_fla_kkt),),
                "causal_conv1d": (Adapter(_fla("modules.causal_conv1d", "causal_conv1d")),),
                "rms_norm_gated": (Adapter(_fla("modules.norm.fused_norm_gate", "rms_norm_gated", bias=None)),),
                "l2norm": (Adapter(_fla("modules.norm.l2norm", "l2norm")),),
                "fused_gdn_gate": (Adapter(_fla("ops.gated_delta_rule.gate", "fused_gdn_gate")),),
                "fused_kda_gate": (Adapter(_fla("ops.kda.gate", "fused_kda_gate")),),
                **{name: (Adapter(_fla_layer(name)),) for name in LAYERS.values()},
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
        Peer(
            "flash-kda",
            "flash_kda",
            "pip install tokenspeed-flashkda",
            {"chunk_kda": (Adapter(_flash_kda, backward=False),)},
            packages=("tokenspeed-flashkda",),
        ),
        Peer(
            "attention-gym",
            "attn_gym",
            'pip install "attn-gym[linear]"',
            {
                "chunk_gated_delta_rule": (Adapter(_attention_gym("chunk_gdn")),),
                "chunk_kda": (Adapter(_attention_gym("chunk_kda")),),
            },
            packages=("attn-gym", "nvidia-cutlass-dsl"),
        ),
    )
}
