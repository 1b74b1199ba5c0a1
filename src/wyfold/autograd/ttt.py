"""TTT-Linear, over whole sequences or resumed inside a mini-batch: one autograd function over two registered operators.

Two implementations order the launches of both directions: `ttt_kernels`, which take a whole call, and `ttt_eager`,
which runs a call part by part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wyfold.autograd import ttt_eager, ttt_kernels
from wyfold.autograd.ttt_eager import TTTGradients
from wyfold.autograd.ttt_records import (
    DIFFERENTIABLE,
    OPTIONS_SCHEMA,
    TENSORS,
    TENSORS_SCHEMA,
    TTTOptions,
    TTTResult,
    TTTTensors,
    empty_gradients,
    empty_result,
)
from wyfold.kernels.ttt_records import State, StateViews
from wyfold.runtime.differentiation import once_differentiable
from wyfold.runtime.torch_ops import call, register


def run(tensors: TTTTensors, options: TTTOptions) -> tuple[TTTResult, list[Tensor]]:
    """Run the forward operator outside of autograd.

    Returns:
        The results, and the tensors that the backward reads besides the call's own.
    """
    *result, saved = call(_forward_op, *tensors, *options)
    return TTTResult(*result), saved


def run_backward(
    tensors: TTTTensors, saved: list[Tensor], gradients: Sequence[Tensor | None], options: TTTOptions
) -> list[Tensor]:
    """Return the gradient of every differentiable tensor.

    Args:
        tensors, options: The call.
        saved: Second result of `run`.
        gradients: Gradients of the results except the position; None stands for zeros.
    """
    return list(call(_backward_op, *tensors, saved, *gradients, *options))


class TTT(torch.autograd.Function):
    """`wyfold::ttt_fwd`, with `wyfold::ttt_bwd` as its gradient."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        tensors, options = arguments[:-1], arguments[-1]
        *result, saved = call(_forward_op, *tensors, *options)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(result[-1])
        ctx.options = options
        ctx.save_for_backward(*tensors, *saved)
        return tuple(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        none = (None,) * (TENSORS + 1)
        if all(d is None for d in gradients):
            return none
        kept = ctx.saved_tensors  # read once: checkpointing refuses a second unpacking
        tensors, saved = kept[:TENSORS], list(kept[TENSORS:])
        needs = ctx.needs_input_grad[:DIFFERENTIABLE]
        found = call(_backward_op, *tensors, saved, *gradients[:-1], *ctx.options)
        wanted = (dx if need else None for dx, need in zip(found, needs, strict=True))
        return *wanted, *none[DIFFERENTIABLE:]


def _forward(*arguments: Any) -> tuple[Any, ...]:
    t, options = TTTTensors(*arguments[:TENSORS]), TTTOptions(*arguments[TENSORS:])
    result, saved = empty_result(t, options), _empty_saved(t, options)
    if options.backend == "eager":
        ttt_eager.forward(t, options, result, State(*saved))
    else:
        ttt_kernels.forward(t, options, result, saved)
    return *result, saved


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    t, options = TTTTensors(*arguments[:TENSORS]), TTTOptions(*arguments[TENSORS + 6 :])
    saved = arguments[TENSORS]
    # A compiler passes zero gradients for unused results, also for results without elements.
    returned = (True, *[options.final_state] * 2, *[options.final_state and options.recurrent] * 2)
    incoming = TTTGradients(
        *(d if asked else None for d, asked in zip(arguments[TENSORS + 1 : TENSORS + 6], returned, strict=True))
    )
    found = empty_gradients(t)
    if options.backend == "eager":
        ttt_eager.backward(t, options, State(*saved), incoming, found)
    else:
        ttt_kernels.backward(t, options, saved, incoming.do, StateViews(incoming.state, incoming.bias), found)
    return found


def _empty_saved(t: TTTTensors, options: TTTOptions) -> list[Tensor]:
    """Allocate the saved tensors, from metadata alone."""
    return ttt_eager.saved(t, options) if options.backend == "eager" else ttt_kernels.saved(t, options)


def _forward_fake(*arguments: Any) -> tuple[Any, ...]:
    t, options = TTTTensors(*arguments[:TENSORS]), TTTOptions(*arguments[TENSORS:])
    return *empty_result(t, options), _empty_saved(t, options)


def _forward_differentiated(*arguments: Any) -> tuple[Any, ...]:
    """Run the forward under autograd: the function saves for the backward, the operator returns empty tensors."""
    t, options = TTTTensors(*arguments[:TENSORS]), TTTOptions(*arguments[TENSORS:])
    result = TTT.apply(*t, options._replace(save=True))
    return *result, [t.v.new_empty(0) for _ in _empty_saved(t, options)]


def _backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    return empty_gradients(TTTTensors(*arguments[:TENSORS]))


_forward_op = register(
    f"ttt_fwd({TENSORS_SCHEMA}, {OPTIONS_SCHEMA}) -> (Tensor o, Tensor final_state, Tensor final_bias, "
    f"Tensor final_grad, Tensor final_bias_grad, Tensor final_position, Tensor[] saved)",
    _forward,
    _forward_fake,
    _forward_differentiated,
)
_backward_op = register(
    f"ttt_bwd({TENSORS_SCHEMA}, Tensor[] saved, Tensor? do, Tensor? dstate, Tensor? dbias, Tensor? dgrad, "
    f"Tensor? dbias_grad, {OPTIONS_SCHEMA}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dw, Tensor db, Tensor deta, "
    "Tensor deta_col, Tensor dinitial_state, Tensor dinitial_bias)",
    _backward,
    _backward_fake,
    of_gradients=True,
)
