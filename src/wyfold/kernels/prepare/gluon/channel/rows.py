"""Numbers of rows: beta, and the factors that the scans read."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.tile.activation.triton import sigmoid
from wyfold.tile.inverse.triton import nonzero_beta


@gluon.jit
def load_beta(strength, b, t, i_hv, o, rows, LOGIT: gl.constexpr):
    """Load beta, or ones; zero past the last token.   [BT] float32"""
    beta = gl.where(o < rows, 1.0, 0.0)
    if strength.beta is not None:
        first = strength.beta + (b * strength.s_beta[0] + t * strength.s_beta[1] + i_hv * strength.s_beta[2])
        beta = gl.load(first + o.to(gl.int64) * strength.s_beta[1], mask=o < rows, other=0.0).to(gl.float32)
        if LOGIT:
            beta = gl.where(o < rows, sigmoid(beta) * strength.most, 0.0)
    return beta


@gluon.jit
def store_row_numbers(p_rows, smem, beta, erases, i_tile, o):
    """Store beta and its reciprocal to shared memory, and the row factors; decays and norms are in the tiles."""
    BT: gl.constexpr = beta.shape[0]
    ONE: gl.constexpr = beta.type.layout
    nonzero = nonzero_beta(beta)
    smem.safe_beta.store(nonzero)
    smem.inverse_beta.store(1.0 / nonzero)
    p_row = p_rows + i_tile * (4 * BT) + o
    gl.store(p_row, gl.full([BT], erases, gl.float32, ONE))
    gl.store(p_row + BT, gl.full([BT], 1.0, gl.float32, ONE))
    gl.store(p_row + 2 * BT, gl.full([BT], 1.0, gl.float32, ONE))
    gl.store(p_row + 3 * BT, beta)
