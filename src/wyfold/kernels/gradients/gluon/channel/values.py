"""beta of a value head, and the gradients of v and of beta."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.kernels.gradients.gluon.tokens import load_scalars, store_rows, store_scalars
from wyfold.tile.activation.triton import sigmoid, sigmoid_bwd
from wyfold.tile.index.gluon import barrier


@gluon.jit
def load_beta(strength, value, o_1, LOGIT: gl.constexpr):
    """Load beta, or ones; zero past the last token.   [BT] float32"""
    rows = value.rows
    beta = gl.where(o_1 < rows, 1.0, 0.0)
    if strength.beta is not None:
        beta = load_scalars(strength.beta, strength.s_beta, value, o_1)
        if LOGIT:
            beta = gl.where(o_1 < rows, sigmoid(beta) * strength.most, 0.0)
    return beta


@gluon.jit
def store_dv(tokens, outputs, betas, value, i_tile, column, unit, SIZES: gl.constexpr):
    """Store half of the columns of dv."""
    V: gl.constexpr = SIZES.V
    BT: gl.constexpr = SIZES.BT
    BK: gl.constexpr = SIZES.K // 2
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    # Half of v's columns, loaded from global memory: only dv needs X in this layout.
    o_t, o_v = (gl.arange(0, BT, layout=gl.SliceLayout(1, ROWS)), gl.arange(0, BK, layout=gl.SliceLayout(0, ROWS)))
    X = gl.load(tokens.X + i_tile * (BT * V) + column + o_t[:, None] * V + o_v[None, :]).to(gl.float32)
    barrier()
    X = X * (betas.load(gl.SliceLayout(1, ROWS)) * unit)[:, None]
    store_rows(outputs.dv, outputs.s_dv, value, column, X, ROWS, BT, BK)


@gluon.jit
def store_dbeta(strength, outputs, value, dJ, o_r, o_c, half, unit, LOGIT: gl.constexpr):
    """Store the gradient of beta, which is the diagonal of dJ, if it is wanted."""
    if outputs.dbeta is not None:
        if half == 0:
            dbeta = gl.sum(gl.where(o_r[:, None] == o_c[None, :], dJ, 0.0), axis=1) * unit
            if LOGIT:
                dbeta = sigmoid_bwd(load_scalars(strength.beta, strength.s_beta, value, o_r), dbeta) * strength.most
            store_scalars(outputs.dbeta, outputs.s_dbeta, value, o_r, dbeta)
