"""`kkt` in Triton: one program per chunk and value head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wyfold.runtime.bound import launched
from wyfold.runtime.chunks import ChunkGrid
from wyfold.runtime.launch import dtype_word, tile_width, tuned
from wyfold.tile.decay.triton import FLOOR, add_key_gram, decay_key_gram, gate_kind, gram_levels, load_gate
from wyfold.tile.dot.triton import contracts, exact, operand, precision
from wyfold.tile.index.triton import chunk_span, load_token_scalars, load_tokens, store_tokens, strides


def kkt(k: Tensor, beta: Tensor, g: Tensor | None, grid: ChunkGrid, out: Tensor) -> None:
    """Write L to out, and zeros past a packed batch's last boundary.

    Args:
        k: [B, T, H, K], any strides.
        beta: [B, T, HV].
        g: [B, T, HV] or [B, T, HV, K]. Natural-log decay per token, <= 0. None: no decay.
        grid: The call's chunk grid.
        out: [B, T, HV, C], any strides.
    """
    (H, K), HV, C = k.shape[2:], beta.shape[2], grid.chunk_size
    gate = gate_kind(g)
    # Keys of 16 bits are their own operands; decayed ones would lose what the result is asked for.
    rounded = k.dtype != torch.float32 and gate != "channel"
    config = tuned("kkt.triton", launch_key(k.dtype, K, C, gate), k.device)
    launched(
        wyfold_kkt_triton,
        grid.chunks * HV,
        k,
        k.stride(),
        beta,
        beta.stride(),
        g,
        strides(g),
        out,
        out.stride(),
        grid.cu,
        grid.first,
        grid.sequence,
        grid.sequences,
        grid.tokens,
        grid.per_sequence,
        FLOOR,
        H=H,
        HV=HV,
        K=K,
        BT=C,
        BK=min(tile_width(K), config.blocks["BK"]),
        PACKED=grid.cu is not None,
        GATE=gate,
        LEVELS=gram_levels(gate, C),
        OP=operand(k.dtype) if rounded else tl.float32,
        PRECISION=precision(k.dtype) if rounded else exact(torch.float32),
        **config.options(contract=contracts(k.dtype)),
    )


def launch_key(dtype: torch.dtype, K: int, chunk_size: int, gate: str) -> str:
    """What a launch configuration depends on."""
    return f"{dtype_word(dtype)} K{K} C{chunk_size} {gate}"


@triton.jit(do_not_specialize=["N", "T", "per_sequence", "floor"])
def wyfold_kkt_triton(
    p_k,
    s_k,
    p_beta,
    s_beta,
    p_g,
    s_g,
    p_L,
    s_L,
    p_cu,
    p_first,
    p_sequence,
    N,
    T,
    per_sequence,
    floor,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    PACKED: tl.constexpr,
    GATE: tl.constexpr,
    LEVELS: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program owns a chunk of one value head: its keys, and the rows of L at its tokens."""
    i_tile = tl.program_id(0).to(tl.int64)
    i_c, i_hv = i_tile // HV, i_tile % HV
    i_n, _first, b, t, rows = chunk_span(i_c, p_cu, p_first, p_sequence, T, per_sequence, PACKED, BT)
    if PACKED:
        if i_n == N:
            store_tokens(p_L, s_L, b, t, i_hv, 0, rows, tl.zeros((BT, BT), tl.float32), BT, BT, BT)
            return
    # Both asked for before the keys: behind the products they would be waited for by themselves.
    b_beta = load_token_scalars(p_beta, s_beta, b, t, i_hv, rows, BT)
    _raw, b_gate = load_gate(p_g, s_g, None, None, b, t, i_hv, 0, rows, 0.0, floor, GATE, "given", K, BT, BK)
    b_J = tl.zeros((BT, BT), tl.float32)
    for level in range(LEVELS):
        b_level, b_rest = tl.zeros((BT, BT), tl.float32), tl.zeros((BT, BT), tl.float32)
        for column in range(0, K, BK):
            b_k = load_tokens(p_k, s_k, b, t, i_hv // (HV // H), column, rows, K, BT, BK)
            _raw, b_g = load_gate(p_g, s_g, None, None, b, t, i_hv, column, rows, 0.0, floor, GATE, "given", K, BT, BK)
            b_level, b_rest = add_key_gram(b_level, b_rest, b_k, b_g, level, GATE, BT, OP, PRECISION)
        b_J += decay_key_gram(b_level, b_rest, b_gate, level, GATE, BT, OP, PRECISION)
    b_L = b_J * b_beta[:, None]
    o = tl.arange(0, BT)
    # Selected last: a strength that is not finite must not reach what is zero by definition.
    store_tokens(p_L, s_L, b, t, i_hv, 0, rows, tl.where(o[:, None] > o[None, :], b_L, 0.0), BT, BT, BT)
