"""Shared memory of a program, and the TMA loads of a tile."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from wyfold.kernels.prepare.gluon.channel.arguments import BK
from wyfold.tile.index.gluon import barrier, tma_load


class Smem(NamedTuple):
    """Shared memory; the package's docstring says which memory is reused.

    Attributes:
        gate_buffer: [BT, K] float32: gates, then each sub-chunk's decayed keys and queries.
        gates: [BT, K] float32: sums of gates, then pairs of keys, then results.
        keys, queries: [BT, K] tokens, then decayed rows, then -U and P^T.
        border_decays: [K / BK, 16, BK] decays between sub-chunks, then diagonal blocks of -U.
        rest_sums: [K / BK, 4, BK] sums of a sub-chunk's gates behind its first row.
        safe_beta, inverse_beta: [BT] beta, held away from zero, and its reciprocal.
        gates_ready, tokens_ready: Mbarriers of the gates, and of k and q.
    """

    gate_buffer: Any
    gates: Any
    keys: Any
    queries: Any
    border_decays: Any
    rest_sums: Any
    safe_beta: Any
    inverse_beta: Any
    gates_ready: Any
    tokens_ready: Any


@gluon.jit
def allocate(ERASES: gl.constexpr, K: gl.constexpr, BT: gl.constexpr):
    """Allocate the shared memory of a program. If writes erase nothing, one buffer has both tiles of gates."""
    HALF: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    FULL32: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    CUBE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    NB: gl.constexpr = K // BK
    gate_buffer = gl.allocate_shared_memory(gl.float32, [BT, K], FULL32)
    gates = gate_buffer
    if ERASES:
        gates = gl.allocate_shared_memory(gl.float32, [BT, K], FULL32)
    keys = gl.allocate_shared_memory(gl.bfloat16, [BT, K], HALF)
    queries = gl.allocate_shared_memory(gl.bfloat16, [BT, K], HALF)
    border_decays = gl.allocate_shared_memory(gl.float32, [NB, 16, BK], CUBE)
    rest_sums = gl.allocate_shared_memory(gl.float32, [NB, 4, BK], CUBE)
    safe_beta = gl.allocate_shared_memory(gl.float32, [BT], FLAT)
    inverse_beta = gl.allocate_shared_memory(gl.float32, [BT], FLAT)
    gates_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    tokens_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    return Smem(
        gate_buffer, gates, keys, queries, border_decays, rest_sums, safe_beta, inverse_beta, gates_ready, tokens_ready
    )


@gluon.jit
def init_barriers(smem):
    """Initialise the barriers, visibly to TMA."""
    mbarrier.init(smem.gates_ready, count=1)
    mbarrier.init(smem.tokens_ready, count=1)
    fence_async_shared()
    barrier()


@gluon.jit
def load_gates(x_g, s_g, token, i_hv, gates_ready, G):
    """Issue the load of a chunk's gates."""
    mbarrier.expect(gates_ready, x_g.block_type.nbytes)
    tma_load(x_g, [token, (i_hv.to(gl.int64) * s_g[2]).to(gl.int32)], gates_ready, G)


@gluon.jit
def load_tokens(x_k, s_k, x_q, s_q, token, i_h, tokens_ready, keys, queries):
    """Issue the loads of a chunk's k and q."""
    mbarrier.expect(tokens_ready, x_k.block_type.nbytes + x_q.block_type.nbytes)
    tma_load(x_k, [token, (i_h.to(gl.int64) * s_k[2]).to(gl.int32)], tokens_ready, keys)
    tma_load(x_q, [token, (i_h.to(gl.int64) * s_q[2]).to(gl.int32)], tokens_ready, queries)
