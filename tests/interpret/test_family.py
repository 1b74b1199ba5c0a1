"""Promises of the further rules on kernels, bit for bit: repeats, strides, causality, packing, and split calls.

On a GPU heads have a model's widths and 16 bits, for which GLA and DeltaProduct have Gluon's kernels on Hopper.
"""

from typing import Any

import pytest
import torch
from tests.conftest import interpreting
from tests.ops.family_calls import CASES, drawn, fed_back, of_tokens, operator, require_packed_is_separate, tokens
from torch import Tensor

from wyfold.reference.shapes import Shape

SHOWN = (("gla", "chunk"),)
CHUNK = 64
"""Its multiples are boundaries of tokens and of chunks of updates, for every chunk size and number of updates."""


def call(rule: str, device: torch.device, sequences: int | None = None) -> dict[str, Any]:
    small = interpreting()
    if small and rule == "gla, gv":
        pytest.skip("decays of value channels take the interpreter minutes")
    shape = Shape(1, 80, 1, 2, 16, 24) if small else Shape(1, 200, 1, 2, 128, 128)
    a = drawn(rule, shape, sequences=sequences, dtype=torch.float32 if small else torch.bfloat16)
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in a.items()} | {"backend": "triton"}


@pytest.mark.parametrize(
    ("rule", "form"),
    [*SHOWN, *(pytest.param(*case, marks=pytest.mark.release_if_interpreted) for case in CASES if case not in SHOWN)],
)
def test_repeats_strides_causality_and_splits(rule: str, form: str, device, results):
    op, a, other = operator(rule, form), call(rule, device), call(rule, device)
    fed = fed_back(a)
    whole = results(op, a, None, fed)

    again = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in of_tokens(a).items()}
    for given in (a, a | again):
        got = results(op, given, None, fed)
        assert all(torch.equal(got[name], x) for name, x in whole.items())

    loss = {"o": fed["o"].clone()}
    loss["o"][:, CHUNK + 5 :] = 0
    later = {name: x.flip(1) for name, x in of_tokens(tokens(rule, other, CHUNK + 5)).items()}
    future = {name: torch.cat([x, later[name]], 1) for name, x in of_tokens(tokens(rule, a, 0, CHUNK + 5)).items()}
    truth, got = (results(op, given, None, loss) for given in (a, a | future))
    for name, x in tokens(rule, truth, 0, CHUNK + 5).items():
        assert name == "state" or torch.equal(tokens(rule, got, 0, CHUNK + 5)[name], x), name
    assert torch.equal(tokens(rule, truth, 0, CHUNK + 5)["o"], tokens(rule, whole, 0, CHUNK + 5)["o"])

    o, state = op(**tokens(rule, a, 0, CHUNK))
    rest, state = op(**tokens(rule, a, CHUNK) | {"initial_state": state})
    assert torch.equal(torch.cat([o, rest], 1), whole["o"]) and torch.equal(state, whole["state"])


@pytest.mark.parametrize(
    ("rule", "form"), [pytest.param(*case, marks=pytest.mark.release_if_interpreted) for case in CASES]
)
def test_packed_is_separate(rule: str, form: str, device, results):
    borders = [0, 17, 17, 75, 76]
    require_packed_is_separate(rule, form, call(rule, device, len(borders) - 1), borders, results)
