"""The token loop of the delta rules: a second formula, finite differences, and bitwise identities."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.autograd import grad, gradcheck

from wyfold import reference
from wyfold.reference.error import judge, require
from wyfold.reference.inputs import draw, incoming
from wyfold.reference.shapes import PACKINGS, Shape
from wyfold.reference.targets import target

RULES = {name: getattr(reference, name) for name in ("delta_rule", "gated_delta_rule", "kda")}
GATED = ("gated_delta_rule", "kda")
PER_SEQUENCE = ("initial_state", "A_log", "dt_bias")
SHAPE = Shape(B=2, T=11, H=2, HV=4, K=8, V=5)
TINY = Shape(B=1, T=5, H=1, HV=2, K=3, V=2)
ONE_ROW = Shape(B=1, T=11, H=1, HV=2, K=4, V=3)


def wide(rule: str, shape: Shape = SHAPE, **names) -> dict:
    return draw("random", rule, shape, dtype=torch.float64, state="normal", **names) | {"output_final_state": True}


def leaves(arguments: dict) -> dict[str, Tensor]:
    """The tensors among the arguments, with requires_grad set."""
    return {n: x.requires_grad_() for n, x in arguments.items() if isinstance(x, Tensor) and x.is_floating_point()}


def same(name: str, got: Tensor, truth: Tensor) -> None:
    require(judge(got, truth, name=name, target=target(name, torch.float64)))


def with_rows(arguments: dict, rows: slice) -> dict:
    """The arguments restricted to some tokens."""
    return {
        n: x[:, rows] if isinstance(x, Tensor) and n not in PER_SEQUENCE else x
        for n, x in arguments.items()
        if n != "cu_seqlens"
    }


# --- the definition --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_the_loop_multiplies_transition_matrices(rule):
    """S_t = (I - beta k k^T) diag(exp g) S_{t-1} + beta k v^T, one head at a time, with explicit matrices."""
    arguments = wide(rule)
    o, final = RULES[rule](**arguments)
    q, k, v, beta, S0 = (arguments[n] for n in ("q", "k", "v", "beta", "initial_state"))
    g = arguments.get("g", torch.zeros(SHAPE.B, SHAPE.T, SHAPE.HV, dtype=torch.float64))
    g = g.expand(SHAPE.B, SHAPE.T, SHAPE.HV, SHAPE.K) if g.ndim == 4 else g[..., None].expand(*g.shape, SHAPE.K)
    expected, states = torch.empty_like(o), torch.empty_like(final)
    for b in range(SHAPE.B):
        for j in range(SHAPE.HV):
            S = S0[b, j]
            for t in range(SHAPE.T):
                key, query = k[b, t, j // 2], q[b, t, j // 2]
                forget = torch.eye(SHAPE.K, dtype=torch.float64) - beta[b, t, j] * torch.outer(key, key)
                S = forget @ torch.diag(g[b, t, j].exp()) @ S + beta[b, t, j] * torch.outer(key, v[b, t, j])
                expected[b, t, j] = SHAPE.K**-0.5 * query @ S
            states[b, j] = S
    same("o", o, expected)
    same("state", final, states)


OPTIONS = {
    "delta_rule": {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True},
    "gated_delta_rule": {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
    "kda": {"use_gate_in_kernel": True, "lower_bound": -3.0, "use_qk_l2norm_in_kernel": True, "state_v_first": True},
}


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("rule", RULES)
def test_gradients_are_the_slopes(rule, packed):
    names = {"gate": "model"} if rule in GATED else {}
    arguments = wide(rule, TINY, sequences=3 if packed else 1, **names) | OPTIONS[rule]
    if packed:
        arguments["cu_seqlens"] = torch.tensor([0, 1, 1, 4])
    if arguments.get("state_v_first"):
        arguments["initial_state"] = arguments["initial_state"].mT.contiguous()
    tensors = leaves(arguments)

    def call(*values: Tensor) -> tuple[Tensor, ...]:
        return RULES[rule](**arguments | dict(zip(tensors, values)))

    assert gradcheck(call, tuple(tensors.values()))


# --- exact results ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_hot_keys_make_it_a_dictionary(dtype):
    """beta 1 writes, beta 0 does not: the output is exactly the last integer written under its key."""
    arguments = draw("one-hot", "delta_rule", Shape(B=2, T=40, H=2, HV=4, K=8, V=5), dtype=dtype)
    k, v, beta = arguments["k"], arguments["v"], arguments["beta"]
    o, _ = reference.delta_rule(**arguments | {"q": k, "scale": 1.0})
    for b in range(2):
        for j in range(4):
            memory: dict[int, Tensor] = {}
            for t in range(40):
                word = int(k[b, t, j // 2].argmax())
                if beta[b, t, j] == 1:
                    memory[word] = v[b, t, j]
                assert torch.equal(o[b, t, j], memory.get(word, torch.zeros(5, dtype=dtype)))


def test_beta_two_is_a_reflection():
    arguments = wide("delta_rule", Shape(B=1, T=1, H=1, HV=1, K=8, V=5), beta="two")
    twice = {n: x.repeat(1, 2, 1, 1)[..., : x.shape[-1]] for n, x in arguments.items() if n in ("q", "k", "v")}
    twice["beta"] = arguments["beta"].repeat(1, 2, 1)
    _, once = reference.delta_rule(**arguments)
    _, back = reference.delta_rule(**arguments | twice)
    assert not torch.equal(once, arguments["initial_state"])
    same("state", back, arguments["initial_state"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", GATED)
def test_an_infinite_gate_forgets_everything_before_it(rule, dtype):
    t = SHAPE.T // 2
    arguments = draw("random", rule, SHAPE, gate="reset one", state="6e4", dtype=dtype) | {"output_final_state": True}
    tensors = leaves(arguments)
    o, final = RULES[rule](**arguments)
    fresh, fresh_final = RULES[rule](**with_rows(arguments, slice(t, None)) | {"initial_state": None})
    assert torch.equal(o[:, t:], fresh) and torch.equal(final, fresh_final)
    after = grad([o[:, t:], final], tensors.values(), [incoming(o[:, t:]), incoming(final)])
    for name, d in zip(tensors, after):
        assert d.isfinite().all(), name
        assert not (d if name == "initial_state" else d[:, :t]).any(), name
    dg = dict(zip(tensors, after))["g"]
    assert not dg[:, t].any() and dg[:, t + 1 :].any()


@pytest.mark.parametrize("gate", ["reset all", "alternating", "-1e6", "dead channel", "any"])
@pytest.mark.parametrize("rule", GATED)
def test_every_gate_has_finite_gradients(rule, gate):
    arguments = draw("random", rule, SHAPE, gate=gate, state="normal") | {"output_final_state": True}
    tensors = leaves(arguments)
    o, final = RULES[rule](**arguments)
    for name, d in zip(tensors, grad(o.sum() + final.sum(), tensors.values())):
        assert d.isfinite().all(), name
    assert o.isfinite().all() and final.isfinite().all()


@pytest.mark.parametrize("rule", RULES)
def test_powers_of_two_pass_through_bit_for_bit(rule):
    arguments = draw("random", rule, SHAPE, state="normal") | {"output_final_state": True}
    o, final = RULES[rule](**arguments)
    scaled = {n: arguments[n] * 2.0**-7 for n in ("v", "initial_state")}
    o_scaled, final_scaled = RULES[rule](**arguments | scaled)
    assert torch.equal(o * 2.0**-7, o_scaled) and torch.equal(final * 2.0**-7, final_scaled)


# --- identities ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_linear_in_values_and_state_and_in_queries(rule):
    one, two = wide(rule, seed=1), wide(rule, seed=2)
    other = one | {n: two[n] for n in ("v", "initial_state")}
    both = one | {n: one[n] + 3 * two[n] for n in ("v", "initial_state")}
    (o1, S1), (o2, S2), (o3, S3) = (RULES[rule](**x) for x in (one, other, both))
    same("o", o3, o1 + 3 * o2)
    same("state", S3, S1 + 3 * S2)
    queries = one | {"q": one["q"] - 2 * two["q"], "scale": 0.5}
    o4, _ = RULES[rule](**queries)
    o5, _ = RULES[rule](**one | {"q": two["q"], "scale": 1.0})
    same("o", o4, 0.5 * (o1 * SHAPE.K**0.5 - 2 * o5))


def test_a_gate_of_zero_is_no_gate():
    arguments = wide("gated_delta_rule", gate="zero")
    for got, truth in zip(
        reference.gated_delta_rule(**arguments),
        reference.delta_rule(**{n: x for n, x in arguments.items() if n != "g"}),
    ):
        assert torch.equal(got, truth)
    for got, truth in zip(
        reference.gated_delta_rule(**arguments), reference.gated_delta_rule(**arguments | {"g": None})
    ):
        assert torch.equal(got, truth)


def test_equal_channels_are_one_gate():
    scalar = wide("gated_delta_rule")
    channels = scalar | {"g": scalar["g"].detach()[..., None].repeat(1, 1, 1, SHAPE.K)}
    got, truth = [], []
    for call, arguments, out in ((reference.kda, channels, got), (reference.gated_delta_rule, scalar, truth)):
        tensors = leaves({n: x.detach() if isinstance(x, Tensor) else x for n, x in arguments.items()})
        o, final = call(**tensors, output_final_state=True)
        gradients = dict(zip(tensors, grad([o, final], tensors.values(), [incoming(o), incoming(final, 1)])))
        out.extend([o, final, *(gradients[n] for n in ("q", "k", "v", "beta", "initial_state", "g"))])
    got[-1] = got[-1].sum(-1)
    for name, a, b in zip(("o", "state", "dq", "dk", "dv", "dbeta", "dh0", "dg"), got, truth):
        same(name, a.detach(), b.detach())


@pytest.mark.parametrize("rule", RULES)
def test_grouped_value_heads_are_copies_run_alone(rule):
    grouped = wide(rule)
    tensors = leaves(grouped)
    o, final = RULES[rule](**grouped)
    gradients = dict(zip(tensors, grad([o, final], tensors.values(), [incoming(o), incoming(final, 1)])))
    alone = {n: x.detach().clone() if isinstance(x, Tensor) else x for n, x in grouped.items()}
    for n in ("q", "k"):
        alone[n] = alone[n].repeat_interleave(2, dim=2)
    copies = leaves(alone)
    o_alone, final_alone = RULES[rule](**alone)
    assert torch.equal(o, o_alone) and torch.equal(final, final_alone)
    separate = dict(zip(copies, grad([o_alone, final_alone], copies.values(), [incoming(o), incoming(final, 1)])))
    for n in ("q", "k"):
        same("d" + n, gradients[n], separate[n].unflatten(2, (2, 2)).sum(3))


# --- boundaries ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_sequences_are_separate_and_other_rows_unread(rule, packing):
    """Rows past the last boundary are NaN; outputs and gradients must not depend on them."""
    bounds, tokens = PACKINGS[packing].cu_seqlens, PACKINGS[packing].tokens
    shape = Shape(B=1, T=tokens, H=1, HV=2, K=4, V=3)
    names = {"gate": "model"} if rule in GATED else {}
    arguments = wide(rule, shape, sequences=len(bounds) - 1, **names)
    for n, x in arguments.items():
        if isinstance(x, Tensor) and n not in PER_SEQUENCE:
            x[:, bounds[-1] :] = float("nan")
    tensors = leaves(arguments)
    arguments |= {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    o, final = RULES[rule](**arguments, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    assert not o[:, bounds[-1] :].any()
    for n, (start, end) in enumerate(pairwise(bounds)):
        alone = with_rows(arguments, slice(start, end))
        o_n, final_n = RULES[rule](**alone | {"initial_state": arguments["initial_state"][n : n + 1]})
        same(
            "o", o[:, start:end], o_n
        )  # not to the bit: the rounding of PyTorch's sigmoid depends on an element's position in the tensor
        same("state", final[n : n + 1], final_n)
        if start == end:
            assert torch.equal(final[n], arguments["initial_state"][n])
    if bounds[-1]:
        for n, d in zip(tensors, grad(o.sum() + final.sum(), tensors.values())):
            assert d.isfinite().all(), n
            if n not in PER_SEQUENCE:
                assert not d[:, bounds[-1] :].any(), n


@pytest.mark.parametrize("rule", RULES)
def test_resuming_from_a_state_changes_no_bit(rule):
    arguments = draw("random", rule, SHAPE, state="normal") | {"output_final_state": True}
    o, final = RULES[rule](**arguments)
    head, carried = RULES[rule](**with_rows(arguments, slice(0, 4)))
    tail, end = RULES[rule](**with_rows(arguments, slice(4, None)) | {"initial_state": carried})
    assert torch.equal(o, torch.cat([head, tail], dim=1)) and torch.equal(final, end)


@pytest.mark.parametrize("rule", RULES)
def test_intermediate_states_are_the_final_states_of_prefixes(rule):
    arguments = draw("random", rule, SHAPE, state="normal") | {"output_final_state": True}
    every = arguments | {"return_intermediate_states": True, "checkpoint_every": 3}
    _, _, states = RULES[rule](**every)
    assert states.shape[:2] == (SHAPE.B, SHAPE.T // 3) and not states.requires_grad
    for i in range(SHAPE.T // 3):
        assert torch.equal(states[:, i], RULES[rule](**with_rows(arguments, slice(0, 3 * i + 3)))[1])

    packed = draw("random", rule, ONE_ROW) | {"cu_seqlens": torch.tensor([0, 4, 4, 10])}
    _, _, states = RULES[rule](**packed, return_intermediate_states=True, checkpoint_every=2)
    assert states.shape[0] == 5
    prefixes = [(0, 2), (0, 4), (4, 6), (4, 8), (4, 10)]
    for i, (start, end) in enumerate(prefixes):
        _, prefix = RULES[rule](**with_rows(packed, slice(start, end)), output_final_state=True)
        assert torch.equal(states[i], prefix[0])
    _, _, states = RULES[rule](**packed, return_intermediate_states=True, checkpoint_every=5)
    assert states.shape[0] == 2 and states[0].any() and not states[1].any()


# --- options ---------------------------------------------------------------------------------------------------------


def test_a_safe_gate_is_clamped_at_its_bound_without_gradient():
    arguments = wide("kda", gate="-1") | {"safe_gate": True}
    arguments["g"][:, ::3] = -5.0
    arguments["g"][:, 1::3] = -7.0
    g = arguments["g"].requires_grad_()
    o, _ = reference.kda(**arguments)
    raised = g.detach().clamp(min=-5.0)
    assert torch.equal(o, reference.kda(**arguments | {"safe_gate": False, "g": raised})[0])
    (dg,) = grad(o.sum(), g)
    assert not dg[:, 1::3].any() and dg[:, ::3].all() and dg[:, 2::3].all()
    bounded, _ = reference.kda(**arguments | {"lower_bound": -0.5})
    assert torch.equal(bounded, reference.kda(**arguments | {"safe_gate": False, "g": g.detach().clamp(min=-0.5)})[0])


def test_state_layout_and_storage():
    arguments = wide("kda")
    _, final = reference.kda(**arguments)
    turned = arguments | {"initial_state": arguments["initial_state"].mT, "state_v_first": True}
    _, v_first = reference.kda(**turned)
    assert torch.equal(v_first, final.mT)
    _, half = reference.kda(**arguments, state_dtype=torch.bfloat16)
    assert torch.equal(half, final.bfloat16())


@pytest.mark.parametrize("rule", RULES)
def test_16_bit_inputs_are_computed_in_float32_and_rounded_once(rule):
    narrow = draw("random", rule, SHAPE, dtype=torch.bfloat16) | {"output_final_state": True}
    o, final = RULES[rule](**narrow)
    single = {n: x.float() if isinstance(x, Tensor) else x for n, x in narrow.items()}
    o_single, final_single = RULES[rule](**single)
    assert torch.equal(o, o_single.bfloat16()) and torch.equal(final, final_single)


@pytest.mark.parametrize("rule", RULES)
def test_options_equal_separate_operations(rule):
    """Norm, sigmoid and gate inside the operator against the same steps outside it."""
    names = {"gate": "model"} if rule in GATED else {}
    arguments = wide(rule, keys="huge", beta="logits", **names) | {"use_qk_l2norm_in_kernel": True}
    o, final = RULES[rule](**arguments, allow_neg_eigval=True)
    outside = {n: arguments[n] for n in ("v", "initial_state", "output_final_state")}
    outside |= {n: reference.l2norm(arguments[n]) for n in ("q", "k")}
    outside["beta"] = 2 * torch.sigmoid(arguments["beta"])
    if rule in GATED:
        gate = reference.kda_gate if rule == "kda" else reference.gdn_gate
        outside["g"] = gate(arguments["g"], arguments["A_log"], arguments["dt_bias"])
    o_outside, final_outside = RULES[rule](**outside)
    assert torch.equal(o, o_outside) and torch.equal(final, final_outside)
