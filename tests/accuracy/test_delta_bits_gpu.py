"""Bitwise promises of the delta rules' kernels on a GPU, at the shapes of real models.

The interpreter's tests check the same promises at small shapes. These tests run the shipped launch configurations, TMA
next to plain loads, and hardware that may execute in another order each time.
"""

import contextlib
import itertools
import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import wyfold
from wyfold import serving
from wyfold.autograd import delta_chunk, kernel_call
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape
from wyfold.runtime import replay_cache, segment_rule
from wyfold.runtime.chunk_layout import Cut, chunk_grid, segment_grid

RULES = ("delta_rule", "gated_delta_rule", "kda")
PER_TOKEN = ("q", "k", "v", "g", "beta")
LENGTHS = (70, 0, 128, 1, 201)
REPEATS = 100

Call = dict[str, Any]


@pytest.fixture(params=RULES)
def rule(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def run(rule: str, results):
    """`run(arguments, incoming, ...)`: all results of one call."""
    op = getattr(wyfold, f"chunk_{rule}")
    return lambda a, fed, **options: results(op, a, None, fed, output_final_state=True, **options)


@pytest.fixture
def call(rule: str, placed):
    """`call(T, N, ...)`: arguments and incoming gradients on the GPU."""

    def draw(
        T: int, N: int = 1, *, B: int = 1, dtype: torch.dtype = torch.bfloat16, K: int = 128, group: int = 1
    ) -> tuple[Call, Call]:
        a = inputs.draw("random", rule, Shape(B, T, 2, 2 * group, K, K), state="normal", sequences=N, dtype=dtype)
        fed = {"o": inputs.incoming(a["v"], 1), "state": inputs.incoming(a["initial_state"], 2)}
        return placed(a), placed(fed)

    return draw


def tokens(a: Call, those: slice) -> Call:
    return a | {name: a[name][:, those] for name in PER_TOKEN if name in a}


def boundaries(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], device=device)


def same(got: dict[str, Tensor], expected: dict[str, Tensor], *context: object) -> None:
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(got[name], x), (name, *context)


@pytest.mark.parametrize(
    "dtype, K, group",
    [(torch.bfloat16, 128, 1), (torch.bfloat16, 128, 3), (torch.float16, 128, 1), (torch.float32, 64, 1)],
    ids=str,
)
def test_a_hundred_repeats_have_the_same_bits(dtype: torch.dtype, K: int, group: int, call, run):
    a, fed = call(1000, 2, B=2, dtype=dtype, K=K, group=group)
    first = run(a, fed)
    for i in range(REPEATS):
        same(run(a, fed), first, i)


def test_kept_is_recomputed(call, run):
    a, fed = call(300)
    same(run(a, fed, disable_recompute=True), run(a, fed))


@pytest.mark.parametrize("group", [1, 2, 12])
@pytest.mark.parametrize("norm", [False, True], ids=["norm outside", "norm inside"])
def test_packed_is_separate(norm: bool, group: int, call, run, card):
    """Position and neighbours change no bit, nor do the rows past the last boundary."""
    T, N = sum(LENGTHS), len(LENGTHS)
    a, fed = call(T + 9, N, group=group)
    a["use_qk_l2norm_in_kernel"] = norm
    for x in (*(a[name] for name in PER_TOKEN if name in a), fed["o"]):
        x[:, T:] = math.nan
    packed = run(a, fed, cu_seqlens=boundaries(LENGTHS, card))
    for n, (begin, end) in enumerate(itertools.pairwise(boundaries(LENGTHS, card).tolist())):
        alone = tokens(a, slice(begin, end)) | {"initial_state": a["initial_state"][n : n + 1]}
        expected = run(alone, {"o": fed["o"][:, begin:end], "state": fed["state"][n : n + 1]})
        for name, x in expected.items():
            mine = packed[name][n : n + 1] if name in ("state", "dinitial_state") else packed[name][:, begin:end]
            assert torch.equal(mine, x), (n, name)
    assert not any(packed[name][:, T:].any() for name in ("o", "dq", "dk", "dv", "dbeta"))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("times", [1, 8], ids=["few", "many"])
def test_prompts_in_slots(times: int, stored: torch.dtype, rule: str, call, card):
    """Prompts in slots of a pool have the bits of contiguous states. One is skipped, one is fresh, other slots
    are NaN.
    """
    lengths = LENGTHS * times
    T, N = sum(lengths), len(lengths)
    a, _ = call(T, N)
    a["use_qk_l2norm_in_kernel"] = True
    states, cu = a.pop("initial_state").to(stored), boundaries(lengths, card)
    slots = torch.randperm(2 * N, generator=torch.Generator().manual_seed(0))[:N].to(card)
    pool = states.new_full((2 * N, *states.shape[1:]), math.nan)
    pool[slots] = states
    pool[slots[4]] = math.nan
    given = torch.arange(N, device=card) != 4
    before, entering = pool.clone(), states.float() * given[:, None, None, None]
    o, left = getattr(wyfold, f"chunk_{rule}")(**a, initial_state=entering, output_final_state=True, cu_seqlens=cu)
    o[:, cu[2] : cu[3]] = 0
    index = slots.clone()
    index[2] = -1
    got = serving.prefill(
        **{"g": None} | a, pool=pool, state_indices=index, state_v_first=False, cu_seqlens=cu, has_initial_state=given
    )
    before[index[index >= 0]] = left[index >= 0].to(stored)
    assert torch.equal(got, o) and torch.equal(pool.nan_to_num(9), before.nan_to_num(9))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("v_first", [False, True], ids=["K first", "V first"])
def test_prompts_in_slots_in_segments(v_first: bool, stored: torch.dtype, rule: str, call, card):
    """A dense batch in segments: one slot is written, one state goes elsewhere, one prompt is skipped, one is fresh."""
    a, _ = call(2100, 4, B=4)
    a |= {"use_qk_l2norm_in_kernel": True, "state_v_first": v_first}
    states = a.pop("initial_state").to(stored)
    source, to, given = ([5, 0, -1, 3], [5, 6, 2, 3], [True, True, True, False])
    source, to, given = (torch.tensor(numbers, device=card) for numbers in (source, to, given))
    before = states.new_full((8, *states.shape[1:]), math.nan)
    before[[5, 0]] = states[:2]
    entering = torch.where(given[:, None, None, None], before[source.clamp(min=0)].float(), 0)
    entering[2] = 0
    where = {"state_indices": source, "output_state_indices": to, "has_initial_state": given}
    with segment_rule.forced(8):
        o, left = getattr(wyfold, f"chunk_{rule}")(**a, initial_state=entering, output_final_state=True)
        o[2] = 0
        after = before.clone()
        after[to[[0, 1, 3]]] = left[[0, 1, 3]].to(stored)
        for _ in range(10):
            pool = before.clone()
            got = serving.prefill(**{"g": None} | a, pool=pool, **where)
            assert torch.equal(got, o) and torch.equal(pool.nan_to_num(9), after.nan_to_num(9))


@pytest.mark.parametrize("v_first", [False, True], ids=["K first", "V first"])
@pytest.mark.parametrize("steps", [(2**30 + 64, 2**14), (2**14, 2**31 + 64)], ids=["slots", "heads"])
@pytest.mark.parametrize("op, T", [(serving.prefill, 130), (serving.decode, 1), (serving.verify, 2)])
def test_states_past_32_bits(op: Any, T: int, steps: tuple[int, int], v_first: bool, call, card):
    """State offsets beyond 32 bits, in a pool of 4.3 gigabytes, for a recorded call and for its replays."""
    a, _ = call(T)
    a |= {"g": a.get("g"), "use_qk_l2norm_in_kernel": True, "state_v_first": v_first}
    states = a.pop("initial_state")
    buffer = torch.empty(2 * steps[0] + steps[1] + 2**14, dtype=torch.bfloat16, device=card)
    pool = buffer.as_strided((3, 2, 128, 128), (*steps, 128, 1))
    pool.copy_(states.expand(3, -1, -1, -1))
    near = pool.contiguous()
    slots = torch.tensor([[2, 1]] if op is serving.verify else [2], device=card)
    for _ in range(4):
        assert torch.equal(op(**a, pool=pool, state_indices=slots), op(**a, pool=near, state_indices=slots))
        assert torch.equal(pool, near)
    assert not torch.equal(near[2], near[0])


@pytest.mark.parametrize("decay", [1.5, 0.02, 0.0005])
def test_side_streams_change_no_bit(decay: float, rule: str, call, run, monkeypatch):
    """Segments on two streams, on one stream, on the caller's stream and in a CUDA graph have the same bits."""
    a, fed = call(64 * 40 + 7)
    if "g" in a:
        a["g"] = a["g"].sigmoid() * (-2 * decay)
    own = torch.cuda.Stream()
    monkeypatch.setattr(kernel_call, "LONG", dict.fromkeys(("none", "scalar", "channel"), 1))

    def on_its_own() -> dict[str, Tensor]:
        own.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(own):
            got = run(a, fed)
        torch.cuda.current_stream().wait_stream(own)
        return got

    replay_cache.forget()  # otherwise recorded calls are replayed
    with segment_rule.forced(5):
        with monkeypatch.context() as patch:
            patch.setattr(
                delta_chunk, "fork_side_stream", lambda device: contextlib.nullcontext(contextlib.nullcontext())
            )
            wanted = run(a, fed)
        replay_cache.forget()
        for got in itertools.chain((on_its_own(),), (run(a, fed) for _ in range(10)), (on_its_own(),)):
            assert all(torch.equal(got[name], x) for name, x in wanted.items())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run(a, fed)
        graph.replay()
        assert all(torch.equal(got[name], x) for name, x in wanted.items())


@pytest.mark.parametrize("B", [1, 2])
def test_maps_are_left_when_they_are_zeros(B: int, placed, monkeypatch):
    """Gluon's `segment_summary` skips zero maps, Triton's does not. Heads and segments decay early, late or never."""
    from wyfold.kernels.segment_summary import gluon, triton

    a = placed(inputs.draw("random", "gated_delta_rule", Shape(B, 64 * 80, 4, 4, 128, 128), dtype=torch.bfloat16))
    a["g"][:] = -torch.tensor([2.0, 0.33, 0.06, 1e-3], device=a["g"].device)
    a["g"][:, 64 * 16 : 64 * 32, 0] = -1e-3  # the second of five segments
    found: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    tables = segment_grid(chunk_grid(B, 64 * 80, 64, None), Cut(1, 5, 2), a["g"].device)
    summary = gluon.segment_summary

    def both(*arguments: Any, horizon: bool) -> None:
        *given, H, M = arguments
        others = torch.full_like(H, torch.nan), torch.full_like(M, torch.nan)
        triton.segment_summary(*given[:4], tables, *given[5:], *others, horizon=False)
        summary(*arguments, horizon=False)
        found.append((H.clone(), M.clone(), *others))

    monkeypatch.setattr(gluon, "segment_summary", both)
    replay_cache.forget()
    with segment_rule.forced(5), torch.no_grad():
        wyfold.chunk_gated_delta_rule(**a)
    replay_cache.forget()
    if not found:
        pytest.skip("segment_summary is not launched in Gluon on this card")
    H, M, others_H, others_M = found[-1]
    for got, other in ((H, others_H), (M, others_M)):
        assert (got - other).norm() <= 1e-2 * other.norm()
    gone = (others_M == 0).flatten(2).all(-1)
    assert 0 < int(gone.sum()) < gone.numel()
    assert torch.equal((M == 0).flatten(2).all(-1), gone)
    assert torch.equal((M.view(torch.int32) == -(2**31)).flatten(2).any(-1), gone)
    assert torch.equal((M.view(torch.int32) == -(2**31)).flatten(2).all(-1), gone)


@pytest.mark.parametrize(
    "rule, norm", [("gated_delta_rule", True), ("gated_delta_rule", False), ("kda", True), ("gla", None)]
)
def test_the_horizon_changes_no_bit_of_summaries(rule: str, norm: bool | None, placed, monkeypatch):
    """What is behind the exact horizon changes no bit: Gluon's H, M and c from there on and of all chunks."""
    from wyfold.kernels.segment_summary import gluon

    a = placed(inputs.draw("random", rule, Shape(1, 64 * 80, 4, 4, 128, 128), dtype=torch.bfloat16))
    g = torch.nn.functional.logsigmoid(torch.randn(1, 64 * 80, 4, *a["g"].shape[3:], device=a["g"].device))
    a["g"] = (g * torch.tensor([1, 2, 0.1, 1e-3]).to(g).view(4, *[1] * (g.ndim - 3))).to(a["g"])
    a["k"] = torch.nn.functional.normalize(a["k"], dim=-1)
    found: list[tuple[str, bool]] = []

    def watched(name: str, results: int) -> None:
        usual = getattr(gluon, name)

        def both(*arguments: Any, horizon: bool) -> None:
            given = arguments[:-results]
            others = [torch.full_like(x, torch.nan) for x in arguments[-results:]]
            usual(*given, *others, horizon=False)
            usual(*arguments, horizon=True)
            found.extend((name, torch.equal(x, y)) for x, y in zip(arguments[-results:], others, strict=True))

        monkeypatch.setattr(gluon, name, both)

    watched("segment_summary", 2)
    watched("segment_summary_bwd", 1)
    replay_cache.forget()
    flags = {} if norm is None else {"use_qk_l2norm_in_kernel": norm}
    with segment_rule.forced(5):
        a["v"].requires_grad_()
        o, _ = getattr(wyfold, f"chunk_{rule}")(**a, **flags)
        o.backward(torch.randn_like(o))
    replay_cache.forget()
    if not found:
        pytest.skip("segment_summary is not launched in Gluon on this card")
    assert [name for name, equal in found if not equal] == []


@pytest.mark.parametrize("t", [1, 64, 100, 191])
def test_the_past_does_not_know_the_future(t: int, call, run):
    a, fed = call(256)
    fed = {"o": fed["o"].clone()}
    fed["o"][:, t:] = 0
    changed = a | {name: a[name].clone() for name in PER_TOKEN if name in a}
    for name in PER_TOKEN:
        if name in a:
            changed[name][:, t:] = changed[name][:, t:].flip(1) * 0.5
    plain, other = run(a, fed), run(changed, fed)
    for name in ("o", *(f"d{name}" for name in PER_TOKEN if name in a)):
        assert torch.equal(other[name][:, :t], plain[name][:, :t]), name
    assert torch.equal(other["dinitial_state"], plain["dinitial_state"])
    assert not torch.equal(other["o"][:, t:], plain["o"][:, t:])


def test_strided_is_contiguous(call, run):
    """q, k and v as columns of one projection, gates with heads before tokens, V-first states, transposed gradients."""
    a, fed = call(300)
    plain = run(a, fed)
    strided = dict(a)
    buffer = torch.full((1, 300, 2, 3 * 128 + 8), math.nan, dtype=torch.bfloat16, device=a["q"].device)
    for i, name in enumerate(("q", "k", "v")):
        strided[name] = buffer[..., 1 + 128 * i : 1 + 128 * (i + 1)].copy_(a[name])  # not aligned to 16 bytes
    for name in ("g", "beta"):
        if name in a:
            strided[name] = a[name].transpose(1, 2).contiguous().transpose(1, 2)
    strided["initial_state"] = a["initial_state"].mT.contiguous().mT
    back = {"o": fed["o"].transpose(1, 2).contiguous().transpose(1, 2), "state": fed["state"].mT.contiguous().mT}
    same(run(strided, back), plain)


def test_a_thread_may_begin_with_a_call(call, run):
    """A new thread has no CUDA context, and the first work of autograd's thread may be encoding a TMA descriptor."""
    a, fed = call(256)
    plain, found = run(a, fed), {}
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would launch a fill kernel
    try:
        thread = threading.Thread(target=lambda: found.update(run(a, fed)))
        thread.start()
        thread.join()
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
    same(found, plain)


@pytest.mark.parametrize("norm", [False, True], ids=["norm outside", "norm inside"])
@pytest.mark.parametrize("where, token", [("initial_state", 0), *itertools.product(("q", "k", "v", "do"), (2, 100))])
def test_a_nan_stays_in_its_sequence_head_and_side_of_time(where: str, token: int, norm: bool, call, run, card):
    """A NaN in an input reaches outputs of its chunk and later ones, in a gradient those of its chunk and earlier ones.

    A sequence's third token lies in the TMA box that loads the last chunk of the previous sequence.
    """
    a, fed = call(sum(LENGTHS), len(LENGTHS))
    options = {"cu_seqlens": boundaries(LENGTHS, card), "use_qk_l2norm_in_kernel": norm}
    n, begin, end, head = 4, 199, 400, 1
    clean = run(a, fed, **options)
    poisoned, arrows = dict(a), dict(fed)
    if where == "do":
        arrows["o"] = fed["o"].clone()
        arrows["o"][:, begin + token, head, 3] = math.nan
    elif where == "initial_state":
        poisoned[where] = a[where].clone()
        poisoned[where][n, head, 5, 3] = math.nan
    else:
        poisoned[where] = a[where].clone()
        poisoned[where][:, begin + token, head, 3] = math.nan
    got = run(poisoned, arrows, **options)
    for name, x in clean.items():
        states = name in ("state", "dinitial_state")
        other = 1 if states else 2
        assert torch.equal(got[name].select(other, 1 - head), x.select(other, 1 - head)), f"{name}: another head"
        if states:
            assert torch.equal(got[name][:n], x[:n]), f"{name}: another sequence"
        else:
            assert torch.equal(got[name][:, :begin], x[:, :begin]), f"{name}: another sequence"
    chunk = begin + token // 64 * 64
    if where in ("k", "v"):
        assert torch.equal(got["o"][:, begin:chunk], clean["o"][:, begin:chunk])
        assert got["o"][:, begin + token, head].isnan().any()
    if where == "do":
        assert torch.equal(got["o"], clean["o"]) and torch.equal(got["state"], clean["state"])
        for name in ("dq", "dk", "dv", "dbeta"):
            assert torch.equal(got[name][:, chunk + 64 : end], clean[name][:, chunk + 64 : end]), name
        assert got["dv"].isnan().any()
