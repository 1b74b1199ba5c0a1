"""Loads of a chunk's keys and queries into shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from wyfold.tile.index.gluon import barrier, tma_load, token_tile
from wyfold.tile.index.triton import TokenRows


@gluon.jit
def load_tokens(
    x_q, x_k, tokens, q, k, q_ready, k_ready, i_c, i_h, b, t, T, rows,
    SIZES: gl.constexpr, USE_TMA: gl.constexpr, TOKEN_FROM_PID: gl.constexpr,
):  # fmt: skip
    """Load k and q, by TMA with their barriers or by pointer; with TMA, both are in flight afterwards."""
    K: gl.constexpr = SIZES.K
    BT: gl.constexpr = SIZES.BT
    if USE_TMA:
        mbarrier.init(k_ready, count=1)
        mbarrier.init(q_ready, count=1)
        mbarrier.expect(k_ready, x_k.block_type.nbytes)
        mbarrier.expect(q_ready, x_q.block_type.nbytes)
        fence_async_shared()
        barrier()
        token = (i_c * BT).to(gl.int32) if TOKEN_FROM_PID else (b * T + t).to(gl.int32)
        tma_load(x_k, [token, (i_h * tokens.s_k[2]).to(gl.int32)], k_ready, k)
        tma_load(x_q, [token, (i_h * tokens.s_q[2]).to(gl.int32)], q_ready, q)
        # Without this barrier the assembler moves the load of q behind the gate's arrival (docs/facts/hopper.md,
        # SASS-6).
        barrier()
    else:
        k.store(token_tile(x_k, tokens.s_k, TokenRows(b, t, rows), i_h, K, BT))
        q.store(token_tile(x_q, tokens.s_q, TokenRows(b, t, rows), i_h, K, BT))
        fence_async_shared()
        barrier()
