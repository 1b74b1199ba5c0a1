"""The kernel of `low_rank_prepare` in Gluon for rules with two columns: chunks of 32, 128 channels a program.

A program has one head of 128 channels or two of 64. Products of 64 rows are of the columns, b above k in the first head
and k above b in the second, with the erasing rows and the queries:

    [b; k] [a; q]^T = [L^T, Pb^T; J^T, Pk^T]

so that the transposed grams of both heads' columns b are the rows of one tile. With A^T = (I - L^T)^-1, the product
[I; J^T] A^T is [A^T; R^T], and its products with Pb^T and with the columns are the other factors.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from wyfold.kernels.low_rank_prepare.gluon.channels import (
    LAYOUT,
    Place,
    channel_sums,
    column_factor,
    load_channels,
    row_factor,
    store_channels,
    upper_columns,
)
from wyfold.kernels.low_rank_prepare.gluon.fold import fold
from wyfold.tile.decay.channel.triton import REACH
from wyfold.tile.dot.gluon import bf16_parts, exp2
from wyfold.tile.index.gluon import barrier, clear_tokens, reinterpret
from wyfold.tile.index.triton import chunk_span


@gluon.jit(do_not_specialize=["N", "T", "per_sequence", "clear", "backward"])
def wyfold_low_rank_prepare_gluon(
    x_E,
    x_K,
    tokens,
    gate,
    factors,
    packing,
    o,
    s_o,
    N,
    T,
    per_sequence,
    clear,
    backward,
    SIZES: gl.constexpr,
    FLAGS: gl.constexpr,
):
    """One program computes the factors of a chunk of one or two value heads."""
    HV: gl.constexpr = SIZES.HV
    K: gl.constexpr = SIZES.K
    BT: gl.constexpr = SIZES.BT
    HEADS: gl.constexpr = 128 // K
    FULL: gl.constexpr = FLAGS.FULL
    ACTIVATION: gl.constexpr = FLAGS.ACTIVATION
    TF32: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    LG: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 8])
    pid = gl.program_id(0)
    i_c, i_hv = (pid // (HV // HEADS)).to(gl.int64), (pid % (HV // HEADS) * HEADS).to(gl.int64)
    i_n, _, b, t, rows = chunk_span(i_c, packing, T, per_sequence, FLAGS.PACKED, BT)
    at = Place(b, t, rows, 0)
    if FLAGS.PACKED:
        if i_n == N:
            if clear:
                for i in gl.static_range(HEADS):
                    clear_tokens(o, s_o, at, i_hv + i, SIZES.V, BT, SIZES.BV)
            return
    i_tile = i_c * HV + i_hv
    rows_smem = gl.allocate_shared_memory(gl.float32, [2 * BT, 128], TF32)
    columns_smem = gl.allocate_shared_memory(gl.float32, [2 * BT, 128], TF32)
    numbers = gl.allocate_shared_memory(gl.float32, [8 * 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))

    a = load_channels(tokens.a, tokens.s_a, at, i_hv, 0, FULL, HV // SIZES.H, K, BT)
    q = load_channels(tokens.q, tokens.s_q, at, i_hv, 0, FULL, HV // SIZES.H, K, BT)
    b_column, k_column = load_columns(tokens, at, i_hv, SIZES, FLAGS)
    before, sums, total = channel_sums(gate, at, i_hv, numbers, FULL, ACTIVATION, K, BT)
    store_channels(factors.total, None, i_tile * K, exp2(total), K, BT)
    a, q = a.to(gl.float32) * row_factor(before, 0), q.to(gl.float32) * row_factor(sums, 0)
    store_channels(factors.rows, BT, i_tile * (BT * K), a, K, BT)
    store_channels(factors.q, BT, i_tile * (BT * K), q, K, BT)
    rows_smem.store(stack_tiles(a, q))
    upper, lower = upper_columns(b_column, k_column, K)
    factor = column_factor(sums, 0)
    columns_smem.store(stack_tiles(upper.to(gl.float32) * factor, lower.to(gl.float32) * factor))
    fence_async_shared()
    barrier()
    # A head's products; the second is not used with one head.
    gram_0 = gl.zeros([2 * BT, 2 * BT], gl.float32, LG)
    gram_1 = gl.zeros([2 * BT, 2 * BT], gl.float32, LG)
    gram_0, gram_1 = add_grams(gram_0, gram_1, rows_smem, columns_smem, K, BT)
    # Loaded again: the compiler would keep float32 copies in registers. A zero that it cannot fold hides that these
    # are the same addresses.
    opaque_zero = gl.minimum(T, 0)
    b_column, k_column = load_columns(tokens, Place(b, t + opaque_zero, rows, 0), i_hv, SIZES, FLAGS)
    most = -gl.min(total, axis=0)
    # Rounded up: an anchor too many costs time, one too few loses a pair.
    anchors = gl.where(most > 0.0, most / REACH + 0.01, 0.0).to(gl.int32) + 1
    gram_0, gram_1 = warpgroup_mma_wait(0, deps=[gram_0, gram_1])
    if anchors == 1:
        barrier()
        store_pairs(columns_smem, b_column, k_column, sums, total, K, BT)
    else:
        # Everything is loaded again, so that the common case keeps nothing in registers for it.
        again = Place(b, t, rows, 2 * opaque_zero)
        gram_0, gram_1 = add_anchors(
            gram_0, gram_1, anchors, tokens, gate, again, i_hv, numbers, rows_smem, columns_smem, SIZES, FLAGS
        )
    fold(x_E, x_K, factors, i_tile, gram_0, gram_1, rows_smem, columns_smem, backward, K, BT)
    tma.store_wait(pendings=0)


@gluon.jit
def add_anchors(
    gram_0, gram_1, anchors, tokens, gate, at, h, numbers, rows, columns,
    SIZES: gl.constexpr, FLAGS: gl.constexpr,
):  # fmt: skip
    """Add the pairs that further anchors serve, and store the pairs of columns."""
    K: gl.constexpr = SIZES.K
    BT: gl.constexpr = SIZES.BT
    FULL: gl.constexpr = FLAGS.FULL
    ACTIVATION: gl.constexpr = FLAGS.ACTIVATION
    for anchor in range(1, anchors):
        barrier()
        gram_0, gram_1 = add_anchor(gram_0, gram_1, anchor, tokens, gate, at, h, numbers, rows, columns, SIZES, FLAGS)
    barrier()
    b, k = load_columns(tokens, at, h, SIZES, FLAGS)
    _before, sums, total = channel_sums(gate, at, h, numbers, FULL, ACTIVATION, K, BT)
    store_pairs(columns, b, k, sums, total, K, BT)
    return gram_0, gram_1


@gluon.jit
def store_pairs(columns, b, k, sums, total, K: gl.constexpr, BT: gl.constexpr):
    """Store pairs of the columns decayed to the chunk's end over the columns."""
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    pairs = reinterpret(columns, gl.bfloat16, [2, 2 * BT, 128], WIDE)
    upper, lower = upper_columns(b, k, K)
    rest = exp2(total_rows(total, sums) - sums)
    upper_high, upper_low = bf16_parts(rounded_product(upper.to(gl.float32), rest))
    lower_high, lower_low = bf16_parts(rounded_product(lower.to(gl.float32), rest))
    pairs.index(0).store(stack_tiles(upper_high, lower_high))
    pairs.index(1).store(stack_tiles(upper_low, lower_low))


@gluon.jit
def load_columns(tokens, at, h, SIZES: gl.constexpr, FLAGS: gl.constexpr):
    """Load both kinds of columns."""
    HV: gl.constexpr = SIZES.HV
    K: gl.constexpr = SIZES.K
    BT: gl.constexpr = SIZES.BT
    FULL: gl.constexpr = FLAGS.FULL
    b = load_channels(tokens.b, tokens.s_b, at, h, 0, FULL, HV // SIZES.HB, K, BT)
    k = load_channels(tokens.k, tokens.s_k, at, h, 0, FULL, HV // SIZES.H, K, BT)
    return b, k


@gluon.jit
def add_anchor(
    gram_0, gram_1, anchor, tokens, gate, at, h, numbers, rows, columns,
    SIZES: gl.constexpr, FLAGS: gl.constexpr,
):  # fmt: skip
    """Add the pairs that a further anchor serves."""
    HV: gl.constexpr = SIZES.HV
    K: gl.constexpr = SIZES.K
    BT: gl.constexpr = SIZES.BT
    FULL: gl.constexpr = FLAGS.FULL
    ACTIVATION: gl.constexpr = FLAGS.ACTIVATION
    before, sums, _total = channel_sums(gate, at, h, numbers, FULL, ACTIVATION, K, BT)
    b_column, k_column = load_columns(tokens, at, h, SIZES, FLAGS)
    upper, lower = upper_columns(b_column, k_column, K)
    a = load_channels(tokens.a, tokens.s_a, at, h, 0, FULL, HV // SIZES.H, K, BT)
    q = load_channels(tokens.q, tokens.s_q, at, h, 0, FULL, HV // SIZES.H, K, BT)
    rows.store(stack_tiles(a.to(gl.float32) * row_factor(before, anchor), q.to(gl.float32) * row_factor(sums, anchor)))
    factor = column_factor(sums, anchor)
    columns.store(stack_tiles(upper.to(gl.float32) * factor, lower.to(gl.float32) * factor))
    fence_async_shared()
    barrier()
    gram_0, gram_1 = add_grams(gram_0, gram_1, rows, columns, K, BT)
    gram_0, gram_1 = warpgroup_mma_wait(0, deps=[gram_0, gram_1])
    return gram_0, gram_1


@gluon.jit
def rounded_product(x, y):
    """x y, which no later operation contracts."""
    return gl.fma(x, y, gl.zeros(x.shape, gl.float32, LAYOUT))


@gluon.jit
def stack_tiles(x, y):
    """Concatenate tiles [4, 8, 128] along rows, x first; moves no data.   [64, 128]"""
    return gl.permute(gl.join(x, y), (3, 0, 1, 2)).reshape((64, 128))


@gluon.jit
def total_rows(total, like):
    """Total log decays [128] for every row.   [4, 8, 128]"""
    x, _ = gl.broadcast(total[None, None, :], like)
    return x


@gluon.jit
def add_grams(gram_0, gram_1, rows, columns, K: gl.constexpr, BT: gl.constexpr):
    """Add the products of each head's columns with its rows; asynchronous."""
    TF32: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    row_slices = reinterpret(rows, gl.float32, [4, 2 * BT, 32], TF32)
    column_slices = reinterpret(columns, gl.float32, [4, 2 * BT, 32], TF32)
    for c in gl.static_range(4):
        if c < K // 32:
            gram_0 = warpgroup_mma(column_slices.index(c), row_slices.index(c).permute((1, 0)), gram_0, is_async=True)
        else:
            gram_1 = warpgroup_mma(column_slices.index(c), row_slices.index(c).permute((1, 0)), gram_1, is_async=True)
    return gram_0, gram_1
