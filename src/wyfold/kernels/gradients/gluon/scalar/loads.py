"""TMA loads of the tiles of a value head."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from wyfold.kernels.gradients.gluon.scalar.arguments import Smem
from wyfold.tile.index.gluon import barrier, reinterpret, tma_load


@gluon.jit
def allocate(x_q, x_k, x_do, x_e, x_X, x_S, x_dS, V: gl.constexpr, BT: gl.constexpr, BK: gl.constexpr):
    """Allocate the shared memory of a program, and initialise its barriers."""
    s_q = gl.allocate_shared_memory(x_q.dtype, [2, BT, BK], x_q.layout)
    s_k = gl.allocate_shared_memory(x_k.dtype, [2, BT, BK], x_k.layout)
    s_do = gl.allocate_shared_memory(x_do.dtype, [BT, V], x_do.layout)
    s_e = gl.allocate_shared_memory(x_e.dtype, [BT, V], x_e.layout)
    s_X = gl.allocate_shared_memory(x_X.dtype, [BT, V], x_X.layout)
    s_S = gl.allocate_shared_memory(x_S.dtype, [V, BK], x_S.layout)
    s_dS = gl.allocate_shared_memory(x_dS.dtype, [V, BK], x_dS.layout)
    numbers = gl.allocate_shared_memory(gl.float32, [2 * BT], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bars = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    barrier()
    return Smem(
        s_q, s_k, s_do, s_e, s_X, s_S, s_dS, numbers, bars, bars.index(0), bars.index(1), bars.index(2), bars.index(3)
    )


@gluon.jit
def load_X(inputs, smem, BT: gl.constexpr):
    """Issue the load of X."""
    mbarrier.expect(smem.rows_ready, inputs.X.block_type.nbytes)
    tma_load(inputs.X, [inputs.tile * BT, 0], smem.rows_ready, smem.X)


@gluon.jit
def load_values(inputs, smem, BT: gl.constexpr):
    """Issue the loads of e and do."""
    mbarrier.expect(smem.values_ready, inputs.do.block_type.nbytes + inputs.e.block_type.nbytes)
    tma_load(inputs.e, [inputs.tile * BT, 0], smem.values_ready, smem.e)
    tma_load(inputs.do, [inputs.token, inputs.column_do], smem.values_ready, smem.do)


@gluon.jit
def load_tokens(inputs, smem, BK: gl.constexpr):
    """Issue the loads of q and k."""
    mbarrier.expect(smem.tokens_ready, 2 * (inputs.q.block_type.nbytes + inputs.k.block_type.nbytes))
    for h in gl.static_range(2):
        tma_load(inputs.q, [inputs.token, inputs.column_q + h * BK], smem.tokens_ready, smem.q.index(h))
        tma_load(inputs.k, [inputs.token, inputs.column_k + h * BK], smem.tokens_ready, smem.k.index(h))


@gluon.jit
def load_states(inputs, smem, h, V: gl.constexpr, BK: gl.constexpr):
    """Issue the loads of half h of both states."""
    mbarrier.expect(smem.states_ready, inputs.S.block_type.nbytes + inputs.dS.block_type.nbytes)
    tma_load(inputs.S, [inputs.tile * V, h * BK], smem.states_ready, smem.S)
    tma_load(inputs.dS, [inputs.tile * V, h * BK], smem.states_ready, smem.dS)


@gluon.jit
def load_again(inputs, smem, BT: gl.constexpr, BK: gl.constexpr):
    """Issue the loads of the first halves of q and k again, into the memory of S."""
    reloaded = reinterpret(smem.S, inputs.q.dtype, [2, BT, BK], inputs.q.layout)
    mbarrier.expect(smem.states_ready, inputs.q.block_type.nbytes + inputs.k.block_type.nbytes)
    tma_load(inputs.q, [inputs.token, inputs.column_q], smem.states_ready, reloaded.index(0))
    tma_load(inputs.k, [inputs.token, inputs.column_k], smem.states_ready, reloaded.index(1))


@gluon.jit
def clear_rows(tile, rows, BT: gl.constexpr, BW: gl.constexpr):
    """Zero the rows of a shared memory tile past the sequence's end, since 0 times NaN is NaN."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // BW, BW // 8], [gl.num_warps(), 1], [1, 0])
    x = tile.load(L)
    o_t = gl.arange(0, BT, layout=gl.SliceLayout(1, L))
    tile.store(gl.where((o_t < rows)[:, None], x, gl.zeros([BT, BW], x.dtype, L)))
    fence_async_shared()
    barrier()
