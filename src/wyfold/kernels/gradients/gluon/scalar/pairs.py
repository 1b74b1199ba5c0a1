"""Contribution of the pairs to a scalar gate's gradient, and norms of rows."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from wyfold.tile.index.gluon import barrier


@gluon.jit
def pair_sums(dJ, dP, s_q, s_k, pair, opaque_zero, BT: gl.constexpr):
    """Contribution of the pairs to a scalar gate's dg: a pair adds to all tokens after its column up to its row.   [BT]

    The pairs are stored in the memory of dv as two bfloat16 parts, after dv's TMA store has finished.

    Args:
        opaque_zero: A 0 that the compiler cannot fold. A constant in a left operand would be written to its register
            after the product has begun (docs/facts/compilers.md, PTXAS-2).
    """
    SLICES: gl.constexpr = s_q.shape[0]
    LC: gl.constexpr = dJ.type.layout
    o_r = gl.arange(0, BT, layout=gl.SliceLayout(1, LC))
    o_c = gl.arange(0, BT, layout=gl.SliceLayout(0, LC))
    zero_acc = gl.zeros([BT, BT], gl.float32, LC)
    kk, qk = zero_acc, zero_acc
    for h in gl.static_range(SLICES):
        kk = warpgroup_mma(s_k.index(h), s_k.index(h).permute((1, 0)), kk, use_acc=h > 0, is_async=True)
        qk = warpgroup_mma(s_q.index(h), s_k.index(h).permute((1, 0)), qk, use_acc=h > 0, is_async=True)
    after = gl.where((o_r + opaque_zero)[:, None] <= o_c[None, :], 1.0, 0.0).to(s_q.dtype)
    after = gl.convert_layout(after, gl.DotOperandLayout(0, LC, 2), assert_trivial=True)
    kk, qk = warpgroup_mma_wait(0, deps=[kk, qk])
    high, low = _bf16_high_low(gl.fma(dP, qk, dJ * kk))
    tma.store_wait(pendings=0)
    barrier()
    pair.index(0).store(high)
    pair.index(1).store(low)
    fence_async_shared()
    barrier()
    sums = warpgroup_mma(after, pair.index(1), zero_acc, use_acc=False, is_async=True)
    sums = warpgroup_mma(after, pair.index(0), sums, is_async=True)
    sums = warpgroup_mma_wait(0, deps=[sums])
    dg = gl.sum(gl.where(o_c[None, :] < o_r[:, None], sums, 0.0), axis=1)
    barrier()
    return dg


@gluon.jit
def _bf16_high_low(x):
    """Split x into a sum of two bfloat16, exact up to 2^-17 of x."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 u, v; .reg .f32 s, t;"
        " cvt.rn.bf16x2.f32 $0, $3, $2; shl.b32 u, $0, 16; and.b32 v, $0, 0xffff0000;"
        " mov.b32 s, u; mov.b32 t, v; sub.f32 s, $2, s; sub.f32 t, $3, t; cvt.rn.bf16x2.f32 $1, t, s; }",
        "=&r,=&r,f,f", [x], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def reciprocal_norms(smem, LC: gl.constexpr, BT: gl.constexpr):
    """(sum x^2 + 1e-6)^(-1/2) of rows stored in slices of K.   [BT]"""
    SLICES: gl.constexpr = smem.shape[0]
    square = gl.full([BT], 1e-6, gl.float32, gl.SliceLayout(1, LC))
    for h in gl.static_range(SLICES):
        x = smem.index(h).load(LC).to(gl.float32)
        square += gl.sum(x * x, axis=1)
    return gl.rsqrt(square)


@gluon.jit
def add(a, b):
    return a + b
