"""Boxes of a matrix for Hopper kernels that lay out shared memory themselves (Gluon), and its names, which moved.

A box lies in shared memory as the matrix units read it: rows of 128 bytes, swizzled, where it has so many.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from wyfold.tile.index.triton import Boxes

# Triton 3.8 and 3.7 renamed them.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

ELEMENTS = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


class SharedBoxes(TensorDescriptor):
    """`Boxes`, and how one lies in shared memory."""

    def __init__(self, boxes: Boxes):
        self.base, self.shape, self.strides, self.block_shape = (
            boxes.base,
            boxes.shape,
            boxes.strides,
            boxes.block_shape,
        )
        self.layout = _layout(tuple(boxes.block_shape), boxes.base.dtype)


def shared(boxes: Sequence[Any]) -> list[Any]:
    """Each box as a Gluon kernel takes it; all else as it is."""
    return [SharedBoxes(x) if isinstance(x, Boxes) else x for x in boxes]


@functools.cache
def _layout(shape: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(shape), ELEMENTS[dtype])


@gluon.jit
def clear_rows(tile, rows, BT: gl.constexpr, W: gl.constexpr):
    """Zero the rows of a tile [BT, W] in shared memory from `rows` on, which are no tokens: zero times NaN is NaN."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // W, W // 8], [gl.num_warps(), 1], [1, 0])
    x = tile.load(L)
    o_t = gl.arange(0, BT, layout=gl.SliceLayout(1, L))
    tile.store(gl.where((o_t < rows)[:, None], x, gl.zeros([BT, W], x.dtype, L)))
    fence_async_shared()
    barrier()
