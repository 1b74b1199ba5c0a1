"""`segment_fold` in Triton: one program per cut sequence, value head and tile of value rows, serial over the borders.

The state is held transposed, [V, K], as in the scans, and is the left operand of

    S^T[r + 1] = H^T[r + 1] + S^T[r] M^T[r + 1]        dS^T[r - 1] = c^T[r - 1] + dS^T[r] M[r]

The right operand is loaded from memory in slices of rows, pipelined across borders, so only the products are serial.
All numbers are float32, and products are exact to at least 16 bits (docs/numerics.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wyfold.runtime.chunk_layout import Segments
from wyfold.runtime.kernel_configs import LaunchKey, tile_width, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.tile.dot.triton import contracts, exact, mm_exact
from wyfold.tile.index.triton import strides
from wyfold.tile.state.triton import load_state, store_state


def segment_fold(S: Tensor, M: Tensor, segments: Segments, *, reverse: bool, dtype: torch.dtype) -> None:
    """Fold summaries into states, in place.

    Args:
        S: [borders, HV, K, V] float32 view, H or c as in `segment_fold.eager`.
        M: [borders, HV, K, K] float32 view. Only a row of zeros holds negative zeros: a diagonal of negative zeros
            marks a map of zeros.
        segments: Layout of the segments.
        reverse: S holds gradients c.
        dtype: Dtype of the call's tokens, which sets the precision of the products.
    """
    HV, K, V = S.shape[1:]
    config = tuned("segment_fold.triton", LaunchKey(K=K), S.device)
    BK = tile_width(K)
    launch_kernel(
        wyfold_segment_fold_triton,
        segments.divided.shape[0] * HV * -(-V // config.blocks["BV"]),
        p_S=S,
        s_S=strides(S),
        p_M=M,
        s_M=strides(M.mT if reverse else M),
        p_first=segments.first,
        p_divided=segments.divided,
        N=segments.sequences,
        HV=HV,
        K=K,
        V=V,
        BK=BK,
        BV=config.blocks["BV"],
        BS=min(BK, config.blocks["BS"]),
        BACK=reverse,
        EXACT=exact(dtype),
        STAGES=config.stages,
        **config.options(contract=contracts(dtype)),
    )


@triton.jit(do_not_specialize=["N"])
def wyfold_segment_fold_triton(
    p_S,
    s_S,
    p_M,
    s_M,
    p_first,
    p_divided,
    N,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BS: tl.constexpr,
    BACK: tl.constexpr,
    EXACT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program owns BV value rows of one state at all borders; a product takes BK / BS steps."""
    NV: tl.constexpr = (V + BV - 1) // BV
    SLICES: tl.constexpr = BK // BS
    pid = tl.program_id(0).to(tl.int64)
    i_v, i_hv, i_n = pid % NV, (pid // NV) % HV, tl.load(p_divided + pid // (NV * HV))
    column = (i_v * BV).to(tl.int32)
    start, stop = tl.load(p_first + i_n) - i_n, tl.load(p_first + i_n + 1, mask=i_n < N, other=0) - i_n - 1
    if start + 1 < stop:
        if _all_maps_zero(p_S, s_S, p_M, s_M, start, stop, i_hv, column, K, V, BK, BV, BACK):
            stop = start
    if start + 1 < stop:
        r = start
        if BACK:
            r = stop - 1
        b_S = load_state(p_S, s_S, r, i_hv, column, K, V, BK, BV)
        b_sum = tl.zeros((BV, BK), tl.float32)
        o_s = tl.arange(0, BK // BS)[None, :, None]
        o_k = tl.arange(0, BK)[None, :]
        for i in tl.range(0, ((stop - start - 1) * SLICES).to(tl.int32), num_stages=STAGES):
            i_s = i % SLICES
            if BACK:
                r = stop - 2 - i // SLICES
                i_map = r + 1
            else:
                r = start + 1 + i // SLICES
                i_map = r
            # Rows k of M^T[k, k']. For gradients the launch exchanges M's strides, so these are rows of M.
            o_row = i_s * BS + tl.arange(0, BS)[:, None]
            offsets = i_map * s_M[0] + i_hv * s_M[1] + o_row.to(tl.int64) * s_M[3] + o_k.to(tl.int64) * s_M[2]
            b_M = tl.load(p_M + offsets, mask=(o_row < K) & (o_k < K), other=0.0)
            # Loaded before the product, so that its latency is hidden.
            b_own = load_state(p_S, s_S, r, i_hv, column, K, V, BK, BV)
            b_slice = tl.sum(tl.where(o_s == i_s, b_S.reshape(BV, BK // BS, BS), 0.0), axis=1)
            b_sum = mm_exact(b_slice, b_M, b_sum, EXACT)
            if i_s == SLICES - 1:
                b_S = b_own + b_sum
                store_state(p_S, s_S, r, i_hv, column, b_S, K, V, BK, BV)
                b_sum = tl.zeros((BV, BK), tl.float32)


@triton.jit
def _all_maps_zero(
    p_S,
    s_S,
    p_M,
    s_M,
    start,
    stop,
    i_hv,
    column,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BACK: tl.constexpr,
):
    """Whether all maps between these borders are zeros and the states they apply to are finite.

    Then the summaries at the borders are already the states. `segment_summary` marks such a map by the sign of its
    zeros.
    """
    STEP: tl.constexpr = 8
    o_k = tl.arange(0, BK)
    o_v = column + tl.arange(0, BV)
    adds = 0
    for first_border in range(start, stop - 1, STEP):
        r = first_border + tl.arange(0, STEP).to(tl.int64)
        m_r = (r < stop - 1)[:, None]
        m_k = m_r & (o_k < K)[None, :]
        diagonal = (r + 1)[:, None] * s_M[0] + i_hv * s_M[1] + o_k[None, :].to(tl.int64) * (s_M[2] + s_M[3])
        b_diagonal = tl.load(p_M + diagonal, mask=m_k, other=0.0)
        marked = (b_diagonal.to(tl.int32, bitcast=True) == -(2**31)) | ~m_k
        if BACK:
            r += 1
        tiles = (r * s_S[0] + i_hv * s_S[1])[:, None, None] + o_v.to(tl.int64)[None, :, None] * s_S[3]
        tiles += o_k.to(tl.int64)[None, None, :] * s_S[2]
        m_v = (o_v < V)[None, :, None] & (o_k < K)[None, None, :]
        b_S = tl.load(p_S + tiles, mask=m_r[:, :, None] & m_v, other=0.0)
        unbounded = tl.max(tl.max(tl.max((b_S - b_S != 0.0).to(tl.int32), 2), 1), 0)
        adds = tl.maximum(adds, tl.maximum(unbounded, tl.max(tl.max((~marked).to(tl.int32), 1), 0)))
    return adds == 0
