"""Sums of a chunk's gates, and the decays between its sub-chunks."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from wyfold.kernels.prepare.gluon.channel.arguments import BK, NEAREST, REACH, SHIFT
from wyfold.tile.activation.triton import LOG2_E
from wyfold.tile.decay.gluon import activated
from wyfold.tile.dot.gluon import add, exp2
from wyfold.tile.index.gluon import barrier, reinterpret


@gluon.jit
def sum_gates(G, smem, gate, p_total, i_tile, h, rows, FULL: gl.constexpr, ACTIVATION: gl.constexpr, K: gl.constexpr):
    """Compute the sums P of a chunk's gates and the decays between sub-chunks; a thread holds all rows of a channel.

    Returns:
        Number of anchors that the pairs inside a sub-chunk need.
    """
    L: gl.constexpr = gl.BlockedLayout([16, 1], [1, 32], [1, 4], [1, 0])
    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, L))
    rate, bias = 1.0, 0.0
    if ACTIVATION != "given":
        if gate.A_log is not None:
            rate = gl.exp(gl.load(gate.A_log + h).to(gl.float32))
        if gate.dt_bias is not None:
            bias = gl.load(gate.dt_bias + h * K + o_k).to(gl.float32)[None, :]
    P_0, f_0, r_0 = _sub_chunk_sums(G, 0, rate, bias, rows, gate.lower_bound, gate.clamp, FULL, ACTIVATION, L)
    P_1, f_1, r_1 = _sub_chunk_sums(G, 1, rate, bias, rows, gate.lower_bound, gate.clamp, FULL, ACTIVATION, L)
    P_2, f_2, r_2 = _sub_chunk_sums(G, 2, rate, bias, rows, gate.lower_bound, gate.clamp, FULL, ACTIVATION, L)
    P_3, f_3, r_3 = _sub_chunk_sums(G, 3, rate, bias, rows, gate.lower_bound, gate.clamp, FULL, ACTIVATION, L)
    tma.store_wait(pendings=0)  # the sums overwrite memory from which the previous tile's results are stored
    barrier()
    x = gl.permute(gl.join(gl.join(P_0, P_1), gl.join(P_2, P_3)), (3, 2, 0, 1)).reshape((4 * 16, K // BK, BK))
    P = reinterpret(smem.gates, gl.float32, [K // BK, 4 * 16, BK], gl.SwizzledSharedLayout(8, 1, 4, [2, 1, 0]))
    P.store(gl.permute(x, (1, 0, 2)))
    t_0, t_1, t_2, t_3 = f_0 + r_0, f_1 + r_1, f_2 + r_2, f_3 + r_3
    # Decays from the end of a sub-chunk to the first row of a later one: 0 and 1 to 2; 0 to 1; 0, 1 and 2 to 3. Unused
    # entries hold any finite number.
    one, three = exp2(f_1 - SHIFT), exp2(f_3 - SHIFT)
    two = _stack4(exp2(t_1 + f_2 - SHIFT), exp2(f_2 - SHIFT), one, one)
    three = _stack4(exp2(t_1 + t_2 + f_3 - SHIFT), exp2(t_2 + f_3 - SHIFT), three, three)
    # Decays from the chunk's start to a sub-chunk's first row, and from the sub-chunk's end to the chunk's end.
    before = _stack4(
        exp2(f_0 - (SHIFT + NEAREST)),
        exp2(t_0 + f_1 - (SHIFT + NEAREST)),
        exp2(t_0 + t_1 + f_2 - (SHIFT + NEAREST)),
        exp2(t_0 + t_1 + t_2 + f_3 - (SHIFT + NEAREST)),
    )
    after = _stack4(
        exp2(t_1 + t_2 + t_3 - NEAREST), exp2(t_2 + t_3 - NEAREST), exp2(t_3 - NEAREST), exp2(t_3 * 0.0 - NEAREST)
    )
    numbers = gl.join(gl.join(two, three), gl.join(before, after))  # [K, of four, odd, late]
    smem.border_decays.store(
        gl.permute(numbers.reshape((K // BK, BK, 4, 2, 2)), (0, 4, 3, 2, 1)).reshape((K // BK, 16, BK))
    )
    more = SHIFT + 2.0 * NEAREST
    rest = _stack4(r_0 + more, r_1 + more, r_2 + more, r_3 + more)
    smem.rest_sums.store(gl.permute(rest.reshape((K // BK, BK, 4)), (0, 2, 1)))
    gl.store(p_total + i_tile * K + o_k, exp2(t_0 + t_1 + t_2 + t_3))
    most = -gl.min(gl.minimum(gl.minimum(r_0, r_1), gl.minimum(r_2, r_3)), axis=0)
    # Rounded up: an anchor too many costs time, one too few loses a pair.
    return gl.where(most > 0.0, most / REACH + 0.01, 0.0).to(gl.int32) + 1


@gluon.jit
def _sub_chunk_sums(
    G,
    w: gl.constexpr,
    rate,
    bias,
    rows,
    lower_bound,
    clamp,
    FULL: gl.constexpr,
    ACTIVATION: gl.constexpr,
    L: gl.constexpr,
):
    """Running sums of a sub-chunk's log gates (shifted for their use), the first row's gate, and the sum of the others.

    [16, K], [K] and [K].
    """
    o_r = gl.arange(0, 16, layout=gl.SliceLayout(1, L))
    x = G.slice(16 * w, 16).load(L).to(gl.float32)
    # Rows without a token must have a log gate of 0; an activation does not map 0 to 0, so it is masked afterwards.
    if ACTIVATION == "given" and not FULL:
        x = gl.where((o_r + 16 * w < rows)[:, None], x, 0.0)
    g = activated(x, rate, bias, lower_bound, clamp, ACTIVATION)
    if ACTIVATION != "given" and not FULL:
        g = gl.where((o_r + 16 * w < rows)[:, None], g, 0.0)
    # Rounded before it is added: docs/facts/compilers.md, LLVM-1.
    g = gl.fma(g, gl.full(g.shape, LOG2_E, gl.float32, L), gl.zeros(g.shape, gl.float32, L))
    sums = gl.associative_scan(gl.where((o_r == 0)[:, None], 0.0, g), 0, add)
    return sums + (SHIFT + NEAREST), _select_row(g, 0, L), _select_row(sums, 15, L)


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
