"""Outputs from the stored states and N, parallel over segments: reads, then the residual norm."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.ttt.triton.arguments import Borders, Inputs
from wyfold.kernels.ttt.triton.launch import launch_options
from wyfold.kernels.ttt.triton.tiles import load_parameter, read_by_blocks, read_segment, segment_steps
from wyfold.kernels.ttt_records import SegmentBorders, TTTInputs
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.tile.dot.triton import mm
from wyfold.tile.index.triton import Packing, TokenRows, chunk_span, load_tile, load_tokens, store_tokens, with_strides
from wyfold.tile.inner.triton import read_steps, residual_norm


def outputs(
    x: TTTInputs, borders: SegmentBorders, grid: ChunkGrid, chunk_size: int, scale: float, eps: float, o: Tensor
) -> None:
    """Write o; zero past a packed batch's last boundary."""
    config, constexprs = launch_options(x, grid, chunk_size, "outputs")
    launch_kernel(
        wyfold_ttt_outputs_triton,
        grid.chunks * x.v.shape[2],
        inputs=with_strides(Inputs, q=x.q, k=x.k, w=x.w, u=x.u, eta=x.eta),
        borders=with_strides(Borders, N=borders.N, S=borders.S, c=borders.c),
        output=with_strides(Output, o=o),
        packing=Packing(cu=grid.cu, first=grid.first, sequence=grid.sequence),
        N=grid.sequences,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        scale=scale,
        eps=eps,
        BK=min(constexprs["BD"], config.blocks.get("BK", constexprs["BD"])),
        ON_Q=x.residual == "q",
        **constexprs,
    )


class Output(NamedTuple):
    """Kernel argument: output, written, and its strides."""

    o: Any
    s_o: Any
    end: None = None


@triton.jit(do_not_specialize=["N", "T", "per_sequence", "scale", "eps"])
def wyfold_ttt_outputs_triton(
    inputs,
    borders,
    output,
    packing,
    N,
    T,
    per_sequence,
    scale,
    eps,
    H: tl.constexpr,
    HV: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    SEGMENT: tl.constexpr,
    PACKED: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
    BK: tl.constexpr,
    ON_Q: tl.constexpr,
):
    """One program computes a segment of one value head.

    O = s q S + c - (steps * (s q k^T + 1)) N        out = O + w normalise(O) + u        steps: see `read_steps`
    """
    pid = tl.program_id(0).to(tl.int64)
    i_c, i_hv = pid // HV, pid % HV
    i_h = i_hv // (HV // H)
    i_n, _, b, t, rows = chunk_span(i_c, packing, T, per_sequence, PACKED, SEGMENT)
    at = TokenRows(b, t, rows)
    if i_n == N:
        store_tokens(output.o, output.s_o, at, i_hv, 0, tl.zeros((SEGMENT, BD), tl.float32), D)
        return
    b_w, b_u = load_parameter(inputs.w, inputs.s_w, i_hv, D, BD), load_parameter(inputs.u, inputs.s_u, i_hv, D, BD)
    o_v = tl.arange(0, BD)
    b_c = tl.load(borders.c + pid * D + o_v, mask=o_v < D, other=0.0)
    b_N = load_tokens(borders.N, borders.s_N, at, i_hv, 0, D, SEGMENT, BD)
    b_e, b_e_last = segment_steps(inputs.eta, inputs.s_eta, at, i_hv, BT, SEGMENT)
    b_steps, _ = read_steps(b_e, b_e_last, "r", BT)
    if BK == BD:
        b_q = load_tokens(inputs.q, inputs.s_q, at, i_h, 0, D, SEGMENT, BD)
        b_k = load_tokens(inputs.k, inputs.s_k, at, i_h, 0, D, SEGMENT, BD)
        b_S = load_tile(borders.S, pid, 0, 0, D, D, BD, BD)
        b_O = read_segment(b_q, b_k, b_S, b_c, b_N, b_steps, scale, OP, PRECISION)
    else:
        b_gram, b_O = read_by_blocks(
            inputs.q, inputs.s_q, inputs.k, inputs.s_k, borders.S, pid, at, i_h, D, SEGMENT, BD, BK, OP, PRECISION
        )
        b_O = mm((b_gram * scale + 1.0) * -b_steps, b_N, b_O * scale + b_c[None, :], OP, PRECISION)
    b_raw = None
    if ON_Q:
        b_raw = load_tokens(inputs.q, inputs.s_q, at, i_h, 0, D, SEGMENT, BD)
    b_mean = tl.sum(b_O, axis=1) * (1.0 / D)
    b_out, _, _ = residual_norm(b_O, b_mean, b_w[None, :], b_u[None, :], b_raw, eps, D, 1)
    store_tokens(output.o, output.s_o, at, i_hv, 0, b_out, D)
