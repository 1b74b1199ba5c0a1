"""Arguments of the summaries' kernels as records."""

from __future__ import annotations

from typing import Any, NamedTuple

from wyfold.kernels.records import Prepared
from wyfold.runtime.chunk_layout import EvenSegments, Segments


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
        S0, s_S0: [N, HV, K, V] initial states, or None.
        H, s_H: [borders, HV, K, V] states that segments leave, written.
        M, s_M: [borders, HV, K, K] maps from the entering to the leaving state, written.
    """

    S0: Any
    s_S0: Any
    H: Any
    s_H: Any
    M: Any
    s_M: Any
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
    """Kernel argument: fields of `Prepared` that bound the norms of transitions, as pointers. All are None without a
    horizon.

    Attributes:
        total, rows: [tiles, 1 or K] and [tiles, 4, BT].
        k, E: [tiles, BT, K] under a channel gate; else None.
    """

    total: Any = None
    rows: Any = None
    k: Any = None
    E: Any = None
    end: None = None

    @classmethod
    def of(cls, prepared: Prepared, *, horizon: bool) -> Bounds:
        if not horizon:
            return cls()
        return cls(prepared.total, prepared.rows, prepared.erasing, None if prepared.q is None else prepared.E)


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
