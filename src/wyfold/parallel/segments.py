"""Cutting long sequences into segments that a GPU scans side by side.

A sequence is scanned chunk by chunk, a program for each value head and 64 value rows. Few of them leave multiprocessors
without one; in segments there are more, and about twice the work, since every segment is also summarised before its
entering state is known. What decides is a call's shape: how many chunks its tokens come to on each multiprocessor. That
many steps are taken whatever is done, and a sequence which alone takes several times as many keeps the card waiting.
Neither gates nor boundaries decide, so a sequence's bits do not depend on what else is in the buffer that it lies in
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


def cut(
    tokens: int, heads: int, K: int, V: int, chunk_size: int, processors: int, max_splits: int | None = None
) -> Cut:
    """How a call's long sequences are cut: the split rule.

    With the card's work shared out evenly, every multiprocessor scans

        load = tokens heads ceil(V / 64) / (chunk_size processors)

    chunks. A segment is that long, rounded up to one of the lengths 4, 5, 6, 7 times a power of two times
    SHORTEST / (4 CUT_FROM) tokens, of which the first is SHORTEST / CUT_FROM: then all segments run at once. A sequence
    is cut if it has CUT_FROM segments or more: half as many gain nothing over the work they add. States wider than
    WIDEST fill a program's registers, and are left whole.

    Args:
        tokens: B T.
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
    most = min(processors // programs + 1, max_splits or processors)
    # Of no more segments than this, all of one sequence, is there room for on the card at once.
    if most < CUT_FROM or CUT_FROM * programs > processors:
        return WHOLE
    quarter = SHORTEST // CUT_FROM // chunk_size // 4
    length = 4 * quarter
    while length * chunk_size * processors < tokens * programs:
        length += quarter
        if length == 8 * quarter:
            quarter *= 2
    return Cut(length, most)


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
