"""`ttt_decode` in Triton: one program per row and value head, then a launch that advances the positions.

A program needs a whole state, since the prediction's norm runs over all values. All programs of a row read the
sequence's position, so the position is advanced only in the second launch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.records import Slots
from wyfold.kernels.ttt.triton.arguments import Inputs
from wyfold.kernels.ttt.triton.tiles import load_inner_state, load_parameter, store_inner_state
from wyfold.kernels.ttt_decode import Pools
from wyfold.kernels.ttt_records import TTTInputs
from wyfold.runtime.kernel_configs import LaunchKey, tile_width, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.tile.index.triton import strides, with_strides
from wyfold.tile.inner.triton import inner_gradient, residual_norm

ROWS_PER_PROGRAM = 128
"""Rows per program of the launch that advances positions."""


def ttt_decode(x: TTTInputs, pools: Pools, slots: Slots, chunk_size: int, scale: float, eps: float, o: Tensor) -> None:
    """Decode one token of every row.

    Args:
        x: Inputs of one token per row, [N, 1, ..].
        pools: Updated in place, rounded once.
        slots: Uses `source` and `pad`.
        chunk_size: Tokens of a mini-batch.
        scale: Multiplies q.
        eps: Epsilon of both norms.
        o: [N, 1, HV, D] written, zero in rows without a slot.
    """
    (N, _, HV, D), config = x.v.shape, tuned("ttt_decode.triton", launch_key(x.v.shape[3]), x.v.device)
    launch_kernel(
        wyfold_ttt_decode_triton,
        N * HV,
        inputs=with_strides(Inputs, q=x.q, k=x.k, v=x.v, w=x.w, u=x.u, eta=x.eta, col=x.col),
        pools=with_strides(PoolMemory, S=pools.S, c=pools.c, G=pools.G, a=pools.a, position=pools.position),
        rows=with_strides(Rows, source=slots.source, o=o),
        slots=pools.S.shape[0],
        pad=slots.pad,
        scale=scale,
        eps=eps,
        H=x.q.shape[2],
        HV=HV,
        D=D,
        C=chunk_size,
        BD=tile_width(D),
        ON_Q=x.residual == "q",
        **config.options(),
    )
    launch_kernel(
        wyfold_ttt_count_triton,
        triton.cdiv(N, ROWS_PER_PROGRAM),
        p_position=pools.position,
        s_position=pools.position.stride(),
        p_source=slots.source,
        s_source=strides(slots.source),
        N=N,
        slots=pools.S.shape[0],
        pad=slots.pad,
        C=chunk_size,
        BN=ROWS_PER_PROGRAM,
        num_warps=4,
        enable_fp_fusion=True,
    )


def launch_key(D: int) -> LaunchKey:
    """Launch configuration key."""
    return LaunchKey(K=D, V=D)


class PoolMemory(NamedTuple):
    """Kernel argument: the pools, each with its strides."""

    S: Any
    s_S: Any
    c: Any
    s_c: Any
    G: Any
    s_G: Any
    a: Any
    s_a: Any
    position: Any
    s_position: Any
    end: None = None


class Rows(NamedTuple):
    """Kernel argument: what there is of every row, each with its strides.

    Attributes:
        source, s_source: Slot of the row, or None.
        o, s_o: Output, written.
    """

    source: Any
    s_source: Any
    o: Any
    s_o: Any
    end: None = None


@triton.jit(do_not_specialize=["slots", "pad", "scale", "eps"])
def wyfold_ttt_decode_triton(
    inputs,
    pools,
    rows,
    slots,
    pad,
    scale,
    eps,
    H: tl.constexpr,
    HV: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    ON_Q: tl.constexpr,
):
    """One program decodes one value head of one row. States are [V, K] in registers.

    z = S k + c     G <- G + n k^T     a <- a + n     h = s (S - e G) q + c - e a     out = h + w normalise(h) + u
    """
    pid = tl.program_id(0).to(tl.int64)
    i_n, i_hv = pid // HV, pid % HV
    i_h = i_hv // (HV // H)
    o_v = tl.arange(0, BD)
    p_out = rows.o + i_n * rows.s_o[0] + i_hv * rows.s_o[2] + o_v * rows.s_o[3]
    slot = slot_of(rows.source, rows.s_source, i_n)
    if (slot <= pad) | (slot >= slots):
        tl.store(p_out, tl.zeros((BD,), tl.float32).to(rows.o.dtype.element_ty), mask=o_v < D)
        return
    b_q = load_parameter(inputs.q + i_n * inputs.s_q[0], (inputs.s_q[2], inputs.s_q[3]), i_h, D, BD)
    b_k = load_parameter(inputs.k + i_n * inputs.s_k[0], (inputs.s_k[2], inputs.s_k[3]), i_h, D, BD)
    b_v = load_parameter(inputs.v + i_n * inputs.s_v[0], (inputs.s_v[2], inputs.s_v[3]), i_hv, D, BD)
    b_w, b_u = load_parameter(inputs.w, inputs.s_w, i_hv, D, BD), load_parameter(inputs.u, inputs.s_u, i_hv, D, BD)
    e = tl.load(inputs.eta + i_n * inputs.s_eta[0] + i_hv * inputs.s_eta[2]).to(tl.float32)
    b_factor = tl.full((1,), 1.0, tl.float32)
    if inputs.col is not None:
        b_factor *= tl.load(inputs.col + i_n * inputs.s_col[0] + i_hv * inputs.s_col[2]).to(tl.float32)
    position = tl.load(pools.position + slot * pools.s_position[0])
    b_S, b_c = load_inner_state(pools.S, pools.s_S, pools.c, pools.s_c, slot, i_hv, D, BD)
    b_G, b_a = load_inner_state(pools.G, pools.s_G, pools.a, pools.s_a, slot, i_hv, D, BD)

    b_z = tl.sum(b_S * b_k[None, :], axis=1) + b_c
    b_wt = b_w * (b_u - b_v + b_k)
    b_n, _, _, _, _ = inner_gradient(b_z[None, :], b_wt[None, :], (b_w * b_w)[None, :], b_factor, eps, D)
    b_n = tl.reshape(b_n, (BD,))
    b_G += b_n[:, None] * b_k[None, :]
    b_a += b_n
    b_read = tl.sum(b_S * b_q[None, :], axis=1) - e * tl.sum(b_G * b_q[None, :], axis=1)
    b_biased = b_c - e * b_a
    b_h = b_read * scale + b_biased
    b_mean = tl.full((1,), 0.0, tl.float32) + tl.sum(b_h) * (1.0 / D)
    b_raw = None
    if ON_Q:
        b_raw = b_q[None, :]
    b_out, _, _ = residual_norm(b_h[None, :], b_mean, b_w[None, :], b_u[None, :], b_raw, eps, D, 1)
    tl.store(p_out, tl.reshape(b_out, (BD,)).to(rows.o.dtype.element_ty), mask=o_v < D)
    if position + 1 >= C:
        store_inner_state(pools.S, pools.s_S, pools.c, pools.s_c, slot, i_hv, b_S - e * b_G, b_biased, D, BD)
        b_G, b_a = tl.zeros((BD, BD), tl.float32), tl.zeros((BD,), tl.float32)
    store_inner_state(pools.G, pools.s_G, pools.a, pools.s_a, slot, i_hv, b_G, b_a, D, BD)


@triton.jit(do_not_specialize=["N", "slots", "pad"])
def wyfold_ttt_count_triton(
    p_position, s_position, p_source, s_source, N, slots, pad, C: tl.constexpr, BN: tl.constexpr
):
    """One program advances the positions of BN rows by one token."""
    o_n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    b_slot = o_n
    if p_source is not None:
        b_slot = tl.load(p_source + o_n * s_source[0], mask=o_n < N, other=-1).to(tl.int64)
    m_live = (o_n < N) & (b_slot > pad) & (b_slot < slots)
    p_rows = p_position + b_slot * s_position[0]
    b_next = tl.load(p_rows, mask=m_live, other=0) + 1
    tl.store(p_rows, tl.where(b_next >= C, 0, b_next), mask=m_live)


@triton.jit
def slot_of(p_source, s_source, i_n):
    """Slot of row i_n; its own number without `source`."""
    if p_source is None:
        return i_n
    else:
        return tl.load(p_source + i_n * s_source[0]).to(tl.int64)
