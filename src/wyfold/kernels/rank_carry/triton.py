"""`rank_carry` and `rank_send` in Triton: one program per state, value head and tile of value rows.

The state is held transposed, [V, K], as in the scans. A map is applied as S^T M^T, in slices of the summed rows. All
numbers are float32, and products are exact to at least 16 bits (docs/numerics.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.records import StateRows
from wyfold.runtime.kernel_configs import Config, LaunchKey, tile_width, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.tile.dot.triton import contracts, exact, mm_exact
from wyfold.tile.index.triton import strides
from wyfold.tile.state.triton import load_state, store_state


def rank_carry(
    gathered: Tensor,
    routes: Tensor,
    outer: StateRows,
    borders: StateRows,
    tails: Tensor | None,
    *,
    reverse: bool,
    dtype: torch.dtype,
) -> None:
    """Write the state at the end of each route to where it enters, as in `rank_carry.eager`.

    `gathered` and `tails` are contiguous. `dtype` is the dtype of the call's tokens and sets the precision of the
    products.
    """
    B, HV, K, width = gathered.shape[2:]
    V, config = width - K, _config(K, gathered.device)
    launch_kernel(
        wyfold_rank_carry_triton,
        outer.rows.shape[0] * HV * -(-V // config.blocks["BV"]),
        p_gathered=gathered,
        p_routes=routes,
        B=B,
        p_outer=outer.states,
        s_outer=strides(outer.states),
        p_outer_rows=outer.rows,
        p_borders=borders.states,
        s_borders=strides(borders.states),
        p_border_rows=borders.rows,
        p_tails=tails,
        HV=HV,
        K=K,
        V=V,
        BK=tile_width(K),
        BV=config.blocks["BV"],
        BS=min(tile_width(K), config.blocks["BS"]),
        BACK=reverse,
        EXACT=exact(dtype),
        **config.options(contract=contracts(dtype)),
    )


def rank_send(borders: StateRows, tails: Tensor | None, out: Tensor, *, dtype: torch.dtype) -> None:
    """Pack the states that leave at borders, as in `rank_carry.eager`. `tails` and `out` are contiguous."""
    HV, K, columns = borders.states.shape[1:]
    config = _config(K, out.device)
    launch_kernel(
        wyfold_rank_send_triton,
        borders.rows.shape[0] * HV * -(-columns // config.blocks["BV"]),
        p_borders=borders.states,
        s_borders=strides(borders.states),
        p_rows=borders.rows,
        p_tails=tails,
        p_out=out,
        s_out=strides(out),
        HV=HV,
        K=K,
        V=columns if tails is None else tails.shape[-1] - K,
        COLUMNS=columns,
        BK=tile_width(K),
        BV=config.blocks["BV"],
        BS=min(tile_width(K), config.blocks["BS"]),
        EXACT=exact(dtype),
        **config.options(contract=contracts(dtype)),
    )


def _config(K: int, device: torch.device) -> Config:
    return tuned("rank_carry.triton", LaunchKey(K=K), device)


@triton.jit(do_not_specialize=["B"])
def wyfold_rank_carry_triton(
    p_gathered,
    p_routes,
    B,
    p_outer,
    s_outer,
    p_outer_rows,
    p_borders,
    s_borders,
    p_border_rows,
    p_tails,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BS: tl.constexpr,
    BACK: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One program owns BV value rows of one state, along the whole route."""
    NV: tl.constexpr = (V + BV - 1) // BV
    SIZE: tl.constexpr = K * (V + K)
    pid = tl.program_id(0).to(tl.int64)
    i_v, i_hv, i_n = pid % NV, (pid // NV) % HV, pid // (NV * HV)
    column = (i_v * BV).to(tl.int32)
    route, row = i_n // B, i_n % B
    start, stop = tl.load(p_routes + route), tl.load(p_routes + route + 1)
    p_own = p_gathered + (row * HV + i_hv) * SIZE
    step = tl.cast(B, tl.int64) * HV * SIZE
    b_S = _state_columns(p_own + tl.load(p_routes + start) * step, column, K, V, BK, BV)
    for i in range(start + 1, stop):
        p_map = p_own + tl.load(p_routes + i) * step
        b_own = _state_columns(p_map, column, K, V, BK, BV)
        b_S = b_own + _apply_map(b_S, p_map + V, V + K, 1, K, BK, BS, EXACT)
    store_state(p_outer, s_outer, tl.load(p_outer_rows + i_n), i_hv, column, b_S, K, V, BK, BV)
    i_border = tl.load(p_border_rows + i_n)
    if p_tails is not None:
        b_S = _apply_map(b_S, p_tails + (i_n * HV + i_hv) * SIZE + V, 1, V + K, K, BK, BS, EXACT)
    if BACK:
        b_S += load_state(p_borders, s_borders, i_border, i_hv, column, K, V, BK, BV)
    store_state(p_borders, s_borders, i_border, i_hv, column, b_S, K, V, BK, BV)


@triton.jit
def wyfold_rank_send_triton(
    p_borders,
    s_borders,
    p_rows,
    p_tails,
    p_out,
    s_out,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    COLUMNS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One program owns BV columns of one [S | M]."""
    NV: tl.constexpr = (COLUMNS + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    i_v, i_hv, i_n = pid % NV, (pid // NV) % HV, pid // (NV * HV)
    column = (i_v * BV).to(tl.int32)
    b_S = load_state(p_borders, s_borders, tl.load(p_rows + i_n), i_hv, column, K, COLUMNS, BK, BV)
    if p_tails is not None:
        p_tail = p_tails + (i_n * HV + i_hv) * (K * (V + K))
        b_own = _state_columns(p_tail, column, K, V, BK, BV)
        b_S = b_own + _apply_map(b_S, p_tail + V, V + K, 1, K, BK, BS, EXACT)
    store_state(p_out, s_out, i_n, i_hv, column, b_S, K, COLUMNS, BK, BV)


@triton.jit
def _state_columns(p, column, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Load value rows column.. of S from [S | M], [K, V + K]; zeros past S's columns.   [BV, BK]"""
    o_v = column + tl.arange(0, BV)
    o_k = tl.arange(0, BK)
    mask = (o_v < V)[:, None] & (o_k < K)[None, :]
    return tl.load(p + o_k[None, :] * (V + K) + o_v[:, None], mask=mask, other=0.0)


@triton.jit
def _apply_map(b_S, p_M, s_row, s_column, K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, EXACT: tl.constexpr):
    """S^T M^T, for M with these strides.   [BV, BK]"""
    BV: tl.constexpr = b_S.shape[0]
    o_s = tl.arange(0, BK // BS)[None, :, None]
    o_k = tl.arange(0, BK)[None, :]
    b_sum = tl.zeros((BV, BK), tl.float32)
    for i_s in tl.static_range(BK // BS):
        # Rows k of M^T[k, k'].
        o_row = i_s * BS + tl.arange(0, BS)[:, None]
        b_M = tl.load(p_M + o_k * s_row + o_row * s_column, mask=(o_row < K) & (o_k < K), other=0.0)
        b_slice = tl.sum(tl.where(o_s == i_s, b_S.reshape(BV, BK // BS, BS), 0.0), axis=1)
        b_sum = mm_exact(b_slice, b_M, b_sum, EXACT)
    return b_sum
