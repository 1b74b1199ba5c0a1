"""Eager implementation of the delta family with long sequences cut into segments.

It is the float64 reference of the chunk kernels' segments, and runs only if a call requests segments: what is parallel
on a GPU is a loop here. A segment is a sequence of one packed buffer. Its entering state is the fold of all segments
before it:

    forward     summaries [H | M], fold, then the ordinary forward of all segments
    backward    summaries c, fold back with M, then the ordinary backward of all segments

The gradient of the call is that of the last step with the right state gradients at the borders, so autograd never sees
M and H (docs/algorithm.md, section 9).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wyfold.autograd import delta_eager
from wyfold.autograd.delta_eager import EagerCall
from wyfold.autograd.delta_records import (
    INITIAL_STATE,
    DeltaBackwardInputs,
    DeltaResult,
    DeltaTensors,
    empty_result,
    most_borders,
    transpose_if_v_first,
)
from wyfold.kernels import table
from wyfold.runtime.chunk_layout import ChunkGrid, Segments
from wyfold.runtime.layout import legal_boundaries
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.index.eager import wide


def forward(
    t: DeltaTensors, options: DeltaOptions, out: Tensor | None = None, grid: ChunkGrid | None = None
) -> tuple[DeltaResult, list[Tensor]]:
    """Run the forward: the results and the saved tensors."""
    call, result, to_save = (
        SegmentedCall.of(t, options),
        empty_result(t, options, out),
        _empty_border_tensors(t, options),
    )
    S0 = None if t.initial_state is None else transpose_if_v_first(t.initial_state, options)
    states, maps = call.summaries(S0)
    call.fold(states, maps, reverse=False)
    entering = call.scatter_states(S0, states, call.leading + 1, call.firsts)
    o = _one_buffer(result.o)
    found, kept = delta_eager.forward(call.packed(entering), call.inside, o)
    if o.data_ptr() != result.o.data_ptr():
        result.o.copy_(o.view(result.o.shape))
    if options.final_state:
        result.final_state.copy_(transpose_if_v_first(found.final_state[call.lasts], options))
    if options.save:
        for place, given in zip(to_save, (entering, maps), strict=True):
            place[: given.shape[0]] = given
    return result, [*to_save, *kept]


def saved(t: DeltaTensors, options: DeltaOptions) -> list[Tensor]:
    """Allocate the saved tensors: entering states, maps, and what `delta_eager` saves for all segments."""
    entering, maps = _empty_border_tensors(t, options)
    N = t.packed_sequences
    segments = (t.v.shape[0] if N is None else N) + most_borders(t, options)
    # Boundaries of the segments, as many as there can be.
    cu = t.q.new_empty(segments + 1, dtype=torch.int64)
    packed = t._replace(q=_one_buffer(t.q), v=_one_buffer(t.v), cu_seqlens=cu)
    return [entering, maps, *delta_eager.saved(packed, _inside(t, options))]


def backward(given: DeltaBackwardInputs) -> list[Tensor]:
    """Compute every needed gradient."""
    t, options, (entering, maps, *kept), do, dST, needs, _ = given
    call = SegmentedCall.of(t, options)
    dST = None if dST is None else transpose_if_v_first(dST, options)
    if do is None:
        do = t.v.new_zeros(()).expand(t.v.shape)
    gradients = call.summaries_back(do, dST)
    call.fold(gradients, maps[: gradients.shape[0]], reverse=True)
    leaving = call.scatter_states(dST, gradients, call.leading, call.lasts)
    inside = DeltaBackwardInputs(call.packed(entering), call.inside, kept, _one_buffer(do), leaving, needs)
    found = delta_eager.backward(inside)
    if needs[INITIAL_STATE] and t.initial_state is not None:
        found[INITIAL_STATE] = transpose_if_v_first(found[INITIAL_STATE][call.firsts], options)
    return [dx if x is None or not need else dx.view(x.shape) for dx, x, need in zip(found, t, needs, strict=False)]


class SegmentedCall(NamedTuple):
    """Inputs that both directions derive from a call.

    Attributes:
        tensors, options: The call.
        segments: Segments of its sequences.
        leading: [borders] index of the segment before each border in use.
        firsts, lasts: [N] index of the first and last segment of each sequence.
    """

    tensors: DeltaTensors
    options: DeltaOptions
    segments: Segments
    leading: Tensor
    firsts: Tensor
    lasts: Tensor

    @classmethod
    def of(cls, t: DeltaTensors, options: DeltaOptions) -> SegmentedCall:
        (B, T), cu = t.v.shape[:2], t.cu_seqlens
        if cu is not None:
            cu = legal_boundaries(options.operator, cu if t.cu_seqlens_cpu is None else t.cu_seqlens_cpu, T)
        grid = table.kernel_module("chunk_grid", "eager").chunk_grid(B, T, options.chunk_size, cu)
        segments = table.kernel_module("segment_grid", "eager").segment_grid(grid, options.cut, torch.device("cpu"))
        continues = segments.sequence[1:] == segments.sequence[:-1]
        leading = (continues & (segments.sequence[1:] < segments.sequences)).nonzero().flatten()
        return cls(t, options, segments, leading, segments.first[:-1], segments.first[1:] - 1)

    @property
    def capacity(self) -> int:
        """Capacity of segments; unused ones are empty, so that sizes do not depend on boundaries."""
        return self.segments.grid.sequences

    @property
    def inside(self) -> DeltaOptions:
        return _inside(self.tensors, self.options)

    def packed(self, entering: Tensor) -> DeltaTensors:
        """The call with all segments as sequences of one packed buffer."""
        at = self.segments.grid.cu
        t = self.tensors.map_tokens(_one_buffer)
        return t._replace(initial_state=entering, cu_seqlens=at, cu_seqlens_cpu=at)

    def scatter_states(self, given: Tensor | None, borders: Tensor, at: Tensor, ends: Tensor) -> Tensor:
        """Scatter states at borders, and states at the ends of sequences, to segments.

        Args:
            given: [N, HV, K, V] states at the ends of sequences; None for zeros.
            borders: [borders, HV, K, V] states at borders.
            at: [borders] segment of each border.
            ends: [N] segment of each sequence's end.

        Returns:
            [segments, HV, K, V].
        """
        states = borders.new_zeros(self.capacity, *borders.shape[1:])
        states[at] = borders
        if given is not None:
            states[ends] = given.to(states.dtype)
        return states

    def fold(self, states: Tensor, maps: Tensor, *, reverse: bool) -> None:
        table.kernel_module("segment_fold", "eager").segment_fold(states, maps, self.segments, reverse=reverse)

    def summaries(self, S0: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute H [borders, HV, K, V] and M [borders, HV, K, K] of the segment before each border."""
        t = self.tensors
        HV, K, V = t.v.shape[2], t.q.shape[3], t.v.shape[3]
        S = t.q.new_zeros(self.capacity, HV, K, V + K, dtype=wide(t.q.dtype))
        if S0 is not None:
            S[self.firsts, ..., :V] = S0.to(S.dtype)
        S[..., V:] = torch.eye(K, dtype=S.dtype, device=S.device)
        call, carried, leaving = EagerCall(self.packed(S), self.inside), S[:0], torch.empty_like(S)
        for part in call.parts:
            inputs = call.load(part)
            factors = call.stage("prepare").fold(inputs)
            states = call.stage("segment_summary").segment_summary(
                inputs, factors, call.entering(part, carried), part.table
            )
            leaving[part.sequences], carried = states, states[states.shape[0] - part.left :]
        H, M = leaving[self.leading].split([V, K], dim=-1)
        return H.contiguous(), M.contiguous()

    def summaries_back(self, do: Tensor, dST: Tensor | None) -> Tensor:
        """Compute c [borders, HV, K, V] of the segment after each border."""
        t = self.tensors
        HV, K, V = t.v.shape[2], t.q.shape[3], t.v.shape[3]
        dS = t.q.new_zeros(self.capacity, HV, K, V, dtype=wide(t.q.dtype))
        if dST is not None:
            dS[self.lasts] = dST.to(dS.dtype)
        call, carried, entering = EagerCall(self.packed(dS), self.inside), dS[:0], torch.empty_like(dS)
        for part in reversed(call.parts):
            inputs, d_out = call.load(part), call.scaled(_one_buffer(do), part)
            factors = call.stage("prepare").fold(inputs)
            states = call.stage("segment_summary").segment_summary_bwd(
                inputs, factors, d_out, call.leaving(part, dS, carried), part.table
            )
            entering[part.sequences], carried = states, states[: part.entered]
        return entering[self.leading + 1]


def _inside(t: DeltaTensors, options: DeltaOptions) -> DeltaOptions:
    """Options of the call with all segments: no further cut, wide states [.., K, V]."""
    return options._replace(segment_chunks=0, segments=1, state_v_first=False, state_dtype=wide(t.q.dtype))


def _empty_border_tensors(t: DeltaTensors, options: DeltaOptions) -> list[Tensor]:
    """Allocate, as zeros, the states that enter segments and the maps before borders; empty without a backward."""
    HV, K, V = t.v.shape[2], t.q.shape[3], t.v.shape[3]
    borders, N = most_borders(t, options), t.packed_sequences
    segments = (t.v.shape[0] if N is None else N) + borders
    rows = (segments, borders) if options.save else (0, 0)
    return [
        t.q.new_zeros(count, HV, K, width, dtype=wide(t.q.dtype)) for count, width in zip(rows, (V, K), strict=True)
    ]


def _one_buffer(x: Tensor) -> Tensor:
    """[B, T, ...] -> [1, B T, ...]."""
    return x if x.shape[0] == 1 else x.reshape(1, -1, *x.shape[2:])
