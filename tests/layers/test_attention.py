"""Softmax attention: every path against a plain softmax, and its cache."""

import pytest
import torch

from wyfold import SequenceLayout
from wyfold.layers import LayerCache, SoftmaxAttention
from wyfold.runtime import check


def formula(layer, x, lengths=None):
    """Attention of every query to every key, by a loop over sequences and heads."""
    B, T, _ = x.shape
    H, HKV, D = layer.num_heads, layer.num_kv_heads, layer.head_dim
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths or [T])])
    position = torch.cat([torch.arange(n) for n in lengths or [T]])
    q, k, v = (x @ layer.qkv.weight.T).unflatten(-1, (-1, D)).split([H, HKV, HKV], dim=2)
    q, k = (rotated(part, position, layer.rope_base) for part in (q, k))
    distance = position[:, None] - position
    seen = (ids[:, None] == ids) & (distance >= 0)
    if layer.window is not None:
        seen &= distance < layer.window
    o = torch.empty(B, T, H, D, dtype=x.dtype)
    for h in range(H):
        kv = h // (H // HKV)
        score = torch.where(seen, q[:, :, h] @ k[:, :, kv].mT * D**-0.5, -torch.inf)
        o[:, :, h] = score.softmax(-1) @ v[:, :, kv]
    return o.flatten(2) @ layer.out.weight.T


def rotated(x, position, base):
    """Rotate pairs (x[d], x[d + D/2]): complex numbers times e^(i position base^(-2d/D))."""
    D = x.shape[-1]
    pair = torch.complex(x[..., : D // 2], x[..., D // 2 :])
    angle = position[:, None, None] * base ** (-torch.arange(0, D, 2, dtype=x.dtype) / D)
    pair = pair * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pair.real, pair.imag], dim=-1)


@pytest.mark.parametrize("window", [None, 1, 5, 13, 26, 38, 39, 100])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_output_and_gradients(window, kv_heads, float64_bounds, same_gradients):
    layer = SoftmaxAttention(24, 4, kv_heads, 8, window=window).double()
    x = torch.randn(2, 39, 24, dtype=torch.float64, requires_grad=True)
    y, truth = layer(x), formula(layer, x)
    float64_bounds.output("y", y, truth)
    if window != 1:  # a single key has weight 1 for any query, so the true gradient is zero up to rounding
        same_gradients(layer, x, y, truth)


@pytest.mark.parametrize("readable", [True, False], ids=["boundaries read", "boundaries not read"])
@pytest.mark.parametrize("window", [None, 5])
def test_packed(window, readable, monkeypatch, float64_bounds, same_gradients):
    """Both paths: a loop over sequences, and one mask without reading boundaries, as on a GPU and in compiled code."""
    layer = SoftmaxAttention(24, 4, 2, 8, window=window).double()
    x = torch.randn(1, 39, 24, dtype=torch.float64, requires_grad=True)
    layout = SequenceLayout.from_lengths([17, 0, 20, 2])
    if not readable:
        monkeypatch.setattr(check, "readable", lambda x: False)
    y, truth = layer(x, layout=layout), formula(layer, x, [17, 0, 20, 2])
    float64_bounds.output("y", y, truth)
    same_gradients(layer, x, y, truth)


def test_a_mask_excludes_rows_past_the_last_boundary(monkeypatch):
    layer = SoftmaxAttention(24, 4, 2, 8)
    layout = SequenceLayout.from_lengths([17, 20], tokens=39)
    monkeypatch.setattr(check, "readable", lambda x: False)
    x = torch.randn(1, 39, 24)
    y = layer(x, layout=layout)
    x[:, 37:] = torch.inf
    with torch.no_grad():
        spoiled = layer(x, layout=layout)
    assert torch.equal(spoiled[:, :37], y[:, :37])
    assert not y[:, 37:].any() and not spoiled[:, 37:].any()


@pytest.mark.parametrize("first", [1, 3, 5, 8, 40])
def test_a_window_bounds_the_cache(first):
    layer = SoftmaxAttention(24, 4, 2, 8, window=5)
    x = torch.randn(3, 60, 24)
    cache = LayerCache()
    with torch.inference_mode():
        layer(x[:, :first], cache=cache)
        for t in range(first, 60):
            layer(x[:, t : t + 1], cache=cache)
            kept = min(5, t + 1)
            assert cache["keys"].shape == cache["values"].shape == (3, kept, 2, 8)
            assert cache["positions"].tolist() == [list(range(t + 1 - kept, t + 1))] * 3
            # No view keeps a larger tensor alive.
            assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in cache.values())


def test_rotary_positions_are_relative(float64_bounds):
    """A shifted sequence gives the same result, if nothing before it is visible."""
    layer = SoftmaxAttention(24, 4, 2, 8, window=6).double()
    x = torch.randn(1, 30, 24, dtype=torch.float64)
    cache = LayerCache()
    layer(torch.zeros(1, 500, 24, dtype=torch.float64), cache=cache)
    float64_bounds.within("y", layer(x, cache=cache)[:, 6:], layer(x)[:, 6:], 1e-11)  # angles of 500 radians


def test_the_base_sets_the_wavelengths():
    x = torch.randn(1, 30, 24)
    fast, slow = SoftmaxAttention(24, 2, head_dim=8, rope_base=10.0), SoftmaxAttention(24, 2, head_dim=8)
    slow.load_state_dict(fast.state_dict())
    assert not torch.equal(fast(x), slow(x))


def test_state_dict_names_are_stable():
    assert sorted(SoftmaxAttention(16, 1, head_dim=16).state_dict()) == ["out.weight", "qkv.weight"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads = 4, got 3"),
        ({"head_dim": 7}, "head_dim must be even, since channels rotate in pairs, got 7"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"rope_base": "10000"}, "rope_base must be a number, got str"),
        ({"rope_base": 0}, "rope_base must be > 0, got 0"),
        ({"rope_base": -1e4}, "rope_base must be > 0, got -10000.0"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    with pytest.raises((ValueError, TypeError), match=f"^SoftmaxAttention: {message}$"):
        SoftmaxAttention(**{"hidden_size": 32, "num_heads": 4} | arguments)
