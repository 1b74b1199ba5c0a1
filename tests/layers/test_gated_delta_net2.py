"""The layer of Gated DeltaNet-2 against its formula."""

import pytest
import torch
from torch.nn.functional import softplus

from wyfold import SequenceLayout, UnsupportedError, reference
from wyfold.layers import GatedDeltaNet2
from wyfold.models import Decoder, DecoderConfig


def formula(layer, x, layout=None):
    qkv, _ = reference.causal_conv1d(x @ layer.qkv.weight.T, layer.conv.weight, activation="silu", cu_seqlens=layout)
    q, k, v = qkv.split(layer.channels, -1)
    q, k = (part.unflatten(-1, (layer.num_heads, -1)) for part in (q, k))
    raw = x @ layer.decay_down.weight.T @ layer.decay_up.weight.T
    raw, v, erase, write = (
        part.unflatten(-1, (layer.num_v_heads, -1))
        for part in (raw, v, x @ layer.erase.weight.T, x @ layer.write.weight.T)
    )
    decay = layer.decay_parameters
    g = -decay.A_log.exp()[:, None] * softplus(raw + decay.dt_bias)
    b = torch.sigmoid(erase) * (2 if layer.allow_neg_eigval else 1)
    o, _ = reference.gdn2(reference.l2norm(q), reference.l2norm(k), v, g, b, torch.sigmoid(write), cu_seqlens=layout)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + layer.norm.eps) * layer.norm.weight
    gate = x @ layer.gate_down.weight.T @ layer.gate_up.weight.T + layer.gate_up.bias
    return (o.flatten(2) * torch.sigmoid(gate)) @ layer.out.weight.T


@pytest.mark.parametrize("layout", [None, SequenceLayout.from_lengths([17, 0, 20], tokens=37)], ids=["dense", "packed"])
def test_output_and_gradients(build, layout, float64_bounds, same_gradients):
    layer = build("gated_delta_net2")
    x = torch.randn(1 if layout else 2, 37, 24, dtype=torch.float64, requires_grad=True)
    y, truth = layer(x, layout=layout), formula(layer, x, layout)
    float64_bounds.output("y", y, truth)
    same_gradients(layer, x, y, truth)


def test_negative_eigenvalues_double_the_erase_gate(float64_bounds):
    layer = GatedDeltaNet2(24, 2, head_dim=16, allow_neg_eigval=True).double()
    x = torch.randn(2, 20, 24, dtype=torch.float64)
    float64_bounds.output("y", layer(x), formula(layer, x))


def test_state_dict_names_are_stable():
    assert sorted(GatedDeltaNet2(16, 1, head_dim=16).state_dict()) == [
        "conv.weight",
        "decay_down.weight",
        "decay_parameters.A_log",
        "decay_parameters.dt_bias",
        "decay_up.weight",
        "erase.weight",
        "gate_down.weight",
        "gate_up.bias",
        "gate_up.weight",
        "norm.weight",
        "out.weight",
        "qkv.weight",
        "write.weight",
    ]


def test_generation_continues_a_prompt():
    """Greedy tokens from a cache are those of whole calls."""
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(hidden_size=32, num_layers=2, pattern="gdn2", num_heads=2, head_dim=16)).eval()
    ids = torch.randint(256, (2, 7))
    generated = model.generate(ids, max_new_tokens=5, temperature=0.0)
    for _ in range(5):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids)[0][:, -1:].argmax(-1)], 1)
    assert torch.equal(generated[:, -5:], ids[:, -5:])


def test_a_layer_on_a_gpu_says_that_it_needs_the_eager_backend(planned_as_cuda):
    layer = GatedDeltaNet2(16, 1, head_dim=16)
    with pytest.raises(UnsupportedError, match="no backend serves tensors on cuda"):
        layer(torch.randn(1, 3, 16))
