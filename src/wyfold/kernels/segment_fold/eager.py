"""`segment_fold` in PyTorch: a loop over the borders of each sequence."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from wyfold.runtime.chunk_layout import Segments


def segment_fold(S: Tensor, M: Tensor, segments: Segments, *, reverse: bool) -> None:
    """Fold summaries into states, in place.

    Args:
        S: [borders, HV, K, V] view: H of the segment that ends at each border, or c of the one that begins there.
        M: [borders, HV, K, K] map of the segment that ends at each border; that of a sequence's first segment is not
            read.
        segments: Layout of the segments.
        reverse: S holds gradients c.
    """
    borders = [first - n for n, first in enumerate(segments.first.tolist())]
    for start, stop in pairwise(borders):
        for r in range(stop - 1, start, -1) if reverse else range(start + 1, stop):
            if reverse:
                S[r - 1] += M[r].mT @ S[r]
            else:
                S[r] += M[r] @ S[r - 1]
