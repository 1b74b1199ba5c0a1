"""Gradients of the norms' weight and bias: shares of segments and of sequences, added in order."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.ttt.triton.launch import Replayed
from wyfold.runtime.kernel_launch import launch_kernel

COLUMNS, ROWS, WARPS = 32, 64, 4
"""Columns of a program, rows of a step, and its warps: enough programs for a GPU, and whole lines of memory."""


def parameter_gradients(left: Replayed, dw: Tensor, du: Tensor) -> None:
    """Write dw and du [HV, D] of any strides."""
    HV, D = dw.shape
    launch_kernel(
        wyfold_ttt_parameters_triton,
        2 * triton.cdiv(HV * D, COLUMNS),
        left.read,
        left.stepped,
        dw,
        dw.stride(),
        du,
        du.stride(),
        left.read.shape[1],
        left.stepped.shape[1],
        HV=HV,
        D=D,
        BC=COLUMNS,
        BR=ROWS,
        num_warps=WARPS,
    )


@triton.jit(do_not_specialize=["segments", "sequences"])
def wyfold_ttt_parameters_triton(
    p_read,
    p_stepped,
    p_dw,
    s_dw,
    p_du,
    s_du,
    segments,
    sequences,
    HV: tl.constexpr,
    D: tl.constexpr,
    BC: tl.constexpr,
    BR: tl.constexpr,
):
    """One program owns columns of dw, or of du: the first half of the programs dw's.

    dw = sum over segments + sum over sequences        shares: [w and u, count, HV, D] float32
    """
    half: tl.constexpr = (HV * D + BC - 1) // BC
    i_x = tl.program_id(0) // half
    o_c = tl.program_id(0) % half * BC + tl.arange(0, BC)
    b_sum = add_shares(p_read, i_x, segments, o_c, HV * D, BC, BR)
    b_sum += add_shares(p_stepped, i_x, sequences, o_c, HV * D, BC, BR)
    i_hv, o_v = o_c // D, o_c % D
    if i_x == 0:
        tl.store(p_dw + i_hv * s_dw[0] + o_v * s_dw[1], b_sum.to(p_dw.dtype.element_ty), mask=o_c < HV * D)
    else:
        tl.store(p_du + i_hv * s_du[0] + o_v * s_du[1], b_sum.to(p_du.dtype.element_ty), mask=o_c < HV * D)


@triton.jit
def add_shares(p, i_x, count, o_c, W: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr):
    """Sums over the i_x-th [count, W] of a contiguous tensor.   [BC]"""
    b_sums = tl.zeros((BR, BC), tl.float32)
    p_rows = p + i_x.to(tl.int64) * count * W + o_c[None, :]
    o_r = tl.arange(0, BR)[:, None]
    for i in tl.range(0, count, BR):
        b_sums += tl.load(p_rows + (i + o_r).to(tl.int64) * W, mask=(i + o_r < count) & (o_c < W)[None, :], other=0.0)
    return tl.sum(b_sums, axis=0)
