"""`enter`, `leave` and `leave_between` in Triton: one program per state, head and piece of it, copied in memory order.

`leave_each` is made from these.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from wyfold.kernels.records import Slots
from wyfold.kernels.state_pool.eager import entered
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import Config, LaunchKey, tuned
from wyfold.runtime.kernel_launch import launch_kernel, overlaps
from wyfold.tile.index.triton import TokenRows, store_tokens, strides

CLEAR_ROWS: tl.constexpr = tl.constexpr(16)
"""Output rows zeroed per step."""

SEARCH_STEP: tl.constexpr = tl.constexpr(256)
"""Sequences searched per step for the one that owns a row."""


def enter(pool: Tensor, slots: Slots, states: Tensor) -> None:
    """Read every sequence's entering state from its slot.

    Args:
        pool: [slots, HV, ., .]; the state of a head is contiguous, here and in `states`.
        slots: Uses `source`, `accepted`, `given`, `pad`.
        states: [N, HV, ., .] written, of any float dtype.
    """
    _copy(pool, states, slots, slots.pad, None, None, entering=True)


def leave(states: Tensor, slots: Slots, pool: Tensor, grid: ChunkGrid | None = None, o: Tensor | None = None) -> None:
    """Store every sequence's final state in its slot.

    Args:
        states: [N, HV, ., .], of any float dtype.
        slots: Uses `source`, `accepted`, `target`, `pad`.
        pool: [slots, HV, ., .], written in place, rounding once.
        grid: The call's boundaries; may be None if `o` is.
        o: [B, T, HV, V], zeroed for skipped sequences; None if it needs no zeros.
    """
    _copy(states, pool, slots, slots.pad, grid, o, entering=False)


def leave_between(states: Tensor, slots: Slots, grid: ChunkGrid, pool: Tensor, where: Tensor) -> None:
    """Store the intermediate states, after every `grid.every` tokens, of sequences that were not skipped.

    Args:
        states: [rows, HV, ., .], of any float dtype; those of sequence n begin at row `grid.first_states`[n].
        slots: Uses `entering`, `source`, `pad`.
        grid: The call's chunk grid.
        pool: [slots, HV, ., .], another pool, written in place, rounding once.
        where: [rows] slot of each row in `pool`. Entries past the last row of a sequence are ignored.
    """
    (rows, HV), numbers = states.shape[:2], states.shape[2] * states.shape[3]
    config, BN = _pieces(states)
    launch_kernel(
        wyfold_state_pool_between_triton,
        rows * HV * -(-numbers // BN),
        p_from=states,
        s_from=states.stride()[:2],
        p_to=pool,
        s_to=pool.stride()[:2],
        p_where=where,
        s_where=where.stride(0),
        p_source=slots.source,
        s_source=strides(slots.source),
        p_first=grid.first_state,
        N=grid.sequences,
        each=max(1, grid.tokens // grid.every),
        slots=0 if slots.entering is None else slots.entering.shape[0],
        kept_slots=pool.shape[0],
        pad=slots.pad,
        HV=HV,
        NUMBERS=numbers,
        BN=BN,
        **config.options(),
    )


def leave_each(states: Tensor, slots: Slots, pool: Tensor, grid: ChunkGrid, o: Tensor) -> None:
    """`leave` for the states [tokens, HV, ., .] after every token; that after token j goes to the slot in column j.

    A few operations of PyTorch find the slots; none waits for the device.
    """
    columns = slots.source if slots.target is None else slots.target
    N, T = grid.sequences, grid.tokens
    if columns is None or states.shape[0] == 0:
        return
    C = columns.shape[1]
    slot, _ = entered(slots, N, pool)
    source = slot[:, None]
    if grid.cu is None:
        where = columns[:, :T].flatten()
    else:
        rows = torch.arange(T, device=pool.device)
        sequence = torch.searchsorted(grid.cu[1 : N + 1], rows, right=True).clamp(max=N - 1)
        column = rows - grid.cu[sequence]
        there = columns[sequence, column.clamp(max=C - 1)]
        where = torch.where(column < C, there, -1)
    leave_between(states, Slots(pool, None, source, pad=slots.pad), grid, pool, where)
    # Stores no state, because no target is a slot; clears the outputs of skipped sequences.
    nowhere = torch.full_like(source, -1)
    leave(states[:1].expand(N, *pool.shape[1:]), Slots(pool, pool, source, nowhere, pad=slots.pad), pool, grid, o)


def _pieces(states: Tensor) -> tuple[Config, int]:
    """Launch configuration, and how many numbers of a head's state one program copies."""
    config = tuned("state_pool.triton", LaunchKey(), states.device)
    return config, min(config.blocks["BN"], triton.next_power_of_2(states.shape[2] * states.shape[3]))


def _copy(
    given: Tensor, taken: Tensor, slots: Slots, pad: int, grid: ChunkGrid | None, o: Tensor | None, *, entering: bool
) -> None:
    pool, states = (given, taken) if entering else (taken, given)
    (N, HV), numbers = states.shape[:2], states.shape[2] * states.shape[3]
    config, BN = _pieces(states)
    launch_kernel(
        wyfold_state_pool_triton,
        N * HV * -(-numbers // BN),
        p_from=given,
        s_from=given.stride()[:2],
        p_to=taken,
        s_to=taken.stride()[:2],
        p_source=slots.source,
        s_source=strides(slots.source),
        p_target=None if entering else slots.target,
        s_target=None if entering else strides(slots.target),
        p_given=slots.given if entering else None,
        p_accepted=slots.accepted,
        p_o=o,
        s_o=strides(o),
        p_cu=None if grid is None else grid.cu,
        T=0 if grid is None else grid.tokens,
        slots=pool.shape[0],
        pad=pad,
        columns=1 if slots.source is None else slots.source.shape[1],
        HV=HV,
        NUMBERS=numbers,
        BN=BN,
        V=1 if o is None else o.shape[3],
        BV=1 if o is None else triton.next_power_of_2(o.shape[3]),
        ENTERING=entering,
        OVERLAPS=entering and overlaps(),
        **config.options(),
    )


@triton.jit(do_not_specialize=["T", "slots", "pad", "columns"])
def wyfold_state_pool_triton(
    p_from,
    s_from,
    p_to,
    s_to,
    p_source,
    s_source,
    p_target,
    s_target,
    p_given,
    p_accepted,
    p_o,
    s_o,
    p_cu,
    T,
    slots,
    pad,
    columns,
    HV: tl.constexpr,
    NUMBERS: tl.constexpr,
    BN: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    ENTERING: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program owns BN numbers of one head's state."""
    if OVERLAPS:
        gdc_launch_dependents()
    PIECES: tl.constexpr = (NUMBERS + BN - 1) // BN
    pid = tl.program_id(0).to(tl.int64)
    i_piece, i_hv, i_n = pid % PIECES, (pid // PIECES) % HV, pid // (PIECES * HV)
    slot = i_n
    if p_source is not None:
        entry = i_n * s_source[0]
        if p_accepted is not None:
            accepted = tl.load(p_accepted + i_n).to(tl.int64)
            entry += tl.minimum(tl.maximum(accepted - 1, 0), columns - 1) * s_source[1]
        slot = tl.load(p_source + entry).to(tl.int64)
    live = (slot > pad) & (slot < slots)
    o_s = (i_piece * BN).to(tl.int32) + tl.arange(0, BN)
    m_s = o_s < NUMBERS
    if ENTERING:
        has_state = live
        if p_given is not None:
            has_state = has_state & (tl.load(p_given + i_n) != 0)
        b_S = tl.load(p_from + slot * s_from[0] + i_hv * s_from[1] + o_s, mask=m_s & has_state, other=0.0)
        tl.store(p_to + i_n * s_to[0] + i_hv * s_to[1] + o_s, b_S.to(p_to.dtype.element_ty), mask=m_s)
    else:
        to = slot
        if p_target is not None:
            to = tl.load(p_target + i_n * s_target[0]).to(tl.int64)
        b_S = tl.load(p_from + i_n * s_from[0] + i_hv * s_from[1] + o_s, mask=m_s, other=0.0)
        kept = m_s & live & (to > pad) & (to < slots)
        tl.store(p_to + to * s_to[0] + i_hv * s_to[1] + o_s, b_S.to(p_to.dtype.element_ty), mask=kept)
        if p_o is not None:
            if (i_piece == 0) & (live == 0):
                b, t, length = i_n, i_n * 0, i_n * 0 + T
                if p_cu is not None:
                    b, t = i_n * 0, tl.load(p_cu + i_n)
                    length = tl.load(p_cu + i_n + 1) - t
                zeros = tl.zeros((CLEAR_ROWS, BV), tl.float32)
                for row in range(0, length, CLEAR_ROWS):
                    rows = tl.minimum(length - row, CLEAR_ROWS).to(tl.int32)
                    store_tokens(p_o, s_o, TokenRows(b, t + row, rows), i_hv, 0, zeros, V)


@triton.jit(do_not_specialize=["s_where", "N", "each", "slots", "kept_slots", "pad"])
def wyfold_state_pool_between_triton(
    p_from,
    s_from,
    p_to,
    s_to,
    p_where,
    s_where,
    p_source,
    s_source,
    p_first,
    N,
    each,
    slots,
    kept_slots,
    pad,
    HV: tl.constexpr,
    NUMBERS: tl.constexpr,
    BN: tl.constexpr,
):
    """One program owns BN numbers of one head's state in one row."""
    PIECES: tl.constexpr = (NUMBERS + BN - 1) // BN
    pid = tl.program_id(0).to(tl.int64)
    i_piece, i_hv, i_row = pid % PIECES, (pid // PIECES) % HV, pid // (PIECES * HV)
    i_n = i_row // each
    if p_first is not None:
        # The row's sequence is the number of sequences that end at or before it; N: the row is unused.
        i_n = i_row * 0
        for start in range(0, N, SEARCH_STEP):
            o_n = start + tl.arange(0, SEARCH_STEP)
            b_end = tl.load(p_first + o_n + 1, mask=o_n < N, other=i_row + 1)
            i_n += tl.sum((b_end <= i_row).to(tl.int64), axis=0)
    slot = i_n
    if p_source is not None:
        slot = tl.load(p_source + i_n * s_source[0], mask=i_n < N, other=-1).to(tl.int64)
    to = tl.load(p_where + i_row * s_where).to(tl.int64)
    kept = (i_n < N) & (slot > pad) & (slot < slots) & (to > pad) & (to < kept_slots)
    o_s = (i_piece * BN).to(tl.int32) + tl.arange(0, BN)
    m_s = (o_s < NUMBERS) & kept
    b_S = tl.load(p_from + i_row * s_from[0] + i_hv * s_from[1] + o_s, mask=m_s, other=0.0)
    tl.store(p_to + to * s_to[0] + i_hv * s_to[1] + o_s, b_S.to(p_to.dtype.element_ty), mask=m_s)
