"""The horizon for Hopper kernels."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.tile.decay.horizon.triton import AT_ONCE, HORIZON, LEAST, ROWS, SCALE, SLACK, UNSCALE, exponent_above
from wyfold.tile.dot.gluon import add

KEYS: gl.constexpr = gl.constexpr(2)
"""Chunks whose keys are loaded at once."""


@gluon.jit
def chunks_in_reach(bounds, i_tile, step, count, at, i_h, SIZES: gl.constexpr):
    """`chunks_in_reach` of the Triton kernels."""
    if SIZES.CHANNEL:
        found = _channels_in_reach(bounds, i_tile, step, count, SIZES.ERASES, SIZES.BT, SIZES.K)
    elif bounds.k is not None:
        found = _keys_in_reach(bounds, i_tile, step, count, at, i_h, SIZES.BT, SIZES.K)
    else:
        found = _numbers_in_reach(bounds.total, bounds.rows, i_tile, step, count, SIZES.BT)
    return found


@gluon.jit
def _channels_in_reach(bounds, i_tile, step, count, ERASES: gl.constexpr, BT: gl.constexpr, K: gl.constexpr):
    """`channels_in_reach` of the Triton kernels."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // K, K // 8], [gl.num_warps(), 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, L)
    o_t, o_k = gl.arange(0, BT, layout=ROW), gl.arange(0, K, layout=gl.SliceLayout(0, L))
    needed, power, i = count, count * 0, count * 0
    while i < needed:
        tile = i_tile.to(gl.int64) + i * step
        total = gl.load(bounds.total + tile * K + o_k)
        norm = gl.max(gl.where(total <= 1.0, total, float("inf")), 0)
        if ERASES:
            at = tile * (BT * K) + o_t[:, None] * K + o_k[None, :]
            E = gl.load(bounds.E + at).to(gl.float32) * SCALE
            k = gl.load(bounds.k + at).to(gl.float32) * SCALE
            beta = gl.load(bounds.rows + tile * (4 * BT) + 3 * BT + o_t)
            rows = (gl.sqrt(gl.sum(E * E, 1)) + LEAST) * (gl.sqrt(gl.sum(k * k, 1)) + LEAST)
            norm = norm + gl.sum(rows * gl.abs(beta), 0) * UNSCALE
        i += 1
        power += exponent_above(norm * SLACK)
        needed = gl.where(power <= HORIZON, gl.minimum(needed, i), needed)
        # The segment ends before the horizon if later chunks decay as these do. Then all of it is needed.
        i = gl.where(power * count > HORIZON * i, count, i)
    return needed


@gluon.jit
def _keys_in_reach(bounds, i_tile, step, count, at, i_h, BT: gl.constexpr, K: gl.constexpr):
    """`keys_in_reach` of the Triton kernels."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // K, K // 8], [gl.num_warps(), 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, L)
    o_t, o_k = gl.arange(0, KEYS * BT, layout=ROW), gl.arange(0, K, layout=gl.SliceLayout(0, L)).to(gl.int64)
    p_k = bounds.k + (i_h * bounds.s_k[2] + o_k * bounds.s_k[3])[None, :]
    reach = _decayed_after(bounds.total, i_tile, step, count)
    needed = gl.where(reach < count, reach, 0)
    outside = gl.zeros([KEYS * BT], gl.int32, ROW)
    for i in range(0, needed, KEYS):
        chunk = i + o_t // BT
        row = at.t + gl.where(step < 0, -chunk, chunk) * BT + o_t % BT
        used = chunk < needed
        k = gl.load(p_k + row[:, None].to(gl.int64) * bounds.s_k[1], mask=(used & (row < at.T))[:, None], other=0.0)
        p_beta = bounds.rows + (i_tile.to(gl.int64) + chunk * step) * (4 * BT) + 3 * BT + o_t % BT
        beta = gl.load(p_beta, mask=used, other=0.0)
        k = k.to(gl.float32)
        outside |= (gl.abs(beta * gl.sum(k * k, 1) - 1.0) <= 1.0).to(gl.int32) ^ 1
    return gl.where(gl.max(outside, 0) == 0, reach, count)


@gluon.jit
def _numbers_in_reach(p_total, p_rows, i_tile, step, count, BT: gl.constexpr):
    """`numbers_in_reach` of the Triton kernels."""
    L: gl.constexpr = gl.BlockedLayout([1, BT // 32], [1, 32], [gl.num_warps(), 1], [1, 0])
    o_t = gl.arange(0, BT, layout=gl.SliceLayout(0, L))[None, :]
    p_beta = p_rows + i_tile.to(gl.int64) * (4 * BT) + 3 * BT + o_t
    first = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))[:, None]
    # Loaded with the decays, before it is known how many chunks are needed.
    beta = gl.load(p_beta + first * step * (4 * BT), mask=first < count, other=1.0)
    reach = _decayed_after(p_total, i_tile, step, count)
    needed = gl.where(reach < count, reach, 0)
    most = gl.where(first < needed, gl.abs(beta - 1.0), 0.0)
    for i in range(ROWS, needed, ROWS):
        chunk = i + first
        beta = gl.load(p_beta + chunk * step * (4 * BT), mask=chunk < needed, other=1.0)
        most = gl.maximum(most, gl.abs(beta - 1.0))
    return gl.where(gl.max(gl.max(most, 1), 0) <= 1.0, reach, count)


@gluon.jit
def _decayed_after(p_total, i_tile, step, count):
    """`decayed_after` of the Triton kernels."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    reach, power, i = count, count * 0, count * 0
    while i < reach:
        chunk = i + gl.arange(0, AT_ONCE, layout=L)
        total = gl.load(p_total + i_tile + chunk * step, mask=chunk < count, other=1.0)
        powers = power + gl.associative_scan(exponent_above(total), 0, add)
        reach = gl.min(gl.where((powers <= HORIZON) & (chunk < count), chunk + 1, reach), 0)
        power = gl.sum(gl.where(chunk == i + AT_ONCE - 1, powers, 0), 0)
        i += AT_ONCE
    return reach
