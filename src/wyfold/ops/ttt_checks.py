"""Argument checks of TTT-Linear. Their order decides which of several errors is reported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from wyfold.context_parallel.context import ContextParallel
from wyfold.ops.rank_agreement import check_shard
from wyfold.ops.ttt_arguments import TTTCall
from wyfold.runtime import check
from wyfold.runtime.chunk_layout import CHUNK_SIZES
from wyfold.runtime.layout import SequenceLayout, packed_boundaries
from wyfold.runtime.torch_ops import in_autocast_dtype

WIDEST = 128
RESIDUALS = ("o", "q")


class CheckedTTT(NamedTuple):
    """A checked TTT-Linear call, with defaults applied.

    Attributes:
        q, k, v: In the dtype of an active autocast.
        packed_sequences: N of a packed batch and of every recurrent call; None if each row is a sequence.
        scale: Factor of q in the readout.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    packed_sequences: int | None
    scale: float


def check_call(call: TTTCall) -> CheckedTTT:
    """Run all checks of a call."""
    op, q, k, v, w, b, eta, eta_col, states, cu_seqlens, context, form, _, recurrent = call
    check.flag(
        op,
        output_final_state=form.final_state,
        state_v_first=form.state_v_first,
        disable_recompute=form.keep_states,
        batch_invariant=form.batch_invariant,
    )
    cu, N = check_tokens(op, q, k, v, w, b, eta, eta_col, cu_seqlens)
    given = N if context is None else _check_context(op, context, q, cu, form.chunk_size)
    if not recurrent:
        check.dtype_option(op, "state_dtype", form.state_dtype, check.state_dtypes(q))
        _check_initial(op, v, given, *states, v_first=form.state_v_first)
    elif states:
        _check_ttt_state(op, v, given, *states)
    check_form(op, form.chunk_size, form.residual, form.eps, q.dtype)
    q, k, v = in_autocast_dtype(q, k, v)
    scale = int(v.shape[-1]) ** -0.5 if form.scale is None else check.number(op, "scale", form.scale)
    check.same_attribute(op, "dtype", q=q, k=k, v=v)
    return CheckedTTT(q, k, v, None if cu is None and not recurrent else N, scale)


def check_tokens(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    eta: Tensor | float,
    eta_col: Tensor | float | None,
    cu_seqlens: Tensor | SequenceLayout | None,
) -> tuple[Tensor | None, int]:
    """Check the token tensors; return the boundaries as a tensor, and the number of sequences."""
    step, factor = (x if isinstance(x, Tensor) else None for x in (eta, eta_col))
    sizes = check.shapes(
        op,
        optional=[name for name, x in (("eta", step), ("eta_col", factor)) if x is None],
        q=(q, "B T H K"),
        k=(k, "B T H K"),
        v=(v, "B T HV V"),
        w=(w, "HV V"),
        b=(b, "HV V"),
        eta=(step, "B T HV" if step is not None and step.ndim == 3 else "B T HV 1"),
        eta_col=(factor, "B T HV" if factor is not None and factor.ndim == 3 else "B T HV 1"),
    )
    if step is None:
        check.number(op, "eta", eta)
    if factor is None and eta_col is not None:
        check.number(op, "eta_col", eta_col)
    check.head_groups(op, sizes["H"], sizes["HV"])
    check.width(op, "K", "q and k", sizes["K"], most=WIDEST)
    if sizes["V"] != sizes["K"]:
        raise ValueError(f"{op}: v must have the width of q and k, V = K = {sizes['K']}, got {sizes['V']}")
    check.floating(op, q=q, k=k, v=v, w=w, b=b, eta=step, eta_col=factor)
    check.same_attribute(op, "device", q=q, k=k, v=v, w=w, b=b, eta=step, eta_col=factor)
    if cu_seqlens is None:
        return None, sizes["B"]
    cu = packed_boundaries(op, q, cu_seqlens)
    return cu, cu.shape[0] - 1


def _check_context(op: str, context: ContextParallel, q: Tensor, cu: Tensor | None, chunk_size: int) -> int:
    """Check that ranks' borders lie between mini-batches; return the number of sequences that begin on this rank."""
    check_shard(op, context, "q", q, cu)
    for piece in (piece for chain in context.partition.chains for piece in chain[:-1]):
        end = piece.done + piece.length
        if chunk_size in CHUNK_SIZES and end % chunk_size:
            raise ValueError(
                f"{op}: cp_context must cut sequences between mini-batches, at multiples of chunk_size = {chunk_size} "
                f"tokens, got sequence {piece.sequence} cut after {end}; layout='fragments' cuts anywhere"
            )
    return q.shape[0] * len(context.starts)


def _check_initial(op: str, v: Tensor, N: int, state: Tensor | None, bias: Tensor | None, *, v_first: bool) -> None:
    order = "N HV V K" if v_first else "N HV K V"
    named = {"initial_state": (state, order), "initial_state_bias": (bias, "N HV 1 V")}
    _check_states(op, v, N, named, optional=tuple(named))


def _check_ttt_state(
    op: str, v: Tensor, N: int, state: Tensor, bias: Tensor, grad: Tensor, bias_grad: Tensor, position: Tensor
) -> None:
    """Check the fields of a TTTState."""
    check.tensor(op, "state.position", position)
    named: dict[str, tuple[Tensor | None, str]] = {
        "state.state": (state, "N HV K V"),
        "state.bias": (bias, "N HV 1 V"),
        "state.grad": (grad, "N HV K V"),
        "state.bias_grad": (bias_grad, "N HV 1 V"),
    }
    _check_states(op, v, N, named)
    if list(position.shape) != [N] or position.dtype not in (torch.int32, torch.int64):
        got = f"{list(position.shape)} {str(position.dtype).removeprefix('torch.')}"
        raise ValueError(f"{op}: state.position must be [N] = [{N}] int32 or int64, got {got}")
    check.same_attribute(op, "device", v=v, **{"state.position": position})


def _check_states(
    op: str, v: Tensor, N: int, states: Mapping[str, tuple[Tensor | None, str]], *, optional: tuple[str, ...] = ()
) -> None:
    """Check shapes, device and dtypes of states against the tokens."""
    sizes = {"N": N, "HV": v.shape[2], "K": v.shape[3], "V": v.shape[3]}
    check.shapes(op, optional=optional, known=sizes, **states)
    tensors = {name: state for name, (state, _) in states.items()}
    check.floating(op, check.state_dtypes(v), **tensors)
    check.same_attribute(op, "device", v=v, **tensors)


def check_form(op: str, chunk_size: int, residual: str, eps: float, dtype: torch.dtype) -> None:
    """Check the model's options: mini-batch size, residual and eps."""
    check.choice(op, "chunk_size", chunk_size, CHUNK_SIZES)
    check.choice(op, "residual", residual, RESIDUALS)
    check.epsilon(op, eps, torch.float64 if dtype == torch.float64 else torch.float32)
