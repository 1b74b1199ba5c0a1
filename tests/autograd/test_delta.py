"""Launches of each direction, tensors saved for the backward, and planted bugs.

A planted bug replaces one function of a tile or kernel by a wrong one. The float64 comparison of the operator tests
must then fail, which shows that it can detect the bug.
"""

import dataclasses
import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import wyfold
from wyfold import SequenceLayout, reference
from wyfold.autograd import workspace
from wyfold.kernels import table
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape

RULES = ("delta_rule", "gated_delta_rule", "kda")
FORMS = ("chunk", "fused_recurrent")
F64 = torch.float64


# --- launches and saved tensors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
def test_the_launches_of_each_direction(rule: str, form: str, results, monkeypatch):
    asked = []
    launches = table.kernel_module
    monkeypatch.setattr(table, "kernel_module", lambda stage, backend: asked.append(stage) or launches(stage, backend))
    op, a = getattr(wyfold, f"{form}_{rule}"), inputs.draw("random", rule, Shape(1, 20, 1, 1, 8, 8))
    plan = wyfold.explain(op, **a)
    results(op, a, ())
    forward, asked[:] = list(asked), []
    results(op, a)
    named = [launch.split(" ")[0] for launch in plan.forward]
    assert forward == (["prepare", "prepare", "scan"] if form == "chunk" else ["prepare", "recurrent"])
    assert set(forward) == set(named)
    assert {"gradients"} | set(asked[len(forward) :]) >= {launch.split(" ")[0] for launch in plan.backward}


def saved_by(op: Callable, a: dict[str, Any], **options: Any) -> list[int]:
    """Number of elements of each saved tensor: borders, E, F, A, J, P."""
    o, _ = op(**{name: x.detach().requires_grad_() for name, x in a.items()}, **options)
    return [x.numel() for x in o.grad_fn.saved_tensors[-6:]]


def test_tensors_saved_for_the_backward(monkeypatch):
    monkeypatch.setattr(workspace, "WORKSPACE_BYTES", 1)
    a = inputs.draw("random", "kda", Shape(2, 300, 1, 2, 8, 16))
    borders, *factors = saved_by(wyfold.chunk_kda, a)
    parts = math.ceil(math.ceil(300 / 16) / workspace.MIN_COLUMNS)
    assert borders == 2 * parts * 2 * 8 * 16 and factors == [0] * 5
    _, *factors = saved_by(wyfold.chunk_kda, a, disable_recompute=True)
    assert all(factors)
    assert saved_by(wyfold.fused_recurrent_kda, a)[1:] == [0] * 5


def test_a_layout_and_its_boundaries_give_equal_results(results):
    a = inputs.draw("random", "kda", Shape(1, 40, 1, 2, 8, 8))
    cu = torch.tensor([0, 7, 33])
    one, other = (results(wyfold.chunk_kda, a, cu_seqlens=x) for x in (cu, SequenceLayout(cu, 40)))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("form", FORMS)
def test_second_order_gradients_raise(form: str):
    a = inputs.draw("random", "kda", Shape(1, 20, 1, 1, 8, 8))
    q = a["q"].requires_grad_()
    o, _ = getattr(wyfold, f"{form}_kda")(**a)
    (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once differentiable"):
        dq.sum().backward()


# --- planted bugs ----------------------------------------------------------------------------------------------------

PREPARE, SCAN, SCAN_BWD = "kernels.prepare.eager", "kernels.scan.eager", "kernels.scan_bwd.eager"
GRADIENTS, RECURRENT, DECAY = "kernels.gradients.eager", "kernels.recurrent.eager", "tile.decay.eager"


def unmasked_inverse(right: Callable) -> Callable:
    """Missing mask: the diagonal of L is solved for as well."""
    return lambda L: right(L) - torch.diag_embed(L.diagonal(dim1=1, dim2=2) + 1e-3)


def neumann_inverse(right: Callable) -> Callable:
    """One power of L too few."""

    def wrong(L: Tensor) -> Tensor:
        L, A = L.tril(-1), torch.eye(L.shape[-1], dtype=L.dtype).expand_as(L)
        for _ in range(6):
            A = torch.eye(L.shape[-1], dtype=L.dtype) - L @ A
        return A

    return wrong


def late_running_sum(right: Callable) -> Callable:
    """Off by one: the gate of a token acts from the next token on."""
    return lambda g: None if g is None else torch.nn.functional.pad(g[:, :-1], (0, 0, 1, 0)).cumsum(-2)


def grams_without_decay(right: Callable) -> Callable:
    return lambda q, k, G: right(q, k, None)


def grams_keep_the_future(right: Callable) -> Callable:
    """Missing causal mask of P."""

    def wrong(q: Tensor, k: Tensor, G: Tensor | None) -> tuple[Tensor, Tensor]:
        J, P = right(q, k, G)
        return J, P + (q @ k.mT).triu(1)

    return wrong


def strictly_lower_queries(right: Callable) -> Callable:
    """A token does not read its own write."""

    def wrong(q: Tensor, k: Tensor, G: Tensor | None) -> tuple[Tensor, Tensor]:
        J, P = right(q, k, G)
        return J, P.tril(-1)

    return wrong


def ends_from_the_start(right: Callable) -> Callable:
    """Keys decay from the chunk's start instead of to its end."""
    return lambda x, G: x if G is None else x * torch.exp(G)


def no_decay_across(right: Callable) -> Callable:
    return lambda G: None


def advance_before_decay(right: Callable) -> Callable:
    """Wrong order: the chunk's writes decay with the state."""

    def wrong(S: Tensor, across: Tensor | None, E: Tensor, y: Tensor) -> None:
        right(S, None, E, y)
        if across is not None:
            S.mul_(across)

    return wrong


def residual_of_plain_keys(right: Callable) -> Callable:
    """Wrong sign of the prediction."""
    return lambda S, k, v: v + torch.bmm(k, S)


def read_without_own_writes(right: Callable) -> Callable:
    return lambda S, q, F, y, out: torch.bmm(q, S, out=out)


def retreat_forgets_the_keys(right: Callable) -> Callable:
    return lambda dS, across, q, k, do, dR: right(dS, across, q, torch.zeros_like(k), do, dR)


def retreat_without_decay(right: Callable) -> Callable:
    return lambda dS, across, q, k, do, dR: right(dS, None, q, k, do, dR)


def norm_backward_skipped(right: Callable) -> Callable:
    return lambda y, r, dy: r * dy


def norm_with_another_eps(right: Callable) -> Callable:
    return lambda x: right(x, 1e-5)


def groups_of_the_first(right: Callable) -> Callable:
    """The gradient of a group has only its first value head's."""
    return lambda tiles, H, HV: tiles[:: HV // H]


def heads_interleaved(right: Callable) -> Callable:
    """Value head j reads key head j % H."""

    def wrong(x: Tensor, table, heads: int, dtype: torch.dtype) -> Tensor:
        if x.shape[2] == heads:
            return right(x, table, heads, dtype)
        return right(x.repeat(1, 1, heads // x.shape[2], 1), table, heads, dtype)

    return wrong


def signed_gate_gradient(right: Callable) -> Callable:
    """Sums the terms after a token instead of those whose interval contains it."""
    return lambda x, y, z, G, pairs: right(x.flip(1), y, z, G, pairs)


def carried_term_lost(right: Callable) -> Callable:
    return lambda x, y, z, G, pairs: right(x, y, torch.zeros_like(z), G, pairs)


def inclusive_prefix(right: Callable) -> Callable:
    return lambda x: x.cumsum(-2)


def suffix_without_itself(right: Callable) -> Callable:
    return lambda x: right(x) - x


def clamp_passes_gradient(right: Callable) -> Callable:
    return lambda x, dg, A_log, dt_bias, activation, bound, clamp: right(x, dg, A_log, dt_bias, activation, bound, 0.0)


def bias_gradient_of_one_row(right: Callable) -> Callable:
    def wrong(*arguments: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        dx, dA_log, ddt_bias = right(*arguments)
        return dx, dA_log, None if ddt_bias is None else dx[:, :, 0].sum(0)

    return wrong


def tiny_strength_everywhere(right: float) -> float:
    """dbeta is computed by division even if beta is 0."""
    return 0.0


def token_decay_late(right: Callable) -> Callable:
    return lambda g: None if g is None else right(g).roll(1, 1)


def summed_columns(right: Callable) -> Callable:
    """S^T k with k along the wrong axis."""
    return lambda S, k: (S * k[..., None]).sum(-2).flip(-1)


def sequences_in_rank_order(right: Callable) -> Callable:
    """States are returned in the order of the scan instead of the sequences'."""
    return lambda states, table: states.unflatten(0, (table.sequences, -1))


def parts_forget(right: Callable) -> Callable:
    """No state passes from part to part."""
    return lambda *sizes: [dataclasses.replace(part, entered=0, left=0) for part in right(*sizes)]


# (module, replaced function, its replacement, rules and form in which the comparison must fail)
PLANTED: list[tuple[str, str, Callable, tuple[str, ...], str]] = [
    (PREPARE, "inverse", unmasked_inverse, RULES, "chunk"),
    (PREPARE, "inverse", neumann_inverse, RULES, "chunk"),
    (PREPARE, "running_sum", late_running_sum, RULES[1:], "chunk"),
    (PREPARE, "decayed_grams", grams_without_decay, RULES[1:], "chunk"),
    (PREPARE, "decayed_grams", grams_keep_the_future, RULES, "chunk"),
    (PREPARE, "decayed_grams", strictly_lower_queries, RULES, "chunk"),
    (PREPARE, "to_end", ends_from_the_start, RULES[1:], "chunk"),
    (PREPARE, "l2norm", norm_with_another_eps, RULES, "chunk"),
    (PREPARE, "to_chunks", heads_interleaved, RULES, "chunk"),
    (SCAN, "across", no_decay_across, RULES[1:], "chunk"),
    (SCAN, "advance_", advance_before_decay, RULES[1:], "chunk"),
    (SCAN, "residual", residual_of_plain_keys, RULES, "chunk"),
    (SCAN, "read", read_without_own_writes, RULES, "chunk"),
    (SCAN, "unranked", sequences_in_rank_order, RULES, "chunk"),
    (SCAN_BWD, "retreat_", retreat_forgets_the_keys, RULES, "chunk"),
    (SCAN_BWD, "retreat_", retreat_without_decay, RULES[1:], "chunk"),
    (SCAN_BWD, "advance_", advance_before_decay, RULES[1:], "chunk"),
    (SCAN_BWD, "unranked", sequences_in_rank_order, RULES, "chunk"),
    (f"{GRADIENTS}.tokens", "l2norm_bwd", norm_backward_skipped, RULES, "chunk"),
    (f"{GRADIENTS}.tokens", "sum_groups", groups_of_the_first, RULES, "chunk"),
    (f"{GRADIENTS}.chunks", "gate_gradient", signed_gate_gradient, RULES[1:], "chunk"),
    (f"{GRADIENTS}.chunks", "gate_gradient", carried_term_lost, RULES[1:], "chunk"),
    (DECAY, "log_gate_bwd", bias_gradient_of_one_row, RULES[1:], "chunk"),
    (DECAY, "log_gate_bwd", clamp_passes_gradient, ("kda",), "chunk"),
    (f"{GRADIENTS}.chunks", "TINY_STRENGTH", tiny_strength_everywhere, RULES, "chunk"),
    (DECAY, "exclusive_sum", inclusive_prefix, RULES[1:], "chunk"),
    (DECAY, "suffix_sum", suffix_without_itself, RULES[1:], "chunk"),
    (f"{RECURRENT}.forward", "token_decay", token_decay_late, RULES[1:], "fused_recurrent"),
    (f"{RECURRENT}.backward", "columns_dot", summed_columns, RULES, "fused_recurrent"),
    (f"{RECURRENT}.backward", "unranked", sequences_in_rank_order, RULES, "fused_recurrent"),
    ("autograd.workspace", "parts", parts_forget, RULES, "chunk"),
]  # fmt: skip


def probe(rule: str) -> dict[str, Any]:
    """A call with several parts, groups, packing, ragged tails, a beta of 0, and gates at their clamp."""
    gate = "model" if rule != "delta_rule" else None
    a = inputs.draw("random", rule, Shape(1, 150, 2, 4, 8, 16), gate=gate, state="normal", sequences=4, dtype=F64)
    a["beta"] = torch.where(torch.arange(150)[:, None] % 11 == 3, 0.0, a["beta"])
    if rule == "kda":
        a |= {"safe_gate": True, "g": 8 * a["g"]}
    a |= {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return a | {"cu_seqlens": torch.tensor([0, 21, 21, 110, 147])}


@pytest.fixture(scope="module")
def truths(results) -> dict[str, dict[str, Tensor]]:
    return {rule: results(getattr(reference, rule), probe(rule)) for rule in RULES}


def refused(float64_bounds, got: dict[str, Tensor], truth: dict[str, Tensor]) -> list[str]:
    """Names of the results for which the comparison fails."""
    names = []
    for name in truth:
        try:
            (float64_bounds.gradient if name.startswith("d") else float64_bounds.output)(name, got[name], truth[name])
        except AssertionError:
            names.append(name)
    return names


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
def test_the_probe_passes_without_a_bug(rule: str, form: str, truths, results, float64_bounds, monkeypatch):
    monkeypatch.setattr(workspace, "WORKSPACE_BYTES", 1)
    monkeypatch.setattr(workspace, "MIN_COLUMNS", 3)
    assert refused(float64_bounds, results(getattr(wyfold, f"{form}_{rule}"), probe(rule)), truths[rule]) == []


@pytest.mark.parametrize("module, name, plant, rules, form", PLANTED, ids=lambda x: getattr(x, "__name__", None))
def test_a_planted_bug_is_detected(module, name, plant, rules, form, truths, results, float64_bounds, monkeypatch):
    monkeypatch.setattr(workspace, "WORKSPACE_BYTES", 1)
    monkeypatch.setattr(workspace, "MIN_COLUMNS", 3)
    where = importlib.import_module(f"wyfold.{module}")
    monkeypatch.setattr(where, name, plant(getattr(where, name)))
    for rule in rules:
        got = results(getattr(wyfold, f"{form}_{rule}"), probe(rule))
        assert refused(float64_bounds, got, truths[rule]), f"{plant.__name__} passes in {rule}"


def test_enough_are_planted():
    assert len(PLANTED) >= 15
