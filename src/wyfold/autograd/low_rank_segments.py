"""Segments of the diagonal-plus-low-rank rules, whose maps the kernels that scan sequences compute.

A segment is a sequence of one packed buffer, and an affine map of the state that enters it, S -> M S + H:

    H       final states of a scan from zero, or from the caller's states where a sequence begins
    M       final states of a scan with values of zero, from the identity
    c       gradients of the entering states, by the reverse half of `low_rank_scan_bwd` from zero, or from the caller's
            gradients where a sequence ends

`segment_fold` turns H and M into the states at the borders between segments, and c and M into their gradients. Then the
ordinary scans run all segments. States are stored K-last, [V, K]; launches get the [K, V] view, `.mT`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.kernels.records import LowRankPrepared, TokenBorders
from wyfold.runtime.chunk_layout import Segments
from wyfold.runtime.kernel_configs import LaunchKey
from wyfold.runtime.options import DeltaOptions


class SegmentedScans(NamedTuple):
    """The scans of a call in segments.

    Attributes:
        v, w: [1, B T, HV, V] values and their factors, or None for 1.
        prepared: Factors of the call's chunks.
        segments: Layout of the segments.
        options, key: Of the call.
        scan, scan_bwd, fold: Launches of `low_rank_scan`, `low_rank_scan_bwd` and `segment_fold`.
    """

    v: Tensor
    w: Tensor | None
    prepared: LowRankPrepared
    segments: Segments
    options: DeltaOptions
    key: LaunchKey
    scan: Any
    scan_bwd: Any
    fold: Any

    def forward(self, initial: Tensor | None, o: Tensor, final: Tensor | None, states: Tensor, maps: Tensor) -> None:
        """Run all segments from the states that enter them.

        Args:
            initial: [N, HV, K, V] view of the caller's states, or None for zeros.
            o: [1, B T, HV, V] written.
            final: [N, HV, K, V] view, written, or None.
            states, maps: [borders, HV, V, K] and [borders, HV, K, K], written with the states at the borders and the
                maps of the segments before them. Rows of borders that are not in use are left as they are.
        """
        run = partial(self.scan, self.v, self.w, self.prepared)
        more = {"states": None, "first_state": None, "segments": self.segments}
        common = self.segments.grid, self.options
        run(initial, *common, self.key, None, None, **more, borders=states.mT, part="states")
        key = self.key._replace(V=maps.shape[3])
        run(None, *common, key, None, None, **more, borders=maps.mT, part="maps")
        self._fold(states, maps, reverse=False)
        run(initial, *common, self.key, o, final, **more, borders=states.mT)

    def backward(
        self,
        states: Tensor,
        maps: Tensor,
        initial: Tensor | None,
        do: Tensor,
        dST: Tensor | None,
        dS0: Tensor | None,
        out: tuple[Tensor | None, Tensor | None],
    ) -> TokenBorders:
        """Run all segments back, from the gradients of the states that leave them.

        Args:
            states, maps: From `forward`.
            initial, do, dST, dS0, out: As of `low_rank_scan_bwd`, with tokens in one buffer.

        Returns:
            The borders of every chunk, as `low_rank_scan_bwd` returns them.
        """
        gradients = torch.empty_like(states)
        run = partial(self.scan_bwd, self.v, self.w, self.prepared)
        at_borders = {"segments": self.segments, "entering": states.mT, "leaving": gradients.mT}
        common = self.segments.grid, self.options, self.key
        run(None, do, dST, *common, None, (None, None), **at_borders, part="states")
        self._fold(gradients, maps, reverse=True)
        found: TokenBorders = run(initial, do, dST, *common, dS0, out, **at_borders)
        return found

    def _fold(self, states: Tensor, maps: Tensor, *, reverse: bool) -> None:
        self.fold(states.mT, maps.mT, self.segments, reverse=reverse, dtype=self.v.dtype)
