"""fla's RWKV7Attention: its parameters, padding, caches and packing, over `wyfold.layers.RWKV7TimeMix`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.integrations import fla_cases as cases
from torch import Tensor

from wyfold.integrations.fla import RWKV7Attention, StandIn, install
from wyfold.layers import RWKV7TimeMix

SIZES = {"hidden_size": 32, "head_dim": 16, "num_hidden_layers": 2}


class ListCache(list):
    """fla's interface of a cache."""

    def update(self, layer_idx: int, offset: int, **states: Any) -> dict[str, Any]:
        self[layer_idx : layer_idx + 1] = [states]
        return states


def layers(**options: Any) -> list[RWKV7Attention]:
    """The first two layers of a model, filled with numbers, in float64."""
    found = [RWKV7Attention(**SIZES, layer_idx=number, **options).double().eval() for number in range(2)]
    for layer in found:
        cases.fill(layer)
    return found


def run(pair: list[RWKV7Attention], x: Tensor, cache: Any = None, **where: Any) -> Tensor:
    value = None
    for layer in pair:
        y, none, returned, value = layer(x, past_key_values=cache, use_cache=cache is not None, v_first=value, **where)
        assert none is None and returned is cache
        x = x + y
    return x


def test_the_layer_is_wyfolds(float64_bounds):
    for number, layer in enumerate(layers()):
        ours = RWKV7TimeMix(32, 2, 16, layer_idx=number, num_layers=2).double()
        ours.load_state_dict(layer.state_dict())
        x, value = torch.randn(2, 9, 32).double(), torch.randn(2, 9, 32).double() if number else None
        y, _, _, returned = layer(x, v_first=value)
        truth, first = ours(x, first_value=value, return_value=True)
        assert torch.equal(y, truth) and torch.equal(returned, first)


def test_padding_is_skipped_and_packing_is_separate(float64_bounds):
    """On any side; with gradients, from which padding gets none."""
    pair, x = layers(fuse_norm=True), torch.randn(2, 12, 32).double().requires_grad_()
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :3], mask[1, 8:] = 0, 0
    y = run(pair, x, attention_mask=mask)
    alone = [run(pair, x[:1, 3:]), run(pair, x[1:, :8])]
    float64_bounds.output("left", y[:1, 3:], alone[0])
    float64_bounds.output("right", y[1:, :8], alone[1])
    padding = (y - x)[mask == 0]
    assert not padding.any()
    (dx,) = torch.autograd.grad((y - x).square().sum(), x)
    assert not dx[mask == 0].any() and dx[mask == 1].any(-1).all()
    packed = run(pair, torch.cat([x[:1, 3:], x[1:, :8]], 1), cu_seqlens=torch.tensor([0, 9, 17]))
    float64_bounds.output("packed", packed, torch.cat(alone, 1))


def test_cached_decoding_of_a_padded_batch(float64_bounds):
    pair, x, cache = layers(), torch.randn(2, 13, 32).double(), ListCache()
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[1, :4] = 0
    with torch.no_grad():
        rows = [run(pair, x[:, :9], cache, attention_mask=mask[:, :9])]
        rows += [run(pair, x[:, t : t + 1], cache, attention_mask=mask[:, : t + 1]) for t in range(9, 13)]
        truth = run(pair, x, attention_mask=mask)
    assert cache[0]["conv_state"].shape == (2, 32) and cache[1]["recurrent_state"].shape == (2, 2, 16, 16)
    float64_bounds.output("y", torch.cat(rows, 1), truth)


def test_the_stand_in_has_the_layer():
    with install():
        from fla.layers import RWKV7Attention as exported
        from fla.layers.rwkv7 import RWKV7Attention as defined
    assert exported is defined is RWKV7Attention and StandIn is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_idx": None}, "layer_idx must be given, because layer 0 has no value residual, got None"),
        ({"elementwise_affine": False}, "elementwise_affine must be True, got False"),
        ({"mode": "parallel"}, "mode must be one of 'chunk', 'fused_recurrent', got 'parallel'"),
        ({"head_dim": None}, "head_dim or num_heads must be given, got None for both"),
        ({"head_dim": 24}, "hidden_size / head_dim must be a whole number, got 1.33"),
        ({"value_dim": 33}, "value_dim / num_heads must be a whole number, got 16.5"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ValueError, match=f"^RWKV7Attention: {message}"):
        RWKV7Attention(**SIZES | {"layer_idx": 1} | change)


def test_heads_by_their_number():
    layer = RWKV7Attention(hidden_size=32, head_dim=None, num_heads=4, value_dim=64, layer_idx=0)
    assert (layer.num_heads, layer.head_dim, layer.head_v_dim) == (4, 8, 16)


def test_a_call_that_does_not_fit_is_refused():
    first, second = layers()
    x = torch.zeros(1, 3, 32).double()
    with pytest.raises(ValueError, match="first_value must be the values of the first layer, got None in layer 1"):
        second(x)
    with pytest.raises(ValueError, match=r"attention_mask must be \[B, S\], .* got \[1, 3, 3\]"):
        first(x, attention_mask=torch.ones(1, 3, 3))
    with pytest.raises(ValueError, match=r"^RWKV7Attention: hidden_states must be \[B, T, D\]"):
        first(x[..., :8])
