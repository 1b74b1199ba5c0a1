"""The kernels of `conv` in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from wyfold.kernels.conv.triton.windows import (
    activation_gradient,
    boundary,
    last_boundary,
    load_input,
    load_rows,
    load_window,
    output,
    sequence_at,
    store_row,
)
from wyfold.tile.taps.triton import load_row, load_taps, tap_products, taps_bwd, zeros


@triton.jit(do_not_specialize=["T", "N", "length", "spans", "groups"])
def wyfold_conv_triton(
    inputs, outputs, p_cu, T, N, length, S, S_final, spans, groups, ACTIVATED: tl.constexpr, D: tl.constexpr,
    W: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (D + BD - 1) // BD
    o_d = (tl.program_id(0) % blocks).to(tl.int64) * BD + tl.arange(0, BD)
    m_d = o_d < D
    i_program = (tl.program_id(0) // blocks).to(tl.int64)
    last = last_boundary(p_cu, N, T).to(tl.int64)
    if i_program < spans:
        w, b_bias = load_taps(inputs.w, inputs.s_w, inputs.bias, o_d, m_d, W)
        t = i_program * groups * BT
        n, start, end = sequence_at(p_cu, t, t * 0, N, T, last, length)
        window = load_window(inputs, n, start, t, N, S, last, o_d, m_d, W)
        for _ in range(groups):
            if t + BT <= end:
                rows = load_rows(inputs.x, inputs.s_x, t, last, o_d, m_d, BT)
                residuals = load_rows(inputs.residual, inputs.s_residual, t, last, o_d, m_d, BT)
                for i in tl.static_range(BT):
                    full = window + (rows[i],)
                    b_y = output(
                        full, w, b_bias, residuals[i], t + i < last, inputs.bias, inputs.residual, ACTIVATED, W
                    )
                    store_row(outputs.y, outputs.s_y, t + i, o_d, b_y, m_d & (t + i < T))
                    window = full[1:]
            else:
                # A sequence ends among these tokens, so they are processed one by one.
                for i in range(BT):
                    if t + i >= end:
                        n, start, end = sequence_at(p_cu, t + i, n, N, T, last, length)
                        window = load_window(inputs, n, start, t + i, N, S, last, o_d, m_d, W)
                    full = window + load_rows(inputs.x, inputs.s_x, t + i, last, o_d, m_d, 1)
                    residual = load_rows(inputs.residual, inputs.s_residual, t + i, last, o_d, m_d, 1)
                    b_y = output(full, w, b_bias, residual[0], t + i < last, inputs.bias, inputs.residual, ACTIVATED, W)
                    store_row(outputs.y, outputs.s_y, t + i, o_d, b_y, m_d & (t + i < T))
                    window = full[1:]
            t += BT
    elif outputs.final is not None:
        n = i_program - spans
        start = boundary(p_cu, n, T, length)
        end = tl.maximum(boundary(p_cu, n + 1, T, length), start)
        for c in range(S_final):
            b_x = load_input(inputs, n, start, end - S_final + c, N, S, last, o_d, m_d)
            p_out = outputs.final + n * outputs.s_final[0] + o_d * outputs.s_final[1] + c * outputs.s_final[2]
            tl.store(p_out, b_x.to(outputs.final.dtype.element_ty), mask=m_d)


@triton.jit
def _final_grad(gradients, n, end, t, N, S, o_d, m_d):
    """Gradient of the input at t of sequence n through the final state, of which it is entry S - (end - t)."""
    c = S - (end - t)
    offsets = n * gradients.s_dfinal[0] + o_d * gradients.s_dfinal[1] + c * gradients.s_dfinal[2]
    return load_row(gradients.dfinal, offsets, m_d & (c >= 0) & (n < N))


@triton.jit(do_not_specialize=["T", "N", "length", "spans", "groups"])
def wyfold_conv_bwd_triton(
    inputs, gradients, p_cu, T, N, length, S, S_final, S_dstate, spans, groups, ACTIVATED: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (D + BD - 1) // BD
    o_d = (tl.program_id(0) % blocks).to(tl.int64) * BD + tl.arange(0, BD)
    m_d = o_d < D
    i_program = (tl.program_id(0) // blocks).to(tl.int64)
    last = last_boundary(p_cu, N, T).to(tl.int64)
    w, b_bias = load_taps(inputs.w, inputs.s_w, inputs.bias, o_d, m_d, W)
    if i_program < spans:
        first = i_program * (groups * BT - (W - 1))
        limit = tl.minimum(first + groups * BT - (W - 1), T)
        t = first
        n, start, end = sequence_at(p_cu, t, t * 0, N, T, last, length)
        window = load_window(inputs, n, start, t, N, S, last, o_d, m_d, W)
        pending = zeros(W - 1, BD)
        total = zeros(W + 1, BD)
        for _ in range(groups):
            dw = zeros(W, BD)
            b_dbias = tl.zeros((BD,), tl.float32)
            # Token t + i completes the row W - 1 tokens before it. Near a sequence's end the final state contributes
            # to it as well.
            if (t + BT <= end) & (t + BT <= limit) & ((gradients.dfinal is None) | (end - (t + BT - W) > S_final)):
                rows = load_rows(inputs.x, inputs.s_x, t, last, o_d, m_d, BT)
                d_rows = load_rows(gradients.dy, gradients.s_dy, t, last, o_d, m_d, BT)
                for i in tl.static_range(BT):
                    full = window + (rows[i],)
                    b_d = activation_gradient(full, w, b_bias, d_rows[i], t + i < last, inputs.bias, ACTIVATED, W)
                    if gradients.partial is not None:
                        dw = tap_products(full, b_d, dw, W)
                        b_dbias += b_d
                    if gradients.dx is not None:
                        b_dx, pending = taps_bwd(b_d, w, pending, W)
                        token = t + i - (W - 1)
                        mask = m_d & (token >= first) & (token >= start)
                        store_row(gradients.dx, gradients.s_dx, token, o_d, b_dx, mask)
                    window = full[1:]
            else:
                for i in range(BT):
                    if t + i >= end:
                        # Pending gradients belong to a finished sequence: no later token contributes.
                        if gradients.dx is not None:
                            for k in tl.static_range(W - 1):
                                token = t + i - (W - 1) + k
                                mask = m_d & (token >= first) & (token >= start) & (token < limit)
                                b_dx = pending[k]
                                if gradients.dfinal is not None:
                                    b_dx += _final_grad(gradients, n, end, token, N, S_final, o_d, mask)
                                store_row(gradients.dx, gradients.s_dx, token, o_d, b_dx, mask)
                        n, start, end = sequence_at(p_cu, t + i, n, N, T, last, length)
                        window = load_window(inputs, n, start, t + i, N, S, last, o_d, m_d, W)
                        pending = zeros(W - 1, BD)
                    full = window + load_rows(inputs.x, inputs.s_x, t + i, last, o_d, m_d, 1)
                    d_row = load_rows(gradients.dy, gradients.s_dy, t + i, last, o_d, m_d, 1)
                    b_d = activation_gradient(full, w, b_bias, d_row[0], t + i < last, inputs.bias, ACTIVATED, W)
                    if gradients.partial is not None:
                        b_own = tl.where(t + i < limit, b_d, 0.0)
                        dw = tap_products(full, b_own, dw, W)
                        b_dbias += b_own
                    if gradients.dx is not None:
                        b_dx, pending = taps_bwd(b_d, w, pending, W)
                        token = t + i - (W - 1)
                        mask = m_d & (token >= first) & (token >= start) & (token < limit)
                        if gradients.dfinal is not None:
                            b_dx += _final_grad(gradients, n, end, token, N, S_final, o_d, mask)
                        store_row(gradients.dx, gradients.s_dx, token, o_d, b_dx, mask)
                    window = full[1:]
            sums: tl.tuple = ()
            for i in tl.static_range(W):
                sums = sums + (total[i] + dw[i],)
            total = sums + (total[W] + b_dbias,)
            t += BT
        if gradients.partial is not None:
            for i in tl.static_range(W + 1):
                tl.store(gradients.partial + (i_program * (W + 1) + i) * D + o_d, total[i], mask=m_d)
    elif gradients.dstate is not None:
        n = i_program - spans
        start = boundary(p_cu, n, T, length)
        end = tl.maximum(boundary(p_cu, n + 1, T, length), start)
        window = load_window(inputs, n, start, start, N, S, last, o_d, m_d, W)
        rows = load_rows(inputs.x, inputs.s_x, start, end, o_d, m_d, W - 1)
        d_rows = load_rows(gradients.dy, gradients.s_dy, start, end, o_d, m_d, W - 1)
        dstate = zeros(W - 1, BD)
        for i in tl.static_range(W - 1):
            full = window + (rows[i],)
            b_d = activation_gradient(full, w, b_bias, d_rows[i], start + i < end, inputs.bias, ACTIVATED, W)
            given: tl.tuple = ()
            for k in tl.static_range(W - 1):
                given = given + ((tl.fma(w[k - i], b_d, dstate[k]) if k >= i else dstate[k]),)
            dstate = given
            window = full[1:]
        p_out = gradients.dstate + n * gradients.s_dstate[0] + o_d * gradients.s_dstate[1]
        for i in tl.static_range(W - 1):
            b_dstate = dstate[i]
            if gradients.dfinal is not None:
                token = start - (W - 1) + i
                b_dstate += _final_grad(gradients, n, end, token, N, S_final, o_d, m_d)
            tl.store(p_out + (S_dstate - (W - 1) + i) * gradients.s_dstate[2], b_dstate, mask=m_d)
        for c in range(S_dstate - (W - 1)):
            b_dstate = tl.zeros((BD,), tl.float32)
            if gradients.dfinal is not None:
                token = start - S_dstate + c
                b_dstate += _final_grad(gradients, n, end, token, N, S_final, o_d, m_d)
            tl.store(p_out + c * gradients.s_dstate[2], b_dstate, mask=m_d)
