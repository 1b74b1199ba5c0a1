"""Numbers split into bfloat16 parts, and products of the parts, for Hopper kernels that choose their own layouts
(Gluon).

A pair is a float32 number as the sum of two bfloat16 numbers, as in `mm_exact` of the Triton twin.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma


@gluon.jit
def bf16_pair(x):
    """Two bfloat16 parts of a tile's columns, the larger part above the smaller.   [2 BT, ..]"""
    high, low = bf16_parts(x)
    return stack_rows(high, low)


@gluon.jit
def stack_rows(x, y):
    """Concatenate x and y along rows, x first."""
    return gl.permute(gl.join(x, y), (2, 0, 1)).reshape((2 * x.shape[0], x.shape[1]))


@gluon.jit
def mm_pairs(a_high, a_low, b_high, b_low, acc, LB: gl.constexpr):
    """acc + a b; the small partial products are added first."""
    A: gl.constexpr = gl.DotOperandLayout(0, LB, 2)
    high = gl.convert_layout(a_high, A, assert_trivial=True)
    low = gl.convert_layout(a_low, A, assert_trivial=True)
    acc = mma_v2(low, b_high, acc)
    acc = mma_v2(high, b_low, acc)
    return mma_v2(high, b_high, acc)


@gluon.jit
def mm_pairs_async(a_high, a_low, b_high, b_low, acc, ADD: gl.constexpr, A: gl.constexpr):
    """Issue acc + a b, or a b alone; b lies in shared memory. The caller waits for the product."""
    high = gl.convert_layout(a_high, A, assert_trivial=True)
    low = gl.convert_layout(a_low, A, assert_trivial=True)
    acc = warpgroup_mma(low, b_high, acc, use_acc=ADD, is_async=True)
    acc = warpgroup_mma(high, b_low, acc, is_async=True)
    return warpgroup_mma(high, b_high, acc, is_async=True)


@gluon.jit
def bf16_parts(x):
    """Split x into a sum of two bfloat16 numbers, to within 2^-17 of x.

    x must be rounded already, because no operation here is contracted.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .b32 u, v; .reg .f32 s, t;"
        " cvt.rn.bf16x2.f32 $0, $3, $2; shl.b32 u, $0, 16; and.b32 v, $0, 0xffff0000;"
        " mov.b32 s, u; mov.b32 t, v; sub.f32 s, $2, s; sub.f32 t, $3, t; cvt.rn.bf16x2.f32 $1, t, s; }",
        "=&r,=&r,f,f",
        [x],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def in_bfloat16(x):
    """x rounded to bfloat16, as bfloat16 and as float32.

    Numbers are converted two by two. Where both results are used, the compiler would convert one by one, in four times
    the time.
    """
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $4, $3; shl.b32 $1, $0, 16; and.b32 $2, $0, 0xffff0000;",
        "=&r,=&r,=&r,f,f",
        [x],
        dtype=(gl.bfloat16, gl.float32),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def one_over(x):
    """1 / x for numbers between 2^-126 and 2^126, with the bits of a division, which also handles all others."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def exp2(x):
    """2^x; results too small for a normal number are 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def add(a, b):
    return a + b
