"""fla's PaTHAttention: its parameters, padding, caches and packing, over `wyfold.layers.PaTHAttention`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.integrations import fla_cases as cases
from torch import Tensor

from wyfold import layers
from wyfold.integrations.fla import PaTHAttention, StandIn, install


class ListCache(list):
    """fla's interface of a cache."""

    def update(self, layer_idx: int, offset: int, **states: Any) -> dict[str, Any]:
        self[layer_idx : layer_idx + 1] = [states]
        return states


OPTIONS = [
    {"use_forget_gate": True, "num_kv_heads": 2},
    {"use_low_rank_w": False, "use_w_shortconv": False, "use_qk_norm": True},
    {"conv_size": 4, "conv_bias": True},
]


def layer(**options: Any) -> PaTHAttention:
    found = PaTHAttention(32, 4, layer_idx=0, **options).double().eval()
    cases.fill(found)
    return found


@pytest.fixture(params=OPTIONS, ids=str)
def mixer(request: pytest.FixtureRequest) -> PaTHAttention:
    return layer(**request.param)


def run(mixer: PaTHAttention, x: Tensor, cache: Any = None, **where: Any) -> Tensor:
    y, none, returned = mixer(x, past_key_values=cache, use_cache=cache is not None, **where)
    assert none is None and returned is cache
    return y


def test_the_layer_is_wyfolds_with_flas_filters(mixer: PaTHAttention, request: pytest.FixtureRequest):
    (options,) = (o for o in OPTIONS if str(o) in request.node.name)
    ours = layers.PaTHAttention(32, 4, **options).double()
    state = mixer.state_dict()
    if mixer.w_conv1d is not None:
        assert state["w_conv1d.weight"].shape[1] == 1
    ours.load_state_dict(state)
    other = PaTHAttention(32, 4, layer_idx=0, **options).double()
    other.load_state_dict(mixer.state_dict())
    x = torch.randn(2, 9, 32).double()
    assert torch.equal(run(mixer, x), ours(x)) and torch.equal(run(other, x), ours(x))


def test_padding_is_skipped_and_packing_is_separate(mixer: PaTHAttention, float64_bounds):
    """On any side; with gradients, from which padding gets none."""
    x = torch.randn(2, 12, 32).double().requires_grad_()
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :3], mask[1, 8:] = 0, 0
    y = run(mixer, x, attention_mask=mask)
    alone = [run(mixer, x[:1, 3:]), run(mixer, x[1:, :8])]
    float64_bounds.output("left", y[:1, 3:], alone[0])
    float64_bounds.output("right", y[1:, :8], alone[1])
    assert not y[mask == 0].any()
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    assert not dx[mask == 0].any() and dx[mask == 1].any(-1).all()
    packed = run(mixer, torch.cat([x[:1, 3:], x[1:, :8]], 1), cu_seqlens=torch.tensor([0, 9, 17]))
    float64_bounds.output("packed", packed, torch.cat(alone, 1))


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_cached_decoding(mixer: PaTHAttention, padded: bool, float64_bounds):
    x, cache = torch.randn(2, 75, 32).double(), ListCache()
    mask = torch.ones(2, 75, dtype=torch.long)
    mask[1, :4] = 0
    where = lambda stop: {"attention_mask": mask[:, :stop]} if padded else {}
    with torch.no_grad():
        rows = [run(mixer, x[:, :62], cache, **where(62))]
        rows += [run(mixer, x[:, t : t + 1], cache, **where(t + 1)) for t in range(62, 75)]
        truth = run(mixer, x, **where(75))
    assert cache[0]["attn_state"]["counts"].tolist() == [75, 71 if padded else 75]
    float64_bounds.output("y", torch.cat(rows, 1), truth)


def test_the_cache_of_flas_models_holds_it(float64_bounds):
    pytest.importorskip("transformers", reason="transformers, of whose caches fla's is one, is not installed")
    from wyfold.integrations.fla.cache import Cache

    mixer, x, cache = layer(use_forget_gate=True), torch.randn(3, 9, 32).double(), Cache()
    with torch.no_grad():
        run(mixer, x[:, :8], cache)
        cache.reorder_cache(torch.tensor([2, 0, 1]))
        y = run(mixer, x[[2, 0, 1], 8:], cache)
        float64_bounds.output("y", y, run(mixer, x[[2, 0, 1]])[:, 8:])
    assert cache.get_seq_length() == 9


def test_the_stand_in_has_the_layer():
    with install():
        from fla.layers import PaTHAttention as exported
        from fla.layers.path_attn import PaTHAttention as defined
    assert exported is defined is PaTHAttention and StandIn is not None


def test_the_operator_has_both_of_flas_names():
    with install():
        from fla.ops.path_attn import parallel_path_attn
        from fla.ops.path_attn.parallel import parallel_path_attention
        from fla.ops.path_attn.parallel import parallel_path_attn as defined
    assert parallel_path_attention is defined is parallel_path_attn


def test_a_call_that_does_not_fit_is_refused():
    mixer, x = layer(), torch.zeros(1, 3, 32).double()
    with pytest.raises(ValueError, match=r"attention_mask must be \[B, S\], .* got \[1, 3, 3\]"):
        mixer(x, attention_mask=torch.ones(1, 3, 3))
    with pytest.raises(ValueError, match=r"^PaTHAttention: hidden_states must be \[B, T, D\]"):
        mixer(x[..., :8])
    with pytest.raises(ValueError, match="num_kv_heads must divide num_heads = 4, got 3"):
        PaTHAttention(32, 4, 3)
