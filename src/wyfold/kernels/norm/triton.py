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
import triton.language as tl
from torch import Tensor

from wyfold.kernels.norm import RmsNormGradients, RmsNormOptions
from wyfold.runtime.check import UnsupportedError
from wyfold.runtime.kernel_configs import LaunchKey, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.tile.activation.triton import sigmoid, sigmoid_bwd, silu, silu_bwd
from wyfold.tile.norm.triton import column_sum, row_norm, row_norm_bwd
from wyfold.tile.rows.triton import load_columns, load_rows, row_offsets, row_stride, row_unit, store_rows

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
    if not tile.tiles:
        return
    programs = min(tile.tiles, tile.programs)
    sums = [total for total in (out.weight, out.bias) if total is not None]
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
        for total, parts in zip((out.weight, out.bias), partial):
            if total is not None:
                total.add_(parts.sum(0))


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


@triton.jit
def _offsets(tile, n, W: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr):
    """Rows [BR, 1] and columns [1, BW] of a tile, and the mask of those that exist."""
    o_r = row_offsets(tile, BR)
    o_c = tl.arange(0, BW)[None, :]
    return o_r, o_c, (o_r < n) & (o_c < W)


@triton.jit(do_not_specialize=["n"])
def wyfold_l2norm_triton(
    p_x, s_x, p_y, s_y, n, eps,
    W: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    o_r, o_c, mask = _offsets(tl.program_id(0), n, W, BR, BW)
    b_x = load_rows(p_x, s_x[0], o_r, o_c * s_x[1], mask, UNIT)
    store_rows(p_y, s_y[0], o_r, o_c * s_y[1], mask, row_norm(b_x, eps, 1)[0], UNIT)


@triton.jit(do_not_specialize=["n"])
def wyfold_l2norm_bwd_triton(
    p_x, s_x, p_dy, s_dy, p_dx, s_dx, n, eps,
    W: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    o_r, o_c, mask = _offsets(tl.program_id(0), n, W, BR, BW)
    b_x = load_rows(p_x, s_x[0], o_r, o_c * s_x[1], mask, UNIT)
    b_dy = load_rows(p_dy, s_dy[0], o_r, o_c * s_dy[1], mask, UNIT)
    b_y, b_r = row_norm(b_x, eps, 1)
    store_rows(p_dx, s_dx[0], o_r, o_c * s_dx[1], mask, row_norm_bwd(b_y, b_r, b_dy, 1), UNIT)


@triton.jit
def _activated(b_z, SIGMOID: tl.constexpr):
    return sigmoid(b_z) if SIGMOID else silu(b_z)


@triton.jit
def _affine(b_normed, b_w, p_bias, b_bias, STORAGE: tl.constexpr, ROUND: tl.constexpr):
    """The normalised row as the weight multiplies it; and that times the weight, plus the bias."""
    b_rounded = b_normed.to(STORAGE).to(tl.float32) if ROUND else b_normed
    b_affine = b_rounded * b_w
    if p_bias is not None:
        b_affine += b_bias
    return b_rounded, b_affine


@triton.jit(do_not_specialize=["n"])
def wyfold_rms_norm_gated_triton(
    p_x, s_x, p_z, s_z, p_w, p_bias, p_y, s_y, n, eps,
    SIGMOID: tl.constexpr, NORM_FIRST: tl.constexpr, ROUND: tl.constexpr,
    W: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    o_r, o_c, mask = _offsets(tl.program_id(0), n, W, BR, BW)
    b_x = load_rows(p_x, s_x[0], o_r, o_c * s_x[1], mask, UNIT)
    b_z = load_rows(p_z, s_z[0], o_r, o_c * s_z[1], mask, UNIT)
    b_w, b_bias = load_columns(p_w, o_c, W), load_columns(p_bias, o_c, W)
    b_act = _activated(b_z, SIGMOID)
    b_normed = row_norm(b_x if NORM_FIRST else b_x * b_act, eps, W)[0]
    b_y = _affine(b_normed, b_w, p_bias, b_bias, p_x.dtype.element_ty, ROUND)[1]
    if NORM_FIRST:
        b_y *= b_act
    store_rows(p_y, s_y[0], o_r, o_c * s_y[1], mask, b_y, UNIT)


class GatedNormMemory(NamedTuple):
    """Kernel argument: rows of the gated norm and their gradients, each with its strides, or None.

    Attributes:
        x, s_x, z, s_z, dy, s_dy: Inputs, and the gradient of the output.
        w, bias: Parameters, contiguous.
        dx, s_dx, dz, s_dz: Gradients, written.
        partial: [2, programs, W] float32 sums of the parameters' gradients, written.
    """

    x: Any
    s_x: Any
    z: Any
    s_z: Any
    w: Any
    bias: Any
    dy: Any
    s_dy: Any
    dx: Any
    s_dx: Any
    dz: Any
    s_dz: Any
    partial: Any
    end: None = None


@triton.jit(do_not_specialize=["n", "tiles", "programs"])
def wyfold_rms_norm_gated_bwd_triton(
    rows, n, tiles, programs, eps, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, SIGMOID: tl.constexpr,
    NORM_FIRST: tl.constexpr, ROUND: tl.constexpr, W: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    i_program = tl.program_id(0)
    b_dw = tl.zeros((BR, BW), tl.float32)
    b_dbias = tl.zeros((BR, BW), tl.float32)
    o_c = tl.arange(0, BW)[None, :]
    b_w, b_bias = load_columns(rows.w, o_c, W), load_columns(rows.bias, o_c, W)
    for i_tile in range(i_program, tiles, programs):
        o_r, o_c, mask = _offsets(i_tile, n, W, BR, BW)
        b_x = load_rows(rows.x, rows.s_x[0], o_r, o_c * rows.s_x[1], mask, UNIT)
        b_z = load_rows(rows.z, rows.s_z[0], o_r, o_c * rows.s_z[1], mask, UNIT)
        b_dy = load_rows(rows.dy, rows.s_dy[0], o_r, o_c * rows.s_dy[1], mask, UNIT)
        b_act = _activated(b_z, SIGMOID)
        b_normed, b_r = row_norm(b_x if NORM_FIRST else b_x * b_act, eps, W)
        b_rounded, b_affine = _affine(b_normed, b_w, rows.bias, b_bias, rows.x.dtype.element_ty, ROUND)
        b_daffine = b_dy * b_act if NORM_FIRST else b_dy
        b_dnormed = row_norm_bwd(b_normed, b_r, b_daffine * b_w, W)
        if DWEIGHT:
            b_dw = tl.fma(b_daffine, b_rounded, b_dw)
        if DBIAS:
            b_dbias += b_daffine
        if rows.dx is not None:
            b_dx = b_dnormed if NORM_FIRST else b_dnormed * b_act
            store_rows(rows.dx, rows.s_dx[0], o_r, o_c * rows.s_dx[1], mask, b_dx, UNIT)
        if rows.dz is not None:
            b_dact = b_dy * b_affine if NORM_FIRST else b_dnormed * b_x
            b_dz = sigmoid_bwd(b_z, b_dact) if SIGMOID else silu_bwd(b_z, b_dact)
            store_rows(rows.dz, rows.s_dz[0], o_r, o_c * rows.s_dz[1], mask, b_dz, UNIT)
    o_partial = i_program.to(tl.int64) * W + o_c
    if DWEIGHT:
        tl.store(rows.partial + o_partial, column_sum(b_dw), mask=o_c < W)
    if DBIAS:
        tl.store(rows.partial + programs.to(tl.int64) * W + o_partial, column_sum(b_dbias), mask=o_c < W)
