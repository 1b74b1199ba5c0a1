"""A call that stops at a chunk boundary and continues from its state has the bits of one call."""

from itertools import pairwise

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
PER_TOKEN = ("q", "k", "v", "g", "beta")


def in_pieces(op, a: dict, cuts: list[int], **options) -> tuple[torch.Tensor, torch.Tensor]:
    """o and final state of calls on the tokens between cuts, each from the previous call's final state."""
    outputs, state = [], a["initial_state"]
    for begin, end in pairwise(cuts):
        piece = {name: x[:, begin:end] if name in PER_TOKEN else x for name, x in a.items()}
        o, state = op(**{**piece, "initial_state": state}, output_final_state=True, **options)
        outputs.append(o)
    return torch.cat(outputs, 1), state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ("chunk 16", "chunk 32", "chunk 64", "fused_recurrent"))
@pytest.mark.parametrize("rule", RULES)
def test_every_cut(rule: str, form: str, dtype: torch.dtype):
    form, _, size = form.partition(" ")
    op, options = getattr(wyfold, f"{form}_{rule}"), {"chunk_size": int(size)} if size else {}
    a = inputs.draw("random", rule, Shape(2, 150, 1, 1, 8, 64), gate="any", state="normal", dtype=dtype)
    o, state = op(**a, output_final_state=True, **options)
    step = int(size or 1)
    places = range(step, 150, step) if size else (1, 2, 15, 64, 149)
    for cuts in [[0, at, 150] for at in places] + [[0, *places, 150]]:
        pieces, last = in_pieces(op, a, cuts, **options)
        assert torch.equal(pieces, o) and torch.equal(last, state), cuts


@pytest.mark.parametrize("form", ("chunk", "fused_recurrent"))
@pytest.mark.parametrize("rule", RULES)
def test_gradients_cross_the_cut(rule: str, form: str, results):
    op = getattr(wyfold, f"{form}_{rule}")
    a = inputs.draw("random", rule, Shape(2, 90, 1, 2, 8, 16), gate="weak", state="normal")
    whole = results(op, a, output_final_state=True)
    leaves = {name: x.detach().requires_grad_() for name, x in a.items()}
    o, state = in_pieces(op, leaves, [0, 16, 64, 90])
    arrows = [inputs.incoming(o, 0), inputs.incoming(state, 1)]
    found = torch.autograd.grad([o, state], list(leaves.values()), arrows)
    for name, dx in zip(leaves, found):
        assert torch.equal(dx, whole[f"d{name}"]), name


def test_decoding_token_by_token_is_the_recurrent_call(results):
    a = inputs.draw("random", "kda", Shape(2, 20, 1, 2, 16, 64), gate="model", state="normal")
    o, state = wyfold.fused_recurrent_kda(**a, output_final_state=True)
    pieces, last = in_pieces(wyfold.fused_recurrent_kda, a, list(range(21)))
    assert torch.equal(pieces, o) and torch.equal(last, state)
