"""TTT-Linear against its formula, and the mini-batch that a call leaves open."""

import pytest
import torch
from torch.nn.functional import silu

from wyfold import SequenceLayout, reference
from wyfold.layers import TTTLinear


@pytest.fixture
def formula(projected):
    def formula(layer, x, layout=None):
        N = x.shape[0] if layout is None else layout.max_seqs
        q, k, v = projected(layer, x, layout)
        eta = torch.sigmoid(x @ layer.step.weight.T + layer.step.bias) / 16
        o, _, _ = reference.ttt_linear(
            q,
            k,
            v,
            layer.w,
            layer.b,
            eta,
            scale=16**-0.5,
            eps=layer.eps,
            chunk_size=layer.mini_batch,
            initial_state=layer.start.expand(N, 4, 16, 16),
            initial_state_bias=layer.start_bias.expand(N, 4, 1, 16),
            output_final_state=False,
            cu_seqlens=layout,
        )
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + layer.norm.eps) * layer.norm.weight
        return (o.flatten(2) * silu(x @ layer.gate.weight.T)) @ layer.out.weight.T

    return formula


@pytest.mark.parametrize("layout", [None, SequenceLayout.from_lengths([17, 0, 20], tokens=39)], ids=["dense", "packed"])
def test_output_and_gradients(build, formula, layout, float64_bounds, same_gradients):
    layer = build("ttt_linear")
    x = torch.randn(1 if layout else 2, 39, 24, dtype=torch.float64, requires_grad=True)
    y, truth = layer(x, layout=layout), formula(layer, x, layout)
    float64_bounds.output("y", y, truth)
    same_gradients(layer, x, y, truth)


@pytest.mark.parametrize("first", [1, 15, 16, 17, 33])
def test_an_open_mini_batch_goes_on(build, first, float64_bounds):
    """The chunk form alone would close it and start another, which is a different model."""
    layer = build("ttt_linear")
    x = torch.randn(2, 70, 24, dtype=torch.float64)
    cache = {}
    y = torch.cat([layer(x[:, :first], cache=cache), layer(x[:, first:], cache=cache)], dim=1)
    float64_bounds.output("y", y, layer(x))


def test_the_mini_batch_is_part_of_the_model(build):
    layer = build("ttt_linear")
    x = torch.randn(1, 40, 24, dtype=torch.float64)
    sixteen = layer(x)
    layer.mini_batch = 32
    assert torch.equal(layer(x)[:, :16], sixteen[:, :16])
    assert not torch.equal(layer(x)[:, 16:32], sixteen[:, 16:32])


def test_state_dict_names_are_stable():
    assert sorted(TTTLinear(16, 1, head_dim=16).state_dict()) == [
        "b",
        "conv.weight",
        "gate.weight",
        "norm.weight",
        "out.weight",
        "qkv.weight",
        "start",
        "start_bias",
        "step.bias",
        "step.weight",
        "w",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head_dim": 136}, "head_dim must have width K a multiple of 8 from 8 to 128, got 136"),
        ({"head_v_dim": 8}, "head_v_dim must be None or head_dim = 16, got 8"),
        ({"mini_batch": 8}, "mini_batch must be one of 16, 32, 64, got 8"),
        ({"base_step": float("inf")}, "base_step must be finite, got inf"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(ValueError, match=f"^TTTLinear: {message}$"):
        TTTLinear(**{"hidden_size": 32, "num_heads": 2, "head_dim": 16} | arguments)
