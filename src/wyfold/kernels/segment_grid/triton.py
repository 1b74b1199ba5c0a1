"""`segment_grid` in Triton: every program scans all sequences and computes some of the segments."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from wyfold.runtime.chunk_layout import (
    SHORT,
    ChunkGrid,
    Cut,
    Segments,
    expected_segments,
    max_borders,
    max_divided,
)
from wyfold.runtime.kernel_launch import launch_kernel, overlaps

BN, BS = 32, 32  # sequences of a step, segments of a program


def segment_grid(grid: ChunkGrid, cut: Cut, device: torch.device) -> Segments:
    """The segments of a call's grid, as in `runtime.chunk_layout.segment_grid`.

    Args:
        grid: From `chunk_grid`.
        cut: How sequences are cut.
        device: Device of the tensors.
    """
    N, packed = grid.sequences, grid.cu is not None
    borders = max_borders(grid.batch, grid.tokens, grid.chunk_size, packed, cut)
    count, held = N + borders, max_divided(grid, cut)
    cu, first_chunk, sequence, first, leading, divided = (
        torch.empty(size, dtype=torch.int64, device=device) for size in (count + 1, count, count, N + 1, borders, held)
    )
    launch_kernel(
        wyfold_segment_grid_triton,
        max(1, triton.cdiv(count, BS)),
        p_cu=grid.cu,
        p_first=grid.first,
        p_segment_cu=cu,
        p_segment_chunk=first_chunk,
        p_sequence=sequence,
        p_first_segment=first,
        p_leading=leading,
        p_divided=divided,
        N=N,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        count=count,
        held=held,
        fewest=cut.fewest,
        chunks=cut.chunks,
        most=cut.most,
        BT=grid.chunk_size,
        BN=BN,
        BS=BS,
        SHORT=SHORT,
        PACKED=packed,
        OVERLAPS=overlaps(),
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=True,
    )
    tokens = grid.batch * grid.tokens
    buffer = replace(grid, batch=1, tokens=tokens, sequences=count, cu=cu, first=first_chunk, sequence=None)
    likely = expected_segments(N, tokens, grid.chunk_size, cut)
    return Segments(buffer, N, borders, sequence, first, leading, divided, likely)


@triton.jit(do_not_specialize=["N", "T", "per_sequence", "count", "held", "fewest", "chunks", "most"])
def wyfold_segment_grid_triton(
    p_cu,
    p_first,
    p_segment_cu,
    p_segment_chunk,
    p_sequence,
    p_first_segment,
    p_leading,
    p_divided,
    N,
    T,
    per_sequence,
    count,
    held,
    fewest,
    chunks,
    most,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BS: tl.constexpr,
    SHORT: tl.constexpr,
    PACKED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program owns BS segments and as many borders; program 0 also writes the sequences."""
    if OVERLAPS:
        gdc_launch_dependents()
    pid = tl.program_id(0).to(tl.int64)
    o_s = pid * BS + tl.arange(0, BS)
    N = N.to(tl.int64)
    before, divided = N * 0, N * 0
    b_sequence, b_leading = tl.zeros((BS,), tl.int64), tl.zeros((BS,), tl.int64)
    # Segments past the last sequence start at its end and hold no token.
    end, chunk = _place(p_cu, p_first, N, N, T, per_sequence, PACKED)
    b_token, b_chunk = tl.zeros((BS,), tl.int64) + end, tl.zeros((BS,), tl.int64) + chunk
    if pid == 0:
        tl.store(p_first_segment, 0)
        tl.store(p_segment_cu + count, end)
    for start in range(0, N, BN):
        o_n = start + tl.arange(0, BN).to(tl.int64)
        m_n = o_n < N
        b_from, b_from_chunk = _place(p_cu, p_first, o_n, N, T, per_sequence, PACKED)
        b_to, _ = _place(p_cu, p_first, o_n + 1, N, T, per_sequence, PACKED)
        b_n = (b_to - b_from + (BT - 1)) // BT
        b_shortest = tl.where(most < SHORT, chunks, tl.minimum((b_n + (SHORT - 1)) // SHORT, chunks))
        b_length = tl.maximum((b_n + (most - 1)) // most, b_shortest)
        b_length = tl.where(b_n >= fewest, b_length, tl.maximum(b_n, 1))
        b_count = tl.where(m_n, tl.maximum((b_n + b_length - 1) // b_length, 1), 0)
        b_after = before + tl.cumsum(b_count, 0)
        b_divided = divided + tl.cumsum((b_count > 1).to(tl.int64), 0)
        if pid == 0:
            tl.store(p_first_segment + o_n + 1, b_after, mask=m_n)
            tl.store(p_divided + b_divided - 1, o_n, mask=b_count > 1)
        b_behind = b_after - o_n - 1
        b_leading += tl.sum(((b_behind[:, None] <= o_s[None, :]) & m_n[:, None]).to(tl.int64), axis=0)
        b_sequence += tl.sum(((b_after[:, None] <= o_s[None, :]) & m_n[:, None]).to(tl.int64), axis=0)
        b_at = o_s[None, :] - (b_after - b_count)[:, None]
        mine = (b_at >= 0) & (b_at < b_count[:, None])
        b_at *= b_length[:, None]
        b_token += tl.sum(tl.where(mine, b_from[:, None] - end + b_at * BT, 0), axis=0)
        b_chunk += tl.sum(tl.where(mine, b_from_chunk[:, None] - chunk + b_at, 0), axis=0)
        before, divided = tl.max(b_after, axis=0), tl.max(b_divided, axis=0)
    if pid == 0:
        for at in range(0, held, BN):
            o_d = at + tl.arange(0, BN)
            tl.store(p_divided + o_d, N, mask=(o_d >= divided) & (o_d < held))
    m_s = o_s < count
    tl.store(p_leading + o_s, tl.minimum(o_s + b_leading, count - 2), mask=o_s < count - N)
    tl.store(p_sequence + o_s, b_sequence, mask=m_s)
    tl.store(p_segment_cu + o_s, b_token, mask=m_s)
    tl.store(p_segment_chunk + o_s, b_chunk, mask=m_s)
    if OVERLAPS:
        gdc_wait()


@triton.jit
def _place(p_cu, p_first, n, N, T, per_sequence, PACKED: tl.constexpr):
    """First token and first chunk of sequence n; for n past the last sequence, its end."""
    if PACKED:
        n = tl.minimum(n, N)
        return tl.load(p_cu + n), tl.load(p_first + n)
    else:
        return n * T, n * per_sequence
