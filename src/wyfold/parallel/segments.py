"""Cutting long sequences into segments that a GPU scans side by side.

A sequence is scanned chunk by chunk, a program for each value head and 64 value rows. Few heads leave multiprocessors
without one; in segments there are more programs, and about twice the work, since every segment is also summarised
before its entering state is known. What decides is the sequence's own length, and what the whole model has in common:
value heads, widths, the card. Neither gates nor the rest of the batch do, so a sequence's bits are those of its own
call, however many others are in it; of a batch that fills the card by itself the cut costs up to that work
(docs/segments.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from wyfold.runtime.chunks import CUT_FROM, Cut

SHORTEST = 8192
"""Tokens of the shortest sequence that is cut."""

ROWS = 64  # value rows of a program
WIDEST = 128
"""Key or value width up to which sequences are cut."""

WHOLE = Cut(0, 1)


def cut(heads: int, K: int, V: int, chunk_size: int, processors: int, max_splits: int | None = None) -> Cut:
    """How a call's long sequences are cut: the split rule.

    A sequence is cut from SHORTEST tokens on, and no segment is shorter than SHORTEST / CUT_FROM. They are at most so
    many that each multiprocessor has two programs: the largest power of two up to 2 processors / (heads ceil(V / 64)),
    or max_splits. Where that is below 2 CUT_FROM, more than a quarter of the card is busy without segments; and fewer
    than CUT_FROM of them gain nothing over the work they add. States wider than WIDEST fill a program's registers.

    Args:
        heads: HV.
        K, V: Widths.
        chunk_size: C.
        processors: Multiprocessors of the card.
        max_splits: Most segments of a sequence, or None.
    """
    if max(K, V) > WIDEST:
        return WHOLE
    if _forced:
        chunks, most = _forced[-1]
        return Cut(chunks, min(most, max_splits or most))
    programs = heads * -(-V // ROWS)
    room = 2 * processors // programs
    most = 1 << max(0, room.bit_length() - 1)
    if most < 2 * CUT_FROM:
        return WHOLE
    most = min(most, max_splits or most)
    return WHOLE if most < CUT_FROM else Cut(SHORTEST // CUT_FROM // chunk_size, most)


_forced: list[Cut] = []


@contextlib.contextmanager
def forced(segments: int, chunks: int = 1) -> Iterator[None]:
    """Within, sequences of at least CUT_FROM * chunks chunks are cut into so many segments, on every backend and in
    every thread, if none of them gets shorter than `chunks`. For tests and measurements."""
    _forced.append(Cut(chunks, segments))
    try:
        yield
    finally:
        _forced.pop()


def forcing() -> Cut | None:
    """What is forced."""
    return _forced[-1] if _forced else None
