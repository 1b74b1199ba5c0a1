"""Where the states of sequences and segments are: slots of a pool, and borders."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def segment_coords(i_s, p_sequence, p_first, N):
    """Sequence of segment i_s, the border at its end, whether it begins its sequence, and whether it ends it.

    Past the last segment: sequence N, and neither begins nor ends.
    """
    i_n = tl.load(p_sequence + i_s)
    exists = i_n < N
    begins = tl.load(p_first + i_n) == i_s
    ends = tl.load(p_first + i_n + 1, mask=exists, other=0) == i_s + 1
    return i_n, i_s - i_n, begins & exists, ends


@triton.jit
def even_segment(i_p, each, shift, N, T, length, BT: tl.constexpr):
    """Chunks and coordinates of a segment of `EvenSegments`: N sequences of T tokens in all, `length` chunks each.

    Args:
        i_p: Number of the segment among those that a launch runs.
        each, shift: The launch runs `each` segments of every sequence, from its segment `shift` on.

    Returns:
        First chunk, first token and number of tokens; then what `segment_coords` returns.
    """
    tokens = (T // N).to(tl.int32)
    chunks = (tokens + (BT - 1)) // BT
    count = (chunks + (length - 1)) // length
    i_p = i_p.to(tl.int32)
    i_n = i_p // each
    i = i_p - i_n * each + shift
    t, i_n = i * (length * BT), i_n.to(tl.int64)
    i_c, rows = i_n * chunks + i * length, tl.minimum(length * BT, tokens - t)
    return i_c, i_n * tokens + t, rows.to(tl.int64), i_n, i_n * (count - 1) + i, i == 0, i == count - 1


@triton.jit
def slot_coords(i_n, p_source, s_source, p_target, s_target, p_given, slots, pad):
    """Pool slots of sequence i_n, under the rules of `Slots`.

    Returns:
        Slot of the entering state, and whether it holds a state for this call; slot of the leaving state, and whether
        it is written; whether the sequence has a live slot at all.
    """
    i_from = i_n
    if p_source is not None:
        i_from = tl.load(p_source + i_n * s_source).to(tl.int64)
    live = (i_from > pad) & (i_from < slots)
    has_state = live
    if p_given is not None:
        has_state = has_state & (tl.load(p_given + i_n) != 0)
    i_to = i_from
    if p_target is not None:
        i_to = tl.load(p_target + i_n * s_target).to(tl.int64)
    return i_from, has_state, i_to, live & (i_to > pad) & (i_to < slots), live
