"""`scan_bwd` in Triton: two halves of one grid, each program with a state, or its gradient, in its registers.

    forward half:  store S, then as `scan` without output; stores e = W R
    reverse half:  store dS (of the state leaving the chunk), then
                   X^T  = scale do^T F + dS^T E^T                    folded
                   X^T  = scale do^T F + ((dS^T k^T) out) A          else
                   dS^T <- total dS^T + scale (do^T in) q - (beta X^T in) k
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from wyfold.runtime.chunks import ChunkGrid
from wyfold.runtime.launch import tuned
from wyfold.runtime.options import DeltaOptions
from wyfold.stages.records import Prepared, TokenBorders
from wyfold.tile.dot.triton import mm, operand, precision, workspace
from wyfold.tile.index.triton import load_tile, load_tokens, sequence_span, store_tile
from wyfold.tile.state.triton import advance, load_state, output_bwd, residual, retreat, store_state


def scan_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prepared: Prepared,
    initial_state: Tensor | None,
    do: Tensor,
    dST: Tensor | None,
    grid: ChunkGrid,
    options: DeltaOptions,
    key: str,
    dS0: Tensor | None,
) -> TokenBorders:
    """States and their gradients at the borders of every chunk.

    Args:
        q, k: [B, T, H, K] tokens, any strides.
        v, do: [B, T, HV, V].
        prepared: From `prepare`, W among it.
        initial_state: [N, HV, K, V] view of any strides and float dtype, or None (zeros).
        dST: [N, HV, K, V] view, gradient of the final state, or None (zeros).
        grid: The call's chunk grid.
        options: Uses `scale`.
        key: Of the launch configuration.
        dS0: [N, HV, K, V] view, written, or None.
    """
    (H, K), (HV, V), C = q.shape[2:], v.shape[2:], grid.chunk_size
    tiles = grid.chunks * HV
    dtype = workspace(q.dtype)
    found = TokenBorders(
        *v.new_empty(2, tiles, V, K, dtype=dtype).unbind(), *v.new_empty(2, tiles, C, V, dtype=dtype).unbind()
    )
    config = tuned("scan_bwd.triton", key, q.device)
    BV = min(config.blocks["BV"], max(16, triton.next_power_of_2(V)))
    tiled = prepared.q is not None
    wyfold_scan_bwd_triton[(2 * grid.sequences * HV * -(-V // BV),)](
        prepared.q if tiled else q,
        None if tiled else q.stride(),
        prepared.k if tiled else k,
        None if tiled else k.stride(),
        v,
        v.stride(),
        do,
        do.stride(),
        prepared.rows,
        prepared.total,
        prepared.E,
        prepared.A,
        prepared.F,
        prepared.W,
        initial_state,
        None if initial_state is None else initial_state.stride(),
        dST,
        None if dST is None else dST.stride(),
        dS0,
        None if dS0 is None else dS0.stride(),
        *found,
        grid.cu,
        grid.first,
        grid.sequences,
        grid.tokens,
        grid.per_sequence,
        options.scale,
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
    return found


@triton.jit(do_not_specialize=["N", "T", "per_sequence", "scale"])
def wyfold_scan_bwd_triton(
    p_q,
    s_q,
    p_k,
    s_k,
    p_v,
    s_v,
    p_do,
    s_do,
    p_rows,
    p_total,
    p_E,
    p_A,
    p_F,
    p_W,
    p_S0,
    s_S0,
    p_dST,
    s_dST,
    p_dS0,
    s_dS0,
    p_S,
    p_dS,
    p_e,
    p_X,
    p_cu,
    p_first,
    N,
    T,
    per_sequence,
    scale,
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
    """One program owns BV value rows of one state, or of its gradient."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    half = N * HV * NV
    reverse = pid >= half
    pid -= tl.where(reverse, half, 0)
    i_v, i_hv, i_n = pid % NV, (pid // NV) % HV, pid // (NV * HV)
    i_h = i_hv // (HV // H)
    column = (i_v * BV).to(tl.int32)
    i_c, b, t, length = sequence_span(i_n, p_cu, p_first, T, per_sequence, PACKED)
    chunks = tl.cdiv(length, BT).to(tl.int32)
    o_r = tl.arange(0, BT)

    if reverse:
        b_dS = tl.zeros((BV, BK), tl.float32)
        if p_dST is not None:
            b_dS = load_state(p_dST, s_dST, i_n, i_hv, column, K, V, BK, BV)
        for j in tl.range(0, chunks, num_stages=STAGES):
            i = chunks - 1 - j
            i_tile = (i_c + i) * HV + i_hv
            first = t + i * BT
            rows = tl.minimum(length - i * BT, BT)
            if CHANNEL:
                b_q = load_tile(p_q, i_tile, 0, 0, BT, K, BT, BK)
                b_k = load_tile(p_k, i_tile, 0, 0, BT, K, BT, BK)
            else:
                b_q = load_tokens(p_q, s_q, b, first, i_h, 0, rows, K, BT, BK)
                b_k = load_tokens(p_k, s_k, b, first, i_h, 0, rows, K, BT, BK)
            b_do = load_tokens(p_do, s_do, b, first, i_hv, column, rows, V, BT, BV)
            b_FT = load_tile(p_F, i_tile, 0, 0, BT, BT, BT, BT)
            p_row = p_rows + i_tile * (4 * BT) + o_r
            store_tile(p_dS, i_tile, column, 0, b_dS, V, K, BV, BK)
            b_X, b_doT = output_bwd(b_do, b_FT, scale, OP, PRECISION)
            if p_E is not None:
                b_E = load_tile(p_E, i_tile, 0, 0, BT, K, BT, BK)
                b_X = mm(b_dS, tl.trans(b_E), b_X, OP, PRECISION)
            else:
                b_AT = load_tile(p_A, i_tile, 0, 0, BT, BT, BT, BT)
                b_dN = mm(b_dS, tl.trans(b_k), None, OP, PRECISION) * tl.load(p_row + 2 * BT)[None, :]
                b_X = mm(b_dN, tl.trans(b_AT), b_X, OP, PRECISION)
            store_tile(p_X, i_tile, 0, column, tl.trans(b_X), BT, V, BT, BV)
            b_dR = b_X * tl.load(p_row + 3 * BT)[None, :]
            b_in_k, b_in_q = tl.load(p_row), tl.load(p_row + BT)
            b_dS = retreat(b_dS, p_total, i_tile, b_doT, b_dR, b_q, b_k, b_in_q, b_in_k, CHANNEL, K, BK, OP, PRECISION)
        if p_dS0 is not None:
            store_state(p_dS0, s_dS0, i_n, i_hv, column, b_dS, K, V, BK, BV)
    else:
        b_S = tl.zeros((BV, BK), tl.float32)
        if p_S0 is not None:
            b_S = load_state(p_S0, s_S0, i_n, i_hv, column, K, V, BK, BV)
        for i in tl.range(0, chunks, num_stages=STAGES):
            i_tile = (i_c + i) * HV + i_hv
            first = t + i * BT
            rows = tl.minimum(length - i * BT, BT)
            if CHANNEL:
                b_k = load_tile(p_k, i_tile, 0, 0, BT, K, BT, BK)
            else:
                b_k = load_tokens(p_k, s_k, b, first, i_h, 0, rows, K, BT, BK)
            b_v = load_tokens(p_v, s_v, b, first, i_hv, column, rows, V, BT, BV)
            b_WT = load_tile(p_W, i_tile, 0, 0, BT, BT, BT, BT)
            p_row = p_rows + i_tile * (4 * BT) + o_r
            b_beta = tl.load(p_row + 3 * BT)
            store_tile(p_S, i_tile, column, 0, b_S, V, K, BV, BK)
            b_R = residual(b_S, b_k, b_v, tl.load(p_row), OP, PRECISION)
            b_e = mm(b_R, b_WT, None, OP, PRECISION)
            store_tile(p_e, i_tile, 0, column, tl.trans(b_e), BT, V, BT, BV)
            if p_E is not None:
                b_E = load_tile(p_E, i_tile, 0, 0, BT, K, BT, BK)
                b_S = advance(b_S, p_total, i_tile, b_R * b_beta[None, :], b_E, CHANNEL, K, BK, OP, PRECISION)
            else:
                b_N = b_e * (b_beta * tl.load(p_row + 2 * BT))[None, :]
                b_S = advance(b_S, p_total, i_tile, b_N, b_k, CHANNEL, K, BK, OP, PRECISION)
