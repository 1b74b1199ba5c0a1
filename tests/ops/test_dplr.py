"""DPLR and IPLR, and what all low-rank operators share: lengths, gates, packing, options, dtypes and refusals."""

import pytest
import torch
from tests.ops.low_rank_calls import OPERATORS, agree

import wyfold
from wyfold import SequenceLayout, reference
from wyfold.kernels import table
from wyfold.reference import inputs
from wyfold.reference.error import judge, require
from wyfold.reference.shapes import Shape
from wyfold.reference.targets import target
from wyfold.runtime import segment_rule
from wyfold.runtime.kernel_configs import LaunchKey, hardware_limit

F64 = torch.float64
GATED = [name for name in OPERATORS if "iplr" not in name]
DPLR = {"chunk": wyfold.chunk_dplr_delta_rule, "recurrent": wyfold.fused_recurrent_dplr_delta_rule}


@pytest.mark.parametrize("name", OPERATORS)
def test_every_length(name: str, results, float64_bounds):
    """Each length with one of the operators, and those around chunks with all. One token loop has all of them, in a
    batch whose rows end early: a token of zeros leaves the state unchanged."""
    op, loop, rule = OPERATORS[name]
    own = range(1 + list(OPERATORS).index(name), 131, len(OPERATORS))
    lengths = torch.tensor(sorted({*own, 1, 16, 17, 64, 130}))
    N, longest = len(lengths), int(lengths[-1])
    a = inputs.draw("random", rule, Shape(N, longest, 1, 2, 8, 16), gate="weak", state="normal", dtype=F64)
    past = torch.arange(longest) >= lengths[:, None]
    tokens = a.keys() - {"initial_state"}
    for part in tokens:
        a[part][past] = 0
    a |= {"output_final_state": True}
    fed = {"o": inputs.incoming(a["v"], 1).masked_fill(past[..., None, None], 0)}
    fed["state"] = inputs.incoming(a["initial_state"], 2)
    truth = results(loop, a, None, fed)

    def alone(found: dict, b: int, T: int) -> dict:
        rows = {part: x[b : b + 1] for part, x in found.items() if isinstance(x, torch.Tensor)}
        states = ("state", "initial_state", "dinitial_state")
        return found | {part: x if part in states else x[:, :T] for part, x in rows.items()}

    for b, T in enumerate(lengths.tolist()):
        agree(float64_bounds, results(op, alone(a, b, T), None, alone(fed, b, T)), alone(truth, b, T))


@pytest.mark.parametrize("gate", ["zero", "-1e-3", "-20", "-88", "any", "reset one", "reset first", "dead channel"])
@pytest.mark.parametrize("name", GATED)
def test_every_gate(name: str, gate: str, results, float64_bounds):
    op, loop, rule = OPERATORS[name]
    a = inputs.draw("random", rule, Shape(1, 40, 2, 2, 16, 8), gate=gate, state="normal", dtype=F64)
    a |= {"output_final_state": True}
    agree(float64_bounds, results(op, a), results(loop, a))


@pytest.mark.parametrize("name", GATED)
def test_the_gate_of_a_reset_has_a_gradient_of_exactly_zero(name: str, results):
    op, _, rule = OPERATORS[name]
    a = inputs.draw("random", rule, Shape(1, 40, 2, 2, 16, 8), gate="reset one", state="normal")
    gate = {"dplr_delta_rule": "gk", "gdn2": "g", "comba": "g"}.get(rule, "w")
    dg = results(op, a)[f"d{gate}"]
    assert not dg[:, 20].any() and dg[:, 19].any() and dg[:, 21].any()


@pytest.mark.parametrize("name", OPERATORS)
def test_packed(name: str, results, float64_bounds):
    op, loop, rule = OPERATORS[name]
    layout = SequenceLayout.from_lengths([33, 0, 1, 48, 16], tokens=103)
    a = inputs.draw("random", rule, Shape(1, 103, 1, 2, 8, 24), gate="any", state="normal", sequences=5, dtype=F64)
    a |= {"output_final_state": True, "cu_seqlens": layout}
    truth = results(loop, a)
    agree(float64_bounds, results(op, a), truth)
    past = {name: x.clone() for name, x in a.items() if isinstance(x, torch.Tensor) and name != "initial_state"}
    for x in past.values():
        x[:, 98:] = torch.nan  # rows past the last boundary are never read
    agree(float64_bounds, results(op, a | past), truth)


@pytest.mark.parametrize("form", DPLR)
def test_a_row_and_a_column_of_any_direction(form: str, results, float64_bounds):
    """The draws of other tests have b along a; here the erased column is another one, and neither has unit length."""
    a = inputs.draw("random", "dplr_delta_rule", Shape(2, 70, 2, 4, 16, 8), gate="weak", state="normal", dtype=F64)
    a |= {"b": 0.7 * torch.randn_like(a["b"]) / 4, "output_final_state": True, "scale": 0.3}
    agree(float64_bounds, results(DPLR[form], a), results(reference.dplr_delta_rule, a))


@pytest.mark.parametrize("C", [16, 32, 64])
@pytest.mark.parametrize("name", [name for name in OPERATORS if name.startswith("chunk")])
def test_chunk_sizes_and_kept_factors(name: str, C: int, results, float64_bounds):
    op, loop, rule = OPERATORS[name]
    a = inputs.draw("random", rule, Shape(2, 100, 1, 1, 8, 8), gate="any", state="normal", dtype=F64)
    a |= {"output_final_state": True}
    got = results(op, a, chunk_size=C)
    agree(float64_bounds, got, results(loop, a))
    kept = results(op, a, chunk_size=C, disable_recompute=True)
    assert all(torch.equal(kept[name], x) for name, x in got.items())


@pytest.mark.parametrize("name", OPERATORS)
def test_states(name: str, results, float64_bounds):
    """Layout, dtype and intermediate states."""
    op, loop, rule = OPERATORS[name]
    a = inputs.draw("random", rule, Shape(2, 70, 1, 2, 8, 16), gate="weak", state="normal", dtype=F64)
    fed = {"o": inputs.incoming(a["v"], 1), "state": inputs.incoming(a["initial_state"], 2)}
    plain = results(op, a, None, fed, output_final_state=True)
    v_first = a | {"initial_state": a["initial_state"].mT}
    first = results(op, v_first, None, fed | {"state": fed["state"].mT}, output_final_state=True, state_v_first=True)
    for name, x in first.items():
        assert torch.equal(x.mT if name in ("state", "dinitial_state") else x, plain[name]), name
    asked = {"return_intermediate_states": True, "checkpoint_every": 32, "output_final_state": True}
    o, _, states = op(**a, **asked)
    truth = loop(**a, **asked)[2]
    assert torch.equal(o, plain["o"]) and states.shape == truth.shape == (2, 2, 2, 8, 16)
    float64_bounds.output("states", states, truth)
    _, half = op(**a, output_final_state=True, state_dtype=torch.bfloat16)
    assert torch.equal(half, plain["state"].bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_narrow_dtypes_round_once(name: str, dtype: torch.dtype, results):
    """Eager results are those of float32 arithmetic on the rounded inputs, rounded once."""
    op, _, rule = OPERATORS[name]
    a = inputs.draw("random", rule, Shape(1, 50, 1, 2, 8, 16), gate="weak", state="normal", dtype=dtype)
    wide = {name: x.float() if isinstance(x, torch.Tensor) else x for name, x in a.items()}
    fed = {"o": inputs.incoming(a["v"], 1)}
    got = results(op, a, None, fed)
    for name, x in results(op, wide, None, {"o": fed["o"].float()}).items():
        assert torch.equal(got[name], x.to(got[name].dtype)), name


@pytest.mark.parametrize("keys", ["normal", "identical", "near-identical", "two clusters"])
def test_float32_on_keys_that_repeat(keys: str):
    """The folded form rounds no large number: the targets of ordinary keys hold on one repeated key."""
    a = inputs.draw("random", "rwkv7", Shape(1, 256, 1, 1, 32, 32), keys=keys, gate="-1e-3")
    o, state = wyfold.chunk_rwkv7(**a, chunk_size=64, output_final_state=True)
    wide = {name: x.double() for name, x in a.items()}
    truth = dict(zip(("o", "state"), reference.rwkv7(**wide, output_final_state=True)))
    for name, x in (("o", o), ("state", state)):
        require(judge(x, truth[name], name=name, target=target(name, torch.float32)))


def test_safe_gate_raises_the_decay(results):
    a = inputs.draw("random", "dplr_delta_rule", Shape(1, 40, 1, 1, 8, 8), gate="any", state="normal")
    for op in DPLR.values():
        raised = results(op, a | {"gk": a["gk"].clamp(min=-0.6)}, ())
        safe = results(op, a, safe_gate=True, lower_bound=-0.6)
        assert torch.equal(safe["o"], raised["o"])
        assert not safe["dgk"][a["gk"] < -0.6].any() and safe["dgk"][a["gk"] > -0.6].all()


def test_explain_on_the_cpu():
    q = torch.randn(1, 20, 1, 8)
    plan = wyfold.explain(wyfold.chunk_rwkv7, q, q, q, q, q, q)
    assert plan.backend == "eager" and plan.segments == 1
    assert [launch.partition(" ")[0] for launch in plan.forward] == ["low_rank_prepare", "low_rank_scan"]
    back = [launch.partition(" ")[0] for launch in plan.backward]
    assert back == ["low_rank_prepare", "low_rank_scan_bwd", "low_rank_gradients"]
    steps = wyfold.explain(wyfold.fused_recurrent_gdn2, q, q, q, q, q, q).forward
    assert [launch.partition(" ")[0] for launch in steps] == ["low_rank_prepare", "low_rank_recurrent"]


@pytest.mark.parametrize("learns", [False, True])
def test_gradients_that_fit_no_card_are_named(learns: bool, monkeypatch: pytest.MonkeyPatch):
    """In float32, chunks of 64 exceed an H200's shared memory, but only a backward launches the kernel."""
    noted, usual = [], table.plan
    monkeypatch.setattr(
        table, "plan", lambda *args, **options: noted.append(options["sizes"]) or usual(*args, **options)
    )
    q = torch.randn(1, 70, 1, 8, requires_grad=learns)
    wyfold.chunk_rwkv7(q, q, q, q, q, q, chunk_size=64)
    limits = [hardware_limit("sm_90", f"{stage}.triton", LaunchKey.parse(words)) for stage, words in noted[0]]
    assert any("gradients in float32 in chunks of 64" in limit for limit in limits) == learns
    words = dict(noted[0])["low_rank_prepare"]
    for architecture, dtype in (("sm_90", "fp16"), ("sm_100", "fp32"), ("sm_89", "bf16")):
        assert not hardware_limit(
            architecture, "low_rank_gradients.triton", LaunchKey.parse(words)._replace(dtype=dtype)
        )


def test_sequences_are_not_cut_into_segments():
    q = torch.randn(1, 200, 1, 8)
    with segment_rule.forced(4):
        assert wyfold.explain(wyfold.chunk_iplr_delta_rule, q, q, q, q, q).segments == 1
        assert wyfold.explain(wyfold.chunk_delta_rule, q, q, q).segments == 4


Q = torch.randn(1, 20, 2, 8)
WRONG = [
    (wyfold.chunk_dplr_delta_rule, {"a": Q[:, :7]}, ValueError, r"a must be \[B, T, H, K\]"),
    (wyfold.chunk_dplr_delta_rule, {"b": Q.double()}, ValueError, "b must have the dtype of q, float32, got float64"),
    (wyfold.chunk_dplr_delta_rule, {"gk": Q[..., :1]}, ValueError, r"gk must be \[B, T, HV, K\]"),
    (wyfold.chunk_dplr_delta_rule, {"a": None}, TypeError, "a must be a torch.Tensor, got NoneType"),
    (wyfold.chunk_dplr_delta_rule, {"lower_bound": -0.6}, ValueError, "lower_bound must come with safe_gate=True"),
    (wyfold.chunk_dplr_delta_rule, {"gk": None, "safe_gate": True}, ValueError, "gk must be given with safe_gate=True"),
    (
        wyfold.chunk_dplr_delta_rule,
        {"safe_gate": True, "lower_bound": -6.0},
        ValueError,
        r"lower_bound must be in \[-5",
    ),
    (wyfold.chunk_dplr_delta_rule, {"a": Q.int()}, ValueError, "a must be float32, .* got int32"),
    (wyfold.chunk_rwkv7, {"r": Q[..., :4]}, ValueError, r"k must be \[B, T, H, K\]"),
    (wyfold.chunk_rwkv7, {"w": Q[:, :3]}, ValueError, r"w must be \[B, T, HV, K\]"),
    (wyfold.chunk_rwkv7, {"r": 1.0}, TypeError, "r must be a torch.Tensor, got float"),
    (wyfold.fused_mul_recurrent_rwkv7, {"kk": Q[:, :3]}, ValueError, r"kk must be \[B, T, H, K\]"),
    (wyfold.fused_mul_recurrent_rwkv7, {"a": Q.half()}, ValueError, "a must have the dtype of r"),
    (wyfold.chunk_gdn2, {"w": Q[..., :4]}, ValueError, r"w must be \[B, T, HV, V\]"),
    (wyfold.chunk_gdn2, {"b": Q[:, :, :1]}, ValueError, r"b must be \[B, T, HV, K\]"),
    (wyfold.chunk_gdn2, {"lower_bound": -1.0}, ValueError, "lower_bound must come with use_gate_in_kernel=True"),
    (wyfold.chunk_comba, {"p": Q[..., :4]}, ValueError, r"p must be \[B, T, H, K\]"),
    (wyfold.chunk_comba, {"g": Q}, ValueError, r"g must have 3 dimensions, \[B, T, HV\]"),
    (wyfold.chunk_comba, {"chunk_size": 8}, ValueError, "chunk_size must be one of 16, 32, 64"),
]


@pytest.mark.parametrize(("op", "change", "error", "message"), WRONG)
def test_wrong_arguments_are_named(op, change: dict, error: type[Exception], message: str):
    names = {"chunk_rwkv7": "rwkvab", "chunk_gdn2": "qkvgbw"}.get(op.__name__, "qkvab")
    right: dict = dict.fromkeys(names, Q) | ({"gk": -Q.abs()} if "dplr" in op.__name__ else {})
    if "mul" in op.__name__:
        right = {**dict.fromkeys("rwkva", Q), "kk": Q}
    if "comba" in op.__name__:
        right = {**dict.fromkeys("qkvp", Q), "g": -Q[..., 0].abs(), "beta": Q[..., 0]}
    op(**right)
    with pytest.raises(error, match=rf"^{op.__name__}: {message}"):
        op(**right | change)


def test_a_positive_gate_is_named_where_contents_are_checked():
    with wyfold.checked(), pytest.raises(ValueError, match=r"^chunk_rwkv7: w must be <= 0"):
        wyfold.chunk_rwkv7(Q, Q.abs(), Q, Q, Q, Q)
