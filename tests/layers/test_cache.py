"""The cache of a model: moving, reordering and forking all layers together."""

import pytest
import torch

from wyfold.layers import (
    DecayParameters,
    DecodingCache,
    DecodingPools,
    LayerCache,
    LayerPool,
    PooledCache,
    ShortConvolution,
)

NAMES = ["delta_net", "kda", "ttt_linear", "window"]


@pytest.fixture
def layers(build):
    return [build(name) for name in NAMES]


@pytest.fixture
def filled(layers):
    """A cache of three sequences after 19 tokens."""
    cache = DecodingCache([LayerCache() for _ in layers], batch_size=3)
    for layer, record in zip(layers, cache.layers, strict=True):
        layer(torch.randn(3, 19, 24, dtype=torch.float64), cache=record)
    return cache


def test_reorder_moves_rows_of_every_layer(layers, filled, float64_bounds):
    x = torch.randn(2, 4, 24, dtype=torch.float64)
    rows = torch.tensor([2, 0])
    parts = []
    for layer, record in zip(layers, filled.layers, strict=True):
        alone = [LayerCache({name: t[row : row + 1] for name, t in record.items()}) for row in rows]
        parts.append(torch.cat([layer(x[i : i + 1], cache=cache) for i, cache in enumerate(alone)]))
    filled.reorder(rows)
    assert filled.batch_size == 2
    for layer, record, truth in zip(layers, filled.layers, parts, strict=True):
        float64_bounds.output("y", layer(x, cache=record), truth)


def test_detach_drops_the_gradient_history(layers, filled):
    assert all(any(t.requires_grad for t in record.values()) for record in filled.layers)
    values = [{name: t.clone() for name, t in record.items()} for record in filled.layers]
    filled.detach()
    for record, before in zip(filled.layers, values, strict=True):
        assert not any(t.requires_grad for t in record.values())
        assert all(torch.equal(record[name], before[name]) for name in before)


def test_generation_can_return_to_a_snapshot(layers, filled):
    x = torch.randn(3, 2, 24, dtype=torch.float64)
    kept = filled.snapshot()
    first = [layer(x, cache=record) for layer, record in zip(layers, filled.layers, strict=True)]
    again = [layer(x, cache=record) for layer, record in zip(layers, kept.layers, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_floats_change_dtype_and_integers_do_not(filled):
    filled.to(dtype=torch.float32, state_dtype=torch.float32)
    for record in filled.layers:
        for name, tensor in record.items():
            assert tensor.dtype == torch.float32 or name in ("position", "positions")
            assert tensor.is_floating_point() or name in ("position", "positions")
    assert next(iter(filled.to("meta").layers[0].values())).device.type == "meta"


def test_a_recurrent_state_keeps_its_dtype(build):
    layer = build("gated_delta_net", torch.float32)
    cache = DecodingCache([LayerCache()], batch_size=1)
    x = torch.randn(1, 21, 24)
    layer(x, cache=cache.layers[0])
    assert cache.layers[0]["state"].dtype == torch.float32
    cache.layers[0]["state"] = cache.layers[0]["state"].bfloat16()
    for tokens in (1, 20):
        layer(x[:, :tokens], cache=cache.layers[0])
        assert cache.layers[0]["state"].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["delta_net", "gated_delta_net", "kda", "ttt_linear", "window"])
def test_its_size_does_not_grow(build, name):
    layer = build(name)
    cache = DecodingCache([LayerCache()], batch_size=2)
    with torch.inference_mode():
        layer(torch.randn(2, 20, 24, dtype=torch.float64), cache=cache.layers[0])
        size = cache.nbytes
        assert size > 0
        for tokens in (1, 1, 50, 1):
            layer(torch.randn(2, tokens, 24, dtype=torch.float64), cache=cache.layers[0])
            assert cache.nbytes == size


def test_errors_name_the_argument(filled):
    with pytest.raises(ValueError, match=r"^DecodingCache: batch_size must be at least 1, got 0$"):
        DecodingCache([LayerCache()], batch_size=0)
    with pytest.raises(ValueError, match=r"^DecodingCache.reorder: rows must have 1 dimension, \[N\]"):
        filled.reorder(torch.zeros(2, 1, dtype=torch.int64))


def test_errors_of_pools_name_the_argument():
    pool = LayerPool(torch.zeros(4, 8, 3), torch.zeros(4, 2, 8, 8))
    pools, slots = DecodingPools([pool]), torch.tensor([1, 3])
    for message, call in (
        ("LayerPool: conv must be a torch.Tensor, got NoneType", lambda: LayerPool(None, pool.state)),
        ("LayerPool: slots must be a torch.Tensor, got list", lambda: pool.at([1, 3])),
        ("DecodingPools: layers must be a sequence, got int", lambda: DecodingPools(3)),
        ("DecodingPools: layers must be one LayerPool or more, got none", lambda: DecodingPools([])),
        ("DecodingPools: layers must each be a wyfold.layers.LayerPool, got L", lambda: DecodingPools([LayerCache()])),
        ("DecodingCache: layers must be a sequence, got NoneType", lambda: DecodingCache(None, 2)),
        ("DecodingPools.at: slots must be a torch.Tensor, got list", lambda: pools.at([1, 3])),
        (r"DecodingPools.at: slots must be \[N\] = \[2\] int32 or int64, got", lambda: pools.at(slots.float())),
        (r"DecodingPools.at: has_initial_state must be \[N\] = \[2\] bool", lambda: pools.at(slots, torch.ones(2))),
        (r"DecodingPools.at: has_initial_state must be \[N\]", lambda: pools.at(slots, torch.ones(3) > 0)),
        ("PooledCache: batch_size must be at least 0, got -1", lambda: PooledCache([pool], -1)),
        ("DecayParameters: channels must be at least 1, got 0", lambda: DecayParameters(2, 0)),
        ("DecayParameters: num_v_heads must be an int, got str", lambda: DecayParameters("2")),
        ("ShortConvolution: bias must be True or False, got 1", lambda: ShortConvolution(8, bias=1)),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            call()
    assert pools.at().batch_size == 4 and pools.at(slots, slots > 1).batch_size == 2
