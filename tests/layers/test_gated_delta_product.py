"""Gated DeltaProduct against its formula."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import silu, softplus

from wyfold import SequenceLayout, reference
from wyfold.cp import build_cp_context
from wyfold.layers import GatedDeltaProduct
from wyfold.models import Decoder, DecoderConfig


def formula(layer, x, layout=None):
    n, K, V = layer.updates, layer.head_dim, layer.head_v_dim
    qkv, _ = reference.causal_conv1d(x @ layer.qkv.weight.T, layer.conv.weight, activation="silu", cu_seqlens=layout)
    q, k, v = qkv.split([layer.key_size, n * layer.key_size, n * layer.value_size], -1)
    q = q.unflatten(-1, (-1, K))
    k, v = (rows.unflatten(-1, (n, -1, width)).flatten(1, 2) for rows, width in ((k, K), (v, V)))
    beta = 2 * torch.sigmoid(x @ layer.beta.weight.T).unflatten(-1, (n, -1)).flatten(1, 2)
    g = None
    if layer.forget is not None:
        decay = layer.decay_parameters
        g = -decay.A_log.exp() * softplus(x @ layer.forget.weight.T + decay.dt_bias)
    o, _ = reference.gated_delta_product(reference.l2norm(q), reference.l2norm(k), v, g, beta, n, cu_seqlens=layout)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + layer.norm.eps) * layer.norm.weight
    return (o.flatten(2) * silu(x @ layer.gate.weight.T)) @ layer.out.weight.T


@pytest.mark.parametrize("layout", [None, SequenceLayout.from_lengths([17, 0, 20], tokens=39)], ids=["dense", "packed"])
def test_output_and_gradients(build, layout, float64_bounds, same_gradients):
    layer = build("gated_delta_product")
    x = torch.randn(1 if layout else 2, 39, 24, dtype=torch.float64, requires_grad=True)
    y, truth = layer(x, layout=layout), formula(layer, x, layout)
    float64_bounds.output("y", y, truth)
    same_gradients(layer, x, y, truth)


def test_without_a_forget_gate_and_with_three_updates(float64_bounds):
    layer = GatedDeltaProduct(24, 2, head_dim=16, num_householder=3, forget_gate=False).double()
    x = torch.randn(2, 20, 24, dtype=torch.float64)
    float64_bounds.output("y", layer(x), formula(layer, x))
    assert not any("decay" in name or "forget" in name for name in layer.state_dict())


def test_state_dict_names_are_stable():
    assert sorted(GatedDeltaProduct(16, 1, head_dim=16).state_dict()) == [
        "beta.weight",
        "conv.weight",
        "decay_parameters.A_log",
        "decay_parameters.dt_bias",
        "forget.weight",
        "gate.weight",
        "norm.weight",
        "out.weight",
        "qkv.weight",
    ]


def test_serving_from_pools_is_one_call(build, float64_bounds):
    """Packed prompts, one of them empty, then single tokens."""
    torch.manual_seed(0)
    config = DecoderConfig(hidden_size=32, num_layers=2, pattern="gdp gdn", num_heads=2, head_dim=16)
    model = Decoder(config).double().eval()
    ids = torch.randint(256, (2, 12))
    with torch.no_grad():
        whole = model(ids)[0]
        pools = model.new_pools(4)
        at = pools.at(torch.tensor([3, 1]))
        layout = SequenceLayout.from_lengths([9, 9])
        prompts = model(ids[:, :9].reshape(1, -1), layout=layout, cache=at)[0].view(2, 9, -1)
        steps = [model(ids[:, t : t + 1], cache=pools.at(torch.tensor([3, 1])))[0] for t in range(9, 12)]
    float64_bounds.output("logits", torch.cat([prompts, *steps], 1), whole)


def test_a_context_of_one_rank_changes_no_bit():
    layer, x = GatedDeltaProduct(16, 1, head_dim=16), torch.randn(1, 3, 16)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        context = build_cp_context(torch.tensor([0, 3]), dist.group.WORLD)
        assert torch.equal(layer(x, cp_context=context), layer(x))
    finally:
        dist.destroy_process_group()
