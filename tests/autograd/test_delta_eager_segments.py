"""Sequences cut into segments against whole sequences: outputs, final states and every gradient, in float64.

tests/interpret/test_segments.py compares the kernels with this implementation.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import wyfold
from wyfold.autograd import delta_eager_segments, workspace
from wyfold.kernels import table
from wyfold.ops.delta_plan import call_cut, known_short
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape
from wyfold.runtime import segment_rule
from wyfold.runtime.chunk_layout import SHORT, Cut
from wyfold.runtime.segment_rule import CUT_FROM

RULES = ("delta_rule", "gated_delta_rule", "kda")
COUNTS = (2, 3, 4, 8, 16)
C = 16
F64 = torch.float64


@pytest.fixture(params=RULES)
def rule(request: pytest.FixtureRequest) -> str:
    return request.param


def call(rule: str, shape: Shape, N: int | None = None, **drawn: Any) -> dict[str, Any]:
    """Draw a call with norm, gate and sigmoid in the operator, initial and final states, and grouped heads."""
    drawn = {"gate": "model" if rule != "delta_rule" else None, "beta": "logits", "state": "normal"} | drawn
    a = inputs.draw("random", rule, shape, sequences=N, dtype=F64, **drawn)
    return a | {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "chunk_size": C}


def compare(rule: str, a: dict[str, Any], count: int, results, float64_bounds, chunks: int = 1, **options: Any) -> None:
    op = getattr(wyfold, f"chunk_{rule}")
    whole = results(op, a, **options)
    with segment_rule.forced(count, chunks):
        cut = results(op, a, **options)
    assert cut.keys() == whole.keys()
    for name, x in cut.items():
        (float64_bounds.gradient if name.startswith("d") else float64_bounds.output)(name, x, whole[name])


@pytest.mark.parametrize("count", COUNTS)
def test_a_dense_batch(rule: str, count: int, results, float64_bounds):
    """The last segment is ragged; with 3 and 16 segments it also has fewer chunks."""
    compare(rule, call(rule, Shape(2, 16 * C + 5, 2, 4, 8, 16)), count, results, float64_bounds)


@pytest.mark.parametrize("count", COUNTS)
def test_a_packed_batch(rule: str, count: int, results, float64_bounds):
    """Long and short sequences, one of a single token, empty ones at both ends, and tokens outside of sequences."""
    lengths = (0, 1, 9 * C, C, 0, 17 * C + 3, 4 * C - 1, 4 * C, 0)
    a = call(rule, Shape(1, sum(lengths) + 7, 1, 2, 16, 8), len(lengths))
    a["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(lengths)])
    compare(rule, a, count, results, float64_bounds)


@pytest.mark.parametrize("options", [{"disable_recompute": True}, {"state_v_first": True}], ids=str)
def test_saved_factors_and_state_layout(options: dict, rule: str, results, float64_bounds):
    a = call(rule, Shape(1, 9 * C, 1, 1, 8, 16))
    if "state_v_first" in options:
        a["initial_state"] = a["initial_state"].mT.contiguous()
    compare(rule, a, 4, results, float64_bounds, **options)


def test_without_states_and_in_parts(rule: str, results, float64_bounds, monkeypatch):
    """Workspace stays bounded: parts may cut segments anywhere."""
    monkeypatch.setattr(workspace, "WORKSPACE_BYTES", 1)
    monkeypatch.setattr(workspace, "MIN_COLUMNS", 3)
    a = call(rule, Shape(2, 11 * C + 1, 1, 2, 8, 8), state="none") | {"output_final_state": False}
    compare(rule, a, 3, results, float64_bounds)


@pytest.mark.parametrize("gate", ["-5", "-1e-3", "reset one", "reset all"])
def test_gates_that_forget_at_once_or_slowly(gate: str, results, float64_bounds):
    """Borders cut off no history, whether gates keep the first token or forget it at once."""
    a = call("kda", Shape(1, 20 * C, 1, 1, 8, 8), gate=gate)
    compare("kda", a, 5, results, float64_bounds)


@pytest.mark.parametrize("wanted", [("q",), ("initial_state",), ("v", "beta")], ids=" ".join)
def test_some_gradients(wanted: tuple[str, ...], results, float64_bounds):
    a, op = call("kda", Shape(1, 9 * C, 1, 1, 8, 16)), wyfold.chunk_kda
    whole = results(op, a, wanted)
    with segment_rule.forced(4):
        cut = results(op, a, wanted)
    for name in wanted:
        float64_bounds.gradient(name, cut[f"d{name}"], whole[f"d{name}"])


@pytest.mark.parametrize("keep", [False, True], ids=["recomputed", "kept"])
@pytest.mark.parametrize("N", [None, 3], ids=["dense", "packed"])
def test_saved_tensors_have_the_sizes_from_metadata(N: int | None, keep: bool, results, monkeypatch):
    seen, forward = [], delta_eager_segments.forward

    def watched(t: Any, options: Any, out: Tensor | None = None) -> Any:
        found = forward(t, options, out)
        seen.append(([x.shape for x in found[1]], [x.shape for x in delta_eager_segments.saved(t, options)]))
        return found

    monkeypatch.setattr(delta_eager_segments, "forward", watched)
    a = call("kda", Shape(2 if N is None else 1, 9 * C + 3, 1, 2, 8, 16), N)
    if N is not None:
        a["cu_seqlens"] = torch.tensor([0, 4 * C, 4 * C, 9 * C])
    with segment_rule.forced(3):
        results(wyfold.chunk_kda, a, disable_recompute=keep)
    ((real, promised),) = seen
    assert real == promised


# --- which sequences are cut -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [4 * 3 * C - C, 4 * 3 * C - 1, 4 * 3 * C, 4 * 3 * C + 1])
def test_around_the_threshold(length: int, results, monkeypatch):
    """Sequences below the threshold keep the bits of whole ones; at and above it, states are folded."""
    folded, launches = [], table.kernel_module

    def watched(stage: str, backend: str) -> Any:
        folded.append(stage == "segment_fold")
        return launches(stage, backend)

    monkeypatch.setattr(table, "kernel_module", watched)
    a = call("gated_delta_rule", Shape(1, length, 1, 2, 8, 8))
    with segment_rule.forced(4, chunks=3):
        cut = results(wyfold.chunk_gdn, a)
    assert any(folded) == (length > 4 * 3 * C - C)
    whole = results(wyfold.chunk_gdn, a)
    assert torch.equal(cut["o"], whole["o"]) != any(folded)


def test_neighbours_change_no_bit(rule: str, results):
    """A sequence in a packed buffer is cut like the same sequence alone."""
    lengths = (9 * C, 5, 30 * C, 0, 12 * C + 7)
    a = call(rule, Shape(1, sum(lengths), 1, 2, 16, 8), len(lengths))
    borders = [0, *itertools.accumulate(lengths)]
    op, parameters = getattr(wyfold, f"chunk_{rule}"), ("A_log", "dt_bias")
    fed = {"o": inputs.incoming(a["v"], 1), "state": inputs.incoming(a["initial_state"], 2)}
    with segment_rule.forced(8, chunks=2):
        packed = results(op, a, None, fed, cu_seqlens=torch.tensor(borders))
        for n, (begin, end) in enumerate(itertools.pairwise(borders)):
            alone = {name: x[:, begin:end] if isinstance(x, Tensor) and x.ndim > 2 else x for name, x in a.items()}
            alone |= {name: a[name] for name in parameters if name in a}
            alone["initial_state"] = a["initial_state"][n : n + 1]
            expected = results(op, alone, None, {"o": fed["o"][:, begin:end], "state": fed["state"][n : n + 1]})
            for name, x in expected.items():
                if name.removeprefix("d") in parameters:
                    continue
                got = packed[name][n : n + 1] if "state" in name else packed[name][:, begin:end]
                assert torch.equal(got, x), (n, name)


def test_options_that_forbid_segments(results):
    a = call("kda", Shape(1, 9 * C, 1, 1, 8, 8))
    whole = results(wyfold.chunk_kda, a)
    with segment_rule.forced(4):
        for options in ({"batch_invariant": True}, {"max_splits": 1}):
            plan = wyfold.explain(wyfold.chunk_kda, **a, **options)
            assert plan.segments == 1 and not any(launch.startswith("segment_fold ") for launch in plan.forward)
            assert all(torch.equal(x, whole[name]) for name, x in results(wyfold.chunk_kda, a, **options).items())
        states = results(wyfold.chunk_kda, a, (), return_intermediate_states=True, checkpoint_every=C)
        assert torch.equal(states["o"], whole["o"])
        assert wyfold.explain(wyfold.chunk_kda, **a).segments == 3
        assert wyfold.explain(wyfold.chunk_kda, **a, max_splits=2).segments == 2
    assert wyfold.explain(wyfold.chunk_kda, **a).segments == 1


@pytest.mark.parametrize("splits", [0, -1])
def test_a_cap_below_one_is_refused(splits: int):
    a = call("kda", Shape(1, 20, 1, 1, 8, 8))
    with pytest.raises(ValueError, match="chunk_kda: max_splits must be"):
        wyfold.chunk_kda(**a, max_splits=splits)


# --- the rule --------------------------------------------------------------------------------------------------------

H200 = 132


@pytest.mark.parametrize(
    "heads, V, T, segments_of_it",
    [
        (8, 128, 65536, 8),
        (4, 128, 65536, 16),
        (16, 128, 65536, 4),
        (17, 128, 65536, 1),
        (12, 128, 65536, 5),
        (8, 64, 65536, 16),
        (4, 128, 16384, 16),
        (2, 128, 16384, 16),
        (8, 128, 5120, 8),
        (8, 128, 8256, 8),
        (4, 128, 9216, 9),
        (4, 128, 8128, 8),
        (8, 128, 8192, 8),
        (9, 128, 8128, 1),
        (9, 128, 8192, 4),
        (16, 128, 8192, 4),
        (1, 128, 1 << 20, 66),
        (96, 128, 8192, 1),
        (1, 256, 65536, 1),
        (8, 128, segment_rule.SHORTEST - 64, 1),
        (8, 128, segment_rule.SHORTEST - 63, 8),
        (8, 128, segment_rule.SHORTEST, 8),
        (8, 128, segment_rule.SHORTEST + 1, 8),
        (4, 128, segment_rule.SHORTEST // 2 - 64, 1),
        (4, 128, segment_rule.SHORTEST // 2 - 63, 8),
        (2, 128, segment_rule.SHORTEST // 2, 8),
        (4, 128, 3000, 8),
        (5, 128, segment_rule.SHORTEST // 2, 1),
    ],
)
def test_the_rule_on_a_card(heads: int, V: int, T: int, segments_of_it: int):
    for chunk_size in (32, 64):
        cut = segment_rule.cut(heads, 128, V, chunk_size, H200)
        if T % 64 == 0 or chunk_size == 64:
            assert cut.segments(-(-T // chunk_size)) == segments_of_it


@pytest.mark.parametrize("heads, batch", [(1, 1), (3, 1), (8, 1), (12, 1), (16, 1), (1, 3), (2, 8), (8, 2), (1, 16)])
def test_segments_of_a_batch_run_at_once_and_share_its_work(heads: int, batch: int):
    """At most one program per multiprocessor, with a nearly even split of the sequence's chunks."""
    cut = segment_rule.cut(heads, 128, 128, 64, H200, batch=batch)
    heads *= batch
    for tokens in range(2 * segment_rule.SHORTEST, 1 << 20, 12345):
        chunks = -(-tokens // 64)
        count = cut.segments(chunks)
        longest = cut.length(chunks)
        assert count >= CUT_FROM and count * heads * 2 <= H200
        assert longest * 64 >= segment_rule.SHORTEST // CUT_FROM * (1 if heads <= 8 else 2)
        assert longest == cut.chunks or (count + 1) * heads * 2 > H200 or longest * count < chunks + count


MEASURED = json.loads(Path(__file__).with_name("segment_times.json").read_text(encoding="utf-8"))


def test_no_measured_call_loses_to_whole_sequences():
    """On an H200 the rule's segments take at most 1.02 times the time of whole sequences, in both directions.

    The times are those of forced counts of segments: two families, mid and slow gates, B up to 16.
    """
    times: dict[tuple[object, ...], dict[int, list[float]]] = {}
    for *call, segments, forward, both in MEASURED["rows"]:
        times.setdefault(tuple(call), {})[segments] = [forward, both]
    gained = 0
    for (family, B, T, H, HV, gate), found in times.items():
        count = segment_rule.cut(HV, 128, 128, 64, H200, batch=B).segments(T // 64)
        gained += count > 1
        for taken, whole in zip(found[count], found[1], strict=True):
            assert taken <= 1.02 * whole, (family, B, T, H, HV, gate, count)
    assert (gained, len(times)) == (74, 134)


@pytest.mark.parametrize(
    "heads, longest, known", [(8, 4032, True), (8, 4033, False), (4, 1985, False), (4, 1984, True)]
)
def test_the_host_knows_short_sequences(heads: int, longest: int, known: bool):
    """A layout knows the longest sequence. How long a sequence has to be depends on the heads of v."""
    layout = wyfold.SequenceLayout.from_lengths([longest, 100], tokens=5000)
    q, v = torch.zeros(1, 5000, 1, 8), torch.zeros(1, 5000, heads, 128)
    assert known_short("op", q, v, layout, None) == known
    assert known_short("op", q, None, layout, None) == (longest <= 1984)


def test_a_full_batch_is_not_cut():
    """Eight rows of eight heads fill the GPU. The rule of one row would cut them, and lose up to three quarters."""
    assert segment_rule.cut(8, 128, 128, 64, H200).segments(4096 // 64) == 8
    assert segment_rule.cut(8, 128, 128, 64, H200, batch=8).segments(4096 // 64) == 1
    # Two rows leave space for four segments each.
    assert segment_rule.cut(8, 128, 128, 64, H200, batch=2).segments(8192 // 64) == 4


def test_batches_with_one_cut_have_one_compiled_graph():
    """The number of rows may be symbolic. A graph is compiled for each cut, not for each number of rows."""
    graphs = []

    @torch.compile(fullgraph=True, dynamic=None, backend=lambda module, _: graphs.append(module) or module)
    def compiled(q: Tensor, v: Tensor) -> Tensor:
        cut = call_cut(q, v, 64, None, packed=False, eager=False)
        return q.new_tensor(list(cut))

    torch.compiler.reset()
    for B, count in ((2, 1), (7, 2), (8, 2)):
        q, v = torch.zeros(B, 8192, 2, 8), torch.zeros(B, 8192, 2, 128)
        expected = call_cut(q, v, 64, None, packed=False, eager=False)
        assert Cut(*compiled(q, v).int().tolist()) == expected and expected.chunks
        assert len(graphs) == count, B


def test_the_docs_have_the_rules_numbers():
    text = (Path(__file__).resolve().parents[2] / "docs" / "segments.md").read_text(encoding="utf-8")
    assert f"`SHORTEST` = {segment_rule.SHORTEST} tokens" in text
    assert f"`SHORTEST / CUT_FROM` = {segment_rule.SHORTEST // CUT_FROM} tokens" in text
    assert f"`CUT_FROM` = {CUT_FROM} segments" in text
    assert f"`WIDEST` = {segment_rule.WIDEST}" in text
    one_row = ((65536, 8), (65536, 2), (16384, 4), (8192, 8), (8192, 16), (4096, 8), (4032, 8), (65536, 32))
    batches = ((2, (8192, 8)), (4, (4096, 4)), (8, (4096, 8)))
    for B, (T, heads) in (*((1, one) for one in one_row), *batches):
        count = segment_rule.cut(heads, 128, 128, 64, H200, batch=B).segments(T // 64)
        assert f"| {B} | {T:,} | {heads} | {count} |" in text


def test_a_cap_is_a_cap():
    for cap in range(1, 40):
        found = segment_rule.cut(8, 128, 128, 64, H200, cap)
        assert found.segments(1024) <= cap
        assert found.segments(1024) == 1 or found.segments(1024) >= CUT_FROM
    assert segment_rule.cut(8, 128, 128, 64, H200, 5).segments(1024) == 5


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_a_cap_of_eight_or_more_changes_no_shorter_cut(chunk_size: int):
    """Sequences of 2,048 tokens, which the rule cuts into 8 segments, were left whole under caps of 8 to 15."""
    for cap in range(SHORT, 40):
        for T in range(1984, 4608, 64):
            alone = segment_rule.cut(4, 128, 128, chunk_size, H200).length(T // chunk_size)
            assert segment_rule.cut(4, 128, 128, chunk_size, H200, cap).length(T // chunk_size) == alone, (cap, T)
    assert segment_rule.cut(4, 128, 128, chunk_size, H200, SHORT).segments(2048 // chunk_size) == SHORT
    assert segment_rule.cut(4, 128, 128, chunk_size, H200, SHORT - 1).segments(2048 // chunk_size) == 1


@pytest.mark.parametrize("cut", [Cut(1, 2, 4), Cut(1, 16, 4), Cut(3, 4, 12), Cut(32, 16, 64)], ids=str)
def test_segments_are_no_shorter_than_asked(cut: Cut):
    for chunks in range(600):
        count = cut.segments(chunks)
        assert 1 <= count <= cut.most
        few = SHORT if cut.most >= SHORT else 1
        assert count <= few or chunks >= (count - 1) * cut.chunks + 1
        assert (count > 1) == (chunks >= cut.fewest)
