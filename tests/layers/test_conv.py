"""The short convolution as a module: its filter against PyTorch's, its cache, its initial weights."""

import pytest
import torch
from torch.nn.functional import conv1d, pad, silu

from wyfold.layers import LayerCache, ShortConvolution


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("conv_size", [2, 4, 8])
def test_output(conv_size, bias, float64_bounds):
    layer = ShortConvolution(6, conv_size, bias=bias).double()
    if bias:
        torch.nn.init.normal_(layer.bias)
    x = torch.randn(2, 13, 6, dtype=torch.float64)
    truth = silu(conv1d(pad(x.mT, (conv_size - 1, 0)), layer.weight[:, None], layer.bias, groups=6)).mT
    float64_bounds.output("y", layer(x), truth)


def test_the_cache_holds_the_latest_inputs(float64_bounds):
    layer = ShortConvolution(6, 4, activation=None).double()
    x = torch.randn(2, 13, 6, dtype=torch.float64)
    cache = LayerCache()
    y = torch.cat([layer(piece, cache=cache) for piece in x.split([1, 1, 5, 6], dim=1)], dim=1)
    float64_bounds.output("y", y, layer(x))
    assert torch.equal(cache["conv"], x[:, -3:].mT)


def test_initial_weights_are_those_of_a_depthwise_convolution():
    weight = ShortConvolution(4096, 4).weight
    assert 0.499 < weight.abs().max() <= 0.5
    assert not ShortConvolution(8, 4, bias=True).bias.any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"channels": 0}, "channels must be at least 1, got 0"),
        ({"conv_size": 1}, "conv_size must be one of 2, 3, 4, 5, 6, 7, 8, got 1"),
        ({"activation": "relu"}, "activation must be one of None, 'silu', 'swish', got 'relu'"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    with pytest.raises(ValueError, match=f"^ShortConvolution: {message}$"):
        ShortConvolution(**{"channels": 8} | arguments)
