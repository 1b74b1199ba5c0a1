"""`torch.compile(fullgraph=True)`, autocast and functional transforms: one graph and the same bits, or a refusal."""

import pytest
import torch
from tests.ops.family_calls import CASES, drawn, operator
from torch._dynamo.testing import CompileCounterWithBackend

import wyfold
from wyfold import SequenceLayout, serving
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape

DELTA_RULES = ("delta_rule", "gated_delta_rule", "kda")
FORMS = ("chunk", "fused_recurrent")
LENGTHS = (64, 17, 50, 31)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def call(rule: str, T: int, packed: bool) -> dict:
    shape = Shape(1 if packed else 2, T, 1, 2, 8, 16)
    a = inputs.draw("random", rule, shape, gate="model", state="normal", sequences=3 if packed else None)
    a |= {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return a | ({"cu_seqlens": torch.tensor([0, 5, 5, T])} if packed else {})


# Every rule, both forms, dense and packed.
DELTA_CASES = [
    pytest.param("delta_rule", "chunk", False, marks=pytest.mark.release),
    ("gated_delta_rule", "fused_recurrent", True),
    ("kda", "chunk", True),
]


@pytest.mark.long
@pytest.mark.parametrize("rule, form, packed", DELTA_CASES)
def test_lengths_forward_and_backward(rule: str, form: str, packed: bool, results):
    """Packed cases of the chunk form also without gradients."""
    op = getattr(wyfold, f"{form}_{rule}")
    for mode, wrt in (("training", None), ("inference", ()))[: 1 + (packed and form == "chunk")]:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(op, backend=counter, fullgraph=True)
        for T in LENGTHS:
            a = call(rule, T, packed)
            got, plain = results(compiled, a, wrt), results(op, a, wrt)
            for name in plain:
                assert torch.equal(got[name], plain[name]), (mode, T, name)
        assert counter.frame_count <= 2, f"{mode}: {counter.frame_count} compiles for {len(LENGTHS)} lengths"


SHOWN = ("gdn2", "chunk"), ("gla", "fused_recurrent"), ("product", "chunk")


@pytest.mark.parametrize(
    ("rule", "form"), [*SHOWN, *(pytest.param(*case, marks=pytest.mark.release) for case in CASES if case not in SHOWN)]
)
def test_further_rules(rule: str, form: str, results):
    """One graph with all gradients."""
    op = operator(rule, form)
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
    a = drawn(rule, Shape(2, 33, 1, 2, 8, 16), gate="weak")
    got, plain = results(compiled, a), results(op, a)
    assert {f"d{name}" for name, x in a.items() if isinstance(x, torch.Tensor)} <= got.keys() == plain.keys()
    assert all(torch.equal(got[name], x) for name, x in plain.items())


@pytest.mark.parametrize("form", ["chunk", pytest.param("fused_recurrent", marks=pytest.mark.release)])
def test_a_layout_goes_through_the_compiler(form: str, results):
    op = getattr(wyfold, f"{form}_kda")
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
    for lengths in ([20, 0, 13], [33]):
        a = call("kda", 33, True) | {"initial_state": None}
        layout = SequenceLayout.from_lengths(lengths)
        got, plain = results(compiled, a, None, cu_seqlens=layout), results(op, a, None, cu_seqlens=layout)
        assert all(torch.equal(got[name], plain[name]) for name in plain)


@pytest.mark.parametrize("name", ["prefill", pytest.param("verify", marks=pytest.mark.release), "decode_packed"])
def test_serving_takes_other_lengths_and_slots(name: str):
    """A pool that is an argument is updated in place. `decode` is tested elsewhere."""
    op, counter = getattr(serving, name), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(op, backend=counter, fullgraph=True)
    for T in (33, 40, 50):
        a = call("gated_delta_rule", T, True)
        pool, slots = torch.randn(99, 2, 8, 16), torch.randperm(99)
        if name == "decode_packed":
            tokens = [torch.randn(T, 2 * 8 + 2 * 16), torch.randn(T, 2), torch.randn(T, 2), a["A_log"], a["dt_bias"]]
            slots, options = slots[:T], {"heads": (1, 2), "dims": (8, 16)}
        else:
            tokens = [a[x] for x in ("q", "k", "v", "g", "beta")]
            slots, options = slots[:3] if name == "prefill" else slots[:90].view(3, 30), {"cu_seqlens": a["cu_seqlens"]}
        plain = pool.clone()
        got = compiled(*tokens, pool, slots, state_v_first=False, **options)
        assert torch.equal(got, op(*tokens, plain, slots, state_v_first=False, **options)) and torch.equal(pool, plain)
    assert counter.frame_count <= 2


def test_refusals_reach_the_caller_of_compiled_code():
    compiled = torch.compile(wyfold.chunk_kda, backend="aot_eager")
    a = call("kda", 33, False)
    with pytest.raises(ValueError, match=r"chunk_kda: k must be \[B, T, H, K\]"):
        compiled(**a | {"k": a["k"][:, :7]})


def test_states_between_and_kept_factors_compile(results):
    a = call("gated_delta_rule", 70, True) | {"return_intermediate_states": True, "disable_recompute": True}
    compiled = torch.compile(wyfold.chunk_gdn, backend="aot_eager", fullgraph=True)
    got, plain = results(compiled, a), results(wyfold.chunk_gdn, a)
    assert "states" in got and all(torch.equal(got[name], plain[name]) for name in plain)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", DELTA_RULES)
def test_autocast_casts_q_k_and_v_and_nothing_else(rule: str, form: str, results):
    op, a = getattr(wyfold, f"{form}_{rule}"), call(rule, 33, False)
    narrow = a | {name: a[name].bfloat16() for name in ("q", "k", "v")}
    plain = results(op, narrow)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = results(op, a)
    assert got["o"].dtype == torch.bfloat16 and got["state"].dtype == torch.float32
    for name, x in plain.items():
        assert got[name].dtype == (torch.float32 if name != "o" else torch.bfloat16), name
        assert torch.equal(got[name], x.to(got[name].dtype)), name
    with torch.autocast("cpu", enabled=False):
        assert torch.equal(results(op, a)["o"], results(op, a, ())["o"])


@pytest.mark.parametrize("form", FORMS)
def test_the_backward_ignores_autocast(form: str, results):
    """Arithmetic is in float32, whether the forward or the backward runs under autocast."""
    op, a = getattr(wyfold, f"{form}_kda"), call("kda", 33, False)
    plain = results(op, a)
    leaves = {name: x.clone().requires_grad_() for name, x in a.items() if f"d{name}" in plain}
    o, state = op(**a | leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.autograd.backward([o, state], [inputs.incoming(o, 0), inputs.incoming(state, 1)])
    assert all(torch.equal(x.grad, plain[f"d{name}"]) for name, x in leaves.items())


# PyTorch's own, in forward_ad: from 2.15 on a FutureWarning.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("form", FORMS)
def test_functional_transforms_are_refused(form: str):
    op, a = getattr(wyfold, f"{form}_kda"), call("kda", 5, False)

    def of_q(q: torch.Tensor) -> torch.Tensor:
        return op(**a | {"q": q})[0]

    with pytest.raises(RuntimeError, match=r"(?i)vmap|functorch|transform"):
        torch.func.vmap(of_q)(a["q"][None].expand(3, *a["q"].shape))
    with pytest.raises((RuntimeError, NotImplementedError), match=r"(?i)forward|jvp"):
        with torch.autograd.forward_ad.dual_level():
            of_q(torch.autograd.forward_ad.make_dual(a["q"], torch.ones_like(a["q"])))
