"""The producer/consumer skeleton of Gluon kernels, on the emulator: what each consumer sees of each chunk.

The kernel here stores the sums of a chunk's tiles. Its numbers are small integers, so the sums are exact.
"""

from typing import Any, NamedTuple

import pytest
import torch
from tests.emulator.cases import cases
from tests.emulator.delta import PACKED, Call, draw
from tests.emulator.machine import Machine
from tests.upper_tiles import from_quarters
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from wyfold.kernels.pipeline.gluon import (
    ChunkInputs,
    Sizes,
    chunk_descriptors,
    load_state,
    next_stage,
    produce,
    release,
    ring_of,
    span_of,
    specialize,
    store_state,
)
from wyfold.tile.index.triton import Packing

CONFIGS = [(128, 2, 2), (128, 1, 3), (64, 1, 1)]  # BV, PARTS, STAGES
FORMS = [("scalar", False), ("scalar", True), ("channel", True)]
SHAPES = [{"B": 2, "T": 200, "V": 128}, {"T": 530, "cu": PACKED, "H": 2}, {"T": 40}]
CASES = cases(CONFIGS, FORMS, SHAPES, [False, True])


class Out(NamedTuple):
    """Kernel argument: sums [tiles, V / BW, 7], and states with their strides."""

    sums: Any
    S0: Any
    s_S0: Any
    ST: Any
    s_ST: Any


@gluon.jit
def sum_chunks(
    x_q, x_k, x_v, x_rows, x_total, x_write, x_square, h_q, h_k, h_v, out, packing, T, per_sequence,
    BACKWARD: gl.constexpr, SIZES: gl.constexpr,
):  # fmt: skip
    NV: gl.constexpr = SIZES.V // SIZES.BV
    pid = gl.program_id(0).to(gl.int64)
    i_v, i_hv, i_n = pid % NV, (pid // NV) % SIZES.HV, pid // (NV * SIZES.HV)
    i_h = i_hv // (SIZES.HV // SIZES.H)
    span = span_of(i_n, i_hv, i_v, packing, T, per_sequence, SIZES)
    inputs = ChunkInputs(
        span.tile, span.token, i_h * h_q, i_h * h_k, i_hv * h_v + span.column,
        x_q, x_k, x_v, x_rows, x_total, x_write, x_square,
    )  # fmt: skip
    ring = ring_of(inputs, SIZES)
    count = span.steps + (span.tail_rows > 0).to(gl.int32)
    at = span, i_n, count
    specialize(consume, out, ring, BACKWARD, at, produce, (inputs, ring, count, BACKWARD, SIZES), SIZES)


@gluon.jit
def consume(out, ring, BACKWARD, at, part, SIZES: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    span, i_n, count = at
    row = span.column + part * (SIZES.BV // SIZES.PARTS)
    S = load_state(out.S0, out.s_S0, i_n, None, None, None, None, None, span.hv, row, SIZES)
    stage = 0
    phase = 0
    for j in range(count):
        i = count - 1 - j if BACKWARD else j
        mbarrier.wait(ring.full.index(stage), phase)
        p = out.sums + ((span.tile + i * SIZES.HV) * (SIZES.V // S.shape[0]) + row // S.shape[0]) * 7
        gl.store(p, _sum(ring.k.index(stage), L))
        gl.store(p + 1, _sum(ring.q.index(stage), L))
        gl.store(p + 2, _sum(ring.x.index(stage * SIZES.PARTS + part), L))
        gl.store(p + 3, _sum(ring.rows.index(stage), LINE))
        if SIZES.CHANNEL:
            gl.store(p + 4, _sum(ring.total.index(stage), LINE))
        gl.store(p + 5, _sum(ring.write.index(stage), L))
        gl.store(p + 6, _sum(ring.square.index(stage), L))
        release(ring, next_stage(stage, phase, SIZES.STAGES)[0], True, SIZES.STAGES)
        S = S + 1.0
        stage, phase = next_stage(stage, phase, SIZES.STAGES)
    store_state(out.ST, out.s_ST, i_n, None, span.hv, row, S, SIZES)


@gluon.jit
def _sum(tile, L: gl.constexpr):
    return gl.sum(tile.load(L).to(gl.float32))


def whole(call: Call) -> None:
    """Replace random numbers by small integers."""
    given = [x for x in call.prepared if x is not None]
    for x in (call.q, call.k, call.v, *given):
        x.copy_(torch.randint(-3, 4, x.shape))


def rows_of(x: Tensor, b: int, t: int, head: int, columns: slice = slice(None)) -> Tensor:
    """What TMA loads of a chunk's tokens: 64 rows of the whole buffer, also behind the sequence."""
    first = b * x.shape[1] + t
    return x.flatten(0, 1)[first : first + 64, head, columns].float().sum()


def expected(call: Call, BW: int) -> Tensor:
    """Sums of every tile, by tile and part; NaN where no chunk is."""
    p, HV, V = call.prepared, call.v.shape[2], call.v.shape[3]
    found = torch.full((len(p.rows), V // BW, 7), torch.nan)
    for n, (b, begin, end) in enumerate(call.spans):
        for c, t in enumerate(range(begin, end, 64)):
            for head in range(HV):
                first = n * call.grid.per_sequence if call.cu is None else int(call.grid.first[n])
                i, shared = (first + c) * HV + head, head // (HV // call.q.shape[2])
                k, q = (
                    rows_of(x, b, t, shared) if tiles is None else tiles[i].float().sum()
                    for x, tiles in ((call.k, p.k), (call.q, p.q))
                )
                total = torch.tensor(torch.nan) if p.k is None else p.total[i].sum()
                write = from_quarters(p.W[i]).float().sum() if p.E is None else p.E[i].float().sum()
                square = from_quarters(p.F[i]).float().sum()
                for part in range(V // BW):
                    x = rows_of(call.v, b, t, head, slice(part * BW, (part + 1) * BW))
                    found[i, part] = torch.stack([k, q, x, p.rows[i].sum(), total, write, square])
    return found


def test_every_consumer_sees_every_tile(case):
    (BV, parts, stages), form, shape, backward = case.values
    judge(Machine(*case.schedule), BV, parts, stages, draw(*form, **shape), backward=backward)


def judge(machine: Machine, BV: int, parts: int, stages: int, call: Call, *, backward: bool) -> None:
    whole(call)
    (H, K), (HV, V), folded = call.q.shape[2:], call.v.shape[2:], call.prepared.E is not None
    x_q, x_k, x_v, x_rows, x_total, x_E, x_W, x_F = chunk_descriptors(
        "test", call.q, call.k, (call.v,), call.prepared, (None if folded else call.prepared.W, call.prepared.F), 64,
        BV // parts,
    )  # fmt: skip
    want = expected(call, BV // parts)
    sums = torch.full_like(want, torch.nan)
    S0 = torch.randint(-3, 4, (len(call.spans), HV, K, V)).float()
    ST = torch.full_like(S0, torch.nan)
    sizes = Sizes(H, HV, K, V, 64, BV, parts, stages, call.cu is not None, call.prepared.q is not None, folded)
    machine.launch(
        sum_chunks,
        call.grid.sequences * HV * (V // BV),
        x_q=x_q,
        x_k=x_k,
        x_v=x_v,
        x_rows=x_rows,
        x_total=x_total,
        x_write=x_E if folded else x_W,
        x_square=x_F,
        h_q=call.q.stride(2),
        h_k=call.k.stride(2),
        h_v=call.v.stride(2),
        out=Out(sums, S0, S0.stride(), ST, ST.stride()),
        packing=Packing(cu=call.grid.cu, first=call.grid.first),
        T=call.grid.tokens,
        per_sequence=call.grid.per_sequence,
        BACKWARD=backward,
        SIZES=sizes,
        num_warps=4,
    )
    assert torch.equal(sums.nan_to_num(99.0), want.nan_to_num(99.0))
    chunks = torch.tensor([-(-(end - begin) // 64) for _, begin, end in call.spans])
    assert torch.equal(ST, S0 + chunks[:, None, None, None])


@gluon.jit
def copy_state(own, s_own, border, s_border, to, s_to, there, exists, wanted, SIZES: gl.constexpr):
    S = load_state(own, s_own, 1, there, border, s_border, 0, exists, 1, 64, SIZES)
    store_state(to, s_to, 1, wanted, 1, 64, S, SIZES)


@pytest.mark.parametrize(
    "own, border, there, exists, want",
    [
        (True, False, None, False, "own"),
        (True, True, True, True, "own"),
        (True, True, False, True, "border"),
        (True, True, False, False, ""),
        (True, False, False, True, ""),
        (False, True, True, True, ""),
        (False, False, None, True, ""),
    ],
)
@pytest.mark.parametrize("wanted", [None, True, False])
def test_where_a_state_comes_from_and_goes_to(own, border, there, exists, want, wanted):
    given = {"own": torch.randn(2, 2, 64, 128).bfloat16(), "border": torch.randn(1, 2, 64, 128)}
    to = torch.full((2, 2, 64, 128), torch.nan, dtype=torch.bfloat16)
    p, q = given["own"] if own else None, given["border"] if border else None
    sizes = Sizes(1, 2, 64, 128, 64, 64, 1, 2, False, False, False)
    Machine().launch(
        copy_state, 1, p, None if p is None else p.stride(), q, None if q is None else q.stride(), to, to.stride(),
        there, exists, wanted, SIZES=sizes, num_warps=4,
    )  # fmt: skip
    expected = torch.full_like(to, torch.nan)
    if wanted is not False:
        expected[1, 1, :, 64:] = given[want][-1, 1, :, 64:].bfloat16() if want else 0
    assert torch.equal(to.nan_to_num(9.0), expected.nan_to_num(9.0))
