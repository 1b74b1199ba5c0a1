"""Levels of the tree of sub-chunks."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from wyfold.kernels.gradients.gluon.channel.exchange import (
    earlier_quarter,
    exchange,
    exchange_inside_quarter,
    later_quarter,
)
from wyfold.kernels.gradients.gluon.channel.tiles import concat2_columns, stack4_columns


@gluon.jit
def exchange_quarters(P, J, t_q, t_k, I, Q, E, dq4, dk4, dw4, carried, ERASES: gl.constexpr, L: gl.constexpr):
    """Levels 32 and 16: exchanges between the quarters.

    Returns:
        dq4, dk4, dw4: The accumulators of the quarters.
        over_quarter: [BK] of each quarter, the part of the gate's gradient from pairs that span its whole quarter.
    """
    CH: gl.constexpr = gl.SliceLayout(1, L)
    BK: gl.constexpr = t_q.shape[1]
    dq0, dq1, dq2, dq3 = dq4
    dk0, dk1, dk2, dk3 = dk4
    dw0, dw1, dw2, dw3 = dw4
    E01, E23, E45, E67 = E[0] * E[1], E[2] * E[3], E[4] * E[5], E[6] * E[7]
    E03, E47 = E01 * E23, E45 * E67
    one = gl.full([BK], 1.0, gl.float32, CH)

    # Level 32: quarters 2 and 3 exchange with quarters 0 and 1.
    later2 = later_quarter(t_q, t_k, I, 2, dq2, dk2, E03, one, E[4], ERASES, L)
    later3 = later_quarter(t_q, t_k, I, 3, dq3, dk3, E03, E45, E45 * E[6], ERASES, L)
    earlier0 = earlier_quarter(t_k, Q, 0, dw0, E47, E23 * E[1], E23, L)
    earlier1 = earlier_quarter(t_k, Q, 1, dw1, E47, E[3], one, L)
    later_x, earlier_y = (gl.sum(later2.x + later3.x, axis=1), gl.sum(earlier0.y + earlier1.y, axis=1))
    later2, earlier0 = exchange(P, J, later2, earlier0, 2, 0, ERASES)
    later3, earlier0 = exchange(P, J, later3, earlier0, 3, 0, ERASES)
    later2, earlier1 = exchange(P, J, later2, earlier1, 2, 1, ERASES)
    later3, earlier1 = exchange(P, J, later3, earlier1, 3, 1, ERASES)
    if ERASES:
        dq2, dk2, dq3, dk3, dw0, dw1 = warpgroup_mma_wait(
            0, deps=[later2.dq, later2.dk, later3.dq, later3.dk, earlier0.dw, earlier1.dw]
        )
    else:
        dq2, dq3, dw0, dw1 = warpgroup_mma_wait(0, deps=[later2.dq, later3.dq, earlier0.dw, earlier1.dw])

    # Level 16: quarter 1 exchanges with 0, and 3 with 2.
    later1 = later_quarter(t_q, t_k, I, 1, dq1, dk1, E01, one, E[2], ERASES, L)
    later3 = later_quarter(t_q, t_k, I, 3, dq3, dk3, E45, one, E[6], ERASES, L)
    earlier0 = earlier_quarter(t_k, Q, 0, dw0, E23, E[1], one, L)
    earlier2 = earlier_quarter(t_k, Q, 2, dw2, E67, E[5], one, L)
    x1, y0, x3, y2 = (
        gl.sum(later1.x, axis=1),
        gl.sum(earlier0.y, axis=1),
        gl.sum(later3.x, axis=1),
        gl.sum(earlier2.y, axis=1),
    )
    later1, earlier0 = exchange(P, J, later1, earlier0, 1, 0, ERASES)
    later3, earlier2 = exchange(P, J, later3, earlier2, 3, 2, ERASES)
    if ERASES:
        dq1, dk1, dq3, dk3, dw0, dw2 = warpgroup_mma_wait(
            0, deps=[later1.dq, later1.dk, later3.dq, later3.dk, earlier0.dw, earlier2.dw]
        )
    else:
        dq1, dq3, dw0, dw2 = warpgroup_mma_wait(0, deps=[later1.dq, later3.dq, earlier0.dw, earlier2.dw])

    dq4, dk4, dw4 = (dq0, dq1, dq2, dq3), (dk0, dk1, dk2, dk3), (dw0, dw1, dw2, dw3)

    # Part of the gate's gradient from pairs that span a token's whole quarter, by quarters.
    decay = E03 * E47
    later_x, earlier_y = (gl.fma(carried, decay, later_x), gl.fma(carried, decay, earlier_y))
    over_quarter = (later_x + x1, later_x + y0, earlier_y + x3, earlier_y + y2)
    return dq4, dk4, dw4, over_quarter


@gluon.jit
def exchange_sub_chunks(
    P, J, t_q, t_k, h: gl.constexpr, I, Q, E, dq4, dk4, dw4, over_quarter, ERASES: gl.constexpr, L: gl.constexpr
):
    """Level 8, of half h of the tokens: the odd sub-chunk of each quarter exchanges with the even one.

    Returns:
        dq, dk, dw: [BK, 32] gradients of rows and columns.
        over: [BK, 4] the part of the gate's gradient from pairs that span a token's whole sub-chunk.
    """
    # l and r are the half's two quarters.
    later_l, earlier_l = exchange_inside_quarter(P, J, t_q, t_k, 2 * h, I, Q, dq4, dk4, dw4, E, ERASES, L)
    later_r, earlier_r = exchange_inside_quarter(P, J, t_q, t_k, 2 * h + 1, I, Q, dq4, dk4, dw4, E, ERASES, L)
    if ERASES:
        dq_l, dk_l, dq_r, dk_r, dw_l, dw_r = warpgroup_mma_wait(
            0, deps=[later_l.dq, later_l.dk, later_r.dq, later_r.dk, earlier_l.dw, earlier_r.dw]
        )
    else:
        dq_l, dq_r, dw_l, dw_r = warpgroup_mma_wait(0, deps=[later_l.dq, later_r.dq, earlier_l.dw, earlier_r.dw])
        dk_l, dk_r = dq_l, dq_r
    I_l, I_r, Q_l, Q_r = (I[2 * h].load(L), I[2 * h + 1].load(L), Q[2 * h].load(L), Q[2 * h + 1].load(L))
    dq_half, dk_half, dw_half = (
        concat2_columns(dq_l * I_l, dq_r * I_r),
        concat2_columns(dk_l * I_l, dk_r * I_r),
        concat2_columns(dw_l * Q_l, dw_r * Q_r),
    )
    over = stack4_columns(
        over_quarter[2 * h] + later_l.x,
        over_quarter[2 * h] + earlier_l.y,
        over_quarter[2 * h + 1] + later_r.x,
        over_quarter[2 * h + 1] + earlier_r.y,
    )
    return dq_half, dk_half, dw_half, over
