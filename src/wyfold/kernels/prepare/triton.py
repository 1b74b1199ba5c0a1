"""`prepare` in Triton: one program per chunk and value head."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.records import Prepared
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import LaunchKey, dtype_word, tile_width, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.decay.channel.triton import (
    add_channel_grams,
    load_sub_chunk_gate,
    sub_chunk_sums,
    sums_after,
    sums_between,
)
from wyfold.tile.decay.triton import FLOOR, Gate, gate_flags, gate_kind, load_gate, running_sum, scalar_rows
from wyfold.tile.decay.triton.pairs import decayed_grams_transposed
from wyfold.tile.dot.triton import NARROWEST, contracts, exact, mm_exact, operand, precision, workspace
from wyfold.tile.index.triton import (
    Packing,
    TokenRows,
    chunk_span,
    load_tokens,
    store_tile,
    store_tokens,
    store_upper,
    strides,
)
from wyfold.tile.index.triton.blocks import load_token_block
from wyfold.tile.index.triton.descriptors import all_or_none, has_tma, token_descriptor
from wyfold.tile.index.triton.strength import Strength, load_strength
from wyfold.tile.index.triton.sub_chunks import load_sub_chunks, store_sub_chunks
from wyfold.tile.inverse.triton import inverse_transposed, inverse_transposed_whole, nonzero_beta
from wyfold.tile.norm.triton import reciprocal_norm


def prepare(
    q: Tensor,
    k: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    grid: ChunkGrid,
    options: DeltaOptions,
    o: Tensor,
    *,
    folded: bool,
    backward: bool,
    forward: bool = True,
    clear: bool = True,
) -> Prepared:
    """Compute the factors of every chunk from the caller's tensors.

    Args:
        q, k: [B, T, H, K], any strides.
        g: [B, T, HV] or [B, T, HV, K] gate of the call; None without a gate.
        beta: [B, T, HV] write strength of the call; None for 1.
        A_log, dt_bias: Gate parameters or None.
        grid: The call's chunk grid.
        options: Uses `qk_l2norm`, `activation`, `lower_bound`, `clamp`, `beta_logit`, `beta_most`, `chunk_size`,
            `erases`.
        o: [B, T, HV, V] output of the call; only tokens past a packed batch's last boundary are written, with zeros.
        folded: Whether the scans read E instead of W.
        backward: Whether `scan_bwd` and `summary_bwd` will read these.
        forward: Whether `scan` and `segment_summary` will.
        clear: Whether o is written at all; if not, any tensor of its shape may be passed.
    """
    (H, K), (HV, V), C = q.shape[2:], o.shape[2:], grid.chunk_size
    gate, channel = gate_kind(g), gate_flags(g)["CHANNEL"]
    tiles, whole = grid.chunks * HV, tile_width(K)
    found = empty(q, g, tiles, C, folded=folded, backward=backward, forward=forward)
    if clear and backward and grid.cu is not None:
        # The forward saves these tensors, and a registered operator must not return uninitialised memory. Not every
        # tile of a packed batch is written.
        for x in found:
            if x is not None:
                x.zero_()
    config = tuned("prepare.triton", launch_key(q.dtype, K, V, C, gate, folded), q.device)
    # With a channel gate, one warp per sub-chunk.
    warps = C // 16 if channel else config.warps
    BK = BE = whole
    if channel:
        BK, BE = min(whole, config.blocks["BK"]), min(max(whole, NARROWEST), config.blocks["BE"])
    written = found if found.W is not None else found._replace(W=found.F)
    rows = None
    # No TMA with a channel gate, which loads sub-chunks, and none for partial chunks. Row norms are reduced in the
    # layout of the load, which differs between TMA and pointer loads, and so would the bits.
    plain = not channel and not options.qk_l2norm and grid.cu is None and grid.tokens % C == 0
    if plain and has_tma(q.device):
        rows = all_or_none((q, k), [token_descriptor(x, C, whole) for x in (q, k)])
    x_q, x_k = rows or (q, k)
    launch_kernel(
        wyfold_prepare_triton,
        tiles,
        x_q=x_q,
        x_k=x_k,
        tokens=Tokens(s_q=q.stride(), s_k=k.stride(), o=o, s_o=o.stride()),
        gate=Gate(
            g=g,
            s_g=strides(g),
            A_log=A_log,
            dt_bias=dt_bias,
            lower_bound=options.lower_bound,
            clamp=options.clamp or FLOOR,
        ),
        strength=Strength(beta=beta, s_beta=strides(beta), most=options.beta_most, erases=float(options.erases)),
        factors=written,
        packing=Packing(cu=grid.cu, first=grid.first, sequence=grid.sequence),
        N=grid.sequences,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        clear=int(clear),
        # A runtime argument, so that both directions of the folded form share one compiled kernel.
        with_w=int(found.W is not None),
        SIZES=Sizes(H=H, HV=HV, K=K, V=V, BT=C, BK=BK, BE=BE, BV=tile_width(V), WARPS=warps, STAGES=config.stages),
        FLAGS=Flags(
            PACKED=grid.cu is not None,
            USE_TMA=rows is not None,
            GATE=gate,
            CHANNEL=channel,
            ACTIVATION=options.activation,
            NORM=options.qk_l2norm,
            LOGIT=options.beta_logit,
            WHOLE=config.blocks["BM"] >= C,
            OP=operand(q.dtype),
            PRECISION=precision(q.dtype),
            EXACT=exact(q.dtype),
        ),
        **{**config.options(contract=contracts(q.dtype)), "num_warps": warps},
    )
    return found


def empty(
    q: Tensor, g: Tensor | None, tiles: int, chunk_size: int, *, folded: bool, backward: bool, forward: bool = True
) -> Prepared:
    """Allocate the factors of `tiles` tiles without writing them; sizes depend on metadata alone."""
    C, K, channel = chunk_size, q.shape[-1], gate_kind(g) == "channel"
    stored, both = workspace(q.dtype), forward and backward and not folded
    upper = tiles, 3, C // 2, C // 2
    return Prepared(
        rows=q.new_empty(tiles, 4, C, dtype=torch.float32),
        total=q.new_empty(tiles, K if channel else 1, dtype=torch.float32),
        q=q.new_empty(tiles, C, K, dtype=stored) if channel else None,
        k=q.new_empty(tiles, C, K, dtype=stored) if channel else None,
        E=q.new_empty(tiles, C, K, dtype=stored) if folded else None,
        F=q.new_empty(upper, dtype=stored) if backward or folded else None,
        W=q.new_empty(upper, dtype=stored) if backward or not folded else None,
        FB=q.new_empty(upper, dtype=stored) if forward and not folded else None,
        rows_bwd=q.new_empty(tiles, 4, C, dtype=torch.float32) if both else None,
    )


def reads_folded(g: Tensor | None) -> bool:
    """Whether a call's scans read E, which saves a product per chunk, or W, which saves memory traffic."""
    return gate_kind(g) == "channel"


def launch_key(dtype: torch.dtype, K: int, V: int, chunk_size: int, gate: str, folded: bool) -> LaunchKey:
    """Launch configuration key."""
    return LaunchKey(dtype_word(dtype), K, V, C=chunk_size, gate=gate, form="EF" if folded else "WF")


class Tokens(NamedTuple):
    """Kernel argument: how the tokens lie in memory.

    Attributes:
        s_q, s_k: Strides of q and k.
        o, s_o: Output of the call, and its strides.
    """

    s_q: Any
    s_k: Any
    o: Any
    s_o: Any
    end: None = None


class Sizes(NamedTuple):
    """Constexprs: sizes of the call and of tiles.

    Attributes:
        H, HV, K, V, BT: Sizes of the call and of a chunk.
        BK, BE: Columns of a slice of K, for the grams and for E.
        BV: Width of a row of the output.
        WARPS, STAGES: Warps of a program, and slices in flight.
    """

    H: int
    HV: int
    K: int
    V: int
    BT: int
    BK: int
    BE: int
    BV: int
    WARPS: int
    STAGES: int


class Flags(NamedTuple):
    """Constexprs: variant of the kernel.

    Attributes:
        PACKED: Whether the batch is packed.
        USE_TMA: Whether q and k are descriptors.
        GATE, CHANNEL, ACTIVATION: Kind of the gate, and its activation; see `tile.decay`.
        NORM, LOGIT: Whether q and k are normalised, and whether beta is a logit.
        WHOLE: Whether a chunk is inverted as one block.
        OP, PRECISION, EXACT: Dtype and precision of products.
    """

    PACKED: bool
    USE_TMA: bool
    GATE: str
    CHANNEL: bool
    ACTIVATION: str
    NORM: bool
    LOGIT: bool
    WHOLE: bool
    OP: Any
    PRECISION: Any
    EXACT: str


@triton.jit(do_not_specialize=["N", "T", "per_sequence", "clear", "with_w"])
def wyfold_prepare_triton(
    x_q,
    x_k,
    tokens,
    gate,
    strength,
    factors,
    packing,
    N,
    T,
    per_sequence,
    clear,
    with_w,
    SIZES: tl.constexpr,
    FLAGS: tl.constexpr,
):
    """One program computes the factors of a chunk of one value head.

    With strength.erases 0 the keys read no state, and A is the identity.
    """
    H: tl.constexpr = SIZES.H
    HV: tl.constexpr = SIZES.HV
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BE: tl.constexpr = SIZES.BE
    BV: tl.constexpr = SIZES.BV
    WARPS: tl.constexpr = SIZES.WARPS
    STAGES: tl.constexpr = SIZES.STAGES
    PACKED: tl.constexpr = FLAGS.PACKED
    USE_TMA: tl.constexpr = FLAGS.USE_TMA
    GATE: tl.constexpr = FLAGS.GATE
    CHANNEL: tl.constexpr = FLAGS.CHANNEL
    ACTIVATION: tl.constexpr = FLAGS.ACTIVATION
    NORM: tl.constexpr = FLAGS.NORM
    LOGIT: tl.constexpr = FLAGS.LOGIT
    WHOLE: tl.constexpr = FLAGS.WHOLE
    OP: tl.constexpr = FLAGS.OP
    PRECISION: tl.constexpr = FLAGS.PRECISION
    EXACT: tl.constexpr = FLAGS.EXACT
    i_tile = tl.program_id(0).to(tl.int64)
    i_c, i_hv = i_tile // HV, i_tile % HV
    i_h = i_hv // (HV // H)
    i_n, _, b, t, rows = chunk_span(i_c, packing, T, per_sequence, PACKED, BT)
    at = TokenRows(b, t, rows, T)
    if PACKED:
        if i_n == N:
            if clear:
                store_tokens(tokens.o, tokens.s_o, at, i_hv, 0, tl.zeros((BT, BV), tl.float32), V)
            return

    o_r = tl.arange(0, BT)
    b_beta = load_strength(strength, at, i_hv, LOGIT, BT)
    # A 0 that the compiler cannot fold, for addresses in sub-chunks.
    opaque_zero = tl.minimum(T, 0)
    # Without a channel gate, the chunk's keys and gate stay in registers.
    b_keys, b_g = None, None
    if CHANNEL:
        b_rq, b_rk, b_qk = _row_products(x_q, tokens.s_q, x_k, tokens.s_k, at, i_h, K, BT, NORM)
        b_JT, b_PT = tl.zeros((BT // 16, BT, 16), tl.float32), tl.zeros((BT // 16, BT, 16), tl.float32)
        for column in tl.range(0, K, BK, num_stages=STAGES):
            b_q = load_sub_chunks(x_q, tokens.s_q, at, i_h, column, opaque_zero, K, BT, BK).to(tl.float32)
            b_k = load_sub_chunks(x_k, tokens.s_k, at, i_h, column, opaque_zero, K, BT, BK).to(tl.float32)
            if NORM:
                b_q *= b_rq.reshape(BT // 16, 16, 1)
                b_k *= b_rk.reshape(BT // 16, 16, 1)
            b_P, b_first, b_rest = sub_chunk_sums(
                load_sub_chunk_gate(gate, at, i_hv, column, opaque_zero, ACTIVATION, K, BT, BK)
            )
            b_between = sums_between(b_first, b_rest, BT // 16)
            b_JT, b_PT, b_qf, b_kf = add_channel_grams(b_JT, b_PT, b_q, b_k, b_k, b_P, b_rest, b_between, OP, PRECISION)
            i_i = tl.arange(0, BT // 16)[:, None, None]
            b_start = b_first + tl.sum(tl.where(i_i == 0, b_between, 0.0), axis=0)
            b_in = tl.exp2(b_start)[:, None]
            store_sub_chunks(factors.k, i_tile, column, b_kf * b_in, opaque_zero, K, BT, BK)
            store_sub_chunks(factors.q, i_tile, column, b_qf * b_in, opaque_zero, K, BT, BK)
            o_n, o_k = tl.arange(0, BT // 16)[:, None], column + tl.arange(0, BK)[None, :]
            last = (o_n == BT // 16 - 1) & (o_k < K)
            tl.store(factors.total + i_tile * K + (o_k + 0 * o_n), tl.exp2(b_start + b_rest), mask=last)
        b_JT, b_PT = b_JT.permute(1, 0, 2).reshape(BT, BT), b_PT.permute(1, 0, 2).reshape(BT, BT)
        before = o_r[:, None] < o_r[None, :]
        b_JT = tl.where(before, b_JT, 0.0)
        b_PT = tl.where(before, b_PT, tl.where(o_r[:, None] == o_r[None, :], b_qk[None, :], 0.0))
        # Only substitution reads it, no tile product.
        b_J = tl.trans(b_JT)
    else:
        b_q = load_token_block(x_q, tokens.s_q, at, i_h, 0, K, BT, BK, USE_TMA, USE_TMA)
        b_keys = load_token_block(x_k, tokens.s_k, at, i_h, 0, K, BT, BK, USE_TMA, USE_TMA)
        _, b_g = load_gate(gate, at, i_hv, 0, GATE, ACTIVATION, K, BT, BK)
        b_rq, b_rk = tl.full((BT,), 1.0, tl.float32), tl.full((BT,), 1.0, tl.float32)
        if NORM:
            b_rq, b_rk = reciprocal_norm(b_q), reciprocal_norm(b_keys)
        b_J, b_JT, b_PT = decayed_grams_transposed(b_q, b_keys, b_rq, b_rk, b_g, GATE, BT, OP, PRECISION)

    b_divisor = nonzero_beta(b_beta)
    b_weight = b_divisor * strength.erases
    if WHOLE:
        b_AT = inverse_transposed_whole(b_J * b_weight[:, None], b_JT * b_weight[None, :], BT, EXACT, WARPS)
    else:
        b_AT = inverse_transposed(b_J * b_weight[:, None], b_JT * b_weight[None, :], BT, EXACT, WARPS)
    if with_w:
        b_W = b_AT * b_divisor[:, None] * (1.0 / b_divisor)[None, :]
        store_upper(factors.W, i_tile, b_W, BT)
    b_FT = mm_exact(b_AT, b_PT, None, EXACT)
    if factors.F is not None:
        store_upper(factors.F, i_tile, b_FT, BT)
    if factors.FB is not None:
        store_upper(factors.FB, i_tile, b_FT * b_beta[:, None], BT)

    if CHANNEL:
        if factors.E is not None:
            for column in tl.range(0, K, BE, num_stages=STAGES):
                b_k = load_sub_chunks(x_k, tokens.s_k, at, i_h, column, opaque_zero, K, BT, BE).to(tl.float32)
                if NORM:
                    b_k *= b_rk.reshape(BT // 16, 16, 1)
                b_P, b_first, b_rest = sub_chunk_sums(
                    load_sub_chunk_gate(gate, at, i_hv, column, opaque_zero, ACTIVATION, K, BT, BE)
                )
                b_end = b_rest + sums_after(b_first + b_rest, BT // 16)
                b_kt = (b_k * tl.exp2(b_end[:, None] - b_P)).reshape(BT, BE)
                store_tile(factors.E, i_tile, 0, column, mm_exact(b_AT, b_kt, None, EXACT), BT, K, BT, BE)
        b_in, b_out = tl.full((BT,), 1.0, tl.float32), tl.full((BT,), 1.0, tl.float32)
        b_rk, b_rq = b_in, b_in
    else:
        b_in, b_out, total = scalar_rows(running_sum(b_g, GATE), GATE, BT)
        tl.store(factors.total + i_tile, total)
        if factors.E is not None:
            b_E = mm_exact(b_AT * (b_out * b_rk)[None, :], tl.cast(b_keys, tl.float32), None, EXACT)
            store_tile(factors.E, i_tile, 0, 0, b_E, BT, K, BT, BK)
    b_in_k, b_in_q, b_out = b_in * b_rk * strength.erases, b_in * b_rq, b_out * b_rk
    if factors.rows_bwd is not None:
        _store_rows(factors.rows_bwd, i_tile, b_in_k, b_in_q, b_out, b_beta, BT)
    if factors.FB is not None:
        b_out = b_beta * b_out
    _store_rows(factors.rows, i_tile, b_in_k, b_in_q, b_out, b_beta, BT)


@triton.jit
def _store_rows(p, i_tile, b_in_k, b_in_q, b_out, b_beta, BT: tl.constexpr):
    """Store a tile's four numbers per token, `Prepared.rows`."""
    p += i_tile * (4 * BT) + tl.arange(0, BT)
    tl.store(p, b_in_k)
    tl.store(p + BT, b_in_q)
    tl.store(p + 2 * BT, b_out)
    tl.store(p + 3 * BT, b_beta)


@triton.jit
def _row_products(x_q, s_q, x_k, s_k, at, h, K: tl.constexpr, BT: tl.constexpr, NORM: tl.constexpr):
    """Reciprocal norms of the rows of q and k (ones without NORM), and the normalised <q, k> of each row.   3 x [BT]"""
    BW: tl.constexpr = 64
    b_qq, b_kk, b_qk = tl.zeros((BT,), tl.float32), tl.zeros((BT,), tl.float32), tl.zeros((BT,), tl.float32)
    for column in range(0, K, BW):
        b_q = load_tokens(x_q, s_q, at, h, column, K, BT, BW).to(tl.float32)
        b_k = load_tokens(x_k, s_k, at, h, column, K, BT, BW).to(tl.float32)
        b_qk += tl.sum(b_q * b_k, axis=1)
        if NORM:
            b_qq += tl.sum(b_q * b_q, axis=1)
            b_kk += tl.sum(b_k * b_k, axis=1)
    if NORM:
        b_rq, b_rk = tl.rsqrt(b_qq + 1e-6), tl.rsqrt(b_kk + 1e-6)
        return b_rq, b_rk, b_qk * b_rq * b_rk
    else:
        ones = tl.full((BT,), 1.0, tl.float32)
        return ones, ones, b_qk
