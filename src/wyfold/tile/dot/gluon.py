"""Numbers taken apart for Hopper kernels that lay out tiles themselves (Gluon), and products of what that makes.

A pair is a float32 number as two bfloat16 ones; `mm_exact` of the Triton twin makes the same of it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma


@gluon.jit
def pair(x):
    """Two bfloat16 parts of a tile's columns, the larger above.   [2 BT, ..]"""
    high, low = parts(x)
    return above(high, low)


@gluon.jit
def above(x, y):
    """x above y."""
    return gl.permute(gl.join(x, y), (2, 0, 1)).reshape((2 * x.shape[0], x.shape[1]))


@gluon.jit
def mm_pairs(a_high, a_low, b_high, b_low, acc, LB: gl.constexpr):
    """acc + a b, small products first."""
    A: gl.constexpr = gl.DotOperandLayout(0, LB, 2)
    high = gl.convert_layout(a_high, A, assert_trivial=True)
    low = gl.convert_layout(a_low, A, assert_trivial=True)
    acc = mma_v2(low, b_high, acc)
    acc = mma_v2(high, b_low, acc)
    return mma_v2(high, b_high, acc)


@gluon.jit
def mm_pairs_async(a_high, a_low, b_high, b_low, acc, ADD: gl.constexpr, A: gl.constexpr):
    """acc + a b, or a b alone, under way; b lies in shared memory."""
    high = gl.convert_layout(a_high, A, assert_trivial=True)
    low = gl.convert_layout(a_low, A, assert_trivial=True)
    acc = warpgroup_mma(low, b_high, acc, use_acc=ADD, is_async=True)
    acc = warpgroup_mma(high, b_low, acc, is_async=True)
    return warpgroup_mma(high, b_high, acc, is_async=True)


@gluon.jit
def parts(x):
    """x as a sum of two bfloat16, but for 2^-17 of it; x has been rounded, for none of this is contracted."""
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
    """x rounded to bfloat16, as such and in float32. Numbers are converted two by two: one by one takes four times as
    long, which is what the compiler does where both are wanted."""
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
    """1 / x of numbers between 2^-126 and 2^126: the bits that the division has, which takes care of all others too."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def exp2(x):
    """2^x; what is too small for a normal number is 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def add(a, b):
    return a + b
