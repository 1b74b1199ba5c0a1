"""Sequences in segments on kernels: accuracy against the float64 token loop, and bitwise promises.

The segments of a sequence do not depend on other sequences; an uncut sequence has the bits of a call without segments.
"""

import itertools
import math
from typing import Any

import pytest
import torch
from tests.interpret.test_delta_compile import recorded as recorded
from tests.interpret.test_delta_ops import verdicts
from torch import Tensor

import wyfold
from wyfold.autograd import kernel_call
from wyfold.autograd.kernel_call import KernelCall
from wyfold.kernels import table
from wyfold.reference import inputs
from wyfold.reference.error import require
from wyfold.reference.shapes import Shape
from wyfold.runtime import segment_rule
from wyfold.runtime.kernel_configs import Config

RULES = ("delta_rule", "gated_delta_rule", "kda")
PER_TOKEN = ("q", "k", "v", "g", "beta")
PARAMETERS = ("dA_log", "ddt_bias")
C = 16


def call(rule: str, shape: Shape, device: torch.device, N: int | None = None, **drawn: Any) -> dict[str, Any]:
    drawn = {"gate": "model", "beta": "logits", "state": "normal", "sequences": N} | drawn
    a = inputs.draw("random", rule, shape, **drawn)
    a |= {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "chunk_size": C, "backend": "triton"}
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in a.items()}


def packed(rule: str, lengths: tuple[int, ...], device: torch.device, spare: int = 0, **drawn: Any) -> dict[str, Any]:
    a = call(rule, Shape(1, sum(lengths) + spare, 1, 2, 16, 24), device, len(lengths), **drawn)
    return a | {"cu_seqlens": torch.tensor([0, *itertools.accumulate(lengths)], device=device)}


@pytest.mark.parametrize(
    "rule, lengths, dtype, count",
    [
        ("delta_rule", None, torch.float32, 3),
        ("gated_delta_rule", (0, 1, 66, 15, 0, 100), torch.float32, 4),
        ("kda", (64, 3, 81), torch.float32, 2),
        ("kda", None, torch.float16, 16),
        ("gated_delta_rule", None, torch.bfloat16, 5),
    ],
)
def test_cut_calls(rule: str, lengths, dtype: torch.dtype, count: int, device, guarded, results):
    """Outputs, states and every gradient, of the kernels and of the eager implementation with the same segments."""
    shape = Shape(1, 85, 1, 2, 16, 24) if lengths is None else Shape(1, sum(lengths) + 4, 1, 2, 24, 16)
    N = None if lengths is None else len(lengths)
    a = inputs.draw("random", rule, shape, gate="model", beta="logits", state="normal", sequences=N, dtype=dtype)
    a |= {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "chunk_size": C}
    if lengths is not None:
        a["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(lengths)])
    with segment_rule.forced(count):
        assert wyfold.explain(getattr(wyfold, f"chunk_{rule}"), **a).segments > 1
        require(*verdicts(rule, a, "both", "random", device, guarded, results))


@pytest.mark.parametrize(
    "rule, lengths",
    [pytest.param("gated_delta_rule", (5, 0, 98, 48), marks=pytest.mark.release_if_interpreted), ("kda", (3, 65))],
)
def test_neighbours_change_no_bit(rule: str, lengths: tuple[int, ...], device, results):
    """Cut sequences have the bits of a call alone, others those of a call without segments; padding rows are zero."""
    op = getattr(wyfold, f"chunk_{rule}")
    a = packed(rule, lengths, device, spare=3)
    T = sum(lengths)
    for name in PER_TOKEN:
        a[name][:, T:] = torch.nan
    fed = {"o": inputs.incoming(a["v"], 1), "state": inputs.incoming(a["initial_state"], 2)}
    fed["o"][:, T:] = torch.nan
    whole = results(op, a, None, fed)
    with segment_rule.forced(4):
        found = results(op, a, None, fed)
        assert not torch.equal(found["o"][:, :T], whole["o"][:, :T])
        for n, (begin, end) in enumerate(itertools.pairwise(a["cu_seqlens"].tolist())):
            alone = {name: x[:, begin:end] if name in PER_TOKEN else x for name, x in a.items() if name != "cu_seqlens"}
            alone["initial_state"] = a["initial_state"][n : n + 1]
            expected = results(op, alone, None, {"o": fed["o"][:, begin:end], "state": fed["state"][n : n + 1]})
            for name, x in expected.items():
                if name in PARAMETERS:
                    continue
                rows = (slice(n, n + 1),) if "state" in name else (slice(None), slice(begin, end))
                assert torch.equal(found[name][rows], x), (n, name)
                if end - begin < 64:
                    assert torch.equal(whole[name][rows], x), (n, name)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert not found[name][:, T:].any(), name


@pytest.mark.parametrize("rule", [pytest.param("gated_delta_rule", marks=pytest.mark.release_if_interpreted), "kda"])
@pytest.mark.parametrize("lost", ["", "initial_state", "dST"])
def test_maps_of_fast_decays_are_zeros(rule: str, lost: str, device, results, monkeypatch):
    """Zero maps are not folded, nothing is rounded twice, and non-finite values reach as far as without segments."""
    a = call(rule, Shape(1, 80, 1, 2, 16, 16), device, gate="-20")
    fed = {"o": inputs.incoming(a["v"], 1), "state": inputs.incoming(a["initial_state"], 2)}
    for name, x in {"initial_state": a["initial_state"], "dST": fed["state"]}.items():
        if name == lost:
            x[0, 1, 3, 5] = torch.nan
    op = getattr(wyfold, f"chunk_{rule}")
    whole = results(op, a, None, fed)
    with segment_rule.forced(5):
        found = results(op, a, None, fed)
    for name, x in whole.items():
        assert torch.equal(found[name].isfinite(), x.isfinite()), name
        assert torch.equal(found[name].nan_to_num(0, 0, 0), x.nan_to_num(0, 0, 0)), name
    assert found["o"].isfinite().all() == (lost != "initial_state")
    assert found["dk"].isfinite().all() == (not lost)


ALWAYS = lambda call, key: key.gate in ("scalar", "channel")


@pytest.mark.parametrize("rule", ["gated_delta_rule", "kda"])
def test_behind_the_horizon_sequences_have_the_bits_of_whole_ones(rule: str, device, results, monkeypatch):
    """Segments of four chunks, of which three are summarised."""
    monkeypatch.setattr(KernelCall, "begins_at_horizon", ALWAYS)
    a = call(rule, Shape(1, 128, 1, 2, 16, 16), device, gate="-20")
    fed = {"o": inputs.incoming(a["v"], 1), "state": inputs.incoming(a["initial_state"], 2)}
    op = getattr(wyfold, f"chunk_{rule}")
    whole = results(op, a, None, fed)
    with segment_rule.forced(2):
        found = results(op, a, None, fed)
    assert all(torch.equal(found[name], x) for name, x in whole.items())


@pytest.mark.parametrize(
    "rule, norm, configured",
    [
        ("gated_delta_rule", True, 1),
        ("gated_delta_rule", True, 0),
        ("gated_delta_rule", False, 1),
        ("gated_delta_rule", False, 0),
        ("kda", False, 1),
        ("kda", False, 0),
        ("kda", False, 2),
        ("kda", False, 3),
        ("delta_rule", True, 1),
    ],
)
def test_what_the_horizon_needs(rule: str, norm: bool, configured: int, device, monkeypatch):
    """A gate, and the configured number of chunks: here there are two.

    On a card every summary is asked for twice, once to collect the kernels that are compiled in parallel.
    """
    module, found = table.kernel_module("segment_summary", "triton"), []
    reads_keys = rule == "gated_delta_rule" and not norm
    blocks = {"HORIZON": 9, "ANY_KEYS": 9} | {"ANY_KEYS" if reads_keys else "HORIZON": configured}
    monkeypatch.setattr(kernel_call, "tuned", lambda *_: Config(blocks=blocks))
    monkeypatch.setattr(module, "segment_summary", lambda *_, horizon: found.append(horizon))
    a = call(rule, Shape(1, 4 * C, 1, 1, 16, 16), device) | {"use_qk_l2norm_in_kernel": norm}
    with segment_rule.forced(2), torch.no_grad():
        getattr(wyfold, f"chunk_{rule}")(**a)
    assert set(found) == {rule != "delta_rule" and configured in (1, 2)}


EDGE = {"inside": 91.8, "outside": 95.2}
"""Powers of two by which a chunk decays: three chunks leave a float32 of a state of 2^127, or nothing."""


@pytest.mark.parametrize("on", ["eager", "triton"])
@pytest.mark.parametrize(
    "rule, case",
    [
        ("gdn", "inside"),
        ("gdn", "outside"),
        ("gdn", "outside, but a beta above 2"),
        ("gdn, norm outside", "inside"),
        ("gdn, norm outside", "outside"),
        ("gdn, norm outside", "outside, but a beta above 2"),
        ("gdn, norm outside", "outside, but a key of norm 2"),
        ("kda", "inside"),
        ("kda", "outside"),
        ("kda", "outside, but another channel keeps its state"),
        ("gla", "inside"),
        ("gla", "outside"),
    ],
)
@pytest.mark.parametrize(
    "value",
    [pytest.param(2.0**127, id="largest"), pytest.param(torch.nan, id="NaN", marks=pytest.mark.release_if_interpreted)],
)
def test_summaries_begin_at_the_exact_horizon(value: float, rule: str, case: str, on: str, device, monkeypatch):
    """The only information of a segment is three chunks from its border: v of the first segment, do of the second.

    What is outside of the horizon has no effect, and would have none; what is inside arrives.
    """
    monkeypatch.setattr(KernelCall, "begins_at_horizon", ALWAYS)
    module, found = table.kernel_module("segment_summary", on), {}

    def watched(name: str) -> None:
        usual = getattr(module, name)

        def call(*arguments: Any, **options: Any) -> Any:
            result = usual(*arguments, **options)
            found[name] = arguments[-1 if name.endswith("bwd") else -2] if result is None else result
            return result

        monkeypatch.setattr(module, name, call)

    watched("segment_summary")
    watched("segment_summary_bwd")
    chunks, K = 12, 16
    zeros = torch.zeros(1, chunks * C, 1, K, device=device)
    q, k, v, do = zeros.clone(), zeros.clone(), zeros.clone(), zeros.clone()
    q[..., 0], k[..., 1] = 1, 1
    first, last = 3 * C - 1, 9 * C
    k[:, first], v[:, first, :, 2], do[:, last, :, 3] = q[:, 0], value, value
    g = torch.full((1, chunks * C, 1), -EDGE[case.split(",")[0]] / C * math.log(2), device=device)
    beta = torch.ones_like(g)
    if case.endswith("a beta above 2"):
        beta[:, [4 * C, 7 * C]] = 2.5
    if case.endswith("a key of norm 2"):
        k[:, [4 * C, 7 * C]] *= 2
    op, *outside = rule.split(", ")
    g[:, last] = 0
    options = {"scale": 1.0, "chunk_size": C, "backend": on}
    if op == "gdn":
        options["use_qk_l2norm_in_kernel"] = not outside
    written = () if rule == "gla" else (beta,)
    gates = g if op == "gdn" else g[..., None].repeat(1, 1, 1, K)
    if case not in EDGE and rule == "kda":
        gates[..., 4] = 0
    with segment_rule.forced(2):
        o, _ = getattr(wyfold, f"chunk_{op}")(q, k, v.requires_grad_(), gates, *written, **options)
        o.backward(do)
    # The eager launch returns the summaries of all segments, the kernels write those at the border.
    H, c = found["segment_summary"][0, 0, 0, 2], found["segment_summary_bwd"][-1, 0, 0, 3]
    for name, x in (("H", H), ("c", c)):
        if math.isnan(value):
            assert x.isnan() == (case != "outside"), name
        else:
            assert (x != 0) == (case == "inside"), name


@pytest.mark.parametrize("rule", [pytest.param("delta_rule", marks=pytest.mark.release_if_interpreted), "kda"])
def test_strided_is_contiguous_and_kept_is_recomputed(rule: str, device, results):
    """Rows that no TMA box can address, and V-first states."""
    a = call(rule, Shape(2, 66, 1, 1, 16, 16), device)
    fed = {"o": inputs.incoming(a["v"], 1), "state": inputs.incoming(a["initial_state"], 2)}
    buffer = torch.full((2, 67, 1, 17), torch.nan, device=device)
    strided = a | {"v": buffer[:, 1:, :, 1:].copy_(a["v"]), "initial_state": a["initial_state"].mT.contiguous().mT}
    with segment_rule.forced(3):
        first = results(op := getattr(wyfold, f"chunk_{rule}"), a, None, fed)
        for other, options in ((strided, {}), (a, {"disable_recompute": True})):
            again = results(op, other, None, fed, **options)
            for name, x in first.items():
                assert torch.equal(again[name], x), (name, options)


@pytest.mark.release_if_interpreted
def test_both_directions_by_opcheck(device, recorded, results):
    """The sizes of saved tensors come from metadata alone."""
    a = packed("gated_delta_rule", (66, 3), device, spare=2)
    with segment_rule.forced(2):
        results(wyfold.chunk_gdn, a, ["q", "initial_state"], disable_recompute=True)
    for operator, arguments in recorded.values():
        plain = tuple(x.detach() if isinstance(x, Tensor) else x for x in arguments)
        torch.library.opcheck(operator, plain)


def test_lengths_known_to_the_host(device, results, monkeypatch):
    """A long buffer is planned without segments if the host knows that its sequences are short; same bits."""
    monkeypatch.setattr(segment_rule, "SHORTEST", 256)
    lengths = (128 - 64, 20, 60)
    a = packed("gated_delta_rule", lengths, device)
    told = {"cu_seqlens": wyfold.SequenceLayout.from_lengths(list(lengths), device=device)}
    first = results(wyfold.chunk_gdn, a)
    assert wyfold.explain(wyfold.chunk_gdn, **a).segments > 1
    for known in (told, {"cu_seqlens_cpu": a["cu_seqlens"].cpu()}):
        assert wyfold.explain(wyfold.chunk_gdn, **a | known).segments == 1
        for name, x in results(wyfold.chunk_gdn, a | known).items():
            assert torch.equal(x, first[name]), name
    told["cu_seqlens"].update_(torch.tensor([0, 128, 128, 144], device=device))
    assert wyfold.explain(wyfold.chunk_gdn, **a | told).segments > 1
    moved = told["cu_seqlens"].cu_seqlens
    assert wyfold.explain(wyfold.chunk_gdn, **a | {"cu_seqlens": moved, "cu_seqlens_cpu": moved.cpu()}).segments > 1


@pytest.mark.parametrize("length, count", [(112, 1), (113, 8), (128, 8)])
def test_a_sequence_alone_is_counted_by_chunks_like_a_packed_one(length: int, count: int, device, results, monkeypatch):
    monkeypatch.setattr(segment_rule, "SHORTEST", 256)
    a = packed("gated_delta_rule", (length, 40), device)
    alone = {name: x[:, :length] if name in PER_TOKEN else x for name, x in a.items() if name != "cu_seqlens"}
    alone["initial_state"] = a["initial_state"][:1]
    assert wyfold.explain(wyfold.chunk_gdn, **alone).segments == count
    assert torch.equal(results(wyfold.chunk_gdn, alone, ())["o"], results(wyfold.chunk_gdn, a, ())["o"][:, :length])
