"""Short causal convolution, applied to q, k and v before a recurrence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wyfold.autograd.conv import Conv, ConvTensors
from wyfold.autograd.serving_conv import one_row
from wyfold.context_parallel.context import ContextParallel
from wyfold.context_parallel.conv import ConvAcrossRanks
from wyfold.kernels import table
from wyfold.kernels.trial import Trial, boundary_sample, sample
from wyfold.ops.rank_agreement import check_shard, ranked_call
from wyfold.runtime import check
from wyfold.runtime.differentiation import apply
from wyfold.runtime.kernel_configs import LaunchKey
from wyfold.runtime.layout import SequenceLayout, boundaries_of, packed_boundaries
from wyfold.runtime.replay_cache import PublicOperator, find_call, planned

_NAME = "causal_conv1d"


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | SequenceLayout | None = None,
    cp_context: ContextParallel | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Depthwise causal convolution over time, with a short filter.

        y[t] = act(bias + sum_{i < W} weight[:, i] x[t - W + 1 + i]) + residual[t]

    Inputs before a sequence's first token come from its state, or are zero. A token's bits depend only on its own input
    and the W - 1 before it. A packed batch is therefore bit-identical to separate calls, and a call split anywhere and
    resumed from its state to one call. Differentiable in every tensor argument, through y and the final state.

    Args:
        x: [B, T, D] float32, float16, bfloat16 or float64.
        weight: [D, W] any float, W from 2 to 8. The last column multiplies the current token.
        bias: [D] any float. None: 0.
        residual: [B, T, D] any float. Added after the activation.
        initial_state: [N, D, S] any float, S >= W-1; N = B, or the number of packed sequences. The latest inputs,
            oldest first. None: zeros. Never written.
        output_final_state: Return the latest S inputs.
        activation: None, "silu" or "swish" (the same).
        cu_seqlens: [N+1] int32 or int64 boundaries of sequences packed into B = 1, or a `SequenceLayout`.
        cp_context: From `wyfold.cp.build_cp_context`, instead of cu_seqlens. The tensors are this rank's shard of a
            buffer split over a process group; the filter crosses its borders. States then have S = W-1: initial ones
            for the sequences that begin on this rank, final ones of those that end on it. One all-gather in each
            direction.
        backend: "eager", "triton" or "gluon" demands that backend. None: the best available one.

    Returns:
        y: [B, T, D], dtype of x. Exact zeros past the last boundary.
        final_state: [N, D, S], dtype of initial_state; without one [N, D, W-1], dtype of x. An empty sequence returns
            its initial state bit for bit. None without `output_final_state`.

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: A shape, dtype or device is wrong, W is outside 2 to 8, or the boundaries are invalid.
        UnsupportedError: No backend, or not the demanded one, serves the device.

    Source:
        Short convolution of the token mixer: Gated DeltaNet, arXiv:2412.06464v3, section 3.4.

    Examples:
        >>> import torch, wyfold
        >>> x, weight = torch.randn(2, 10, 8), torch.randn(8, 4)
        >>> y, state = wyfold.causal_conv1d(x, weight, activation="silu", output_final_state=True)
        >>> next_y, _ = wyfold.causal_conv1d(torch.randn(2, 1, 8), weight, activation="silu", initial_state=state)
        >>> y.shape, state.shape, next_y.shape
        (torch.Size([2, 10, 8]), torch.Size([2, 8, 3]), torch.Size([2, 1, 8]))
    """
    cu, tokens = boundaries_of(cu_seqlens)
    tensors = ConvTensors(x, weight, bias, residual, initial_state, cu)
    values = tokens, output_final_state, activation, backend
    if cp_context is None:
        return planned(CONV, tensors, values)
    with ranked_call(_NAME, cp_context, x) as ranked:
        known = find_call(CONV, tensors, (*values, cp_context.sizes, cp_context.conv1d_kernel_size))
        plan = lambda *_: _make_plan(tensors, values, cp_context)
        chosen = plan() if known is None else known.plan_by(plan)
    if ranked.compares:
        ranked.assert_same(_alike_on_ranks(tensors, activation))
    y, final_state = apply(
        _NAME, ConvAcrossRanks, *tensors, output_final_state, activation is not None, chosen, cp_context
    )
    return y, final_state if output_final_state else None


def _run(backend: str, tensors: tuple[Any, ...], values: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
    _, output_final_state, activation, _ = values
    y, final_state = apply(_NAME, Conv, *tensors, output_final_state, activation is not None, backend)
    return y, final_state if output_final_state else None


def _make_plan(t: ConvTensors, values: tuple[Any, ...], context: ContextParallel | None = None) -> str:
    """Check the call and return the backend that will run it."""
    (x, weight, bias, residual, initial_state, cu), (tokens, output_final_state, activation, backend) = t, values
    check.flag(_NAME, output_final_state=output_final_state)
    check.choice(_NAME, "activation", activation, (None, "silu", "swish"))
    sizes = check.shapes(
        _NAME,
        optional=("bias", "residual"),
        x=(x, "B T D"),
        weight=(weight, "D W"),
        bias=(bias, "D"),
        residual=(residual, "B T D"),
    )
    D, W = sizes["D"], sizes["W"]
    if not 2 <= W <= 8:
        raise ValueError(f"{_NAME}: weight must be [D, W] with W from 2 to 8, got {list(weight.shape)}")
    if cu is not None:
        packed_boundaries(_NAME, x, cu, tokens)
    N = sizes["B"] if cu is None else cu.shape[0] - 1
    if context is not None:
        _check_context(context, x, W, cu)
        N = sizes["B"] * len(context.starts)
    if initial_state is not None:
        got = list(check.tensor(_NAME, "initial_state", initial_state).shape)
        if context is not None and got != [N, D, W - 1]:
            raise ValueError(f"{_NAME}: initial_state must be [N, D, W-1] = [{N}, {D}, {W - 1}], got {got}")
        if len(got) != 3 or got[:2] != [N, D] or got[2] < W - 1:
            raise ValueError(f"{_NAME}: initial_state must be [N, D, S >= W-1] = [{N}, {D}, >= {W - 1}], got {got}")
    check.floating(_NAME, x=x, weight=weight, bias=bias, residual=residual, initial_state=initial_state)
    check.same_attribute(_NAME, "device", x=x, weight=weight, bias=bias, residual=residual, initial_state=initial_state)
    rows = {"x": x, "residual": residual}
    copies = tuple(name for name, row in rows.items() if row is not None and not one_row(row))
    plan = table.plan(
        _NAME,
        x.device,
        backend,
        forward=("conv",),
        backward=("conv",),
        dtypes=table.dtypes(x, weight, bias, residual, initial_state),
        copies=copies,
        collectives=() if context is None else _collectives(context, sizes),
        keys=lambda: [("conv", LaunchKey(W=W, launch=launch)) for launch in ("conv", "conv_bwd")],
        trials=lambda: (_trial(t, output_final_state, activation is not None),),
    )
    return plan.backend


CONV = PublicOperator(_make_plan, _run)


def _trial(t: ConvTensors, output_final_state: bool, activated: bool) -> Trial:
    """A small call with the kernels of this one."""
    return Trial(
        _NAME,
        "causal_conv1d_fwd",
        (
            sample(t.x, "normal", "BT"),
            sample(t.weight, "normal", ""),
            sample(t.bias, "normal", ""),
            sample(t.residual, "normal", "BT"),
            sample(t.initial_state, "normal", "N"),
            boundary_sample(t.cu_seqlens),
        ),
        (output_final_state, activated, "triton"),
        ("y", "state"),
        sequences=4,
        packed=t.cu_seqlens is not None,
        gradients=check.any_requires_grad(t[:5]),
    )


def _check_context(context: ContextParallel, x: Tensor, W: int, cu: Tensor | None) -> None:
    if context.conv1d_kernel_size not in (None, W):
        wanted = context.conv1d_kernel_size
        raise ValueError(f"{_NAME}: weight must have W = {wanted}, the context's conv1d_kernel_size, got W = {W}")
    check_shard(_NAME, context, "x", x, cu)


def _collectives(context: ContextParallel, sizes: dict[str, int]) -> tuple[str, ...]:
    """Descriptions of the call's collectives, one for each direction."""
    counts = {"forward": context.partition.most_outgoing, "backward": context.partition.most_incoming}
    size = f"{sizes['D']} x {sizes['W'] - 1} from each rank"
    return tuple(f"all-gather {way} of {count * sizes['B']} x {size}" for way, count in counts.items() if count)


def _alike_on_ranks(t: ConvTensors, activation: str | None) -> dict[str, object]:
    """Properties that must be equal on all ranks of a call."""
    (B, _, D), W = t.x.shape, t.weight.shape[1]
    grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in t)
    sizes = {"B": B, "D": D, "W": W, "dtype of x": t.x.dtype, "bias given": t.bias is not None}
    return {**sizes, "activated": activation is not None, "requires_grad": grad}
