"""A head's state in shared memory, [K, V] as it lies in a pool, for Hopper kernels that give it one token.

Nothing of it waits in registers: whole rows come past them, each step reads its own slices and forgets them, and how
much of a pool is under way is how many states fit into shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy


@gluon.constexpr_function
def whole_rows(V, warps):
    """Threads beside each other along rows of V 16-bit numbers, as memory wants them read and written."""
    return gl.BlockedLayout([1, 8], [256 // V, V // 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def own_columns(V, warps):
    """Each warp has columns of its own, and sums over rows without the others: a thread 8 columns of a row."""
    rows = 256 * warps // V
    return gl.BlockedLayout([1, 8], [rows, 32 // rows], [1, warps], [0, 1])


@gluon.constexpr_function
def sliced(rows):
    """Rows of a slice: at least those after which the swizzle of `state_room` repeats."""
    return max(8, rows)


@gluon.jit
def state_room(K: gl.constexpr, V: gl.constexpr):
    """Shared memory of a state, swizzled: eight threads reach eight rows at once."""
    return gl.allocate_shared_memory(gl.bfloat16, [K, V], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))


@gluon.jit
def fetch_state(held, p, there):
    """Let a head's state come from p, or zeros unless it is there."""
    K: gl.constexpr = held.shape[0]
    V: gl.constexpr = held.shape[1]
    async_copy.async_copy_global_to_shared(held, p + _lies(0, K, V), mask=there)
    async_copy.commit_group()


@gluon.jit
def key_sums(held, q, k, decay, CHANNEL: gl.constexpr):
    """S^T q and S^T k of the decayed state, in the order of the Triton twin's `key_sum` for [K, V].   [V] each

    Args:
        held: [K, V] in shared memory.
        q, k: [K] float32 in shared memory.
        decay: The same of a gate over channels, else one number.
    """
    V: gl.constexpr = held.shape[1]
    ROWS: gl.constexpr = sliced(256 * gl.num_warps() // V)
    b_q, b_k = _every(held, q, k, decay, CHANNEL, ROWS, 0, ROWS)
    return _halved(b_q), _halved(b_k)


@gluon.jit
def _every(
    held, q, k, decay, CHANNEL: gl.constexpr, ROWS: gl.constexpr, FIRST: gl.constexpr, STEP: gl.constexpr
):  # fmt: skip
    """Products of ROWS rows from FIRST on, and of those every STEP rows further, added up; halves of K meet first.

    Depth first, so that what waits for its other half is a slice for each halving, and not the state.
    """
    if STEP == held.shape[0]:
        L: gl.constexpr = own_columns(held.shape[1], gl.num_warps())
        b_S = _decayed(held, decay, CHANNEL, FIRST, ROWS, L)
        b_q = q.slice(FIRST, ROWS).load(gl.SliceLayout(1, L))
        b_k = k.slice(FIRST, ROWS).load(gl.SliceLayout(1, L))
        return b_S * b_q[:, None], b_S * b_k[:, None]
    else:
        low_q, low_k = _every(held, q, k, decay, CHANNEL, ROWS, FIRST, 2 * STEP)
        high_q, high_k = _every(held, q, k, decay, CHANNEL, ROWS, FIRST + STEP, 2 * STEP)
        return low_q + high_q, low_k + high_k


@gluon.jit
def _halved(b_x):
    """Sum over rows, halves first.   [rows, V] -> [V]"""
    if b_x.shape[0] == 2:
        return gl.convert_layout(gl.sum(b_x, axis=0), gl.SliceLayout(0, own_columns(b_x.shape[1], gl.num_warps())))
    else:
        return _halved(gl.sum(gl.reshape(b_x, [2, b_x.shape[0] // 2, b_x.shape[1]]), axis=0))


@gluon.jit
def store_written(p, held, k, b_y, decay, to_slot, CHANNEL: gl.constexpr):
    """Store the decayed state with the token's write, decay S + k y^T, rounded once, to p if that is in a slot."""
    K: gl.constexpr = held.shape[0]
    V: gl.constexpr = held.shape[1]
    L: gl.constexpr = whole_rows(V, gl.num_warps())
    ROWS: gl.constexpr = sliced(256 * gl.num_warps() // V)
    b_y = gl.convert_layout(b_y, gl.SliceLayout(0, L))
    for row in gl.static_range(0, K, ROWS):
        b_S = _decayed(held, decay, CHANNEL, row, ROWS, L)
        b_k = k.slice(row, ROWS).load(gl.SliceLayout(1, L))
        b_S = gl.fma(b_y[None, :], b_k[:, None], b_S)
        gl.store(p + _lies(row, ROWS, V), b_S.to(p.dtype.element_ty), mask=to_slot)


@gluon.jit
def _decayed(held, decay, CHANNEL: gl.constexpr, row: gl.constexpr, ROWS: gl.constexpr, L: gl.constexpr):
    """Rows of the state, decayed.   [ROWS, V] float32"""
    b_S = held.slice(row, ROWS).load(L).to(gl.float32)
    if CHANNEL:
        return b_S * decay.slice(row, ROWS).load(gl.SliceLayout(1, L))[:, None]
    else:
        return b_S * decay


@gluon.jit
def _lies(row, ROWS: gl.constexpr, V: gl.constexpr):
    """Offsets of a head's rows.   [ROWS, V]"""
    L: gl.constexpr = whole_rows(V, gl.num_warps())
    o_k = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    return o_k[:, None] * V + gl.arange(0, V, layout=gl.SliceLayout(0, L))[None, :]
