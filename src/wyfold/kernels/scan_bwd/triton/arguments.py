"""Arguments of the backward scan's kernel as records."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from wyfold.runtime.chunk_layout import Segments
from wyfold.tile.index.triton import strides


class Tokens(NamedTuple):
    """Kernel argument: how the tokens lie in memory, and tiles that are accessed through pointers alone.

    Attributes:
        s_q, s_k: Strides of q and k; None with a channel gate, whose rows are tiles.
        s_v, s_do: Strides of v and do.
        F, W: Triangular tiles, stored in quarters.
    """

    s_q: Any
    s_k: Any
    s_v: Any
    s_do: Any
    F: Any
    W: Any
    end: None = None


class States(NamedTuple):
    """Kernel argument: states [N, HV, K, V] of the call, each with its strides; None where it has none.

    Attributes:
        S0, s_S0: Initial states.
        dST, s_dST: Gradients of the final states.
        dS0, s_dS0: Gradients of the initial states, written.
    """

    S0: Any
    s_S0: Any
    dST: Any
    s_dST: Any
    dS0: Any
    s_dS0: Any
    end: None = None


class SegmentTables(NamedTuple):
    """Kernel argument: segments of cut sequences; all None if no sequence is cut.

    Attributes:
        entering, s_entering: States at the borders of segments, and their strides.
        leaving, s_leaving: Gradients of those states.
        sequence: Sequence of each segment.
        first: First segment of each sequence.
    """

    entering: Any
    s_entering: Any
    leaving: Any
    s_leaving: Any
    sequence: Any
    first: Any
    end: None = None


def segment_tables(segments: Segments | None, entering: Tensor | None, leaving: Tensor | None) -> SegmentTables:
    """The segments of a call as a kernel argument. entering, leaving: As in `SegmentTables`."""
    sequence, first = (None, None) if segments is None else (segments.sequence, segments.first)
    return SegmentTables(entering, strides(entering), leaving, strides(leaving), sequence, first)
