"""The inner model of TTT-Linear on the device.

Tiles are [BV, BT], value rows and tokens, as the products of a state [V, K] leave them; every sum below runs over the D
value rows of a token, whose mean is taken off before anything is squared. Rows past D are zero where a result says so:
they would take part in the sums.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sums_of_two(a, b):
    """Sums over the value rows of two tiles at once: one exchange between warps.   [BT] each"""
    return tl.reduce((a, b), 0, add_two)


@triton.jit
def sums_of_four(a, b, c, d):
    """Likewise of four."""
    return tl.reduce((a, b, c, d), 0, add_four)


@triton.jit
def add_two(a, b, x, y):
    return a + x, b + y


@triton.jit
def add_four(a, b, c, d, x, y, z, w):
    return a + x, b + y, c + z, d + w


@triton.jit
def inside(b_x, D: tl.constexpr):
    """b_x, zero in the rows past D."""
    if b_x.shape[0] == D:
        return b_x
    else:
        return tl.where((tl.arange(0, b_x.shape[0]) < D)[:, None], b_x, 0.0)


@triton.jit
def normalise(b_z, b_mean, eps, D: tl.constexpr):
    """x = (z - mean) r with r = (var z + eps)^(-1/2), given the mean.   [BV, BT] and [BT]"""
    b_x = inside(b_z - b_mean[None, :], D)
    b_r = tl.rsqrt(tl.sum(b_x * b_x, axis=0) * (1.0 / D) + eps)
    return b_x * b_r[None, :], b_r


@triton.jit
def inner_gradient(b_Z, b_mean, b_t, b_w, rows, eps, D: tl.constexpr):
    """Gradient of the inner loss of every token at one state.

        X, r = normalise(Z)        Y = w (w X + t)        N = r (Y - mean Y - X mean(X Y)), zero where there is no token

    Args:
        b_Z, b_mean: [BV, BT] prediction, and its mean [BT].
        b_t: [BV, BT]. u - v + k.
        b_w: [BV, 1].
        rows: Tokens of the mini-batch.

    Returns:
        N, X: [BV, BT].
        r, mean of Y, mean of X Y: [BT].
    """
    b_X, b_r = normalise(b_Z, b_mean, eps, D)
    b_Y = b_w * (b_w * b_X + b_t)
    b_y, b_xy = sums_of_two(b_Y, b_X * b_Y)
    b_y, b_xy = b_y * (1.0 / D), b_xy * (1.0 / D)
    return gradient_of(b_X, b_r, b_Y, b_y, b_xy, rows, D), b_X, b_r, b_y, b_xy


@triton.jit
def gradient_of(b_X, b_r, b_Y, b_y, b_xy, rows, D: tl.constexpr):
    """N = r (Y - mean Y - X mean(X Y)), zero where there is no token.   [BV, BT]"""
    b_N = (b_Y - b_y[None, :] - b_X * b_xy[None, :]) * b_r[None, :]
    return inside(tl.where((tl.arange(0, b_X.shape[1]) < rows)[None, :], b_N, 0.0), D)


@triton.jit
def inner_gradient_bwd(b_X, b_r, b_Y, b_y, b_xy, b_w, b_dN, b_seen, rows, D: tl.constexpr):
    """Adjoint of `inner_gradient` in Y and in Z.

        dY = r (dN - mean dN - X mean(X dN))
        dX = w^2 dY - r (dN mean(X Y) + Y mean(X dN))
        dZ = r (dX - mean dX - X (mean(X dX) + mean(N dN)))

    Args:
        b_X, b_r, b_Y, b_y, b_xy, b_w, rows: Of `inner_gradient`; X, and dN, are zero where there is no token.
        b_seen: [BV, BT] what a step along N adds to the loss.

    Returns:
        dY, dZ: [BV, BT].
        <seen, N>: [BT].
    """
    b_N = gradient_of(b_X, b_r, b_Y, b_y, b_xy, rows, D)
    b_m, b_a, b_n, b_step = sums_of_four(b_dN, b_X * b_dN, b_N * b_dN, b_N * b_seen)
    b_m, b_a, b_n = b_m * (1.0 / D), b_a * (1.0 / D), b_n * (1.0 / D)
    b_dY = inside((b_dN - b_m[None, :] - b_X * b_a[None, :]) * b_r[None, :], D)
    b_dX = b_w * b_w * b_dY - (b_dN * b_xy[None, :] + b_Y * b_a[None, :]) * b_r[None, :]
    b_m, b_a = sums_of_two(b_dX, b_X * b_dX)
    b_m, b_a = b_m * (1.0 / D), b_a * (1.0 / D) + b_n
    return b_dY, inside((b_dX - b_m[None, :] - b_X * b_a[None, :]) * b_r[None, :], D), b_step


@triton.jit
def residual_norm(b_O, b_mean, b_w, b_u, eps, D: tl.constexpr):
    """out = O + w normalise(O) + u.

    Args:
        b_mean: [BT] close to O's mean: within what rounding moved it.

    Returns:
        out, X: [BV, BT].
        r: [BT].
    """
    b_d = inside(b_O - b_mean[None, :], D)
    b_m, b_s = sums_of_two(b_d, b_d * b_d)
    b_m = b_m * (1.0 / D)
    b_r = tl.rsqrt(tl.maximum(b_s * (1.0 / D) - b_m * b_m, 0.0) + eps)
    b_X = inside((b_d - b_m[None, :]) * b_r[None, :], D)
    return b_O + b_w * b_X + b_u, b_X, b_r


@triton.jit
def residual_norm_bwd(b_X, b_r, b_w, b_dout, D: tl.constexpr):
    """Gradient of O in `residual_norm`, given its X and r.   [BV, BT]"""
    b_d = b_w * b_dout
    b_m, b_a = sums_of_two(b_d, b_X * b_d)
    b_m, b_a = b_m * (1.0 / D), b_a * (1.0 / D)
    return b_dout + inside((b_d - b_m[None, :] - b_X * b_a[None, :]) * b_r[None, :], D)


@triton.jit
def attention(b_gram):
    """How much of row s's step row r reads, s (q k^T) + 1 for s <= r, from the gram of k and q.   [s, r]"""
    o_t = tl.arange(0, b_gram.shape[0])
    return tl.where(o_t[:, None] <= o_t[None, :], b_gram + 1.0, 0.0)


@triton.jit
def read_steps(b_e, b_e_last, FROM: tl.constexpr, BT: tl.constexpr):
    """The step size with which row r reads what row s wrote, rows being those of whole mini-batches of BT.

    Inside a mini-batch, rows s <= r and r's own step; from an earlier one, the step that closed it; nothing later.

    Args:
        b_e, b_e_last: [R] steps, and those that close each row's mini-batch.
        FROM: Which index comes first: "r" gives [r, s], "s" gives [s, r].

    Returns:
        steps: [R, R], and its part from earlier mini-batches alone.
    """
    o_t = tl.arange(0, b_e.shape[0])
    if FROM == "r":
        o_r, o_s, b_own, b_closed = o_t[:, None], o_t[None, :], b_e[:, None], b_e_last[None, :]
    else:
        o_r, o_s, b_own, b_closed = o_t[None, :], o_t[:, None], b_e[None, :], b_e_last[:, None]
    b_closed = tl.where(o_s // BT < o_r // BT, b_closed, 0.0)
    return tl.where((o_s // BT == o_r // BT) & (o_s <= o_r), b_own, b_closed), b_closed
