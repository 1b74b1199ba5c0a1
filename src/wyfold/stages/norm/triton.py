"""Norms in Triton: a tile of whole rows per program, one pass over memory.

A row's bits are those of the formula, whatever stands around the row and however its tensor is aligned: sums run in one
order (tile/norm), and no multiplication fuses with an addition that the source does not fuse.

Gradients of the weight and the bias are sums over all rows. A bounded number of programs takes every so-manieth tile
each, and their partial sums are added in one order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wyfold.runtime.check import UnsupportedError
from wyfold.runtime.launch import tuned
from wyfold.stages.norm import RmsNormGradients, RmsNormOptions
from wyfold.tile.activation.triton import sigmoid, sigmoid_bwd, silu, silu_bwd
from wyfold.tile.norm.triton import column_sum, row_norm, row_norm_bwd
from wyfold.tile.rows.triton import load_columns, load_rows, row_offsets, row_unit, store_rows

WIDEST = 65_536  # columns: 64 numbers of each tensor in a thread's registers


def l2norm(x: Tensor, eps: float, out: Tensor) -> None:
    """Write x at unit length to out.

    Args:
        x: [n, W], float32 or narrower, any strides.
        eps: Added to the squared length.
        out: [n, W], any float.
    """
    tile = _tiles("l2norm", x)
    if tile.tiles:
        wyfold_l2norm_triton[(tile.tiles,)](x, *tile.steps(x), out, *tile.steps(out), x.shape[0], eps, **tile.launch())


def l2norm_bwd(x: Tensor, eps: float, dy: Tensor, dx: Tensor) -> None:
    """Write the gradient of `l2norm` in x to dx; all [n, W]."""
    tile = _tiles("l2norm_bwd", x, dy, dx)
    if tile.tiles:
        wyfold_l2norm_bwd_triton[(tile.tiles,)](
            x, *tile.steps(x), dy, *tile.steps(dy), dx, *tile.steps(dx), x.shape[0], eps, **tile.launch()
        )


def rms_norm_gated(
    x: Tensor, z: Tensor, weight: Tensor, bias: Tensor | None, options: RmsNormOptions, out: Tensor
) -> None:
    """Write the normed and gated rows to out.

    Args:
        x, z: [n, W], float32 or narrower, any strides.
        weight, bias: [W], float32 or narrower; no bias: None.
        options: The whole record.
        out: [n, W], dtype of x.
    """
    tile = _tiles("rms_norm_gated", x, z, out)
    if tile.tiles:
        wyfold_rms_norm_gated_triton[(tile.tiles,)](
            x, *tile.steps(x), z, *tile.steps(z), weight.contiguous(), None if bias is None else bias.contiguous(),
            out, *tile.steps(out), x.shape[0], options.eps, **_choices(options), **tile.launch(),
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
    """Gradients of `rms_norm_gated`; arguments as there, dy [n, W]."""
    tile = _tiles("rms_norm_gated_bwd", x, z, dy, out.x, out.z)
    if not tile.tiles:
        return
    programs = min(tile.tiles, tile.programs)
    sums = [total for total in (out.weight, out.bias) if total is not None]
    partial = x.new_empty(2, programs, x.shape[1], dtype=torch.float32) if sums else None
    wyfold_rms_norm_gated_bwd_triton[(programs,)](
        x, *tile.steps(x), z, *tile.steps(z), weight.contiguous(), None if bias is None else bias.contiguous(),
        dy, *tile.steps(dy), out.x, *tile.steps(out.x), out.z, *tile.steps(out.z), partial,
        x.shape[0], tile.tiles, programs, options.eps,
        DWEIGHT=out.weight is not None, DBIAS=out.bias is not None, **_choices(options), **tile.launch(),
    )  # fmt: skip
    if partial is not None:
        for total, parts in zip((out.weight, out.bias), partial):
            if total is not None:
                total.add_(parts.sum(0))


class _Tiles(NamedTuple):
    """BR rows of W <= BW columns each, `tiles` of them; `unit` divides the distance between rows of every tensor."""

    tiles: int
    W: int
    BR: int
    BW: int
    unit: int
    warps: int
    stages: int
    programs: int

    def steps(self, x: Tensor | None) -> tuple[int, int]:
        """Distances between rows, in units, and between columns."""
        return (0, 0) if x is None else (x.stride(0) // self.unit, x.stride(1))

    def launch(self) -> dict[str, int | bool]:
        return {
            "W": self.W,
            "BR": self.BR,
            "BW": self.BW,
            "UNIT": self.unit,
            "num_warps": self.warps,
            "num_stages": self.stages,
            "enable_fp_fusion": False,
        }


def _tiles(launch: str, x: Tensor, *others: Tensor | None) -> _Tiles:
    """Tiles of x [n, W]; rows per tile follow from W alone.

    Raises:
        UnsupportedError: rows wider than `WIDEST`.
    """
    n, W = x.shape
    if W > WIDEST:
        raise UnsupportedError(f"{launch}: rows of {W} columns", {"triton": f"takes at most {WIDEST} columns"})
    config = tuned("norm.triton", launch, x.device)
    size, BW = config.blocks["TILE"], triton.next_power_of_2(W)
    BR = max(1, size // BW)
    warps = config.warps * max(1, min(32 // config.warps, BW // size))
    unit = row_unit(x, *others)
    return _Tiles(triton.cdiv(n, BR), W, BR, BW, unit, warps, config.stages, config.blocks.get("PROGRAMS", 1))


def _choices(options: RmsNormOptions) -> dict[str, bool]:
    return {
        "SIGMOID": options.activation == "sigmoid",
        "NORM_FIRST": options.norm_before_gate,
        "ROUND": options.round_before_weight,
    }


@triton.jit
def _offsets(tile, n, W: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr):
    """Rows [BR, 1] and columns [1, BW] of a tile, and which of them exist."""
    o_r = row_offsets(tile, BR)
    o_c = tl.arange(0, BW)[None, :]
    return o_r, o_c, (o_r < n) & (o_c < W)


@triton.jit(do_not_specialize=["n"])
def wyfold_l2norm_triton(
    p_x, s_x, s_xc, p_y, s_y, s_yc, n, eps,
    W: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    o_r, o_c, mask = _offsets(tl.program_id(0), n, W, BR, BW)
    b_x = load_rows(p_x, s_x, o_r, o_c * s_xc, mask, UNIT)
    store_rows(p_y, s_y, o_r, o_c * s_yc, mask, row_norm(b_x, eps, 1)[0], UNIT)


@triton.jit(do_not_specialize=["n"])
def wyfold_l2norm_bwd_triton(
    p_x, s_x, s_xc, p_dy, s_dy, s_dyc, p_dx, s_dx, s_dxc, n, eps,
    W: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    o_r, o_c, mask = _offsets(tl.program_id(0), n, W, BR, BW)
    b_x = load_rows(p_x, s_x, o_r, o_c * s_xc, mask, UNIT)
    b_dy = load_rows(p_dy, s_dy, o_r, o_c * s_dyc, mask, UNIT)
    b_y, b_r = row_norm(b_x, eps, 1)
    store_rows(p_dx, s_dx, o_r, o_c * s_dxc, mask, row_norm_bwd(b_y, b_r, b_dy, 1), UNIT)


@triton.jit
def _forward(
    x, z, w, bias, eps, STORAGE: tl.constexpr, BIAS: tl.constexpr,
    SIGMOID: tl.constexpr, NORM_FIRST: tl.constexpr, ROUND: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """act(z); the normed row and its reciprocal root mean square; as the weight meets it; times weight, plus bias."""
    gate = sigmoid(z) if SIGMOID else silu(z)
    normed, r = row_norm(x if NORM_FIRST else x * gate, eps, W)
    rounded = normed.to(STORAGE).to(tl.float32) if ROUND else normed
    affine = rounded * w
    if BIAS:
        affine += bias
    return gate, normed, r, rounded, affine


@triton.jit(do_not_specialize=["n"])
def wyfold_rms_norm_gated_triton(
    p_x, s_x, s_xc, p_z, s_z, s_zc, p_w, p_bias, p_y, s_y, s_yc, n, eps,
    SIGMOID: tl.constexpr, NORM_FIRST: tl.constexpr, ROUND: tl.constexpr,
    W: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    o_r, o_c, mask = _offsets(tl.program_id(0), n, W, BR, BW)
    b_x = load_rows(p_x, s_x, o_r, o_c * s_xc, mask, UNIT)
    b_z = load_rows(p_z, s_z, o_r, o_c * s_zc, mask, UNIT)
    b_w, b_bias = load_columns(p_w, o_c, W), load_columns(p_bias, o_c, W)
    gate, _, _, _, b_y = _forward(
        b_x, b_z, b_w, b_bias, eps, p_x.dtype.element_ty, p_bias is not None, SIGMOID, NORM_FIRST, ROUND, W
    )
    if NORM_FIRST:
        b_y *= gate
    store_rows(p_y, s_y, o_r, o_c * s_yc, mask, b_y, UNIT)


@triton.jit(do_not_specialize=["n", "tiles", "programs"])
def wyfold_rms_norm_gated_bwd_triton(
    p_x, s_x, s_xc, p_z, s_z, s_zc, p_w, p_bias, p_dy, s_dy, s_dyc, p_dx, s_dx, s_dxc, p_dz, s_dz, s_dzc, p_partial,
    n, tiles, programs, eps,
    DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, SIGMOID: tl.constexpr, NORM_FIRST: tl.constexpr, ROUND: tl.constexpr,
    W: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    i_program = tl.program_id(0)
    b_dw = tl.zeros((BR, BW), tl.float32)
    b_dbias = tl.zeros((BR, BW), tl.float32)
    o_c = tl.arange(0, BW)[None, :]
    b_w, b_bias = load_columns(p_w, o_c, W), load_columns(p_bias, o_c, W)
    for i_tile in range(i_program, tiles, programs):
        o_r, o_c, mask = _offsets(i_tile, n, W, BR, BW)
        b_x = load_rows(p_x, s_x, o_r, o_c * s_xc, mask, UNIT)
        b_z = load_rows(p_z, s_z, o_r, o_c * s_zc, mask, UNIT)
        b_dy = load_rows(p_dy, s_dy, o_r, o_c * s_dyc, mask, UNIT)
        gate, normed, r, rounded, affine = _forward(
            b_x, b_z, b_w, b_bias, eps, p_x.dtype.element_ty, p_bias is not None, SIGMOID, NORM_FIRST, ROUND, W
        )
        d_affine = b_dy * gate if NORM_FIRST else b_dy
        d_normed = row_norm_bwd(normed, r, d_affine * b_w, W)
        if DWEIGHT:
            b_dw = tl.fma(d_affine, rounded, b_dw)
        if DBIAS:
            b_dbias += d_affine
        if p_dx is not None:
            store_rows(p_dx, s_dx, o_r, o_c * s_dxc, mask, d_normed if NORM_FIRST else d_normed * gate, UNIT)
        if p_dz is not None:
            d_gate = b_dy * affine if NORM_FIRST else d_normed * b_x
            b_dz = sigmoid_bwd(b_z, d_gate) if SIGMOID else silu_bwd(b_z, d_gate)
            store_rows(p_dz, s_dz, o_r, o_c * s_dzc, mask, b_dz, UNIT)
    o_partial = i_program.to(tl.int64) * W + o_c
    if DWEIGHT:
        tl.store(p_partial + o_partial, column_sum(b_dw), mask=o_c < W)
    if DBIAS:
        tl.store(p_partial + programs.to(tl.int64) * W + o_partial, column_sum(b_dbias), mask=o_c < W)
