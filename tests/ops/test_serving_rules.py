"""Serving of GLA, DPLR (RWKV-7) and GDN-2: the bits of their operators, on states in a pool, on both backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import wyfold
from wyfold import reference, serving

H, HV, K, V = 1, 2, 16, 24
Call = dict[str, Any]


class Rule(NamedTuple):
    """A rule of serving, its operators, and their names of the gate."""

    name: str
    recurrent: Callable[..., Any]
    chunk: Callable[..., Any]
    truth: Callable[..., Any]
    gate: str = "g"
    shape: str = "channel"


RULES = {
    "gla": Rule("gla", wyfold.fused_recurrent_gla, wyfold.chunk_gla, reference.gla),
    "simple gla": Rule("gla", wyfold.fused_recurrent_gla, wyfold.chunk_gla, reference.gla, shape="scalar"),
    "dplr": Rule(
        "dplr",
        wyfold.fused_recurrent_dplr_delta_rule,
        wyfold.chunk_dplr_delta_rule,
        reference.dplr_delta_rule,
        gate="gk",
    ),
    "gdn2": Rule("gdn2", wyfold.fused_recurrent_gdn2, wyfold.chunk_gdn2, reference.gdn2),
}
ROWS = ("q", "k", "v", "g", "a", "b", "w")


@pytest.fixture(params=RULES)
def rule(request: pytest.FixtureRequest) -> Rule:
    return RULES[request.param]


def drawn(rule: Rule, device: torch.device, N: int, T: int, dtype: torch.dtype = torch.float32) -> Call:
    torch.manual_seed(T)
    a: Call = {name: normalize(torch.randn(N, T, H, K), dim=-1) for name in "qk"}
    a |= {"v": torch.randn(N, T, HV, V), "g": -torch.rand(N, T, HV, *[K] * (rule.shape == "channel"))}
    if rule.name == "dplr":
        kk = normalize(torch.randn(N, T, H, K), dim=-1)
        a |= {"a": -kk, "b": kk * torch.rand(N, T, H, K)}
    if rule.name == "gdn2":
        a |= {"b": torch.rand(N, T, HV, K), "w": torch.rand(N, T, HV, V)}
    return {name: x.to(device, torch.float32 if name == "g" else dtype) for name, x in a.items()}


def served(op: Callable[..., Tensor], rule: Rule, rows: Call, pool: Tensor, **more: Any) -> Tensor:
    return op(**rows, beta=None, pool=pool, rule=rule.name, **{"state_v_first": False} | more)


def alone(op: Callable[..., Any], rule: Rule, rows: Call, state: Tensor | None, **more: Any) -> tuple[Tensor, Tensor]:
    """The differentiable operator of the same tokens."""
    call = {rule.gate if name == "g" else name: x for name, x in rows.items()}
    return op(**call, initial_state=state, output_final_state=True, **more)


def at(rows: Call, tokens: slice) -> Call:
    return {name: x[:, tokens] for name, x in rows.items()}


def a_pool(device: torch.device, slots: int = 9, *, v_first: bool = False) -> Tensor:
    return torch.randn(slots, HV, *((V, K) if v_first else (K, V))).to(device)


@pytest.mark.parametrize("v_first", [False, True], ids=["K first", "V first"])
def test_decode_is_the_recurrent_operator_in_place(rule: Rule, v_first: bool, backend: str, device):
    """In any slots, with a skipped and a new row, and another slot for a state; also tokens in one row."""
    rows, before = drawn(rule, device, 5, 1, torch.float16), a_pool(device, v_first=v_first)
    before[6:] = torch.nan
    pool = before.clone()
    slots, to = (torch.tensor(numbers, device=device) for numbers in ([3, -1, 4, 0, 9], [3, 1, 5, -1, 2]))
    there = torch.tensor([True, True, False, True, True], device=device)
    where = {"state_indices": slots, "output_state_indices": to, "has_initial_state": there, "state_v_first": v_first}
    o = served(serving.decode, rule, rows, pool, **where, backend=backend)
    entering = before[[3, 0, 4, 0, 0]]
    entering[2] = 0
    expected, state = alone(rule.recurrent, rule, rows, entering, state_v_first=v_first, backend=backend)
    assert torch.equal(o[[0, 2, 3]], expected[[0, 2, 3]]) and not o[[1, 4]].any()
    assert torch.equal(pool[[3, 5]], state[[0, 2]]) and torch.equal(pool[[0, 1, 2, 4]], before[[0, 1, 2, 4]])
    assert pool[6:].isnan().all()
    again = before.clone()
    across = {name: x.transpose(0, 1) for name, x in rows.items()}
    out = torch.empty_like(across["v"])
    assert served(serving.decode, rule, across, again, **where, out=out, backend=backend) is out
    assert torch.equal(out.transpose(0, 1), o) and torch.equal(again.nan_to_num(7), pool.nan_to_num(7))


def test_verify_keeps_the_state_after_every_token(rule: Rule, backend: str, device):
    """And continues after the accepted tokens; dense and packed drafts have the bits of single steps."""
    T, N = 3, 4
    rows, before = drawn(rule, device, N, T), a_pool(device, 12)
    columns = torch.arange(11, -1, -1, device=device).view(N, T).clone()
    columns[2, 1], columns[3, 0] = -1, 40  # a state that is not stored, and a sequence that is skipped
    pool, steps = before.clone(), before.clone()
    o = served(serving.verify, rule, rows, pool, state_indices=columns, backend=backend)
    state = before[columns[:, 0].clamp(max=11)]
    for t in range(T):
        expected, state = alone(rule.recurrent, rule, at(rows, slice(t, t + 1)), state, backend=backend)
        assert torch.equal(o[:3, t : t + 1], expected[:3])
        for n in range(3):
            if columns[n, t] >= 0:
                steps[columns[n, t].item()] = state[n]
    assert torch.equal(pool, steps) and not o[3].any()

    accepted = torch.tensor([0, 2, 9, 1], device=device)
    cu = torch.tensor([0, 2, 2, 5, 6], device=device)  # drafts of 2, 0, 3 and 1 tokens, and two rows of no sequence
    drafts, spare = drawn(rule, device, 1, 8), torch.arange(12, 24, device=device).view(N, T)
    pool = a_pool(device, 24)
    columns = torch.arange(12, device=device).view(N, T)
    expected_pool = pool.clone()
    where = {"state_indices": columns, "num_accepted_tokens": accepted, "output_state_indices": spare}
    o = served(serving.verify, rule, drafts, pool, **where, cu_seqlens=cu, backend=backend)
    for n, (start, stop) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
        state = expected_pool[columns[n, min(max(int(accepted[n]) - 1, 0), T - 1)].item()][None]
        for t in range(start, stop):
            y, state = alone(rule.recurrent, rule, at(drafts, slice(t, t + 1)), state, backend=backend)
            assert torch.equal(o[:, t : t + 1], y)
            expected_pool[spare[n, t - start].item()] = state[0]
    assert torch.equal(pool, expected_pool) and not o[:, 6:].any()


@pytest.mark.parametrize("v_first", [False, True], ids=["K first", "V first"])
def test_prefill_is_the_chunk_operator_in_place(rule: Rule, v_first: bool, backend: str, device):
    """Long, single-token and empty sequences; skipped and new ones; other output slots; checkpoints."""
    lengths, slots, to = (65, 1, 0, 6, 2), (3, 0, -1, 9, 5), (3, 7, 2, 1, 99)
    rows = drawn(rule, device, 1, 76)
    before, between = a_pool(device, v_first=v_first), a_pool(device, 5, v_first=v_first)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], device=device)
    pool, checkpoints = before.clone(), between.clone()
    source, target = (torch.tensor(numbers, device=device, dtype=torch.int32) for numbers in (slots, to))
    o = served(
        serving.prefill, rule, rows, pool, state_indices=source, output_state_indices=target, cu_seqlens=cu,
        has_initial_state=torch.tensor([True, False, True, True, True], device=device), state_v_first=v_first,
        checkpoint_every=64, checkpoint_pool=checkpoints, checkpoint_indices=torch.tensor([2], device=device),
        backend=backend,
    )  # fmt: skip
    entering = torch.stack([before[3], torch.zeros_like(before[0]), before[0], before[0], before[5]])
    expected, state, states = alone(
        rule.chunk, rule, rows, entering, cu_seqlens=cu, state_v_first=v_first, return_intermediate_states=True,
        checkpoint_every=64, backend=backend,
    )  # fmt: skip
    expected[:, 66:72] = 0  # the sequence without a slot
    assert torch.equal(o, expected)
    assert torch.equal(pool[[3, 7]], state[:2]) and torch.equal(checkpoints[2], states[0])
    untouched = [0, 1, 2, 4, 5, 6, 8]
    assert torch.equal(pool[untouched], before[untouched])
    assert torch.equal(checkpoints[[0, 1, 3, 4]], between[[0, 1, 3, 4]])


def test_a_served_sequence_is_the_token_loop(rule: Rule, float64_bounds):
    """A prompt, a draft of which two of three tokens are accepted, then single tokens; in float64."""
    rows = {name: x.double() for name, x in drawn(rule, torch.device("cpu"), 2, 24).items()}
    pool = torch.zeros(6, HV, K, V, dtype=torch.float64)
    columns = torch.arange(6).view(2, 3)
    outputs = [served(serving.prefill, rule, at(rows, slice(0, 17)), pool, state_indices=columns[:, 0])]
    outputs.append(served(serving.verify, rule, at(rows, slice(17, 20)), pool, state_indices=columns)[:, :2])
    for t in range(19, 24):
        given = {"state_indices": columns[:, 1]}
        outputs.append(served(serving.decode, rule, at(rows, slice(t, t + 1)), pool, **given))
    truth, state = alone(rule.truth, rule, rows, None)
    float64_bounds.output("o", torch.cat(outputs, 1), truth)
    float64_bounds.output("state", pool[columns[:, 1]], state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_pools_round_once_a_call(rule: Rule, dtype: torch.dtype, backend: str, device):
    rows, pool = drawn(rule, device, 3, 1, dtype), a_pool(device).to(dtype)
    before = pool.clone()
    o = served(serving.decode, rule, rows, pool, backend=backend)
    expected, state = alone(rule.recurrent, rule, rows, before[:3].float(), backend=backend)
    assert torch.equal(o, expected) and torch.equal(pool[:3], state.to(dtype)) and torch.equal(pool[3:], before[3:])


def test_gla_decodes_heads_of_128_channels_by_its_own_kernel(backend: str, device):
    """The kernel for one token of a bfloat16 state of this width has no GLA."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 1, 1, 128, device=device, dtype=torch.bfloat16) for _ in range(3))
    g = -torch.rand(2, 1, 1, 128, device=device)
    pool = torch.randn(2, 1, 128, 128, device=device).bfloat16()
    expected, state = wyfold.fused_recurrent_gla(
        q, k, v, g, initial_state=pool.clone(), output_final_state=True, state_dtype=torch.bfloat16, backend=backend
    )
    o = serving.decode(q, k, v, g, None, pool, rule="gla", state_v_first=False, backend=backend)
    assert torch.equal(o, expected) and torch.equal(pool, state)


REFUSED: dict[str, tuple[str, Call, str]] = {
    "unknown": ("gla", {"rule": "mamba"}, r"rule must be one of 'delta', 'gla', 'dplr', 'gdn2', got 'mamba'"),
    "beta": ("gla", {"beta": torch.ones(2, 1, HV)}, r"beta must be None with rule='gla', got Tensor"),
    "no b": ("dplr", {"b": None}, r"b must be given with rule='dplr', got None"),
    "a of gdn2": ("gdn2", {"a": torch.ones(2, 1, H, K)}, r"a must be None with rule='gdn2', got Tensor"),
    "a is a number": ("gdn2", {"a": 1.0}, r"a must be None with rule='gdn2', got float"),
    "a of delta": ("dplr", {"rule": "delta"}, r"a must be None with rule='delta', got Tensor"),
    "norm": ("dplr", {"use_qk_l2norm_in_kernel": True}, r"use_qk_l2norm_in_kernel must be False with rule='dplr'"),
    "norm is a number": ("dplr", {"use_qk_l2norm_in_kernel": 1}, r"use_qk_l2norm_in_kernel must be True or False"),
    "norm is a tensor": ("gla", {"use_qk_l2norm_in_kernel": torch.ones(3)}, r"use_qk_l2norm_in_kernel must be True or"),
    "safe_gate is a tensor": ("gla", {"safe_gate": torch.ones(3)}, r"safe_gate must be True or False, got Tensor"),
    "bound": ("dplr", {"lower_bound": -1.0}, r"lower_bound must come with safe_gate=True with rule='dplr', got -1.0"),
    "bound of gla": ("gla", {"lower_bound": -1.0}, r"lower_bound must be None with rule='gla', got -1.0"),
    "shape": ("dplr", {"a": torch.ones(2, 1, H, 8)}, r"a must be \[B, T, H, K\]"),
    "dtype": ("dplr", {"a": torch.ones(2, 1, H, K).bfloat16()}, r"a must have the dtype of q, float32, got bfloat16"),
    "gradient": ("dplr", {"a": torch.ones(2, 1, H, K, requires_grad=True)}, r"a must not require a gradient"),
    "gate": ("gdn2", {"g": torch.zeros(2, 1, HV)}, r"g must have 4 dimensions, \[B, T, HV, K\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str):
    key, change, message = REFUSED[name]
    rule = RULES[key]
    call = drawn(rule, torch.device("cpu"), 2, 1) | {"beta": None, "rule": rule.name} | change
    pool = a_pool(torch.device("cpu"))
    before = pool.clone()
    with pytest.raises((TypeError, ValueError), match=f"^decode: {message}"):
        serving.decode(**call, pool=pool, state_v_first=False)
    assert torch.equal(pool, before)
