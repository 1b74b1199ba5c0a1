"""Matrix products of tiles in Triton kernels.

`mm` takes operands that the design rounds to the inputs' dtype: bfloat16 as it is, float16 as TF32, float32 as three
TF32 products. TF32 has the mantissa of float16 without its overflow. Operands are rounded to the nearest TF32 number
first, since the matrix unit truncates, with two to four times the error. `summing` names a form of float32 whose sums
are as accurate as those of float32 arithmetic. `mm_exact` is for the inverse and the factors made from it, whose
operands must not be rounded: it uses three partial products for float32 (docs/numerics.md).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from wyfold.runtime.triton_support import interpreting

NARROWEST = 64
"""Least number of columns of a right operand that has 64 rows.

Narrower 16-bit operands are read from outside shared memory on Hopper in some kernels compiled by Triton 3.6
(docs/facts/hopper.md, H200-4).
"""

TF32: tl.constexpr = tl.constexpr("ieee" if torch.version.hip else "tf32")
"""Precision of products whose operands have at most TF32's bits, and of bfloat16. AMD's GPUs have no TF32."""


def operand(dtype: torch.dtype) -> tl.dtype:
    """OP of `mm`: the dtype operands are rounded to."""
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float32


def right_operand(width: int, most: int, dtype: torch.dtype) -> int:
    """Columns of a slice of a right operand: its width or `NARROWEST`, at most `most`, but not less in 16 bits."""
    return max(min(max(width, NARROWEST), most), NARROWEST if workspace(dtype).itemsize == 2 else 0)


def workspace(dtype: torch.dtype) -> torch.dtype:
    """Dtype of tiles passed between launches; float32 for float16, which unnormalised tiles would overflow."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


@functools.cache
def precision(dtype: torch.dtype) -> str:
    """PRECISION of `mm`; ignored where the operands are bfloat16."""
    if interpreting() or torch.version.hip:
        return "ieee"
    return {torch.float32: "tf32x3", torch.float16: "tf32 to nearest"}.get(dtype, "tf32")


def summing(dtype: torch.dtype) -> str:
    """PRECISION of `mm` where long sums of products must be as accurate as those of float32 arithmetic.

    The matrix unit truncates the sum after each product, and three TF32 products of 22 bits lose up to a half more than
    rounded sums do. Six products of bfloat16 parts take the same time and lose less. Other dtypes: `precision`.
    """
    return "bf16x6" if precision(dtype) == "tf32x3" else precision(dtype)


def summing_exact(dtype: torch.dtype) -> str:
    """EXACT of `mm_exact`, where `summing` is PRECISION of `mm`."""
    return "bf16x6" if exact(dtype) == "tf32x3" else exact(dtype)


def contracts(dtype: torch.dtype) -> bool:
    """Whether the compiler may contract products and sums around these matrix products into fused multiply-adds.

    It decides separately in each variant of a kernel, so packed and separate calls would differ in last bits. With
    bfloat16 operands, which have 8 bits, the affected expressions are written so that the variants cannot differ, in
    fewer instructions.
    """
    return dtype == torch.bfloat16


@functools.cache
def exact(dtype: torch.dtype) -> str:
    """EXACT of `mm_exact`."""
    if interpreting() or torch.version.hip:
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "bf16x3"


@triton.jit
def mm(a, b, acc, OP: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a b, operands rounded to OP, and to TF32 where PRECISION says so, since the unit alone truncates."""
    if OP == tl.float32 and PRECISION == "tf32 to nearest":
        return tl.dot(nearest_tf32(a), nearest_tf32(b), acc, input_precision=TF32)
    elif OP == tl.float32 and PRECISION == "bf16x6":
        return _mm_bf16_thirds(a, b, acc)
    else:
        return tl.dot(a.to(OP), b.to(OP), acc, input_precision=TF32 if OP == tl.bfloat16 else PRECISION)


@triton.jit
def mm_unit_diagonal(a, by, b, OP: tl.constexpr, PRECISION: tl.constexpr):
    """(a by) b for a square b with a unit diagonal; by: None for 1.

    The unit diagonal passes a through unchanged, so the part that `mm` rounds off the operand is added again.
    """
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
    """acc + a b of unrounded operands of any float dtype; bfloat16 needs one part. Small products are added first."""
    if EXACT == "bf16x3":
        return _mm_bf16_parts(a, b, acc)
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
        acc = tl.dot(a_low, b_high, acc, input_precision=TF32)
        acc = tl.dot(a_high, b_low, acc, input_precision=TF32)
        return tl.dot(a_high, b_high, acc, input_precision=TF32)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=EXACT)


@triton.jit
def _mm_bf16_thirds(a, b, acc):
    """acc + a b of float32 operands, each a sum of three bfloat16 numbers, joined by rounded additions.

    Products of the first parts have 16 bits, and the unit adds nearly all of them exactly. The other products are 2^-8
    times as large, and so is what their sum loses.
    """
    a_high, a_mid, a_low = bf16_thirds(a)
    b_high, b_mid, b_low = bf16_thirds(b)
    small = tl.dot(a_low, b_high)
    small = tl.dot(a_high, b_low, small)
    small = tl.dot(a_mid, b_mid, small)
    small = tl.dot(a_mid, b_high, small)
    small = tl.dot(a_high, b_mid, small)
    found = tl.dot(a_high, b_high) + small
    return found if acc is None else acc + found


@triton.jit
def _mm_bf16_parts(a, b, acc):
    """`mm_exact` of two bfloat16 parts of each operand that is not bfloat16."""
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


@triton.jit
def bf16_parts(x):
    """Split x into a sum of two bfloat16 numbers, to within 2^-17 of x. A NaN stays NaN in the second.

    Integer arithmetic on the bits does the rounding: a conversion and its inverse are several times slower on a GPU.
    """
    x = x.to(tl.float32)
    high = _rounded(x, 0x8000, -0x10000)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def bf16_thirds(x):
    """Split float32 x exactly into a sum of three bfloat16 numbers. A NaN stays NaN in the last."""
    x = x.to(tl.float32)
    high = _rounded(x, 0x8000, -0x10000)
    mid = _rounded(x - high, 0, -0x10000)
    return high.to(tl.bfloat16), mid.to(tl.bfloat16), (x - high - mid).to(tl.bfloat16)


@triton.jit
def self_products(a, acc, small, OP: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a a^T, operands rounded to OP, in two sums that `self_sum` joins after the last slice.

    Three TF32 products become two: low high^T and high low^T are each other's transpose. Their sum is kept separate,
    since a product truncates its addends to the last bit of the accumulator.
    """
    if OP == tl.float32 and PRECISION == "tf32x3":
        high, low = tf32_parts(a)
        small = tl.dot(low, tl.trans(high), small, input_precision=TF32)
        return tl.dot(high, tl.trans(high), acc, input_precision=TF32), small
    else:
        return mm(a, tl.trans(a), acc, OP, PRECISION), small


@triton.jit
def self_sum(acc, small, OP: tl.constexpr, PRECISION: tl.constexpr):
    """Join the two sums of `self_products`; the second is used only where float32 is split."""
    if OP == tl.float32 and PRECISION == "tf32x3":
        return acc + (small + tl.trans(small))
    else:
        return acc


@triton.jit
def tf32_parts(x):
    """Split x into the nearest TF32 number, which has 11 bits, and the remainder, of which a product also reads 11
    bits.

    A NaN stays NaN in the second.
    """
    x = x.to(tl.float32)
    high = _rounded(x, 0x1000, -0x2000)
    return high, x - high


@triton.jit
def no_fma(x):
    """x, rounded before it is used: no product is contracted with a later sum or difference, in any variant.

    The compiler contracts the added zero instead, which changes no bit.
    """
    return x + 0.0


@triton.jit
def nearest_tf32(x):
    """Round float32 x to TF32's 11 bits; other 16-bit floats have at most as many. A NaN stays NaN."""
    if x.dtype == tl.float32:
        return _nearest_tf32(x)
    else:
        return x.to(tl.float32)


if interpreting() or torch.version.hip:

    @triton.jit
    def _nearest_tf32(x):
        return tl.where(x == x, _rounded(x, 0x1000, -0x2000), x)

else:

    @triton.jit
    def _nearest_tf32(x):
        return tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def _rounded(x, half: tl.constexpr, mask: tl.constexpr):
    """Drop bits of x, rounding to nearest if `half` is half of the last bit kept.

    The carry can turn a NaN into any number.
    """
    return ((x.to(tl.int32, bitcast=True) + half) & mask).to(tl.float32, bitcast=True)
