"""Prefetches of tokens and tiles into L2."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from wyfold.tile.index.triton import token_offsets


@triton.jit
def prefetch_tokens(p, strides, at, h, W: tl.constexpr, BT: tl.constexpr):
    """Prefetch one head's rows of a chunk into L2; later loads take about a third as long.

    One request per line of 128 bytes if columns are contiguous. With other strides, only some lines are requested.
    """
    STEP: tl.constexpr = 1024 // p.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2((W + STEP - 1) // STEP)
    offsets, mask = token_offsets(strides, at, h, 0, BT, BT, 1)
    o_line = tl.minimum(tl.arange(0, LINES) * STEP, W - 1).to(tl.int64) * strides[3]
    _prefetch(tl.where(mask, p + offsets, p) + o_line[None, :])


@triton.jit
def prefetch_tile(p, i_tile, SIZE: tl.constexpr):
    """Prefetch the i-th SIZE numbers of a contiguous tensor into L2."""
    STEP: tl.constexpr = 1024 // p.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2((SIZE + STEP - 1) // STEP)
    _prefetch(p + i_tile.to(tl.int64) * SIZE + tl.minimum(tl.arange(0, LINES) * STEP, SIZE - 1))


if torch.version.hip:

    @triton.jit
    def _prefetch(p):
        """No-op: an AMD GPU has no such instruction."""
        tl.static_assert(p.dtype.is_ptr())

else:

    @triton.jit
    def _prefetch(p):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [p.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )
