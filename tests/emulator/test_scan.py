"""`scan` in Gluon, on the emulator, against its formulas in PyTorch."""

from itertools import accumulate

import pytest
import torch
from tests.emulator.cases import cases
from tests.emulator.compare import require_close
from tests.emulator.delta import PACKED, C, Call, draw, heads, options, rounded
from tests.emulator.machine import Machine
from torch import Tensor

from wyfold.kernels.records import Slots
from wyfold.kernels.scan import gluon
from wyfold.runtime.chunk_layout import Cut, chunk_grid, even_segments, segment_grid
from wyfold.runtime.kernel_configs import Config, LaunchKey

SCALE = 0.25
CONFIGS = [
    ({"BV": 128, "PARTS": 2, "OUT": 1}, 3),
    ({"BV": 128, "PARTS": 2, "OUT": 0}, 3),
    ({"BV": 128, "PARTS": 2, "OUT": 2}, 2),
    ({"BV": 128, "PARTS": 1, "OUT": 2}, 2),
    ({"BV": 64, "PARTS": 1, "OUT": 1}, 3),
    ({"BV": 128, "PARTS": 1, "OUT": 1}, 3),
]
FORMS = [("scalar", False), ("scalar", True), ("channel", True), ("channel", True, False), ("scalar", False, False)]
SHAPES = [
    {"B": 2, "T": 200},
    {"T": 530, "cu": PACKED, "H": 2},
    {"T": 640, "given": False},
    {"T": 40},
    {"T": 130, "K": 64},
]
WIDE = [({"BV": 64, "PARTS": 1, "OUT": 1}, 2)]
"""Configurations for keys of 256 channels, which have no folded form."""
WIDE_FORMS = [("scalar", False), ("scalar", False, False)]
CASES = (
    cases(CONFIGS, FORMS, SHAPES)
    + cases(CONFIGS[4:5], FORMS[:1], [{"T": 200, "V": 192}])
    + cases(WIDE, WIDE_FORMS, [shape | {"K": 256} for shape in SHAPES[:4]])
)


def expected(call: Call) -> tuple[Tensor, Tensor]:
    """Outputs, zero for tokens of no sequence, and final states."""
    o = torch.zeros_like(call.v)
    ST = torch.zeros(len(call.spans), *call.v.shape[2:3], call.q.shape[3], call.v.shape[3])
    for n, head, chunks in heads(call):
        S = torch.zeros(call.v.shape[3], call.q.shape[3]) if call.S0 is None else call.S0[n, head].T
        for x in chunks:
            R = x.v - (rounded(S) @ x.k.T) * x.in_k
            R[:, x.tokens.stop - x.tokens.start :] = 0
            Sq = (rounded(S) @ x.q.T) * x.in_q
            if x.E is not None:
                y, F = rounded(R * x.beta), x.F
                S = S * x.total + y @ x.E
            else:
                y, F = rounded(R), x.FB
                S = S * x.total + rounded((y @ x.W) * x.out) @ x.k
            row = call.spans[n][0]
            o[row, x.tokens, head] = (((Sq + y @ F) * SCALE).T)[: x.tokens.stop - x.tokens.start].bfloat16()
        ST[n, head] = S.T
    return o, ST


def test_scan(case):
    config, form, shape = case.values
    judge(Machine(*case.schedule), config, draw(*form, **shape))


def judge(machine: Machine, config: tuple[dict[str, int], int], call: Call) -> None:
    blocks, stages = config
    want_o, want_S = expected(call)
    call.spoil()
    o, ST = torch.full_like(call.v, torch.nan), torch.full_like(want_S, torch.nan)
    with machine.installed(gluon, Config(blocks["BV"] // 16 // blocks["PARTS"], stages, blocks)):
        gluon.scan(
            call.q,
            call.k,
            call.v,
            call.launched,
            call.S0,
            call.grid,
            options(scale=SCALE, erases=call.erases),
            LaunchKey(),
            o,
            ST,
            None,
            None,
        )
    used = call.v.shape[1] if call.cu is None else call.cu[-1]
    require_close(machine, o=(o[:, :used], want_o[:, :used]), ST=(ST, want_S))
    assert o[:, used:].isnan().all(), "written behind the last sequence"


@pytest.mark.parametrize("elsewhere", [False, True], ids=["where they came from", "in other slots"])
@pytest.mark.parametrize("stored, V", [(torch.float32, 128), (torch.bfloat16, 128), (torch.float32, 192)], ids=str)
def test_states_in_slots_of_a_pool(stored: torch.dtype, V: int, elsewhere: bool):
    """The same bits as with contiguous states. A sequence without a live slot outputs zeros and writes no state."""
    call = draw("scalar", False, T=530, cu=PACKED, H=2, V=V)
    call.spoil()
    N, blocks, stages = len(call.spans), *CONFIGS[0 if V == 128 else 4]
    pool = torch.randn(2 * N + 3, *call.S0.shape[1:]).to(stored)
    if stored == torch.bfloat16:
        pool = pool.mT.contiguous().mT  # V-first
    order = torch.randperm(len(pool))
    source, target, given = order[:N, None].clone(), order[N : 2 * N].clone(), torch.rand(N) < 0.7
    source[0], target[-1] = -1 if elsewhere else len(pool), -1
    entering = torch.where(given[:, None, None, None], pool[source[:, 0].clamp(0, len(pool) - 1)].float(), 0)
    expected, left = torch.full_like(call.v, torch.nan), torch.full_like(call.S0, torch.nan)
    got, after = expected.clone(), pool.clone()
    slots = Slots(pool, pool, source, target if elsewhere else None, given)
    tokens, machine = (call.q, call.k, call.v, call.prepared), Machine()
    with machine.installed(gluon, Config(4, stages, blocks)):
        gluon.scan(*tokens, entering, call.grid, options(scale=SCALE), LaunchKey(), expected, left, None, None)
        gluon.scan(*tokens, pool, call.grid, options(scale=SCALE), LaunchKey(), got, pool, None, None, slots=slots)
    expected[:, call.spans[0][1] : call.spans[0][2]] = 0
    for n in range(1, N):
        if 0 <= (to := int(target[n] if elsewhere else source[n, 0])) < len(pool):
            after[to] = left[n].to(stored)
    assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(pool, after)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["where they came from", "in other slots"])
def test_segments_leave_states_in_slots(elsewhere: bool):
    """The same bits as with contiguous final states. The entering states are contiguous in both."""
    lengths = [7 * C + 3, 5 * C, 1, 0, 4 * C]
    call = draw("scalar", False, T=sum(lengths) + 5, cu=[0, *accumulate(lengths)], HV=1)
    call.spoil()
    segments = segment_grid(call.grid, Cut(1, 3, 4), torch.device("cpu"))
    assert segments.first.diff().tolist() == [3, 3, 1, 1, 2]
    N, blocks, stages = len(lengths), *CONFIGS[0]
    borders = torch.randn(segments.borders, *call.S0.shape[1:])
    pool = torch.randn(2 * N, *call.S0.shape[1:]).bfloat16()
    source, target = torch.tensor([[3], [-1], [2 * N], [0], [7]]), torch.tensor([5, 1, 2, 6, -1])
    expected, left = torch.full_like(call.v, torch.nan), torch.full_like(call.S0, torch.nan)
    got, after = expected.clone(), pool.clone()
    slots = Slots(pool, pool, source, target if elsewhere else None, torch.zeros(N, dtype=torch.bool))
    machine = Machine()
    with machine.installed(gluon, Config(4, stages, blocks)):
        for o, final, found in ((expected, left, None), (got, pool, slots)):
            for half in (True, False):
                gluon.scan(
                    call.q, call.k, call.v, call.prepared, call.S0, segments.grid, options(scale=SCALE), LaunchKey(),
                    o, final, None, None, segments, borders, half, found,
                )  # fmt: skip
    for n in (1, 2):  # without a live slot
        expected[:, call.spans[n][1] : call.spans[n][2]] = 0
    for n in (0, 3, 4):
        if (to := int(target[n] if elsewhere else source[n, 0])) >= 0:
            after[to] = left[n].bfloat16()
    assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(pool, after)


@pytest.mark.parametrize("in_slots", [False, True], ids=["contiguous states", "slots"])
@pytest.mark.parametrize("tokens", [8 * C, 7 * C + 5])
def test_even_segments(tokens: int, in_slots: bool):
    """Segments of a dense batch, whose tables the kernel computes, have the bits of those in tables, also in halves."""
    call = draw("scalar", False, T=2 * tokens, cu=[0, tokens, 2 * tokens], HV=1)
    cut, (blocks, stages) = Cut(2, 7, 8), CONFIGS[0]
    tables = segment_grid(call.grid, cut, torch.device("cpu"))
    even = even_segments(chunk_grid(2, tokens, C, None), cut)
    assert even.borders == 6
    borders = torch.randn(tables.borders, *call.S0.shape[1:])
    slots, pool = None, torch.zeros(4, *call.S0.shape[1:])
    if in_slots:
        slots = Slots(pool, pool, torch.tensor([[3], [1]]), None, None)
    found = []
    for segments, halves in ((tables, (None,)), (even, (None,)), (even, (True, False))):
        machine, o, final = Machine(), torch.full_like(call.v, torch.nan), torch.full_like(call.S0, torch.nan)
        pool.zero_()
        with machine.installed(gluon, Config(4, stages, blocks)):
            for half in halves:
                gluon.scan(
                    call.q, call.k, call.v, call.prepared, call.S0, segments.grid, options(scale=SCALE), LaunchKey(),
                    o, pool if in_slots else final, None, None, segments, borders, half, slots,
                )  # fmt: skip
        found.append((o, pool.clone() if in_slots else final))
    for want, *others in zip(*found, strict=True):
        assert all(torch.equal(x, want) for x in others) and not want.isnan().any()
