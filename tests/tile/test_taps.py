"""A filter over tokens: value, adjoint, and bits that depend only on a token's window."""

import pytest
import torch
import torch.nn.functional as F

from wyfold.tile.taps.eager import tap_products, taps


@pytest.mark.parametrize("W", range(2, 9))
def test_value_and_adjoints(W: int, float64_bounds):
    x = torch.randn(3, 20 + W - 1, 5, dtype=torch.float64, requires_grad=True)
    w = torch.randn(W, 5, dtype=torch.float64, requires_grad=True)
    truth = F.conv1d(x.mT, w.t()[:, None], groups=5).mT
    float64_bounds.output("y", taps(x.detach(), w.detach()), truth.detach())
    dy = torch.randn_like(truth)
    dx, dw = torch.autograd.grad(truth, (x, w), dy)
    padded = F.pad(dy, (0, 0, W - 1, W - 1))
    float64_bounds.gradient("dx", taps(padded, w.detach().flip(0)), dx)
    products = torch.stack([terms.sum((0, 1)) for terms in tap_products(x.detach(), dy)])
    float64_bounds.gradient("dw", products, dw)


def test_a_token_depends_on_its_window_alone(threads: int):
    x, w = torch.randn(2000, 37), torch.randn(4, 37)
    y = taps(x, w)
    for start in (0, 1, 63, 1500):
        for n in (1, 2, 17, 300):
            assert torch.equal(taps(x[start : start + n + 3].clone(), w), y[start : start + n])
