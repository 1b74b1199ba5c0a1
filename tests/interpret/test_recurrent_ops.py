"""Accuracy of the delta rules and GLA token by token on kernels, against the float64 token loop.

As in `test_delta_ops`, every value of every option occurs. Blocks of the backward have four tokens here, in runs of two
blocks, so that a few tokens fill several of both.
"""

from typing import Any

import pytest
import torch
from tests.interpret.test_delta_ops import GATES, OPTIONS, WITH_GLA, arguments_of, mixed, parameters, verdicts

from wyfold.kernels import table
from wyfold.reference import inputs
from wyfold.reference.error import require
from wyfold.reference.shapes import Shape

CASES = 10
CHANGED = {
    "chunk": (1,),
    "lengths": (1, 2, 5, 8, 9, [5, 0, 1], [0, 4, 3], [9], [2, 7, 0], [0]),
    "checkpoints": (0, 0, 1, 3),
    "keep": (False,),
}
MIXED = [
    (rule, i, case)
    for n, rule in enumerate(WITH_GLA)
    for i, case in enumerate(mixed(OPTIONS | CHANGED | GATES[rule], n, CASES))
]


@pytest.fixture
def short_blocks(device, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = table.kernel_module("recurrent", "triton")
    monkeypatch.setattr(stage, "BLOCK", 4)
    monkeypatch.setattr(stage, "RUN", 2)


def of_the_recurrent_form(a: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in a.items() if name not in ("chunk_size", "disable_recompute")}


@pytest.mark.parametrize("rule, seed, case", parameters(MIXED))
def test_every_option(rule: str, seed: int, case: dict, device, short_blocks, guarded, results):
    a, family = of_the_recurrent_form(arguments_of(rule, case, seed)), "random"
    if case.get("gate") == "alternating":
        family = "gate alternating"
    require(*verdicts(rule, a, case["loss"], family, device, guarded, results, "fused_recurrent"))


def test_as_wide_as_a_model(device, guarded, results):
    """With the default block sizes as well."""
    a = inputs.draw("random", "kda", Shape(1, 70, 1, 1, 128, 16), gate="model", state="normal", sequences=2)
    a |= {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "cu_seqlens": torch.tensor([0, 2, 68])}
    require(*verdicts("kda", a, "both", "random", device, guarded, results, "fused_recurrent"))


def test_every_value_occurs(device):
    for rule in WITH_GLA:
        for name, values in (OPTIONS | CHANGED | GATES[rule]).items():
            met = [repr(case[name]) for of, _, case in MIXED if of == rule]
            assert set(met) == set(map(repr, values)), (rule, name)
