"""Delta rules, chunk by chunk or token by token: one autograd function over two registered operators.

Six implementations order the launches of both directions:

    delta_chunk             chunk kernels, which take a whole call
    low_rank_chunk          chunk kernels of the diagonal-plus-low-rank rules
    low_rank_recurrent      their recurrent kernel, and a backward by the chunk kernels
    delta_recurrent         recurrent kernels, which take a whole call token by token
    delta_eager             the eager backend, which runs a call in workspace-sized parts
    delta_eager_segments    the eager backend with sequences cut into segments, as the chunk kernels cut them
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from wyfold.autograd import (
    delta_chunk,
    delta_eager,
    delta_eager_segments,
    delta_recurrent,
    low_rank_chunk,
    low_rank_recurrent,
)
from wyfold.autograd.delta_records import (
    TENSORS,
    DeltaBackwardInputs,
    DeltaResult,
    DeltaTensors,
    as_input_grads,
    empty_result,
    gradient_needs,
)
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.differentiation import once_differentiable
from wyfold.runtime.options import DELTA_SCHEMA, DeltaOptions
from wyfold.runtime.torch_ops import call, register

TENSORS_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? initial_state, Tensor? A_log, Tensor? dt_bias, "
    "Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, Tensor? a, Tensor? b, Tensor? w"
)


def run(tensors: DeltaTensors, options: DeltaOptions) -> tuple[DeltaResult, list[Tensor]]:
    """Run the forward operator outside of autograd.

    Returns:
        The results, and the tensors that the backward reads besides the call's own.
    """
    o, final_state, states, saved = call(_forward_op, *tensors, *options)
    return DeltaResult(o, final_state, states), saved


def run_backward(given: DeltaBackwardInputs) -> list[Tensor]:
    """Return the gradient of every differentiable tensor; it has no elements where `needs` is False."""
    found = iter(call(_backward_op, *given.tensors, given.saved, given.do, given.dST, given.needs, *given.options))
    return [next(found) if need else given.empty_grad(index) for index, need in enumerate(given.needs)]


class Delta(torch.autograd.Function):
    """`wyfold::delta_fwd`, with `wyfold::delta_bwd` as its gradient."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        *tensors, options = arguments
        o, final_state, states, saved = call(_forward_op, *tensors, *options)
        ctx.set_materialize_grads(False)
        ctx.options = options
        ctx.save_for_backward(*tensors, *saved)
        if options.checkpoint_every:
            ctx.mark_non_differentiable(states)
        # A result that is no tensor costs autograd nothing.
        return o, final_state if options.final_state else None, states if options.checkpoint_every else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dST: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors  # read once: checkpointing refuses a second unpacking
        tensors, saved = kept[:TENSORS], list(kept[TENSORS:])
        needs = gradient_needs(ctx.options, ctx.needs_input_grad)
        # A compiler passes zero gradients for all results, also for the empty ones of results that were not requested.
        dST = dST if ctx.options.final_state else None
        if do is None and dST is None:
            return (None,) * (TENSORS + 1)
        found = iter(call(_backward_op, *tensors, saved, do, dST, needs, *ctx.options))
        return as_input_grads([next(found) if need else None for need in needs], TENSORS + 1)


class DeltaImplementation(Protocol):
    """An implementation of both directions of the delta family: a module that orders the launches."""

    def forward(
        self, t: DeltaTensors, options: DeltaOptions, out: Tensor | None = None, grid: ChunkGrid | None = None
    ) -> tuple[DeltaResult, list[Tensor]]:
        """Run the forward.

        Args:
            t, options: The call.
            out: [B, T, HV, V] output buffer; None allocates one. If a buffer is given, intermediate states that
                belong to no sequence are not zeroed.
            grid: Chunk grid of the call; None makes one.

        Returns:
            The results, and the tensors that the backward reads besides the call's own.
        """

    def saved(self, t: DeltaTensors, options: DeltaOptions) -> list[Tensor]:
        """Allocate tensors like those that `forward` saves, uninitialized, from metadata alone."""

    def backward(self, given: DeltaBackwardInputs) -> list[Tensor]:
        """Compute the gradients, in buffers as `DeltaBackwardInputs.empty_grads` allocates them."""


def implementation_for(options: DeltaOptions) -> DeltaImplementation:
    """Return the implementation of a backend and a form (chunk or recurrent)."""
    if options.backend == "eager":
        return delta_eager_segments if options.segment_chunks else delta_eager
    if options.rule != "delta":
        return low_rank_recurrent if options.recurrent else low_rank_chunk
    return delta_recurrent if options.recurrent else delta_chunk


def _forward(*arguments: Any) -> tuple[Any, ...]:
    t, options = DeltaTensors(*arguments[:TENSORS]), DeltaOptions(*arguments[TENSORS:])
    result, saved = implementation_for(options).forward(t, options)
    return *result, saved


def _backward(*arguments: Any) -> list[Tensor]:
    """Compute the gradients of the tensors that need one, in their order."""
    given = _given(*arguments)
    return given.needed(implementation_for(given.options).backward(given))


def _forward_fake(*arguments: Any) -> tuple[Any, ...]:
    t, options = DeltaTensors(*arguments[:TENSORS]), DeltaOptions(*arguments[TENSORS:])
    return *empty_result(t, options), implementation_for(options).saved(t, options)


def _backward_fake(*arguments: Any) -> list[Tensor]:
    given = _given(*arguments)
    return given.needed(given.empty_grads())


def _forward_differentiated(*arguments: Any) -> tuple[Any, ...]:
    """Run the forward under autograd: the function saves for the backward, the operator returns empty tensors."""
    t, options = DeltaTensors(*arguments[:TENSORS]), DeltaOptions(*arguments[TENSORS:])
    o, *others = Delta.apply(*t, options._replace(save=True))
    # The operator returns tensors only: an empty one in place of a result that was not asked for.
    final_state, states = (o.new_empty(0, dtype=options.state_dtype) if x is None else x for x in others)
    return o, final_state, states, [o.new_empty(0) for _ in implementation_for(options).saved(t, options)]


def _given(*arguments: Any) -> DeltaBackwardInputs:
    saved, do, dST, needs, *options = arguments[TENSORS:]
    return DeltaBackwardInputs(DeltaTensors(*arguments[:TENSORS]), DeltaOptions(*options), saved, do, dST, needs)


_forward_op = register(
    f"delta_fwd({TENSORS_SCHEMA}, {DELTA_SCHEMA}) -> (Tensor o, Tensor final_state, Tensor states, Tensor[] saved)",
    _forward,
    _forward_fake,
    _forward_differentiated,
)
_backward_op = register(
    f"delta_bwd({TENSORS_SCHEMA}, Tensor[] saved, Tensor? do, Tensor? dST, bool[] needs, {DELTA_SCHEMA}) -> Tensor[]",
    _backward,
    _backward_fake,
    of_gradients=True,
)
