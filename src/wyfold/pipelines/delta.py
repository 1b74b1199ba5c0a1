"""DeltaNet, GDN and KDA, chunk by chunk or token by token: one autograd function, each direction a list of launches.

The launches run part by part (`parallel.split`), the state handed from one part to the next; the backward walks the
parts back from the states that the forward kept at their borders, and rebuilds what lies between.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.parallel import split
from wyfold.parallel.split import Part
from wyfold.runtime.layout import legal_boundaries
from wyfold.runtime.options import DeltaOptions
from wyfold.runtime.register import distinct, once_differentiable, register
from wyfold.stages import table
from wyfold.stages.records import Factors, TokenGradients
from wyfold.tile.index.eager import to_chunks, wide

RECURRENT_PARTS = 8  # the token-by-token adjoint keeps a state per token: parts are that much smaller


class DeltaTensors(NamedTuple):
    """Tensors of one call, as the public operators document them."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    initial_state: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    cu_seqlens: Tensor | None
    cu_seqlens_cpu: Tensor | None


class DeltaResult(NamedTuple):
    """Output, final states and intermediate states of one call; empty where the options do not ask for them."""

    o: Tensor
    final_state: Tensor
    states: Tensor


class Saved(NamedTuple):
    """What the forward keeps for the backward; empty where the options do not ask for it.

    Attributes:
        borders: [rows, HV, K, V] states that one part hands to the next.
        E, F, A, J, P: `Factors` of every chunk, but G, which is a running sum away.
    """

    borders: Tensor
    E: Tensor
    F: Tensor
    A: Tensor
    J: Tensor
    P: Tensor

    def factors(self, tiles: slice) -> Factors:
        """Views of some tiles."""
        return Factors(None, *(x[tiles] for x in (self.E, self.F, self.A, self.J, self.P)))


TENSORS_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? initial_state, Tensor? A_log, Tensor? dt_bias, "
    "Tensor? cu_seqlens, Tensor? cu_seqlens_cpu"
)
TENSORS, SAVED, DIFFERENTIABLE = len(DeltaTensors._fields), len(Saved._fields), 8


def delta(tensors: DeltaTensors, options: DeltaOptions) -> DeltaResult:
    """Results of one call."""
    return DeltaResult(*Delta.apply(*distinct(tensors), options))


class Delta(torch.autograd.Function):
    """`wyfold::delta_fwd`, with `wyfold::delta_bwd` as its gradient."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        *tensors, options = arguments
        o, final_state, states, *saved = _forward_op(*tensors, *options.scalars())
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(states)
        ctx.options = options
        ctx.save_for_backward(*tensors, *saved)
        return o, final_state, states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dST: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:DIFFERENTIABLE])
        # A compiler passes zeros for every result, the empty ones nobody asked for among them.
        dST = dST if ctx.options.final_state else None
        if do is None and dST is None:
            return (None,) * (TENSORS + 1)
        found = _backward_op(*saved, do, dST, needs, *ctx.options.scalars())
        none = (None,) * (TENSORS + 1 - DIFFERENTIABLE)
        return *(dx if need else None for dx, need in zip(found, needs, strict=True)), *none


def chunks_per_part(q: Tensor, v: Tensor, *, state_per_token: bool) -> int:
    """Most chunks of a part, from widths, heads and dtype alone; fewer where a backward will keep a state per token."""
    state_bytes = v.shape[2] * q.shape[3] * v.shape[3] * wide(q.dtype).itemsize
    return split.chunks_per_part(state_bytes * (RECURRENT_PARTS if state_per_token else 1))


class _Call:
    """What both directions derive from a call's tensors and options before the first launch."""

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
        # Token by token, rows that no token fills are wasted, and no bit depends on them.
        rows = min(options.chunk_size, max(1, self.T)) if options.recurrent else options.chunk_size
        self.parts = split.parts(self.B, self.T, self.cu, rows, per_part)

    def stage(self, name: str) -> Any:
        return table.launches(name, self.options.backend)

    def tiles(self, part: Part) -> slice:
        """A part's tiles among those of the whole call."""
        first = part.first_chunk * self.HV
        return slice(first, first + part.table.chunks * self.HV)

    def load(self, part: Part) -> Any:
        t = self.tensors
        q, k, v, g, beta = (None if x is None else part.block(x) for x in t[:5])
        return self.stage("prepare").load(q, k, v, g, beta, t.A_log, t.dt_bias, part.table, self.options)

    def turned(self, states: Tensor) -> Tensor:
        """States [n, HV, K, V] in the caller's layout, and back."""
        return states.transpose(-1, -2) if self.options.state_v_first else states

    def states(self, given: Tensor | None, sequences: slice) -> Tensor:
        """[n, HV, K, V] the sequences' states, wide and K-first, maybe the caller's own; zeros if none were given."""
        if given is None:
            n = sequences.stop - sequences.start
            return self.tensors.q.new_zeros(n, self.HV, self.K, self.V, dtype=self.dtype)
        return self.turned(given[sequences]).to(self.dtype)

    def entering(self, part: Part, carried: Tensor) -> Tensor:
        """States entering a part: `carried` in sequences that began in an earlier one."""
        begun = slice(part.sequences.start + part.entered, part.sequences.stop)
        return _joined(carried, self.states(self.tensors.initial_state, begun))

    def pass_through(self, states: Tensor | None, out: Tensor) -> None:
        """Write to out, both [N, ..] in the caller's layout, the states of sequences without tokens."""
        empty = (self.lengths == 0).nonzero().flatten().to(out.device)
        if empty.shape[0]:
            out[empty] = out.new_zeros(()) if states is None else states[empty].to(out.dtype)

    @property
    def lengths(self) -> Tensor:
        """[N] tokens of each sequence, on the CPU."""
        return torch.full((self.B,), self.T) if self.cu is None else self.cu.diff()

    def scaled(self, do: Tensor | None, part: Part) -> Tensor:
        """Tiles of scale * do."""
        if do is None:
            size = part.table.chunks * self.HV, part.table.chunk_size, self.V
            return self.tensors.q.new_zeros(size, dtype=self.dtype)
        return to_chunks(part.block(do), part.table, self.HV, self.dtype).mul_(self.options.scale)

    def outside(self, states: Tensor) -> Tensor:
        """States as the caller gets them: layout and storage dtype of the options."""
        return self.turned(states).to(self.options.state_dtype)


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    call = _Call(DeltaTensors(*arguments[:TENSORS]), DeltaOptions(*arguments[TENSORS:]))
    options = call.options
    result, saved = _outputs(call.tensors, options)
    o, final_state, states = result
    carried = saved.borders[:0]
    if call.cu is not None:
        o[:, int(call.cu[-1]) :] = 0
    if options.final_state:
        call.pass_through(call.tensors.initial_state, final_state)
    checkpoints = _Checkpoints(call, states) if options.checkpoint_every else None
    for part in call.parts:
        S = call.entering(part, carried)
        if options.save:
            saved.borders[part.index : part.index + part.entered] = carried
        inputs, block = call.load(part), part.block(o)
        leaving = None if checkpoints is None else checkpoints.leaving(part)
        if options.recurrent:
            S = call.stage("recurrent").recurrent(inputs, S, part.table, options.scale, block, leaving)
        else:
            factors = call.stage("prepare").fold(inputs)
            if options.save and options.keep_factors:
                for room, tile in zip(saved.factors(call.tiles(part)), factors, strict=True):
                    if room is not None and tile is not None:
                        room.copy_(tile)
            S = call.stage("scan").scan(inputs, factors, S, part.table, options.scale, block, leaving)
        if checkpoints is not None and leaving is not None:
            checkpoints.put(part, leaving)
        if options.final_state:
            final_state[part.sequences] = call.outside(S)
        carried = S[S.shape[0] - part.left :]
    written = sum(part.table.chunks for part in call.parts) * call.HV
    for left_over in saved.factors(slice(written, None)):  # capacity that these boundaries do not use
        if left_over is not None:
            left_over.zero_()
    return *result, *saved


class _Given(NamedTuple):
    """Arguments of `wyfold::delta_bwd`, `needs` for each that has a gradient."""

    tensors: DeltaTensors
    saved: Saved
    do: Tensor | None
    dST: Tensor | None
    needs: list[bool]
    options: DeltaOptions


def _unpacked(arguments: tuple[Any, ...]) -> _Given:
    do, dST, needs, *options = arguments[TENSORS + SAVED :]
    saved = Saved(*arguments[TENSORS : TENSORS + SAVED])
    return _Given(DeltaTensors(*arguments[:TENSORS]), saved, do, dST, needs, DeltaOptions(*options))


def _backward(*arguments: Any) -> list[Tensor]:
    tensors, saved, do, dST, needs, options = _unpacked(arguments)
    call, t = _Call(tensors, options), tensors
    found = _zero_gradients(t, needs)
    dS0 = found[5] if needs[5] else None
    if dS0 is not None and dST is not None:
        call.pass_through(dST, dS0)
    carried = saved.borders[:0]
    for part in reversed(call.parts):
        S = call.entering(part, saved.borders[part.index : part.index + part.entered])
        ended = slice(part.sequences.start, part.sequences.stop - part.left)
        dS = _joined(call.states(dST, ended), carried)
        inputs, d_out = call.load(part), call.scaled(do, part)
        if options.recurrent:
            tiles, dS = call.stage("recurrent").recurrent_bwd(inputs, d_out, S, dS, part.table)
        else:
            kept = saved.factors(call.tiles(part)) if options.keep_factors else None
            factors = call.stage("prepare").fold(inputs, kept)
            at_borders, dS = call.stage("scan_bwd").scan_bwd(inputs, factors, d_out, S, dS, part.table)
            tiles = call.stage("gradients").gradients(inputs, factors, at_borders, d_out)
        blocks = (part.block(x) if need else None for x, need in zip(found[:5], needs[:5], strict=True))
        out = TokenGradients(*blocks, *(x if need else None for x, need in zip(found[6:], needs[6:], strict=True)))
        g = None if t.g is None else part.block(t.g)
        call.stage("gradients").unload(tiles, inputs, g, t.A_log, t.dt_bias, part.table, options, out)
        carried = dS[: part.entered]
        if dS0 is not None:
            begun = slice(part.sequences.start + part.entered, part.sequences.stop)
            dS0[begun] = call.turned(dS[part.entered :])
    return [dx if x is None else dx.to(x.dtype) for dx, x in zip(found, t[:DIFFERENTIABLE], strict=True)]


def _outputs(t: DeltaTensors, options: DeltaOptions) -> tuple[DeltaResult, Saved]:
    """Empty results of the forward, and room for what it keeps.

    Sizes come from metadata alone, so this is the operator's fake as well.
    """
    B, T, HV, V = t.v.shape
    K, C, dtype = t.q.shape[-1], options.chunk_size, wide(t.q.dtype)
    N = None if t.cu_seqlens is None else t.cu_seqlens.shape[0] - 1
    state = (V, K) if options.state_v_first else (K, V)

    def empty(*size: int, dtype: torch.dtype) -> Tensor:
        return t.v.new_empty(size, dtype=dtype)

    n = options.checkpoint_every
    final_state = empty(
        *((B if N is None else N, HV, *state) if options.final_state else (0,)), dtype=options.state_dtype
    )
    rows = ((B, T // n) if N is None else (T // n,)) if n else (0,)
    states = t.v.new_zeros(*rows, *((HV, *state) if n else ()), dtype=options.state_dtype)
    per_part = chunks_per_part(t.q, t.v, state_per_token=options.recurrent and options.save)
    # Not every row is written: a registered operator must not return what happened to lie in memory.
    borders = t.v.new_zeros(split.border_rows(B, T, N, C, per_part) if options.save else 0, HV, K, V, dtype=dtype)
    keep = options.save and options.keep_factors and not options.recurrent
    tiles = split.chunk_rows(B, T, N, C) * HV if keep else 0
    factors = [empty(tiles, C, width, dtype=dtype) for width in (K, C, C, C, C)]
    return DeltaResult(empty(B, T, HV, V, dtype=t.v.dtype), final_state, states), Saved(borders, *factors)


def _zero_gradients(t: DeltaTensors, needs: list[bool]) -> list[Tensor]:
    """Zeros for every wanted gradient, in the argument's dtype; parameters and states, which sum, in the wide one."""
    dtype = wide(t.q.dtype)
    summed = (5, 6, 7)
    return [
        x.new_zeros(x.shape, dtype=dtype if i in summed else x.dtype) if need and x is not None else t.q.new_empty(0)
        for i, (x, need) in enumerate(zip(t[:DIFFERENTIABLE], needs, strict=True))
    ]


def _joined(first: Tensor, last: Tensor) -> Tensor:
    """States of two runs of sequences as one, copied only where both have some."""
    if first.shape[0] == 0:
        return last
    return torch.cat([first, last]) if last.shape[0] else first


class _Checkpoints:
    """Intermediate states: those that leave a chunk at a multiple of `checkpoint_every` tokens of its sequence."""

    def __init__(self, call: _Call, states: Tensor):
        self.call, self.every = call, call.options.checkpoint_every
        self.rows = states.flatten(0, 1) if call.cu is None else states
        counts = call.lengths // self.every
        self.first = counts.cumsum(0) - counts

    def leaving(self, part: Part) -> Tensor:
        call = self.call
        return call.tensors.q.new_empty(part.table.chunks, call.HV, call.K, call.V, dtype=call.dtype)

    def put(self, part: Part, leaving: Tensor) -> None:
        sequence, position = part.chunk_ends()
        wanted = (position % self.every == 0).nonzero().flatten()
        row = self.first[sequence[wanted]] + position[wanted] // self.every - 1
        self.rows[row.to(self.rows.device)] = self.call.outside(leaving[wanted.to(leaving.device)])


def _forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    result, saved = _outputs(DeltaTensors(*arguments[:TENSORS]), DeltaOptions(*arguments[TENSORS:]))
    return *result, *saved


def _backward_fake(*arguments: Any) -> list[Tensor]:
    given = _unpacked(arguments)
    t, found = given.tensors, _zero_gradients(given.tensors, given.needs)
    return [dx if x is None else dx.to(x.dtype) for dx, x in zip(found, t[:DIFFERENTIABLE], strict=True)]


SAVED_SCHEMA = "Tensor borders, Tensor E, Tensor F, Tensor A, Tensor J, Tensor P"

_RESULTS_SCHEMA = f"(Tensor o, Tensor final_state, Tensor states, {SAVED_SCHEMA})"

_forward_op = register(
    f"delta_fwd({TENSORS_SCHEMA}, {DeltaOptions.SCHEMA}) -> {_RESULTS_SCHEMA}",
    _forward,
    _forward_fake,
)
_backward_op = register(
    f"delta_bwd({TENSORS_SCHEMA}, {SAVED_SCHEMA}, Tensor? do, Tensor? dST, bool[] needs, {DeltaOptions.SCHEMA})"
    " -> Tensor[]",
    _backward,
    _backward_fake,
)
