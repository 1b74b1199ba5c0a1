"""Products of a chunk's keys with its keys and queries, for rows in reach of the start of their half of the chunk."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from wyfold.kernels.prepare.gluon.channel.arguments import BK
from wyfold.kernels.prepare.gluon.channel.erase_gate import erasing_rows, load_erase_gate
from wyfold.kernels.prepare.gluon.channel.gates import sum_sub_chunk_gates, sums_of
from wyfold.kernels.prepare.gluon.channel.grams import decayed_grams, load_bfloat16, store_norms
from wyfold.kernels.prepare.gluon.channel.smem import load_again
from wyfold.tile.dot.gluon import bf16_parts, exp2, stack_rows
from wyfold.tile.index.gluon import barrier, reinterpret, tma_store
from wyfold.tile.inverse.gluon import concat4_columns, join4_columns, split4_columns


class Grams(NamedTuple):
    """Products of keys s with keys and queries r.

    Attributes:
        kk, kq: [BT, BT], valid where s < r.
        qk: [BT] <q, k> of each row.
        r_k, r_q: [BT] Reciprocal norms of keys and queries, or ones.
    """

    kk: Any
    kq: Any
    qk: Any
    r_k: Any
    r_q: Any


@gluon.jit
def half_grams(
    x_qd, x_kd, tokens, at, h, smem, tile, rows,
    FULL: gl.constexpr, NORM: gl.constexpr, ROWS: gl.constexpr, BT: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """Compute the grams, and replace keys and queries by decayed ones, which are stored by TMA; also stores the norms.

    Pairs of keys overwrite the sums: those for rows of the second half, from which E is computed. Rows overwrite the
    gates. What belongs to rows out of reach may be anything.

    Args:
        at, h: Tokens of the chunk, and the head of their erase gate.
    """
    HALF: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    LB: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    LN: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, LB)
    NB: gl.constexpr = K // BK
    k_slices = reinterpret(smem.keys, gl.bfloat16, [NB, BT, BK], HALF)
    q_slices = reinterpret(smem.queries, gl.bfloat16, [NB, BT, BK], HALF)
    P = sums_of(smem, K, [1, 0])
    r_k, r_q = store_norms(tokens, smem, tile, rows, FULL, NORM, BT, K)
    barrier()
    sums, keys, queries = _none(), _none(), _none()
    for c in gl.static_range(NB):
        sums = sums + (P.index(c).load(LB),)
        keys = keys + (load_bfloat16(k_slices, c, rows, FULL, LB),)
        queries = queries + (load_bfloat16(q_slices, c, rows, FULL, LB),)
    barrier()
    products = gl.zeros([BT, BK], gl.float32, LB)
    scaled_k, scaled_q, kd, qd = _none(), _none(), _none(), _none()
    highs, lows, late_highs, late_lows = _none(), _none(), _none(), _none()
    for c in gl.static_range(NB):
        b_k, b_q = keys[c].to(gl.float32), queries[c].to(gl.float32)
        if NORM:
            b_k, b_q = b_k * r_k[:, None], b_q * r_q[:, None]
        products = gl.fma(b_q, b_k, products)
        b_a = erasing_rows(b_k, tokens, load_erase_gate(tokens, at, h, c, FULL, BT, K), ROWS)
        row_k, row_q, high, low = _scaled(b_a, b_q, b_k, sums[c])
        numbers = reinterpret(smem.border_decays, gl.float32, [NB, 16, BK], FLAT).index(c)
        of_rows, of_keys = _scales(numbers, 0, LB, LN), _scales(numbers, 4, LB, LN)
        scaled_k, scaled_q = scaled_k + (row_k,), scaled_q + (row_q,)
        kd, qd = kd + (bf16_product(row_k, of_rows),), qd + (bf16_product(row_q, of_rows),)
        highs, lows = highs + (high,), lows + (low,)
        late_highs, late_lows = late_highs + (bf16_product(high, of_keys),), late_lows + (bf16_product(low, of_keys),)
    high, low = concat4_columns(*highs), concat4_columns(*lows)
    halves = reinterpret(smem.gate_buffer, gl.bfloat16, [2 * BT, K], HALF)
    pairs = reinterpret(smem.gates, gl.bfloat16, [2 * BT, K], HALF)
    # One store a tile: between stores to parts of it the compiler would put barriers.
    halves.store(stack_halves(concat4_columns(*scaled_k), concat4_columns(*scaled_q)))
    reinterpret(smem.keys, gl.bfloat16, [BT, K], HALF).store(concat4_columns(*kd))
    reinterpret(smem.queries, gl.bfloat16, [BT, K], HALF).store(concat4_columns(*qd))
    pairs.store(stack_rows(concat4_columns(*late_highs), concat4_columns(*late_lows)))
    fence_async_shared()
    barrier()
    early, late = _multiply(high, low, pairs, halves, BT)
    for c in gl.static_range(NB):
        tma_store(x_kd, [tile * BT, BK * c], k_slices.index(c))
        tma_store(x_qd, [tile * BT, BK * c], q_slices.index(c))
    qk = gl.convert_layout(gl.sum(products, axis=1), ROW, assert_trivial=True)
    early, late = warpgroup_mma_wait(0, deps=[early, late])
    kk_0, kk_1, kq_0, kq_1 = split4_columns(early, BT, LB)
    kk_2, kk_3, kq_2, kq_3 = split4_columns(late, BT, LB)
    kk, kq = join4_columns(kk_0, kk_1, kk_2, kk_3, BT, LC), join4_columns(kq_0, kq_1, kq_2, kq_3, BT, LC)
    return Grams(kk, kq, qk, r_k, r_q)


@gluon.jit
def _none():
    """No tiles, to which slices of channels are added."""
    return ()


@gluon.jit
def _scaled(b_a, b_q, b_k, sums):
    """Erasing rows and queries times 2^sums in bfloat16, and keys times 2^-sums in two bfloat16 parts."""
    decay = exp2(sums)
    high, low = bf16_parts(b_k * exp2(-sums))
    return (b_a * decay).to(gl.bfloat16), (b_q * decay).to(gl.bfloat16), high, low


@gluon.jit
def _multiply(high, low, pairs, halves, BT: gl.constexpr):
    """Products of all keys with the rows of each half, 32 keys and 32 queries; the products are asynchronous."""
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, LC, 2)
    high, low = gl.convert_layout(high, A, assert_trivial=True), gl.convert_layout(low, A, assert_trivial=True)
    early_rows, late_rows = halves.slice(0, BT).permute((1, 0)), halves.slice(BT, BT).permute((1, 0))
    early, late = gl.zeros([BT, BT], gl.float32, LC), gl.zeros([BT, BT], gl.float32, LC)
    early = warpgroup_mma(low, early_rows, early, use_acc=False, is_async=True)
    early = warpgroup_mma(high, early_rows, early, is_async=True)
    late = warpgroup_mma(pairs.slice(BT, BT), late_rows, late, use_acc=False, is_async=True)
    return early, warpgroup_mma(pairs.slice(0, BT), late_rows, late, is_async=True)


@gluon.jit
def stack_halves(x, y):
    """Interleave halves: 32 rows of x, then 32 rows of y, and so on.   [2 BT, K]"""
    both = gl.join(x, y).reshape((2, x.shape[0] // 2, x.shape[1], 2))
    return gl.permute(both, (0, 3, 1, 2)).reshape((2 * x.shape[0], x.shape[1]))


@gluon.jit
def _scales(numbers, j: gl.constexpr, LB: gl.constexpr, LN: gl.constexpr):
    """Numbers j to j + 3 of each channel in bfloat16, one for the 16 rows of each sub-chunk.   [64, BK]"""
    x = numbers.slice(j, 4).load(gl.SliceLayout(1, LN)).to(gl.bfloat16)
    x, _ = gl.broadcast(gl.expand_dims(x, 1), gl.zeros([4, 16, BK], gl.bfloat16, LN))
    return gl.convert_layout(x.reshape((64, BK)), LB, assert_trivial=True)


@gluon.jit
def bf16_product(x, y):
    """x y in bfloat16, two numbers at a time."""
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def erasing_grams(
    x_q, x_k, x_g, x_qd, x_kd, x_E, n, tokens, gate, at, T, i_hv, h, smem, G, i_tile, tile, rows, phase,
    SHARED: gl.constexpr, USE_TMA: gl.constexpr, FULL: gl.constexpr, ACTIVATION: gl.constexpr, NORM: gl.constexpr,
    ROWS: gl.constexpr, BT: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """The grams of a chunk whose first n rows are in reach.

    Args:
        at, i_hv, h: Tokens of the chunk, the value head, and the head of the erase gate.
        G: Gates, which are loaded once more if rows are out of reach.
        phase: Of the barriers.
        SHARED: Value heads of a key head.

    Returns:
        kk, kq, qk: As of `Grams`.
        phase: The barriers' phase now.
    """
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    kk, kq, qk, r_k, r_q = half_grams(x_qd, x_kd, tokens, at, h, smem, tile, rows, FULL, NORM, ROWS, BT, K)
    if n != BT:
        phase = load_again(x_q, x_k, x_g, tokens, gate, smem, G, at, T, i_hv, phase, SHARED, USE_TMA, K)
        anchors = sum_sub_chunk_gates(G, smem, gate, tokens.total, i_tile, i_hv, rows, FULL, ACTIVATION, True, K)
        barrier()
        far_kk, far_kq, _ = decayed_grams(
            x_qd, x_E, tokens, at, h, smem, tile, rows, anchors, r_k, r_q, FULL, NORM, ROWS, True, BT, K
        )
        in_reach = (gl.arange(0, BT, layout=gl.SliceLayout(0, LC)) < n)[None, :]
        kk, kq = gl.where(in_reach, kk, far_kk), gl.where(in_reach, kq, far_kq)
        fence_async_shared()
        barrier()
    return kk, kq, qk, phase
