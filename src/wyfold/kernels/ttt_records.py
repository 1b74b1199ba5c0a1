"""Records that the stages of TTT-Linear pass to each other."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class MiniBatches(NamedTuple):
    """Tiles of a part's tokens, the inputs of the inner model: n mini-batches of C rows.

    Attributes:
        q, k: [n, C, D]; q is multiplied by scale.
        t: [n, C, D] u - v + k.
        e: [n, C, 1] step sizes.
        e_last: [n, 1, 1] step size that closes the mini-batch; zero where it stays open.
        col: [n, C, 1] factors of the rows' inner gradients; None for 1.
        raw: [n, C, D] q without scale, where the residual is q; None where it is O.
        w, u: [n, 1, D] weight and bias of both norms.
        idle: [n, C, 1] bool, True in rows without a token; None where every row has one.
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
    """Inner model of every sequence and head; also used for sums of its gradients, and for gradients of both.

    Attributes:
        S: [.., D, D] matrix.
        c: [.., 1, D] bias.
    """

    S: Tensor
    c: Tensor


class MiniBatchGradients(NamedTuple):
    """Gradients of a part's `MiniBatches`.

    Attributes:
        q, k, v: [n, C, D]; q's gradient is not yet multiplied by scale.
        e: [n, C, 1], including the gradient of `e_last`.
        col: [n, C, 1]; None without factors.
        raw: [n, C, D] gradient of q through the residual, not scaled; None where the residual is O.
        w, u: [n, D] each mini-batch's term of the parameters' gradients.
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
    """Inputs of a whole call, for kernels that load tokens from the caller's tensors.

    Attributes:
        q, k: [B, T, H, D], any strides.
        v: [B, T, HV, D].
        w, u: [HV, D] weight and bias of both norms.
        eta: [B, T, HV, 1] step sizes.
        col: [B, T, HV, 1] factors of the tokens' inner gradients; None for 1.
        residual: "o" or "q": the term to which the output's norm is added.
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
    """Initial or final states of a call, or their gradients, in the caller's memory.

    Attributes:
        S: [N, HV, D, D] view, K-first. None reads as zeros and skips the store.
        c: [N, HV, 1, D] view, likewise.
    """

    S: Tensor | None
    c: Tensor | None


class TTTGradients(NamedTuple):
    """Gradients of the tensors of `TTTInputs`, with the same shapes and dtypes.

    Attributes:
        q, k, v, w, u, eta: Written by `ttt_bwd`.
        col: None without factors.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    u: Tensor
    eta: Tensor
    col: Tensor | None


class SegmentBorders(NamedTuple):
    """Results of the forward scan that the launches parallel over segments read.

    Attributes:
        N: [B, T, HV, D] inner gradients, times their factors.
        S: [segments * HV, D, D] V-first, state entering each segment.
        c: [segments * HV, D] float32, bias entering each segment.
        X: [B, T, HV, D] normalised predictions; None where no backward follows.
        rows: [B, T, HV, 4] float32; the first three are the reciprocal deviation of Z, mean X Y and mean Y. None where
            no backward follows.
    """

    N: Tensor
    S: Tensor
    c: Tensor
    X: Tensor | None
    rows: Tensor | None
