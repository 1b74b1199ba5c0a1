"""`scan` in Triton: one program per sequence, value head and tile of value rows; the state stays in its registers.

The state is held transposed, [V, K], so that every product reads the running value as its left operand and nothing in
registers is transposed into one:

    Y^T = beta (V^T - (S^T k^T) in)
    o^T = (S^T q^T) in + Y^T F^T                    in, out: decay of rows, per token; a channel gate's is in q and k
    S^T <- total S^T + Y^T E                        folded
    S^T <- total S^T + ((Y^T A^T) out) k            else: one product more, 128 bytes a token less
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from wyfold.runtime.chunks import ChunkGrid
from wyfold.runtime.launch import tuned
from wyfold.runtime.options import DeltaOptions
from wyfold.stages.records import Prepared
from wyfold.tile.dot.triton import operand, precision
from wyfold.tile.index.triton import load_tile, load_tokens, sequence_span, store_tokens
from wyfold.tile.state.triton import advance, load_state, read, residual, store_state


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prepared: Prepared,
    initial_state: Tensor | None,
    grid: ChunkGrid,
    options: DeltaOptions,
    key: str,
    o: Tensor,
    final_state: Tensor | None,
    states: Tensor | None,
    first_state: Tensor | None,
) -> None:
    """Run every sequence from its entering state.

    Args:
        q, k: [B, T, H, K] tokens, any strides.
        v: [B, T, HV, V].
        prepared: From `prepare`.
        initial_state: [N, HV, K, V] view of any strides and float dtype, or None (zeros).
        grid: The call's chunk grid.
        options: Uses `scale`, `checkpoint_every`.
        key: Of the launch configuration.
        o: [B, T, HV, V] written.
        final_state: [N, HV, K, V] view, written, or None.
        states: [rows, HV, K, V] view, written with the states after every `checkpoint_every` tokens, or None.
        first_state: [N] int64 row in `states` of each sequence's first.
    """
    (H, K), (HV, V), C = q.shape[2:], v.shape[2:], grid.chunk_size
    config = tuned("scan.triton", key, q.device)
    BV = min(config.blocks["BV"], max(16, triton.next_power_of_2(V)))
    tiled = prepared.q is not None
    wyfold_scan_triton[(grid.sequences * HV * -(-V // BV),)](
        prepared.q if tiled else q,
        None if tiled else q.stride(),
        prepared.k if tiled else k,
        None if tiled else k.stride(),
        v,
        v.stride(),
        prepared.rows,
        prepared.total,
        prepared.E,
        prepared.A,
        prepared.F,
        initial_state,
        None if initial_state is None else initial_state.stride(),
        o,
        o.stride(),
        final_state,
        None if final_state is None else final_state.stride(),
        states,
        None if states is None else states.stride(),
        first_state,
        grid.cu,
        grid.first,
        grid.tokens,
        grid.per_sequence,
        options.scale,
        max(1, options.checkpoint_every // C),
        H=H,
        HV=HV,
        K=K,
        V=V,
        BT=C,
        BK=max(16, triton.next_power_of_2(K)),
        BV=BV,
        PACKED=grid.cu is not None,
        CHANNEL=tiled,
        OP=operand(q.dtype),
        PRECISION=precision(q.dtype),
        STAGES=config.stages,
        num_warps=config.warps,
        num_stages=config.stages,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=["T", "per_sequence", "scale", "every"])
def wyfold_scan_triton(
    p_q,
    s_q,
    p_k,
    s_k,
    p_v,
    s_v,
    p_rows,
    p_total,
    p_E,
    p_A,
    p_F,
    p_S0,
    s_S0,
    p_o,
    s_o,
    p_ST,
    s_ST,
    p_states,
    s_states,
    p_first_state,
    p_cu,
    p_first,
    T,
    per_sequence,
    scale,
    every,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PACKED: tl.constexpr,
    CHANNEL: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program owns BV value rows of one state; a head's tiles are neighbours, so that they share k and q in L2."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    i_v, i_hv, i_n = pid % NV, (pid // NV) % HV, pid // (NV * HV)
    i_h = i_hv // (HV // H)
    column = (i_v * BV).to(tl.int32)
    i_c, b, t, length = sequence_span(i_n, p_cu, p_first, T, per_sequence, PACKED)
    o_r = tl.arange(0, BT)

    b_S = tl.zeros((BV, BK), tl.float32)
    if p_S0 is not None:
        b_S = load_state(p_S0, s_S0, i_n, i_hv, column, K, V, BK, BV)
    for i in tl.range(0, tl.cdiv(length, BT).to(tl.int32), num_stages=STAGES):
        i_tile = (i_c + i) * HV + i_hv
        first = t + i * BT
        rows = tl.minimum(length - i * BT, BT)
        if CHANNEL:
            b_q = load_tile(p_q, i_tile, 0, 0, BT, K, BT, BK)
            b_k = load_tile(p_k, i_tile, 0, 0, BT, K, BT, BK)
        else:
            b_q = load_tokens(p_q, s_q, b, first, i_h, 0, rows, K, BT, BK)
            b_k = load_tokens(p_k, s_k, b, first, i_h, 0, rows, K, BT, BK)
        b_v = load_tokens(p_v, s_v, b, first, i_hv, column, rows, V, BT, BV)
        b_FT = load_tile(p_F, i_tile, 0, 0, BT, BT, BT, BT)
        p_row = p_rows + i_tile * (4 * BT) + o_r
        b_y = residual(b_S, b_k, b_v, tl.load(p_row), OP, PRECISION) * tl.load(p_row + 3 * BT)[None, :]
        b_o = read(b_S, b_q, b_y, b_FT, tl.load(p_row + BT), OP, PRECISION)
        store_tokens(p_o, s_o, b, first, i_hv, column, rows, tl.trans(b_o * scale), V, BT, BV)
        if p_E is not None:
            b_E = load_tile(p_E, i_tile, 0, 0, BT, K, BT, BK)
            b_S = advance(b_S, p_total, i_tile, b_y, b_E, CHANNEL, K, BK, OP, PRECISION)
        else:
            b_AT = load_tile(p_A, i_tile, 0, 0, BT, BT, BT, BT)
            b_N = tl.dot(b_y.to(OP), b_AT.to(OP), input_precision=PRECISION)
            b_N *= tl.load(p_row + 2 * BT)[None, :]
            b_S = advance(b_S, p_total, i_tile, b_N, b_k, CHANNEL, K, BK, OP, PRECISION)
        if p_states is not None:
            if ((i + 1) % every == 0) & (length >= (i + 1) * BT):
                i_state = (i + 1) // every - 1 + tl.load(p_first_state + i_n)
                store_state(p_states, s_states, i_state, i_hv, column, b_S, K, V, BK, BV)
    if p_ST is not None:
        store_state(p_ST, s_ST, i_n, i_hv, column, b_S, K, V, BK, BV)
