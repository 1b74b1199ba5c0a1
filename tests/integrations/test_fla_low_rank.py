"""DPLR, IPLR, RWKV-7, GDN-2 and Comba under fla's names: fla's order of arguments, and what differs."""

from typing import Any

import pytest
import torch

import wyfold
from wyfold import UnsupportedError
from wyfold.integrations import fla
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape

SHAPE = Shape(1, 40, 2, 2, 8, 16)
ORDER = {
    "chunk_dplr_delta_rule": ("dplr_delta_rule", "q k v a b gk"),
    "fused_recurrent_dplr_delta_rule": ("dplr_delta_rule", "q k v a b gk"),
    "chunk_iplr_delta_rule": ("iplr_delta_rule", "q k v a b"),
    "fused_recurrent_iplr_delta_rule": ("iplr_delta_rule", "q k v a b"),
    "chunk_rwkv7": ("rwkv7", "r w k v a b"),
    "fused_recurrent_rwkv7": ("rwkv7", "r w k v a b"),
    "fused_mul_recurrent_rwkv7": ("mul_rwkv7", "r w k v kk a"),
    "chunk_gdn2": ("gdn2", "q k v g b w"),
    "fused_recurrent_gdn2": ("gdn2", "q k v g b w"),
    "chunk_comba": ("comba", "q k v p g beta"),
    "fused_recurrent_comba": ("comba", "q k p v g beta"),
}
"""Name -> rule of the inputs, and fla's first arguments."""


def drawn(rule: str, sequences: int = 1) -> dict[str, Any]:
    return inputs.draw("random", rule, SHAPE, gate="weak", state="normal", sequences=sequences)


@pytest.mark.parametrize("name", ORDER)
def test_the_order_is_flas(name: str):
    rule, order = ORDER[name]
    a = drawn(rule, 3)
    cu = torch.tensor([0, 7, 7, 38])
    options = {"scale": 0.5, "initial_state": a["initial_state"], "output_final_state": True, "cu_seqlens": cu}
    got = getattr(fla, name)(*(a[x] for x in order.split()), **options)
    truth = getattr(wyfold, name)(**a | options)
    assert all(map(torch.equal, got, truth))
    plain = getattr(fla, name)(*(a[x] for x in order.split()))
    assert plain[0].shape == a["v"].shape and (plain[1] is None) == (name != "fused_recurrent_rwkv7")


def test_default_scales_are_flas():
    a = drawn("rwkv7")
    first = [a[x] for x in "rwkvab"]
    truth = {scale: wyfold.chunk_rwkv7(*first, scale=scale)[0] for scale in (1.0, None)}
    assert torch.equal(fla.chunk_rwkv7(*first)[0], truth[1.0])
    assert torch.equal(
        fla.fused_recurrent_rwkv7(*first)[0], wyfold.fused_recurrent_rwkv7(*first, scale=None)[0]
    ) and not torch.equal(truth[None], truth[1.0])


def test_assumptions_about_decays_clamp_nothing():
    a = drawn("rwkv7")
    a["w"] = 40 * a["w"]
    first = [a[x] for x in "rwkvab"]
    truth = fla.chunk_rwkv7(*first)[0]
    assert torch.equal(fla.chunk_rwkv7(*first, safe_gate=True, lower_bound=-0.6, chunk_size=16)[0], truth)
    with pytest.raises(ValueError, match=r"^chunk_rwkv7: lower_bound must be below 0, got 0.5"):
        fla.chunk_rwkv7(*first, lower_bound=0.5)
    with pytest.raises(TypeError, match=r"^chunk_dplr_delta_rule: safe_gate"):
        fla.chunk_dplr_delta_rule(*(drawn("dplr_delta_rule")[x] for x in ("q", "k", "v", "a", "b", "gk")), safe_gate=1)


def test_old_layout_names_and_the_gate_of_gdn2():
    a = inputs.draw("random", "gdn2", SHAPE, gate="model bounded", state="normal")
    first, rest = [a.pop(x) for x in "qkvgbw"], {"output_final_state": True}
    truth = wyfold.chunk_gdn2(*first, **a, **rest)
    got = fla.chunk_gdn2(*first, **a, **rest)
    assert all(map(torch.equal, got, truth))
    a["initial_state"] = a["initial_state"].mT
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        o, state = fla.chunk_gdn2(*first, **a, **rest, transpose_state_layout=True)
    assert torch.equal(o, truth[0]) and torch.equal(state.mT, truth[1])
    a["state_v_first"] = True
    steps = fla.fused_recurrent_gdn2(*first, **a, **rest)
    assert all(map(torch.equal, steps, wyfold.fused_recurrent_gdn2(*first, **a, **rest)))


def test_states_that_enter_each_chunk_of_gdn2():
    a = inputs.draw("random", "gdn2", Shape(1, 150, 1, 2, 8, 8), gate="weak", state="normal")
    o, state, h = fla.chunk_gdn2(**a, output_final_state=True, return_intermediate_states=True)
    truth = wyfold.chunk_gdn2(**a, output_final_state=True, return_intermediate_states=True, checkpoint_every=64)
    assert torch.equal(o, truth[0]) and torch.equal(state, truth[1])
    assert torch.equal(h, torch.cat([a["initial_state"][:, None], truth[2]], 1))


def test_what_is_not_offered_is_refused():
    dplr, mul = (drawn(rule) for rule in ("dplr_delta_rule", "mul_rwkv7"))
    for a in (dplr, mul):
        del a["initial_state"]
    with pytest.raises(UnsupportedError, match=r"^fused_recurrent_dplr_delta_rule: reverse=True is not offered"):
        fla.fused_recurrent_dplr_delta_rule(**dplr, reverse=True)
    with pytest.raises(UnsupportedError, match=r"^fused_mul_recurrent_rwkv7: reverse=True is not offered"):
        fla.fused_mul_recurrent_rwkv7(**mul, reverse=True)
    with pytest.raises(TypeError, match=r"^fused_recurrent_gla: reverse must be True or False, got 'no'"):
        fla.fused_recurrent_gla(dplr["q"], dplr["k"], dplr["v"], reverse="no")
    with pytest.raises(ValueError, match=r"^chunk_gdn2: `chunk_size` must be 64 for GDN-2 .* got 32"):
        fla.chunk_gdn2(**drawn("gdn2"), chunk_size=32)
    with pytest.raises(TypeError, match="cp_context must come from"):
        fla.chunk_dplr_delta_rule(**dplr, cp_context=1)
