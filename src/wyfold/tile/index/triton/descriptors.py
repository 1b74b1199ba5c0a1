"""TMA descriptors of tokens and tiles, made on the host."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from wyfold.runtime import triton_support
from wyfold.runtime.check import UnsupportedError

COORDINATE_LIMIT = 2**31
"""Exclusive upper bound of a TMA coordinate: rows or columns of a matrix."""


def has_tma(device: torch.device) -> bool:
    """Whether the device has TMA; the interpreter has."""
    return _architecture_has_tma(triton_support.architecture(device))


@functools.cache
def _architecture_has_tma(name: str) -> bool:
    return name.startswith("sm_") and int(name.removeprefix("sm_")) >= 90


class TmaDescriptor(TensorDescriptor):
    """A TMA descriptor that skips the checks of Triton's constructor: the functions below have made them."""

    def __init__(self, base: Tensor, shape: list[int], strides: list[int], block_shape: list[int]):
        self.base, self.shape, self.strides, self.block_shape = base, shape, strides, block_shape


def token_descriptor(x: Tensor, rows: int, columns: int) -> TmaDescriptor | None:
    """Descriptor of x [B, T, H, W] as a matrix [B T, columns of all heads].

    Args:
        x: Tokens, any strides.
        rows, columns: Shape of a block.

    Returns:
        None if the layout in memory does not allow a descriptor.
    """
    (B, T, H, W), (s_b, s_t, s_h, s_w) = x.shape, x.stride()
    width = (H - 1) * s_h + W
    if s_w != 1 or W % columns or s_t * x.itemsize % 16 or x.data_ptr() % 16 or (B > 1 and s_b != T * s_t):
        return None
    if not (0 < s_t and 0 < B * T < COORDINATE_LIMIT and 0 < width < COORDINATE_LIMIT):
        return None
    return TmaDescriptor(x, [B * T, width], [s_t, 1], [rows, columns])


def tma_readable(x: Tensor, rows: int, columns: int) -> Tensor:
    """x [B, T, H, W] itself if `token_descriptor` can describe it, else a contiguous copy."""
    if token_descriptor(x, rows, columns) is not None:
        return x
    return x.new_empty(x.shape).copy_(x)


def tile_descriptor(x: Tensor, rows: int, columns: int) -> TmaDescriptor | None:
    """Descriptor of a contiguous x [tiles, R, W] as a matrix [tiles R, W], in blocks [rows, columns].

    None if the sizes or the address do not allow a descriptor.
    """
    tiles, R, W = x.shape
    if R % rows or W % columns or W * x.itemsize % 16 or x.data_ptr() % 16 or not 0 < tiles * R < COORDINATE_LIMIT:
        return None
    return TmaDescriptor(x, [tiles * R, W], [W, 1], [rows, columns])


def upper_descriptor(x: Tensor) -> TmaDescriptor | None:
    """Descriptor of the quarters of contiguous upper triangular tiles x [tiles, 3, n, n]; None as in
    `tile_descriptor`."""
    return tile_descriptor(x.flatten(0, 1), x.shape[2], x.shape[3])


def vector_descriptor(x: Tensor, count: int) -> TmaDescriptor | None:
    """Descriptor of blocks of `count` numbers of a contiguous x [tiles, count]; None as in `tile_descriptor`."""
    if count * x.itemsize % 16 or count & (count - 1) or x.data_ptr() % 16 or not 0 < x.numel() < COORDINATE_LIMIT:
        return None
    return TmaDescriptor(x, [x.numel()], [1], [count])


def all_or_none(given: Sequence[Tensor | None], descriptors: Sequence[Any]) -> Sequence[Any] | None:
    """The descriptors if every given tensor has one; else None, and all tensors are passed as pointers."""
    return (
        None
        if any(x is not None and descriptor is None for x, descriptor in zip(given, descriptors, strict=True))
        else descriptors
    )


def require_descriptors(stage: str, descriptors: Sequence[Any] | None) -> Sequence[Any]:
    """The descriptors.

    Raises:
        UnsupportedError: There are none, because the call has more rows than a TMA coordinate can count.
    """
    if descriptors is None:
        raise UnsupportedError(
            f"{stage}: TMA coordinates count up to 2^31 rows, and this call's tiles have more; split the batch",
            {"gluon": "too many chunks"},
        )
    return descriptors
