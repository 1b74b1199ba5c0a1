"""The layer of gated linear attention against its formula."""

import pytest
import torch
from torch.nn.functional import logsigmoid, silu

from wyfold import SequenceLayout, reference
from wyfold.layers import GatedLinearAttention
from wyfold.models import Decoder, DecoderConfig


def formula(layer, x, layout=None):
    qkv = x @ layer.qkv.weight.T
    if layer.conv is not None:
        qkv, _ = reference.causal_conv1d(qkv, layer.conv.weight, activation="silu", cu_seqlens=layout)
    q, k, v = qkv.split(layer.channels, -1)
    q, k = (part.unflatten(-1, (layer.num_heads, -1)) for part in (q, k))
    raw = x @ layer.decay_down.weight.T @ layer.decay_up.weight.T + layer.decay_up.bias
    g = logsigmoid(raw).unflatten(-1, (layer.num_v_heads, -1)) / layer.decay_normalizer
    o, _ = reference.gla(q, k, v.unflatten(-1, (layer.num_v_heads, -1)), g, cu_seqlens=layout)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + layer.norm.eps) * layer.norm.weight
    return (o.flatten(2) * silu(x @ layer.gate.weight.T)) @ layer.out.weight.T


@pytest.mark.parametrize("name", ["gla", "gla_conv"])
@pytest.mark.parametrize("layout", [None, SequenceLayout.from_lengths([17, 0, 20], tokens=39)], ids=["dense", "packed"])
def test_output_and_gradients(build, layout, name, float64_bounds, same_gradients):
    layer = build(name)
    x = torch.randn(1 if layout else 2, 39, 24, dtype=torch.float64, requires_grad=True)
    y, truth = layer(x, layout=layout), formula(layer, x, layout)
    float64_bounds.output("y", y, truth)
    same_gradients(layer, x, y, truth)


def test_values_wider_than_a_head_of_the_kernels(float64_bounds):
    layer = GatedLinearAttention(24, 1, head_dim=8, head_v_dim=264).double()
    x = torch.randn(1, 10, 24, dtype=torch.float64)
    float64_bounds.output("y", layer(x), formula(layer, x))


def test_the_decays_of_a_16_bit_layer_are_float32():
    layer = GatedLinearAttention(24, 1, head_dim=8).bfloat16()
    assert layer._log_decays(torch.randn(1, 3, 24, dtype=torch.bfloat16)).dtype == torch.float32


def test_state_dict_names_are_stable():
    assert sorted(GatedLinearAttention(16, 1, head_dim=16).state_dict()) == [
        "decay_down.weight",
        "decay_up.bias",
        "decay_up.weight",
        "gate.weight",
        "norm.weight",
        "out.weight",
        "qkv.weight",
    ]


def test_generation_continues_a_prompt():
    """Greedy tokens from a cache are those of whole calls."""
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(hidden_size=32, num_layers=2, pattern="gla", num_heads=2, head_dim=16)).eval()
    ids = torch.randint(256, (2, 7))
    generated = model.generate(ids, max_new_tokens=5, temperature=0.0)
    for _ in range(5):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids)[0][:, -1:].argmax(-1)], 1)
    assert torch.equal(generated[:, -5:], ids[:, -5:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decay_normalizer": 0.0}, "decay_normalizer must be above 0, got 0.0"),
        ({"head_v_dim": 520}, "head_v_dim must have width V from 1 to 512, got 520"),
        ({"decay_rank": 0}, "decay_rank must be at least 1, got 0"),
        ({"short_conv": 1}, "short_conv must be one of 2, 3, 4, 5, 6, 7, 8, got 1"),
    ],
)
def test_refusals(change: dict, message: str):
    with pytest.raises(ValueError, match=f"^GatedLinearAttention: {message}"):
        GatedLinearAttention(16, 1, head_dim=16, **change)
