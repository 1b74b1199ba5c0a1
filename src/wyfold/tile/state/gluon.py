"""State tiles in shared memory for single-token kernels on Hopper, and offsets of states.

A tile is [K, BV], some columns of a state [K, V]. It is never held in registers as a whole: each step reads slices of
rows and discards them. How many states are in flight depends only on how many tiles fit into shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from wyfold.tile.index.gluon import copy_async


@gluon.jit
def state_offsets(strides, i_n, i_h, o_v, o_k):
    """Offsets of value rows o_v of a state in [N, HV, K, V].   [BV, K]"""
    first = i_n * strides[0] + i_h * strides[1]
    return first + (o_v.to(gl.int64)[:, None] * strides[3] + o_k.to(gl.int64)[None, :] * strides[2])


@gluon.constexpr_function
def coalesced_layout(BV, warps):
    """Register layout for coalesced accesses: neighbouring threads along rows of BV 16-bit numbers."""
    return gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def column_layout(BV, warps):
    """Register layout where each warp owns columns, 8 per thread, so that sums over rows need no other warp."""
    rows = 256 * warps // BV
    return gl.BlockedLayout([1, 8], [rows, 32 // rows], [1, warps], [0, 1])


@gluon.constexpr_function
def slice_rows(BV, warps):
    """Rows of a slice: one per thread, and at least 8, the period of the swizzle."""
    return max(8, 256 * warps // BV)


@gluon.constexpr_function
def swizzled_layout(BV):
    """Shared-memory layout of a tile without bank conflicts.

    Eight threads access as many different rows at once, or eight neighbours in a row.
    """
    rows = max(1, 64 // BV)  # in 128 bytes, one pass over all banks
    return gl.SwizzledSharedLayout(8, rows, 8 // rows, [1, 0])


@gluon.jit
def copy_state_async(p, there, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr):
    """Start copying BV columns of a state [K, V] at p into shared memory; zeros if `there` is false.

    The caller waits for the copy group before it reads the tile.
    """
    held = gl.allocate_shared_memory(p.dtype.element_ty, [K, BV], swizzled_layout(BV))
    copy_async(held, p + _tile_offsets(0, K, V, BV), mask=there)
    async_copy.commit_group()
    return held


@gluon.jit
def key_sums(held, q, k, decay, CHANNEL: gl.constexpr):
    """S^T q and S^T k of the decayed state, in the order of the Triton twin's `key_sum` for [K, V].   [BV] each

    Args:
        held: [K, BV] state in shared memory.
        q, k: [K] float32 in shared memory.
        decay: [K] float32 in shared memory for a channel gate, else one number.
    """
    ROWS: gl.constexpr = slice_rows(held.shape[1], gl.num_warps())
    b_q, b_k = _row_products(held, q, k, decay, CHANNEL, ROWS, 0, ROWS)
    return _halved(b_q), _halved(b_k)


@gluon.jit
def _row_products(
    held, q, k, decay, CHANNEL: gl.constexpr, ROWS: gl.constexpr, FIRST: gl.constexpr, STEP: gl.constexpr
):  # fmt: skip
    """Sum the products of rows FIRST.., FIRST + STEP.. and so on, ROWS rows each; halves of K are added first.

    The recursion is depth-first, so each halving keeps one slice of partial sums in registers instead of the state.
    """
    if STEP == held.shape[0]:
        L: gl.constexpr = column_layout(held.shape[1], gl.num_warps())
        b_S = _decayed(held, decay, CHANNEL, FIRST, ROWS, L)
        b_q = q.slice(FIRST, ROWS).load(gl.SliceLayout(1, L))
        b_k = k.slice(FIRST, ROWS).load(gl.SliceLayout(1, L))
        return b_S * b_q[:, None], b_S * b_k[:, None]
    else:
        low_q, low_k = _row_products(held, q, k, decay, CHANNEL, ROWS, FIRST, 2 * STEP)
        high_q, high_k = _row_products(held, q, k, decay, CHANNEL, ROWS, FIRST + STEP, 2 * STEP)
        return low_q + high_q, low_k + high_k


@gluon.jit
def _halved(b_x):
    """Sum over rows, halves first.   [rows, BV] -> [BV]"""
    if b_x.shape[0] == 2:
        return gl.convert_layout(gl.sum(b_x, axis=0), gl.SliceLayout(0, column_layout(b_x.shape[1], gl.num_warps())))
    else:
        return _halved(gl.sum(gl.reshape(b_x, [2, b_x.shape[0] // 2, b_x.shape[1]]), axis=0))


@gluon.jit
def store_written(p, held, k, b_y, decay, to_slot, CHANNEL: gl.constexpr, V: gl.constexpr):
    """Store the decayed state plus the token's write, decay S + k y^T, rounded once, if `to_slot` is true."""
    K: gl.constexpr = held.shape[0]
    BV: gl.constexpr = held.shape[1]
    L: gl.constexpr = coalesced_layout(BV, gl.num_warps())
    ROWS: gl.constexpr = slice_rows(BV, gl.num_warps())
    b_y = gl.convert_layout(b_y, gl.SliceLayout(0, L))
    for row in gl.static_range(0, K, ROWS):
        b_S = _decayed(held, decay, CHANNEL, row, ROWS, L)
        b_k = k.slice(row, ROWS).load(gl.SliceLayout(1, L))
        b_S = gl.fma(b_y[None, :], b_k[:, None], b_S)
        gl.store(p + _tile_offsets(row, ROWS, V, BV), b_S.to(p.dtype.element_ty), mask=to_slot)


@gluon.jit
def _decayed(held, decay, CHANNEL: gl.constexpr, row: gl.constexpr, ROWS: gl.constexpr, L: gl.constexpr):
    """Rows of the state, decayed.   [ROWS, BV] float32"""
    b_S = held.slice(row, ROWS).load(L).to(gl.float32)
    if CHANNEL:
        return b_S * decay.slice(row, ROWS).load(gl.SliceLayout(1, L))[:, None]
    else:
        return b_S * decay


@gluon.jit
def _tile_offsets(row, ROWS: gl.constexpr, V: gl.constexpr, BV: gl.constexpr):
    """Offsets of rows of a tile in [K, V].   [ROWS, BV]"""
    L: gl.constexpr = coalesced_layout(BV, gl.num_warps())
    o_k = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    return o_k[:, None] * V + gl.arange(0, BV, layout=gl.SliceLayout(0, L))[None, :]
