"""The kernels of `norm` in Triton."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from wyfold.tile.activation.triton import sigmoid, sigmoid_bwd, silu, silu_bwd
from wyfold.tile.norm.triton import column_sum, row_norm, row_norm_bwd
from wyfold.tile.rows.triton import load_columns, load_rows, row_offsets, store_rows


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
