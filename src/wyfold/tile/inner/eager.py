"""The inner model of TTT-Linear, a linear map (S, c) followed by a layer norm, and the adjoint of each of its steps.

Tiles are [n, C, D], one mini-batch of one value head each. w and u are the norm's weight and bias, and e is the column
of step sizes. q is already multiplied by scale unless it is called `raw`. Every mean runs over a row's D numbers;
variances take two passes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Inner(NamedTuple):
    """The inner gradient of a mini-batch, and the values that its adjoint needs.

    Attributes:
        X: [n, C, D] normalised prediction.
        r: [n, C, 1] its reciprocal deviation.
        Y: [n, C, D] gradient of 1/2 |w X + u - (v - k)|^2 in X.
        N: [n, C, D] the same gradient before the norm, zero in idle rows.
    """

    X: Tensor
    r: Tensor
    Y: Tensor
    N: Tensor


def normalise(z: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Layer norm without weight and bias: x = (z - mean z) r, r = (var z + eps)^(-1/2), biased variance.

    Returns:
        x: [n, C, D].
        r: [n, C, 1].
    """
    x = z - z.mean(-1, keepdim=True)
    r = (x * x).mean(-1, keepdim=True).add_(eps).rsqrt_()
    return x.mul_(r), r


def normalise_bwd(x: Tensor, r: Tensor, d: Tensor) -> Tensor:
    """Adjoint of `normalise`: r (d - mean d - x mean(x d)), written `ln(d)` in the docs."""
    return (d - d.mean(-1, keepdim=True)).addcmul_(x, (x * d).mean(-1, keepdim=True), value=-1).mul_(r)


def inner_gradient(
    S: Tensor, c: Tensor, k: Tensor, t: Tensor, w: Tensor, eps: float, idle: Tensor | None = None
) -> Inner:
    """Gradient of the inner loss of every row at one state.

        Z = k S + c        X, r = normalise(Z)        Y = w (w X + t)        N = ln(Y), zero in idle rows

    Zeroing is essential: an idle row predicts c, not zero, and would update the state.

    Args:
        S, c: [n, D, D], [n, 1, D] state the mini-batch entered with.
        k: [n, C, D].
        t: [n, C, D]. u - v + k.
        w: [n, 1, D].
        eps: Added to the variance.
        idle: [n, C, 1] bool, True in rows without a token; None: there are none.
    """
    X, r = normalise(torch.baddbmm(c, k, S), eps)
    Y = (w * X).add_(t).mul_(w)
    N = normalise_bwd(X, r, Y)
    return Inner(X, r, Y, N if idle is None else N.masked_fill_(idle, 0))


def inner_gradient_bwd(inner: Inner, w: Tensor, dN: Tensor) -> tuple[Tensor, Tensor]:
    """Adjoint of `inner_gradient` in Y and in Z; dN is zero in idle rows.

    dY = ln(dN)
    dX = w^2 dY - r (dN mean(X Y) + Y mean(X dN))          through Y, and through ln's own X
    dZ = ln(dX) - r X mean(dN N)                           and through its r

    Returns:
        dY, dZ: [n, C, D].
    """
    X, r, Y, N = inner
    dY = normalise_bwd(X, r, dN)
    through_ln = (dN * (X * Y).mean(-1, keepdim=True)).addcmul_(Y, (X * dN).mean(-1, keepdim=True)).mul_(r)
    dX = (w * w * dY).sub_(through_ln)
    return dY, normalise_bwd(X, r, dX).addcmul_(X, r * (dN * N).mean(-1, keepdim=True), value=-1)


def attention(q: Tensor, k: Tensor) -> Tensor:
    """Bm = tril(q k^T + 1), the weight of row s's step in row r's read; the ones are the bias's part.   [n, C, C]"""
    return torch.bmm(q, k.transpose(1, 2)).add_(1).tril_()


def read(S: Tensor, c: Tensor, q: Tensor, e: Tensor, written: Tensor) -> Tensor:
    """O = q S + c - e written: each row's read from the state after the steps so far, with its own step size.

    Args:
        S, c: [n, D, D], [n, 1, D] state the mini-batch entered with.
        q: [n, C, D].
        e: [n, C, 1].
        written: [n, C, D] Bm N, q's read of the sum of the steps so far.
    """
    return torch.baddbmm(c, q, S).addcmul_(e, written, value=-1)


def residual_norm(O: Tensor, w: Tensor, u: Tensor, eps: float, raw: Tensor | None) -> Tensor:
    """out = O + w normalise(O) + u; with `raw` [n, C, D], out = raw + w normalise(O) + u."""
    return normalise(O, eps)[0].mul_(w).add_(u).add_(O if raw is None else raw)


def residual_norm_bwd(O: Tensor, w: Tensor, eps: float, dout: Tensor, on_q: bool) -> tuple[Tensor, Tensor]:
    """Adjoint of `residual_norm`. With the residual on the query, dout also flows to the query's gradient.

    Returns:
        dO: [n, C, D].
        X: [n, C, D] normalised O, whose product with dout is the gradient of w.
    """
    X, r = normalise(O, eps)
    dO = normalise_bwd(X, r, w * dout)
    return dO if on_q else dO.add_(dout), X


def step_(S: Tensor, c: Tensor, k: Tensor, N: Tensor, e_last: Tensor) -> None:
    """S <- S - e_last k^T N and c <- c - e_last sum(N), in place: the step that closes the mini-batch."""
    stepped = e_last * N
    S.baddbmm_(k.transpose(1, 2), stepped, alpha=-1)
    c.sub_(stepped.sum(1, keepdim=True))


def step_bwd_(dS: Tensor, dc: Tensor, q: Tensor, k: Tensor, dO: Tensor, dZ: Tensor) -> None:
    """dS <- dS + q^T dO + k^T dZ and dc <- dc + sum(dO + dZ), in place: from the leaving to the entering state."""
    dS.baddbmm_(q.transpose(1, 2), dO).baddbmm_(k.transpose(1, 2), dZ)
    dc.add_((dO + dZ).sum(1, keepdim=True))
