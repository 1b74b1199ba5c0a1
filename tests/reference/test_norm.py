"""The norms of the reference: PyTorch's norms, and the points of rounding."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from wyfold.reference import l2norm, rms_norm_gated
from wyfold.reference.error import judge, require
from wyfold.reference.targets import target

O64 = target("o", torch.float64)


def test_l2norm_counts_eps_into_the_squared_length():
    x = torch.randn(5, 7, dtype=torch.float64) * 1e-3
    truth = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    require(judge(l2norm(x), truth, name="y", target=O64))
    assert not l2norm(torch.zeros(2, 8)).any()
    narrow = torch.randn(4, 8).bfloat16()
    assert torch.equal(l2norm(narrow), l2norm(narrow.float()).bfloat16())
    assert torch.equal(l2norm(narrow, output_dtype=torch.float32), l2norm(narrow.float()))


@pytest.mark.parametrize("before", [True, False], ids=["norm first", "gate first"])
@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
def test_rms_norm_gated(activation, before):
    x, g = torch.randn(2, 5, 8, dtype=torch.float64), torch.randn(2, 5, 8, dtype=torch.float64)
    weight, bias = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    gate = torch.sigmoid(g) if activation == "sigmoid" else g * torch.sigmoid(g)
    if before:
        truth = (F.rms_norm(x, (8,), weight, 1e-6) + bias) * gate
    else:
        truth = F.rms_norm(x * gate, (8,), weight, 1e-6) + bias
    y = rms_norm_gated(x, g, weight, bias, activation=activation, norm_before_gate=before)
    require(judge(y, truth, name="y", target=O64))


def test_rounding_before_the_weight_is_one_more_rounding():
    x, g, weight = torch.randn(3, 8).bfloat16(), torch.randn(3, 8).bfloat16(), torch.randn(8)
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    once = (normed * weight * F.silu(g.float())).bfloat16()
    twice = (normed.bfloat16().float() * weight * F.silu(g.float())).bfloat16()
    assert not torch.equal(once, twice)
    assert torch.equal(rms_norm_gated(x, g, weight), once)
    assert torch.equal(rms_norm_gated(x, g, weight, round_before_weight=True), twice)


@pytest.mark.parametrize("before", [True, False], ids=["norm first", "gate first"])
def test_gradients_are_the_slopes(before):
    tensors = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in ((2, 4), (2, 4), (4,), (4,))]
    assert gradcheck(lambda x, g, w, b: rms_norm_gated(x, g, w, b, norm_before_gate=before), tensors)
    assert gradcheck(l2norm, tensors[:1])
