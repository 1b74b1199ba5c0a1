"""Rows and columns of a diagonal-plus-low-rank transition, in PyTorch: how a rule makes them, and their decayed grams.

    S <- D S + b (a^T R)^T + k v^T        R: S before the token's decay (`reads_before`), or D S after it

`a` is the erasing row, `b` the column that it erases along, `k` the column that is written, `v` the written value.

| rule | a | b | k | v | a reads |
|---|---|---|---|---|---|
| "given" (DPLR, IPLR) | a | b | k | v | before |
| "rates" (RWKV-7) | -a | a * b | k | v | before |
| "keys" (GDN-2) | -(b * k) | k | k | w * v | after |
| "feedback" (Comba) | -a | beta k | beta k | v | before |

A row that reads before its token's decay is a row of the token before: `early` moves it there, `late` back. Its gram
with a column is then a query gram, and no exponent is positive.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wyfold.tile.decay.eager import from_start, row_grams, row_grams_bwd


class RuleTokens(NamedTuple):
    """Tiles of a rule's tokens, besides q and the gate. None for an argument that the rule does not have, or 1.

    Attributes:
        k: [n, C, K], normalised.
        v: [n, C, V].
        a: [n, C, K], normalised like k.
        b: [n, C, K].
        w: [n, C, V].
        beta: [n, C, 1].
    """

    k: Tensor
    v: Tensor
    a: Tensor | None
    b: Tensor | None
    w: Tensor | None
    beta: Tensor | None


class Columns(NamedTuple):
    """Erasing row, erasing column, written column and written value of every token.

    Attributes:
        a, b, k: [n, C, K]. If a rule erases along what it writes, b and k are one tensor.
        v: [n, C, V].
    """

    a: Tensor
    b: Tensor
    k: Tensor
    v: Tensor


ONE_COLUMN = frozenset({"keys", "feedback"})
"""Rules that erase along what they write."""


def reads_before(rule: str) -> bool:
    """Whether the erasing row reads the state before the token's decay."""
    return rule != "keys"


def columns(rule: str, tokens: RuleTokens) -> Columns:
    """Make the rows and columns of a rule."""
    k, v, a, b, w, beta = tokens
    if rule == "keys" or a is None:
        return Columns(_times(k, b).neg(), k, k, _times(v, w))
    if rule == "feedback" or b is None:
        written = _times(k, beta)
        return Columns(a.neg(), written, written, v)
    return Columns(a, b, k, v) if rule == "given" else Columns(a.neg(), a * b, k, v)


def columns_bwd(rule: str, tokens: RuleTokens, found: Columns) -> RuleTokens:
    """Adjoint of `columns`. Where b and k are one tensor, `found.k` is its gradient and `found.b` is not read."""
    k, v, a, b, w, beta = tokens
    da, db, dk, dv = found
    if rule == "given":
        return RuleTokens(dk, dv, da, db, None, None)
    if rule == "rates" and a is not None and b is not None:
        return RuleTokens(dk, dv, b * db - da, a * db, None, None)
    if rule == "feedback":
        dbeta = None if beta is None else (dk * k).sum(-1, keepdim=True)
        return RuleTokens(_times(dk, beta), dv, da.neg(), None, None, dbeta)
    dread = da.neg()
    derase, dw = None if b is None else dread * k, None if w is None else dv * v
    return RuleTokens(dk + _times(dread, b), _times(dv, w), None, derase, dw, None)


def early(x: Tensor) -> Tensor:
    """Move every row of a tile to the row before it; the first is dropped, the last is zero."""
    return torch.nn.functional.pad(x[:, 1:], (0, 0, 0, 1))


def late(x: Tensor) -> Tensor:
    """Move every row of a tile to the row after it, the adjoint of `early`."""
    return torch.nn.functional.pad(x[:, :-1], (0, 0, 1, 0))


def read_from_start(a: Tensor, G: Tensor | None, *, before: bool) -> Tensor:
    """a decayed from the chunk's start to where it reads. The map is diagonal, so it is also its own adjoint.

    Before its decay, the chunk's first row reads the entering state undecayed.
    """
    if not before:
        return from_start(a, G)
    rows = late(from_start(early(a), G))
    rows[:, 0] = a[:, 0]
    return rows


def pair_grams(a: Tensor, q: Tensor, column: Tensor, G: Tensor | None, *, before: bool) -> tuple[Tensor, Tensor]:
    """Decayed grams of the erasing rows, strictly lower, and of the queries, lower, with a column.   [n, C, C] each

    A[r, s] = sum_c a[r, c] column[s, c] exp(H[r, c] - G[s, c])    s <  r; H = G, or G of row r - 1 with `before`
    P[r, s] = sum_c q[r, c] column[s, c] exp(G[r, c] - G[s, c])    s <= r
    """
    A, P = row_grams((early(a) if before else a, q), column, G)
    return late(A) if before else A.tril_(-1), P


class PairGradients(NamedTuple):
    """Gradients of the arguments of `pair_grams`, [n, C, K], and of the per-token gate, shape of G."""

    a: Tensor
    q: Tensor
    column: Tensor
    g: Tensor | None


def pair_grams_bwd(
    a: Tensor,
    q: Tensor,
    column: Tensor,
    G: Tensor | None,
    grams: tuple[Tensor, Tensor],
    dgrams: tuple[Tensor, Tensor],
    *,
    before: bool,
) -> PairGradients:
    """Adjoint of `pair_grams`.

    Args:
        a, q, column, G, before: As given to `pair_grams`.
        grams: Its results.
        dgrams: Their gradients, contiguous, zero where the grams are.
    """
    (A, P), (dA, dP) = grams, dgrams
    if before:
        a, A, dA = early(a), early(A), early(dA)
    (da, dq), dcolumn, dg = row_grams_bwd((a, q), column, G, (A, P), (dA, dP))
    return PairGradients(late(da) if before else da, dq, dcolumn, dg)


def _times(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor
