"""Fills shared memory before a launch, so that a kernel's uninitialised reads have known contents."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.runtime import kernel_configs

NANS = 0x7FC07FC0
"""A word that is a NaN in float32, and two in bfloat16."""


def sink(device: torch.device) -> Tensor:
    """Output buffer of the programs of `fill`: two elements for each multiprocessor."""
    return torch.zeros(2 * kernel_configs.processors(device), dtype=torch.int32, device=device)


def fill(sink: Tensor, word: int) -> None:
    """Write a word over 224 KiB of shared memory on every multiprocessor, which holds one such program on sm_90."""
    _fill[(sink.numel(),)](sink, word, num_warps=8, enable_fp_fusion=True)


@gluon.jit
def _fill(p, word):
    L: gl.constexpr = gl.BlockedLayout([4], [32], [8], [0])
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    a = gl.allocate_shared_memory(gl.int32, [32768], S)
    b = gl.allocate_shared_memory(gl.int32, [16384], S)
    c = gl.allocate_shared_memory(gl.int32, [8192], S)
    a.store(gl.zeros([32768], gl.int32, L) + word)
    b.store(gl.zeros([16384], gl.int32, L) + word)
    c.store(gl.zeros([8192], gl.int32, L) + word)
    seen = gl.sum(a.slice(0, 1024).load(L), axis=0) + gl.sum(b.slice(0, 1024).load(L), axis=0)
    gl.store(p + gl.program_id(0), seen + gl.sum(c.slice(0, 1024).load(L), axis=0))
