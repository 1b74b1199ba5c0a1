"""The kernel of `gradients` in Gluon for wide heads."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from wyfold.kernels.gradients.gluon.scalar.arguments import Offsets, TmaInputs
from wyfold.kernels.gradients.gluon.scalar.gate import store_gate_gradient
from wyfold.kernels.gradients.gluon.scalar.numbers import row_scales, store_numbers
from wyfold.kernels.gradients.gluon.tokens import Coords, store_rows, store_scalars
from wyfold.kernels.gradients.gluon.wide.arguments import BW, Ring, Smem, Totals
from wyfold.kernels.gradients.gluon.wide.grams import gram_gradients, gram_products
from wyfold.kernels.gradients.gluon.wide.producer import produce
from wyfold.kernels.gradients.gluon.wide.slices import finish_slice, slice_gradients, store_slice
from wyfold.kernels.pipeline.gluon import barriers, next_stage
from wyfold.tile.index.gluon import barrier
from wyfold.tile.index.triton import chunk_span

WIDTH = gl.constexpr(BW)


@gluon.jit(do_not_specialize=["N", "T", "per_sequence"])
def wyfold_gradients_wide_gluon(
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
    STAGES: gl.constexpr,
):
    """One program computes a chunk of one value head."""
    HV: gl.constexpr = SIZES.HV
    GR: gl.constexpr = HV // SIZES.H
    BT: gl.constexpr = SIZES.BT
    NK: gl.constexpr = SIZES.K // WIDTH
    pid = gl.program_id(0).to(gl.int64)
    i_c, i_h = pid // HV, pid % HV
    i_n, _, b, t, rows = chunk_span(i_c, packing, T, per_sequence, FLAGS.PACKED, BT)
    coords = Coords(b, t, (b * T + t).to(gl.int32), i_h, rows)
    if FLAGS.PACKED:
        if i_n == N:
            _store_zeros(outputs, dgate, coords, pid, SIZES)
            return
    ring = Ring(
        gl.allocate_shared_memory(x_do.dtype, [STAGES, BT, WIDTH], x_do.layout),
        gl.allocate_shared_memory(x_e.dtype, [STAGES, BT, WIDTH], x_e.layout),
        gl.allocate_shared_memory(x_X.dtype, [STAGES, BT, WIDTH], x_X.layout),
        gl.allocate_shared_memory(x_S.dtype, [STAGES, BT, WIDTH], x_S.layout),
        gl.allocate_shared_memory(x_dS.dtype, [STAGES, BT, WIDTH], x_dS.layout),
        barriers(STAGES, 1),
        barriers(STAGES, 1),
    )
    ready = barriers(1, 1)
    smem = Smem(
        gl.allocate_shared_memory(x_q.dtype, [NK, BT, WIDTH], x_q.layout),
        gl.allocate_shared_memory(x_k.dtype, [NK, BT, WIDTH], x_k.layout),
        gl.allocate_shared_memory(x_q.dtype, [2, BT, BT], x_q.layout),
        gl.allocate_shared_memory(gl.float32, [2 * BT], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        ready.index(0),
    )
    fence_async_shared()
    barrier()
    inputs = TmaInputs(
        x_q, x_k, x_do, x_S, x_dS, x_e, x_X, coords.token, pid.to(gl.int32),
        (i_h // GR * heads.h_q).to(gl.int32), (i_h // GR * heads.h_k).to(gl.int32), (i_h * heads.h_do).to(gl.int32),
    )  # fmt: skip
    gl.warp_specialize(
        [
            (
                _consume,
                (x_dq, x_dk, x_dv, ring, smem, gate, strength, outputs, dgate, factors, coords, T, per_sequence, pid,
                 SIZES, FLAGS, STAGES),
            ),
            (produce, (inputs, ring, smem, SIZES, FLAGS, STAGES)),
        ],
        [1],
        [24],
    )  # fmt: skip
    # The memory of an mbarrier must not be reused (docs/facts/hopper.md, KDA-NAN-1).
    ring.full._keep_alive()
    ring.free._keep_alive()
    ready._keep_alive()


@gluon.jit
def _consume(
    x_dq, x_dk, x_dv, ring, smem, gate, strength, outputs, dgate, factors, coords, T, per_sequence, tile,
    SIZES: gl.constexpr, FLAGS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Consumer: first the gradients of the grams, then K in slices."""
    BT: gl.constexpr = SIZES.BT
    NK: gl.constexpr = SIZES.K // WIDTH
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BT, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LC)
    ONE: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    offsets = Offsets(
        gl.arange(0, BT, layout=ROW), gl.arange(0, BT, layout=gl.SliceLayout(0, LC)), gl.arange(0, BT, layout=ONE)
    )
    # Per-token numbers, needed in both the row and the column layout.
    store_numbers(gate, strength, smem.numbers, coords, offsets, SIZES, FLAGS)
    barrier()
    beta = smem.numbers.slice(0, BT).load(ROW)
    dJ, dP, stage, phase = gram_products(x_dv, ring, smem, outputs, coords, beta, factors.unit, SIZES, FLAGS, STAGES)
    scales = row_scales(smem.numbers, factors, offsets, SIZES, FLAGS)
    opaque_zero = (gl.minimum(T, 0) - gl.minimum(per_sequence, 0)).to(gl.int32)
    barrier()
    scales, r_q, r_k, dg = gram_gradients(
        dJ, dP, smem, strength, outputs, factors, coords, offsets, scales, opaque_zero, SIZES, FLAGS
    )
    zeros = gl.zeros([BT], gl.float32, ROW)
    totals = Totals(zeros, zeros, zeros, zeros, zeros)
    for h in range(NK):
        totals, stage, phase = slice_gradients(
            x_dq, x_dk, ring, smem, outputs, coords, offsets, scales, totals, h, stage, phase, SIZES, FLAGS, STAGES
        )
    if FLAGS.NORM:
        dot_q, dot_k = -(totals.dot_q * r_q * r_q), -(totals.dot_k * r_k * r_k)
        for h in range(NK):
            mbarrier.wait(ring.full.index(stage), phase)
            finish_slice(x_dq, x_dk, ring, smem, outputs, coords, dot_q, dot_k, h, stage, SIZES, FLAGS)
            mbarrier.arrive(ring.free.index(stage), count=1)
            stage, phase = next_stage(stage, phase, STAGES)
    elif SIZES.HV > SIZES.H:  # only now: every slice reads the tiles of e and X, where its gradients are stored
        for h in range(NK):
            store_slice(x_dq, x_dk, smem, outputs, coords, h, SIZES, FLAGS)
    # Cross-warp reductions may be given shared memory that TMA stores still read, so the stores must end first.
    tma.store_wait(pendings=0)
    barrier()
    if FLAGS.SCALAR:
        store_gate_gradient(
            gate, dgate, smem.numbers, coords, offsets, dg, totals.read, totals.write, totals.traced, scales.total,
            factors.unit, tile, SIZES, FLAGS,
        )  # fmt: skip


@gluon.jit
def _store_zeros(outputs, dgate, coords, tile, SIZES: gl.constexpr):
    """Store zeros as the gradients of a chunk of no sequence; as those of q and k only if no other head has them."""
    BT: gl.constexpr = SIZES.BT
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    ONE: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    zeros, o_1 = gl.zeros([BT, WIDTH], gl.float32, ROWS), gl.arange(0, BT, layout=ONE)
    if SIZES.HV == SIZES.H:
        for h in range(SIZES.K // WIDTH):
            store_rows(outputs.dq, outputs.s_dq, coords, h * WIDTH, zeros, ROWS, BT, WIDTH)
            store_rows(outputs.dk, outputs.s_dk, coords, h * WIDTH, zeros, ROWS, BT, WIDTH)
    for i in range(SIZES.V // WIDTH):
        store_rows(outputs.dv, outputs.s_dv, coords, i * WIDTH, zeros, ROWS, BT, WIDTH)
    store_scalars(outputs.dbeta, outputs.s_dbeta, coords, o_1, gl.zeros([BT], gl.float32, ONE))
    store_scalars(dgate.g, dgate.s_g, coords, o_1, gl.zeros([BT], gl.float32, ONE))
    if dgate.A_log is not None:
        gl.store(dgate.A_log + tile, 0.0)
    if dgate.dt_bias is not None:
        gl.store(dgate.dt_bias + tile, 0.0)
