"""What Triton's interpreter does again and again, done once: its tests take half the time. No number changes.

- It puts its own functions in place of the language's at every call of a device function, where the kernel's launch has
  done so.
- It makes the type of a tile anew for every tile, its shape taken apart and put together several times on the way.
- It reduces several tiles at once element by element, also where all that is done is to add them up.

`take()` changes the interpreter of this process for good. Tests alone use it.
"""

import builtins
import functools
import math
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.language.core import block_type, constexpr, tensor
from triton.runtime.interpreter import InterpretedFunction, ReduceOps


def replacing_once(call: Callable[..., Any]) -> Callable[..., Any]:
    """A device function's call: the kernel's launch has seen to `tl`, a first call sees to `tl.core` for good."""
    done = {id(tl)}

    @functools.wraps(call)
    def called(self: InterpretedFunction, *arguments: Any, **options: Any) -> Any:
        seen = {id(value) for value in self.fn.__globals__.values() if value is tl or value is tl.core}
        if not seen <= done:
            done.update(seen)
            return call(self, *arguments, **options)
        return self.rewrite()(*arguments, **options)

    return called


def remembering(init: Callable[..., None]) -> Callable[..., None]:
    """A tile type's constructor: two of one element type and shape are made of the same parts."""
    known: dict[Any, dict[str, Any]] = {}

    @functools.wraps(init)
    def made(self: block_type, element_ty: tl.dtype, shape: Any) -> None:
        sizes = builtins.tuple([size.value if isinstance(size, constexpr) else size for size in shape])
        key = (type(element_ty), str(element_ty), getattr(element_ty, "const", False), sizes)
        if key not in known:
            init(self, element_ty, list(sizes))
            known[key] = dict(self.__dict__)
        self.__dict__.update(known[key])

    return made


def tensor_init(self: tensor, handle: Any, type: tl.dtype) -> None:
    """A tile's constructor, with the parts of its shape from those of its type."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = shape_of(builtins.tuple(type.shape) if type.is_block() else ())


@functools.cache
def shape_of(sizes: tuple[int, ...]) -> tuple[Any, constexpr]:
    """A shape as tiles have it, and the number of their elements."""
    return tl.core.tuple([constexpr(size) for size in sizes]), constexpr(math.prod(sizes))


ADDING = ("add_two", "add_four")
"""Device functions that add pairwise."""


def summing(apply: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction of several tiles; where it adds, each is summed as a single one is."""

    @functools.wraps(apply)
    def applied(self: ReduceOps, tiles: Any) -> Any:
        if getattr(getattr(self.combine_fn, "fn", None), "__name__", "") in ADDING:
            return builtins.tuple([self.sum(tile) for tile in tiles])
        return apply(self, tiles)

    return applied


def take() -> None:
    """Make this process's interpreter faster; a second call changes nothing."""
    if tensor.__init__ is not tensor_init:
        InterpretedFunction.__call__ = replacing_once(InterpretedFunction.__call__)
        block_type.__init__ = remembering(block_type.__init__)
        tensor.__init__ = tensor_init
        ReduceOps.apply_impl = summing(ReduceOps.apply_impl)
