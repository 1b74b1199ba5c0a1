"""Delta rules, chunk by chunk or token by token: one autograd function over two registered operators.

Four implementations order the launches of both directions:

    delta_chunk             chunk kernels, which take a whole call
    delta_recurrent         recurrent kernels, which take a whole call token by token
    delta_eager             the eager backend, which runs a call in workspace-sized parts
    delta_eager_segments    the eager backend with sequences cut into segments, as the chunk kernels cut them
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from wyfold.autograd import delta_chunk, delta_eager, delta_eager_segments, delta_recurrent
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
from wyfold.runtime.options import DELTA_SCHEMA, DeltaOptions
from wyfold.runtime.replay_cache import replayed
from wyfold.runtime.torch_ops import apply, call, differentiating, once_differentiable, register, traced

TENSORS_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? initial_state, Tensor? A_log, Tensor? dt_bias, "
    "Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, Tensor? a, Tensor? b, Tensor? w"
)


def delta(tensors: DeltaTensors, options: DeltaOptions) -> DeltaResult:
    """Run one call, differentiable if autograd is on."""
    if traced():  # a traced program decides itself what to save for its backward
        options = options._replace(save=False)
    if not differentiating():
        return run(tensors, options)[0]
    return DeltaResult(*apply(options.operator, Delta, *tensors, options))


def run(tensors: DeltaTensors, options: DeltaOptions) -> tuple[DeltaResult, list[Tensor]]:
    """Run the forward operator outside of autograd.

    Returns:
        The results, and the tensors that the backward reads besides the call's own.
    """

    def forward() -> tuple[Tensor, ...]:
        *result, saved = call(_forward_op, *tensors, *options)
        return *result, *saved

    o, final_state, states, *saved = replayed(tensors, ("delta_fwd", *options), forward)
    return DeltaResult(o, final_state, states), saved


def run_backward(given: DeltaBackwardInputs) -> list[Tensor]:
    """Return the gradient of every differentiable tensor; it has no elements where `needs` is False."""
    found: list[Tensor] = call(
        _backward_op, *given.tensors, given.saved, given.do, given.dST, given.needs, *given.options
    )
    return found


class Delta(torch.autograd.Function):
    """`wyfold::delta_fwd`, with `wyfold::delta_bwd` as its gradient."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        *tensors, options = arguments
        (o, final_state, states), saved = run(DeltaTensors(*tensors), options)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(states)
        ctx.options = options
        ctx.save_for_backward(*tensors, *saved)
        return o, final_state, states

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

        def gradients() -> tuple[Tensor | None, ...]:
            found = run_backward(DeltaBackwardInputs(DeltaTensors(*tensors), ctx.options, saved, do, dST, needs))
            return tuple([dx if need else None for dx, need in zip(found, needs, strict=True)])

        found = replayed((*kept, do, dST), ("delta_bwd", *needs, *ctx.options), gradients)
        return as_input_grads(found, TENSORS + 1)


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
    return delta_recurrent if options.recurrent else delta_chunk


def _forward(*arguments: Any) -> tuple[Any, ...]:
    t, options = DeltaTensors(*arguments[:TENSORS]), DeltaOptions(*arguments[TENSORS:])
    result, saved = implementation_for(options).forward(t, options)
    return *result, saved


def _backward(*arguments: Any) -> list[Tensor]:
    given = _given(*arguments)
    return given.to_input_dtypes(implementation_for(given.options).backward(given))


def _forward_fake(*arguments: Any) -> tuple[Any, ...]:
    t, options = DeltaTensors(*arguments[:TENSORS]), DeltaOptions(*arguments[TENSORS:])
    return *empty_result(t, options), implementation_for(options).saved(t, options)


def _backward_fake(*arguments: Any) -> list[Tensor]:
    given = _given(*arguments)
    return given.to_input_dtypes(given.empty_grads())


def _forward_differentiated(*arguments: Any) -> tuple[Any, ...]:
    """Run the forward under autograd: the function saves for the backward, the operator returns empty tensors."""
    t, options = DeltaTensors(*arguments[:TENSORS]), DeltaOptions(*arguments[TENSORS:])
    o, final_state, states = Delta.apply(*t, options._replace(save=True))
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
