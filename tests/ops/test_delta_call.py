"""The three delta rules against their token loops: all pairs of options, every length, every border.

Chunk and recurrent forms, all outputs, and all gradients against the autograd of the loop, in float64 to the bounds of
`float64_bounds`. Other dtypes are judged by `reference.error`.
"""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import wyfold
from wyfold import SequenceLayout, reference
from wyfold.autograd import delta as pipeline
from wyfold.reference import inputs
from wyfold.reference.error import judge, require
from wyfold.reference.shapes import (
    EVERY_LENGTH,
    PACKINGS,
    Packing,
    Shape,
    every_offset,
)
from wyfold.reference.targets import target

RULES = ("delta_rule", "gated_delta_rule", "kda")
FORMS = ("chunk", "fused_recurrent")
CHUNK_ONLY = ("chunk_size", "disable_recompute", "cu_seqlens_cpu", "backend")
F64 = torch.float64


def operator(rule: str, form: str):
    return getattr(wyfold, f"{form}_{rule}")


def truth_of(results, rule: str, arguments: dict[str, Any], wrt=None) -> dict[str, torch.Tensor]:
    meant = {name: x for name, x in arguments.items() if name not in CHUNK_ONLY}
    return results(getattr(reference, rule), meant, wrt)


def agree(float64_bounds, got: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> None:
    assert got.keys() == truth.keys()
    for name in truth:
        bound = float64_bounds.gradient if name.startswith("d") else float64_bounds.output
        bound(name, got[name], truth[name])


def boundaries(packing: Packing) -> torch.Tensor:
    return torch.tensor(packing.cu_seqlens, dtype=torch.int32)


# --- all pairs of options --------------------------------------------------------------------------------------------

CHUNKED = ("chunk 16", "chunk 32", "chunk 64", "chunk", "recurrent")
COMMON = {
    "form": CHUNKED,
    "shape": (
        Shape(2, 37, 1, 1, 8, 8),
        Shape(1, 65, 1, 2, 16, 24),
        Shape(2, 31, 2, 6, 24, 8),
        Shape(1, 96, 1, 4, 40, 16),
        Shape(1, 33, 1, 8, 8, 40),
        Shape(3, 17, 2, 2, 72, 8),
        Shape(1, 49, 1, 3, 8, 104),
        Shape(1, 20, 2, 4, 136, 16),
    ),
    "packing": ("dense", "packed", "packed, known on the CPU", "layout"),
    "scale": (None, 0.3, -2.0),
    "norm": (False, True),
    "beta": ("sigmoid", "none", "logits", "logits doubled"),
    "state": ("none", "normal", "v first"),
    "final": (False, True),
    "checkpoints": (None, "default", "each chunk", "each second"),
    "keep": (False, True),
    "state dtype": (None, F64, torch.float32),
    "loss": ("both", "o", "state"),
    "wrt": ("all", "q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias", "none"),
}
SCALAR_GATES = ("none", "weak", "any", "alternating", "model", "model, no A_log", "model, no dt_bias")
GATES = {
    "delta_rule": {},
    "gated_delta_rule": {"gate": SCALAR_GATES},
    "kda": {"gate": (*SCALAR_GATES, "model bounded"), "safe": (None, True, -2.5)},
}


def pairwise(choices: dict[str, tuple]) -> Iterator[dict[str, Any]]:
    """Cases that cover every pair of values of two options, chosen greedily."""
    names = list(choices)
    wanted = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i in range(len(choices[a]))
        for j in range(len(choices[b]))
    }
    draw = random.Random(0)
    while wanted:
        a, i, b, j = min(wanted)
        picked = {a: i, b: j}
        for name in draw.sample(names, len(names)):
            if name not in picked:
                picked[name] = max(
                    draw.sample(range(len(choices[name])), len(choices[name])),
                    key=lambda value, name=name: sum(
                        ((name, value, x, y) in wanted) or ((x, y, name, value) in wanted) for x, y in picked.items()
                    ),
                )
        met = {(x, picked[x], y, picked[y]) for x, y in itertools.combinations(names, 2)}
        wanted -= met
        yield {name: choices[name][value] for name, value in picked.items()}


CASES = {rule: list(pairwise(COMMON | GATES[rule])) for rule in RULES}


def arguments_of(rule: str, case: dict[str, Any], seed: int) -> tuple[str, dict[str, Any]]:
    """The form and the arguments of one case."""
    shape, gate = case["shape"], case.get("gate", "none")
    form = "fused_recurrent" if case["form"] == "recurrent" else "chunk"
    lengths = None
    if case["packing"] != "dense":
        lengths = random.Random(seed).choice(([17, 0, 34, 1], [5, 48], [0, 16, 16, 3], [70], [2, 31, 0]))
        shape = Shape(1, sum(lengths) + 3 * (seed % 2), shape.H, shape.HV, shape.K, shape.V)
    a = inputs.draw(
        "random",
        rule,
        shape,
        gate="zero" if gate == "none" else gate.partition(",")[0],
        beta="logits" if case["beta"].startswith("logits") else None,
        keys="huge" if case["norm"] else None,
        state="none" if case["state"] == "none" else "normal",
        sequences=None if lengths is None else len(lengths),
        dtype=F64,
        seed=seed,
    )
    a |= {"scale": case["scale"], "use_qk_l2norm_in_kernel": case["norm"], "output_final_state": case["final"]}
    a["state_dtype"] = case["state dtype"]
    if case["beta"] == "none":
        del a["beta"]
    a["allow_neg_eigval"] = case["beta"] == "logits doubled"
    if gate == "none":
        a.pop("g", None)
    for name in ("A_log", "dt_bias"):
        if gate.endswith(f"no {name}"):
            del a[name]
    if case["state"] == "v first":
        a["state_v_first"], a["initial_state"] = True, a["initial_state"].mT.contiguous()
    if case.get("safe") and "g" in a:
        a["safe_gate"] = True
        if isinstance(case["safe"], float) and "lower_bound" not in a:
            a["lower_bound"] = case["safe"]
    size = int(case["form"].partition(" ")[2] or 16)
    if case["checkpoints"]:
        a["return_intermediate_states"] = True
        a["checkpoint_every"] = {"default": None, "each chunk": size, "each second": 2 * size}[case["checkpoints"]]
    if lengths is not None:
        layout = SequenceLayout.from_lengths(lengths, tokens=shape.T)
        a["cu_seqlens"] = layout if case["packing"] == "layout" else layout.cu_seqlens
    if form == "chunk":
        a["disable_recompute"] = case["keep"]
        if case["form"] != "chunk":
            a["chunk_size"] = size
        if case["packing"] == "packed, known on the CPU":
            a["cu_seqlens_cpu"] = layout.cu_seqlens.clone()
    return form, a


@pytest.mark.parametrize("tenth", range(10))
@pytest.mark.parametrize("rule", [pytest.param("delta_rule", marks=pytest.mark.release), *RULES[1:]])
def test_all_pairs_of_options(rule: str, tenth: int, results, float64_bounds):
    for seed, case in list(enumerate(CASES[rule]))[tenth::10]:
        form, a = arguments_of(rule, case, seed)
        wrt = [case["wrt"]] if isinstance(a.get(case["wrt"]), torch.Tensor) else None
        if case["wrt"] == "none":
            wrt = []
        op = operator(rule, form)
        plain = results(op, a, ())
        # The incoming gradient: of o, of the final state, or of both.
        drawn = {name: inputs.incoming(plain[name], 7) for name in ("o", "state") if name in plain}
        fed = {name: drawn[name] for name in drawn if case["loss"] in (name, "both")} or {"o": drawn["o"]}
        meant = {name: x for name, x in a.items() if name not in CHUNK_ONLY}
        truth = results(getattr(reference, rule), meant, wrt, fed)
        got = results(op, a, wrt, fed)
        for name in plain:
            assert torch.equal(plain[name], got[name]), (case, name)
        for name, x in truth.items():
            if x.dtype == torch.float32:  # a returned state below the precision of the inputs is rounded once
                require(judge(got[name], x.double(), name=name, target=target("state", torch.float32)))
                got[name] = x = x.double()
                truth[name] = x
        try:
            agree(float64_bounds, got, truth)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def test_the_cases_cover_every_pair():
    for rule in RULES:
        choices = COMMON | GATES[rule]
        for a, b in itertools.combinations(choices, 2):
            met = {(repr(case[a]), repr(case[b])) for case in CASES[rule]}
            assert len(met) == len(choices[a]) * len(choices[b]), (rule, a, b)


# --- every length, every border --------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=RULES)
def every_length(request: pytest.FixtureRequest, results) -> tuple[str, dict, dict, dict]:
    """Rule, arguments, incoming gradients and truth; sequence b of the batch ends after EVERY_LENGTH[b] tokens.

    One token loop covers all lengths: a token with zero key, value, strength and decay leaves the state unchanged.
    """
    rule, longest = request.param, EVERY_LENGTH[-1]
    ends = torch.tensor(EVERY_LENGTH)
    a = inputs.draw("random", rule, Shape(len(ends), longest, 1, 1, 8, 8), state="normal", dtype=F64)
    past = torch.arange(longest) >= ends[:, None]
    for name in set(a) - {"initial_state"}:
        a[name][past] = 0
    a["output_final_state"] = True
    fed = {"o": inputs.incoming(a["v"], 1).masked_fill(past[..., None, None], 0)}
    fed["state"] = inputs.incoming(a["initial_state"], 2)
    return rule, a, fed, results(getattr(reference, rule), a, None, fed)


@pytest.mark.parametrize("form", ("chunk 16", "chunk 32", "chunk 64", "fused_recurrent"))
def test_every_length(form: str, every_length, results, float64_bounds):
    rule, a, fed, truth = every_length
    form, _, size = form.partition(" ")
    options = {"chunk_size": int(size)} if size else {}

    def alone(found: dict, b: int, T: int) -> dict:
        """The part of sequence b, without the tokens after its end."""
        of_states = ("state", "initial_state", "dinitial_state")
        rows = {name: x[b : b + 1] for name, x in found.items() if isinstance(x, torch.Tensor)}
        return found | {name: x if name in of_states else x[:, :T] for name, x in rows.items()}

    for b, T in enumerate(EVERY_LENGTH):
        if size != "16" and T % 16 not in (0, 1, 15):
            continue  # the recurrent form has no chunks, and larger chunks consist of blocks of 16 tokens
        got = results(operator(rule, form), alone(a, b, T), None, alone(fed, b, T), **options)
        agree(float64_bounds, got, alone(truth, b, T))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", PACKINGS)
def test_every_packing(name: str, rule: str, form: str, results, float64_bounds):
    packing = PACKINGS[name]
    shape, N = Shape(1, packing.tokens, 1, 2, 8, 16), len(packing.lengths())
    a = inputs.draw("random", rule, shape, state="normal", sequences=N, dtype=F64)
    a |= {"output_final_state": True, "return_intermediate_states": True, "cu_seqlens": boundaries(packing)}
    truth = truth_of(results, rule, a)
    last = packing.cu_seqlens[-1]
    for x in [a["q"], a["k"], a["v"], a["beta"], *([a["g"]] if "g" in a else [])]:
        x[:, last:] = torch.nan  # rows past the last boundary are never read
    got = results(operator(rule, form), a)
    agree(float64_bounds, got, truth)
    for name in ("o", "dq", "dk", "dv", "dbeta"):
        assert torch.equal(got[name][:, last:], torch.zeros_like(got[name][:, last:])), name
    empty = torch.tensor(packing.lengths()) == 0
    assert torch.equal(got["state"][empty], a["initial_state"][empty])
    assert torch.equal(results(operator(rule, form), a | {"cu_seqlens": boundaries(packing).long()}, ())["o"], got["o"])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("form", FORMS)
def test_a_border_at_every_offset_of_a_chunk(form: str, rule: str, results, float64_bounds):
    a = inputs.draw("random", rule, Shape(1, 32, 1, 1, 8, 8), state="normal", sequences=2, dtype=F64)
    a["output_final_state"] = True
    for packing in every_offset(16):
        a["cu_seqlens"] = boundaries(packing)
        agree(float64_bounds, results(operator(rule, form), a), truth_of(results, rule, a))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("B, T", [(0, 5), (2, 0), (0, 0)])
def test_no_tokens(B: int, T: int, rule: str, form: str, results):
    a = inputs.draw("random", rule, Shape(B, T, 1, 2, 8, 8), state="normal")
    got = results(operator(rule, form), a, output_final_state=True, return_intermediate_states=True)
    assert got["o"].shape == (B, T, 2, 8) and got["states"].shape == (B, 0, 2, 8, 8)
    assert torch.equal(got["state"], a["initial_state"])
    assert torch.equal(got["dinitial_state"], inputs.incoming(got["state"], 1))


# --- intermediate states-----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("every", [1, 3, 16, 48, 64, 100])
def test_intermediate_states_of_the_recurrent_form(every: int, rule: str, results, float64_bounds):
    shape = Shape(1, 131, 1, 2, 8, 16)
    a = inputs.draw("random", rule, shape, state="normal", sequences=3, dtype=F64)
    a |= {"return_intermediate_states": True, "checkpoint_every": every, "output_final_state": True}
    a["cu_seqlens"] = torch.tensor([0, 100, 100, 129])
    agree(float64_bounds, results(operator(rule, "fused_recurrent"), a), truth_of(results, rule, a))


@pytest.mark.parametrize("form", FORMS)
def test_intermediate_states_are_at_the_layouts_offsets(form: str, results):
    layout = SequenceLayout.from_lengths([70, 5, 0, 64, 33], tokens=180)
    a = inputs.draw("random", "gated_delta_rule", Shape(1, 180, 1, 1, 8, 8), state="normal", sequences=5)
    op = operator("gated_delta_rule", form)
    got = results(op, a, (), cu_seqlens=layout, return_intermediate_states=True, checkpoint_every=32)["states"]
    offsets = layout.checkpoint_offsets(32).tolist()
    assert got.shape[0] == 180 // 32
    for i, (begin, end) in enumerate(itertools.pairwise(layout.cu_seqlens.tolist())):
        for n, row in enumerate(range(offsets[i], offsets[i + 1]), start=1):
            alone = {name: x[:, begin : begin + 32 * n] for name, x in a.items() if name != "initial_state"}
            alone |= {"initial_state": a["initial_state"][i : i + 1], "output_final_state": True}
            assert torch.equal(got[row], results(op, alone, ())["state"][0]), (i, n)
        assert offsets[i + 1] - offsets[i] == (end - begin) // 32
    assert torch.equal(got[offsets[-1] :], torch.zeros_like(got[offsets[-1] :]))


def test_intermediate_states_have_no_gradient():
    a = inputs.draw("random", "kda", Shape(1, 64, 1, 1, 8, 8))
    a["q"].requires_grad_()
    o, _, states = wyfold.chunk_kda(**a, return_intermediate_states=True)
    assert o.requires_grad and not states.requires_grad


# --- dtypes ----------------------------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def judged(name: str, got: torch.Tensor, truth: torch.Tensor):
    """Judge 16-bit results by the rounded truth and float32 by its target: wide arithmetic and one rounding."""
    if got.dtype == torch.float32:
        row = {"initial_state": "h0"}.get(name[1:], name[1:])
        known = {"states": "state"}.get(name, f"d{row}" if name.startswith("d") else name)
        return judge(got, truth, name=name, target=target(known, torch.float32))
    return judge(got, truth, truth.to(got.dtype), name=name, per_token=got.ndim == 3)


@pytest.mark.parametrize("rule", [pytest.param("delta_rule", marks=pytest.mark.release), *RULES[1:]])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_of_gate_strength_and_state_vary_alone(dtype: torch.dtype, rule: str, results):
    choices = {"g": DTYPES, "beta": DTYPES, "initial_state": DTYPES, "state_dtype": (None, *DTYPES)}
    for seed, case in enumerate(pairwise(choices)):
        gate = ("weak", "model")[seed % 2]
        a = inputs.draw("random", rule, Shape(2, 40, 1, 2, 16, 8), gate=gate, state="normal", dtype=dtype, seed=seed)
        for name in ("g", "beta", "initial_state"):
            if name in a:
                a[name] = a[name].to(case[name])
        if "A_log" in a:
            a["A_log"], a["dt_bias"] = a["A_log"].to(case["beta"]), a["dt_bias"].to(case["initial_state"])
        wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in a.items()}
        state = a["initial_state"].to(case["state_dtype"] or torch.float32)
        fed = {"o": inputs.incoming(a["v"], 0), "state": inputs.incoming(state, 1)}
        wide_fed = {name: x.double() for name, x in fed.items()}
        truth = results(getattr(reference, rule), wide, None, wide_fed, output_final_state=True)
        for form in FORMS:
            got = results(operator(rule, form), a, None, fed, output_final_state=True, state_dtype=case["state_dtype"])
            assert got["o"].dtype == dtype and got["state"].dtype == (case["state_dtype"] or torch.float32)
            for name in a:
                if f"d{name}" in got:
                    assert got[f"d{name}"].dtype == a[name].dtype, name
            require(*(judged(name, got[name], truth[name]) for name in truth))


@pytest.mark.parametrize("rule", RULES)
def test_float64_in_float64_everywhere(rule: str, results):
    a = inputs.draw("random", rule, state="normal", dtype=F64)
    for form in FORMS:
        got = results(operator(rule, form), a, output_final_state=True, return_intermediate_states=True)
        assert {x.dtype for x in got.values()} == {F64}


# --- incoming and requested gradients --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
def test_each_subset_of_gradients_has_the_bits_of_all(rule: str, form: str, results):
    a = inputs.draw("random", rule, Shape(1, 5, 1, 2, 8, 8), gate="model", state="normal", dtype=F64)
    op = operator(rule, form)
    everything = results(op, a, output_final_state=True)
    names = [name.removeprefix("d") for name in everything if name.startswith("d")]
    for size in (1, 2, len(names) - 1):
        for wrt in itertools.combinations(names, size):
            some = results(op, a, wrt, output_final_state=True)
            assert [name for name in some if name.startswith("d")] == [f"d{name}" for name in wrt]
            for name in some:
                assert torch.equal(some[name], everything[name]), (wrt, name)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
def test_a_gradient_of_the_state_alone(rule: str, form: str, results, float64_bounds):
    a = inputs.draw("random", rule, Shape(2, 21, 1, 2, 8, 16), gate="model", state="normal", dtype=F64)
    a["output_final_state"] = True
    arrow = {"state": inputs.incoming(a["initial_state"], 3)}
    truth = results(getattr(reference, rule), a, None, arrow)
    got = results(operator(rule, form), a, None, arrow)
    agree(float64_bounds, got, truth)
    assert torch.equal(got["dq"], torch.zeros_like(got["dq"]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
def test_a_huge_or_tiny_incoming_gradient(rule: str, form: str, results, float64_bounds):
    a = inputs.draw("random", rule, Shape(1, 40, 1, 1, 8, 8), state="normal", dtype=F64) | {"output_final_state": True}
    for size in (1e-8, 1e8):
        arrow = {"o": inputs.incoming(a["v"], 1, size)}
        truth = results(getattr(reference, rule), a, None, arrow)
        agree(float64_bounds, results(operator(rule, form), a, None, arrow), truth)


@pytest.mark.parametrize("rule", RULES)
def test_grouped_heads_are_copies_summed(rule: str, results, float64_bounds):
    a = inputs.draw("random", rule, Shape(2, 35, 2, 6, 8, 16), dtype=F64)
    grouped = results(operator(rule, "chunk"), a)
    spread = results(operator(rule, "chunk"), a | {name: a[name].repeat_interleave(3, 2) for name in ("q", "k")})
    for name in ("dq", "dk"):
        spread[name] = spread[name].unflatten(2, (2, 3)).sum(3)
    agree(float64_bounds, grouped, spread)


# --- common pitfalls -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_cu_seqlens_cpu_changes_no_bit(rule: str, results):
    a = inputs.draw("random", rule, Shape(1, 90, 1, 2, 8, 8), state="normal", sequences=3)
    a |= {"cu_seqlens": torch.tensor([0, 33, 33, 80]), "output_final_state": True, "return_intermediate_states": True}
    without = results(operator(rule, "chunk"), a)
    for dtype in (torch.int32, torch.int64):
        with_them = results(operator(rule, "chunk"), a, cu_seqlens_cpu=torch.tensor([0, 33, 33, 80], dtype=dtype))
        assert all(torch.equal(with_them[name], without[name]) for name in without)


def test_cu_seqlens_cpu_must_equal_cu_seqlens():
    q = torch.randn(1, 20, 1, 8)
    long = torch.zeros(1, 20_000, 1, 8)
    with pytest.raises(ValueError, match="chunk_delta_rule: cu_seqlens_cpu must be int32 or int64"):
        wyfold.chunk_delta_rule(long, long, long, cu_seqlens=torch.tensor([0, 9]), cu_seqlens_cpu=torch.zeros(2))
    with pytest.raises(ValueError, match="chunk_delta_rule: cu_seqlens_cpu must hold the boundaries of cu_seqlens"):
        wyfold.chunk_delta_rule(q, q, q, cu_seqlens=torch.tensor([0, 10, 20]), cu_seqlens_cpu=torch.tensor([0, 3, 20]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
def test_autocast_casts_q_k_and_v_to_one_dtype(rule: str, form: str):
    """Inside autocast q, k and v may differ in dtype: norms return float32, matrix products the narrow dtype."""
    op, (q, k) = operator(rule, form), torch.randn(2, 1, 20, 2, 8)
    v = torch.randn(1, 20, 2, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        o, _ = op(q, k, v, use_qk_l2norm_in_kernel=True)
        wide, _ = op(q.double(), k.double(), v.double(), use_qk_l2norm_in_kernel=True)
        with pytest.raises(ValueError, match="v must have the dtype of q, float64, got bfloat16"):
            op(q.double(), k.double(), v)
    assert torch.equal(o, op(q.bfloat16(), k.bfloat16(), v, use_qk_l2norm_in_kernel=True)[0])
    assert wide.dtype == F64  # autocast does not cast float64 for PyTorch's matrix products either
    assert torch.equal(wide, op(q.double(), k.double(), v.double(), use_qk_l2norm_in_kernel=True)[0])


@pytest.mark.parametrize("rule", RULES)
def test_flags_that_change_no_bit(rule: str, results):
    a = inputs.draw("random", rule, Shape(2, 50, 1, 2, 8, 8), state="normal") | {"output_final_state": True}
    plain = results(operator(rule, "chunk"), a)
    for options in ({"disable_recompute": True}, {"batch_invariant": True}, {"backend": "eager"}):
        other = results(operator(rule, "chunk"), a | options)
        assert all(torch.equal(other[name], plain[name]) for name in plain), options


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
def test_inputs_are_never_written(rule: str, form: str, results):
    a = inputs.draw("random", rule, Shape(1, 40, 1, 2, 8, 8), gate="model", state="normal")
    before = {name: x.clone() for name, x in a.items() if isinstance(x, torch.Tensor)}
    results(operator(rule, form), a, output_final_state=True, use_qk_l2norm_in_kernel=True)
    assert all(torch.equal(a[name], x) for name, x in before.items())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
def test_without_gradients_same_bits_and_nothing_saved(rule: str, form: str, results, monkeypatch):
    a = inputs.draw("random", rule, Shape(1, 40, 1, 2, 8, 8), state="normal") | {"output_final_state": True}
    wanted = {name: x.requires_grad_() if name in ("q", "g") else x for name, x in a.items()}
    op = operator(rule, form)
    o, state = (x.detach() for x in op(**wanted))
    kept = []
    forward_op = pipeline._forward_op

    def watched(*arguments):
        outputs = forward_op(*arguments)
        kept.append(sum(x.numel() for x in outputs[3]))
        return outputs

    monkeypatch.setattr(pipeline, "_forward_op", watched)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            quiet_o, quiet_state = op(**wanted)
        assert torch.equal(quiet_o, o) and torch.equal(quiet_state, state)
        assert quiet_o.grad_fn is None and not quiet_o.requires_grad and not quiet_state.requires_grad
    plain = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in wanted.items()}
    assert torch.equal(op(**plain)[0], o)
    assert kept == [0, 0, 0]
    op(**wanted)
    assert kept[-1] > 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
def test_v_first_states_are_transposed_k_first_states(rule: str, form: str, results):
    a = inputs.draw("random", rule, Shape(2, 20, 1, 1, 8, 16), state="normal") | {"output_final_state": True}
    fed = {"o": inputs.incoming(a["v"], 1), "state": inputs.incoming(a["initial_state"], 2)}
    turned = a | {"initial_state": a["initial_state"].mT, "state_v_first": True}
    k_first = results(operator(rule, form), a, None, fed)
    v_first = results(operator(rule, form), turned, None, fed | {"state": fed["state"].mT})
    for name in k_first:
        x = v_first[name].mT if name in ("state", "dinitial_state") else v_first[name]
        assert torch.equal(k_first[name], x), name


def test_a_number_may_change_in_a_compiled_function():
    """The compiler makes a number symbolic from its second value on."""
    q, k, v = torch.randn(3, 1, 20, 2, 8).unbind()

    def call(scale: float) -> torch.Tensor:
        return wyfold.chunk_delta_rule(q, k, v, scale=scale)[0]

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    for scale in (0.5, 0.25, 0.125):
        assert torch.equal(compiled(scale), call(scale))
