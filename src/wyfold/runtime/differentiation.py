"""Differentiation of registered operators: by an autograd function, once, outside the transforms of `torch.func`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from wyfold.runtime import check, replay_cache, torch_modes


def apply(op: str, function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """`function.apply(*arguments)` for a function whose backward is `once_differentiable`, also under compilers.

    A compiler traces a backward with gradients off, so the traced code does not notice gradients that are on when it
    runs. It also refuses a tensor that is passed twice, as in `f(x, x, v)`. The operator `wyfold::once` and a view on
    the tensors solve both.

    `torch.export` and `torch.jit.trace` do not keep autograd functions; the former drops the gradient without an error.
    They trace `function.forward`, which calls the registered operator. That operator uses its function again at run
    time. Where no derivative can be taken, `function.forward` is called alone as well.
    """
    if replay_cache.in_differentiated_call() and torch.is_grad_enabled():
        # Without the Python part of `apply`, which looks at every argument once more for wrappers of torch.func.
        return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]
    if torch_modes.in_plain_eager() and torch.is_grad_enabled():
        return function.apply(*arguments)
    if traced() or not torch_modes.differentiating():
        return function.forward(_DiscardingContext(), *arguments)
    if torch.compiler.is_compiling():
        arguments = tuple(
            [
                _once_op(x.view_as(x) if any(x is y for y in arguments[:n]) else x) if isinstance(x, Tensor) else x
                for n, x in enumerate(arguments)
            ]
        )
    refuse_transforms(op, *arguments)
    return function.apply(*arguments)


def refuse_transforms(op: str, *tensors: Any) -> None:
    """Refuse calls under `torch.func` (vmap, grad, jvp, ..), and tensors with tangents.

    Raises:
        RuntimeError: naming the operator and what to do.
    """
    if torch.compiler.is_compiling():
        return
    transform: Any = torch_modes.transforming()
    if transform is not None:
        kind = str(transform.key()).rpartition(".")[2].lower()
        raise RuntimeError(
            f"{op}: no tensor may be under a transform of torch.func, got {kind}; give a batch as the first dimension "
            "instead of vmap, and take gradients by backward() or torch.autograd.grad"
        )
    if getattr(forward_ad, "_current_level", -1) >= 0 and any(
        isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors
    ):
        raise RuntimeError(
            f"{op}: no tensor may have a tangent: forward-mode derivatives (jvp, forward_ad) are not there; take "
            "gradients by backward() or torch.autograd.grad"
        )


def traced() -> bool:
    """Whether calls are being exported or traced into a program, which may later run with or without gradients."""
    return exporting() or (not torch.compiler.is_compiling() and torch_modes.tracing() is not None)


def exporting() -> bool:
    """Whether `torch.export` is tracing.

    Under `torch.compile` of PyTorch 2.11 the public function returns True as well, and gradients would be dropped.
    """
    return torch.compiler._is_exporting_flag


class _DiscardingContext:
    """Autograd context that keeps nothing, for a call of a function's `forward` alone."""

    def set_materialize_grads(self, value: bool) -> None:
        """Do nothing."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Do nothing."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Do nothing."""


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a second derivative through this backward an error.

    PyTorch's decorator of this name raises only if an incoming gradient requires a gradient. After `y.sum()` none does,
    and a gradient penalty would ignore the operator without an error. Here autograd sees every gradient as a function
    of everything it is computed from: the saved tensors and the incoming gradients.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *gradients: Any) -> Any:
        if not torch.compiler.is_compiling():
            for dx in gradients:
                if dx is not None and _is_batched(dx):
                    return _backward_by_member(backward, ctx, gradients)
        if not torch.is_grad_enabled():
            return backward(ctx, *gradients)
        node = _UnpackedContext(ctx)
        # `_RefuseSecondDerivative` does not work under a transform of torch.func.
        if not torch.compiler.is_compiling() and torch_modes.transforming() is not None:
            raise RuntimeError(_SECOND_DERIVATIVE)
        with torch.no_grad():
            found = backward(node, *gradients)
        return _RefuseSecondDerivative.apply(found, *node.saved_tensors, *gradients)

    return once


_is_batched: Callable[[Tensor], bool] = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda x: False)
"""Whether a gradient is a batch of gradients, from `is_grads_batched=True` or `jacobian(vectorize=True)`."""

_LEVELS = 65
"""One more than the highest level of such a batch."""


def _backward_by_member(
    backward: Callable[..., Any], ctx: Any, gradients: tuple[Any, ...]
) -> tuple[Tensor | None, ...]:
    """Run a backward for every member of a batch of gradients, one after another. Its in-place writes rule out vmap."""
    first = next(dx for dx in gradients if dx is not None and _is_batched(dx))
    # vmap counts its levels on the calling thread, but autograd differentiates CUDA tensors on another thread.
    level = next(n for n in range(1, _LEVELS) if not _is_batched(torch._remove_batch_dim(first, n, 1, 0)))
    size = torch._remove_batch_dim(first, level, 1, 0).shape[0]
    members = [[None] * size if dx is None else torch._remove_batch_dim(dx, level, size, 0) for dx in gradients]
    node = _UnpackedContext(ctx, repeated=True)
    if check.any_requires_grad((*node.saved_tensors, *gradients)):
        raise RuntimeError(_SECOND_DERIVATIVE)
    found = [backward(node, *member) for member in zip(*members, strict=True)]
    return tuple([None if dxs[0] is None else torch._add_batch_dim(torch.stack(dxs), 0, level) for dxs in zip(*found)])


def by_member_under_vmap(backward: Callable[..., Any], ctx: Any, *gradients: Any) -> Any:
    """Call a backward under `torch.func.vmap` for every member of the batch of gradients, one after another.

    Backwards whose launches are in a registered operator do not need it: the operator has a vmap rule.
    """
    return _ByMember.apply(backward, _UnpackedContext(ctx, repeated=True), *gradients)


class _ByMember(torch.autograd.Function):
    """A call `backward(ctx, *gradients)`, with a vmap rule. The context's tensors are not in the batch."""

    @staticmethod
    def forward(backward: Callable[..., Any], ctx: Any, *gradients: Any) -> Any:
        return backward(ctx, *gradients)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep nothing: `once_differentiable` refuses second derivatives under a transform."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], backward: Callable[..., Any], ctx: Any, *gradients: Any) -> Any:
        """Stack the results for the members. Those of an empty batch have the shapes of a member of zeros."""
        size, given = info.batch_size, list(zip(gradients, in_dims[2:], strict=True))
        members = [[x if dim is None else x.select(dim, n) for x, dim in given] for n in range(size)]
        if not size:
            members = [[x if dim is None else x.new_zeros(x.movedim(dim, 0).shape[1:]) for x, dim in given]]
        found = zip(*[_ByMember.apply(backward, ctx, *member) for member in members], strict=True)
        stacked = tuple([None if dxs[0] is None else torch.stack(dxs)[:size] for dxs in found])
        return stacked, tuple([None if dx is None else 0 for dx in stacked])


class _UnpackedContext:
    """An autograd context whose saved tensors are unpacked once. Checkpointing raises at a second unpacking.

    Attributes:
        repeated: Whether a backward runs more than once on it.
    """

    def __init__(self, ctx: Any, *, repeated: bool = False):
        self._ctx, self.saved_tensors, self.repeated = ctx, ctx.saved_tensors, repeated

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


_SECOND_DERIVATIVE = (
    "wyfold operators are once differentiable: a gradient of their gradients was asked for (a gradient penalty, a "
    "Hessian, create_graph=True). Take it of wyfold.reference, which is PyTorch alone, or leave the operator out of "
    "what is differentiated twice, by detach()"
)


class _RefuseSecondDerivative(torch.autograd.Function):
    """Identity on gradients that depends, for autograd, on the tensors they were computed from; its backward raises."""

    @staticmethod
    def forward(ctx: Any, gradients: tuple[Tensor | None, ...], *sources: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(gradients)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        raise RuntimeError(_SECOND_DERIVATIVE)


class _Once(torch.autograd.Function):
    """Identity whose gradient cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor]:
        return (dx,)


def _once(x: Tensor) -> Tensor:
    return x if torch_modes.dispatch_modes() else _Once.apply(x)


_library = torch.library.Library("wyfold", "FRAGMENT")
_library.define("once(Tensor(a) x) -> Tensor(a)")
_library.impl("once", _once, "CompositeImplicitAutograd")
_once_op = torch.ops.wyfold.once.default
