"""Calls of the rules beside the delta family: GLA, DeltaProduct, and the low-rank rules, in both forms."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

import wyfold
from wyfold import reference
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape

STATES = ("initial_state", "state", "dinitial_state")
OF_UPDATES = ("k", "v", "beta")


class Rule(NamedTuple):
    """A rule with a kind of gate.

    Attributes:
        operator: Public name of the operator, without its form.
        loop: The token loop.
        drawn: Name of the rule in `reference.inputs`.
        gate: Name of the gate's argument, None without one.
        updates: Number of updates of a token: k, v and beta have as many rows.
        length: Factor of the keys. Where nothing is erased, keys may have any length.
        form: Prefix of the only form; empty: there are "chunk" and "fused_recurrent".
    """

    operator: str
    loop: Callable[..., Any]
    drawn: str
    gate: str | None = None
    updates: int = 1
    length: float = 1.0
    form: str = ""


PRODUCT = "gated_delta_product", reference.gated_delta_product
RULES = {
    "gla": Rule("gla", reference.gla, "gla", "g", length=5),
    "simple gla": Rule("gla", reference.gla, "gated_delta_rule", "g", length=5),
    "linear attention": Rule("gla", reference.gla, "delta_rule", length=5),
    "gla, gv": Rule("gla", reference.gla, "gla", "gv", length=5, form="fused_recurrent"),
    "product": Rule(*PRODUCT, "gated_delta_rule", "g", updates=2),
    "product, channels": Rule(*PRODUCT, "kda", "g", updates=2),
    "product, no gate": Rule(*PRODUCT, "delta_rule", updates=3),
    "dplr": Rule("dplr_delta_rule", reference.dplr_delta_rule, "dplr_delta_rule", "gk"),
    "iplr": Rule("iplr_delta_rule", reference.iplr_delta_rule, "iplr_delta_rule"),
    "rwkv7": Rule("rwkv7", reference.rwkv7, "rwkv7", "w"),
    "mul_rwkv7": Rule("rwkv7", reference.mul_rwkv7, "mul_rwkv7", "w", form="fused_mul_recurrent"),
    "gdn2": Rule("gdn2", reference.gdn2, "gdn2", "g"),
    "comba": Rule("comba", reference.comba, "comba", "g"),
}
CASES = [
    (name, form)
    for name, rule in RULES.items()
    for form in ([rule.form] if rule.form else ["chunk", "fused_recurrent"])
]
"""Rule and form of every operator."""
GATED = [(name, form) for name, form in CASES if RULES[name].gate]


def operator(rule: str, form: str) -> Callable[..., Any]:
    return getattr(wyfold, f"{form}_{RULES[rule].operator}")


def drawn(name: str, shape: Shape, **options: Any) -> dict[str, Any]:
    """Arguments with an initial state, which ask for the final one."""
    rule = RULES[name]
    B, T, H, HV, K, V = shape.B, shape.T, shape.H, shape.HV, shape.K, shape.V
    longer = Shape(B, rule.updates * T, H, HV, K, V)
    a = inputs.draw("random", rule.drawn, longer, **{"gate": "any", "state": "normal", **options})
    a["k"] = rule.length * a["k"]
    if rule.operator == "gla":
        a.pop("beta", None)
    if rule.gate == "gv":
        of_values = Shape(B, T, HV, HV, V, V)
        a["gv"] = inputs.draw("random", "gla", of_values, **{"gate": "any", **options, "seed": 7})["g"]
    if rule.operator == "gated_delta_product":
        a = {part: x if part in (*OF_UPDATES, *STATES) else x[:, :T].contiguous() for part, x in a.items()}
        a["num_householder"] = rule.updates
    return a | {"output_final_state": True}


def tokens(name: str, found: dict[str, Any], begin: int, end: int | None = None) -> dict[str, Any]:
    """Arguments or results restricted to tokens from `begin` to `end`; states and flags as they are."""
    n = RULES[name].updates

    def cut(part: str, x: Tensor) -> Tensor:
        each = n if part.removeprefix("d") in OF_UPDATES else 1
        return x[:, each * begin : None if end is None else each * end]

    return {part: x if part in STATES or not isinstance(x, Tensor) else cut(part, x) for part, x in found.items()}


def of_tokens(found: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors with a row for each token or update."""
    return {part: x for part, x in found.items() if part not in STATES and isinstance(x, Tensor)}


def fed_back(a: dict[str, Any]) -> dict[str, Tensor]:
    """Incoming gradients of o and of the final state."""
    q = a.get("q", a.get("r"))
    o = q.new_empty(*q.shape[:2], *a["v"].shape[2:])
    return {"o": inputs.incoming(o, 1), "state": inputs.incoming(a["initial_state"], 2)}


def require_packed_is_separate(
    rule: str, form: str, a: dict[str, Any], borders: list[int], results: Callable[..., Any]
) -> None:
    """Require the bits of separate calls from a packed one, whose spare rows are never read and get zeros.

    Args:
        rule, form: An operator.
        a: Arguments with spare rows after the last border. They are written over with NaN.
        borders: Of the sequences.
        results: The fixture.
    """
    op, fed, total = operator(rule, form), fed_back(a), borders[-1]
    for x in of_tokens(tokens(rule, a | {"o": fed["o"]}, total)).values():
        x.fill_(torch.nan)
    together = results(op, a, None, fed, cu_seqlens=torch.tensor(borders, device=a["v"].device))
    for n, (begin, end) in enumerate(pairwise(borders)):

        def part(found: dict[str, Any], n: int = n, begin: int = begin, end: int = end) -> dict[str, Any]:
            found = {name: x[n : n + 1] if name in STATES else x for name, x in found.items()}
            return tokens(rule, found, begin, end)

        alone = results(op, part(a), None, part(fed))
        for name, x in part(together).items():
            assert torch.equal(alone[name], x), (name, n)
    assert not any(x.any() for x in of_tokens(tokens(rule, together, total)).values())


def agree(float64_bounds: Any, got: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    """Require every result and gradient within the float64 bounds."""
    assert got.keys() == truth.keys()
    for part, x in truth.items():
        (float64_bounds.gradient if part.startswith("d") else float64_bounds.output)(part, got[part], x)


F64 = torch.float64
