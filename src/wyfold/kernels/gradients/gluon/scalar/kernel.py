"""The kernel of `gradients` in Gluon without a gate or with a scalar gate."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from wyfold.kernels.gradients.gluon.scalar.arguments import Offsets, TmaInputs
from wyfold.kernels.gradients.gluon.scalar.gate import store_gate_gradient
from wyfold.kernels.gradients.gluon.scalar.grams import gram_gradients
from wyfold.kernels.gradients.gluon.scalar.halves import finish_first_half, half_gradients
from wyfold.kernels.gradients.gluon.scalar.loads import allocate, load_states, load_tokens, load_values, load_X
from wyfold.kernels.gradients.gluon.scalar.numbers import row_scales, store_numbers
from wyfold.kernels.gradients.gluon.scalar.zeros import store_zeros
from wyfold.kernels.gradients.gluon.tokens import Coords
from wyfold.tile.index.gluon import barrier, reinterpret
from wyfold.tile.index.triton import chunk_span


@gluon.jit(do_not_specialize=["N", "T", "per_sequence"])
def wyfold_gradients_gluon(
    x_q,
    x_k,
    x_do,
    x_dq,
    x_dk,
    x_dv,
    x_S,
    x_dS,
    x_e,
    x_X,
    heads,
    gate,
    strength,
    outputs,
    dgate,
    packing,
    factors,
    N,
    T,
    per_sequence,
    SIZES: gl.constexpr,
    FLAGS: gl.constexpr,
):
    """One program computes a chunk of one value head: first the gradients of the grams, then K in two halves."""
    HV: gl.constexpr = SIZES.HV
    K: gl.constexpr = SIZES.K
    V: gl.constexpr = SIZES.V
    BT: gl.constexpr = SIZES.BT
    PACKED: gl.constexpr = FLAGS.PACKED
    GR: gl.constexpr = HV // SIZES.H
    BK: gl.constexpr = K // 2
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BT, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LC)
    COL: gl.constexpr = gl.SliceLayout(0, LC)
    ONE: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    pid = gl.program_id(0).to(gl.int64)
    i_c, i_h = pid // HV, pid % HV
    i_n, _, b, t, rows = chunk_span(i_c, packing, T, per_sequence, PACKED, BT)
    coords = Coords(b, t, (b * T + t).to(gl.int32), i_h, rows)
    o_r, o_c, o_1 = (gl.arange(0, BT, layout=ROW), gl.arange(0, BT, layout=COL), gl.arange(0, BT, layout=ONE))
    if PACKED:
        if i_n == N:
            store_zeros(outputs, dgate, coords, o_1, pid, SIZES)
            return

    offsets = Offsets(o_r, o_c, o_1)
    smem = allocate(x_q, x_k, x_do, x_e, x_X, x_S, x_dS, V, BT, BK)
    pair = reinterpret(smem.X, x_q.dtype, [2, BT, BT], x_q.layout)
    inputs = TmaInputs(
        x_q, x_k, x_do, x_S, x_dS, x_e, x_X, coords.token, pid.to(gl.int32),
        (i_h // GR * heads.h_q).to(gl.int32), (i_h // GR * heads.h_k).to(gl.int32), (i_h * heads.h_do).to(gl.int32),
    )  # fmt: skip
    load_X(inputs, smem, BT)
    load_values(inputs, smem, BT)
    load_tokens(inputs, smem, BK)
    load_states(inputs, smem, 0, V, BK)
    # Where dq and dk are stored: at the tokens of the head, or in its tile.
    place = coords
    if GR > 1:
        place = Coords(b * 0, pid * BT, (pid * BT).to(gl.int32), i_h * 0, rows)

    # Per-token numbers, needed in both the row and the column layout.
    store_numbers(gate, strength, smem.numbers, coords, offsets, SIZES, FLAGS)
    barrier()
    scales = row_scales(smem.numbers, factors, offsets, SIZES, FLAGS)
    X_operand, scales, r_q, r_k, dg, opaque_zero = gram_gradients(
        x_dv, smem, pair, strength, outputs, factors, coords, offsets, scales, T, per_sequence, SIZES, FLAGS
    )
    zeros = gl.zeros([BT], gl.float32, ROW)
    read, write, traced, dot_q, dot_k = zeros, zeros, zeros, zeros, zeros
    for h in range(2):
        read, write, traced, dot_q, dot_k = half_gradients(
            x_dq, x_dk, inputs, smem, pair, outputs, place, offsets, X_operand, scales, r_q, r_k,
            read, write, traced, dot_q, dot_k, h, opaque_zero, SIZES, FLAGS,
        )  # fmt: skip
    if FLAGS.NORM:
        finish_first_half(x_dq, x_dk, smem, outputs, place, dot_q, dot_k, SIZES, FLAGS)
    # Cross-warp reductions may be given shared memory that TMA stores still read, so the stores must end first.
    tma.store_wait(pendings=0)
    barrier()
    if FLAGS.SCALAR:
        store_gate_gradient(
            gate, dgate, smem.numbers, coords, offsets, dg, read, write, traced, scales.total, factors.unit, pid,
            SIZES, FLAGS,
        )  # fmt: skip
    smem.barriers._keep_alive()  # the memory of an mbarrier must not be reused (docs/facts/hopper.md, KDA-NAN-1)
