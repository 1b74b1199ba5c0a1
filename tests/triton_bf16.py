"""Correct bfloat16 arithmetic for Triton's interpreter.

The interpreter (3.5 to 3.9) stores a bfloat16 tile as uint16 and computes with those integers. It also truncates where
a GPU rounds to nearest even. Neither is reported. Here every computing operation converts bfloat16 operands to float32,
and rounds its result back once, as a GPU does. Loads, stores and movements stay as they are.

The interpreter rounds a fused multiply-add twice; here it is rounded once, since kernels rely on that.

`repair()` changes the interpreter of this process permanently. Only tests use it.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceScanOpInterface, TensorHandle

from wyfold.runtime import triton_support

COMPUTING = ("binary_op", "unary_op", "ternary_op", "create_fma")
"""Methods of the builder through which all elementwise arithmetic and every comparison goes."""

QUIET_NAN = np.uint16(0x7FC0)


def widened(bits: np.ndarray) -> np.ndarray:
    """float32 array with the values of bfloat16 bits."""
    return np.left_shift(np.ascontiguousarray(bits).astype(np.uint32), 16).view(np.float32)


def rounded(x: np.ndarray) -> np.ndarray:
    """bfloat16 bits nearest to float32 x; ties go to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    odd = (bits >> 16) & 1
    return np.where(np.isnan(x), QUIET_NAN, ((bits + 0x7FFF + odd) >> 16).astype(np.uint16))


def is_bf16(x: Any) -> bool:
    return isinstance(x, TensorHandle) and x.dtype == tl.bfloat16


def wide(x: Any) -> Any:
    """A bfloat16 tile converted to float32; any other argument unchanged."""
    return TensorHandle(widened(x.data), tl.float32) if is_bf16(x) else x


def narrow(x: TensorHandle) -> TensorHandle:
    return TensorHandle(rounded(x.data), tl.bfloat16)


def in_float32(method: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    """Wrap a builder's method: bfloat16 operands are computed with in float32, and the result is rounded once.

    The result of a comparison has the boolean type. The interpreter gives it the type of the operands, to which 3.9
    converts the booleans where it makes a tile of one.
    """

    @functools.wraps(method)
    def computed(self: InterpreterBuilder, *arguments: Any) -> TensorHandle:
        in_bf16 = any(map(is_bf16, arguments))
        result = method(self, *map(wide, arguments)) if in_bf16 else method(self, *arguments)
        if result.data.dtype == np.bool_:
            return TensorHandle(result.data, tl.int1)
        return narrow(result) if in_bf16 and result.data.dtype == np.float32 else result

    return computed


def rounded_once(create_fma: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    """Wrap `create_fma`: x y + z of float32 tiles in float64, which holds every product of two float32 exactly."""

    @functools.wraps(create_fma)
    def fused(self: InterpreterBuilder, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        if z.data.dtype != np.float32:
            return create_fma(self, x, y, z)
        exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return TensorHandle(exact.astype(np.float32), z.dtype.scalar)

    return fused


def with_wide_operands(create_dot: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    """Wrap `create_dot`: widen bfloat16 operands. The accumulator, and so the result, is float32 already."""

    @functools.wraps(create_dot)
    def dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, acc: TensorHandle, *rest: Any) -> TensorHandle:
        return create_dot(self, wide(a), wide(b), acc, *rest)

    return dot


def with_bf16_casts(convert: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Wrap float conversions, and handle those from and to bfloat16 here.

    A narrowing conversion without a rounding mode rounds to nearest, as on a GPU.
    """

    @functools.wraps(convert)
    def converted(x: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: Any) -> np.ndarray:
        if source == tl.bfloat16:
            single = widened(x)
            return single.view(np.uint32) if target == tl.float32 else convert(single, tl.float32, target, rounding)
        if target == tl.bfloat16 and rounding != interpreter._ir.ROUNDING_MODE.RTZ:
            single = x if source == tl.float32 else convert(x, source, tl.float32, None).view(np.float32)
            return rounded(single)
        return convert(x, source, target, rounding)

    return converted


def with_casts_through_float32(cast: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    """Wrap conversions between bfloat16 and non-float types, such as integers, to go through float32."""

    @functools.wraps(cast)
    def through(self: InterpreterBuilder, source: TensorHandle, target: tl.dtype) -> TensorHandle:
        if is_bf16(source) and target.scalar != tl.float32:
            return cast(self, wide(source), target)
        if target.scalar == tl.bfloat16 and source.dtype.scalar != tl.float32:
            return narrow(TensorHandle(source.data.astype(np.float32), tl.float32))
        return cast(self, source, target)

    return through


def with_wide_tiles(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap reductions and scans: float32 throughout, as on a GPU, and rounded at the end."""

    @functools.wraps(apply)
    def applied(self: ReduceScanOpInterface, tiles: Any) -> Any:
        if not isinstance(tiles, tuple):
            return self.apply((tiles,))[0]
        narrowed = [is_bf16(tile.handle) for tile in tiles]
        found = apply(self, tuple(retyped(t, wide(t.handle)) if n else t for t, n in zip(tiles, narrowed)))
        # Positions (argmax) are integer results next to the values.
        return tuple(
            retyped(t, narrow(t.handle)) if t.dtype == tl.float32 and narrowed[min(i, len(narrowed) - 1)] else t
            for i, t in enumerate(found)
        )

    return applied


def retyped(tile: tl.tensor, handle: TensorHandle) -> tl.tensor:
    """`tile` with other data of another element type."""
    return tl.tensor(handle, tl.block_type(handle.dtype, list(tile.shape)) if tile.shape else handle.dtype)


def get_bf16(self: InterpreterBuilder, value: float) -> TensorHandle:
    """A bfloat16 constant."""
    return TensorHandle(rounded(np.array([value], np.float32)), tl.bfloat16)


def repair() -> None:
    """Make this process's interpreter compute correctly in bfloat16. A second call has no effect."""
    triton_support.trust_interpreter()
    if hasattr(InterpreterBuilder.create_dot, "__wrapped__"):
        return
    InterpreterBuilder.create_fma = rounded_once(InterpreterBuilder.create_fma)
    for name in COMPUTING:
        setattr(InterpreterBuilder, name, in_float32(getattr(InterpreterBuilder, name)))
    InterpreterBuilder.create_dot = with_wide_operands(InterpreterBuilder.create_dot)
    InterpreterBuilder.cast_impl = with_casts_through_float32(InterpreterBuilder.cast_impl)
    InterpreterBuilder.get_bf16 = get_bf16
    interpreter._convert_float = with_bf16_casts(interpreter._convert_float)
    ReduceScanOpInterface.apply = with_wide_tiles(ReduceScanOpInterface.apply)
