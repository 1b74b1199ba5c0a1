"""Stores of the kernel of `gradients`."""

from __future__ import annotations

import triton
import triton.language as tl

from wyfold.tile.decay.triton import NEAR
from wyfold.tile.decay.triton.gradient import store_gate_gradient
from wyfold.tile.index.triton import (
    load_tile,
    load_tokens,
    store_tile,
    store_token_scalars,
    store_tokens,
)
from wyfold.tile.index.triton.blocks import store_token_block
from wyfold.tile.index.triton.sub_chunks import (
    load_tile_sub_chunks,
    store_sub_chunks,
    store_token_sub_chunks,
)


@triton.jit
def store_zeros(
    x_dq, x_dk, x_dv, outputs, dgate, at, i_c, i_h, opaque_zero, SIZES: tl.constexpr, FLAGS: tl.constexpr
):  # fmt: skip
    """Store zeros as the gradients of a chunk that belongs to no sequence."""
    H: tl.constexpr = SIZES.H
    HV: tl.constexpr = SIZES.HV
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    GATE: tl.constexpr = FLAGS.GATE
    CHANNEL: tl.constexpr = FLAGS.CHANNEL
    GR: tl.constexpr = HV // H
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    zero = tl.zeros((BT,), tl.float32)
    zeros = tl.zeros((BT, BK), tl.float32)
    for i_hv in range(i_h * GR, i_h * GR + GR):
        i_tile = i_c * HV + i_hv
        for i_v in tl.static_range(NV):
            if x_dv is not None:
                store_tokens(x_dv, outputs.s_dv, at, i_hv, i_v * BV, tl.zeros((BT, BV), tl.float32), V)
        if outputs.dbeta is not None:
            store_token_scalars(outputs.dbeta, outputs.s_dbeta, at, i_hv, zero, BT)
        for i_k in tl.static_range(NK if CHANNEL else 1):
            b_zero = zeros.reshape(BT // NEAR, NEAR, BK) if CHANNEL else zero
            store_gate_gradient(dgate, i_tile, at, i_hv, i_k * BK, b_zero, b_zero, opaque_zero, GATE, K)
    for i_k in tl.static_range(NK):
        if x_dq is not None:
            store_tokens(x_dq, outputs.s_dq, at, i_h, i_k * BK, zeros, K)
        if x_dk is not None:
            store_tokens(x_dk, outputs.s_dk, at, i_h, i_k * BK, zeros, K)


@triton.jit
def store_slice(
    x_dq, x_dk, outputs, scratch, pid, at, i_h, column, b_dq, b_dk, adds, opaque_zero,
    SIZES: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """Store dq and dk of the channels from `column` on: to their tokens, or to scratch memory, to be summed there.

    adds: Whether earlier value heads have stored there.
    """
    H: tl.constexpr = SIZES.H
    HV: tl.constexpr = SIZES.HV
    K: tl.constexpr = SIZES.K
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    CHANNEL: tl.constexpr = FLAGS.CHANNEL
    NORM: tl.constexpr = FLAGS.NORM
    TMA_STORES: tl.constexpr = FLAGS.TMA_STORES
    GR: tl.constexpr = HV // H
    ACCUMULATED: tl.constexpr = NORM or GR > 1
    if ACCUMULATED:
        if CHANNEL:
            if adds:
                b_dq += load_tile_sub_chunks(scratch.dq, pid, column, opaque_zero, K, BT, BK, NEAR)
                b_dk += load_tile_sub_chunks(scratch.dk, pid, column, opaque_zero, K, BT, BK, NEAR)
            store_sub_chunks(scratch.dq, pid, column, b_dq, opaque_zero, K, BT, BK, NEAR)
            store_sub_chunks(scratch.dk, pid, column, b_dk, opaque_zero, K, BT, BK, NEAR)
        else:
            if adds:
                b_dq += load_tile(scratch.dq, pid, 0, column, BT, K, BT, BK)
                b_dk += load_tile(scratch.dk, pid, 0, column, BT, K, BT, BK)
            store_tile(scratch.dq, pid, 0, column, b_dq, BT, K, BT, BK)
            store_tile(scratch.dk, pid, 0, column, b_dk, BT, K, BT, BK)
    elif CHANNEL:
        if x_dq is not None:
            store_token_sub_chunks(x_dq, outputs.s_dq, at, i_h, column, b_dq, opaque_zero, K)
        if x_dk is not None:
            store_token_sub_chunks(x_dk, outputs.s_dk, at, i_h, column, b_dk, opaque_zero, K)
    else:
        if x_dq is not None:
            store_token_block(x_dq, outputs.s_dq, at, i_h, column, b_dq, K, TMA_STORES)
        if x_dk is not None:
            store_token_block(x_dk, outputs.s_dk, at, i_h, column, b_dk, K, TMA_STORES)


@triton.jit
def store_accumulated(
    p_x,
    s_x,
    p_acc,
    p_dx,
    s_dx,
    i_tile,
    at,
    h,
    b_r,
    NORM: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    """Store an accumulated gradient to its tokens; with NORM, dx = r (dy - y <y, dy>), y = x r."""
    NK: tl.constexpr = (K + BK - 1) // BK
    b_dot = tl.zeros((BT,), tl.float32)
    if NORM:
        for i_k in range(NK):
            b_y = load_tokens(p_x, s_x, at, h, i_k * BK, K, BT, BK).to(tl.float32) * b_r[:, None]
            b_dot += tl.sum(b_y * load_tile(p_acc, i_tile, 0, i_k * BK, BT, K, BT, BK), axis=1)
    for i_k in range(NK):
        b_dx = load_tile(p_acc, i_tile, 0, i_k * BK, BT, K, BT, BK)
        if NORM:
            b_y = load_tokens(p_x, s_x, at, h, i_k * BK, K, BT, BK).to(tl.float32) * b_r[:, None]
            b_dx = b_r[:, None] * (b_dx - b_y * b_dot[:, None])
        store_tokens(p_dx, s_dx, at, h, i_k * BK, b_dx, K)
