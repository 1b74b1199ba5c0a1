"""DeltaNet against its formula, evaluated by the reference with the layer's parameters."""

import pytest
import torch
from torch import nn

from wyfold import SequenceLayout, reference
from wyfold.layers import DeltaNet, LayerCache


@pytest.fixture
def formula(projected):
    def formula(layer, x, layout=None):
        q, k, v = projected(layer, x, layout)
        beta = 2 * torch.sigmoid(x @ layer.beta.weight.T)
        o, _ = reference.delta_rule(reference.l2norm(q), reference.l2norm(k), v, beta, cu_seqlens=layout)
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + layer.norm.eps) * layer.norm.weight
        return o.flatten(2) @ layer.out.weight.T

    return formula


@pytest.mark.parametrize("layout", [None, SequenceLayout.from_lengths([17, 0, 20], tokens=39)], ids=["dense", "packed"])
def test_output_and_gradients(build, formula, layout, float64_bounds, same_gradients):
    layer = build("delta_net")
    x = torch.randn(1 if layout else 2, 39, 24, dtype=torch.float64, requires_grad=True)
    y, truth = layer(x, layout=layout), formula(layer, x, layout)
    float64_bounds.output("y", y, truth)
    same_gradients(layer, x, y, truth)


def test_state_dict_names_are_stable():
    assert sorted(DeltaNet(16, 1, head_dim=16).state_dict()) == [
        "beta.weight",
        "conv.weight",
        "norm.weight",
        "out.weight",
        "qkv.weight",
    ]


def test_value_heads_default_to_key_heads():
    layer = DeltaNet(16, num_heads=3, head_dim=8)
    assert (layer.num_v_heads, layer.head_v_dim) == (3, 8)


def test_any_width_has_the_formula_and_a_cache_but_no_pool(formula, float64_bounds):
    layer = DeltaNet(24, 2, head_dim=12, head_v_dim=260, allow_neg_eigval=True).double()
    x = torch.randn(2, 20, 24, dtype=torch.float64)
    truth = formula(layer, x)
    float64_bounds.output("y", layer(x), truth)
    cache = LayerCache()
    with torch.no_grad():
        pieces = [layer(piece, cache=cache) for piece in x.split([13, *[1] * 7], dim=1)]
    float64_bounds.output("y", torch.cat(pieces, 1), truth)
    assert not layer.has_pool
    with pytest.raises(ValueError, match=r"^DeltaNet.new_pool: head_dim must have width K a multiple"):
        layer.new_pool(3)


@pytest.mark.parametrize(("K", "V"), [(8, 256), (8, 512), (256, 264), (8, 260), (12, 8)])
def test_a_layer_has_a_pool_where_one_can_be_made(K: int, V: int, float64_bounds):
    """Layers with V from 264 to 512 had none, so a decoder generated with a cache, without a CUDA graph."""
    layer = DeltaNet(24, 2, head_dim=K, head_v_dim=V).double()
    if not layer.has_pool:
        with pytest.raises(ValueError, match=r"^DeltaNet.new_pool: head_(v_)?dim must have width . a multiple of 8"):
            layer.new_pool(3)
        return
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    with torch.no_grad():
        pool = layer.new_pool(2).at(None)
        pieces = [layer(piece, cache=pool) for piece in x.split([7, 1, 1], dim=1)]
        float64_bounds.output("y", torch.cat(pieces, 1), layer(x))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"num_v_heads": 3}, "num_v_heads must be a multiple of num_heads = 2, got 3"),
        ({"head_dim": 257}, "head_dim must have width K from 1 to 256, got 257"),
        ({"head_v_dim": 520}, "head_v_dim must have width V from 1 to 512, got 520"),
        ({"conv_size": 9}, "conv_size must be one of 2, 3, 4, 5, 6, 7, 8, got 9"),
        ({"allow_neg_eigval": 1}, "allow_neg_eigval must be True or False, got 1"),
        ({"norm_eps": float("nan")}, "norm_eps must be finite, got nan"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    with pytest.raises((ValueError, TypeError), match=f": {message}$"):
        DeltaNet(**{"hidden_size": 32, "num_heads": 2, "head_dim": 16} | arguments)


def test_negative_eigenvalues_change_beta_alone(build):
    layer = build("delta_net")
    x = torch.randn(1, 5, 24, dtype=torch.float64)
    with torch.no_grad():
        twice = layer(x)
        layer.allow_neg_eigval = False
        assert not torch.equal(layer(x), twice)


def test_decay_free_layers_have_no_decay_parameters(build):
    assert not [name for name, _ in build("delta_net").named_parameters() if "A_log" in name or "dt_bias" in name]
    assert isinstance(build("delta_net").norm, nn.RMSNorm)
