"""Arguments of the scan's kernel as records."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from wyfold.runtime.chunk_layout import EvenSegments, Segments
from wyfold.tile.index.triton import strides


class Tokens(NamedTuple):
    """Kernel argument: how the tokens lie in memory, and what is accessed through pointers alone.

    Attributes:
        s_q, s_k: Strides of q and k; None with a channel gate, whose rows are tiles.
        s_v: Strides of v.
        W, F: Triangular tiles, stored in quarters; W is None if folded.
        o, s_o: Output, and its strides.
    """

    s_q: Any
    s_k: Any
    s_v: Any
    W: Any
    F: Any
    o: Any
    s_o: Any
    end: None = None


class States(NamedTuple):
    """Kernel argument: states [.., HV, K, V], each with its strides; None where the call has none.

    Attributes:
        S0, s_S0: Initial states.
        ST, s_ST: Final states, written.
        kept, s_kept: States after every `every` chunks, written.
        first_kept: [N] first row in `kept` of each sequence.
    """

    S0: Any
    s_S0: Any
    ST: Any
    s_ST: Any
    kept: Any = None
    s_kept: Any = None
    first_kept: Any = None
    end: None = None


class SegmentTables(NamedTuple):
    """Kernel argument: segments of cut sequences; all None if no sequence is cut.

    Attributes:
        borders, s_borders: States at the borders of segments, and their strides.
        sequence: Sequence of each segment; None for `EvenSegments`.
        first: First segment of each sequence; None for `EvenSegments`.
        selected: Segments that the launch runs; None for all.
    """

    borders: Any
    s_borders: Any
    sequence: Any
    first: Any
    selected: Any = None
    end: None = None


def segment_tables(
    segments: Segments | EvenSegments | None, borders: Tensor | None, selected: Tensor | None
) -> SegmentTables:
    """The segments of a call as a kernel argument. borders, selected: As in `SegmentTables`."""
    if not isinstance(segments, Segments):
        return SegmentTables(borders, strides(borders), None, None, selected)
    return SegmentTables(borders, strides(borders), segments.sequence, segments.first, selected)


class Pool(NamedTuple):
    """Kernel argument: tables of a pool's slots, each None without slots.

    Attributes:
        source: [N, columns] slot of each entering state, or None.
        target: [N] slot of each leaving state, or None.
        given: [N] False for a sequence that starts from zeros, or None.
    """

    source: Any = None
    target: Any = None
    given: Any = None


class Sizes(NamedTuple):
    """Constexprs: sizes of the call and of tiles, and tiles in flight."""

    H: int
    HV: int
    K: int
    V: int
    BT: int
    BK: int
    BV: int
    STAGES: int


class Flags(NamedTuple):
    """Constexprs: variant of the kernel.

    Attributes:
        PACKED: Whether the batch is packed.
        CHANNEL: Whether the gate is per channel.
        FOLDED: Whether E is read instead of W.
        USE_TMA: Whether the arguments x_ are descriptors.
        OP, PRECISION: Dtype and precision of products.
    """

    PACKED: bool
    CHANNEL: bool
    FOLDED: bool
    USE_TMA: bool
    OP: Any
    PRECISION: str | None
