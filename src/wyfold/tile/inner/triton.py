"""The inner model of TTT-Linear in Triton.

AXIS is the axis of a token's D values: 0 in tiles [BV, BT], the layout of products with a state [V, K], and 1 in tiles
[BT, BV]. Every sum runs over that axis, and the mean is subtracted before squaring. Entries past D must be zero, since
they would enter the sums; results are zeroed there where noted. w and u are [BV, 1] or [1, BV].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


@triton.jit
def sums_of_two(a, b, AXIS: tl.constexpr):
    """Sum two tiles over a token's values in one reduction, with one exchange between threads.   [BT] each"""
    return tl.reduce((a, b), AXIS, add_two)


@triton.jit
def add_two(a, b, x, y):
    """Combine function of a reduction of two tiles."""
    return a + x, b + y


@triton.jit
def add_eight(a, b, c, d, e, f, g, h, a1, b1, c1, d1, e1, f1, g1, h1):
    """Combine function of a reduction of eight tiles."""
    return a + a1, b + b1, c + c1, d + d1, e + e1, f + f1, g + g1, h + h1


@triton.jit
def add_five(a, b, c, d, e, x, y, z, w, v):
    """Combine function of a reduction of five tiles."""
    return a + x, b + y, c + z, d + w, e + v


@triton.jit
def zero_past_width(b_x, D: tl.constexpr, AXIS: tl.constexpr):
    """Zero the entries of b_x past D."""
    if b_x.shape[AXIS] == D:
        return b_x
    else:
        return tl.where(tl.expand_dims(tl.arange(0, b_x.shape[AXIS]) < D, 1 - AXIS), b_x, 0.0)


@triton.jit
def inner_gradient(b_Z, b_wt, b_ww, b_factor, eps, D: tl.constexpr):
    """Gradient of the inner loss of every token at one state, rows [BT, BV], times the tokens' factors.

        X, r = normalise(Z)        Y = w (w X + t)        N = r (Y - mean Y - X mean(X Y))

    With d = Z - mean Z, the other means follow from sums that do not need r and share one reduction:

        mean Y = r mean(w^2 d) + mean(w t)        mean(X Y) = r^2 mean(w^2 d^2) + r mean(w t d)
        N = d (r^2 w^2 - r^2 mean(X Y)) + r (w t - mean Y)

    Args:
        b_wt, b_ww: w (u - v + k), and w^2 [1, BV].
        b_factor: [BT] factors; zero in rows without a token.

    Returns:
        N, X: Tiles.
        r, mean Y, mean(X Y): [BT].
    """
    b_d = zero_past_width(b_Z - (tl.sum(b_Z, axis=1) * (1.0 / D))[:, None], D, 1)
    b_wwd = b_ww * b_d
    b_dd, b_y, b_yy, b_xy, b_t = tl.reduce((b_d * b_d, b_wwd, b_wwd * b_d, b_wt * b_d, b_wt), 1, add_five)
    b_r = tl.rsqrt(b_dd * (1.0 / D) + eps)
    b_y = (b_r * b_y + b_t) * (1.0 / D)
    b_xy = (b_r * b_r * b_yy + b_r * b_xy) * (1.0 / D)
    b_factor *= b_r
    b_rr = b_r * b_factor
    b_N = b_d * (b_rr[:, None] * b_ww - (b_rr * b_xy)[:, None]) + (b_factor[:, None] * b_wt - (b_factor * b_y)[:, None])
    return zero_past_width(b_N, D, 1), b_d * b_r[:, None], b_r, b_y, b_xy


class InnerStep(NamedTuple):
    """What `inner_gradient` computed for the rows of a tile; X and r are zero in rows without a token.

    Attributes:
        X, Y: [BT, BV] tiles.
        r, y, xy: [BT] r, mean Y and mean(X Y).
    """

    X: Any
    Y: Any
    r: Any
    y: Any
    xy: Any


@triton.jit
def inner_gradient_bwd(step, b_ww, ww, b_dN, b_dwrite, b_col, D: tl.constexpr):
    """Adjoint of `inner_gradient` in Y and in Z, for tiles [BT, BV]; all uses of N have the token's factor.

        dY = r (dN - mean dN - X mean(X dN))
        dX = w^2 dY - r (dN mean(X Y) + Y mean(X dN))
        dZ = r (dX - mean dX - X (mean(X dX) + mean(N dN)))

    dX is linear in dN, so its two means follow from sums over dN, and all sums share one reduction:

        mean dX = r (mean(w^2 dN) - mean dN (mean w^2 + mean(X Y)) - mean(X dN) (mean(w^2 X) + mean Y))
        mean(X dX) = r (mean(w^2 X dN) - mean dN mean(w^2 X) - mean(X dN) (mean(w^2 X^2) + 2 mean(X Y)))

    Args:
        step: An `InnerStep`.
        b_ww, ww: w^2 [1, BV] and its mean.
        b_dN: [BT, BV] gradient of N times its factor; zero in rows without a token.
        b_dwrite: [BT, BV] gradient of the loss in the update k^T N, dS^T k + dc.
        b_col: [BT] factors; None for 1.

    Returns:
        dY, dZ: [BT, BV].
        <dwrite, N> with N times its factor, and the gradient of the factor: [BT] each.
    """
    b_N = (step.Y - step.y[:, None] - step.X * step.xy[:, None]) * step.r[:, None]
    b_N = zero_past_width(b_N, D, 1)
    b_wwX = b_ww * step.X
    b_m, b_a, b_n, b_wm, b_wa, b_step, b_wx, b_wxx = tl.reduce(
        (b_dN, step.X * b_dN, b_N * b_dN, b_ww * b_dN, b_wwX * b_dN, b_N * b_dwrite, b_wwX, b_wwX * step.X),
        1,
        add_eight,
    )
    b_dcol = b_n
    b_factor = tl.full(step.r.shape, 1.0 / D, tl.float32)
    if b_col is not None:
        b_factor *= b_col
        b_step *= b_col
        b_dN *= b_col[:, None]
    b_m, b_a, b_n, b_wm, b_wa = b_m * b_factor, b_a * b_factor, b_n * b_factor, b_wm * b_factor, b_wa * b_factor
    b_wx, b_wxx = b_wx * (1.0 / D), b_wxx * (1.0 / D)
    b_mean = step.r * (b_wm - b_m * (ww + step.xy) - b_a * (b_wx + step.y))
    b_mean_x = step.r * (b_wa - b_m * b_wx - b_a * (b_wxx + 2.0 * step.xy)) + b_n
    b_dY = zero_past_width((b_dN - b_m[:, None] - step.X * b_a[:, None]) * step.r[:, None], D, 1)
    b_dX = b_ww * b_dY - (b_dN * step.xy[:, None] + step.Y * b_a[:, None]) * step.r[:, None]
    return (
        b_dY,
        zero_past_width((b_dX - b_mean[:, None] - step.X * b_mean_x[:, None]) * step.r[:, None], D, 1),
        b_step,
        b_dcol,
    )


@triton.jit
def residual_norm(b_O, b_mean, b_w, b_u, b_q, eps, D: tl.constexpr, AXIS: tl.constexpr):
    """out = O + w normalise(O) + u; with b_q, out = q + w normalise(O) + u.

    Args:
        b_q: Tile of q without its scale, or None.
        b_mean: [BT] O's mean up to rounding.

    Returns:
        out, X: Tiles.
        r: [BT].
    """
    b_d = zero_past_width(b_O - tl.expand_dims(b_mean, AXIS), D, AXIS)
    b_m, b_s = sums_of_two(b_d, b_d * b_d, AXIS)
    b_m = b_m * (1.0 / D)
    b_r = tl.rsqrt(tl.maximum(b_s * (1.0 / D) - b_m * b_m, 0.0) + eps)
    b_X = zero_past_width((b_d - tl.expand_dims(b_m, AXIS)) * tl.expand_dims(b_r, AXIS), D, AXIS)
    if b_q is None:
        return b_O + b_w * b_X + b_u, b_X, b_r
    else:
        return b_q.to(tl.float32) + b_w * b_X + b_u, b_X, b_r


@triton.jit
def residual_norm_bwd(b_X, b_r, b_w, b_dout, ON_Q: tl.constexpr, D: tl.constexpr, AXIS: tl.constexpr):
    """Gradient of O in `residual_norm`, given its X and r; with ON_Q the residual is q."""
    b_d = b_w * b_dout
    b_m, b_a = sums_of_two(b_d, b_X * b_d, AXIS)
    b_m, b_a = tl.expand_dims(b_m * (1.0 / D), AXIS), tl.expand_dims(b_a * (1.0 / D), AXIS)
    b_dO = zero_past_width((b_d - b_m - b_X * b_a) * tl.expand_dims(b_r, AXIS), D, AXIS)
    return b_dO if ON_Q else b_dout + b_dO


@triton.jit
def attention(b_gram):
    """Weight of row s's step in row r's read, s (q k^T) + 1 for s <= r, from the gram of k and q.   [s, r]"""
    o_t = tl.arange(0, b_gram.shape[0])
    return tl.where(o_t[:, None] <= o_t[None, :], b_gram + 1.0, 0.0)


@triton.jit
def read_steps(b_e, b_e_last, FROM: tl.constexpr, BT: tl.constexpr):
    """Step sizes with which row r reads the write of row s, for rows of whole mini-batches of BT.

    Inside a mini-batch it is r's own step, for s <= r. For s in an earlier mini-batch it is that one's closing step.
    All other entries are zero.

    Args:
        b_e, b_e_last: [R] step sizes, and the closing step of each row's mini-batch.
        FROM: First index of the result: "r" gives [r, s], "s" gives [s, r].

    Returns:
        The step sizes [R, R], and their part from earlier mini-batches alone.
    """
    o_t = tl.arange(0, b_e.shape[0])
    if FROM == "r":
        o_r, o_s, b_own, b_closed = o_t[:, None], o_t[None, :], b_e[:, None], b_e_last[None, :]
    else:
        o_r, o_s, b_own, b_closed = o_t[None, :], o_t[:, None], b_e[None, :], b_e_last[:, None]
    b_closed = tl.where(o_s // BT < o_r // BT, b_closed, 0.0)
    return tl.where((o_s // BT == o_r // BT) & (o_s <= o_r), b_own, b_closed), b_closed
