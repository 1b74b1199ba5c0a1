"""The short convolution for serving: a registered operator that updates the latest inputs in a pool's slots in place.

It has no gradient. With `drafts`, one kernel reads and writes the slots itself. Otherwise the states are gathered from
their slots, the differentiable operator's kernel runs, and the states are scattered back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.kernels import table
from wyfold.kernels.records import Slots
from wyfold.runtime import check
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.layout import legal_boundaries
from wyfold.runtime.torch_ops import register

CHUNK = 64
"""Chunk size of the grid that holds a call's boundaries; its value does not matter."""


class ConvServing(NamedTuple):
    """One call, as the public operators document its tensors.

    Attributes:
        x: [B, T, D].
        weight, bias: [D, W], and [D] or None.
        pool: [slots, D, S], updated in place.
        source: [N, 1] slot of each sequence, or None.
        given: [N] bool, or None.
        accepted: [N], or None.
        cu_seqlens: [N+1], or None.
        y: [B, T, D] output buffer.
        pad: Slot numbers up to this one mark padding.
        drafts: Whether the slot keeps the inputs of every token, so that a later call can choose among them, instead
            of the last ones.
        activated: Whether a SiLU is applied to y.
        operator: Public name, for messages.
        backend: Backend of the plan.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    pool: Tensor
    source: Tensor | None
    given: Tensor | None
    accepted: Tensor | None
    cu_seqlens: Tensor | None
    y: Tensor
    pad: int
    drafts: bool
    activated: bool
    operator: str
    backend: str


def _serve(*arguments: Any) -> None:
    s = ConvServing(*arguments)
    (B, T, D), cu = s.x.shape, s.cu_seqlens
    if D == 0 or (B == 0 and cu is None):
        return
    if cu is not None and check.readable(cu):
        legal_boundaries(s.operator, cu, T)
    grid = table.kernel_module("chunk_grid", s.backend).chunk_grid(B, T, CHUNK, cu)
    given, accepted = (None if x is None else x.contiguous() for x in (s.given, s.accepted))
    slots = Slots(s.pool, s.pool, s.source, given=given, accepted=accepted, pad=s.pad)
    if s.drafts:
        stage: Any = table.kernel_module("conv_pool", s.backend)
        stage.update(s.x, s.weight, s.bias, s.pool, slots, grid, s.activated, s.y)
    else:
        _run_on_gathered_states(s, slots, grid)


def _run_on_gathered_states(s: ConvServing, slots: Slots, grid: ChunkGrid) -> None:
    """Gather states from slots (`enter`), run the differentiable operator's kernel, scatter them back (`leave`)."""
    stage: Any = table.kernel_module("state_pool", s.backend)
    T, reach = s.x.shape[1], s.weight.shape[1] - 1
    y = s.y if one_row(s.y) else s.y.new_empty(s.y.shape)
    entering, leaving = (_empty_states(s.pool, grid.sequences) for _ in range(2))
    if s.pool.shape[2] > reach:
        leaving.zero_()  # the rest of a slot is invalid after these tokens
    stage.enter(s.pool[:, None], slots, entering[:, None])
    boundaries: Tensor | int = T
    if grid.cu is not None:
        boundaries = grid.cu[: grid.sequences + 1]
    elif s.backend == "eager":
        boundaries = torch.arange(grid.sequences + 1) * T
    if s.backend == "eager" and isinstance(boundaries, Tensor):
        boundaries = boundaries.cpu()
    table.kernel_module("conv", s.backend).conv(
        s.x.flatten(0, 1),
        s.weight,
        s.bias,
        None,
        entering[:, :, :reach],
        boundaries,
        s.activated,
        y.flatten(0, 1),
        leaving[:, :, :reach],
    )
    stage.leave(leaving[:, None], slots, s.pool[:, None], grid, y[:, :, None])
    if y is not s.y:
        s.y.copy_(y)


def one_row(x: Tensor) -> bool:
    """Whether all tokens of x [B, T, D] have one stride, so that flattening B and T needs no copy."""
    B, T, _ = x.shape
    return B <= 1 or T <= 1 or x.stride(0) == T * x.stride(1)


def _empty_states(pool: Tensor, N: int) -> Tensor:
    """Allocate [N, D, S] with the memory layout of a pool's slot."""
    _, D, S = pool.shape
    return pool.new_empty(N, D, S) if pool.stride(2) == 1 else pool.new_empty(N, S, D).mT


def _serve_fake(*arguments: Any) -> None:
    """Fake implementation: the operator returns nothing."""


serve_conv_op = register(
    "serve_conv(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) pool, Tensor? source, Tensor? given, "
    "Tensor? accepted, Tensor? cu_seqlens, Tensor(b!) y, int pad, bool drafts, bool activated, str operator, "
    "str backend) -> ()",
    _serve,
    _serve_fake,
)
