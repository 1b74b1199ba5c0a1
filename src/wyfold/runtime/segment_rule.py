"""Cutting long sequences into segments that a GPU scans side by side.

A sequence is scanned chunk by chunk, a program for each value head and 64 value rows. Few of them leave multiprocessors
without one; in segments there are more, and about twice the work, since every segment is also summarised before its
entering state is known. What decides is the sequence's own length, and what a whole model has in common: value heads,
widths, the card. Neither gates nor the rest of the batch do, so a sequence's bits are those of its own call, however
many others are in it; a batch that fills the card by itself pays for that with the work of the summaries
(docs/segments.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from wyfold.runtime.chunk_layout import CUT_FROM, Cut

SHORTEST = 16384
"""Tokens of the shortest sequence that is cut, its last chunk counted as a full one."""

ROWS = 64  # value rows of a program
WIDEST = 128
"""Key or value width up to which sequences are cut."""

WHOLE = Cut(0, 1)


def cut(heads: int, K: int, V: int, chunk_size: int, processors: int, max_splits: int | None = None) -> Cut:
    """How long sequences are cut: the split rule.

    With a sequence's work shared out evenly over the card, every multiprocessor scans

        tokens heads ceil(V / 64) / (chunk_size processors)

    chunks of it. A segment is that long, and a little longer where that makes a program for each multiprocessor of
    none of them: a sequence has processors / (heads ceil(V / 64)) segments, rounded down. None is shorter than
    SHORTEST / CUT_FROM tokens, and a sequence is cut if it has CUT_FROM of them or more: half as many gain nothing over
    the work they add. States wider than WIDEST fill a program's registers, and are left whole.

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
    most = min(processors // (heads * -(-V // ROWS)), max_splits or processors)
    return Cut(SHORTEST // CUT_FROM // chunk_size, most) if most >= CUT_FROM else WHOLE


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
