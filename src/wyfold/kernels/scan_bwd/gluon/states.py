"""States of `scan_bwd` in Gluon: loads and stores of a sequence's ends, and TMA stores of every chunk's."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from wyfold.kernels.pipeline.gluon import stage_before
from wyfold.tile.index.gluon import barrier, tma_store


@gluon.jit
def store_left(rounded, smem, part, done, SIZES: gl.constexpr):
    """Store a rounded state to its buffer, from where it is the left operand of the chunk's products."""
    left = smem.state.index((done % SIZES.OUT) * SIZES.PARTS + part)
    left.store(rounded)
    fence_async_shared()
    barrier()
    return left


@gluon.jit
def release(x_state, x_tokens, rounded, smem, part, tile, tile_before, first_row, stage, done, SIZES: gl.constexpr):
    """Issue the TMA stores of a chunk's state and of the preceding chunk's tokens, and release that chunk's stage.

    Nothing is stored or released for the chunk before the first, which has no block. A state buffer is free: every
    chunk ends by waiting until TMA has read all but the last OUT - 1 states.

    Args:
        rounded: The state; None if its buffer has it already (`store_left`).
    """
    V: gl.constexpr = SIZES.V
    BT: gl.constexpr = SIZES.BT
    PARTS: gl.constexpr = SIZES.PARTS
    OUT: gl.constexpr = SIZES.OUT
    state = smem.state.index((done % OUT) * PARTS + part)
    if rounded is not None:
        state.store(rounded)
        fence_async_shared()
    before = stage_before(stage, SIZES.STAGES)
    mbarrier.arrive(smem.free.index(before), count=1, pred=done > 0)
    if done > 0:
        tma_store(x_tokens, [tile_before * BT, first_row], smem.tokens.index(part))
    tma_store(x_state, [tile * V + first_row, 0], state)


@gluon.jit
def load_state(p, strides, outer, p_border, s_border, border, coords, first_row, K: gl.constexpr, BW: gl.constexpr):
    """Load value rows first_row.. of a state in [N, HV, K, V] as float32.

    The sequence's own state if `outer`, else the border's; zeros if there is none.
    """
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, K, 16])
    S = gl.zeros([BW, K], gl.float32, LS)
    if p_border is None:
        if p is not None:
            S = gl.load(p + _offsets(strides, coords.n, coords, first_row, K, BW)).to(gl.float32)
    elif outer:
        if p is not None:
            S = gl.load(p + _offsets(strides, coords.n, coords, first_row, K, BW)).to(gl.float32)
    elif coords.exists:
        S = gl.load(p_border + _offsets(s_border, border, coords, first_row, K, BW))
    return S


@gluon.jit
def store_state(p, strides, coords, first_row, S, K: gl.constexpr, BW: gl.constexpr):
    """Store value rows first_row.. of a state, rounding once to the storage dtype, if it is wanted."""
    if p is not None:
        gl.store(p + _offsets(strides, coords.n, coords, first_row, K, BW), S.to(p.dtype.element_ty))


@gluon.jit
def _offsets(strides, row, coords, first_row, K: gl.constexpr, BW: gl.constexpr):
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, K, 16])
    o_v = first_row + gl.arange(0, BW, layout=gl.SliceLayout(1, LS))
    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, LS))
    first = row * strides[0] + coords.hv * strides[1]
    return first + o_v.to(gl.int64)[:, None] * strides[3] + o_k.to(gl.int64)[None, :] * strides[2]
