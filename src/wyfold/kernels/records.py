"""What travels between launches. Tiles are [chunks * HV, rows, columns], chunks in the order of `runtime.chunks`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """A part's inputs as the recurrence sees them: normalised and activated.

    Attributes:
        q, k: [n, C, K].
        v: [n, C, V].
        beta: [n, C, 1].
        g: [n, C, 1 or K] log gate per token, floored, or None.
        rq, rk: [n, C, 1] reciprocal norms of q and k, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor | None
    rq: Tensor | None
    rk: Tensor | None


class ChunkFactors(NamedTuple):
    """Folded factors of every chunk, each [n, C, C] but G and E.

    Attributes:
        G: [n, C, 1 or K] running sum of g inside its chunk, natural log, or None.
        E: [n, C, K]. A^T (k decayed to the chunk's end).
        F: P A.
        A: (I + diag(beta) J)^-1.
        J, P: Decayed grams of keys, and of queries and keys.
    """

    G: Tensor | None
    E: Tensor
    F: Tensor
    A: Tensor
    J: Tensor
    P: Tensor


class Prepared(NamedTuple):
    """What `prepare` leaves for the scans where tokens stay where they are; t = chunks * HV tiles.

    Upper triangular tiles are three quarters, each [C / 2, C / 2]: first rows and columns, first rows and last columns,
    last rows and columns. The fourth is zero, and nowhere.

    Attributes:
        rows: [t, 4, C] float32 per token: decay from the chunk's start times 1/|k|, the same with 1/|q|, decay to the
            chunk's end times 1/|k| (the norms only where `prepare` takes them), and beta. Decays of a channel gate are
            in the tiles instead, and ones here. What an unfolded forward reads has beta in the third as well.
        total: [t, 1 or K] float32 decay of the state over the chunk.
        q, k: [t, C, K] rows decayed from the chunk's start, of a channel gate; None: the tokens themselves serve.
        E: [t, C, K], or None in the unfolded form.
        F: [t, 3, C/2, C/2] P A, transposed. None in the unfolded form where no backward reads these.
        W: [t, 3, C/2, C/2] (I + J diag(beta))^-1, transposed: e = W R. None in the folded form where no backward
            follows.
        FB: [t, 3, C/2, C/2] F diag(beta), transposed, for the unfolded forward. None in the folded form, and where
            only a backward reads these.
        back: `rows` as the unfolded backward reads them, where both directions read these; else None.
    """

    rows: Tensor
    total: Tensor
    q: Tensor | None
    k: Tensor | None
    E: Tensor | None
    F: Tensor | None
    W: Tensor | None
    FB: Tensor | None = None
    back: Tensor | None = None


class Slots(NamedTuple):
    """Where the states lie that the sequences of a call enter with and leave behind.

    A sequence without a live slot is skipped: nothing of it is read or written but its output, which is zero.

    Attributes:
        entering: [slots, HV, K, V], or V-first; None: zeros.
        leaving: The same, maybe the same tensor, or None: nobody wants them.
        source: [N, columns] slot each sequence enters from; None: its own number.
        target: [N] slot it is left in; None: the one it came from. [N, columns] with `each`; None: those of `source`.
        given: [N] bool, False where a sequence starts from zeros whatever its slot holds; None: everywhere True.
        accepted: [N], sequence n enters from column accepted[n] - 1, or the nearest there is; None: from the first.
        each: The state after token j is left in the slot in column j, instead of the last one's alone.
        pad: Slots are numbers above this one.

    Kernels read `given` and `accepted` where their numbers lie one after another.
    """

    entering: Tensor | None
    leaving: Tensor | None
    source: Tensor | None = None
    target: Tensor | None = None
    given: Tensor | None = None
    accepted: Tensor | None = None
    each: bool = False
    pad: int = -1


class StateRows(NamedTuple):
    """Some of many states.

    Attributes:
        states: [.., HV, K, V], or a view like it.
        rows: [n] int64 which.
    """

    states: Tensor
    rows: Tensor


class PartialGradients(NamedTuple):
    """What NV tiles of value rows each give to gradients that sum over them, float32; n tokens.

    Attributes:
        q, k: [NV, n, HV, K] of q and k as the recurrence sees them.
        beta: [NV, n, HV] of the write strength.
        g: [NV, n, HV, 1 or K] of the log gate, or None.
    """

    q: Tensor
    k: Tensor
    beta: Tensor
    g: Tensor | None


class TokenBorders(NamedTuple):
    """What `scan_bwd` leaves for `gradients` where tokens stay where they are; t = chunks * HV tiles.

    Attributes:
        S: [t, V, K] state entering the chunk, transposed.
        dS: [t, V, K] gradient of the state leaving it, transposed, in `DeltaOptions.unit`.
        e: [t, C, V] prediction errors R - J N; the written values are N = beta e.
        X: [t, C, V] gradient of y = beta R, in the same unit.
    """

    S: Tensor
    dS: Tensor
    e: Tensor
    X: Tensor

    @classmethod
    def of(cls, states: Tensor, tokens: Tensor) -> TokenBorders:
        """From S and dS one after another, and e and X."""
        return cls(*states.unbind(), *tokens.unbind())


class ChunkBorders(NamedTuple):
    """What `scan_bwd` leaves at every chunk.

    Attributes:
        S: [n, K, V] state entering the chunk.
        dS: [n, K, V] gradient of the state leaving it.
        R: [n, C, V] residual v - (decayed k) S.
        X: [n, C, V] gradient of y = beta R.
    """

    S: Tensor
    dS: Tensor
    R: Tensor
    X: Tensor


class TileGradients(NamedTuple):
    """Gradients of a part's `Inputs`, before norm, activation and grouping are undone.

    Attributes:
        q, k, v, beta: Shapes of the inputs.
        g: [n, C, 1 or K] of the per-token log gate, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor | None


class GradientOutputs(NamedTuple):
    """Where a part's gradients go: views of the tokens' gradients, and the parameters' sums; None where none is
    wanted."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    g: Tensor | None
    beta: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
