"""Sums of a chunk's gates, and the decays between its sub-chunks."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from wyfold.kernels.prepare.gluon.channel.arguments import BK, HALF_REACH, HALF_SHIFT, NEAREST, REACH, SHIFT
from wyfold.tile.activation.triton import LOG2_E
from wyfold.tile.decay.gluon import activated
from wyfold.tile.dot.gluon import add, exp2
from wyfold.tile.index.gluon import barrier, reinterpret


@gluon.jit
def sum_gates(G, smem, gate, p_total, i_tile, h, rows, FULL: gl.constexpr, ACTIVATION: gl.constexpr, K: gl.constexpr):
    """Compute the sums of each half's gates, shifted for their use; a thread holds all rows of a channel.

    Also stores, for each sub-chunk and channel, the powers of two that turn scaled rows into those from the chunk's
    start, and keys into those for rows of the second half.

    Returns:
        Number of rows before the first one that is out of reach. A row's place in it does not depend on later rows.
    """
    L: gl.constexpr = gl.BlockedLayout([16, 1], [1, 32], [1, 4], [1, 0])
    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, L))
    P_0, P_1, P_2, P_3, f_0, f_1, f_2, f_3, r_0, r_1, r_2, r_3 = _four_sums(
        G, gate, h, rows, None, FULL, ACTIVATION, True, K, L
    )
    t_0, t_1, t_2, t_3 = f_0 + r_0, f_1 + r_1, f_2 + r_2, f_3 + r_3
    first_0, first_1 = f_0 + HALF_SHIFT, (t_0 + f_1) + HALF_SHIFT
    # The second half starts at a power of two, so that its rows and keys may be scaled without rounding.
    early = t_0 + t_1
    border = _nearest_integer(early)
    beyond = early - border
    first_2, first_3 = (beyond + f_2) + HALF_SHIFT, (beyond + t_2 + f_3) + HALF_SHIFT
    P_0, P_1 = P_0 + first_0[None, :], P_1 + first_1[None, :]
    P_2, P_3 = P_2 + first_2[None, :], P_3 + first_3[None, :]
    least = gl.minimum(gl.minimum(r_0 + first_0, r_1 + first_1), gl.minimum(r_2 + first_2, r_3 + first_3))
    n = gl.where(gl.min(least, axis=0) >= -HALF_REACH, 64, 0)
    tma.store_wait(pendings=0)  # the sums overwrite memory from which the previous tile's results are stored
    barrier()
    x = gl.permute(gl.join(gl.join(P_0, P_1), gl.join(P_2, P_3)), (3, 2, 0, 1)).reshape((4 * 16, K // BK, BK))
    sums_of(smem, K, [2, 1, 0]).store(gl.permute(x, (1, 0, 2)))
    end_decays(smem, K).store(exp2(beyond + t_2 + t_3 + HALF_SHIFT))
    # From the scaled rows to those from the chunk's start; from keys of the first half to those at the second's start.
    start, none = exp2(border * 0.0 - HALF_SHIFT), exp2(border * 0.0)
    late, at_border = exp2(border - HALF_SHIFT), exp2(border)
    of_rows, of_keys = _stack4(start, start, late, late), _stack4(at_border, at_border, none, none)
    numbers = gl.join(gl.join(of_rows, of_keys), gl.join(of_rows, of_keys))  # [K, of four, kind, twice]
    smem.border_decays.store(
        gl.permute(numbers.reshape((K // BK, BK, 4, 2, 2)), (0, 4, 3, 2, 1)).reshape((K // BK, 16, BK))
    )
    gl.store(p_total + i_tile * K + o_k, exp2(early + t_2 + t_3))
    if n == 0:
        # Inside a sub-chunk sums never grow, so rows in reach come first.
        n_0, n_1, n_2, n_3 = _in_reach(P_0), _in_reach(P_1), _in_reach(P_2), _in_reach(P_3)
        n_2 = gl.where(n_2 == 16, 16 + n_3, n_2)
        n_1 = gl.where(n_1 == 16, 16 + n_2, n_1)
        n = gl.min(gl.where(n_0 == 16, 16 + n_1, n_0), axis=0)
    return n


@gluon.jit
def _nearest_integer(x):
    return (x + 12582912.0) - 12582912.0


@gluon.jit
def _in_reach(P):
    """Number of rows of each channel whose sums are in reach."""
    return gl.sum(gl.where(P >= -HALF_REACH, 1, 0), axis=0)


@gluon.jit
def sum_sub_chunk_gates(
    G, smem, gate, p_total, i_tile, h, rows,
    FULL: gl.constexpr, ACTIVATION: gl.constexpr, ERASES: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """Store the sums from the first row of each sub-chunk on, and the decays between sub-chunks.

    If writes erase nothing, also the decays from the chunk's start to the sub-chunks, and to its end. Otherwise
    `sum_gates` was here before.

    Returns:
        Number of anchors that the pairs inside a sub-chunk need.
    """
    L: gl.constexpr = gl.BlockedLayout([16, 1], [1, 32], [1, 4], [1, 0])
    P_0, P_1, P_2, P_3, f_0, f_1, f_2, f_3, r_0, r_1, r_2, r_3 = _four_sums(
        G, gate, h, rows, SHIFT + NEAREST, FULL, ACTIVATION, ERASES, K, L
    )
    if not ERASES:
        tma.store_wait(pendings=0)  # the sums overwrite memory from which the previous tile's results are stored
        barrier()
    x = gl.permute(gl.join(gl.join(P_0, P_1), gl.join(P_2, P_3)), (3, 2, 0, 1)).reshape((4 * 16, K // BK, BK))
    sums_of(smem, K, [2, 1, 0]).store(gl.permute(x, (1, 0, 2)))
    t_0, t_1, t_2, t_3 = f_0 + r_0, f_1 + r_1, f_2 + r_2, f_3 + r_3
    # Decays from the end of a sub-chunk to the first row of a later one: 0 and 1 to 2; 0 to 1; 0, 1 and 2 to 3. Unused
    # entries hold any finite number.
    one, three = exp2(f_1 - SHIFT), exp2(f_3 - SHIFT)
    two = _stack4(exp2(t_1 + f_2 - SHIFT), exp2(f_2 - SHIFT), one, one)
    three = _stack4(exp2(t_1 + t_2 + f_3 - SHIFT), exp2(t_2 + f_3 - SHIFT), three, three)
    # Decays from the chunk's start to a sub-chunk's first row, and from the sub-chunk's end to the chunk's end.
    before = two
    if not ERASES:
        before = _stack4(
            exp2(f_0 - (SHIFT + NEAREST)),
            exp2(t_0 + f_1 - (SHIFT + NEAREST)),
            exp2(t_0 + t_1 + f_2 - (SHIFT + NEAREST)),
            exp2(t_0 + t_1 + t_2 + f_3 - (SHIFT + NEAREST)),
        )
    after = _stack4(
        exp2(t_1 + t_2 + t_3 - NEAREST), exp2(t_2 + t_3 - NEAREST), exp2(t_3 - NEAREST), exp2(t_3 * 0.0 - NEAREST)
    )
    if ERASES:
        before = after
    numbers = gl.join(gl.join(two, three), gl.join(before, after))  # [K, of four, odd, late]
    smem.border_decays.store(
        gl.permute(numbers.reshape((K // BK, BK, 4, 2, 2)), (0, 4, 3, 2, 1)).reshape((K // BK, 16, BK))
    )
    more = SHIFT + 2.0 * NEAREST
    rest = _stack4(r_0 + more, r_1 + more, r_2 + more, r_3 + more)
    smem.rest_sums.store(gl.permute(rest.reshape((K // BK, BK, 4)), (0, 2, 1)))
    if not ERASES:
        gl.store(p_total + i_tile * K + gl.arange(0, K, layout=gl.SliceLayout(0, L)), exp2(t_0 + t_1 + t_2 + t_3))
    most = -gl.min(gl.minimum(gl.minimum(r_0, r_1), gl.minimum(r_2, r_3)), axis=0)
    # Rounded up: an anchor too many costs time, one too few loses a pair.
    return gl.where(most > 0.0, most / REACH + 0.01, 0.0).to(gl.int32) + 1


@gluon.jit
def sums_of(smem, K: gl.constexpr, ORDER: gl.constexpr):
    """The sums, slices of channels after each other.   [K / BK, BT, BK]

    Swizzled so that one access reads pairs of channels of eight rows without bank conflicts: groups of four rows are 32
    bytes apart.
    """
    return reinterpret(smem.gates, gl.float32, [K // BK, 4 * 16, BK], gl.SwizzledSharedLayout(8, 1, 4, ORDER))


@gluon.jit
def end_decays(smem, K: gl.constexpr):
    """Shared memory for a number per channel.   [K]"""
    rows = reinterpret(smem.rest_sums, gl.float32, [4, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return rows.index(0)


@gluon.jit
def _four_sums(
    G, gate, h, rows, shift,
    FULL: gl.constexpr, ACTIVATION: gl.constexpr, ERASES: gl.constexpr, K: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Results of `_sub_chunk_sums` of four sub-chunks: sums, then first gates, then sums of the others."""
    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, L))
    rate, bias = 1.0, 0.0
    if ACTIVATION != "given":
        if gate.A_log is not None:
            rate = gl.exp(gl.load(gate.A_log + h).to(gl.float32))
        if gate.dt_bias is not None:
            bias = gl.load(gate.dt_bias + h * K + o_k).to(gl.float32)[None, :]
    P_0, f_0, r_0 = _sub_chunk_sums(G, 0, rate, bias, rows, gate, shift, FULL, ACTIVATION, ERASES, L)
    P_1, f_1, r_1 = _sub_chunk_sums(G, 1, rate, bias, rows, gate, shift, FULL, ACTIVATION, ERASES, L)
    P_2, f_2, r_2 = _sub_chunk_sums(G, 2, rate, bias, rows, gate, shift, FULL, ACTIVATION, ERASES, L)
    P_3, f_3, r_3 = _sub_chunk_sums(G, 3, rate, bias, rows, gate, shift, FULL, ACTIVATION, ERASES, L)
    return P_0, P_1, P_2, P_3, f_0, f_1, f_2, f_3, r_0, r_1, r_2, r_3


@gluon.jit
def _sub_chunk_sums(
    G, w: gl.constexpr, rate, bias, rows, gate, shift,
    FULL: gl.constexpr, ACTIVATION: gl.constexpr, ERASES: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Running sums of a sub-chunk's log gates after the first one, plus `shift` if it is not None, the first row's
    gate, and the sum of the others.

    [16, K], [K] and [K].
    """
    o_r = gl.arange(0, 16, layout=gl.SliceLayout(1, L))
    x = G.slice(16 * w, 16).load(L).to(gl.float32)
    # Rows without a token must have a log gate of 0; an activation does not map 0 to 0, so it is masked afterwards.
    if ACTIVATION == "given" and not FULL:
        x = gl.where((o_r + 16 * w < rows)[:, None], x, 0.0)
    if ACTIVATION == "given" and ERASES:
        g = gl.maximum(x, gate.clamp, propagate_nan=tl.PropagateNan.ALL)
    else:
        g = activated(x, rate, bias, gate.lower_bound, gate.clamp, ACTIVATION)
    if ACTIVATION != "given" and not FULL:
        g = gl.where((o_r + 16 * w < rows)[:, None], g, 0.0)
    # Rounded before it is added: docs/facts/compilers.md, LLVM-1.
    g = gl.fma(g, gl.full(g.shape, LOG2_E, gl.float32, L), gl.zeros(g.shape, gl.float32, L))
    sums = gl.associative_scan(gl.where((o_r == 0)[:, None], 0.0, g), 0, add)
    first, others = _select_row(g, 0, L), _select_row(sums, 15, L)
    if shift is not None:
        sums += shift
    return sums, first, others


@gluon.jit
def _select_row(x, i: gl.constexpr, L: gl.constexpr):
    """Row i of a tile whose rows one thread holds; summed as integers, so that it is an exact selection."""
    o_r = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, L))
    return gl.sum(gl.where((o_r == i)[:, None], x.to(gl.int32, bitcast=True), 0), axis=0).to(gl.float32, bitcast=True)


@gluon.jit
def _stack4(x_0, x_1, x_2, x_3):
    """Stack four numbers per channel.   4 x [K] -> [K, 4]"""
    x = gl.join(gl.join(x_0, x_1), gl.join(x_2, x_3))
    return gl.permute(x, (0, 2, 1)).reshape((x_0.shape[0], 4))
