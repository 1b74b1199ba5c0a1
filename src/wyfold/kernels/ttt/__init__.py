"""TTT-Linear, mini-batch by mini-batch (docs/algorithm.md, section 8), and its adjoint.

A mini-batch of n rows takes all its inner gradients N at the state (S, c) it entered with:

    O = q S + c - e (Bm N)         out = O + w LN(O) + u          or q, without its scale, in the place of the first O
    S <- S - e_n k^T N             c <- c - e_n sum(N)            e_n: step size of the last row that holds a token

Where tokens have factors of their own (`eta_col`), N is the inner gradient times its row's factor throughout, and so is
what is called N below; the inner gradient itself is met inside `tile/inner` alone.

An open mini-batch is one that a caller may go on with. Its state stays (S, c); the sums k^T N and sum(N) of its rows so
far are handed out instead. Going on, its first rows are idle, and the sums of earlier calls join those of its own rows.

Source: Learning to (learn at test time), arXiv:2407.04620, the dual form of a mini-batch.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class MiniBatches(NamedTuple):
    """A part's tokens as the inner model sees them, n mini-batches of C rows.

    Attributes:
        q, k: [n, C, D]. q times scale.
        t: [n, C, D]. u - v + k.
        e: [n, C, 1] step sizes.
        e_last: [n, 1, 1] the step that closes the mini-batch, zero where it stays open.
        col: [n, C, 1] factors of the rows' own gradients; None: 1.
        raw: [n, C, D] q without scale where the residual is on it; None: it is on O.
        w, u: [n, 1, D] weight and bias of both norms.
        idle: [n, C, 1] bool, True in rows without a token; None: there are none.
    """

    q: Tensor
    k: Tensor
    t: Tensor
    e: Tensor
    e_last: Tensor
    col: Tensor | None
    raw: Tensor | None
    w: Tensor
    u: Tensor
    idle: Tensor | None


class State(NamedTuple):
    """The inner model, or sums of its gradients, or a gradient of either.

    Attributes:
        S: [.., D, D] matrix.
        c: [.., 1, D] bias.
    """

    S: Tensor
    c: Tensor


class MiniBatchGradients(NamedTuple):
    """Gradients of a part's `MiniBatches`.

    Attributes:
        q, k, v: [n, C, D]. q's without the factor scale.
        e: [n, C, 1], that of `e_last` included.
        col: [n, C, 1], None where there are no factors.
        raw: [n, C, D] a further share of the query's, which scale is no factor of; None where there is none.
        w, u: [n, D], a share of every mini-batch.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    e: Tensor
    col: Tensor | None
    raw: Tensor | None
    w: Tensor
    u: Tensor


class TTTInputs(NamedTuple):
    """A whole call's inputs, for launches that find their tokens themselves.

    Attributes:
        q, k: [B, T, H, D], any strides.
        v: [B, T, HV, D].
        w, u: [HV, D] weight and bias of both norms.
        eta: [B, T, HV, 1].
        col: [B, T, HV, 1] factors of the tokens' own gradients; None: 1.
        residual: "o" or "q", what the norm of what was read is added to.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    u: Tensor
    eta: Tensor
    col: Tensor | None
    residual: str


class StateViews(NamedTuple):
    """[N, HV, D, D] views, K-first, and [N, HV, 1, D]; None stands for zeros, or for what nobody wants."""

    S: Tensor | None
    c: Tensor | None


class TTTGradients(NamedTuple):
    """Gradients of the tensors of `TTTInputs`, with its shapes and dtypes."""

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    u: Tensor
    eta: Tensor
    col: Tensor | None


class SegmentBorders(NamedTuple):
    """What a walk over whole calls leaves for what is parallel over segments.

    Attributes:
        N: [B, T, HV, D] inner gradients, times their factors.
        S: [segments * HV, D, D] V-first, state entering a segment.
        c: [segments * HV, D] float32, its bias.
        X: [B, T, HV, D] normalised predictions; None where no backward follows.
        rows: [B, T, HV, 4] float32. Reciprocal deviation of Z, mean X Y, mean Y; or None.
    """

    N: Tensor
    S: Tensor
    c: Tensor
    X: Tensor | None
    rows: Tensor | None
