"""What Triton's interpreter does again and again, done once: its tests take a tenth of the time. No number
changes but the last bits of sums that several tiles are reduced to at once, which are numpy's as those of one tile are.

- It puts its own functions in place of the language's at every call of a device function, where the kernel's launch has
  done so.
- It makes the type of a tile anew for every tile, its shape taken apart and put together several times on the way.
- It reduces several tiles at once element by element, also where all that is done is to add them up.
- It looks for an overflow in every sum and product of integers, by a dozen operations, and outside debugging does not
  say what it found.
- It compares shapes that are the same, and types that are one, part by part; and makes a table of types to look one up.
- It brings the operands of every sum, product and comparison to one type and one shape by a dozen calls, also where
  they have one type and numpy brings them to one shape itself; and makes a tile of every number.

`take()` changes the interpreter of this process for good. Tests alone use it.
"""

import builtins
import functools
import inspect
import math
import operator
import string
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.core import block_type, constexpr, tensor
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, ReduceOps, TensorHandle


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


@functools.cache
def adds(combine: Callable[..., Any]) -> bool:
    """Whether a function adds the halves of what it is given, one by one; if it does, it does so with letters."""
    letters = string.ascii_letters[: len(inspect.signature(combine).parameters)]
    middle = len(letters) // 2
    try:
        return combine(*letters) == builtins.tuple(map(operator.add, letters[:middle], letters[middle:]))
    except (AttributeError, TypeError, ValueError):
        return False


def summing(apply: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction of several tiles; where it adds, each is summed as a single one is."""

    @functools.wraps(apply)
    def applied(self: ReduceOps, tiles: Any) -> Any:
        if isinstance(self.combine_fn, InterpretedFunction) and adds(self.combine_fn.fn):
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


NUMPY_HAS = {"fp32": np.float32, "fp16": np.float16, "int32": np.int32, "int64": np.int64}
"""Types of elements, by their name, that numpy computes in as they are."""

WIDER = {frozenset(("int32", "int64")): tl.int64, frozenset(("fp16", "fp32")): tl.float32}
"""Two of them that numpy brings to the same one as Triton does."""


KINDS: dict[tuple[str, tuple[int, ...], tuple[int, ...]], block_type | None] = {}


def fitting(scalar: tl.dtype, one: tuple[int, ...], other: tuple[int, ...]) -> block_type | None:
    """The type of the tile that two of these shapes give; None where Triton has to say."""
    key = (scalar.name, one, other)
    if key not in KINDS:
        fits = len(one) == len(other) and all(a == b or 1 in (a, b) for a, b in zip(one, other, strict=True))
        KINDS[key] = block_type(scalar, list(map(max, one, other))) if fits else None
    return KINDS[key]


def joint(scalar: tl.dtype, one: tl.dtype, other: tl.dtype) -> tl.dtype | None:
    """The type that two operands' shapes give, with these elements."""
    if not one.is_block() and not other.is_block():
        return scalar
    shapes = [kind.shape.values for kind in (one, other) if kind.is_block()]
    return fitting(scalar, builtins.tuple(shapes[0]), builtins.tuple(shapes[-1]))


def number(x: Any, kind: type) -> Any:
    """A number as an element of a tile that it is added to or compared with; None where Triton has to say.

    A comparison gives the number a type of its own first, of 32 bits, and brings both to the wider one.
    """
    if type(x) is int:
        fits = -(2**31) <= x < 2**31
    elif type(x) is float:
        fits = kind is np.float32 and (x == 0 or 2**-126 <= abs(x) < 2**127)
    else:
        fits = False
    return kind(x or 0) if fits else None  # a zero has no sign there


def brought_by_numpy(x: tensor, y: Any) -> tuple[Any, tl.dtype, tl.dtype] | None:
    """What numpy is given for y, type of the elements and type of the tile that come of it and x; None as above."""
    name = x.dtype.name
    if name not in NUMPY_HAS:
        return None
    if type(y) is constexpr:
        y = y.value
    if type(y) is tensor:
        scalar = x.dtype if y.dtype.name == name else WIDER.get(frozenset((name, y.dtype.name)))
        kind = scalar and joint(scalar, x.type, y.type)
        return kind and (y.handle.data, scalar, kind)
    element = number(y, NUMPY_HAS[name])
    return None if element is None else (element, x.dtype, x.type)


def at_once(compute: Callable[..., Any], turned: bool = False, compares: bool = False) -> Callable[..., Any]:
    """Makes an operator of tiles, given Triton's own, by a function of numpy; `turned` if the tile comes second."""

    def beside(told: Callable[..., Any]) -> Callable[..., Any]:
        def computed(x: tensor, y: Any) -> Any:
            given = brought_by_numpy(x, y)
            if given is None:
                return told(x, y)
            other, scalar, kind = given
            found = compute(other, x.handle.data) if turned else compute(x.handle.data, other)
            return tensor(TensorHandle(found, scalar), joint(tl.int1, kind, kind) if compares else kind)

        return computed

    return beside


def or_addressed(told: Callable[..., Any]) -> Callable[..., Any]:
    """A sum, of which the first may be a pointer."""
    added = at_once(np.add)(told)

    def computed(x: tensor, y: Any) -> Any:
        if not x.dtype.is_ptr() or type(y) is not tensor or y.dtype.name not in ("int32", "int64"):
            return added(x, y)
        kind = joint(x.dtype, x.type, y.type)
        if kind is None:
            return told(x, y)
        return tensor(interpreter.interpreter_builder.create_addptr(x.handle, y.handle), kind)

    return computed


def chosen(told: Callable[..., Any]) -> Callable[..., Any]:
    """`where`: elements of x or of y."""

    def computed(condition: Any, x: Any, y: Any, **options: Any) -> Any:
        if type(condition) is tensor and condition.dtype.name == "int1" and type(x) is tensor:
            given = brought_by_numpy(x, y)
            kind = given and joint(given[1], condition.type, given[2])
            if kind and (kind.is_block() is given[2].is_block()):
                found = np.where(condition.handle.data, x.handle.data, given[0])
                return tensor(TensorHandle(found, given[1]), kind)
        return told(condition, x, y, **options)

    return computed


ALL = slice(None)


def stretched(told: Callable[..., Any]) -> Callable[..., Any]:
    """`x[:, None]` and its like."""

    def viewed(x: tensor, at: Any) -> Any:
        if x.type.is_block() and type(at) is builtins.tuple and all(i is None or i == ALL for i in at):
            view = x.handle.data[at]
            return tensor(TensorHandle(view, x.handle.dtype.scalar), fitting(x.dtype, view.shape, view.shape))
        return told(x, at)

    return viewed


OPERATORS = {
    "__add__": or_addressed,
    "__radd__": at_once(np.add, turned=True),
    "__sub__": at_once(np.subtract),
    "__rsub__": at_once(np.subtract, turned=True),
    "__mul__": at_once(np.multiply),
    "__rmul__": at_once(np.multiply, turned=True),
    "__lt__": at_once(np.less, compares=True),
    "__le__": at_once(np.less_equal, compares=True),
    "__gt__": at_once(np.greater, compares=True),
    "__ge__": at_once(np.greater_equal, compares=True),
    "__eq__": at_once(np.equal, compares=True),
    "__ne__": at_once(np.not_equal, compares=True),
    "__getitem__": stretched,
}
"""Methods of a tile, by their names."""


def patch_attr(obj: Any, name: str, member: Callable[..., Any], builder: Any, scope: Any) -> None:
    """A function of the language, which is told each time of whom it is asked."""
    semantic = TritonSemantic(builder)

    def told(*arguments: Any, **options: Any) -> Any:
        options["_semantic"] = semantic
        return member(*arguments, **options)

    quicker = OPERATORS.get(name) if obj is tensor else chosen if name == "where" else None
    scope.set_attr(obj, name, quicker(told) if quicker else told)


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
