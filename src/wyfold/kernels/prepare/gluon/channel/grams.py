"""Products of keys with keys and queries, decayed between their tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from wyfold.kernels.prepare.gluon.channel.arguments import BK, NEAREST, REACH, SHIFT
from wyfold.kernels.prepare.gluon.channel.erase_gate import erasing_rows, load_erase_gate
from wyfold.tile.dot.gluon import bf16_parts, exp2, stack_rows
from wyfold.tile.index.gluon import barrier, reinterpret, tma_store


class Grams(NamedTuple):
    """Products of keys with keys and queries, of each warp's 16 rows.

    Attributes:
        kk_own, kq_own: [4, 16, 16] with the warp's own sub-chunk.
        gram_1, gram_2, gram_3: [BT, 32] with the keys, then the queries, of a later sub-chunk; [BT, 16], with the
            queries alone, if writes erase nothing. kk_own is then zeros.
        qk: [BT] <q, k> of each row.
    """

    kk_own: Any
    kq_own: Any
    gram_1: Any
    gram_2: Any
    gram_3: Any
    qk: Any


@gluon.jit
def decayed_grams(
    x_qd, x_kd, tokens, at, h, smem, tile, rows, anchors, erase,
    FULL: gl.constexpr, NORM: gl.constexpr, ROWS: gl.constexpr, ERASES: gl.constexpr,
    BT: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """Compute the grams, a slice of channels after the other, and replace keys and queries by decayed ones.

    The decayed rows are stored by TMA, and the norms to tokens.norms. The pairs of keys from which E is computed
    overwrite the sums of gates. If writes erase nothing, keys are decayed to the chunk's end: they are E.

    Args:
        at, h: Tokens of the chunk, and the head of their erase gate.
        erase: First slice of its channels.
    """
    HALF: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    LB: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    LN: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    LJ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32 if ERASES else 16, 8])
    ROW: gl.constexpr = gl.SliceLayout(1, LB)
    NB: gl.constexpr = K // BK
    k_slices = reinterpret(smem.keys, gl.bfloat16, [NB, BT, BK], HALF)
    q_slices = reinterpret(smem.queries, gl.bfloat16, [NB, BT, BK], HALF)
    r_k, r_q = gl.full([BT], 1.0, gl.float32, ROW), gl.full([BT], 1.0, gl.float32, ROW)
    if NORM:
        r_k = reciprocal_norm(k_slices, rows, BT, NB, FULL, LB)
        r_q = reciprocal_norm(q_slices, rows, BT, NB, FULL, LB)
        o_norm = tile.to(gl.int64) * (2 * BT) + gl.arange(0, BT, layout=ROW)
        gl.store(tokens.norms + o_norm, r_q)
        gl.store(tokens.norms + o_norm + BT, r_k)
    barrier()

    kk_own, kq_own = gl.zeros([4, 16, 16], gl.float32, LN), gl.zeros([4, 16, 16], gl.float32, LN)
    gram_1, gram_2, gram_3 = zero_gram(LJ, BT, ERASES), zero_gram(LJ, BT, ERASES), zero_gram(LJ, BT, ERASES)
    qk = gl.zeros([BT], gl.float32, ROW)
    for c in range(NB):
        next_erase = load_erase_gate(tokens, at, h, c + 1, FULL, BT, K)
        kk_own, kq_own, gram_1, gram_2, gram_3, qk = _add_slice(
            kk_own, kq_own, gram_1, gram_2, gram_3, qk, c, k_slices, q_slices, r_k, r_q, smem, rows, anchors, tokens,
            erase, FULL, NORM, ROWS, ERASES, BT, NB,
        )  # fmt: skip
        erase = next_erase
        # The previous slice: the fence above covers its stores too.
        if c > 0:
            tma_store(x_kd, [tile * BT, BK * (c - 1)], k_slices.index(c - 1))
            tma_store(x_qd, [tile * BT, BK * (c - 1)], q_slices.index(c - 1))
    fence_async_shared()
    barrier()
    tma_store(x_kd, [tile * BT, BK * (NB - 1)], k_slices.index(NB - 1))
    tma_store(x_qd, [tile * BT, BK * (NB - 1)], q_slices.index(NB - 1))
    return Grams(kk_own, kq_own, gram_1, gram_2, gram_3, qk)


@gluon.jit
def _add_slice(
    kk_own, kq_own, gram_1, gram_2, gram_3, qk, c, k_slices, q_slices, r_k, r_q, smem, rows, anchors, tokens, erase,
    FULL: gl.constexpr, NORM: gl.constexpr, ROWS: gl.constexpr, ERASES: gl.constexpr,
    BT: gl.constexpr, NB: gl.constexpr,
):  # fmt: skip
    """Add slice c of the channels to the grams, and replace it by its decayed rows.

    Keys and queries of each warp's sub-chunk meet themselves, and three later sub-chunks.
    """
    HALF: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    FULL32: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    # Layouts: rows of a warp's own sub-chunk (LB, LN), and accumulators of a later sub-chunk's rows (LJ).
    LB: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    LN: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    BLOCK: gl.constexpr = 32 if ERASES else 16
    LJ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 8])
    ROW: gl.constexpr = gl.SliceLayout(1, LB)
    # Swizzled so that one access reads pairs of channels of eight rows without bank conflicts: groups of four rows
    # are 32 bytes apart.
    P = reinterpret(smem.gates, gl.float32, [NB, BT, BK], gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))
    # If writes erase nothing, each warp's decayed queries overwrite the sums from which it computed them.
    first = 0 if ERASES else c
    later = reinterpret(smem.gate_buffer, gl.float32, [NB * 16 // BLOCK, BT * BLOCK // 16, BK], FULL32).index(first)
    blocks = reinterpret(smem.gate_buffer, gl.float32, [4 * NB * 16 // BLOCK, BLOCK, BK], FULL32)
    pairs = reinterpret(smem.gates, gl.bfloat16, [NB, 2 * BT, BK], HALF)
    sums = P.index(c).load(LB)
    b_k, b_q = load_slice(k_slices, c, rows, FULL, LB), load_slice(q_slices, c, rows, FULL, LB)
    if NORM:
        b_k, b_q = b_k * r_k[:, None], b_q * r_q[:, None]
    lanes = partial_row_sums(gl.fma(b_q, b_k, 0.0))
    decay = exp2(sums)
    b_a = erasing_rows(b_k, tokens, erase, ROWS)
    kf, qf = b_a * decay, b_q * decay
    kk_own, kq_own = add_near_grams(kk_own, kq_own, b_k, b_a, b_q, kf, qf, sums, anchors, ERASES, LN)
    numbers = reinterpret(smem.border_decays, gl.float32, [NB, 16, BK], FLAT).index(c)
    rest = reinterpret(smem.rest_sums, gl.float32, [NB, 4, BK], FLAT).index(c)
    kt = b_k * exp2(broadcast_to_rows(rest, 0, 4, LB, LN) - sums)
    if ERASES:
        later.store(stack_sub_chunks(tf32_channel_order(kf, BT), tf32_channel_order(qf, BT)))
    else:
        later.store(tf32_channel_order(qf, BT))
    before = broadcast_to_rows(numbers, 8, 4, LB, LN)
    kd, qd = (kf * before).to(gl.bfloat16), (qf * before).to(gl.bfloat16)
    kt_1 = kt * broadcast_to_rows(numbers, 2, 1, LB, LN)
    fence_async_shared()
    barrier()
    gram_1 = add_far_grams(gram_1, kt_1, blocks.index(4 * first + 1), LJ, BT)
    gram_2 = add_far_grams(gram_2, kt * broadcast_to_rows(numbers, 0, 4, LB, LN), blocks.index(4 * first + 2), LJ, BT)
    gram_3 = add_far_grams(gram_3, kt * broadcast_to_rows(numbers, 4, 4, LB, LN), blocks.index(4 * first + 3), LJ, BT)
    qk += gl.convert_layout(gl.sum(lanes, axis=1), ROW, assert_trivial=True)
    out = kt * broadcast_to_rows(numbers, 12, 4, LB, LN)
    high, low = bf16_parts(out)
    gram_1, gram_2, gram_3 = warpgroup_mma_wait(0, deps=[gram_1, gram_2, gram_3])
    k_slices.index(c).store(kd if ERASES else out.to(gl.bfloat16))
    q_slices.index(c).store(qd)
    if ERASES:
        pairs.index(c).store(stack_rows(high, low))
    barrier()
    return kk_own, kq_own, gram_1, gram_2, gram_3, qk


@gluon.jit
def broadcast_to_rows(numbers, j: gl.constexpr, count: gl.constexpr, LB: gl.constexpr, LN: gl.constexpr):
    """Broadcast `count` (4 or 1) numbers per channel, from row j on, to the 16 rows of every sub-chunk.   [64, BK]"""
    x = numbers.slice(j, count).load(gl.SliceLayout(1, LN))
    x, _ = gl.broadcast(gl.expand_dims(x, 1), gl.zeros([4, 16, BK], gl.float32, LN))
    return gl.convert_layout(x.reshape((64, BK)), LB, assert_trivial=True)


@gluon.jit
def load_slice(slices, i, rows, FULL: gl.constexpr, LB: gl.constexpr):
    """Load slice i of the channels of k or q; zero past the last token.   [BT, BK]"""
    x = gl.convert_layout(slices.index(i).load(gl.DotOperandLayout(0, LB, 2)), LB, assert_trivial=True)
    o_s = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, LB))
    x = x if FULL else gl.where((o_s < rows)[:, None], x, gl.zeros(x.shape, gl.bfloat16, LB))
    return x.to(gl.float32)


@gluon.jit
def reciprocal_norm(slices, rows, BT: gl.constexpr, NB: gl.constexpr, FULL: gl.constexpr, LB: gl.constexpr):
    """(sum x^2 + 1e-6)^(-1/2) of each row of k or q.   [BT]"""
    squares = gl.zeros([BT, BK], gl.float32, LB)
    for c in gl.static_range(NB):
        x = load_slice(slices, c, rows, FULL, LB)
        squares = gl.fma(x, x, squares)
    return gl.rsqrt(gl.sum(squares, axis=1) + 1e-6)


@gluon.jit
def partial_row_sums(x):
    """Partial row sums of the four lanes that hold a row.   [BT, BK] -> [BT, 4]"""
    x = gl.permute(x.reshape((x.shape[0], BK // 8, 4, 2)), (0, 2, 1, 3))
    return gl.sum(x.reshape((x.shape[0], 4, BK // 4)), axis=2)


@gluon.jit
def tf32_channel_order(x, BT: gl.constexpr):
    """Reorder channels so that a TF32 product reads them from the threads that hold them; moves no data.   [BT, BK]

    Of 8 channels, thread t holds 2 t and 2 t + 1, and the product reads t and t + 4 from it.
    """
    return gl.permute(x.reshape((BT, BK // 8, 4, 2)), (0, 1, 3, 2)).reshape((BT, BK))


@gluon.jit
def add_near_grams(kk, kq, b_k, b_a, b_q, kf, qf, sums, anchors, ERASES: gl.constexpr, LN: gl.constexpr):
    """Add some channels to the grams of every sub-chunk with itself, [sub-chunk, s, r]; valid where s <= r."""
    if anchors == 1:
        kk, kq = _add_sub_chunk_grams(kk, kq, b_k * exp2(2.0 * NEAREST - sums), kf, qf, ERASES, LN)
    else:
        for anchor in range(anchors):
            # Each anchor takes the keys in its reach. Other keys are zeros, so the products with them add nothing.
            shifted, top = sums + anchor * REACH, SHIFT + 1.0
            decay = exp2(gl.minimum(shifted, top + NEAREST))
            in_reach = (sums < top - anchor * REACH) & (sums >= top - (anchor + 1) * REACH)
            key_decay = exp2(gl.where(in_reach, 2.0 * NEAREST - shifted, -1024.0))
            kk, kq = _add_sub_chunk_grams(kk, kq, b_k * key_decay, b_a * decay, b_q * decay, ERASES, LN)
    return kk, kq


@gluon.jit
def _add_sub_chunk_grams(kk, kq, ks, kf, qf, ERASES: gl.constexpr, LN: gl.constexpr):
    """kk + ks kf^T, if writes erase, and kq + ks qf^T of every sub-chunk, in TF32."""
    A: gl.constexpr = gl.DotOperandLayout(0, LN, 1)
    B: gl.constexpr = gl.DotOperandLayout(1, LN, 1)
    a = gl.convert_layout(tf32_channel_order(ks, 64).reshape((4, 16, BK)), A, assert_trivial=True)
    b_k = gl.convert_layout(
        gl.permute(tf32_channel_order(kf, 64).reshape((4, 16, BK)), (0, 2, 1)), B, assert_trivial=True
    )
    b_q = gl.convert_layout(
        gl.permute(tf32_channel_order(qf, 64).reshape((4, 16, BK)), (0, 2, 1)), B, assert_trivial=True
    )
    if ERASES:
        kk = mma_v2(a, b_k, kk, input_precision="tf32")
    return kk, mma_v2(a, b_q, kq, input_precision="tf32")


@gluon.jit
def stack_sub_chunks(x, y):
    """Interleave sub-chunks: 16 rows of x, then 16 rows of y, and so on.   [2 BT, BK]"""
    gram = gl.join(x, y).reshape((4, 16, BK, 2))
    return gl.permute(gram, (0, 3, 1, 2)).reshape((2 * x.shape[0], BK))


@gluon.jit
def zero_gram(LJ: gl.constexpr, BT: gl.constexpr, ERASES: gl.constexpr):
    return gl.zeros([BT, 32 if ERASES else 16], gl.float32, LJ)


@gluon.jit
def add_far_grams(gram, ks, rows, LJ: gl.constexpr, BT: gl.constexpr):
    """Add some channels to the grams of all rows s with a later sub-chunk's rows r; the product is asynchronous.

    Columns are the sub-chunk's 16 keys, if writes erase, then its 16 queries.
    """
    a = gl.convert_layout(tf32_channel_order(ks, BT), gl.DotOperandLayout(0, LJ, 1), assert_trivial=True)
    return warpgroup_mma(a, rows.permute((1, 0)), gram, is_async=True)


@gluon.jit
def split_key_query(gram, LB: gl.constexpr, BT: gl.constexpr):
    """Split a gram's 32 columns into those of keys and of queries; moves no data."""
    kk, kq = gl.split(gl.permute(gram.reshape((BT, 2, 16)), (0, 2, 1)))
    return gl.convert_layout(kk, LB, assert_trivial=True), gl.convert_layout(kq, LB, assert_trivial=True)


@gluon.jit
def gram_columns(near, later, j: gl.constexpr, LB: gl.constexpr):
    """The 16 columns of sub-chunk j of a gram: `near` where s is in the same sub-chunk, `later` elsewhere."""
    o_s = gl.arange(0, near.shape[0], layout=gl.SliceLayout(1, LB))
    return gl.where((o_s // 16 == j)[:, None], near, later)
