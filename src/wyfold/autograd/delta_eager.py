"""Eager implementation of the delta family, which runs a call part by part (`autograd.workspace`).

The forward passes the state from one part to the next and saves the states at the borders. The backward goes through
the parts in reverse, starts each from its saved state, and recomputes what lies between.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.autograd import workspace
from wyfold.autograd.checkpoints import Checkpoints
from wyfold.autograd.delta_records import (
    INITIAL_STATE,
    SUMMED,
    DeltaBackwardInputs,
    DeltaResult,
    DeltaTensors,
    empty_result,
    transpose_if_v_first,
)
from wyfold.autograd.workspace import WorkspacePart
from wyfold.kernels import table
from wyfold.kernels.records import ChunkFactors, GradientOutputs, LowRankFactors
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.layout import legal_boundaries
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.index.eager import to_chunks, wide

RECURRENT_PARTS = 8  # the token-by-token backward keeps a state per token, so parts are this factor smaller


class Saved(NamedTuple):
    """Tensors that the forward saves for the backward; without elements where the options do not need them.

    Attributes:
        borders: [rows, HV, K, V] states that pass from one part to the next.
        factors: [tiles, C, ..] factors of every chunk. G, the first factor, is recomputed by a running sum.
    """

    borders: Tensor
    factors: list[Tensor]

    @classmethod
    def of(cls, tensors: list[Tensor]) -> Saved:
        return cls(tensors[0], tensors[1:])

    def tiles(self, tiles: slice) -> list[Tensor]:
        """View the factors of some tiles."""
        return [x[tiles] for x in self.factors]


def chunks_per_part(q: Tensor, v: Tensor, *, state_per_token: bool) -> int:
    """Maximum number of chunks in a part, from sizes and dtype; fewer if the backward keeps a state per token."""
    state_bytes = v.shape[2] * q.shape[3] * v.shape[3] * wide(q.dtype).itemsize
    return workspace.chunks_per_part(state_bytes * (RECURRENT_PARTS if state_per_token else 1))


class EagerCall:
    """Inputs that both directions derive from a call before the first launch.

    Attributes:
        tensors, options: The call.
        B, T, HV, K, V: Sizes.
        dtype: The wide dtype, in which states and tiles are computed.
        cu: [N + 1] boundaries on the CPU; None for a dense batch.
        N: Number of sequences.
        parts: Parts of the call, in forward order.
    """

    def __init__(self, tensors: DeltaTensors, options: DeltaOptions):
        self.tensors, self.options = tensors, options
        self.B, self.T, self.HV, self.V = tensors.v.shape
        self.K, self.dtype = tensors.q.shape[-1], wide(tensors.q.dtype)
        self.cu: Tensor | None = None
        if tensors.cu_seqlens is not None:
            given = tensors.cu_seqlens if tensors.cu_seqlens_cpu is None else tensors.cu_seqlens_cpu
            self.cu = legal_boundaries(options.operator, given, self.T)
        self.N = self.B if self.cu is None else self.cu.shape[0] - 1
        per_part = chunks_per_part(tensors.q, tensors.v, state_per_token=options.recurrent and options.save)
        # A recurrent call needs no full chunks: rows of a tile without a token are wasted, and change no bit.
        rows = min(options.chunk_size, max(1, self.T)) if options.recurrent else options.chunk_size
        self.parts = workspace.parts(self.B, self.T, self.cu, rows, per_part)

    def stage(self, name: str) -> Any:
        """Module of a step's launches for the options' rule."""
        return table.kernel_module(self.options.stage(name), self.options.backend)

    def tiles(self, part: WorkspacePart) -> slice:
        """Slice of the whole call's tiles that belong to a part."""
        first = part.first_chunk * self.HV
        return slice(first, first + part.table.chunks * self.HV)

    def load(self, part: WorkspacePart) -> Any:
        """Input tiles of a part."""
        t = self.tensors.map_tokens(part.block)
        given = *t[:5], t.A_log, t.dt_bias, part.table, self.options
        load = self.stage("prepare").load
        return load(*given) if self.options.rule == "delta" else load(*given, (t.a, t.b, t.w))

    def unload(self, found: Any, inputs: Any, part: WorkspacePart, gradients: list[Tensor | None]) -> None:
        """Write a part's gradients into those of the call, which are in the order of `LEARNING`."""
        t = self.tensors
        tokens = [x if x is None or index in SUMMED else part.block(x) for index, x in enumerate(gradients)]
        q, k, v, g, beta, _, A_log, dt_bias, *columns = tokens
        out = GradientOutputs(q, k, v, g, beta, A_log, dt_bias, *columns)
        gate, beta = (None if x is None else part.block(x) for x in (t.g, t.beta))
        given = gate, t.A_log, t.dt_bias, part.table, self.options, out
        unload = self.stage("gradients").unload
        unload(found, inputs, *([beta] if self.options.rule == "delta" else []), *given)

    def states(self, given: Tensor | None, sequences: slice) -> Tensor:
        """[n, HV, K, V] wide, K-first states of some sequences: zeros for None; may alias the caller's memory."""
        if given is None:
            n = sequences.stop - sequences.start
            return self.tensors.q.new_zeros(n, self.HV, self.K, self.V, dtype=self.dtype)
        return transpose_if_v_first(given[sequences], self.options).to(self.dtype)

    def entering(self, part: WorkspacePart, carried: Tensor) -> Tensor:
        """States that enter a part: `carried` for sequences that began in an earlier part, else initial states."""
        begun = slice(part.sequences.start + part.entered, part.sequences.stop)
        return _joined(carried, self.states(self.tensors.initial_state, begun))

    def leaving(self, part: WorkspacePart, dST: Tensor | None, carried: Tensor) -> Tensor:
        """Gradients of states that leave a part: `carried` for sequences that continue in a later part, else dST."""
        ended = slice(part.sequences.start, part.sequences.stop - part.left)
        return _joined(self.states(dST, ended), carried)

    def pass_through(self, states: Tensor | None, out: Tensor) -> None:
        """Copy the states of sequences without tokens to out, both [N, ..] in the caller's layout; None is zeros."""
        empty = (self.lengths == 0).nonzero().flatten().to(out.device)
        if empty.shape[0]:
            out[empty] = out.new_zeros(()) if states is None else states[empty].to(out.dtype)

    @property
    def lengths(self) -> Tensor:
        """[N] number of tokens of each sequence, on the CPU."""
        return torch.full((self.B,), self.T) if self.cu is None else self.cu.diff()

    def scaled(self, do: Tensor | None, part: WorkspacePart) -> Tensor:
        """Tiles of scale * do; zeros if do is None."""
        if do is None:
            size = part.table.chunks * self.HV, part.table.chunk_size, self.V
            return self.tensors.q.new_zeros(size, dtype=self.dtype)
        return to_chunks(part.block(do), part.table, self.HV, self.dtype).mul_(self.options.scale)

    def outside(self, states: Tensor) -> Tensor:
        """Return states in the layout and storage dtype of the options."""
        return transpose_if_v_first(states, self.options).to(self.options.state_dtype)


def forward(
    t: DeltaTensors, options: DeltaOptions, out: Tensor | None = None, grid: ChunkGrid | None = None
) -> tuple[DeltaResult, list[Tensor]]:
    """Run the forward: the results and the tensors of `Saved`."""
    call = EagerCall(t, options)
    result, to_save = empty_result(t, options, out), saved(t, options)
    o, final_state, states = result
    kept = Saved.of(to_save)
    carried = kept.borders[:0]
    if call.cu is not None:
        o[:, int(call.cu[-1]) :] = 0
    if options.final_state:
        call.pass_through(t.initial_state, final_state)
    checkpoints = Checkpoints(call, states) if options.checkpoint_every else None
    for part in call.parts:
        S = call.entering(part, carried)
        if options.save:
            kept.borders[part.index : part.index + part.entered] = carried
        inputs, block = call.load(part), part.block(o)
        leaving = None if checkpoints is None else checkpoints.leaving(part)
        if options.recurrent:
            S = call.stage("recurrent").recurrent(inputs, S, part.table, options.scale, block, leaving)
        else:
            factors = call.stage("prepare").fold(inputs)
            if options.save and options.keep_factors:
                for place, tile in zip(kept.tiles(call.tiles(part)), factors[1:], strict=True):
                    place.copy_(tile)
            S = call.stage("scan").scan(inputs, factors, S, part.table, options.scale, block, leaving)
        if checkpoints is not None and leaving is not None:
            checkpoints.put(part, leaving)
        if options.final_state:
            final_state[part.sequences] = call.outside(S)
        carried = S[S.shape[0] - part.left :]
    written = sum(part.table.chunks for part in call.parts) * call.HV
    for left_over in kept.tiles(slice(written, None)):  # tiles beyond those of these boundaries
        left_over.zero_()
    return result, to_save


def saved(t: DeltaTensors, options: DeltaOptions) -> list[Tensor]:
    """Allocate the tensors of `Saved`, from metadata alone."""
    B, T, HV, V = t.v.shape
    K, C, dtype, N = t.q.shape[-1], options.chunk_size, wide(t.q.dtype), t.packed_sequences
    per_part = chunks_per_part(t.q, t.v, state_per_token=options.recurrent and options.save)
    # Zeros, because not every row is written and a registered operator must not return uninitialized memory.
    borders = t.v.new_zeros(workspace.border_rows(B, T, N, C, per_part) if options.save else 0, HV, K, V, dtype=dtype)
    keep = options.save and options.keep_factors and not options.recurrent
    tiles = workspace.chunk_rows(B, T, N, C) * HV if keep else 0
    widths = _factors(options).kept_widths(K, C)
    return [borders, *(t.v.new_empty(tiles, C, width, dtype=dtype) for width in widths)]


def backward(given: DeltaBackwardInputs) -> list[Tensor]:
    """Compute every needed gradient."""
    t, options, _, do, dST, needs, _ = given
    call, kept = EagerCall(t, options), Saved.of(given.saved)
    found = [grad.zero_() for grad in given.empty_grads()]
    dS0 = found[INITIAL_STATE] if needs[INITIAL_STATE] else None
    wanted = [x if need else None for x, need in zip(found, needs, strict=True)]
    if dS0 is not None and dST is not None:
        call.pass_through(dST, dS0)
    carried = kept.borders[:0]
    for part in reversed(call.parts):
        S = call.entering(part, kept.borders[part.index : part.index + part.entered])
        dS = call.leaving(part, dST, carried)
        inputs, d_out = call.load(part), call.scaled(do, part)
        if options.recurrent:
            tiles, dS = call.stage("recurrent").recurrent_bwd(inputs, d_out, S, dS, part.table)
        else:
            factors = _factors(options)(None, *kept.tiles(call.tiles(part))) if options.keep_factors else None
            factors = call.stage("prepare").fold(inputs, factors)
            at_borders, dS = call.stage("scan_bwd").scan_bwd(inputs, factors, d_out, S, dS, part.table)
            tiles = call.stage("gradients").gradients(inputs, factors, at_borders, d_out)
        call.unload(tiles, inputs, part, wanted)
        carried = dS[: part.entered]
        if dS0 is not None:
            begun = slice(part.sequences.start + part.entered, part.sequences.stop)
            dS0[begun] = transpose_if_v_first(dS[part.entered :], options)
    return found


def _factors(options: DeltaOptions) -> Any:
    """Record of the factors that the rule's `prepare` computes."""
    return ChunkFactors if options.rule == "delta" else LowRankFactors


def _joined(first: Tensor, last: Tensor) -> Tensor:
    """Concatenate the states of two runs of sequences; no copy if one is empty."""
    if first.shape[0] == 0:
        return last
    return torch.cat([first, last]) if last.shape[0] else first
