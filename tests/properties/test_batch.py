"""Rows and heads of a batch are independent, bit for bit, and a dense batch is a packed one of equal lengths."""

import pytest
import torch

import wyfold
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape

RULES = (
    pytest.param("delta_rule", marks=pytest.mark.release),
    "gated_delta_rule",
    "kda",
)  # no gate is a scalar gate left out
FORMS = ("chunk", "fused_recurrent")
SUMS = ("A_log", "dt_bias", "dA_log", "ddt_bias")
WIDTHS = [(16, 64), (128, 64)]


def fed_back(a: dict) -> dict[str, torch.Tensor]:
    return {"o": inputs.incoming(a["v"], 1), "state": inputs.incoming(a["initial_state"], 2)}


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
def test_rows(rule: str, form: str, widths, threads: int, results):
    for T, heads, dtype in ((21, (1, 1), torch.float32), (32, (1, 2), torch.bfloat16), (1, (1, 1), torch.float64)):
        a = inputs.draw("random", rule, Shape(3, T, *heads, *widths), gate="model", state="normal", dtype=dtype)
        op, fed = getattr(wyfold, f"{form}_{rule}"), fed_back(a)
        batch = results(op, a, None, fed, output_final_state=True)
        for b in range(3):

            def row(found: dict, b: int = b) -> dict:
                return {
                    name: x[b : b + 1] if isinstance(x, torch.Tensor) and name not in SUMS else x
                    for name, x in found.items()
                }

            alone = results(op, row(a), None, row(fed), output_final_state=True)
            for name, x in row(batch).items():
                assert name in SUMS or torch.equal(alone[name], x), (name, b, T)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
def test_groups_of_heads(rule: str, form: str, results):
    """A key head and the value heads that read it, alone or among others, including gradients that sum over tokens."""
    a = inputs.draw("random", rule, Shape(2, 37, 3, 6, 16, 24), gate="model", state="normal")
    op, fed = getattr(wyfold, f"{form}_{rule}"), fed_back(a)
    every = results(op, a, None, fed, output_final_state=True)
    for h in range(3):

        def group(found: dict, h: int = h) -> dict:
            def part(name: str, x: torch.Tensor) -> torch.Tensor:
                if name in SUMS:
                    return x[2 * h : 2 * h + 2]
                if name in ("initial_state", "state", "dinitial_state"):
                    return x[:, 2 * h : 2 * h + 2]
                return x[:, :, h : h + 1] if name in ("q", "k", "dq", "dk") else x[:, :, 2 * h : 2 * h + 2]

            return {name: part(name, x) if isinstance(x, torch.Tensor) else x for name, x in found.items()}

        alone = results(op, group(a), None, group(fed), output_final_state=True)
        for name, x in group(every).items():
            assert torch.equal(alone[name], x), (name, h)


@pytest.mark.parametrize("T", [1, 16, 45])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
def test_dense_is_packed(rule: str, form: str, T: int, results):
    a = inputs.draw("random", rule, Shape(3, T, 1, 2, 16, 8), gate="any", state="normal")
    op, fed = getattr(wyfold, f"{form}_{rule}"), fed_back(a)
    dense = results(op, a, None, fed, output_final_state=True)

    def flat(found: dict) -> dict:
        return {name: x if x.shape[1] != T or "state" in name else x.flatten(0, 1)[None] for name, x in found.items()}

    packed = results(op, flat(a), None, flat(fed), output_final_state=True, cu_seqlens=torch.arange(4) * T)
    for name, x in flat(dense).items():
        assert torch.equal(packed[name], x), name
