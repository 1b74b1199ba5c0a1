"""Short convolution for serving: the latest inputs of every sequence live in pool slots, updated in place."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.autograd.serving_conv import serve_conv_op
from wyfold.kernels import table
from wyfold.kernels.trial import TOKENS, Sample, Trial, boundary_sample, sample
from wyfold.ops.serving_call import slot_samples
from wyfold.runtime import check
from wyfold.runtime.differentiation import refuse_transforms
from wyfold.runtime.kernel_configs import LaunchKey
from wyfold.runtime.layout import SequenceLayout, boundaries_of, packed_boundaries
from wyfold.runtime.replay_cache import PublicOperator, planned
from wyfold.runtime.torch_ops import call


def conv1d_update(
    x: Tensor,
    pool: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    state_indices: Tensor | None = None,
    cu_seqlens: Tensor | SequenceLayout | None = None,
    activation: str | None = None,
    has_initial_state: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    pad_slot_id: int = -1,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """`causal_conv1d` of one token, or a few drafted tokens, of each of N sequences; the pool is updated in place.

        y[t] = act(bias + sum_{i < W} weight[:, i] x[t - W + 1 + i])    inputs before x[0] from the pool:

        a = max(num_accepted_tokens[n], 1)
        before = pool[slot, :, a - 1 : a + W - 2]                       the W - 1 inputs before x[0]
        pool[slot, :, : W - 2 + T] = before[1:], x[0], .., x[T - 1]

    The counterpart of `decode` and `verify` for the convolution. A drafted token occupies one column of the slot; the
    next call skips rejected ones by `num_accepted_tokens`. A token has the bits of `causal_conv1d`, if the pool's dtype
    is at least as wide as that of x. No gradient and no device synchronisation. On a GPU it is one launch, with
    cu_seqlens two.

    Args:
        x: [N, D], [N, T, D], or packed [1, T, D] with cu_seqlens; float32, float16, bfloat16, or float64 (`eager`).
        pool: [slots, D, S] any float, S >= W - 1, updated in place. Each slot is contiguous, as [D, S] or as [S, D]
            (`pool.mT`). T of a dense batch is at most S - W + 2; the excess inputs of a longer packed sequence are not
            kept.
        weight: [D, W] any float, W from 2 to 8. The last column multiplies the current token.
        bias: [D] any float. None: 0.
        state_indices: [N] int32 or int64 slot of each sequence. None: sequence n uses slot n. A sequence whose slot is
            not above `pad_slot_id` or not in the pool is skipped: the pool is not accessed and its output is zero.
        cu_seqlens: [N+1] int32 or int64 boundaries of sequences packed into one row, or a `SequenceLayout`. An empty
            sequence leaves its slot unchanged.
        activation: None, "silu" or "swish" (the same).
        has_initial_state: [N] bool. False: the inputs before the first token are zeros. None: all True.
        num_accepted_tokens: [N] int32 or int64. Number of tokens of the previous call that were accepted. None: one.
        pad_slot_id: Indices up to and including this one mark padding rows.
        out: Output buffer, returned: shape and dtype of x. Must not overlap other tensors.
        backend: "eager", "triton" or "gluon" demands that backend. None: the best available one.

    Returns:
        y: Shape and dtype of x, zero past the last boundary; `out` if given.

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: A shape, dtype or device is wrong, a slot cannot hold that many tokens, or an argument requires a
            gradient.
        UnsupportedError: No backend, or not the demanded one, serves the device.

    Source:
        Short convolution of the token mixer: Gated DeltaNet, arXiv:2412.06464v3, section 3.4.

    Examples:
        >>> import torch
        >>> from wyfold import serving
        >>> pool, weight = torch.zeros(8, 16, 3), torch.randn(16, 4)
        >>> y = serving.conv1d_update(torch.randn(2, 16), pool, weight, state_indices=torch.tensor([5, -1]))
        >>> y.shape, [bool(row.any()) for row in y], [n for n in range(8) if pool[n].any()]
        (torch.Size([2, 16]), [True, False], [5])
    """
    cu, tokens = boundaries_of(cu_seqlens)
    tensors = x, pool, weight, bias, state_indices, has_initial_state, num_accepted_tokens, out, cu
    return planned(_CONV_SERVING, tensors, _Flags("conv1d_update", True, tokens, activation, pad_slot_id, backend))


def conv1d_prefill(
    x: Tensor,
    pool: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    state_indices: Tensor | None = None,
    cu_seqlens: Tensor | SequenceLayout | None = None,
    activation: str | None = None,
    has_initial_state: Tensor | None = None,
    pad_slot_id: int = -1,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """`causal_conv1d` of any number of tokens of each sequence, with initial and final inputs in pool slots.

        y[t] = act(bias + sum_{i < W} weight[:, i] x[t - W + 1 + i])    inputs before x[0]: pool[slot, :, : W - 1]
        pool[slot, :, : W - 1] = x[T - W + 1], .., x[T - 1]             pool[slot, :, W - 1 :] = 0

    An empty sequence keeps its W - 1 inputs, or gets zeros where `has_initial_state` is False. No gradient.

    Args:
        x: [B, T, D], or packed [1, T, D] with cu_seqlens; float32, float16, bfloat16, or float64 (`eager`).
        pool, weight, bias, state_indices, cu_seqlens, activation, has_initial_state, pad_slot_id, out, backend: As in
            `conv1d_update`.

    Returns:
        y: Shape and dtype of x, zero past the last boundary; `out` if given.

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: A shape, dtype or device is wrong, or an argument requires a gradient.
        UnsupportedError: No backend, or not the demanded one, serves the device.

    Source:
        Short convolution of the token mixer: Gated DeltaNet, arXiv:2412.06464v3, section 3.4.

    Examples:
        >>> import torch, wyfold
        >>> from wyfold import serving
        >>> x, pool, weight = torch.randn(1, 9, 16), torch.zeros(8, 16, 3), torch.randn(16, 4)
        >>> y = serving.conv1d_prefill(x, pool, weight, state_indices=torch.tensor([5]))
        >>> torch.equal(y, wyfold.causal_conv1d(x, weight)[0]), torch.equal(pool[5], x[0, -3:].T)
        (True, True)
    """
    cu, tokens = boundaries_of(cu_seqlens)
    tensors = x, pool, weight, bias, state_indices, has_initial_state, None, out, cu
    return planned(_CONV_SERVING, tensors, _Flags("conv1d_prefill", False, tokens, activation, pad_slot_id, backend))


class _Flags(NamedTuple):
    """Arguments of both operators that are no tensors.

    Attributes:
        op: Operator's name, for messages.
        drafts: Whether the slot keeps the inputs of every token (`conv1d_update`).
        tokens: Length of the buffer of a `SequenceLayout`, else None.
    """

    op: str
    drafts: bool
    tokens: int | None
    activation: str | None
    pad_slot_id: int
    backend: str | None


def _run(backend: str, tensors: tuple[Any, ...], values: tuple[Any, ...]) -> Tensor:
    (x, pool, weight, bias, slots, given, accepted, out, cu), flags = tensors, _Flags(*values)
    refuse_transforms(flags.op, *tensors)
    y: Tensor = x.new_empty(x.shape) if out is None else out
    rows, written = (x[:, None], y[:, None]) if x.ndim == 2 else (x, y)
    source = None if slots is None else slots[:, None]
    call(
        serve_conv_op, rows, weight, bias, pool, source, given, accepted, cu, written,
        flags.pad_slot_id, flags.drafts, flags.activation is not None, flags.op, backend,
    )  # fmt: skip
    return y


def _make_plan(tensors: tuple[Any, ...], values: tuple[Any, ...]) -> str:
    """Check the call and return the backend that will run it."""
    (x, pool, weight, bias, slots, given_states, accepted, out, cu), flags = tensors, _Flags(*values)
    op, drafts = flags.op, flags.drafts
    refuse_transforms(op, *tensors)
    check.choice(op, "activation", flags.activation, (None, "silu", "swish"))
    check.integer(op, "pad_slot_id", flags.pad_slot_id, least=-1)
    flat = drafts and cu is None and check.tensor(op, "x", x).ndim == 2
    shape = "N D" if flat else "B T D"
    sizes = check.shapes(op, optional=("bias",), x=(x, shape), weight=(weight, "D W"), bias=(bias, "D"))
    D, W = sizes["D"], sizes["W"]
    if not 2 <= W <= 8:
        raise ValueError(f"{op}: weight must be [D, W] with W from 2 to 8, got {list(weight.shape)}")
    if cu is not None:
        packed_boundaries(op, x, cu, flags.tokens)
    N = x.shape[0] if cu is None else cu.shape[0] - 1
    _check_pool(op, pool, D, W)
    capacity = pool.shape[2] - W + 2
    if drafts and not flat and cu is None and sizes["T"] > capacity:
        raise ValueError(
            f"{op}: x must have at most S - W + 2 = {capacity} tokens for the pool's slots, got {sizes['T']}"
        )
    if out is not None and check.tensor(op, "out", out).shape != x.shape:
        raise ValueError(f"{op}: out must have the shape of x, {list(x.shape)}, got {list(out.shape)}")
    given = {"x": x, "pool": pool, "weight": weight, "bias": bias, "out": out}
    check.floating(op, x=x, pool=pool, weight=weight, bias=bias, out=out)
    check.same_attribute(op, "device", **given)
    check.same_attribute(op, "dtype", x=x, out=out)
    check.no_overlap(op, pool=pool, out=out)
    check.rows(op, "state_indices", slots, [N], x=x)
    check.rows(op, "has_initial_state", given_states, [N], dtypes=(torch.bool,), x=x)
    check.rows(op, "num_accepted_tokens", accepted, [N], x=x)
    check.distinct_slots(op, slots, pool.shape[0], flags.pad_slot_id)
    check.no_gradients(op, given)
    plan = table.plan(
        op,
        x.device,
        flags.backend,
        forward=("conv_pool",) if drafts else ("state_pool", "conv"),
        grids=() if cu is None else ("chunk_grid",),
        dtypes=table.dtypes(*given.values()),
        keys=lambda: (
            [("conv_pool", LaunchKey(W=W))]
            if drafts
            else [("conv", LaunchKey(W=W, launch="conv")), ("state_pool", LaunchKey())]
        ),
        trials=lambda: (_trial(tensors, flags, most=capacity),),
    )
    return plan.backend


_CONV_SERVING = PublicOperator(_make_plan, _run)


def _trial(tensors: tuple[Any, ...], flags: _Flags, *, most: int) -> Trial:
    """A small call with the kernels of this one, of at most so many tokens if it keeps drafts."""
    x, pool, weight, bias, slots, given, accepted, _, cu = tensors
    tokens, D = min(most, 5) if flags.drafts else TOKENS, weight.shape[0]
    return Trial(
        flags.op,
        "serve_conv",
        (
            Sample("normal", x.dtype, "BT", (D,)),
            sample(weight, "normal", ""),
            sample(bias, "normal", ""),
            sample(pool, "normal", "S"),
            slot_samples(slots, None)[0],
            sample(given, "flags", "N"),
            sample(accepted, "accepted", "N"),
            boundary_sample(cu),
            Sample("normal", x.dtype, "BT", (D,)),
        ),
        (-1, flags.drafts, flags.activation is not None, flags.op, "triton"),
        (),
        sequences=9,
        tokens=tokens,
        packed=cu is not None,
        gradients=False,
    )


def _check_pool(op: str, pool: Tensor, D: int, W: int) -> None:
    got = list(check.tensor(op, "pool", pool).shape)
    if len(got) != 3 or got[1] != D or got[2] < W - 1:
        raise ValueError(f"{op}: pool must be [slots, D, S >= W-1] = [slots, {D}, >= {W - 1}], got {got}")
    if pool.stride()[1:] not in ((got[2], 1), (1, D)):
        raise ValueError(f"{op}: pool must hold each slot in one piece, got strides {pool.stride()}")
