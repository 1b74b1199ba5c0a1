"""Gates in Triton: one tile of tokens and columns per program, elementwise; a column is a channel of a head.

Sums over tokens are taken as in the norms. Of a bounded number P of programs, each takes every P-th tile of its
columns, and their partial sums are added in one order.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.gate import GateGradients
from wyfold.runtime.kernel_configs import LaunchKey, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.tile.activation.triton import exp, sigmoid, sigmoid_bwd, softplus
from wyfold.tile.norm.triton import column_sum
from wyfold.tile.rows.triton import load_columns, load_rows, row_offsets, row_stride, row_unit, store_rows


def gate(
    x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, activation: str, lower_bound: float, out: Tensor
) -> None:
    """Write the natural-log decay per token to out.

    Args:
        x: [n, HV, 1 or K], float32 or narrower, any strides. Pre-activation.
        A_log: [HV] or None (rate 1).
        dt_bias: [HV * (1 or K)] or None (0).
        activation: "softplus" or "bounded".
        lower_bound: Lower bound of the "bounded" activation.
        out: Shape of x.
    """
    tile = _tiles("gate", x, out)
    if tile.tiles:
        launch_kernel(
            wyfold_gate_triton, tile.tiles * tile.blocks, p_x=x, s_x=tile.strides(x), p_A_log=_vector(A_log),
            p_dt_bias=_vector(dt_bias), p_g=out, s_g=tile.strides(out), n=x.shape[0], lower_bound=lower_bound,
            BOUNDED=activation == "bounded", **tile.launch(),
        )  # fmt: skip


def gate_bwd(
    x: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    activation: str,
    lower_bound: float,
    dg: Tensor,
    out: GateGradients,
) -> None:
    """Gradients of `gate`; arguments as in `gate`, and dg like x."""
    tile = _tiles("gate_bwd", x, dg, out.x)
    if not tile.tiles:
        for total in (out.A_log, out.dt_bias):
            if total is not None:
                total.zero_()
        return
    rate_wanted, bias_wanted = out.A_log is not None and A_log is not None, out.dt_bias is not None
    programs = min(tile.tiles, max(1, tile.programs // tile.blocks))
    partial = x.new_empty(2, programs, *x.shape[1:], dtype=torch.float32) if rate_wanted or bias_wanted else None
    launch_kernel(
        wyfold_gate_bwd_triton, programs * tile.blocks, p_x=x, s_x=tile.strides(x), p_A_log=_vector(A_log),
        p_dt_bias=_vector(dt_bias), p_dg=dg, s_dg=tile.strides(dg), p_dx=out.x, s_dx=tile.strides(out.x),
        p_partial=partial, n=x.shape[0], tiles=tile.tiles, programs=programs, lower_bound=lower_bound,
        BOUNDED=activation == "bounded", DRATE=rate_wanted, DBIAS=bias_wanted, **tile.launch(),
    )  # fmt: skip
    if partial is not None and out.A_log is not None and A_log is not None:
        out.A_log.copy_(partial[0].sum(0).sum(1))
    if partial is not None and out.dt_bias is not None:
        out.dt_bias.copy_(partial[1].sum(0))


def beta_sigmoid(x: Tensor, scale: float, out: Tensor) -> None:
    """Write scale * sigmoid(x) to out; both [n, W]."""
    x, out = _elements(x, out)
    tile = _tiles("beta_sigmoid", x, out)
    if tile.tiles:
        launch_kernel(
            wyfold_beta_sigmoid_triton, tile.tiles * tile.blocks, p_x=x, s_x=tile.strides(x), p_beta=out,
            s_beta=tile.strides(out), n=x.shape[0], scale=float(scale), **tile.launch(),
        )  # fmt: skip


def beta_sigmoid_bwd(x: Tensor, scale: float, dbeta: Tensor, dx: Tensor) -> None:
    """Write the gradient of `beta_sigmoid` to dx; all [n, W]."""
    x, dbeta, dx = _elements(x, dbeta, dx)
    tile = _tiles("beta_sigmoid_bwd", x, dbeta, dx)
    if tile.tiles:
        launch_kernel(
            wyfold_beta_sigmoid_bwd_triton, tile.tiles * tile.blocks, p_x=x, s_x=tile.strides(x), p_dbeta=dbeta,
            s_dbeta=tile.strides(dbeta), p_dx=dx, s_dx=tile.strides(dx), n=x.shape[0], scale=float(scale),
            **tile.launch(),
        )  # fmt: skip


class _GateTiles(NamedTuple):
    """Partition of [n, W] numbers into tiles.

    Attributes:
        tiles: Number of tiles of tokens.
        blocks: Number of blocks of columns.
        W: Columns, HV * C.
        C: Columns per head.
        BR: Tokens per tile.
        BW: Columns per block.
        unit: Common divisor of the token strides of all tensors.
        evenly: All columns of all tensors have one stride, across heads too.
        programs: Number of programs.
        options: Launch options of the kernel.
    """

    tiles: int
    blocks: int
    W: int
    C: int
    BR: int
    BW: int
    unit: int
    evenly: bool
    programs: int
    options: dict[str, Any]

    def strides(self, x: Tensor | None) -> tuple[int, int, int]:
        """Token stride in units, head stride, and column stride.

        Raises:
            ValueError: the token stride is no multiple of the unit, which was computed without this tensor.
        """
        if x is None:
            return 0, 0, 0
        _, head, channel = x.stride()
        return row_stride(x, self.unit), head, head if self.C == 1 else channel

    def launch(self) -> dict[str, Any]:
        names = {"W": self.W, "C": self.C, "BR": self.BR, "BW": self.BW, "UNIT": self.unit, "EVENLY": self.evenly}
        return {**names, **self.options}


def _tiles(launch: str, x: Tensor, *others: Tensor | None) -> _GateTiles:
    """Tiles of x [n, HV, C]; their shape follows from HV and C alone."""
    n, HV, C = x.shape
    config = tuned("gate.triton", LaunchKey(launch=launch), x.device)
    size = config.blocks["TILE"]
    BW = min(triton.next_power_of_2(max(1, HV * C)), config.blocks["BW"])
    tensors = [t for t in (x, *others) if t is not None]
    evenly = C == 1 or HV == 1 or all(t.stride(1) == C * t.stride(2) for t in tensors)
    return _GateTiles(
        triton.cdiv(n, size // BW),
        triton.cdiv(HV * C, BW),
        HV * C,
        C,
        size // BW,
        BW,
        row_unit(*tensors),
        evenly,
        config.blocks.get("PROGRAMS", 1),
        dict(config.options(contract=False)),
    )


def _elements(*tensors: Tensor) -> list[Tensor]:
    """View [n, W] tensors as [n, W, 1]; contiguous ones in rows of up to 16 elements, so that loads are wide."""
    if all(t.is_contiguous() for t in tensors):
        tensors = tuple([t.view(-1, math.gcd(t.numel(), 16)) for t in tensors])
    return [t.unsqueeze(-1) for t in tensors]


def _vector(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()


@triton.jit
def _columns(i_block, W: tl.constexpr, BW: tl.constexpr):
    """Columns of a block, [1, BW], and the mask of those that exist."""
    o_c = i_block * BW + tl.arange(0, BW)[None, :]
    return o_c, o_c < W


@triton.jit
def _column_offsets(o_c, s, C: tl.constexpr, EVENLY: tl.constexpr):
    """Offsets of columns under strides s; EVENLY: the step between heads continues that between channels."""
    if EVENLY:
        return o_c * s[2]
    else:
        return o_c // C * s[1] + o_c % C * s[2]


@triton.jit
def _parameters(p_A_log, p_dt_bias, o_c, W: tl.constexpr, C: tl.constexpr):
    """exp(A_log) and dt_bias of the columns; 1 and 0 if they are None."""
    b_rate = exp(load_columns(p_A_log, o_c // C, W // C))
    return b_rate, load_columns(p_dt_bias, o_c, W)


@triton.jit(do_not_specialize=["n"])
def wyfold_gate_triton(
    p_x, s_x, p_A_log, p_dt_bias, p_g, s_g, n, lower_bound,
    BOUNDED: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr,
    UNIT: tl.constexpr, EVENLY: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (W + BW - 1) // BW
    o_r = row_offsets(tl.program_id(0) // blocks, BR)
    o_c, m_c = _columns(tl.program_id(0) % blocks, W, BW)
    mask = (o_r < n) & m_c
    b_rate, b_bias = _parameters(p_A_log, p_dt_bias, o_c, W, C)
    b_u = load_rows(p_x, s_x[0], o_r, _column_offsets(o_c, s_x, C, EVENLY), mask, UNIT) + b_bias
    b_g = lower_bound * sigmoid(b_u * b_rate) if BOUNDED else softplus(b_u) * (b_rate * -1.0)
    store_rows(p_g, s_g[0], o_r, _column_offsets(o_c, s_g, C, EVENLY), mask, b_g, UNIT)


@triton.jit(do_not_specialize=["n", "tiles", "programs"])
def wyfold_gate_bwd_triton(
    p_x, s_x, p_A_log, p_dt_bias, p_dg, s_dg, p_dx, s_dx, p_partial,
    n, tiles, programs, lower_bound,
    BOUNDED: tl.constexpr, DRATE: tl.constexpr, DBIAS: tl.constexpr,
    W: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr, UNIT: tl.constexpr, EVENLY: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (W + BW - 1) // BW
    i_program = tl.program_id(0) // blocks
    o_c, m_c = _columns(tl.program_id(0) % blocks, W, BW)
    b_rate, b_bias = _parameters(p_A_log, p_dt_bias, o_c, W, C)
    b_drate = tl.zeros((BR, BW), tl.float32)
    b_dbias = tl.zeros((BR, BW), tl.float32)
    for i_tile in range(i_program, tiles, programs):
        o_r = row_offsets(i_tile, BR)
        mask = (o_r < n) & m_c
        b_u = load_rows(p_x, s_x[0], o_r, _column_offsets(o_c, s_x, C, EVENLY), mask, UNIT) + b_bias
        b_dg = load_rows(p_dg, s_dg[0], o_r, _column_offsets(o_c, s_dg, C, EVENLY), mask, UNIT)
        if BOUNDED:
            b_dx = sigmoid_bwd(b_u * b_rate, b_dg * lower_bound) * b_rate
        else:
            b_dx = b_dg * sigmoid(b_u) * (b_rate * -1.0)
        if p_dx is not None:
            store_rows(p_dx, s_dx[0], o_r, _column_offsets(o_c, s_dx, C, EVENLY), mask, b_dx, UNIT)
        # The gate is not clamped: after a reset its gradient is zero, and -inf * 0 would be NaN.
        if DRATE and BOUNDED:
            b_drate += tl.where(b_dx == 0, 0.0, b_u * b_dx)
        elif DRATE:
            b_drate += tl.where(b_dg == 0, 0.0, softplus(b_u) * b_dg)
        if DBIAS:
            b_dbias += b_dx
    o_partial = i_program.to(tl.int64) * W + o_c
    if DRATE:
        if not BOUNDED:
            b_drate *= b_rate * -1.0
        tl.store(p_partial + o_partial, column_sum(b_drate), mask=m_c)
    if DBIAS:
        tl.store(p_partial + programs.to(tl.int64) * W + o_partial, column_sum(b_dbias), mask=m_c)


@triton.jit(do_not_specialize=["n"])
def wyfold_beta_sigmoid_triton(
    p_x, s_x, p_beta, s_beta, n, scale,
    W: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr, UNIT: tl.constexpr, EVENLY: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (W + BW - 1) // BW
    o_r = row_offsets(tl.program_id(0) // blocks, BR)
    o_c, m_c = _columns(tl.program_id(0) % blocks, W, BW)
    mask = (o_r < n) & m_c
    b_x = load_rows(p_x, s_x[0], o_r, _column_offsets(o_c, s_x, C, EVENLY), mask, UNIT)
    store_rows(p_beta, s_beta[0], o_r, _column_offsets(o_c, s_beta, C, EVENLY), mask, scale * sigmoid(b_x), UNIT)


@triton.jit(do_not_specialize=["n"])
def wyfold_beta_sigmoid_bwd_triton(
    p_x, s_x, p_dbeta, s_dbeta, p_dx, s_dx, n, scale,
    W: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr, UNIT: tl.constexpr, EVENLY: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (W + BW - 1) // BW
    o_r = row_offsets(tl.program_id(0) // blocks, BR)
    o_c, m_c = _columns(tl.program_id(0) % blocks, W, BW)
    mask = (o_r < n) & m_c
    b_x = load_rows(p_x, s_x[0], o_r, _column_offsets(o_c, s_x, C, EVENLY), mask, UNIT)
    b_dbeta = load_rows(p_dbeta, s_dbeta[0], o_r, _column_offsets(o_c, s_dbeta, C, EVENLY), mask, UNIT)
    b_dx = sigmoid_bwd(b_x, b_dbeta) * scale
    store_rows(p_dx, s_dx[0], o_r, _column_offsets(o_c, s_dx, C, EVENLY), mask, b_dx, UNIT)
