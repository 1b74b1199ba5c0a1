"""Caches and shortcuts for Triton's interpreter, with which its tests take a tenth of the time.

Results are the same, except for the last bits of sums in reductions of several tiles at once: here numpy computes them
as it does for a single tile. What the unpatched interpreter does:

- It patches the language at every call of a device function, although the kernel's launch has done so.
- It constructs the type of every tile from its shape, which it takes apart and puts together several times.
- It reduces several tiles at once element by element, even if the reduction is a sum.
- It checks every sum and product of integers for overflow, with a dozen operations, and reports it only when debugging.
- It compares equal shapes and identical types part by part, and builds a table of types for every lookup.
- It compares the sizes of numpy's and Triton's type of every tile.
- It promotes and broadcasts the operands of every sum, product and comparison with a dozen calls, even if they have one
  type and numpy would broadcast them. It makes a tile of every number.

`install()` changes the interpreter of this process permanently. Only tests use it.
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


def patch_once(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a device function's call: `tl` is patched by the kernel's launch, and `tl.core` once by the first call."""
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


def cached_type(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a tile type's constructor: cache the attributes by element type and shape."""
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
    """Constructor of a tile that takes the shape from its type."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.parts if type.is_block() else NO_SHAPE


def handle_init(self: TensorHandle, data: Any, dtype: tl.dtype, attr: dict[str, Any] | None = None) -> None:
    """Constructor of a tile's data that does not compare the sizes of numpy's and Triton's type."""
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


def shape_of(sizes: tuple[int, ...]) -> tuple[Any, constexpr]:
    """A shape in the form that tiles store, and its number of elements."""
    return tl.core.tuple([constexpr(size) for size in sizes]), constexpr(math.prod(sizes))


NO_SHAPE = shape_of(())


@functools.cache
def is_addition(combine: Callable[..., Any]) -> bool:
    """Whether a combine function adds its two halves elementwise, found by calling it with letters."""
    letters = string.ascii_letters[: len(inspect.signature(combine).parameters)]
    middle = len(letters) // 2
    try:
        return combine(*letters) == builtins.tuple(map(operator.add, letters[:middle], letters[middle:]))
    except (AttributeError, TypeError, ValueError):
        return False


def sum_tiles(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a reduction of several tiles: if it adds, sum each tile like a single one."""

    @functools.wraps(apply)
    def applied(self: ReduceOps, tiles: Any) -> Any:
        if isinstance(self.combine_fn, InterpretedFunction) and is_addition(self.combine_fn.fn):
            return builtins.tuple([self.sum(tile) for tile in tiles])
        return apply(self, tiles)

    return applied


def skip_promotion(check: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap type checks of two operands: operands of one type only need broadcasting."""

    @functools.wraps(check)
    def checked(self: TritonSemantic, x: Any, y: Any, *options: Any, **named: Any) -> Any:
        plain = isinstance(x, tensor) and isinstance(y, tensor) and x.dtype is y.dtype and type(x.dtype) is tl.dtype
        # A division has other promotion rules; its last argument marks it.
        if plain and len(options) < 3 and not named:
            return self.broadcast_impl_value(x, y)
        return check(self, x, y, *options, **named)

    return checked


def only_when_debugging(check: Callable[..., None]) -> Callable[..., None]:
    """Wrap the overflow check of integer sums and products: run it only when debugging, since it reports nothing
    otherwise.
    """

    @functools.wraps(check)
    def checked(self: TritonSemantic, *operands: Any) -> None:
        if self.builder.options.debug:
            check(self, *operands)

    return checked


def broadcast_equal_rank(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap broadcasting of two operands: handle tiles of one rank that fit here, and leave the rest to Triton."""

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


def identity_first(equal: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap equality of types with an identity check."""

    @functools.wraps(equal)
    def same(self: tl.dtype, other: Any) -> bool:
        return self is other or (self.name == other.name if type(other) is tl.dtype else equal(self, other))

    return same


def cached_by_name(look_up: Callable[[tl.dtype], np.dtype]) -> Callable[[tl.dtype], np.dtype]:
    """Wrap the lookup of numpy's type for a scalar, tile or pointer type with a cache."""
    known: dict[str, np.dtype] = {}

    @functools.wraps(look_up)
    def found(kind: tl.dtype) -> np.dtype:
        name = kind.scalar.name
        if name not in known:
            known[name] = look_up(kind)
        return known[name]

    return found


NUMPY_TYPES = {"fp32": np.float32, "fp16": np.float16, "int32": np.int32, "int64": np.int64}
"""Element types that numpy computes in natively, by name."""

PROMOTED = {frozenset(("int32", "int64")): tl.int64, frozenset(("fp16", "fp32")): tl.float32}
"""Pairs of types that numpy promotes as Triton does."""


TILE_TYPES: dict[tuple[str, tuple[int, ...], tuple[int, ...]], block_type | None] = {}


def tile_type(scalar: tl.dtype, one: tuple[int, ...], other: tuple[int, ...]) -> block_type | None:
    """The tile type of two broadcast shapes; None if the operation is left to Triton."""
    key = (scalar.name, one, other)
    if key not in TILE_TYPES:
        fits = len(one) == len(other) and all(a == b or 1 in (a, b) for a, b in zip(one, other, strict=True))
        TILE_TYPES[key] = block_type(scalar, list(map(max, one, other))) if fits else None
    return TILE_TYPES[key]


def broadcast_type(scalar: tl.dtype, one: tl.dtype, other: tl.dtype) -> tl.dtype | None:
    """The type of two operands' broadcast shape with the element type `scalar`."""
    if not one.is_block() and not other.is_block():
        return scalar
    shapes = [kind.shape.values for kind in (one, other) if kind.is_block()]
    return tile_type(scalar, builtins.tuple(shapes[0]), builtins.tuple(shapes[-1]))


def element_of(x: Any, kind: type) -> Any:
    """A Python number as an element of a tile that it is added to or compared with; None if it is left to Triton.

    Triton's comparison gives the number a type of 32 bits first, and promotes both operands to the wider type.
    """
    if type(x) is int:
        fits = -(2**31) <= x < 2**31
    elif type(x) is float:
        negative_zero = x == 0 and math.copysign(1, x) < 0  # whose sign Triton's constants keep from 3.9 on
        fits = kind is np.float32 and (x == 0 or 2**-126 <= abs(x) < 2**127) and not negative_zero
    else:
        fits = False
    return kind(x) if fits else None


def numpy_operands(x: tensor, y: Any) -> tuple[Any, tl.dtype, tl.dtype] | None:
    """numpy's operand for y, and element and tile type of an operation with x; None: left to Triton."""
    name = x.dtype.name
    if name not in NUMPY_TYPES:
        return None
    if type(y) is constexpr:
        y = y.value
    if type(y) is tensor:
        scalar = x.dtype if y.dtype.name == name else PROMOTED.get(frozenset((name, y.dtype.name)))
        kind = scalar and broadcast_type(scalar, x.type, y.type)
        return kind and (y.handle.data, scalar, kind)
    element = element_of(y, NUMPY_TYPES[name])
    return None if element is None else (element, x.dtype, x.type)


def elementwise(compute: Callable[..., Any], reflected: bool = False, compares: bool = False) -> Callable[..., Any]:
    """A decorator for Triton's operator of tiles that computes with one numpy function.

    Args:
        compute: The numpy function.
        reflected: Whether the tile is the second operand.
        compares: Whether the result is boolean.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def computed(x: tensor, y: Any) -> Any:
            given = numpy_operands(x, y)
            if given is None:
                return original(x, y)
            other, scalar, kind = given
            found = compute(other, x.handle.data) if reflected else compute(x.handle.data, other)
            if compares:
                return tensor(TensorHandle(found, tl.int1), broadcast_type(tl.int1, kind, kind))
            return tensor(TensorHandle(found, scalar), kind)

        return computed

    return wrap


def pointer_addition(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a sum whose first operand may be a pointer."""
    added = elementwise(np.add)(original)

    def computed(x: tensor, y: Any) -> Any:
        if not x.dtype.is_ptr() or type(y) is not tensor or y.dtype.name not in ("int32", "int64"):
            return added(x, y)
        kind = broadcast_type(x.dtype, x.type, y.type)
        if kind is None:
            return original(x, y)
        return tensor(interpreter.interpreter_builder.create_addptr(x.handle, y.handle), kind)

    return computed


def select(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `where`."""

    def computed(condition: Any, x: Any, y: Any, **options: Any) -> Any:
        if type(condition) is tensor and condition.dtype.name == "int1" and type(x) is tensor:
            given = numpy_operands(x, y)
            kind = given and broadcast_type(given[1], condition.type, given[2])
            if kind and (kind.is_block() is given[2].is_block()):
                found = np.where(condition.handle.data, x.handle.data, given[0])
                return tensor(TensorHandle(found, given[1]), kind)
        return original(condition, x, y, **options)

    return computed


ALL = slice(None)


def expanded(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap indexing that inserts dimensions, such as `x[:, None]`."""

    def viewed(x: tensor, at: Any) -> Any:
        if x.type.is_block() and type(at) is builtins.tuple and all(i is None or i == ALL for i in at):
            view = x.handle.data[at]
            return tensor(TensorHandle(view, x.handle.dtype.scalar), tile_type(x.dtype, view.shape, view.shape))
        return original(x, at)

    return viewed


OPERATORS = {
    "__add__": pointer_addition,
    "__radd__": elementwise(np.add, reflected=True),
    "__sub__": elementwise(np.subtract),
    "__rsub__": elementwise(np.subtract, reflected=True),
    "__mul__": elementwise(np.multiply),
    "__rmul__": elementwise(np.multiply, reflected=True),
    "__lt__": elementwise(np.less, compares=True),
    "__le__": elementwise(np.less_equal, compares=True),
    "__gt__": elementwise(np.greater, compares=True),
    "__ge__": elementwise(np.greater_equal, compares=True),
    "__eq__": elementwise(np.equal, compares=True),
    "__ne__": elementwise(np.not_equal, compares=True),
    "__getitem__": expanded,
}
"""Wrappers of a tile's methods, by method name."""


def patch_attr(obj: Any, name: str, member: Callable[..., Any], builder: Any, scope: Any) -> None:
    """Bind a function of the language to a semantic once; the original looks it up at each call."""
    semantic = TritonSemantic(builder)

    def original(*arguments: Any, **options: Any) -> Any:
        options["_semantic"] = semantic
        return member(*arguments, **options)

    shortcut = OPERATORS.get(name) if obj is tensor else select if name == "where" else None
    scope.set_attr(obj, name, shortcut(original) if shortcut else original)


def install() -> None:
    """Make this process's interpreter faster. A second call has no effect."""
    if tensor.__init__ is not tensor_init:
        TritonSemantic.binary_op_sanitize_overflow_impl = only_when_debugging(
            TritonSemantic.binary_op_sanitize_overflow_impl
        )
        TritonSemantic.binary_op_type_checking_impl = skip_promotion(TritonSemantic.binary_op_type_checking_impl)
        TritonSemantic.broadcast_impl_value = broadcast_equal_rank(TritonSemantic.broadcast_impl_value)
        tl.dtype.__eq__ = identity_first(tl.dtype.__eq__)
        interpreter._patch_attr = patch_attr
        interpreter._get_np_dtype = cached_by_name(interpreter._get_np_dtype)
        InterpretedFunction.__call__ = patch_once(InterpretedFunction.__call__)
        block_type.__init__ = cached_type(block_type.__init__)
        tensor.__init__ = tensor_init
        TensorHandle.__init__ = handle_init
        ReduceOps.apply_impl = sum_tiles(ReduceOps.apply_impl)
