"""`chunk_grid` in Triton: every program scans all boundaries and finds the sequences of some chunks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wyfold.runtime import chunk_layout
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_launch import launch_kernel

BN, BC = 64, 128  # boundaries of a step, chunks of a program


def chunk_grid(batch: int, tokens: int, chunk_size: int, cu_seqlens: Tensor | None, every: int = 0) -> ChunkGrid:
    """Chunk grid of a call.

    Args:
        batch, tokens: B and T of the token tensors.
        chunk_size: C.
        cu_seqlens: [N+1] int32 or int64, any stride, on the tensors' device, with any contents. None: a dense batch.
        every: Tokens between kept states; 0: none are kept.
    """
    if cu_seqlens is None:
        return chunk_layout.chunk_grid(batch, tokens, chunk_size, None, every)
    N = cu_seqlens.shape[0] - 1
    most = chunk_layout.max_chunks(batch, tokens, chunk_size, N)
    # Separate allocations, so that each is aligned for vector loads.
    cu, first, sequence = (cu_seqlens.new_empty(size, dtype=torch.int64) for size in (N + 2, N + 1, most))
    first_state = cu_seqlens.new_empty(N + 1, dtype=torch.int64) if every else None
    launch_kernel(
        wyfold_chunk_grid_triton,
        max(1, triton.cdiv(most, BC)),
        p_given=cu_seqlens,
        s_given=cu_seqlens.stride(0),
        p_cu=cu,
        p_first=first,
        p_sequence=sequence,
        p_first_state=first_state,
        N=N,
        T=tokens,
        most=most,
        every=every,
        BT=chunk_size,
        BN=BN,
        BC=BC,
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=True,
    )
    return ChunkGrid(chunk_size, batch, tokens, N, most, cu, first, sequence, every, first_state)


@triton.jit(do_not_specialize=["s_given", "N", "T", "most", "every"])
def wyfold_chunk_grid_triton(
    p_given,
    s_given,
    p_cu,
    p_first,
    p_sequence,
    p_first_state,
    N,
    T,
    most,
    every,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
):
    """One program owns BC chunks; program 0 also writes the boundaries."""
    pid = tl.program_id(0).to(tl.int64)
    o_c = pid * BC + tl.arange(0, BC)
    b_sequence = tl.zeros((BC,), tl.int64)
    reached = _inside(tl.load(p_given).to(tl.int64), T)
    before, kept = reached * 0, reached * 0
    if pid == 0:
        tl.store(p_cu, 0)
        tl.store(p_first, 0)
        tl.store(p_cu + N + 1, T)
        if p_first_state is not None:
            tl.store(p_first_state, 0)
    for start in range(0, N, BN):
        o_n = start + tl.arange(0, BN)
        m_n = o_n < N
        p_n = p_given + o_n.to(tl.int64) * s_given
        b_from = _inside(tl.load(p_n, mask=m_n, other=0).to(tl.int64), T)
        b_to = _inside(tl.load(p_n + s_given, mask=m_n, other=0).to(tl.int64), T)
        b_from = tl.maximum(tl.associative_scan(b_from, 0, _larger), reached)
        b_to = tl.maximum(tl.associative_scan(b_to, 0, _larger), reached)
        b_from = tl.where(o_n == 0, 0, b_from)
        b_after = before + tl.cumsum(tl.where(m_n, (b_to - b_from + (BT - 1)) // BT, 0), 0)
        if pid == 0:
            tl.store(p_cu + o_n + 1, b_to, mask=m_n)
            tl.store(p_first + o_n + 1, b_after, mask=m_n)
            if p_first_state is not None:
                b_kept = kept + tl.cumsum(tl.where(m_n, (b_to - b_from) // every, 0), 0)
                tl.store(p_first_state + o_n + 1, b_kept, mask=m_n)
                kept = tl.max(b_kept, axis=0)
        b_sequence += tl.sum(((b_after[:, None] <= o_c[None, :]) & m_n[:, None]).to(tl.int64), axis=0)
        reached, before = tl.max(b_to, axis=0), tl.max(b_after, axis=0)
    tl.store(p_sequence + o_c, b_sequence, mask=o_c < most)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _inside(x, T):
    """Clamp a boundary of any value to the buffer."""
    return tl.minimum(tl.maximum(x, 0), T)
