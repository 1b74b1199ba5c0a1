"""RWKV-7's names: DPLR with other names, and the form that takes removal key and learning rate."""

import torch

import wyfold
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape


def test_the_names_are_those_of_dplr():
    a = inputs.draw("random", "rwkv7", Shape(1, 50, 1, 2, 8, 8), gate="weak", state="normal")
    other = {"r": "q", "w": "gk"}
    same = {other.get(name, name): x for name, x in a.items()} | {"output_final_state": True}
    for form in ("chunk", "fused_recurrent"):
        got = getattr(wyfold, f"{form}_rwkv7")(**a, output_final_state=True)
        truth = getattr(wyfold, f"{form}_dplr_delta_rule")(**same, scale=1.0)
        assert all(map(torch.equal, got, truth))
        unscaled = getattr(wyfold, f"{form}_rwkv7")(**a, scale=None)
        assert torch.equal(unscaled[0], getattr(wyfold, f"{form}_dplr_delta_rule")(**same)[0])


def test_key_and_rate_are_multiplied_in_the_precision_of_the_state(results):
    a = inputs.draw("random", "mul_rwkv7", Shape(1, 50, 1, 2, 8, 8), gate="weak", state="normal", dtype=torch.bfloat16)
    got = results(wyfold.fused_mul_recurrent_rwkv7, a, ())
    kk, rate = a["kk"].float(), a["a"].float()
    wide = {name: a[name].float() for name in ("r", "w", "k", "v", "initial_state")}
    truth = results(wyfold.fused_recurrent_rwkv7, wide | {"a": -kk, "b": kk * rate}, ())
    assert torch.equal(got["o"], truth["o"].bfloat16())
