"""`segment_summary` and `segment_summary_bwd` in Gluon, on the emulator, against their formulas in PyTorch."""

import math
from itertools import accumulate
from typing import Any

import pytest
import torch
from tests.emulator.cases import cases
from tests.emulator.compare import require_close
from tests.emulator.delta import C, Call, draw, options, rounded
from tests.emulator.machine import Machine
from torch import Tensor

from wyfold.kernels.records import Slots
from wyfold.kernels.segment_summary.gluon import backward, forward
from wyfold.runtime.chunk_layout import Cut, EvenSegments, Segments, chunk_grid, even_segments, segment_grid
from wyfold.runtime.kernel_configs import Config, LaunchKey

SCALE = 0.25
UNWRITTEN = 7.0
FORMS = [("scalar", False), ("scalar", True), ("channel", True), ("channel", True, False), ("scalar", False, False)]
CONFIGS = [({"BV": 64, "PARTS": 1}, 3), ({"BV": 128, "PARTS": 2}, 2)]
LENGTHS = [7 * C + 3, 1, 4 * C, 3 * C]
CASES = cases(CONFIGS, FORMS)


def packed(form: tuple[Any, ...], lengths: list[int], **shape: Any) -> tuple[Call, Segments]:
    """A packed batch, cut into segments of three chunks, with five tokens behind the last sequence."""
    cu = [0, *accumulate(lengths)]
    call = draw(*form, T=cu[-1] + 5, cu=cu, **shape)
    return call, segment_grid(call.grid, Cut(1, 3, 4), torch.device("cpu"))


def even(sequences: int, tokens: int) -> tuple[Call, Segments, EvenSegments]:
    """Sequences of equal lengths, in segments of three chunks with tables, and as those of a dense batch without."""
    cu = [n * tokens for n in range(sequences + 1)]
    call, cut = draw("scalar", False, T=cu[-1], cu=cu), Cut(3, 7, 12)
    dense = even_segments(chunk_grid(sequences, tokens, C, None), cut)
    return call, segment_grid(call.grid, cut, torch.device("cpu")), dense


def pieces(segments: Segments):
    """Segments with a part of a sequence: number, sequence, span, whether it is the first part, and the last part."""
    cu = segments.grid.cu
    for i, (n, begin, end) in enumerate(zip(segments.sequence.tolist(), cu.tolist(), cu[1:].tolist(), strict=False)):
        if n < segments.sequences:
            yield i, n, (0, begin, end), int(segments.first[n]) == i, int(segments.first[n + 1]) == i + 1


def maps(call: Call, segments: Segments, H: Tensor, M: Tensor) -> None:
    """H and M of the segments that end inside a sequence."""
    K, V = call.q.shape[3], call.v.shape[3]
    for i, n, span, begins, ends in pieces(segments):
        for head in range(call.v.shape[2] if not ends else 0):
            S = torch.zeros(V, K) if not begins or call.S0 is None else call.S0[n, head].T
            H[i - n, head] = through(call, span, int(segments.grid.first[i]), head, S, moved=True).T
            S = torch.eye(K) * (not begins)
            M[i - n, head] = through(call, span, int(segments.grid.first[i]), head, S, moved=False).T


def through(call: Call, span: tuple[int, int, int], first: int, head: int, S: Tensor, *, moved: bool) -> Tensor:
    """The state after a segment; moved: include the written values."""
    for x in call.chunks(span, first, head):
        R = x.v * moved - (rounded(S) @ x.k.T) * x.in_k
        if x.E is not None:
            S = S * x.total + rounded(R * x.beta) @ x.E
        else:
            S = S * x.total + rounded((rounded(R) @ x.W) * x.out) @ x.k
    return S


def gradients(call: Call, segments: Segments, c: Tensor) -> None:
    """Gradients of the initial states of the segments that begin inside a sequence."""
    for i, n, span, begins, ends in pieces(segments):
        for head in range(call.v.shape[2] if not begins else 0):
            dS = torch.zeros(call.v.shape[3], call.q.shape[3])
            if ends and call.dST is not None:
                dS = call.dST[n, head].T
            for x in reversed(call.chunks(span, int(segments.grid.first[i]), head)):
                X = x.do @ x.F.T * SCALE
                if x.E is not None:
                    X = X + rounded(dS) @ x.E.T
                else:
                    X = X + rounded(rounded(dS) @ x.k.T * (x.out * x.beta)) @ x.W.T / x.beta
                dS = dS * x.total + rounded(x.do * (x.in_q * SCALE)) @ x.q - rounded(X * (x.beta * x.in_k)) @ x.k
            c[i - n - 1, head] = dS.T


def written(got: Tensor, want: Tensor) -> tuple[Tensor, Tensor]:
    """The common elements of both, after a check that the same ones are written."""
    assert torch.equal(got == UNWRITTEN, want == UNWRITTEN), "other states are written than those at borders"
    return got[want != UNWRITTEN], want[want != UNWRITTEN]


def test_segment_summary(case):
    config, form = case.values
    summarised(Machine(*case.schedule), config, *packed(form, LENGTHS))


def test_summary_bwd(case):
    config, form = case.values
    graded(Machine(*case.schedule), config, *packed(form, LENGTHS))


def test_summary_bwd_without_a_final_gradient():
    graded(Machine(), CONFIGS[0], *packed(FORMS[0], [5 * C - 1, 0, 6 * C], given=False))


@pytest.mark.parametrize("tokens", [14 * C, 13 * C + 5])
def test_even_segments(tokens: int):
    """Segments of a dense batch, whose tables the kernel computes, have the bits of those in tables."""
    call, segments, dense = even(2, tokens)
    want = summary(Machine(), CONFIGS[0], call, segments, horizon=False)
    got = summary(Machine(), CONFIGS[0], call, dense, horizon=False)
    assert dense.borders == 8 and (want[0][:8] != UNWRITTEN).all()
    assert all(torch.equal(x, y[:8]) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("horizon", [False, True], ids=["whole", "from the horizon"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_initial_states_in_slots(config: tuple[dict[str, int], int], horizon: bool):
    """H and M have the bits of those of a gathered state, which is copied, also where H begins behind it."""
    call, _, dense = even(4, 14 * C)
    if horizon:
        call.prepared = call.prepared._replace(total=call.prepared.total * 1e-18)
        call.prepared.rows[:, 2] *= 1e-18
    N, HV, K, V = call.S0.shape
    pool = torch.randn(7, HV, V, K).mT
    source, given = torch.tensor([5, 6, -1, 2], dtype=torch.int32), torch.tensor([True, False, True, True])
    call.S0 = pool[source.clamp(min=0)] * torch.tensor([1.0, 0.0, 0.0, 1.0])[:, None, None, None]
    want = summary(Machine(), config, call, dense, horizon=horizon)
    copied, expected = torch.full((N, HV, V, K), UNWRITTEN).mT, call.S0
    call.S0 = pool
    slots = Slots(pool, pool, source, given=given)
    got = summary(Machine("late", "last"), config, call, dense, horizon=horizon, slots=slots, entering=copied)
    assert torch.equal(copied, expected)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("form", [FORMS[0], FORMS[2]], ids=str)
def test_loads_stop_when_the_map_is_zero(form):
    """With a fast scalar gate M becomes zero after a few chunks, and the kernel stops loading for it."""
    loads = []
    for fast in (False, True):
        machine = Machine("late", "last")
        call, segments = packed(form, [30 * C, 5 * C], HV=1)
        if fast:
            rows, E = call.prepared.rows, call.prepared.E
            rows[:, 2] *= 1e-18
            call.prepared = call.prepared._replace(
                total=call.prepared.total * 1e-18, E=None if E is None else (E * 1e-18).bfloat16()
            )
        summarised(machine, CONFIGS[1], call, segments)
        loads.append(machine.loads)
    assert (loads[1] < loads[0]) == (form[0] == "scalar"), loads


@pytest.mark.parametrize("form, config", [*zip(FORMS[:2], CONFIGS, strict=True)], ids=str)
def test_only_chunks_in_reach_are_loaded(form, config):
    """Chunks of 2^-100: three erase any state. Segments have six and four chunks, and one ends in a part of one."""
    loads, lengths = {}, [17 * C + 5, 12 * C]
    # The outermost chunks in reach in each sequence, and the distance to those behind them.
    reached = {summarised: ([3, 9], [1, 5], -1), graded: ([8, 14], [6, 10], 1)}
    for case in ("whole", "lost", "strengths", "keys", "keys behind"):
        machine = Machine("late", "last")
        for check, (*chunks, behind) in reached.items():
            call, segments = packed(form, lengths, HV=1)
            call.prepared.rows[:, 0] *= 2.0**-100
            call.prepared.rows[:, 3] *= 3.0 if case == "strengths" else 1.0
            call.prepared.total[:] = 2.0**-100
            for start, numbers in zip((0, lengths[0]), chunks if case.startswith("keys") else (), strict=False):
                for number in numbers:
                    call.k[0, start + (number + (behind if case == "keys behind" else 0)) * C + 9] *= 32
            check(machine, config, call, segments, horizon=case != "whole")
        loads[case] = machine.loads
    assert loads["lost"] == loads["keys behind"] < 0.7 * loads["whole"]
    assert loads["strengths"] == loads["keys"] == loads["whole"], "transitions with norms above 1 may expand a state"


@pytest.mark.parametrize("form, config", [*zip(FORMS[2:4], CONFIGS, strict=True)], ids=str)
def test_only_chunks_in_reach_of_channels_are_loaded(form, config):
    """Transitions of 2^-100; and with larger decays of one channel, keys or write strengths, which keep a state."""
    loads = {}
    for case in ("whole", "lost", "channel", "keys", "beta"):
        machine = Machine("late", "last")
        for check in (summarised, graded):
            call, segments = packed(form, [17 * C + 5, 12 * C], HV=1)
            prepared = call.prepared
            prepared.total[:] = 2.0**-100
            if case == "channel":
                prepared.total[:, 77] = 2.0**-5
            prepared.k[:] *= 2.0 ** (-5 if case == "keys" else -70)
            prepared.E[:] *= 2.0 ** (-5 if case == "keys" else -70)
            if case == "beta":
                prepared.rows[:, 3, 9] *= 2.0**120
            check(machine, config, call, segments, horizon=case != "whole")
        loads[case] = machine.loads
    assert loads["lost"] < 0.7 * loads["whole"]
    assert loads["channel"] == loads["whole"]
    kept = [loads[case] == loads["whole"] for case in ("keys", "beta")]
    assert kept == [form in FORMS[:3]] * 2, "keys that erase nothing move nothing either"


@pytest.mark.parametrize("value", [2.0**127, torch.nan], ids=["largest", "NaN"])
@pytest.mark.parametrize("power, arrives", [(91, True), (95, False)], ids=["inside", "outside"])
@pytest.mark.parametrize("form, config", [*zip(FORMS[2:4], CONFIGS, strict=True)], ids=str)
def test_summaries_of_channels_begin_at_the_exact_horizon(form, config, power: int, arrives: bool, value: float):
    """The only information is three chunks of 2^-power away from the border: v before it, do behind it.

    What is outside of the horizon has no effect, and would have none; what is inside arrives.
    """
    call, segments = packed(form, [18 * C], HV=1, given=False)
    prepared = call.prepared
    for x in (prepared.k, prepared.q, prepared.E, call.v, call.do):
        x.zero_()
    prepared.total[:], prepared.rows[:, 3] = 2.0**-power, 1.0
    before, behind = 8, 9  # of the second segment of chunks 6 to 11
    prepared.E[before, 0, 5], prepared.q[behind, 0, 5] = 1.0, 1.0
    call.v[0, before * C, 0, 7], call.do[0, behind * C, 0, 7] = value, value
    H, _ = summary(Machine(), config, call, segments, horizon=True)
    c = summary_bwd(Machine(), config, call, segments, horizon=True)
    for x in (H[1, 0, 5, 7], c[0, 0, 5, 7]):
        assert (x.isnan() if math.isnan(value) else x != 0) == arrives


def summarised(
    machine: Machine, config: tuple[dict[str, int], int], call: Call, segments: Segments, *, horizon: bool = False
) -> None:
    """Run `segment_summary`, and check its output."""
    H, M = summary(machine, config, call, segments, horizon=horizon)
    want = torch.full_like(H, UNWRITTEN), torch.full_like(M, UNWRITTEN)
    maps(call, segments, *want)
    require_close(machine, H=written(H, want[0]), M=written(M, want[1]))


def graded(
    machine: Machine, config: tuple[dict[str, int], int], call: Call, segments: Segments, *, horizon: bool = False
) -> None:
    """Run `segment_summary_bwd`, and check its output."""
    c = summary_bwd(machine, config, call, segments, horizon=horizon)
    want = torch.full_like(c, UNWRITTEN)
    gradients(call, segments, want)
    require_close(machine, c=written(c, want))


def summary(
    machine: Machine,
    config: tuple[dict[str, int], int],
    call: Call,
    segments: Segments | EvenSegments,
    *,
    horizon: bool,
    **pooled: Any,
) -> tuple[Tensor, Tensor]:
    """H and M of `segment_summary`. pooled: Its slots, and the copy of their states."""
    shape = segments.borders, call.v.shape[2]
    H, M = (torch.full((*shape, width, call.q.shape[3]), UNWRITTEN).mT for width in (call.v.shape[3], call.q.shape[3]))
    call.spoil()
    with machine.installed(forward.launch, Config(4, config[1], config[0])):
        how = options(erases=call.erases)
        given = call.k, call.v, call.launched, call.S0, segments, how, LaunchKey()
        forward.segment_summary(*given, H, M, horizon=horizon, **pooled)
    return H, M


def summary_bwd(
    machine: Machine, config: tuple[dict[str, int], int], call: Call, segments: Segments, *, horizon: bool
) -> Tensor:
    """The gradients c of `segment_summary_bwd`."""
    c = torch.full((segments.borders, call.v.shape[2], call.v.shape[3], call.q.shape[3]), UNWRITTEN).mT
    call.spoil()
    with machine.installed(backward.launch, Config(4, config[1], config[0])):
        how = options(scale=SCALE, erases=call.erases)
        given = call.q, call.k, call.launched, call.do, call.dST, segments, how, LaunchKey()
        backward.segment_summary_bwd(*given, c, horizon=horizon)
    return c
