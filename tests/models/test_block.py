"""Activation checkpointing of blocks: memory and bits of a training step."""

import pytest
import torch

from wyfold import SequenceLayout, models
from wyfold.autograd import delta as pipeline
from wyfold.models import Decoder


def kept_bytes(model: Decoder, ids: torch.Tensor, **where) -> tuple[int, list[torch.Tensor]]:
    """Bytes that autograd saves in a forward (without parameters), and the gradients of a backward."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        _, loss = model(ids, ids, **where)
    loss.backward()
    return sum(kept.values()), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("packed", [False, True])
def test_recomputation_has_the_same_bits_and_less_memory(model, ids, packed):
    where = {}
    if packed:
        ids, where = ids[:1], {"layout": SequenceLayout.from_lengths([20, 0, 17])}
    whole, truth = kept_bytes(model, ids, **where)
    for what in models.RECOMPUTED:
        model.recompute(what)
        less, found = kept_bytes(model, ids, **where)
        assert less < whole / 2
        assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))
    model.recompute(None)
    assert kept_bytes(model, ids, **where)[0] == whole


def test_selective_recomputation_runs_no_recurrence_twice(model, ids, monkeypatch):
    forward, runs = pipeline.delta_eager.forward, []
    monkeypatch.setattr(pipeline.delta_eager, "forward", lambda *given: runs.append(1) or forward(*given))
    counts = {}
    for what in (None, *models.RECOMPUTED):
        runs.clear()
        model.recompute(what)
        model(ids, ids)[1].backward()
        counts[what] = len(runs)
    assert counts == {None: 3, "selective": 3, "blocks": 6}


def test_unknown_recomputation_is_refused(model):
    with pytest.raises(ValueError, match="what must be"):
        model.recompute("everything")


def test_a_call_with_a_cache_is_not_recomputed(model, ids):
    """Recomputed, a layer would go on from the state that its first run left."""
    found = []
    for what in (None, *models.RECOMPUTED):
        model.recompute(what)
        cache = model.new_cache(len(ids))
        model(ids[:, :20], cache=cache)
        found.append(model(ids[:, 20:], cache=cache)[0])
    assert all(torch.equal(found[0], x) for x in found[1:])
