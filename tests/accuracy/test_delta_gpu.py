"""Accuracy of the delta rules' kernels on a GPU: every output and gradient by the rules of `error.judge`.

The truth is the token loop in float64 on the CPU. For long sequences it is the eager backend in float64, which other
tests compare with the loop. The yardstick of 16-bit results is `reference.rounded`, also on the CPU. Shape, dtype and
options determine what is compiled, so there are few of them, and each is used for many inputs.
"""

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import wyfold
from wyfold import reference
from wyfold.reference import inputs
from wyfold.reference.error import Verdict, half_ulp_away, judge, require, rms
from wyfold.reference.rounded import chunked
from wyfold.reference.shapes import Shape
from wyfold.reference.targets import target
from wyfold.runtime import segment_rule

RULES = ("delta_rule", "gated_delta_rule", "kda")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FAMILIES = ("random", "uniform+", "identical", "near-identical", "beta 2", "converged")
GATES = ("zero", "-1e-6", "-1", "-5", "-20", "-88", "-1e3", "-1e4", "any", "spiky", "dead channel")
RESETS = ("reset one", "reset first", "reset last", "reset all", "alternating")
WIDTHS = [("gated_delta_rule", 64, 128), ("kda", 128, 64), ("delta_rule", 192, 256), ("kda", 256, 256)]
WIDTHS += [(rule, K, V) for rule in RULES for K, V in ((96, 40), (32, 32))]
WIDTHS += [("delta_rule", 8, 16), ("gated_delta_rule", 24, 64), ("kda", 16, 24)]
PREPARED = [("delta_rule", None), ("gated_delta_rule", "model"), ("kda", "model"), ("kda", "model bounded")]
FEW = 64
"""Number of elements, as of a gate parameter's gradient, below which an error varies by chance: only the target
applies.
"""

Call = dict[str, Any]


@pytest.fixture
def judged(placed, arrows, results) -> Callable[..., list[Verdict]]:
    """`judged(rule, arguments, row)`: verdicts on all results of a call; `row` selects the targets, None has none.

    Targets apply to chunks of 64 rows. KDA's default is 32, which rounds more states: there the yardstick, computed
    with the same chunk size, decides alone.
    """

    def verdicts(rule: str, a: Call, row: str | None, *, long: bool = False, **options: Any) -> list[Verdict]:
        a |= {"output_final_state": True}
        fed = arrows(a)
        wide = {name: x.double() if floating(x) else x for name, x in a.items()}
        back = {name: x.double() for name, x in fed.items()}
        loop = getattr(wyfold, f"chunk_{rule}") if long else getattr(reference, rule)
        truth = results(loop, wide, None, back)
        op = getattr(wyfold, f"chunk_{rule}")
        rows = wyfold.explain(op, **placed(a), **options).chunk_size
        row = row if rows == 64 or a["q"].dtype == FP32 else None
        yardstick: dict[str, Tensor] = {}
        if a["q"].dtype != FP32:
            yardstick = results(chunked, a, None, fed, chunk_size=rows, erases=rule != "gla")
        if rule == "gla" and "g" not in a:
            # The states are sums of exact products. The yardstick adds them in float32; tensor cores truncate each sum,
            # and summaries round do times scale. Of 16-bit tokens neither is more than a change of the last bit.
            near = results(loop, moved(a), None, moved(fed))
            yardstick |= {name: near[name] for name in ("state", "dinitial_state")}
        got = results(op, placed(a), None, placed(fed), **options)
        assert got.keys() == truth.keys()
        return [verdict(name, got[name].cpu(), x, yardstick.get(name), a["q"].dtype, row) for name, x in truth.items()]

    return verdicts


def verdict(
    name: str, got: Tensor, truth: Tensor, yardstick: Tensor | None, dtype: torch.dtype, row: str | None
) -> Verdict:
    bound = None if row is None else target({"dinitial_state": "dh0"}.get(name, name), dtype, row)
    if truth.numel() < FEW:
        yardstick, bound = None, bound or target(name, dtype)
    return judge(got, truth, yardstick, name=name, target=bound, per_token=name in ("dbeta", "dg") and got.ndim == 3)


def moved(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments in float64, those of 16 bits half an ulp away."""
    numbered = enumerate(given.items())
    wide = {name: half_ulp_away(x, i) if floating(x) and x.dtype != FP32 else x for i, (name, x) in numbered}
    return {name: x.double() if floating(x) else x for name, x in wide.items()}


def floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def drawn(family: str, rule: str, shape: Shape, *, gate: str | None = None, dtype: torch.dtype = BF16, **more) -> Call:
    """Arguments whose initial state is normal if there is a gate, else zeros, for which the targets are meant."""
    state = "zero" if gate is None else "normal"
    if gate != "-1e4":
        return inputs.draw(family, rule, shape, gate=gate, dtype=dtype, **{"state": state, **more})
    a = inputs.draw(family, rule, shape, gate="-1e3", state=state, dtype=dtype, **more)
    return a | {"g": 10 * a["g"]}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rule", RULES)
def test_families(rule: str, family: str, judged):
    """Eight states, because the errors of single draws of dg or dbeta differ by a factor of two and more."""
    a = drawn(family, rule, Shape(4, 200, 2, 2, 128, 128))
    require(*judged(rule, a, family))
    if rule == "kda":
        require(*judged(rule, a, family, chunk_size=64))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "near-identical"])
@pytest.mark.parametrize("rule", RULES)
def test_families_over_many_chunks(rule: str, family: str, judged):
    """Two states, one for "beta 2": the reference of a long sequence is slow."""
    a = drawn(family, rule, Shape(4 if family == "beta 2" else 1, 1024, 2, 2, 128, 128))
    require(*judged(rule, a, family, long=True))
    if rule == "kda":
        require(*judged(rule, a, family, long=True, chunk_size=64))


@pytest.mark.parametrize("gate", GATES + RESETS)
@pytest.mark.parametrize("rule", RULES[1:])
def test_gates(rule: str, gate: str, judged):
    """32 states: most of dbeta's error is at the tokens nearest to a given state or its gradient."""
    require(*judged(rule, drawn("random", rule, Shape(16, 200, 2, 2, 128, 128), gate=gate), None, long=True))


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("form", ["channel", "scalar", "none"])
def test_gla(form: str, segments: int, judged):
    """Writes that erase nothing, by the kernels of the rules that erase."""
    a = drawn("random", "gla", Shape(4 // segments, 584, 2, 2, 128, 128), gate="weak")
    if form == "scalar":
        a["g"] = a["g"][..., 0].contiguous()
    if form == "none":
        del a["g"]
    with segment_rule.forced(segments):
        require(*judged("gla", a, None, chunk_size=64))


@pytest.mark.parametrize("dtype, K", [(FP16, 128), (FP32, 64)], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_other_dtypes(rule: str, dtype: torch.dtype, K: int, judged):
    shape = Shape(1, 200, 2, 2, K, K)
    for family in ("random", "uniform+", "identical"):
        require(*judged(rule, drawn(family, rule, shape, dtype=dtype), family))
    if rule != "delta_rule":
        for gate in ("-5", "-20", "alternating", "any"):
            row = None if dtype == FP16 else "gate alternating" if gate == "alternating" else "random"
            require(*judged(rule, drawn("random", rule, shape, gate=gate, dtype=dtype), row))


@pytest.mark.parametrize("rule, K, V", WIDTHS)
def test_widths(rule: str, K: int, V: int, judged):
    """Two value heads per key head. Widths below 64 use tiles of a kind that was wrong on Hopper.

    See docs/facts/hopper.md, H200-4.

    The targets apply where both widths are near those they were set at. There are eight states, since dg of repeated
    keys consists of rounding errors only, which differ in each draw.
    """
    for family in ("random", "identical"):
        row = family if family == "random" and min(K, V) >= 40 and max(K, V) <= 128 else None
        require(*judged(rule, drawn(family, rule, Shape(4, 150, 1, 2, K, V)), row))


@pytest.mark.parametrize(
    ("H", "HV", "K", "V"),
    [
        (2, 2, 64, 64),
        (2, 2, 256, 256),
        (2, 2, 256, 512),
        (9, 9, 96, 192),
        (9, 9, 128, 256),
        (2, 6, 64, 64),
        (2, 4, 256, 512),
        (5, 10, 128, 192),
    ],
)
@pytest.mark.parametrize("rule", RULES[:2])
def test_other_widths(rule: str, H: int, HV: int, K: int, V: int, judged):
    """Gluon kernels under a scalar gate or none. Wide values of 9 heads or more stay whole.

    Eight rows of the batch: of four with repeated keys, the worst row of dbeta was by chance beyond twice the
    yardstick's (docs/log/operators.md).
    """
    for family in ("random", "identical"):
        row = family if family == "random" and V <= 128 else None
        require(*judged(rule, drawn(family, rule, Shape(8, 200, H, HV, K, V)), row))


@pytest.mark.parametrize("group", [2, 3, 4, 12])
@pytest.mark.parametrize("rule", RULES)
def test_groups_of_value_heads(rule: str, group: int, judged):
    """Two key heads of 128 channels, with as many value heads each as real models have, and more than 8, which the
    kernels add in a loop.
    """
    for family in ("random", "identical"):
        require(*judged(rule, drawn(family, rule, Shape(2, 200, 2, 2 * group, 128, 128)), None))


@pytest.mark.parametrize("rule, gate", PREPARED)
def test_packed_and_prepared_in_the_kernel(rule: str, gate: str | None, judged):
    """Norm, logits and gate inside, grouped value heads, and sequences of no token, of one, and of a chunk and one."""
    lengths = [0, 65, 1, 0, 130, 64, 1]
    options = {"keys": "huge", "beta": "logits", "state": "normal", "sequences": len(lengths)}
    a = drawn("random", rule, Shape(1, sum(lengths), 2, 4, 64, 64), gate=gate, **options)
    a |= {"cu_seqlens": wyfold.SequenceLayout.from_lengths(lengths).cu_seqlens, "use_qk_l2norm_in_kernel": True}
    require(*judged(rule, a | {"allow_neg_eigval": True}, None))


# --- compared with another implementation
# ------------------------------------------------------------------------------


@pytest.fixture
def fla(card) -> Callable[[str], Callable[..., Any]]:
    """`fla(rule)`: fla's operator of that rule, called with our keywords."""
    if importlib.util.find_spec("fla") is None:
        pytest.skip("fla is not installed")
    torch.use_deterministic_algorithms(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield lambda rule: getattr(importlib.import_module(f"fla.ops.{rule}"), f"chunk_{rule}")
    torch.use_deterministic_algorithms(True)


KNOWN_EXCESS = {("delta_rule", "identical"): {"state": 1.8, "dq": 1.4, "dk": 1.2}}
"""Factors by which our error is known to exceed fla's: W is one bfloat16 (docs/numerics.md, "Beside fla")."""


@pytest.mark.parametrize("family", ["random", "uniform+", "identical"])
@pytest.mark.parametrize("rule", RULES)
def test_no_further_from_the_truth_than_fla(rule: str, family: str, fla, placed, arrows, results):
    a = drawn(family, rule, Shape(1, 1024, 2, 2, 128, 128)) | {"output_final_state": True}
    fed = arrows(a)
    wide = {name: x.double() if floating(x) else x for name, x in a.items()}
    op = getattr(wyfold, f"chunk_{rule}")
    truth = results(op, wide, None, {name: x.double() for name, x in fed.items()})
    try:
        theirs = results(fla(rule), placed(a), None, placed(fed))
    except Exception as refusal:
        pytest.skip(f"fla does not run this: {refusal}")
    ours = results(op, placed(a), None, placed(fed))
    further = {}
    for name, x in truth.items():
        us, them = rms(ours[name].cpu(), x), rms(theirs[name].cpu(), x)
        if not us <= KNOWN_EXCESS.get((rule, family), {}).get(name, 1.05) * them:
            further[name] = f"{us:.2e} against {them:.2e}"
    assert not further
