"""Arguments of the summaries' kernels as records."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from wyfold.kernels.records import Prepared
from wyfold.runtime.chunk_layout import EvenSegments, Segments
from wyfold.runtime.options import DeltaOptions


class Tokens(NamedTuple):
    """Kernel argument: strides of k and v, and W, which is accessed through pointers alone; see `scan`."""

    s_k: Any
    s_v: Any
    W: Any
    end: None = None


class ReverseTokens(NamedTuple):
    """Kernel argument: strides of q, k and do, and F and W, which are accessed through pointers alone; see `scan`."""

    s_q: Any
    s_k: Any
    s_do: Any
    F: Any
    W: Any
    end: None = None


class Maps(NamedTuple):
    """Kernel argument: the map of each segment, and what it starts from, each with its strides.

    Attributes:
        S0, s_S0: [N, HV, K, V] initial states, or None; with slots those of a pool.
        H, s_H: [borders, HV, K, V] states that segments leave, written.
        M, s_M: [borders, HV, K, K] maps from the entering to the leaving state, written.
        copy, s_copy: [N, HV, K, V] initial states, written from the slots; None without slots.
    """

    S0: Any
    s_S0: Any
    H: Any
    s_H: Any
    M: Any
    s_M: Any
    copy: Any = None
    s_copy: Any = None
    end: None = None


class Gradients(NamedTuple):
    """Kernel argument: gradients of states, each with its strides.

    Attributes:
        dST, s_dST: [N, HV, K, V] of the final states, or None.
        c, s_c: [borders, HV, K, V] of the states at borders, written.
    """

    dST: Any
    s_dST: Any
    c: Any
    s_c: Any
    end: None = None


class Bounds(NamedTuple):
    """Kernel argument: what bounds the norms of transitions, as pointers. All are None without a horizon.

    Attributes:
        total, rows: Fields of `Prepared`, [tiles, 1 or K] and [tiles, 4, BT].
        k, E: Fields of `Prepared` under a channel gate, [tiles, BT, K]. Under a scalar gate k are the call's keys, or
            None if they have at most the norm 1 or erase nothing.
        s_k: Strides of the call's keys, or None.
    """

    total: Any = None
    rows: Any = None
    k: Any = None
    E: Any = None
    s_k: Any = None
    end: None = None

    @classmethod
    def of(cls, prepared: Prepared, k: Tensor, options: DeltaOptions, *, horizon: bool) -> Bounds:
        if not horizon:
            return cls()
        if prepared.q is not None:
            return cls(prepared.total, prepared.rows, prepared.erasing, prepared.E)
        if options.bounded_keys:
            return cls(prepared.total, prepared.rows)
        return cls(prepared.total, prepared.rows, k, s_k=k.stride())


class SegmentIndex(NamedTuple):
    """Kernel argument: which segments there are; all None for `EvenSegments`.

    Attributes:
        sequence: Sequence of each segment.
        first: First segment of each sequence.
        leading: Segment before each border.
    """

    sequence: Any
    first: Any
    leading: Any

    @classmethod
    def of(cls, segments: Segments | EvenSegments) -> SegmentIndex:
        if isinstance(segments, EvenSegments):
            return cls(None, None, None)
        return cls(segments.sequence, segments.first, segments.leading)
