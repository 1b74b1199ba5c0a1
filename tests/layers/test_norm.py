"""The gated norm as a module."""

import pytest
import torch
from torch.nn.functional import silu

from wyfold.layers import GatedRMSNorm


@pytest.mark.parametrize(("activation", "act"), [("swish", silu), ("silu", silu), ("sigmoid", torch.sigmoid)])
def test_output(activation, act, float64_bounds):
    layer = GatedRMSNorm(16, eps=1e-3, activation=activation).double()
    torch.nn.init.normal_(layer.weight)
    x, g = torch.randn(2, 2, 5, 3, 16, dtype=torch.float64)
    truth = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3) * layer.weight * act(g)
    float64_bounds.output("y", layer(x, g), truth)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 0}, "width must be at least 1, got 0"),
        ({"eps": float("nan")}, "eps must be finite, got nan"),
        ({"activation": None}, "activation must be one of 'swish', 'silu', 'sigmoid', got None"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    with pytest.raises(ValueError, match=f"^GatedRMSNorm: {message}$"):
        GatedRMSNorm(**{"width": 16} | arguments)
