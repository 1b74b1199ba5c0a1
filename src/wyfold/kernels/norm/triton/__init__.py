"""Norms in Triton: one tile of whole rows per program, one pass over memory.

A row's bits do not depend on the rows around it or on the alignment of its tensor. Sums run in one order (tile/norm),
and multiplications fuse with additions only where the source says so.

Gradients of the weight and the bias are sums over all rows. Of a bounded number P of programs, each takes every P-th
tile, and their partial sums are added in one order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from wyfold.kernels.norm import RmsNormGradients, RmsNormOptions
from wyfold.kernels.norm.triton.kernels import (
    GatedNormMemory,
    wyfold_l2norm_bwd_triton,
    wyfold_l2norm_triton,
    wyfold_rms_norm_gated_bwd_triton,
    wyfold_rms_norm_gated_triton,
)
from wyfold.runtime.check import UnsupportedError
from wyfold.runtime.kernel_configs import LaunchKey, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.tile.rows.triton import row_stride, row_unit

WIDEST = 65_536  # columns: 64 numbers of each tensor in a thread's registers


def l2norm(x: Tensor, eps: float, out: Tensor) -> None:
    """Write x at unit length to out.

    Args:
        x: [n, W], float32 or narrower, any strides.
        eps: Added to the squared length.
        out: [n, W], any float.
    """
    tile = _tiles("l2norm", x, out)
    if tile.tiles:
        launch_kernel(
            wyfold_l2norm_triton,
            tile.tiles,
            p_x=x,
            s_x=tile.strides(x),
            p_y=out,
            s_y=tile.strides(out),
            n=x.shape[0],
            eps=eps,
            **tile.launch(),
        )


def l2norm_bwd(x: Tensor, eps: float, dy: Tensor, dx: Tensor) -> None:
    """Write the gradient of `l2norm` in x to dx; all [n, W]."""
    tile = _tiles("l2norm_bwd", x, dy, dx)
    if tile.tiles:
        launch_kernel(
            wyfold_l2norm_bwd_triton, tile.tiles, p_x=x, s_x=tile.strides(x), p_dy=dy, s_dy=tile.strides(dy), p_dx=dx,
            s_dx=tile.strides(dx), n=x.shape[0], eps=eps, **tile.launch(),
        )  # fmt: skip


def rms_norm_gated(
    x: Tensor, z: Tensor, weight: Tensor, bias: Tensor | None, options: RmsNormOptions, out: Tensor
) -> None:
    """Write the normalised and gated rows to out.

    Args:
        x, z: [n, W], float32 or narrower, any strides.
        weight, bias: [W], float32 or narrower; bias may be None.
        options: Options of the call.
        out: [n, W], dtype of x.
    """
    tile = _tiles("rms_norm_gated", x, z, out)
    if tile.tiles:
        launch_kernel(
            wyfold_rms_norm_gated_triton, tile.tiles, p_x=x, s_x=tile.strides(x), p_z=z, s_z=tile.strides(z),
            p_w=weight.contiguous(), p_bias=None if bias is None else bias.contiguous(), p_y=out, s_y=tile.strides(out),
            n=x.shape[0], eps=options.eps, **_choices(options), **tile.launch(),
        )  # fmt: skip


def rms_norm_gated_bwd(
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dy: Tensor,
    options: RmsNormOptions,
    out: RmsNormGradients,
) -> None:
    """Gradients of `rms_norm_gated`; arguments as in `rms_norm_gated`, and dy [n, W]."""
    tile = _tiles("rms_norm_gated_bwd", x, z, dy, out.x, out.z)
    sums = [total for total in (out.weight, out.bias) if total is not None]
    if not tile.tiles:
        for total in sums:
            total.zero_()
        return
    programs = min(tile.tiles, tile.programs)
    partial = x.new_empty(2, programs, x.shape[1], dtype=torch.float32) if sums else None
    launch_kernel(
        wyfold_rms_norm_gated_bwd_triton,
        programs,
        rows=GatedNormMemory(
            x=x,
            s_x=tile.strides(x),
            z=z,
            s_z=tile.strides(z),
            w=weight.contiguous(),
            bias=None if bias is None else bias.contiguous(),
            dy=dy,
            s_dy=tile.strides(dy),
            dx=out.x,
            s_dx=tile.strides(out.x),
            dz=out.z,
            s_dz=tile.strides(out.z),
            partial=partial,
        ),
        n=x.shape[0],
        tiles=tile.tiles,
        programs=programs,
        eps=options.eps,
        DWEIGHT=out.weight is not None,
        DBIAS=out.bias is not None,
        **_choices(options),
        **tile.launch(),
    )
    if partial is not None:
        for into, parts in zip((out.weight, out.bias), partial):
            if into is not None:
                into.copy_(parts.sum(0))


class _NormTiles(NamedTuple):
    """Partition of [n, W] rows into tiles.

    Attributes:
        tiles: Number of tiles.
        W: Columns.
        BR: Rows per tile.
        BW: Columns per tile, at least W.
        unit: Common divisor of the row strides of all tensors.
        programs: Number of programs.
        options: Launch options of the kernel.
    """

    tiles: int
    W: int
    BR: int
    BW: int
    unit: int
    programs: int
    options: dict[str, Any]

    def strides(self, x: Tensor | None) -> tuple[int, int]:
        """Row stride in units, and column stride.

        Raises:
            ValueError: the row stride is no multiple of the unit, which was computed without this tensor.
        """
        return (0, 0) if x is None else (row_stride(x, self.unit), x.stride(1))

    def launch(self) -> dict[str, Any]:
        return {"W": self.W, "BR": self.BR, "BW": self.BW, "UNIT": self.unit, **self.options}


def _tiles(launch: str, x: Tensor, *others: Tensor | None) -> _NormTiles:
    """Tiles of x [n, W]; the number of rows per tile follows from W alone.

    Raises:
        UnsupportedError: rows wider than `WIDEST`.
    """
    n, W = x.shape
    if W > WIDEST:
        raise UnsupportedError(f"{launch}: rows of {W} columns", {"triton": f"takes at most {WIDEST} columns"})
    config = tuned("norm.triton", LaunchKey(launch=launch), x.device)
    size, BW = config.blocks["TILE"], triton.next_power_of_2(W)
    BR = max(1, size // BW)
    warps = config.warps * max(1, min(32 // config.warps, BW // size))
    options = {**config.options(contract=False), "num_warps": warps}
    return _NormTiles(triton.cdiv(n, BR), W, BR, BW, row_unit(x, *others), config.blocks.get("PROGRAMS", 1), options)


def _choices(options: RmsNormOptions) -> dict[str, bool]:
    return {
        "SIGMOID": options.activation == "sigmoid",
        "NORM_FIRST": options.norm_before_gate,
        "ROUND": options.round_before_weight,
    }
