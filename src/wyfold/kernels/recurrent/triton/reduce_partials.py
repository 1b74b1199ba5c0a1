"""Sums the partial gradients of value tiles and value heads, in a fixed order, into the tokens' gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.records import GradientOutputs, PartialGradients
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import LaunchKey, tile_width, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.decay.triton import NEAR, gate_argument, gate_flags, gate_width, load_raw_gate
from wyfold.tile.decay.triton.gradient import gate_gradient_argument, log_gate_bwd, store_gate_gradient, sum_terms
from wyfold.tile.index.triton import TokenRows, load_tokens, store_token_scalars, store_tokens, with_strides
from wyfold.tile.index.triton.strength import Strength, strength_bwd
from wyfold.tile.norm.triton import row_norm, row_norm_bwd


def reduce_partials(
    q: Tensor,
    k: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    partials: PartialGradients,
    grid: ChunkGrid,
    options: DeltaOptions,
    out: GradientOutputs,
) -> None:
    """Write the gradients of tokens and parameters, summed over value tiles and value heads in a fixed order.

    Args:
        q, k, g, beta, A_log, dt_bias, grid, options: As given to `recurrent`.
        partials: From `recurrent_bwd`.
        out: Receives all gradients except v's; tokens past a packed batch's last boundary get zeros. None where a
            gradient is not requested.
    """
    (B, T, H, K), HV, gates = q.shape, partials.q.shape[2], gate_width(g)
    config = tuned("recurrent.triton", LaunchKey(launch="gather"), q.device)
    BT, BK = config.blocks["BT"], tile_width(K)
    tiles = B * -(-T // BT)
    dgate = gate_gradient_argument(out.g, out.A_log, out.dt_bias, (tiles, HV, 1), gates)
    launch_kernel(
        wyfold_recurrent_gather_triton,
        tiles * H,
        inputs=with_strides(Inputs, q=q, k=k),
        gate=gate_argument(g, A_log, dt_bias, options),
        strength=with_strides(Strength, beta=beta, most=options.beta_most),
        partials=partials,
        outputs=with_strides(Outputs, dq=out.q, dk=out.k, dbeta=out.beta),
        dgate=dgate,
        p_cu=grid.cu,
        N=grid.sequences,
        T=grid.tokens,
        tokens=B * T,
        SIZES=Sizes(H=H, HV=HV, K=K, NV=partials.q.shape[0], BT=BT, BK=BK),
        PACKED=grid.cu is not None,
        ACTIVATION=options.activation,
        CLAMPED=options.clamp != 0,
        NORM=options.qk_l2norm,
        LOGIT=options.beta_logit,
        **gate_flags(g),
        **config.options(contract=False),
    )
    sum_terms(dgate, out.A_log, out.dt_bias)


class Inputs(NamedTuple):
    """Kernel argument: q and k, each with its strides."""

    q: Any
    s_q: Any
    k: Any
    s_k: Any
    end: None = None


class Outputs(NamedTuple):
    """Kernel argument: gradients that are written, each with its strides; None where one is not requested."""

    dq: Any
    s_dq: Any
    dk: Any
    s_dk: Any
    dbeta: Any
    s_dbeta: Any
    end: None = None


class Sizes(NamedTuple):
    """Constexprs: sizes of the call and of tiles, and number of value tiles."""

    H: int
    HV: int
    K: int
    NV: int
    BT: int
    BK: int


@triton.jit(do_not_specialize=["N", "T", "tokens"])
def wyfold_recurrent_gather_triton(
    inputs,
    gate,
    strength,
    partials,
    outputs,
    dgate,
    p_cu,
    N,
    T,
    tokens,
    SIZES: tl.constexpr,
    PACKED: tl.constexpr,
    GATE: tl.constexpr,
    SCALAR: tl.constexpr,
    CHANNEL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CLAMPED: tl.constexpr,
    NORM: tl.constexpr,
    LOGIT: tl.constexpr,
):
    """One program sums the gradients of BT tokens of one key head, and loops over its value heads."""
    H: tl.constexpr = SIZES.H
    HV: tl.constexpr = SIZES.HV
    K: tl.constexpr = SIZES.K
    NV: tl.constexpr = SIZES.NV
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    GR: tl.constexpr = HV // H
    pid = tl.program_id(0).to(tl.int64)
    i_tile, i_h = pid // H, pid % H
    per_row = tl.cdiv(T, BT)
    b, t = i_tile // per_row, (i_tile % per_row) * BT
    rows = tl.minimum(T - t, BT).to(tl.int32)
    valid_rows = rows
    if PACKED:
        valid_rows = tl.maximum(tl.minimum(tl.load(p_cu + N) - t, rows), 0).to(tl.int32)
    at, tokens_at = TokenRows(b, t, rows), TokenRows(b, t, valid_rows)
    i_row = b * T + t
    b_dq, b_dk = tl.zeros((BT, BK), tl.float32), tl.zeros((BT, BK), tl.float32)
    for i_hv in range(i_h * GR, i_h * GR + GR):
        b_dq += _sum_value_tiles(partials.q, i_row, i_hv, tokens, valid_rows, HV, K, NV, BT, BK)
        b_dk += _sum_value_tiles(partials.k, i_row, i_hv, tokens, valid_rows, HV, K, NV, BT, BK)
        if outputs.dbeta is not None:
            b_dbeta = tl.sum(_sum_value_tiles(partials.beta, i_row, i_hv, tokens, valid_rows, HV, 1, NV, BT, 1), axis=1)
            if LOGIT:
                b_dbeta = strength_bwd(strength, tokens_at, i_hv, b_dbeta, BT)
            store_token_scalars(outputs.dbeta, outputs.s_dbeta, at, i_hv, b_dbeta, BT)
        if SCALAR or CHANNEL:
            b_dg = _sum_value_tiles(
                partials.g, i_row, i_hv, tokens, valid_rows, HV, K if CHANNEL else 1, NV, BT, BK if CHANNEL else 1
            )
            if SCALAR:
                b_dg = tl.sum(b_dg, axis=1)
            b_x = load_raw_gate(gate, tokens_at, i_hv, 0, GATE, K, BT, BK)
            b_dx, b_dA = log_gate_bwd(
                b_x,
                b_dg,
                gate,
                i_hv,
                0,
                CLAMPED,
                GATE,
                ACTIVATION,
                K,
                BK,
            )
            if CHANNEL:
                b_dx, b_dA = b_dx.reshape(BT // NEAR, NEAR, BK), b_dA.reshape(BT // NEAR, NEAR, BK)
            store_gate_gradient(
                dgate,
                i_tile * HV + i_hv,
                at,
                i_hv,
                0,
                b_dx,
                b_dA,
                tl.minimum(T, 0),
                GATE,
                K,
            )
    if outputs.dq is not None:
        if NORM:
            b_y, b_r = row_norm(load_tokens(inputs.q, inputs.s_q, tokens_at, i_h, 0, K, BT, BK).to(tl.float32), 1e-6, 1)
            b_dq = row_norm_bwd(b_y, b_r, b_dq, 1)
        store_tokens(outputs.dq, outputs.s_dq, at, i_h, 0, b_dq, K)
    if outputs.dk is not None:
        if NORM:
            b_y, b_r = row_norm(load_tokens(inputs.k, inputs.s_k, tokens_at, i_h, 0, K, BT, BK).to(tl.float32), 1e-6, 1)
            b_dk = row_norm_bwd(b_y, b_r, b_dk, 1)
        store_tokens(outputs.dk, outputs.s_dk, at, i_h, 0, b_dk, K)


@triton.jit
def _sum_value_tiles(
    p,
    i_row,
    i_hv,
    tokens,
    rows,
    HV: tl.constexpr,
    W: tl.constexpr,
    NV: tl.constexpr,
    BT: tl.constexpr,
    BW: tl.constexpr,
):
    """Sum the partials [NV, tokens, HV, W] of one value head over value tiles; zero past the last token.   [BT, BW]"""
    o_r, o_w = tl.arange(0, BT)[:, None], tl.arange(0, BW)[None, :]
    mask = (o_r < rows) & (o_w < W)
    b_x = tl.zeros((BT, BW), tl.float32)
    for i_v in tl.static_range(NV):
        b_x += tl.load(p + ((i_v * tokens + i_row + o_r) * HV + i_hv) * W + o_w, mask=mask, other=0.0)
    return b_x
