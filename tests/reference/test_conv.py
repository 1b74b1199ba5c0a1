"""The token loop of the short convolution: PyTorch's convolution, states and packing."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from wyfold.reference import causal_conv1d
from wyfold.reference.error import judge, require
from wyfold.reference.shapes import PACKINGS
from wyfold.reference.targets import target

B, T, D = 2, 9, 3


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("W", [2, 4, 8])
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_it_is_a_depthwise_convolution_padded_on_the_left(W, activation):
    x, weight, bias, residual = normal(B, T, D), normal(D, W), normal(D), normal(B, T, D)
    y, _ = causal_conv1d(x, weight, bias, residual=residual, activation=activation)
    truth = F.conv1d(x.mT, weight[:, None], bias, padding=W - 1, groups=D)[..., :T].mT
    truth = (truth if activation is None else F.silu(truth)) + residual
    require(judge(y, truth, name="y", target=target("o", torch.float64)))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_gradients_are_the_slopes(packed):
    bounds = torch.tensor([0, 0, 2, 8]) if packed else None
    rows, N = (1, 3) if packed else (B, B)
    tensors = [normal(rows, T, D), normal(D, 3), normal(D), normal(rows, T, D), normal(N, D, 4)]

    def call(x, weight, bias, residual, state):
        return causal_conv1d(
            x, weight, bias, residual=residual, initial_state=state, output_final_state=True, activation="silu",
            cu_seqlens=bounds,
        )  # fmt: skip

    assert gradcheck(call, [x.requires_grad_() for x in tensors])


@pytest.mark.parametrize("S", [None, 3, 5])
@pytest.mark.parametrize("at", [0, 1, 2, 5, 9])
def test_resuming_from_a_state_changes_no_bit(S, at):
    x, weight = normal(B, T, D), normal(D, 4)
    state = None if S is None else normal(B, D, S)
    whole, end = causal_conv1d(x, weight, initial_state=state, output_final_state=True)
    head, carried = causal_conv1d(x[:, :at], weight, initial_state=state, output_final_state=True)
    tail, resumed = causal_conv1d(x[:, at:], weight, initial_state=carried, output_final_state=True)
    assert torch.equal(whole, torch.cat([head, tail], dim=1)) and torch.equal(end, resumed)


def test_the_state_is_the_latest_inputs_oldest_first():
    x = normal(1, 2, D)
    before = normal(1, D, 5)
    _, state = causal_conv1d(x, normal(D, 4), initial_state=before, output_final_state=True)
    assert torch.equal(state, torch.cat([before[:, :, 2:], x.mT], dim=2))
    _, state = causal_conv1d(x, normal(D, 4), output_final_state=True)
    assert torch.equal(state, torch.cat([torch.zeros(1, D, 1, dtype=torch.float64), x.mT], dim=2))


@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_sequences_are_separate_and_other_rows_unread(packing):
    bounds, tokens = PACKINGS[packing].cu_seqlens, PACKINGS[packing].tokens
    x, weight, states = torch.randn(1, tokens, D), torch.randn(D, 4), torch.randn(len(bounds) - 1, D, 3)
    x[:, bounds[-1] :] = float("nan")
    x.requires_grad_()
    y, final = causal_conv1d(x, weight, initial_state=states, output_final_state=True, cu_seqlens=torch.tensor(bounds))
    assert not y[:, bounds[-1] :].any()
    for n, (start, end) in enumerate(pairwise(bounds)):
        own = states[n : n + 1]
        y_n, final_n = causal_conv1d(x[:, start:end], weight, initial_state=own, output_final_state=True)
        assert torch.equal(y[:, start:end], y_n) and torch.equal(final[n : n + 1], final_n)
    if bounds[-1]:
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert dx.isfinite().all() and not dx[:, bounds[-1] :].any()
