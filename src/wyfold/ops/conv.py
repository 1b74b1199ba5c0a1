"""The short convolution in front of a recurrence."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.ops.delta_call import packed_boundaries
from wyfold.pipelines.conv_serving import one_row
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout, legal_boundaries
from wyfold.runtime.register import once_differentiable, register
from wyfold.stages import table
from wyfold.stages.conv import ConvGradients
from wyfold.tile.rows.eager import widest

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
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Causal convolution over time, one short filter per channel.

        y[t] = act(bias + sum_{i < W} weight[:, i] x[t - W + 1 + i]) + residual[t]

    Inputs before a sequence's first token come from its state, or are zero. A token's bits depend on its own and the
    W - 1 inputs before it alone: packed equals separate, and a call cut anywhere and resumed from its state equals one.
    Differentiable in every tensor, the final state included.

    Args:
        x: [B, T, D] float32, float16, bfloat16 or float64.
        weight: [D, W] any float, W from 2 to 8. The last column meets the current token.
        bias: [D] any float. None: 0.
        residual: [B, T, D] any float. Added after the activation.
        initial_state: [N, D, S] any float, S >= W-1; N = B, or the number of packed sequences. The latest inputs,
            oldest first. None: zeros. Never written.
        output_final_state: Return the latest S inputs.
        activation: None, "silu" or "swish" (the same).
        cu_seqlens: [N+1] int32 or int64 boundaries of sequences packed into B = 1, or a `SequenceLayout`.
        backend: None for the table's choice; "eager", "triton" or "gluon" demands one.

    Returns:
        y: [B, T, D], dtype of x. Exact zeros past the last boundary.
        final_state: [N, D, S], dtype of initial_state; without one [N, D, W-1], dtype of x. An empty sequence returns
            its initial state bit for bit. None unless asked for.

    Raises:
        TypeError: an argument of the wrong Python type.
        ValueError: a wrong shape, dtype or device, W outside 2 to 8, or boundaries that are none.
        UnsupportedError: no backend, or not the demanded one, serves the device.

    Example:
        >>> import torch, wyfold
        >>> x, weight = torch.randn(2, 10, 8), torch.randn(8, 4)
        >>> y, state = wyfold.causal_conv1d(x, weight, activation="silu", output_final_state=True)
        >>> next_y, _ = wyfold.causal_conv1d(torch.randn(2, 1, 8), weight, activation="silu", initial_state=state)
        >>> y.shape, state.shape, next_y.shape
        (torch.Size([2, 10, 8]), torch.Size([2, 8, 3]), torch.Size([2, 1, 8]))
    """
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
    cu = None if cu_seqlens is None else packed_boundaries(_NAME, x, cu_seqlens)
    if initial_state is not None:
        N = sizes["B"] if cu is None else cu.shape[0] - 1
        got = list(check.tensor(_NAME, "initial_state", initial_state).shape)
        if len(got) != 3 or got[:2] != [N, D] or got[2] < W - 1:
            raise ValueError(f"{_NAME}: initial_state must be [N, D, S >= W-1] = [{N}, {D}, >= {W - 1}], got {got}")
    check.floating(_NAME, x=x, weight=weight, bias=bias, residual=residual, initial_state=initial_state)
    check.alike(_NAME, "device", x=x, weight=weight, bias=bias, residual=residual, initial_state=initial_state)
    rows = {"x": x, "residual": residual}
    copies = tuple(name for name, t in rows.items() if t is not None and not one_row(t))
    dtypes = table.dtypes(x, weight, bias, residual, initial_state)
    plan = table.plan(
        _NAME,
        x.device,
        backend,
        forward=("conv",),
        backward=("conv",),
        dtypes=dtypes,
        copies=copies,
        keys=lambda: [("conv", f"conv W{W}"), ("conv", f"conv_bwd W{W}")],
    )
    tensors = _Tensors(x, weight, bias, residual, initial_state, cu)
    y, final_state = _Conv.apply(*tensors, output_final_state, activation is not None, plan.backend)
    return y, final_state if output_final_state else None


class _Tensors(NamedTuple):
    """Tensors of one call, as `causal_conv1d` documents them."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None

    def boundaries(self, backend: str) -> Tensor | int:
        """Boundaries of all sequences laid one after another; kernels take the one length of a batch.

        They read boundaries where they are. Eager wants them on the CPU and waits.
        """
        B, T, _ = self.x.shape
        if self.cu_seqlens is None:
            return torch.arange(B + 1) * T if backend == "eager" else T
        if backend == "eager":
            return legal_boundaries(_NAME, self.cu_seqlens, T)
        if check.readable(self.cu_seqlens):
            legal_boundaries(_NAME, self.cu_seqlens, T)
        return self.cu_seqlens


_TENSORS_SCHEMA = "Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? initial_state, Tensor? cu_seqlens"
_DIFFERENTIABLE = len(_Tensors._fields) - 1


class _Conv(torch.autograd.Function):
    """`wyfold::causal_conv1d_fwd`, with `wyfold::causal_conv1d_bwd` as its gradient."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, output_final_state, activated, backend = arguments
        y, final_state = _forward_op(*arguments)
        ctx.set_materialize_grads(False)
        ctx.final_state, ctx.options = output_final_state, (activated, backend)
        ctx.save_for_backward(*tensors)
        return y, final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        # A compiler passes zeros for every result, the empty one nobody asked for among them.
        dfinal = dfinal if ctx.final_state else None
        if dy is None and dfinal is None:
            return (None,) * len(ctx.needs_input_grad)
        needs = list(ctx.needs_input_grad[:_DIFFERENTIABLE])
        found = iter(_backward_op(*ctx.saved_tensors, dy, dfinal, needs, *ctx.options))
        return *(next(found) if need else None for need in needs), None, None, None, None


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    t = _Tensors(*arguments[: len(_Tensors._fields)])
    output_final_state, activated, backend = arguments[len(t) :]
    y, final_state = _outputs(*arguments)
    table.launches("conv", backend).conv(
        t.x.flatten(0, 1),
        t.weight,
        t.bias,
        None if t.residual is None else t.residual.flatten(0, 1),
        t.initial_state,
        t.boundaries(backend),
        activated,
        y.flatten(0, 1),
        final_state if output_final_state else None,
    )
    return y, final_state


def _outputs(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Empty results; sizes come from metadata alone, so this is the operator's fake as well."""
    t = _Tensors(*arguments[: len(_Tensors._fields)])
    output_final_state = arguments[len(t)]
    y = t.x.new_empty(t.x.shape)
    if not output_final_state:
        return y, t.x.new_empty(0)
    if t.initial_state is not None:
        return y, t.initial_state.new_empty(t.initial_state.shape)
    N = t.x.shape[0] if t.cu_seqlens is None else t.cu_seqlens.shape[0] - 1
    return y, t.x.new_empty(N, t.weight.shape[0], t.weight.shape[1] - 1)


def _backward(*arguments: Any) -> list[Tensor]:
    """Gradients of the tensors that need one, in their order."""
    t = _Tensors(*arguments[: len(_Tensors._fields)])
    dy, dfinal, needs, activated, backend = arguments[len(t) :]
    dtype = widest(*t[:_DIFFERENTIABLE])
    sums = (t.weight.mT, t.bias, t.initial_state)
    dx = t.x.new_empty(t.x.shape) if needs[0] else None
    dweight, dbias, dstate = (
        x.new_zeros(x.shape, dtype=dtype) if need and x is not None else None
        for x, need in zip(sums, (needs[1], needs[2], needs[4]))
    )
    table.launches("conv", backend).conv_bwd(
        t.x.flatten(0, 1),
        t.weight,
        t.bias,
        t.initial_state,
        t.boundaries(backend),
        activated,
        None if dy is None else dy.flatten(0, 1),
        dfinal,
        dtype,
        ConvGradients(None if dx is None else dx.flatten(0, 1), dweight, dbias, dstate),
    )
    dresidual = None
    if t.residual is not None and needs[3]:
        dresidual = t.residual.new_zeros(t.residual.shape)
        if dy is not None:
            dresidual.copy_(dy)
            if t.cu_seqlens is not None:
                token = torch.arange(dy.shape[1], device=dy.device)
                dresidual.masked_fill_((token >= t.cu_seqlens[-1])[:, None], 0)
    gradients = (dx, None if dweight is None else dweight.t(), dbias, dresidual, dstate)
    return [dx.to(x.dtype).contiguous() for dx, x in zip(gradients, t) if dx is not None and x is not None]


def _backward_fake(*arguments: Any) -> list[Tensor]:
    t = _Tensors(*arguments[: len(_Tensors._fields)])
    needs = arguments[len(t) + 2]
    return [x.new_empty(x.shape) for x, need in zip(t, needs) if need and x is not None]


_forward_op = register(
    f"causal_conv1d_fwd({_TENSORS_SCHEMA}, bool output_final_state, bool activated, str backend)"
    " -> (Tensor y, Tensor final_state)",
    _forward,
    _outputs,
)
_backward_op = register(
    f"causal_conv1d_bwd({_TENSORS_SCHEMA}, Tensor? dy, Tensor? dfinal, bool[] needs, bool activated, str backend)"
    " -> Tensor[]",
    _backward,
    _backward_fake,
)
