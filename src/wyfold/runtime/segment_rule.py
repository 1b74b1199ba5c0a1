"""The split rule: cuts long sequences into segments that a GPU scans in parallel.

A sequence is scanned chunk by chunk, by one program for each value head and 64 value rows. With few programs, some
multiprocessors have none. Segments give more programs and about twice the work, because each segment is also summarised
before its entering state is known.

The rule depends on the length of the sequence, on what a model fixes (value heads, widths and the GPU), and on the
number of rows of a dense batch, which share the GPU. It depends neither on gates nor on the lengths of other packed
sequences, which only the GPU knows. A packed sequence therefore has the bits of a separate call. A row of a dense batch
has them if neither call is cut, as under `batch_invariant=True` (docs/segments.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor

from wyfold.runtime.choices import CHUNK_SIZES
from wyfold.runtime.chunk_layout import SHORT, Cut

CUT_FROM = 4
"""Fewest segments into which a sequence is cut."""

MANY = 2 * SHORT
"""Fewest segments at once with which sequences are cut from half the length on."""

SHORTEST = 4096
"""Tokens of the shortest sequence that is cut where SHORT to MANY - 1 segments run at once.

Twice as many where fewer run at once, half as many where more do. The last chunk counts as full.
"""

ROWS = 64
"""Value rows of a program."""

WIDEST = 128
"""Largest key or value width at which sequences are cut."""

WHOLE = Cut(0, 1, 0)
"""No sequence is cut."""


def cut(
    heads: int, K: int, V: int, chunk_size: int, processors: int, max_splits: int | None = None, *, batch: int = 1
) -> Cut:
    """The cut of long sequences by the split rule.

    In segments of L of a sequence's n chunks, the longest path through a call is about

        L (scan + summary) + n / L fold + launches        in place of n scan

    with 1.1 to 1.3 us for a chunk of `scan`, as much for one of `summary`, 1 to 2 us for a border of `fold`, and 20 us
    for four more launches (measured on an H200, docs/log/operators.md). So few long segments waste the GPU, and many
    short ones wait for `fold`. Each of the rule's numbers is where the measured times of both families and both
    directions turn:

    - A sequence has at most processors / (batch heads ceil(V / 64)) segments, rounded down, so that the segments of all
      rows run at once. A batch that fills the GPU without segments would only pay for their summaries.
    - At most SHORT segments of a sequence are shorter than SHORTEST / CUT_FROM tokens: more of them lose at slow gates,
      which fold every border. Where fewer than SHORT segments run at once, none is shorter than twice that, because
      batches of many sequences lose more to the summaries.
    - Where at least MANY segments run at once, a sequence of SHORTEST / 2 tokens has SHORT segments.
    - A sequence is cut only into CUT_FROM segments or more: half as many gain nothing over the work that they add.
    - With widths above WIDEST, states fill a program's registers, and sequences are not cut.

    Args:
        heads: HV.
        K, V: Widths.
        chunk_size: C.
        processors: Multiprocessors of the GPU.
        max_splits: Most segments of a sequence, or None.
        batch: B of a dense batch; 1 for a packed one.
    """
    if max(K, V) > WIDEST:
        return WHOLE
    if _forced:
        forced_cut = _forced[-1]
        return forced_cut._replace(most=min(forced_cut.most, max_splits or forced_cut.most))
    programs = heads * -(-V // ROWS)
    at_once = processors // programs
    while at_once >= CUT_FROM and at_once * programs * batch > processors:  # to compilers, batch may be symbolic
        at_once -= 1
    most = min(at_once, max_splits or at_once)
    shortest = SHORTEST // CUT_FROM * (1 if at_once >= SHORT else 2) // chunk_size
    half = at_once >= MANY and most >= SHORT
    return Cut(shortest, most, _fewest(shortest, half=half)) if most >= CUT_FROM else WHOLE


def _fewest(shortest: int, *, half: bool) -> int:
    """`Cut.fewest`: chunks of CUT_FROM of the shortest segments, or of half as many, which are then shorter."""
    return max(CUT_FROM, CUT_FROM * shortest // (2 if half else 1))


def longest_uncut(v: object, processors: int) -> int:
    """Tokens up to which no sequence is cut, whatever the chunk size. v: values [B, T, HV, V]; None for any heads."""
    heads, V = 1, ROWS
    if isinstance(v, Tensor) and v.ndim == 4 and v.numel():
        heads, V = v.shape[2:]
    return min([C * (cut(heads, 1, min(V, WIDEST), C, processors).fewest - 1) for C in CHUNK_SIZES])


_forced: list[Cut] = []


@contextlib.contextmanager
def forced(segments: int, chunks: int = 1) -> Iterator[None]:
    """Cut sequences of `Cut.fewest` chunks or more into `segments` segments, for tests and measurements.

    Applies to every backend and every thread until the context ends. If there are more than SHORT segments, none gets
    shorter than `chunks` chunks; a sequence that is too short for that has fewer of them.
    """
    _forced.append(Cut(chunks, segments, _fewest(chunks, half=segments >= MANY)))
    try:
        yield
    finally:
        _forced.pop()


def forcing() -> Cut | None:
    """The cut of the innermost `forced` context; None outside."""
    return _forced[-1] if _forced else None
