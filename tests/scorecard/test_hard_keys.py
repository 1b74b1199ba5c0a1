"""Repeated and correlated keys in bfloat16 at beta 2, where every token is a reflection without damping.

Rounding accumulates along the sequence in every chunk form. The yardstick is the token loop in bfloat16: the chunk form
must add no error to that of rounding the inputs.
"""

import itertools
from dataclasses import replace

import pytest
import torch

from wyfold.cli.operators import OPERATOR_SPECS, measured, verdicts
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape

RULES = ("delta_rule", "gated_delta_rule", "kda")
KEYS = ("normal", "positive", "identical", "near-identical", "two clusters", "rank 4", "vocabulary")


@pytest.mark.parametrize(("rule", "keys"), list(zip(itertools.cycle(RULES), KEYS)))
def test_reflections_in_bfloat16(rule: str, keys: str):
    spec = replace(OPERATOR_SPECS[f"chunk_{rule}"], outputs=("o",))
    options = {"keys": keys, "beta": "two", "gate": "-1e-3", "dtype": torch.bfloat16}
    arguments = inputs.draw("random", rule, Shape(1, 130, 1, 1, 64, 64), seed=3, **options)
    got = measured(spec.ours, arguments, spec.outputs, seed=3)
    assert not [str(verdict) for verdict in verdicts(spec, arguments, got, 3) if not verdict.passed]
