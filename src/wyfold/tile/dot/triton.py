"""Matrix products of tiles on the device.

`mm` feeds operands that the design rounds to the inputs' dtype: bfloat16 as it is, float16 as TF32 (the same mantissa,
without its overflow) to the nearest, since the unit by itself cuts, at two to four times the error, and float32 by
three TF32 products. `mm_exact` is for the inverse and the factors made from it, whose operands must not be rounded:
float32 by three partial products (docs/numerics.md).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from wyfold.runtime.triton_support import interpreting

NARROWEST = 64
"""Columns that a right operand has at least, beside 64 rows: narrower ones in 16 bits are read from outside shared
memory on Hopper by what Triton 3.6 makes of some kernels (docs/facts/hopper.md, H200-4)."""


def operand(dtype: torch.dtype) -> tl.dtype:
    """OP of `mm`: the dtype operands are rounded to."""
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float32


def workspace(dtype: torch.dtype) -> torch.dtype:
    """Dtype of tiles that travel between launches: float16 has no room for what is not normalised."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


@functools.cache
def precision(dtype: torch.dtype) -> str:
    """PRECISION of `mm`; ignored where the operands are bfloat16."""
    if interpreting():
        return "ieee"
    return {torch.float32: "tf32x3", torch.float16: "tf32 to nearest"}.get(dtype, "tf32")


def contracts(dtype: torch.dtype) -> bool:
    """Whether a compiler may contract products into sums around these matrix products.

    It does as it sees fit, in each variant of a kernel anew, so that packed would not be separate in last bits. Where
    operands have bfloat16's 8 bits, what may differ is written such that it cannot, at fewer instructions.
    """
    return dtype == torch.bfloat16


@functools.cache
def exact(dtype: torch.dtype) -> str:
    """EXACT of `mm_exact`."""
    if interpreting():
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "bf16x3"


@triton.jit
def mm(a, b, acc, OP: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a b, operands rounded to OP, and where PRECISION says so to TF32; the unit by itself cuts them to that."""
    if OP == tl.float32 and PRECISION == "tf32 to nearest":
        return tl.dot(nearest_tf32(a), nearest_tf32(b), acc, input_precision="tf32")
    else:
        return tl.dot(a.to(OP), b.to(OP), acc, input_precision="tf32" if OP == tl.bfloat16 else PRECISION)


@triton.jit
def mm_unit_diagonal(a, by, b, OP: tl.constexpr, PRECISION: tl.constexpr):
    """(a by) b of a square b with ones on its diagonal, which so much of a passes as it is: what `mm` rounds off the
    operand is added again. by: None for 1."""
    operand = a
    if by is not None:
        operand = a * by
    if OP == tl.bfloat16:
        return mm(operand, b, _remainder(a, by, operand.to(OP).to(tl.float32)), OP, PRECISION)
    elif PRECISION == "tf32 to nearest":
        return mm(operand, b, _remainder(a, by, nearest_tf32(operand)), OP, PRECISION)
    else:
        return mm(operand, b, None, OP, PRECISION)


@triton.jit
def _remainder(a, by, rounded):
    """a by - rounded, exactly."""
    if by is None:
        return a - rounded
    else:
        return tl.fma(a, tl.broadcast_to(by, a.shape), -rounded)


@triton.jit
def mm_exact(a, b, acc, EXACT: tl.constexpr):
    """acc + a b of operands of any float that are not rounded; bfloat16 is one part. Small products first."""
    if EXACT == "bf16x3":
        if a.dtype == tl.bfloat16:
            b_high, b_low = bf16_parts(b)
            return tl.dot(a, b_high, tl.dot(a, b_low, acc))
        elif b.dtype == tl.bfloat16:
            a_high, a_low = bf16_parts(a)
            return tl.dot(a_high, b, tl.dot(a_low, b, acc))
        else:
            a_high, a_low = bf16_parts(a)
            b_high, b_low = bf16_parts(b)
            acc = tl.dot(a_low, b_high, acc)
            acc = tl.dot(a_high, b_low, acc)
            return tl.dot(a_high, b_high, acc)
    elif EXACT == "bf16x6":
        b_high, b_mid, b_low = bf16_thirds(b)
        if a.dtype == tl.bfloat16:
            return tl.dot(a, b_high, tl.dot(a, b_mid, tl.dot(a, b_low, acc)))
        else:
            a_high, a_mid, a_low = bf16_thirds(a)
            acc = tl.dot(a_low, b_high, acc)
            acc = tl.dot(a_high, b_low, acc)
            acc = tl.dot(a_mid, b_mid, acc)
            acc = tl.dot(a_mid, b_high, acc)
            acc = tl.dot(a_high, b_mid, acc)
            return tl.dot(a_high, b_high, acc)
    elif EXACT == "tf32x3":
        a_high, a_low = tf32_parts(a)
        b_high, b_low = tf32_parts(b)
        acc = tl.dot(a_low, b_high, acc, input_precision="tf32")
        acc = tl.dot(a_high, b_low, acc, input_precision="tf32")
        return tl.dot(a_high, b_high, acc, input_precision="tf32")
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=EXACT)


@triton.jit
def bf16_parts(x):
    """x as a sum of two bfloat16, but for 2^-17 of it. A NaN stays one in the second.

    Integer arithmetic on the bits rounds: a conversion there and back is several times slower on a GPU.
    """
    x = x.to(tl.float32)
    high = _rounded(x, 0x8000, -0x10000)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def bf16_thirds(x):
    """x as a sum of three bfloat16: all of a float32. A NaN stays one in the last."""
    x = x.to(tl.float32)
    high = _rounded(x, 0x8000, -0x10000)
    mid = _rounded(x - high, 0, -0x10000)
    return high.to(tl.bfloat16), mid.to(tl.bfloat16), (x - high - mid).to(tl.bfloat16)


@triton.jit
def self_products(a, acc, rest, OP: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a a^T, operands rounded to OP, in two sums, which `self_sum` joins behind the last slice.

    Three TF32 products are two here: of low high^T and high low^T either is the other's transpose. That sum stays by
    itself, since a product cuts what it adds to the last bit of what it adds to.
    """
    if OP == tl.float32 and PRECISION == "tf32x3":
        high, low = tf32_parts(a)
        rest = tl.dot(low, tl.trans(high), rest, input_precision="tf32")
        return tl.dot(high, tl.trans(high), acc, input_precision="tf32"), rest
    else:
        return mm(a, tl.trans(a), acc, OP, PRECISION), rest


@triton.jit
def self_sum(acc, rest, OP: tl.constexpr, PRECISION: tl.constexpr):
    """Of `self_products`' two sums what they stand for; the second is used where float32 is taken apart alone."""
    if OP == tl.float32 and PRECISION == "tf32x3":
        return acc + (rest + tl.trans(rest))
    else:
        return acc


@triton.jit
def tf32_parts(x):
    """x as a sum of two: the nearest number of TF32's 11 bits, and what is left, of which a product takes 11 bits too.

    A NaN stays one in the second.
    """
    x = x.to(tl.float32)
    high = _rounded(x, 0x1000, -0x2000)
    return high, x - high


@triton.jit
def settled(x):
    """x, rounded: a product is not contracted into the sum or difference it goes to, here and not in another variant.

    To add zero is contracted instead, which changes nothing.
    """
    return x + 0.0


@triton.jit
def nearest_tf32(x):
    """x in float32 with TF32's 11 bits, which other 16-bit floats have already. A NaN stays one."""
    if x.dtype == tl.float32:
        return _nearest_tf32(x)
    else:
        return x.to(tl.float32)


if interpreting():

    @triton.jit
    def _nearest_tf32(x):
        return tl.where(x == x, _rounded(x, 0x1000, -0x2000), x)

else:

    @triton.jit
    def _nearest_tf32(x):
        return tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def _rounded(x, half: tl.constexpr, mask: tl.constexpr):
    """x with fewer bits, to the nearest if half is half of the last one left. The carry can make anything of a NaN."""
    return ((x.to(tl.int32, bitcast=True) + half) & mask).to(tl.float32, bitcast=True)
