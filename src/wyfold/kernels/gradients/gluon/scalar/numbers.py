"""Numbers of a value head's tokens: beta, running sums of a scalar gate, and the scales of rows."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.kernels.gradients.gluon.tokens import exp2, load_scalars
from wyfold.tile.activation.triton import LOG2_E, sigmoid
from wyfold.tile.decay.triton import log_gate
from wyfold.tile.dot.gluon import add


class Scales(NamedTuple):
    """Factors of a value head.

    Attributes:
        beta: [BT] beta.
        weight: [BT, BT] of the gradients of the grams: the decay from column to row, and beta of the column.
        q, k, w: [BT] of the gradients through the states, of q, of k as a row, and of k as a column.
        total: Decay over the chunk.
    """

    beta: Any
    weight: Any
    q: Any
    k: Any
    w: Any
    total: Any


@gluon.jit
def store_numbers(gate, strength, numbers, value, offsets, SIZES: gl.constexpr, FLAGS: gl.constexpr):
    """Store beta and the running sums of the log gate to shared memory, which gives them in both layouts."""
    K: gl.constexpr = SIZES.K
    BT: gl.constexpr = SIZES.BT
    BK: gl.constexpr = SIZES.K // 2
    ACTIVATION: gl.constexpr = FLAGS.ACTIVATION
    SCALAR: gl.constexpr = FLAGS.SCALAR
    o_1 = offsets.one
    is_token = o_1 < value.rows
    beta = gl.where(is_token, 1.0, 0.0)
    if strength.beta is not None:
        beta = load_scalars(strength.beta, strength.s_beta, value, o_1)
        if FLAGS.LOGIT:
            beta = gl.where(is_token, sigmoid(beta) * strength.most, 0.0)
    numbers.slice(0, BT).store(beta)
    if SCALAR:
        log_g = log_gate(load_scalars(gate.g, gate.s_g, value, o_1), gate, value.h, 0, "scalar", ACTIVATION, K, BK)
        numbers.slice(BT, BT).store(gl.associative_scan(gl.where(is_token, log_g, 0.0), 0, add))


@gluon.jit
def row_scales(numbers, factors, offsets, SIZES: gl.constexpr, FLAGS: gl.constexpr):
    """Scales of the rows, from their numbers."""
    BT: gl.constexpr = SIZES.BT
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BT, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LC)
    COL: gl.constexpr = gl.SliceLayout(0, LC)
    o_c = offsets.column
    beta_r, beta_c = numbers.slice(0, BT).load(ROW), numbers.slice(0, BT).load(COL)
    zero_acc = gl.zeros([BT, BT], gl.float32, LC)
    weight = zero_acc + beta_c[None, :]
    scale_q, scale_k, scale_w = (
        gl.full([BT], factors.scale, gl.float32, ROW),
        -beta_r * factors.erased_unit,
        beta_r * factors.unit,
    )
    total = 1.0
    if FLAGS.SCALAR:
        G_r, G_c = numbers.slice(BT, BT).load(ROW), numbers.slice(BT, BT).load(COL)
        last = gl.sum(gl.where(o_c == BT - 1, G_c, 0.0), axis=0)
        weight = exp2((G_r[:, None] - G_c[None, :]) * LOG2_E) * beta_c[None, :]
        total = gl.exp(last)
        scale_q, scale_k, scale_w = (scale_q * gl.exp(G_r), scale_k * gl.exp(G_r), scale_w * gl.exp(last - G_r))
    return Scales(beta_r, weight, scale_q, scale_k, scale_w, total)
