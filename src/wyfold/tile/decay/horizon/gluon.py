"""The horizon for Hopper kernels."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.tile.decay.horizon.triton import AT_ONCE, HORIZON, LEAST, ROWS, SCALE, SLACK, UNSCALE, exponent_above
from wyfold.tile.dot.gluon import add


@gluon.jit
def chunks_in_reach(p_total, p_rows, i_tile, step, count, BT: gl.constexpr):
    """`chunks_in_reach` of the Triton kernels."""
    L: gl.constexpr = gl.BlockedLayout([1, BT // 32], [1, 32], [gl.num_warps(), 1], [1, 0])
    reach = _decayed_after(p_total, i_tile, step, count)
    needed = gl.where(reach < count, reach, 0)
    o_t = gl.arange(0, BT, layout=gl.SliceLayout(0, L))[None, :]
    p_beta = p_rows + i_tile.to(gl.int64) * (4 * BT) + 3 * BT + o_t
    most = gl.zeros([ROWS, BT], gl.float32, L)
    for i in range(0, needed, ROWS):
        chunk = (i + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L)))[:, None]
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


@gluon.jit
def transition_power(total, k, E, beta):
    """`transition_power` of the Triton kernels; k, E and beta are None where keys erase nothing."""
    norm = gl.max(gl.where(total <= 1.0, total, float("inf")), 0)
    if k is not None:
        k, E = k.to(gl.float32) * SCALE, E.to(gl.float32) * SCALE
        rows = (gl.sqrt(gl.sum(E * E, 1)) + LEAST) * (gl.sqrt(gl.sum(k * k, 1)) + LEAST)
        norm = norm + gl.sum(rows * gl.abs(beta), 0) * UNSCALE
    return exponent_above(norm * SLACK)


@gluon.jit
def follow(power, i, needed, count):
    """`follow` of the Triton kernels."""
    needed = gl.where(power <= HORIZON, gl.minimum(needed, i), needed)
    return needed, (i < needed) & (power * count <= HORIZON * i)
