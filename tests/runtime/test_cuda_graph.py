"""CUDA graph of a repeated step: every call takes effect once."""

import pytest
import torch

from wyfold.runtime.cuda_graph import Replay


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_every_call_takes_effect_once():
    total = torch.zeros(3, device="cuda")

    def step(x: torch.Tensor) -> torch.Tensor:
        total.add_(x)
        return total * 2

    replay, expected = Replay(step), torch.zeros(3)
    for t in range(5):
        x = torch.arange(3.0) + t
        expected += x
        assert torch.equal(replay(x.cuda()).cpu(), expected * 2)
    assert torch.equal(total.cpu(), expected)
