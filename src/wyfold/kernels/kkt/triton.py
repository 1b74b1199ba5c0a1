"""`kkt` in Triton: one program per chunk and value head."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import LaunchKey, dtype_word, tile_width, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.tile.decay.channel.triton import add_far_key_gram, add_key_gram, beyond_reach, exact_sums
from wyfold.tile.decay.triton import FLOOR, Gate, gate_flags, gate_kind, load_gate
from wyfold.tile.decay.triton.pairs import interval_decay
from wyfold.tile.dot.triton import contracts, exact, operand, precision, self_products, self_sum
from wyfold.tile.index.triton import (
    Packing,
    TokenRows,
    chunk_span,
    load_token_scalars,
    load_tokens,
    store_tokens,
    with_strides,
)
from wyfold.tile.index.triton.sub_chunks import load_sub_chunks

FAR = 16
"""Channels of a slice where gates exceed an anchor's reach: few, so that the common case keeps its registers."""


def kkt(k: Tensor, beta: Tensor, g: Tensor | None, grid: ChunkGrid, out: Tensor) -> None:
    """Write L to out; zeros past a packed batch's last boundary.

    Args:
        k: [B, T, H, K], any strides; with a channel gate, rows must allow loads of 16 elements.
        beta: [B, T, HV].
        g: [B, T, HV] or [B, T, HV, K] natural-log decay per token, <= 0; strides as for k. None for no decay.
        grid: The call's chunk grid.
        out: [B, T, HV, C], any strides.
    """
    (H, K), HV, C = k.shape[2:], beta.shape[2], grid.chunk_size
    gates = gate_flags(g)
    # 16-bit keys are operands as they are. Decayed keys stay float32: rounding them would lose the result's precision.
    operand_dtype = torch.float32 if gates["CHANNEL"] else k.dtype
    config = tuned("kkt.triton", launch_key(k.dtype, K, C, gate_kind(g)), k.device)
    launch_kernel(
        wyfold_kkt_triton,
        grid.chunks * HV,
        tokens=with_strides(Tokens, k=k, beta=beta, L=out),
        gate=with_strides(Gate, g=g, clamp=FLOOR),
        packing=Packing(cu=grid.cu, first=grid.first, sequence=grid.sequence),
        N=grid.sequences,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        H=H,
        HV=HV,
        K=K,
        BT=C,
        BK=min(tile_width(K), config.blocks["BK"]),
        BF=FAR,
        PACKED=grid.cu is not None,
        OP=operand(operand_dtype),
        PRECISION=precision(operand_dtype),
        EXACT=exact(operand_dtype),
        **gates,
        **config.options(contract=contracts(operand_dtype)),
    )


def launch_key(dtype: torch.dtype, K: int, chunk_size: int, gate: str) -> LaunchKey:
    """Launch configuration key."""
    return LaunchKey(dtype_word(dtype), K, C=chunk_size, gate=gate)


class Tokens(NamedTuple):
    """Kernel argument: keys, strengths and the result L, each with its strides."""

    k: Any
    s_k: Any
    beta: Any
    s_beta: Any
    L: Any
    s_L: Any
    end: None = None


@triton.jit(do_not_specialize=["N", "T", "per_sequence"])
def wyfold_kkt_triton(
    tokens,
    gate,
    packing,
    N,
    T,
    per_sequence,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BF: tl.constexpr,
    PACKED: tl.constexpr,
    GATE: tl.constexpr,
    SCALAR: tl.constexpr,
    CHANNEL: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One program computes the rows of L for a chunk of one value head."""
    i_tile = tl.program_id(0).to(tl.int64)
    i_c, i_hv = i_tile // HV, i_tile % HV
    i_h = i_hv // (HV // H)
    i_n, _first, b, t, rows = chunk_span(i_c, packing, T, per_sequence, PACKED, BT)
    at = TokenRows(b, t, rows)
    if PACKED:
        if i_n == N:
            store_tokens(tokens.L, tokens.s_L, at, i_hv, 0, tl.zeros((BT, BT), tl.float32), BT)
            return
    # beta and a scalar gate are loaded before the keys: after the products their latency would be exposed.
    b_beta = load_token_scalars(tokens.beta, tokens.s_beta, at, i_hv, BT)
    if CHANNEL:
        b_J = _channel_gram(tokens, gate, at, i_h, i_hv, tl.minimum(T, 0), K, BT, BK, BF, EXACT)
    else:
        _raw, b_g = load_gate(gate, at, i_hv, 0, GATE, "given", K, BT, BK)
        b_J, b_rest = tl.zeros((BT, BT), tl.float32), tl.zeros((BT, BT), tl.float32)
        for column in range(0, K, BK):
            b_k = load_tokens(tokens.k, tokens.s_k, at, i_h, column, K, BT, BK)
            b_J, b_rest = self_products(b_k, b_J, b_rest, OP, PRECISION)
        b_J = self_sum(b_J, b_rest, OP, PRECISION)
        if SCALAR:
            b_J = b_J * interval_decay(b_g, BT)
    b_L = b_J * b_beta[:, None]
    o = tl.arange(0, BT)
    # Masked last: a beta that is not finite must not reach entries that are zero by definition.
    store_tokens(tokens.L, tokens.s_L, at, i_hv, 0, tl.where(o[:, None] > o[None, :], b_L, 0.0), BT)


@triton.jit
def _channel_gram(
    tokens,
    gate,
    at,
    i_h,
    i_hv,
    opaque_zero,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BF: tl.constexpr,
    EXACT: tl.constexpr,
):
    """J under a channel gate; undefined where s >= r.   [BT, BT], [r, s]

    Args:
        opaque_zero: As of `load_sub_chunks`.
    """
    NB: tl.constexpr = BT // 16
    b_JT, b_least = tl.zeros((NB, BT, 16), tl.float32), tl.zeros((NB, BK), tl.float32)
    b_k = load_sub_chunks(tokens.k, tokens.s_k, at, i_h, 0, opaque_zero, K, BT, BK)
    b_g = load_sub_chunks(gate.g, gate.s_g, at, i_hv, 0, opaque_zero, K, BT, BK)
    for column in range(0, K, BK):
        # The next slice is loaded during this one's products. Carrying it through the loop also hides the keys' width
        # from the compiler, which would choose the operands' layout by it
        # (docs/facts/compilers.md, TRITON-10).
        more = tl.where(column + BK < K, at.rows, 0)
        b_k_next = load_sub_chunks(
            tokens.k, tokens.s_k, TokenRows(at.b, at.t, more), i_h, column + BK, opaque_zero, K, BT, BK
        )
        b_g_next = load_sub_chunks(
            gate.g, gate.s_g, TokenRows(at.b, at.t, more), i_hv, column + BK, opaque_zero, K, BT, BK
        )
        b_P, b_x, b_last, b_x_last, b_between = exact_sums(b_g, gate.clamp, NB)
        b_least = tl.minimum(b_least, b_last)
        b_JT = add_key_gram(b_JT, b_k.to(tl.float32), b_P, b_x, b_last, b_x_last, b_between, NB, EXACT)
        b_k, b_g = b_k_next, b_g_next
    if beyond_reach(tl.min(b_least)):
        for column in range(0, K, BF):
            b_far = load_sub_chunks(tokens.k, tokens.s_k, at, i_h, column, opaque_zero, K, BT, BF).to(tl.float32)
            b_g_far = load_sub_chunks(gate.g, gate.s_g, at, i_hv, column, opaque_zero, K, BT, BF)
            b_P, b_x, b_last, b_x_last, b_between = exact_sums(b_g_far, gate.clamp, NB)
            b_JT = add_far_key_gram(b_JT, b_far, b_P, b_x, b_last, b_x_last, b_between, NB, EXACT)
    return tl.trans(b_JT.permute(1, 0, 2).reshape(BT, BT))
