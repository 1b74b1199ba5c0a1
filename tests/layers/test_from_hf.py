"""Copies of transformers layers: every model type is copied with its settings, or refused.

A convolution's other activation, a norm's other activation and a gate under another name were assumed to be the usual
ones, without a word: errors were 3 % of the largest output with gelu, and 110 % with a norm gated by sigmoid.
"""

from typing import Any

import pytest
import torch
from tests.integrations.hybrids import hybrid
from torch import nn

from wyfold.layers import GatedDeltaNet, KimiDeltaAttention

pytest.importorskip("transformers", reason="transformers is not installed")

GDN = ["qwen3_next", "qwen3_5", "qwen3_5_moe", "lara_mini", "qwen4_exp"]
KDA = ["kimi_linear", "glm5_next"]


def layer(name: str, **changes: Any) -> Any:
    return next(part for part in hybrid(name, **changes).modules() if hasattr(part, "conv1d"))


def copied(theirs: Any) -> Any:
    kind = KimiDeltaAttention if hasattr(theirs, "forget_gate") else GatedDeltaNet
    return kind.from_hf(theirs, backend="eager")


@pytest.mark.parametrize("name", [*GDN, *KDA])
def test_every_layer_with_these_projections_is_copied(name: str):
    """In float32, and the norm alone in bfloat16, where rounding before the weight shows."""
    theirs, x = layer(name), torch.randn(2, 21, 32)
    with torch.no_grad():
        norm = theirs.norm if name in GDN else theirs.o_norm
        norm.weight.uniform_(0.5, 1.5)
        ours, expected = copied(theirs), theirs(x)
        expected = expected[0] if isinstance(expected, tuple) else expected
        assert float((ours(x) - expected).abs().max() / expected.abs().max()) < 2e-6
        row, gate = torch.randn(2, 500, 16).bfloat16()
        expected, errors, found = norm.bfloat16()(row, gate).float(), {}, ours.norm.bfloat16().round_before_weight
        for ours.norm.round_before_weight in (False, True):
            errors[ours.norm.round_before_weight] = float((ours.norm(row, gate).float() - expected).norm())
        assert found == (errors[True] < errors[False]), errors


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear"])
def test_another_activation_of_the_convolution_is_refused(name: str):
    with pytest.raises(ValueError, match=r"from_hf: layer must have the activation silu after .*, got 'gelu'"):
        copied(layer(name, hidden_act="gelu"))


def test_another_gate_of_the_norm_is_copied_or_refused():
    theirs, x = layer("qwen4_exp", output_gate_type="sigmoid"), torch.randn(1, 9, 32)
    with torch.no_grad():
        assert float((copied(theirs)(x) - theirs(x)).abs().max() / theirs(x).abs().max()) < 2e-6
    theirs.norm.activation = "relu"
    with pytest.raises(ValueError, match=r"GatedDeltaNet.from_hf: layer must have a norm gated by .*, got 'relu'"):
        copied(theirs)


def test_settings_and_parameters_that_a_copy_would_leave_out_are_refused():
    with pytest.raises(ValueError, match=r"got BailingHybridDeltaAttention with no forget_gate.f_a_proj.weight"):
        copied(layer("bailing_hybrid"))
    theirs = layer("glm5_next")
    theirs.forget_gate.lower_bound = theirs.forget_gate.__dict__.pop("safe_gate_lower_bound")
    with pytest.raises(ValueError, match=r"KimiDeltaAttention.from_hf: layer must have a gate .*, got lower_bound"):
        copied(theirs)
    theirs = layer("qwen3_5")
    theirs.conv1d.bias = nn.Parameter(torch.zeros(theirs.conv_dim))
    with pytest.raises(ValueError, match=r"got Qwen3_5GatedDeltaNet with also conv1d\.bias$"):
        copied(theirs)
