"""A small decoder with every mixer once."""

import pytest
import torch

from wyfold.models import Decoder, DecoderConfig

SMALL = {
    "hidden_size": 24,
    "num_layers": 5,
    "pattern": "gdn kda ttt_linear delta_net attention",
    "num_heads": 2,
    "head_dim": 8,
    "options": {"attention": {"window": 6}, "kda": {"lower_bound": -5.0}},
}


@pytest.fixture
def config() -> DecoderConfig:
    return DecoderConfig(**SMALL)


@pytest.fixture
def model(config) -> Decoder:
    """A float64 model with every mixer once, and matrices large enough for distinct logits."""
    model = Decoder(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(256, (2, 37))
