"""States to and from the slots of a pool."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.records import Slots
from wyfold.kernels.state_pool.eager.slots import entered, is_slot, spans
from wyfold.runtime.chunk_layout import ChunkGrid


def enter(pool: Tensor, slots: Slots, states: Tensor) -> None:
    """Read every sequence's entering state from its slot.

    Args:
        pool: [slots, HV, ., .].
        slots: Uses `source`, `accepted`, `given`, `pad`.
        states: [N, HV, ., .] written, of any float dtype.
    """
    slot, live = entered(slots, states.shape[0], pool)
    given = live if slots.given is None else live & slots.given
    states.zero_()
    states[given] = pool[slot[given]].to(states.dtype)


def leave(states: Tensor, slots: Slots, pool: Tensor, grid: ChunkGrid | None = None, o: Tensor | None = None) -> None:
    """Store every sequence's final state in its slot.

    Args:
        states: [N, HV, ., .], of any float dtype.
        slots: Uses `source`, `accepted`, `target`, `pad`.
        pool: [slots, HV, ., .], written in place, rounding once.
        grid: The call's boundaries; may be None if `o` is.
        o: [B, T, HV, V], zeroed for skipped sequences; None if it needs no zeros.
    """
    slot, live = entered(slots, states.shape[0], pool)
    target = slot if slots.target is None else slots.target.to(torch.int64)
    kept = live & is_slot(target, pool, slots.pad)
    pool[target[kept]] = states[kept].to(pool.dtype)
    if grid is not None and o is not None:
        _clear(live, grid, o)


def leave_between(states: Tensor, slots: Slots, grid: ChunkGrid, pool: Tensor, where: Tensor) -> None:
    """Store the intermediate states, after every `grid.every` tokens, of sequences that were not skipped.

    Args:
        states: [rows, HV, ., .], of any float dtype; those of sequence n begin at row `grid.first_states`[n].
        slots: Uses `entering`, `source`, `pad`.
        grid: The call's chunk grid.
        pool: [slots, HV, ., .], another pool, written in place, rounding once.
        where: [rows] slot of each row in `pool`. Entries past the last row of a sequence are ignored.
    """
    N, rows = grid.sequences, torch.arange(states.shape[0], device=pool.device)
    if N == 0 or slots.entering is None:
        return
    sequence = torch.searchsorted(grid.first_states(pool.device)[:N], rows, right=True) - 1
    _, live = entered(slots, N, slots.entering)
    target = where.to(torch.int64)
    kept = live[sequence] & is_slot(target, pool, slots.pad)
    if grid.first_state is not None:
        kept = kept & (rows < grid.first_state[N])
    pool[target[kept]] = states[kept].to(pool.dtype)


def leave_each(states: Tensor, slots: Slots, pool: Tensor, grid: ChunkGrid, o: Tensor) -> None:
    """`leave` for the states [tokens, HV, ., .] after every token; that after token j goes to the slot in column j."""
    columns = slots.source if slots.target is None else slots.target
    _, live = entered(slots, grid.sequences, pool)
    begin, length = spans(grid, pool.device)
    for j, target in enumerate(() if columns is None else columns.to(torch.int64).unbind(1)):
        kept = live & is_slot(target, pool, slots.pad) & (length > j)
        pool[target[kept]] = states[begin[kept] + j].to(pool.dtype)
    _clear(live, grid, o)


def _clear(live: Tensor, grid: ChunkGrid, o: Tensor) -> None:
    if grid.cu is None:
        o[~live] = 0
        return
    begin, length = spans(grid, o.device)
    for n in (~live).nonzero().flatten().tolist():
        o[0, begin[n] : begin[n] + length[n]] = 0
