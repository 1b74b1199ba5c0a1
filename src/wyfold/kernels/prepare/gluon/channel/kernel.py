"""The kernel of `prepare` in Gluon with a channel gate."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from wyfold.kernels.prepare.gluon.channel.erase_gate import load_erase_gate
from wyfold.kernels.prepare.gluon.channel.factors import store_pairs, write_factors, write_readings
from wyfold.kernels.prepare.gluon.channel.gates import sum_gates
from wyfold.kernels.prepare.gluon.channel.grams import decayed_grams
from wyfold.kernels.prepare.gluon.channel.rows import load_beta, store_row_numbers
from wyfold.kernels.prepare.gluon.channel.smem import allocate, init_barriers, load_gates, load_tokens
from wyfold.tile.index.gluon import (
    barrier,
    clear_tokens,
    quarters,
    reinterpret,
    start_next_launch,
    tma_store,
    tma_store_upper,
    token_tile,
    wait_for_launch_ahead,
)
from wyfold.tile.index.triton import TokenRows, chunk_span
from wyfold.tile.inverse.gluon import invert_diagonal_blocks


@gluon.jit(do_not_specialize=["N", "tiles", "T", "per_sequence", "clear", "with_w"])
def wyfold_prepare_channel_gluon(
    x_q,
    x_k,
    x_g,
    x_qd,
    x_kd,
    x_E,
    x_F,
    x_W,
    tokens,
    gate,
    strength,
    packing,
    N,
    tiles,
    T,
    per_sequence,
    clear,
    with_w,
    SIZES: gl.constexpr,
    FLAGS: gl.constexpr,
):
    """One program computes a chunk of one value head, or loops over such tiles where every chunk is full."""
    H: gl.constexpr = SIZES.H
    HV: gl.constexpr = SIZES.HV
    HB: gl.constexpr = SIZES.HB
    K: gl.constexpr = SIZES.K
    V: gl.constexpr = SIZES.V
    BT: gl.constexpr = SIZES.BT
    BV: gl.constexpr = SIZES.BV
    PACKED: gl.constexpr = FLAGS.PACKED
    FULL: gl.constexpr = FLAGS.FULL
    USE_TMA: gl.constexpr = FLAGS.USE_TMA
    ACTIVATION: gl.constexpr = FLAGS.ACTIVATION
    NORM: gl.constexpr = FLAGS.NORM
    LOGIT: gl.constexpr = FLAGS.LOGIT
    ROWS: gl.constexpr = FLAGS.ROWS
    ERASES: gl.constexpr = FLAGS.ERASES
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    HALF: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    SLIM: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
    CUBE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    ONE: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    start_next_launch()
    pid = gl.program_id(0)
    # Where every chunk is full, the chunk's number gives its first token: no load waits for a division.
    TOKEN_FROM_PID: gl.constexpr = FULL and USE_TMA
    b, t, rows = None, None, BT
    if not TOKEN_FROM_PID:
        i_n, _, b, t, rows = chunk_span((pid // HV).to(gl.int64), packing, T, per_sequence, PACKED, BT)
        if PACKED:
            if i_n == N:
                if clear:
                    clear_tokens(tokens.o, tokens.s_o, TokenRows(b, t, rows), (pid % HV).to(gl.int64), V, BT, BV)
                return

    smem = allocate(ERASES, K, BT)
    gates_ready, tokens_ready = smem.gates_ready, smem.tokens_ready
    G = smem.gate_buffer
    if USE_TMA:
        if x_g.dtype != gl.float32:
            G = reinterpret(smem.gate_buffer, x_g.dtype, [2, BT, K], gl.NVMMASharedLayout(128, 16, 2)).index(0)
        init_barriers(smem)
        token, head = pid // HV * BT if TOKEN_FROM_PID else (b * T + t).to(gl.int32), pid % HV
        load_gates(x_g, gate.s_g, token, head, gates_ready, G)
        load_tokens(x_k, tokens.s_k, x_q, tokens.s_q, token, head // (HV // H), tokens_ready, smem.keys, smem.queries)
        barrier()  # as in `scalar`: otherwise the assembler moves the last load behind beta's arrival
    else:
        head = (pid % HV).to(gl.int64)
        G.store(token_tile(x_g, gate.s_g, TokenRows(b, t, rows), head, K, BT).to(gl.float32))
        smem.keys.store(token_tile(x_k, tokens.s_k, TokenRows(b, t, rows), head // (HV // H), K, BT))
        smem.queries.store(token_tile(x_q, tokens.s_q, TokenRows(b, t, rows), head // (HV // H), K, BT))
    phase = 0
    last = tiles if TOKEN_FROM_PID else pid + 1
    # No hoisting: values common to all tiles, mostly addresses of lanes, would spill if they were kept.
    for tile in tl.range(pid, last, gl.num_programs(0), disable_licm=True):
        i_tile, i_hv = tile.to(gl.int64), (tile % HV).to(gl.int64)
        i_b, i_t = b, t
        if TOKEN_FROM_PID:
            _, _, i_b, i_t, _ = chunk_span((tile // HV).to(gl.int64), packing, T, per_sequence, PACKED, BT)

        # Per-row numbers, two in each lane of every warp.
        o = gl.arange(0, BT, layout=ONE)
        beta = load_beta(strength, i_b, i_t, i_hv, o, rows, LOGIT)

        at, i_hb = TokenRows(i_b, i_t, rows), i_hv // (HV // HB)
        erase = load_erase_gate(tokens, at, i_hb, 0, FULL, BT, K)
        if USE_TMA:
            mbarrier.wait(gates_ready, phase)
        else:
            barrier()
        anchors = sum_gates(G, smem, gate, tokens.total, i_tile, i_hv, rows, FULL, ACTIVATION, K)
        store_row_numbers(tokens.rows, smem, beta, strength.erases, i_tile, o)
        if USE_TMA:
            mbarrier.wait(tokens_ready, phase)
        grams = decayed_grams(
            x_qd, x_kd if ERASES else x_E, tokens, at, i_hb, smem, tile, rows, anchors, erase,
            FULL, NORM, ROWS, ERASES, BT, K,
        )  # fmt: skip
        after = tile + gl.num_programs(0)
        if TOKEN_FROM_PID:
            if after < tiles:
                load_gates(x_g, gate.s_g, after // HV * BT, after % HV, gates_ready, G)
        # -U and P^T, as bfloat16 pairs, overwrite the stored rows; the diagonal blocks of -U overwrite the border
        # decays.
        if ERASES:
            U = reinterpret(smem.keys, gl.bfloat16, [2 * BT, BT], WIDE)
            PT = reinterpret(smem.queries, gl.bfloat16, [8, 16, BT], WIDE)
            near = reinterpret(smem.border_decays, gl.float32, [2, 4, 16, 16], CUBE).index(0)
            D = reinterpret(smem.border_decays, gl.bfloat16, [2, 2 * BT, 16], SLIM).index(1)
            store_pairs(grams, smem, U, near, strength.erases, BT)
            fence_async_shared()
            barrier()
            invert_diagonal_blocks(near, D, BT)
            barrier()
            write_factors(smem, U, PT, D, with_w, BT, K)
        else:
            write_readings(grams, smem, BT)
        out_E = reinterpret(smem.gates, gl.bfloat16, [2, BT, K], HALF).index(0)
        out = quarters(smem.gates if ERASES else smem.border_decays, x_F, 4 if ERASES else 1)
        fence_async_shared()
        barrier()
        if TOKEN_FROM_PID:
            if after < tiles:
                i_h = after % HV // (HV // H)
                load_tokens(
                    x_k, tokens.s_k, x_q, tokens.s_q, after // HV * BT, i_h, tokens_ready, smem.keys, smem.queries
                )
        tma_store_upper(x_F, tile, out, 2 if ERASES else 0)
        if ERASES:
            tma_store(x_E, [tile * BT, 0], out_E)
            if with_w:
                tma_store_upper(x_W, tile, out, 3)
        phase = phase ^ 1
    tma.store_wait(pendings=0)
    wait_for_launch_ahead()
    # The memory of an mbarrier must not be reused (docs/facts/hopper.md, KDA-NAN-1).
    gates_ready._keep_alive()
    tokens_ready._keep_alive()
