"""The short convolution: one autograd function over two registered operators."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.kernels import table
from wyfold.kernels.conv import ConvGradients
from wyfold.runtime import check
from wyfold.runtime.differentiation import once_differentiable
from wyfold.runtime.layout import legal_boundaries
from wyfold.runtime.torch_ops import call, register
from wyfold.tile.rows.eager import widest

_NAME = "causal_conv1d"


class ConvTensors(NamedTuple):
    """Tensors of one call, as `causal_conv1d` documents them."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None

    def boundaries(self, backend: str) -> Tensor | int:
        """Boundaries of all sequences in one flat buffer; T alone for a dense batch on kernels.

        Kernels read boundaries on their device. The eager backend copies them to the CPU, which waits for the device.
        """
        B, T, _ = self.x.shape
        if self.cu_seqlens is None:
            return torch.arange(B + 1) * T if backend == "eager" else T
        if backend == "eager":
            return legal_boundaries(_NAME, self.cu_seqlens, T)
        if check.readable(self.cu_seqlens):
            legal_boundaries(_NAME, self.cu_seqlens, T)
        return self.cu_seqlens


TENSORS_SCHEMA = "Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? initial_state, Tensor? cu_seqlens"
DIFFERENTIABLE = len(ConvTensors._fields) - 1


class Conv(torch.autograd.Function):
    """`wyfold::causal_conv1d_fwd`, with `wyfold::causal_conv1d_bwd` as its gradient."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, output_final_state, activated, backend = arguments
        y, final_state = call(forward_op, *arguments)
        ctx.set_materialize_grads(False)
        ctx.final_state, ctx.options = output_final_state, (activated, backend)
        ctx.save_for_backward(*tensors)
        return y, final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        # A compiler passes zero gradients for all results, also for an empty final state that was not requested.
        dfinal = dfinal if ctx.final_state else None
        if dy is None and dfinal is None:
            return (None,) * len(ctx.needs_input_grad)
        needs = list(ctx.needs_input_grad[:DIFFERENTIABLE])
        found = iter(call(backward_op, *ctx.saved_tensors, dy, dfinal, needs, *ctx.options))
        return *(next(found) if need else None for need in needs), None, None, None, None


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    t = ConvTensors(*arguments[: len(ConvTensors._fields)])
    output_final_state, activated, backend = arguments[len(t) :]
    y, final_state = _outputs(t, output_final_state)
    table.kernel_module("conv", backend).conv(
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


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    t = ConvTensors(*arguments[: len(ConvTensors._fields)])
    return _outputs(t, arguments[len(t)])


def _outputs(t: ConvTensors, output_final_state: bool) -> tuple[Tensor, Tensor]:
    """Allocate the results, uninitialized, from metadata alone."""
    y = t.x.new_empty(t.x.shape)
    if not output_final_state:
        return y, t.x.new_empty(0)
    if t.initial_state is not None:
        return y, t.initial_state.new_empty(t.initial_state.shape)
    N = t.x.shape[0] if t.cu_seqlens is None else t.cu_seqlens.shape[0] - 1
    return y, t.x.new_empty(N, t.weight.shape[0], t.weight.shape[1] - 1)


def _backward(*arguments: Any) -> list[Tensor]:
    """Compute the gradients of the tensors that need one, in their order."""
    t = ConvTensors(*arguments[: len(ConvTensors._fields)])
    dy, dfinal, needs, activated, backend = arguments[len(t) :]
    dtype = widest(*t[:DIFFERENTIABLE])
    dx = t.x.new_empty(t.x.shape) if needs[0] else None
    dweight, dbias = (
        # A kernel writes once, and so rounds once: it needs no wide buffer.
        x.new_empty(x.shape, dtype=dtype if backend == "eager" else x.dtype) if need and x is not None else None
        for x, need in zip((t.weight, t.bias), needs[1:3])
    )
    dstate = None
    if needs[4] and t.initial_state is not None:
        dstate = t.initial_state.new_zeros(t.initial_state.shape, dtype=dtype)
    table.kernel_module("conv", backend).conv_bwd(
        t.x.flatten(0, 1),
        t.weight,
        t.bias,
        t.initial_state,
        t.boundaries(backend),
        activated,
        None if dy is None else dy.flatten(0, 1),
        dfinal,
        dtype,
        ConvGradients(
            None if dx is None else dx.flatten(0, 1), None if dweight is None else dweight.t(), dbias, dstate
        ),
    )
    dresidual = None
    if t.residual is not None and needs[3]:
        dresidual = t.residual.new_zeros(t.residual.shape)
        if dy is not None:
            dresidual.copy_(dy)
            if t.cu_seqlens is not None:
                token = torch.arange(dy.shape[1], device=dy.device)
                dresidual.masked_fill_((token >= t.cu_seqlens[-1])[:, None], 0)
    gradients = (dx, dweight, dbias, dresidual, dstate)
    return [dx.to(x.dtype) for dx, x in zip(gradients, t) if dx is not None and x is not None]


def _backward_fake(*arguments: Any) -> list[Tensor]:
    t = ConvTensors(*arguments[: len(ConvTensors._fields)])
    needs = arguments[len(t) + 2]
    return [x.new_empty(x.shape) for x, need in zip(t, needs) if need and x is not None]


forward_op = register(
    f"causal_conv1d_fwd({TENSORS_SCHEMA}, bool output_final_state, bool activated, str backend)"
    " -> (Tensor y, Tensor final_state)",
    _forward,
    _forward_fake,
    Conv.apply,
)
backward_op = register(
    f"causal_conv1d_bwd({TENSORS_SCHEMA}, Tensor? dy, Tensor? dfinal, bool[] needs, bool activated, str backend)"
    " -> Tensor[]",
    _backward,
    _backward_fake,
    of_gradients=True,
)
