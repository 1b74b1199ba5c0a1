"""Records passed between launches.

Tiles are [chunks * HV, rows, columns], with chunks in the order of `runtime.chunk_layout`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from wyfold.tile.columns.eager import RuleTokens


class Inputs(NamedTuple):
    """Input tiles of a part, after norm and activations.

    Attributes:
        q, k: [n, C, K], normalised.
        v: [n, C, V].
        beta: [n, C, 1] write strength.
        g: [n, C, 1 or K] floored log gate per token; None without a gate.
        rq, rk: [n, C, 1] reciprocal norms of q and k; None without the l2 norm.
        erases: `DeltaOptions.erases`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor | None
    rq: Tensor | None
    rk: Tensor | None
    erases: bool = True

    @property
    def erasing(self) -> Tensor:
        """[n, C, K] keys whose reading of the state a write erases: k, or zeros if writes erase nothing."""
        return self.k if self.erases else self.k.new_zeros(()).expand_as(self.k)


class ChunkFactors(NamedTuple):
    """Factors of every chunk that do not depend on the state, from `prepare.eager.fold`.

    Attributes:
        G: [n, C, 1 or K] running sum of g inside its chunk, natural log; None without a gate.
        E: [n, C, K] A^T (k decayed to the chunk's end).
        F: [n, C, C] P A.
        A: [n, C, C] (I + diag(beta) J)^-1.
        J: [n, C, C] decayed gram of the keys.
        P: [n, C, C] decayed gram of queries and keys.
    """

    G: Tensor | None
    E: Tensor
    F: Tensor
    A: Tensor
    J: Tensor
    P: Tensor

    @staticmethod
    def kept_widths(K: int, C: int) -> list[int]:
        """Widths of the factors after G."""
        return [K] + [C] * 4


class LowRankInputs(NamedTuple):
    """Input tiles of a part of a diagonal-plus-low-rank rule, after norm, activations and `tile.columns`.

    Attributes:
        q: [n, C, K], normalised.
        a, b, k, v: Rows, columns and values, as of `Columns`.
        g: [n, C, 1 or K] floored log gate per token; None without a gate.
        before: Whether a reads before the token's decay.
        tokens: Tiles that a, b, k and v were made of.
        rq, rk, ra: [n, C, 1] reciprocal norms of the tokens q, k and a; None without the l2 norm.
    """

    q: Tensor
    a: Tensor
    b: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    before: bool
    tokens: RuleTokens
    rq: Tensor | None
    rk: Tensor | None
    ra: Tensor | None


class LowRankFactors(NamedTuple):
    """Factors of every chunk of a diagonal-plus-low-rank rule that do not depend on the state.

    Attributes:
        G: [n, C, 1 or K] running sum of g inside its chunk, natural log; None without a gate.
        rows: [n, C, K] a decayed from the chunk's start to where it reads.
        Q: [n, C, K] q with the chunk's transitions before it.
        E: [n, C, K] A^T (b decayed to the chunk's end).
        K: [n, C, K] k with the chunk's transitions after it.
        P: [n, C, C] q, k and the transitions between them.
        A: [n, C, C] (I - Aab)^-1.
        F: [n, C, C] Pqb A.
        Aab, Aak: [n, C, C] decayed grams of a with b and k, strictly lower.
        Pqb, Pqk: [n, C, C] decayed grams of q with b and k.
    """

    G: Tensor | None
    rows: Tensor
    Q: Tensor
    E: Tensor
    K: Tensor
    P: Tensor
    A: Tensor
    F: Tensor
    Aab: Tensor
    Aak: Tensor
    Pqb: Tensor
    Pqk: Tensor

    @staticmethod
    def kept_widths(K: int, C: int) -> list[int]:
        """Widths of the factors after G."""
        return [K] * 4 + [C] * 7


class Prepared(NamedTuple):
    """Factors that the `prepare` kernels store for the scan kernels, which read the caller's tokens; t = chunks * HV.

    Upper triangular tiles are stored as three quarters, each [C / 2, C / 2]: first rows and columns, first rows and
    last columns, last rows and columns. The fourth quarter is zero and is not stored.

    Attributes:
        rows: [t, 4, C] float32 numbers per token: decay from the chunk's start times 1/|k|, the same with 1/|q|, decay
            to the chunk's end times 1/|k|, and beta. The norms are included only where `prepare` computes them. With a
            channel gate the decays are in the tiles, and ones here. For an unfolded forward the third is also times
            beta. If writes erase nothing, the first is zero.
        total: [t, 1 or K] float32 decay of the state over the chunk.
        q, k: [t, C, K] rows decayed from the chunk's start under a channel gate; None otherwise: the scans then read
            the tokens themselves. k is None too if writes erase nothing.
        E: [t, C, K]; None in the unfolded form.
        F: [t, 3, C/2, C/2] P A, transposed; None in the unfolded form without a backward.
        W: [t, 3, C/2, C/2] (I + J diag(beta))^-1, transposed: e = W R. None in the folded form without a backward, and
            under a channel gate if writes erase nothing: A and W are then the identity.
        FB: [t, 3, C/2, C/2] F diag(beta), transposed, for the unfolded forward. None in the folded form, and where only
            a backward reads the record.
        rows_bwd: `rows` for the unfolded backward, where both directions read the record; else None.
        norms: [t, 2, C] float32 1/|q| and 1/|k|, which `gradients` in Gluon reads under a channel gate; else None.
    """

    rows: Tensor
    total: Tensor
    q: Tensor | None
    k: Tensor | None
    E: Tensor | None
    F: Tensor | None
    W: Tensor | None
    FB: Tensor | None = None
    rows_bwd: Tensor | None = None
    norms: Tensor | None = None

    @property
    def erasing(self) -> Tensor | None:
        """k under a channel gate. If writes erase nothing E, for kernels that multiply its products by `rows`: 0."""
        return self.k if self.q is None or self.k is not None else self.E


class LowRankPrepared(NamedTuple):
    """Factors that the `low_rank_prepare` kernel stores for the other low-rank kernels; t = chunks * HV.

    Upper triangular tiles are stored as of `Prepared`. If a rule erases along what it writes, K is E, P is F, and both
    are None.

    Attributes:
        rows, E, K: [t, C, K] as of `LowRankFactors`.
        q: [t, C, K] q decayed from the chunk's start.
        total: [t, K] float32 decay of the state over the chunk.
        F, P: [t, 3, C/2, C/2] as of `LowRankFactors`, transposed.
        A: [t, 3, C/2, C/2] (I - Aab)^-1, transposed; None without a backward.
        R: [t, 3, C/2, C/2] A Aak, transposed: A U + R v is what the erasing rows read. None without a backward.
    """

    rows: Tensor
    q: Tensor
    E: Tensor
    K: Tensor | None
    total: Tensor
    F: Tensor
    P: Tensor | None
    A: Tensor | None
    R: Tensor | None


class Slots(NamedTuple):
    """Storage of a call's initial and final states, by slot.

    A sequence without a live slot is skipped: its output is zero, and none of its other data is read or written.

    Attributes:
        entering: [slots, HV, K, V], or V-first, initial states; None for zeros.
        leaving: Final states, in the same layout and possibly the same tensor; None if they are not stored.
        source: [N, columns] slot of each sequence's initial state; None for its own number.
        target: [N] slot of the final state; None for the source slot. With `each`: [N, columns]; None for `source`.
        given: [N] bool, contiguous, False where a sequence starts from zeros whatever its slot holds; None for all
            True.
        accepted: [N], contiguous; sequence n starts from column accepted[n] - 1, clamped to the columns. None for the
            first column.
        each: Store the state after token j in the slot in column j, instead of only the final state.
        pad: Valid slots are greater than this number.
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
    """A selection of states by index.

    Attributes:
        states: [.., HV, K, V] tensor or view.
        rows: [n] int64 indices of the selected states.
    """

    states: Tensor
    rows: Tensor


class PartialGradients(NamedTuple):
    """Partial gradients of n tokens, one per tile of value rows, float32; the gradient is their sum over NV tiles.

    Attributes:
        q, k: [NV, n, HV, K] of q and k after the norm.
        beta: [NV, n, HV] of the write strength.
        g: [NV, n, HV, 1 or K] of the log gate; None without a gate.
    """

    q: Tensor
    k: Tensor
    beta: Tensor
    g: Tensor | None


class TokenBorders(NamedTuple):
    """Results of the kernels before them that the `gradients` kernels read; t = chunks * HV tiles.

    Attributes:
        S: [t, V, K] state entering the chunk, transposed.
        dS: [t, V, K] gradient of the state leaving it, transposed, in `DeltaOptions.unit`.
        e: [t, C, V] prediction errors R - J N; the written values are N = beta e.
        X: [t, C, V] gradient of y = beta R, in the same unit.
        norms: As of `Prepared`; the other tensors are from `scan_bwd`.
    """

    S: Tensor
    dS: Tensor
    e: Tensor
    X: Tensor
    norms: Tensor | None = None

    @classmethod
    def of(cls, states: Tensor, tokens: Tensor) -> TokenBorders:
        """Split stacked tensors: `states` is S and dS, `tokens` is e and X."""
        return cls(*states.unbind(), *tokens.unbind())


class ChunkBorders(NamedTuple):
    """Results of the eager `scan_bwd` for every chunk.

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


class LowRankBorders(NamedTuple):
    """Results of `low_rank_scan_bwd` for every chunk.

    Attributes:
        S: [n, K, V] state entering the chunk.
        dS: [n, K, V] gradient of the state leaving it.
        U: [n, C, V] what the erasing rows read of S.
        Z: [n, C, V] gradient of U through the state leaving the chunk.
    """

    S: Tensor
    dS: Tensor
    U: Tensor
    Z: Tensor


class LowRankGradients(NamedTuple):
    """Gradients of q, a, b, k, v and g of `LowRankInputs`.

    Attributes:
        b: Where b and k are one tensor, the same as k, their gradient.
    """

    q: Tensor
    a: Tensor
    b: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None


class TileGradients(NamedTuple):
    """Gradients of a part's `Inputs`, before the adjoints of norm, activation and grouping.

    Attributes:
        q, k, v, beta: Shapes of the inputs.
        g: [n, C, 1 or K] gradient of the per-token log gate; None without a gate.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor | None


class GradientOutputs(NamedTuple):
    """Output tensors of the gradients; None where a gradient is not requested.

    Attributes:
        q, k, v, g, beta: Gradients of the tokens, or views of a part of them, with the inputs' shapes.
        A_log, dt_bias: Gradients of the gate's parameters.
        a, b, w: Gradients of the tokens that only diagonal-plus-low-rank rules have.
    """

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    g: Tensor | None
    beta: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    a: Tensor | None = None
    b: Tensor | None = None
    w: Tensor | None = None
