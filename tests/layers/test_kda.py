"""Kimi Delta Attention against its formula, with both gates."""

import pytest
import torch
from torch.nn.functional import softplus

from wyfold import SequenceLayout, reference
from wyfold.layers import KimiDeltaAttention


@pytest.fixture
def formula(projected):
    def formula(layer, x, layout=None):
        q, k, v = projected(layer, x, layout)
        beta = torch.sigmoid(x @ layer.beta.weight.T)
        decay = layer.decay_parameters
        raw = x @ layer.decay_down.weight.T @ layer.decay_up.weight.T
        raw = raw.unflatten(-1, decay.dt_bias.shape) + decay.dt_bias
        rate = decay.A_log.exp()[:, None]
        g = -rate * softplus(raw) if layer.lower_bound is None else layer.lower_bound * torch.sigmoid(rate * raw)
        o, _ = reference.kda(reference.l2norm(q), reference.l2norm(k), v, g, beta, cu_seqlens=layout)
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + layer.norm.eps) * layer.norm.weight
        gate = torch.sigmoid(x @ layer.gate_down.weight.T @ layer.gate_up.weight.T + layer.gate_up.bias)
        return (o.flatten(2) * gate) @ layer.out.weight.T

    return formula


@pytest.mark.parametrize("name", ["kda", "kda_bounded"])
@pytest.mark.parametrize("layout", [None, SequenceLayout.from_lengths([17, 0, 20], tokens=39)], ids=["dense", "packed"])
def test_output_and_gradients(build, formula, name, layout, float64_bounds, same_gradients):
    layer = build(name)
    x = torch.randn(1 if layout else 2, 39, 24, dtype=torch.float64, requires_grad=True)
    y, truth = layer(x, layout=layout), formula(layer, x, layout)
    float64_bounds.output("y", y, truth)
    same_gradients(layer, x, y, truth)


def test_state_dict_names_are_stable():
    assert sorted(KimiDeltaAttention(16, 1, head_dim=16).state_dict()) == [
        "beta.weight",
        "conv.weight",
        "decay_down.weight",
        "decay_parameters.A_log",
        "decay_parameters.dt_bias",
        "decay_up.weight",
        "gate_down.weight",
        "gate_up.bias",
        "gate_up.weight",
        "norm.weight",
        "out.weight",
        "qkv.weight",
    ]


@pytest.mark.parametrize("lower_bound", [0.0, 1.0, float("nan"), float("-inf")])
def test_a_bound_must_be_below_zero(lower_bound):
    with pytest.raises(ValueError, match=r"^KimiDeltaAttention: lower_bound must be"):
        KimiDeltaAttention(16, 1, head_dim=16, lower_bound=lower_bound)


@pytest.mark.parametrize(("family", "bound"), [("kimi_linear", None), ("glm5_next", -5.0)])
def test_from_hf_is_the_same_layer(family, bound, float64_bounds, transformers):
    if family == "kimi_linear":
        from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig as Config
        from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention as Theirs
    else:
        from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig as Config
        from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextLinearAttention as Theirs

    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "linear_num_heads": 2, "linear_head_dim": 16}
    theirs = Theirs(Config(**sizes, rms_norm_eps=1e-5), 0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    ours = KimiDeltaAttention.from_hf(theirs, backend="eager")
    assert ours.backend == ours.conv.backend == ours.norm.backend == "eager"
    assert ours.norm.eps == 1e-5 and ours.lower_bound == bound
    x = torch.randn(2, 21, 24)
    # The stock layer always computes in float32: the tolerance allows for 21 tokens of rounding.
    float64_bounds.within("y", ours(x).double(), theirs(x).double(), 2e-6)


def test_from_hf_refuses_other_layers():
    with pytest.raises(ValueError, match=r"^KimiDeltaAttention.from_hf: layer must have Kimi's gates, got Linear$"):
        KimiDeltaAttention.from_hf(torch.nn.Linear(3, 3))
