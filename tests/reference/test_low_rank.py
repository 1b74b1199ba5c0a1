"""The token loop of the low-rank rules: explicit transition matrices, the delta rules inside them, and packing."""

import pytest
import torch
from torch import Tensor

from wyfold import reference
from wyfold.reference.error import judge, require
from wyfold.reference.inputs import LOW_RANK, draw
from wyfold.reference.shapes import Shape
from wyfold.reference.targets import target

F64 = torch.float64
SHAPE = Shape(B=2, T=9, H=2, HV=4, K=8, V=5)


def wide(rule: str, shape: Shape = SHAPE, **names) -> dict:
    return draw("random", rule, shape, dtype=F64, state="normal", **names) | {"output_final_state": True}


def same(name: str, got: Tensor, truth: Tensor) -> None:
    require(judge(got, truth, name=name, target=target(name, F64)))


def rows_of(rule: str, a: dict, b: int, t: int, j: int) -> tuple[Tensor, ...]:
    """q, k, v, erasing row, erasing column and decays of one token and value head, in the papers' words."""
    h, one = j // (SHAPE.HV // SHAPE.H), torch.ones(SHAPE.K, dtype=F64)
    q, k, v = a.get("q", a.get("r"))[b, t, h], a["k"][b, t, h], a["v"][b, t, j]
    gate = a.get("w") if "rwkv7" in rule else a.get("gk", a.get("g"))
    decay = one if gate is None else gate[b, t, j].exp() * one
    if rule == "mul_rwkv7":
        return q, k, v, -a["kk"][b, t, h], a["kk"][b, t, h] * a["a"][b, t, h], decay
    if rule == "gdn2":
        return q, k, a["w"][b, t, j] * v, -decay * a["b"][b, t, j] * k, k, decay
    if rule == "comba":
        written = a["beta"][b, t, j] * k
        return q, written, v, -a["p"][b, t, h], written, decay
    return q, k, v, a["a"][b, t, h], a["b"][b, t, h], decay


@pytest.mark.parametrize("rule", LOW_RANK)
def test_the_loop_multiplies_transition_matrices(rule: str):
    """S_t = (diag(exp g) + b a^T) S_{t-1} + k v^T, with explicit matrices; a is decayed if it reads after the decay."""
    a = wide(rule, gate="any")
    o, final = getattr(reference, rule)(**a, scale=0.3)
    for b in range(SHAPE.B):
        for j in range(SHAPE.HV):
            S = a["initial_state"][b, j]
            for t in range(SHAPE.T):
                q, k, v, row, column, decay = rows_of(rule, a, b, t, j)
                S = (torch.diag(decay) + torch.outer(column, row)) @ S + torch.outer(k, v)
                same("o", o[b, t, j], 0.3 * q @ S)
            same("state", final[b, j], S)


def test_kda_and_gdn_are_inside():
    a = wide("kda")
    truth = reference.kda(**a)
    g, beta, k, S = a["g"], a["beta"][..., None], a["k"].repeat_interleave(2, 2), a["initial_state"]
    q = a["q"].repeat_interleave(2, 2)
    rest = {"initial_state": S, "output_final_state": True}
    erase = {"b": beta.expand_as(k), "w": beta.expand_as(a["v"])}
    for o, state in (
        reference.dplr_delta_rule(q, beta * k, a["v"], -g.exp() * k, beta * k, g, **rest),
        reference.gdn2(a["q"], a["k"], a["v"], g, **erase, **rest),
    ):
        same("o", o, truth[0])
        same("state", state, truth[1])
    a = wide("gated_delta_rule")
    q, k = a["q"].repeat_interleave(2, 2), a["k"].repeat_interleave(2, 2)
    o, state = reference.comba(
        q, k, a["v"], a["g"].exp()[..., None] * k, a["g"], a["beta"], **rest | {"initial_state": a["initial_state"]}
    )
    truth = reference.gated_delta_rule(**a)
    same("o", o, truth[0])
    same("state", state, truth[1])


@pytest.mark.parametrize("rule", ["rwkv7", "gdn2", "comba"])
def test_packed_sequences_are_separate_and_padding_is_not_read(rule: str):
    bounds = [0, 4, 4, 5, 9]
    a = wide(rule, Shape(1, 11, 1, 2, 8, 5), sequences=4)
    tokens = [name for name, x in a.items() if isinstance(x, Tensor) and name != "initial_state"]
    for name in tokens:
        a[name][:, 9:] = torch.nan
    o, final = getattr(reference, rule)(**a, cu_seqlens=torch.tensor(bounds))
    assert not o[:, 9:].any()
    for n in range(4):
        part = {name: a[name][:, bounds[n] : bounds[n + 1]] for name in tokens}
        o_n, final_n = getattr(reference, rule)(**{**a, **part, "initial_state": a["initial_state"][n : n + 1]})
        assert torch.equal(o_n, o[:, bounds[n] : bounds[n + 1]]) and torch.equal(final_n, final[n : n + 1])


def test_options():
    a = wide("dplr_delta_rule", gate="bound reached")
    o, final = reference.dplr_delta_rule(**a)
    first = a | {"initial_state": a["initial_state"].mT, "state_v_first": True}
    o_first, final_first = reference.dplr_delta_rule(**first)
    assert torch.equal(o_first, o) and torch.equal(final_first, final.mT)
    *_, states = reference.dplr_delta_rule(**a, return_intermediate_states=True, checkpoint_every=3)
    assert states.shape == (2, 3, 4, 8, 5) and torch.equal(states[:, 2], final)
    raised = a | {"gk": a["gk"].clamp(min=-1.0)}
    clamped = reference.dplr_delta_rule(**a, safe_gate=True, lower_bound=-1.0)
    assert torch.equal(clamped[0], reference.dplr_delta_rule(**raised)[0])
