"""Gradients of the norms' weight and bias: partial sums of segments and of sequences, added in a fixed order."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.ttt.triton.launch import BackwardWorkspace
from wyfold.runtime.kernel_launch import launch_kernel

COLUMNS, ROWS, WARPS = 32, 64, 4
"""Columns and warps of a program, and rows of one loop step: enough programs to fill a GPU, and whole cache lines."""


def parameter_gradients(scratch: BackwardWorkspace, dw: Tensor, du: Tensor) -> None:
    """Write dw and du, [HV, D] with any strides."""
    HV, D = dw.shape
    launch_kernel(
        wyfold_ttt_parameters_triton,
        2 * triton.cdiv(HV * D, COLUMNS),
        p_read_partials=scratch.read_partials,
        p_step_partials=scratch.step_partials,
        p_dw=dw,
        s_dw=dw.stride(),
        p_du=du,
        s_du=du.stride(),
        segments=scratch.read_partials.shape[1],
        sequences=scratch.step_partials.shape[1],
        HV=HV,
        D=D,
        BC=COLUMNS,
        BR=ROWS,
        num_warps=WARPS,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=["segments", "sequences"])
def wyfold_ttt_parameters_triton(
    p_read_partials,
    p_step_partials,
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
    """One program sums BC columns. The first half of the programs write dw, the others du.

    dw = sum over segments + sum over sequences        partials: [2, count, HV, D] float32, of w and of u
    """
    half: tl.constexpr = (HV * D + BC - 1) // BC
    i_x = tl.program_id(0) // half
    o_c = tl.program_id(0) % half * BC + tl.arange(0, BC)
    b_sum = sum_partials(p_read_partials, i_x, segments, o_c, HV * D, BC, BR)
    b_sum += sum_partials(p_step_partials, i_x, sequences, o_c, HV * D, BC, BR)
    i_hv, o_v = o_c // D, o_c % D
    if i_x == 0:
        tl.store(p_dw + i_hv * s_dw[0] + o_v * s_dw[1], b_sum.to(p_dw.dtype.element_ty), mask=o_c < HV * D)
    else:
        tl.store(p_du + i_hv * s_du[0] + o_v * s_du[1], b_sum.to(p_du.dtype.element_ty), mask=o_c < HV * D)


@triton.jit
def sum_partials(p, i_x, count, o_c, W: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr):
    """Column sums of the i_x-th [count, W] block of a contiguous tensor.   [BC]"""
    b_sums = tl.zeros((BR, BC), tl.float32)
    p_rows = p + i_x.to(tl.int64) * count * W + o_c[None, :]
    o_r = tl.arange(0, BR)[:, None]
    for i in tl.range(0, count, BR):
        b_sums += tl.load(p_rows + (i + o_r).to(tl.int64) * W, mask=(i + o_r < count) & (o_c < W)[None, :], other=0.0)
    return tl.sum(b_sums, axis=0)
