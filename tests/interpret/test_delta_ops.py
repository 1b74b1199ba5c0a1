"""Accuracy of the delta rules and GLA on kernels: outputs, states and gradients against the float64 token loop.

Every value of every option occurs, in combinations from a fixed draw; lengths lie around the chunk size. Inputs are
surrounded by NaN. Where the arithmetic is float32, its targets decide; a 16-bit result is compared with the truth
rounded once. Where operands are rounded to 16 bits, the limit of each measure is from the larger of two errors: that of
half an ulp on 16-bit inputs, and that of the roundings of 16-bit kernels (`reference.rounded`).
"""

import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import wyfold
from wyfold import SequenceLayout, reference
from wyfold.reference import inputs, rounded
from wyfold.reference.error import Verdict, half_ulp_away, judge, require
from wyfold.reference.shapes import Shape
from wyfold.reference.targets import target

dot = pytest.importorskip("wyfold.tile.dot.triton", reason="Triton is not installed")

RULES = ("delta_rule", "gated_delta_rule", "kda")
WITH_GLA = (*RULES, "gla")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NOT_OF_THE_LOOP = ("chunk_size", "disable_recompute", "cu_seqlens_cpu", "state_dtype")

OPTIONS = {
    "chunk": (16, 32, 64),
    "lengths": (1, 15, 16, 17, 63, 64, 65, 100, [17, 0, 34, 1], [0, 16, 16, 3], [70], [2, 31, 0], [0]),
    "spare": (0, 0, 5),
    "shape": (
        Shape(1, 0, 1, 1, 8, 24),
        Shape(2, 0, 1, 1, 24, 8),
        Shape(1, 0, 1, 2, 16, 40),
        Shape(1, 0, 2, 2, 40, 16),
        Shape(1, 0, 1, 3, 24, 24),
        Shape(1, 0, 2, 4, 8, 8),
    ),
    "dtype": (FP32, FP32, FP16, BF16),
    "scale": (None, 0.3, -2.0),
    "norm": (False, True),
    "beta": ("sigmoid", "none", "logits", "logits doubled"),
    "state": ("none", "normal", "v first", "in 16 bits"),
    "state dtype": (None, FP32, BF16),
    "final": (True, True, False),
    "checkpoints": (0, 0, 1, 2),
    "keep": (False, True),
    "loss": ("both", "o", "state"),
    "gate dtype": (None, BF16),
}
SCALAR_GATES = ("weak", "any", "alternating", "reset one", "none", "model", "model, no A_log", "model, no dt_bias")
GATES = {
    "delta_rule": {},
    "gated_delta_rule": {"gate": SCALAR_GATES},
    "kda": {"gate": (*SCALAR_GATES, "model bounded"), "safe": (None, True, -2.5)},
    "gla": {"gate": ("weak", "any", "alternating", "reset one", "none", "weak, of a head", "any, of a head")},
}
NOT_OF_GLA = ("beta", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval")
CASES = 13  # as many as the option with the most values has


def mixed(choices: dict[str, tuple], seed: int, cases: int = CASES) -> list[dict[str, Any]]:
    """Cases in which every value of every option occurs. Each option cycles through its values in its own order."""
    draw = random.Random(seed)
    columns = {}
    for name, values in choices.items():
        column = [values[i % len(values)] for i in range(cases)]
        columns[name] = draw.sample(column, cases)
    return [{name: column[i] for name, column in columns.items()} for i in range(cases)]


MIXED = [(rule, i, case) for n, rule in enumerate(WITH_GLA) for i, case in enumerate(mixed(OPTIONS | GATES[rule], n))]


def arguments_of(rule: str, case: dict[str, Any], seed: int) -> dict[str, Any]:
    """Arguments of one case, on the CPU."""
    shape, dtype, gate, lengths = case["shape"], case["dtype"], case.get("gate", "none"), case["lengths"]
    packed = isinstance(lengths, list)
    B, T = (1, sum(lengths) + case["spare"]) if packed else (shape.B, lengths)
    a = inputs.draw(
        "random",
        rule,
        Shape(B, T, shape.H, shape.HV, shape.K, shape.V),
        gate="zero" if gate == "none" else gate.partition(",")[0],
        beta="logits" if case["beta"].startswith("logits") else None,
        keys="huge" if case["norm"] and dtype != FP16 else None,
        state="none" if case["state"] == "none" else "normal",
        sequences=len(lengths) if packed else None,
        dtype=dtype,
        seed=seed,
    )
    a |= {"scale": case["scale"], "use_qk_l2norm_in_kernel": case["norm"], "chunk_size": case["chunk"]}
    a |= {"output_final_state": case["final"] or case["loss"] == "state", "state_dtype": case["state dtype"]}
    a |= {"disable_recompute": case["keep"], "allow_neg_eigval": case["beta"] == "logits doubled"}
    if case["beta"] == "none":
        a.pop("beta", None)
    if gate == "none":
        a.pop("g", None)
    elif case["gate dtype"]:
        a |= {name: a[name].to(case["gate dtype"]) for name in ("g", "A_log", "dt_bias") if name in a}
    for name in ("A_log", "dt_bias"):
        if gate.endswith(f"no {name}"):
            del a[name]
    if case["state"] == "v first":
        a |= {"state_v_first": True, "initial_state": a["initial_state"].mT.contiguous()}
    if case["state"] == "in 16 bits":
        a["initial_state"] = a["initial_state"].to(FP16)
    if case.get("safe") and "g" in a:
        a["safe_gate"] = True
        if isinstance(case["safe"], float) and "lower_bound" not in a:
            a["lower_bound"] = case["safe"]
    if case["checkpoints"]:
        a |= {"return_intermediate_states": True, "checkpoint_every": case["checkpoints"] * case["chunk"]}
    if packed:
        a["cu_seqlens"] = SequenceLayout.from_lengths(lengths, tokens=T).cu_seqlens
    if rule == "gla":
        if gate.endswith("of a head"):
            a["g"] = a["g"][..., 0].contiguous()
        a = {name: x for name, x in a.items() if name not in NOT_OF_GLA}
    return a


def parameters(cases: list[tuple[str, int, dict]]) -> list:
    """Parameters of a test. No gate is a scalar gate left out, so an interpreter runs its cases before a release."""
    return [
        pytest.param(*case, id=f"{case[0]}-{case[1]}", marks=LATER if case[0] == "delta_rule" else []) for case in cases
    ]


LATER = [pytest.mark.release_if_interpreted]


@pytest.mark.parametrize("rule, seed, case", parameters(MIXED))
def test_every_option(rule: str, seed: int, case: dict, device, guarded, results):
    a, family = arguments_of(rule, case, seed), "random"
    if case.get("gate") == "alternating":
        family = "gate alternating"
    require(*verdicts(rule, a, case["loss"], family, device, guarded, results))


@pytest.fixture
def tf32(monkeypatch):
    """Interpreted kernels of float16 round operands to TF32, and split those of exact products, as on a GPU."""
    cached = dot.precision, dot.exact
    with monkeypatch.context() as patch:
        patch.setattr(dot, "interpreting", lambda: False)
        for function in cached:
            function.cache_clear()
        yield
    for function in cached:
        function.cache_clear()


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("rule, seed, case", parameters([x for x in MIXED if x[2]["dtype"] == FP16]))
def test_float16_as_on_a_gpu(rule: str, seed: int, case: dict, device, guarded, results):
    if device.type != "cpu":
        pytest.skip(f"test_every_option has these cases where tensors are on {device.type}")
    a = arguments_of(rule, case, seed)
    require(*verdicts(rule, a, case["loss"], "random", device, guarded, results))


WIDE = [
    pytest.param(
        rule,
        dtype,
        (i + j) % 2 == 1,
        id=f"{rule}-{dtype}-{'packed' if (i + j) % 2 else 'dense'}",
        marks=LATER if rule == "delta_rule" else [],
    )
    for i, rule in enumerate(RULES)
    for j, dtype in enumerate((BF16, FP32))
]
"""Each rule in both dtypes, dense in one and packed in the other."""


@pytest.mark.parametrize("rule, dtype, packed", WIDE)
def test_as_wide_as_a_model(rule: str, dtype: torch.dtype, packed: bool, device, guarded, results):
    a = inputs.draw(
        "random",
        rule,
        Shape(1, 100, 1, 1, 128, 128),
        gate="model" if packed else "weak",
        state="normal",
        sequences=2 if packed else None,
        dtype=dtype,
    )
    a |= {"output_final_state": True, "use_qk_l2norm_in_kernel": packed, "chunk_size": 64}
    if packed:
        a["cu_seqlens"] = torch.tensor([0, 33, 98])
    require(*verdicts(rule, a, "both", "random", device, guarded, results))


@pytest.mark.parametrize("scale", [0.0, -1e-15, 1e15])
@pytest.mark.parametrize("rule", [pytest.param("delta_rule", marks=pytest.mark.release_if_interpreted), *RULES[1:]])
def test_any_scale(rule: str, scale: float, device, guarded, results):
    """Intermediate gradients are in units of the scale, unless it is zero, nearly zero or huge."""
    gate = None if rule == "delta_rule" else "weak"
    a = inputs.draw("random", rule, Shape(1, 70, 1, 2, 16, 24), gate=gate, state="normal", dtype=FP32)
    a |= {"scale": scale, "output_final_state": True, "chunk_size": 32}
    require(*verdicts(rule, a, "both", "random", device, guarded, results))


def verdicts(
    rule: str, a: dict[str, Any], loss: str, family: str, device, guarded, results, form: str = "chunk"
) -> list[Verdict]:
    """Verdicts on every result of the kernels; shapes and dtypes must be those of the eager backend."""
    op: Callable = getattr(wyfold, f"{form}_{rule}")
    eager = results(op, a, (), backend="eager")
    drawn = {name: inputs.incoming(eager[name], 7) for name in ("o", "state") if name in eager}
    fed = {name: x for name, x in drawn.items() if loss in (name, "both")}
    eager = results(op, a, None, fed, backend="eager")
    there = {name: guarded(x.to(device)) if floating(x) else moved(x, device) for name, x in a.items()}
    got = results(op, there, None, {name: moved(x, device) for name, x in fed.items()}, backend="triton")

    def loop(wide: Callable[[Tensor, int], Tensor]) -> dict[str, Tensor]:
        """The token loop in float64; `wide` maps a tensor and its number to the float64 input."""
        meant = {name: x for name, x in a.items() if name not in NOT_OF_THE_LOOP}
        numbered = {name: wide(x, i) if floating(x) else x for i, (name, x) in enumerate(meant.items())}
        back = {name: wide(x, -i) for i, (name, x) in enumerate(fed.items(), start=1)}
        return results(getattr(reference, rule), numbered, None, back)

    truth = loop(lambda x, i: x.double())
    assert got.keys() == eager.keys() == truth.keys()
    for name, x in eager.items():
        assert (got[name].dtype, got[name].shape) == (x.dtype, x.shape), name
    dtype = a["q"].dtype
    if dtype == FP32 or (dtype == FP16 and dot.precision(dtype) == "ieee"):
        return [_of_float32(name, got[name].cpu(), x, family) for name, x in truth.items()]
    away = [loop(lambda x, i, seed=seed: half_ulp_away(x.to(dtype), 100 * seed + i)) for seed in range(1, 4)]
    if form == "chunk":
        away.append(_rounded_like_kernels(a | {"erases": rule != "gla"}, fed, results))
    return [
        _of_16_bits(name, got[name].cpu(), x, [other[name] for other in away if name in other])
        for name, x in truth.items()
    ]


def _rounded_like_kernels(a: dict[str, Any], fed: dict[str, Tensor], results) -> dict[str, Tensor]:
    """Results of the chunk form with the roundings of kernels. It has no intermediate states and no V-first layout."""
    known = inspect.signature(rounded.chunked).parameters

    def swap_state_layout(tensors: dict[str, Any]) -> dict[str, Any]:
        states = ("state", "initial_state", "dinitial_state") if a.get("state_v_first") else ()
        return {name: x.mT if name in states else x for name, x in tensors.items()}

    given = swap_state_layout({name: x for name, x in a.items() if name in known})
    return swap_state_layout(results(rounded.chunked, given, None, swap_state_layout(fed)))


def _of_float32(name: str, got: Tensor, truth: Tensor, family: str) -> Verdict:
    if got.dtype != FP32:
        return judge(got, truth, truth.to(got.dtype), name=name, per_token=got.ndim == 3)
    row = {"states": "state", "dinitial_state": "dh0"}.get(name, name)
    return judge(got, truth, name=name, target=target(row, FP32, family))


def _of_16_bits(name: str, got: Tensor, truth: Tensor, away: list[Tensor]) -> Verdict:
    return judge(got, truth, [x.to(got.dtype) for x in away], name=name, per_token=got.ndim == 3)


def floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def moved(x: Any, device: torch.device) -> Any:
    return x.to(device) if isinstance(x, Tensor) else x


def test_every_value_occurs(device):
    for rule in WITH_GLA:
        for name, values in (OPTIONS | GATES[rule]).items():
            met = [repr(case[name]) for of, _, case in MIXED if of == rule]
            assert set(met) == set(map(repr, values)), (rule, name)
