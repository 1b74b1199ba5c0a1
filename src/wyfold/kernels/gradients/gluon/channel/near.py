"""Pairs inside a sub-chunk, one by one, and the gate's gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.kernels.gradients.gluon.channel.gate import log2_gate
from wyfold.kernels.gradients.gluon.channel.tiles import (
    concat_tuples,
    join8_rows,
    row_block,
    split8_numbers,
    split8_rows,
    sum8_rows,
)
from wyfold.kernels.gradients.gluon.tokens import exp2
from wyfold.tile.activation.triton import LN_2
from wyfold.tile.decay.gluon import activated_bwd, softplus_gate_bwd


class NearTiles(NamedTuple):
    """Shared memory that the near pairs read and write.

    Attributes:
        near: [8 * 64, 2] gradients of P and J of every pair inside a sub-chunk.
        dq, dk, dw: [2, BK, 32] accumulated gradients of rows and columns, by halves of the tokens.
        over: [2, BK, 4] part of the gate's gradient from pairs that span a sub-chunk.
        q, k, g: [64, BK] inputs, overwritten with their gradients.
        logs: [64, BK] log gates to base 2; `g` where no activation is applied.
    """

    near: Any
    dq: Any
    dk: Any
    dw: Any
    over: Any
    q: Any
    k: Any
    g: Any
    logs: Any


@gluon.jit
def store_halves(near, halves, t_q, t_k, t_g, logs, ERASES: gl.constexpr):
    """Move the gradients of both halves of the tokens to shared memory."""
    # Rows of 32 numbers, swizzled in groups of four: free of bank conflicts both for the stores, of four rows at
    # once, and for the loads, of every second one of 16 rows.
    TRANSPOSED: gl.constexpr = gl.SharedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [1, 8], [2, 16], [4, 8], [8, 4], [16, 0], [32, 0]]
    )
    BK: gl.constexpr = t_q.shape[1]
    t_dq = gl.allocate_shared_memory(gl.float32, [2, BK, 32], TRANSPOSED)
    t_dk = t_dq
    if ERASES:
        t_dk = gl.allocate_shared_memory(gl.float32, [2, BK, 32], TRANSPOSED)
    t_dw = gl.allocate_shared_memory(gl.float32, [2, BK, 32], TRANSPOSED)
    t_over = gl.allocate_shared_memory(gl.float32, [2, BK, 4], gl.SwizzledSharedLayout(1, 1, 1, [0, 1]))
    for h in gl.static_range(2):
        t_dq.index(h).store(halves[h][0])
        if ERASES:
            t_dk.index(h).store(halves[h][1])
        t_dw.index(h).store(halves[h][2])
        t_over.index(h).store(halves[h][3])
    return NearTiles(near, t_dq, t_dk, t_dw, t_over, t_q, t_k, t_g, logs)


@gluon.jit
def near_pairs_sums(
    tiles, tokens, gate, activation, value, column, pid,
    ROLLED: gl.constexpr, SIZES: gl.constexpr, FLAGS: gl.constexpr,
):  # fmt: skip
    """Finish both halves of the tokens of a value head; terms of dA_log and ddt_bias, [4, BK] each."""
    K: gl.constexpr = SIZES.K
    BT: gl.constexpr = SIZES.BT
    BK: gl.constexpr = SIZES.K // 2
    ACTIVATION: gl.constexpr = FLAGS.ACTIVATION
    CLAMPED: gl.constexpr = FLAGS.CLAMPED
    ERASES: gl.constexpr = FLAGS.ERASES
    DOTS: gl.constexpr = FLAGS.NORM and SIZES.HV == SIZES.H
    NEAR: gl.constexpr = gl.BlockedLayout([8, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    rows = value.rows
    near_bias = 0.0
    if gate.dt_bias is not None:
        o_b = gl.arange(0, BK, layout=gl.SliceLayout(0, NEAR))
        near_bias = gl.load(gate.dt_bias + value.h * K + column + o_b).to(gl.float32)[None, :]
    p_dots = tokens.norm_dots
    if DOTS:
        p_dots = tokens.norm_dots + pid * (2 * BT)
    SUMS: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    sum_A, sum_x = gl.zeros([4, BK], gl.float32, SUMS), gl.zeros([4, BK], gl.float32, SUMS)
    if ROLLED:
        for h in range(2):
            dA, dx = _near_pairs_half(
                tiles, h, p_dots, near_bias, activation, rows,
                ROLLED, ACTIVATION, CLAMPED, DOTS, ERASES, NEAR,
            )  # fmt: skip
            sum_A, sum_x = sum_A + dA, sum_x + dx
    else:
        for h in gl.static_range(2):
            dA, dx = _near_pairs_half(
                tiles, h, p_dots, near_bias, activation, rows,
                ROLLED, ACTIVATION, CLAMPED, DOTS, ERASES, NEAR,
            )  # fmt: skip
            sum_A, sum_x = sum_A + dA, sum_x + dx
    return sum_A, sum_x


@gluon.jit
def _near_pairs_half(
    tiles,
    h,
    p_dots,
    bias,
    activation,
    rows,
    ROLLED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    CLAMPED: gl.constexpr,
    DOTS: gl.constexpr,
    ERASES: gl.constexpr,
    NEAR: gl.constexpr,
):
    """Finish 32 tokens of a value head: add the near pairs, and overwrite the tokens with their gradients.

    Returns:
        Terms of dA_log and of ddt_bias, [4, BK] each: for every sub-chunk, in its warp.
    """
    ROW: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    BT: gl.constexpr = tiles.q.shape[0]
    o_t = 32 * h + gl.arange(0, 32, layout=gl.SliceLayout(1, NEAR))
    is_token = o_t[:, None] < rows
    t_q, t_k = row_block(tiles.q, h, 32), row_block(tiles.k, h, 32)
    if ROLLED:
        t_g = row_block(tiles.g, h, 32)
    else:
        t_g = tiles.g.slice(32 * h, 32)
    raw = None
    if ACTIVATION == "given":
        raw = t_g.load(NEAR).to(gl.float32)
        a = exp2(log2_gate(raw, 0.0, activation, True, ACTIVATION))
    else:
        a = exp2(row_block(tiles.logs, h, 32).load(NEAR))
    dq, dk = (tiles.dq.index(h).permute((1, 0)).load(NEAR), tiles.dk.index(h).permute((1, 0)).load(NEAR))
    dw, over = (tiles.dw.index(h).permute((1, 0)).load(NEAR), tiles.over.index(h).permute((1, 0)).load(ROW))
    q, k = t_q.load(NEAR).to(gl.float32), t_k.load(NEAR).to(gl.float32)
    dq, dk, dg = _near_pairs(tiles.near, h, q, k, a, dq, dk, dw, over, ERASES, NEAR)
    if DOTS:
        # p_dots is [tile, half of the channels, q or k, token].
        gl.store(p_dots + o_t, gl.sum(gl.fma(q, dq, 0.0), axis=1))
        gl.store(p_dots + o_t + BT, gl.sum(gl.fma(k, dk, 0.0), axis=1))
    t_q.store(dq.to(t_q.dtype))
    t_k.store(dk.to(t_k.dtype))
    if raw is None:
        raw = t_g.load(NEAR).to(gl.float32)
    if ACTIVATION == "softplus" and not CLAMPED:
        g = row_block(tiles.logs, h, 32).load(NEAR) * LN_2  # a load costs less than another softplus
        dx, dA = softplus_gate_bwd(raw + bias, g, dg, activation.rate)
    else:
        dx, dA = activated_bwd(
            raw, dg, activation.rate, bias, activation.lower_bound, activation.clamp, CLAMPED, ACTIVATION
        )
    t_g.store(dx.to(t_g.dtype))
    return sum8_rows(gl.where(is_token, dA, 0.0)), sum8_rows(gl.where(is_token, dx, 0.0))


@gluon.jit
def _near_pairs(near, h, q, k, a, dq, dk, dw, over, ERASES: gl.constexpr, NEAR: gl.constexpr):
    """Add the pairs inside each sub-chunk to the gradients of 32 tokens, and compute the gate's gradient.

    z and b are those of `add_near_pairs` in `tile.decay.channel.triton`; z is not that of the norm.

    Args:
        near: Gradients of P and J of the pairs.
        h: Half of the chunk's tokens.
        q, k: [32, 64] rows.
        a: [32, 64] decays of single tokens.
        dq, dk: [32, 64] gradients of rows, from before their sub-chunk.
        dw: [32, 64] gradients of columns, from after their sub-chunk.
        over: [4, 64] part of the gate's gradient from pairs that span the sub-chunk.

    Returns:
        dq, dk and the log gate's gradient, [32, 64] each.
    """
    q, k, a = split8_rows(q), split8_rows(k), split8_rows(a)
    dq, dk, dw = split8_rows(dq), split8_rows(dk), split8_rows(dw)
    dg, suffix_sum = (), over
    for i in gl.static_range(8):
        if ERASES:
            suffix_sum = gl.fma(k[7 - i], dk[7 - i], suffix_sum)
        suffix_sum = gl.fma(q[7 - i], dq[7 - i], suffix_sum)
        dg = concat_tuples((suffix_sum,), dg)
    prefix_sum = over * 0.0
    if not ERASES:
        dk = dw
    for s in gl.static_range(8):
        if ERASES:
            dk = _add_to_row(dk, s, dw[s])
        dg = _add_to_row(dg, s, prefix_sum)
        prefix_sum = gl.fma(k[s], dw[s], prefix_sum)
    for s in gl.static_range(8):
        P, J = _load_coefficients(row_block(near, 2 * s + h, 32), NEAR)
        dq = _add_to_row(dq, s, P[s] * k[s])
        dk = _add_to_row(dk, s, P[s] * q[s])
        z, z_rows = k[s], ()
        for r in gl.static_range(s + 1, 8):
            z = z * a[r]
            dq = _add_to_row(dq, r, P[r] * z)
            if ERASES:
                dk = _add_to_row(dk, r, J[r] * z)
            z_rows = concat_tuples(z_rows, (z,))
        b = over * 0.0
        for i in gl.static_range(7 - s):
            if ERASES:
                b = gl.fma(J[7 - i], k[7 - i], b)
            b = gl.fma(P[7 - i], q[7 - i], b)
            dg = _add_to_row(dg, 7 - i, z_rows[6 - s - i] * b)
            b = b * a[7 - i]
        dk = _add_to_row(dk, s, b)
    return join8_rows(dq, NEAR), join8_rows(dk, NEAR), join8_rows(dg, NEAR)


@gluon.jit
def _load_coefficients(pairs, NEAR: gl.constexpr):
    """Gradients of P and J for one column of every sub-chunk and its 8 rows.   [32, 2] -> 2 x 8 x [4, 1]"""
    P, J = gl.split(pairs.load(NEAR))
    return split8_numbers(P), split8_numbers(J)


@gluon.jit
def _add_to_row(rows, i: gl.constexpr, x):
    """Add x to element i of a tuple of rows."""
    return rows[:i] + (rows[i] + x,) + rows[i + 1 :]
