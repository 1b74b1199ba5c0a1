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

from wyfold.kernels.records import LowRankPrepared
from wyfold.runtime.chunk_layout import Segments
from wyfold.runtime.kernel_configs import LaunchKey
from wyfold.runtime.options import DeltaOptions


class SegmentedScans(NamedTuple):
    """The scans of a call in segments.

    Attributes:
        v, w: [1, B T, HV, V] values and their factors, or None for 1.
        prepared: Factors of the call's chunks.
        segments: Layout of the segments.
        packed: Whether the call is packed, so that some of the borders may not be in use.
        options, key: Of the call.
        scan, scan_bwd, fold: Launches of `low_rank_scan`, `low_rank_scan_bwd` and `segment_fold`.
    """

    v: Tensor
    w: Tensor | None
    prepared: LowRankPrepared
    segments: Segments
    packed: bool
    options: DeltaOptions
    key: LaunchKey
    scan: Any
    scan_bwd: Any
    fold: Any

    def forward(self, initial: Tensor | None, o: Tensor, final: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run all segments from the states that enter them.

        Args:
            initial: [N, HV, K, V] view of the caller's states, or None for zeros.
            o: [1, B T, HV, V] written.
            final: [N, HV, K, V] view, written, or None.

        Returns:
            [borders, HV, V, K] states at the borders; [borders, HV, K, K] maps of the segments before them.
        """
        K, segments = self.prepared.rows.shape[2], self.segments
        entering = self._at_ends(initial, segments.first[:-1])
        states = torch.empty_like(entering)
        self._scan(self.v, self.w, entering, None, states)
        identity = torch.eye(K, dtype=torch.float32, device=self.v.device).expand(*states.shape[:2], K, K)
        maps, zeros = torch.empty_like(identity, memory_format=torch.contiguous_format), self.v.new_zeros(())
        self._scan(zeros.expand(*self.v.shape[:3], K), None, identity, None, maps)
        states, maps = states[segments.leading], maps[segments.leading]
        maps += 0.0  # negative zeros would mark a map of zeros to the fold
        self._fold(states, maps, reverse=False)
        leaving = None if final is None else torch.empty_like(entering)
        self._scan(self.v, self.w, self.entering(initial, states), o, leaving)
        if final is not None and leaving is not None:
            final.copy_(leaving[segments.first[1:] - 1].mT)
        return states, maps

    def backward(
        self,
        states: Tensor,
        maps: Tensor,
        initial: Tensor | None,
        do: Tensor,
        dST: Tensor | None,
        dS0: Tensor | None,
        out: tuple[Tensor | None, Tensor | None],
    ) -> Any:
        """Run all segments back, from the gradients of the states that leave them.

        Args:
            states, maps: From `forward`.
            initial, do, dST, dS0, out: As of `low_rank_scan_bwd`, with tokens in one buffer.

        Returns:
            The borders of every chunk, as `low_rank_scan_bwd` returns them.
        """
        segments = self.segments
        leaving = self._at_ends(dST, segments.first[1:] - 1)
        dentering = torch.empty_like(leaving)
        run = partial(self.scan_bwd, self.v, self.w, self.prepared)
        more = segments.grid, self.options, self.key, dentering.mT
        run(None, do, leaving.mT, *more, (None, None), half="reverse")
        gradients = dentering[segments.leading + 1]
        self._fold(gradients, maps, reverse=True)
        self._put(leaving, segments.leading, gradients)
        borders = run(self.entering(initial, states).mT, do, leaving.mT, *more, out)
        if dS0 is not None:
            dS0.copy_(dentering[segments.first[:-1]].mT)
        return borders

    def entering(self, initial: Tensor | None, states: Tensor) -> Tensor:
        """States that enter all segments, given those at the borders.   [segments, HV, V, K]"""
        found = self._at_ends(initial, self.segments.first[:-1])
        self._put(found, self.segments.leading + 1, states)
        return found

    def _at_ends(self, given: Tensor | None, numbers: Tensor) -> Tensor:
        """The caller's states [N, HV, K, V], or their gradients, at these segments; zeros at others."""
        (HV, V), K, count = self.v.shape[2:], self.prepared.rows.shape[2], self.segments.grid.sequences
        found = self.v.new_zeros(count, HV, V, K, dtype=torch.float32)
        if given is not None:
            found.index_copy_(0, numbers, given.mT.to(torch.float32))
        return found

    def _put(self, states: Tensor, numbers: Tensor, at_borders: Tensor) -> None:
        """Write the states of borders to these segments; borders that are not in use change nothing."""
        if self.packed:
            sequence, leading = self.segments.sequence, self.segments.leading
            used = (sequence[leading] == sequence[leading + 1]) & (sequence[leading] < self.segments.sequences)
            at_borders = torch.where(used[:, None, None, None], at_borders, states[numbers])
        states.index_copy_(0, numbers, at_borders)

    def _scan(self, v: Tensor, w: Tensor | None, entering: Tensor, o: Tensor | None, leaving: Tensor | None) -> None:
        """Scan all segments from these states."""
        key, final = self.key._replace(V=v.shape[3]), None if leaving is None else leaving.mT
        self.scan(v, w, self.prepared, entering.mT, self.segments.grid, self.options, key, o, final, None, None)

    def _fold(self, states: Tensor, maps: Tensor, *, reverse: bool) -> None:
        self.fold(states.mT, maps.mT, self.segments, reverse=reverse, dtype=self.v.dtype)
