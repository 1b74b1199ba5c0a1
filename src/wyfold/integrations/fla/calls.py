"""fla's calls, run by Wyfold's operators with fla's meaning of every argument, or declined with a reason.

Arguments are named as in fla 0.5.2 and 0.6.0. The functions under fla's names (`recurrences`, `pieces`, `gated_norms`)
then run the call; here is only what differs because fla's own callers make it: flags that are None, and arguments that
fla ignores.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.integrations.fla import gated_norms, pieces, recurrences
from wyfold.runtime.torch_modes import autocast_dtype

Arguments = dict[str, Any]

_FLAGS = (
    "output_final_state",
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
    "safe_gate",
    "disable_recompute",
    "state_v_first",
)


class Declined(Exception):
    """Wyfold leaves this call to fla; the message is the reason."""


class Operator(NamedTuple):
    """One of fla's functions that Wyfold can run.

    Attributes:
        module: Module of fla that has it, in every supported version.
        registry: Whether fla's own registry of backends dispatches the whole function.
        ours: Function with fla's argument names.
        prepare: Changes the arguments of a call to those of `ours`, in place; raises Declined.
    """

    module: str
    registry: bool
    ours: Callable[..., Any]
    prepare: Callable[[Arguments], None]


def run(name: str, arguments: Arguments) -> Any:
    """Result of fla's function `name` on these arguments, computed by Wyfold.

    Raises:
        Declined: Wyfold cannot run the call as fla would; nothing was computed.
    """
    operator = OPERATORS[name]
    if unknown := arguments.keys() - _parameters(operator.ours):
        raise Declined(f"unknown keyword {', '.join(sorted(unknown))}")
    if arguments.get("cp_context") is not None:
        raise Declined("a cp_context of fla, which has only this rank's boundaries")
    arguments = dict(arguments)
    operator.prepare(arguments)
    try:
        with _without_autocast(arguments):
            return operator.ours(**arguments)
    except (TypeError, ValueError) as refusal:  # operators check before any work
        raise Declined(" ".join(str(refusal).split())) from refusal


def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    if function not in _known:
        _known[function] = frozenset(inspect.signature(function).parameters)
    return _known[function]


_known: dict[Callable[..., Any], frozenset[str]] = {}


def _without_autocast(arguments: Arguments) -> contextlib.AbstractContextManager[Any]:
    """fla's kernels compute in the dtypes they are given, so autocast must not change q, k and v here."""
    first = arguments.get("q", arguments.get("x"))
    device = first.device.type if isinstance(first, Tensor) else "cpu"
    return contextlib.nullcontext() if autocast_dtype(device) is None else torch.autocast(device, enabled=False)


def _delta(arguments: Arguments) -> None:
    """Common to the delta rules: flags may be None or numbers, and parameters of an unused gate are ignored."""
    for flag in _FLAGS:
        if flag in arguments:
            arguments[flag] = bool(arguments[flag])
    if arguments.get("cu_seqlens") is None:
        arguments.pop("cu_seqlens_cpu", None)
    if not arguments.get("use_gate_in_kernel"):
        for unused in ("A_log", "dt_bias", "lower_bound"):
            arguments.pop(unused, None)
    elif arguments.get("A_log") is None and arguments.get("lower_bound") is None:
        raise Declined("use_gate_in_kernel without A_log, which fla refuses")


def _chunk_kda(arguments: Arguments) -> None:
    if arguments.get("use_graph"):
        raise Declined("use_graph, fla's fixed chunk list for CUDA graphs")
    if arguments.get("return_intermediate_states") and not torch.is_inference_mode_enabled():
        raise Declined("return_intermediate_states outside of inference mode, which fla refuses")
    _delta(arguments)
    if arguments.get("safe_gate") and arguments.get("use_gate_in_kernel") and arguments.get("lower_bound") is None:
        raise Declined("safe_gate with use_gate_in_kernel and without lower_bound, which fla refuses")


def _fused_recurrent_gdn(arguments: Arguments) -> None:
    if arguments.get("gv") is not None:
        raise Declined("gv, for which Wyfold does eight times the work")
    _delta(arguments)


def _conv(arguments: Arguments) -> None:
    if arguments.get("weight") is None:
        raise Declined("no weight")
    if "output_final_state" in arguments:
        arguments["output_final_state"] = bool(arguments["output_final_state"])
    if arguments.get("backend", "triton") != "triton":
        raise Declined(f"backend {arguments['backend']!r} was asked for")
    state, x = arguments.get("initial_state"), arguments.get("x")
    if isinstance(state, Tensor) and isinstance(x, Tensor) and state.dtype != x.dtype:
        raise Declined("a state of another dtype than x, in which fla returns it")


def _norm(arguments: Arguments) -> None:
    if arguments.get("residual") is not None or arguments.get("prenorm"):
        raise Declined("residual or prenorm, for which Wyfold has no kernel")
    if arguments.get("eps") == 0:
        raise Declined("eps=0, for which Wyfold has no kernel")


OPERATORS: dict[str, Operator] = {
    "chunk_delta_rule": Operator("fla.ops.delta_rule", False, recurrences.chunk_delta_rule, _delta),
    "chunk_gated_delta_rule": Operator("fla.ops.gated_delta_rule", True, recurrences.chunk_gated_delta_rule, _delta),
    "chunk_kda": Operator("fla.ops.kda", True, recurrences.chunk_kda, _chunk_kda),
    "fused_recurrent_delta_rule": Operator("fla.ops.delta_rule", False, recurrences.fused_recurrent_delta_rule, _delta),
    "fused_recurrent_gated_delta_rule": Operator(
        "fla.ops.gated_delta_rule", False, recurrences.fused_recurrent_gated_delta_rule, _fused_recurrent_gdn
    ),
    "fused_recurrent_kda": Operator("fla.ops.kda", False, recurrences.fused_recurrent_kda, _delta),
    "causal_conv1d": Operator("fla.modules.convolution", False, pieces.causal_conv1d, _conv),
    "rms_norm_gated": Operator("fla.modules.fused_norm_gate", False, gated_norms.rms_norm_gated, _norm),
}
"""fla's functions, by name."""
