"""Serving: sequences whose states lie in the slots of a pool, updated in place, by one registered operator.

It has no gradient. Its kernels are those of the token-by-token form, so a decoded token has the bits of the
differentiable call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.pipelines import delta_parts
from wyfold.pipelines.delta_records import DeltaTensors
from wyfold.runtime.options import DELTA_SCHEMA, DeltaOptions
from wyfold.runtime.register import call, register
from wyfold.stages import table
from wyfold.stages.records import Slots


class Serving(NamedTuple):
    """One serving call: tokens as the public operators document them, and where their states are.

    Attributes:
        q, k, v, g, beta, A_log, dt_bias, cu_seqlens: As of `DeltaTensors`.
        pool: [slots, HV, K, V], or V-first. Updated in place.
        source, target, given, accepted, each, pad: As of `Slots`.
        o: [B, T, HV, V], written.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    cu_seqlens: Tensor | None
    pool: Tensor
    source: Tensor | None
    target: Tensor | None
    given: Tensor | None
    accepted: Tensor | None
    o: Tensor
    each: bool
    pad: int

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1


SERVING_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? A_log, Tensor? dt_bias, Tensor? cu_seqlens, "
    "Tensor(a!) pool, Tensor? source, Tensor? target, Tensor? given, Tensor? accepted, Tensor(b!) o, bool each, int pad"
)


def serve(serving: Serving, options: DeltaOptions) -> None:
    """Run one call: `serving.o` and the pool hold its results."""
    call(_serve_op, *serving, *options)


def _serve(*arguments: Any) -> None:
    fields = len(Serving._fields)
    s, options = Serving(*arguments[:fields]), DeltaOptions(*arguments[fields:])
    if s.sequences == 0 and s.cu_seqlens is None:
        return
    if options.backend == "eager":
        _in_parts(s, options)
    else:
        _in_one_launch(s, options)


def _in_one_launch(s: Serving, options: DeltaOptions) -> None:
    stage: Any = table.launches("recurrent", options.backend)
    (B, T), grid = s.q.shape[:2], table.launches("chunk_grid", options.backend).chunk_grid
    A_log, dt_bias = (None if x is None else x.contiguous() for x in (s.A_log, s.dt_bias))
    slots = Slots(s.pool, s.pool, s.source, s.target, s.given, s.accepted, s.each, s.pad)
    tokens = s.q, s.k, s.v, s.g, s.beta
    stage.recurrent(*tokens, A_log, dt_bias, slots, grid(B, T, stage.BLOCK, s.cu_seqlens), options, s.o)


def _in_parts(s: Serving, options: DeltaOptions) -> None:
    """The same around the eager walk of the differentiable operators: states out of their slots, and back."""
    N, device = s.sequences, s.pool.device
    slot = torch.arange(N, device=device)
    if s.source is not None:
        column = torch.zeros_like(slot)
        if s.accepted is not None:
            column = (s.accepted.to(torch.int64) - 1).clamp(0, s.source.shape[1] - 1)
        slot = s.source.to(torch.int64).gather(1, column[:, None])[:, 0]
    live = _live(slot, s)
    given = live if s.given is None else live & s.given
    entering = s.pool.new_zeros(N, *s.pool.shape[1:])
    entering[given] = s.pool[slot[given]]
    tokens = DeltaTensors(*s[:5], entering, s.A_log, s.dt_bias, s.cu_seqlens, None)
    if s.each:
        options = options._replace(checkpoint_every=1, chunk_size=1)
    result, _ = delta_parts.forward(tokens, options)
    s.o.copy_(result.o)
    begin, length = _spans(s)
    for n in (~live).nonzero().flatten().tolist():
        s.o.flatten(0, 1)[begin[n] : begin[n] + length[n]] = 0
    if not s.each:
        target = slot if s.target is None else s.target.to(torch.int64)
        kept = live & _live(target, s)
        s.pool[target[kept]] = result.final_state[kept]
        return
    columns = s.source if s.target is None else s.target
    states = result.states if s.cu_seqlens is not None else result.states.flatten(0, 1)
    for j, target in enumerate(() if columns is None else columns.to(torch.int64).unbind(1)):
        kept = live & _live(target, s) & (length > j)
        s.pool[target[kept]] = states[begin[kept] + j]


def _live(slot: Tensor, s: Serving) -> Tensor:
    """Which numbers are a slot of the pool."""
    return (slot > s.pad) & (slot < s.pool.shape[0])


def _spans(s: Serving) -> tuple[Tensor, Tensor]:
    """[N] first token of each sequence among all of the call, and how many it has."""
    B, T = s.q.shape[:2]
    if s.cu_seqlens is None:
        begin = torch.arange(B, device=s.q.device) * T
        return begin, torch.full_like(begin, T)
    cu = s.cu_seqlens.to(torch.int64)
    return cu[:-1], cu.diff()


def _serve_fake(*arguments: Any) -> None:
    """Nothing is returned."""


_serve_op = register(f"serve({SERVING_SCHEMA}, {DELTA_SCHEMA}) -> ()", _serve, _serve_fake)
