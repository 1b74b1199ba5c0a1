"""Cached plans: a call with known metadata is neither checked nor planned again; any other call is."""

from typing import Any

import pytest
import torch

import wyfold
from wyfold import SequenceLayout
from wyfold.ops import gated_delta_rule, kda
from wyfold.ops.delta_call import DELTA
from wyfold.runtime import replay_cache


@pytest.fixture
def planned(monkeypatch) -> list[str]:
    """Names of the operators planned during the test, one entry per plan; the cache starts empty."""
    calls: list[str] = []

    def counted(tensors, values):
        calls.append(values.op)
        return DELTA.make_plan(tensors, values)

    for module in (kda, gated_delta_rule):
        monkeypatch.setattr(module, "DELTA", DELTA._replace(make_plan=counted))
    monkeypatch.setattr(replay_cache, "_entries", {})
    monkeypatch.setattr(replay_cache, "_alike", {})
    return calls


def plain_call(**changes: Any) -> torch.Tensor:
    x = torch.ones(1, 4, 2, 8)
    return wyfold.chunk_kda(**{"q": x, "k": x, "v": x, "g": -x, "beta": x[..., 0], **changes})[0]


def test_a_call_like_an_earlier_one_is_not_planned_again(planned: list[str]):
    plain_call()
    plain_call(q=torch.zeros(1, 4, 2, 8))  # other numbers
    assert planned == ["chunk_kda"]


X = torch.ones(1, 4, 2, 8)
OTHER_CALLS = {
    "longer": {name: torch.ones(1, 5, 2, 8) for name in "qkvg"} | {"beta": torch.ones(1, 5, 2)},
    "another dtype": {name: X.bfloat16() for name in "qkv"},
    "another dtype of the gate": {"g": -X.bfloat16()},
    "no gate": {"g": None},
    "a gradient": {"q": X.clone().requires_grad_()},
    "a number": {"scale": 2.0},
    "a flag": {"output_final_state": True},
    "a chunk size": {"chunk_size": 16},
    "a backend": {"backend": "eager"},
    "strides": {"v": torch.zeros(1, 4, 8, 2).mT},
    "boundaries": {"cu_seqlens": torch.tensor([0, 4])},
    "a layout": {"cu_seqlens": SequenceLayout(torch.tensor([0, 4]), 4)},
    "a state": {"initial_state": torch.ones(1, 2, 8, 8)},
    "parameters": {"use_gate_in_kernel": True, "A_log": torch.ones(2)},
}


@pytest.mark.parametrize("other", OTHER_CALLS)
def test_another_call_is_planned_for_itself(other: str, planned: list[str]):
    plain_call()
    plain_call(**OTHER_CALLS[other])
    plain_call(**OTHER_CALLS[other])
    assert len(planned) == 2


WRONG = {
    "an int for a flag": ({"output_final_state": True}, {"output_final_state": 1}, TypeError),
    "an int for a chunk's flag": ({"disable_recompute": False}, {"disable_recompute": 0}, TypeError),
    "a float for a size": ({"chunk_size": 16}, {"chunk_size": 16.0}, ValueError),
    "a list for a number": ({}, {"scale": [1.0]}, TypeError),
    "a sparse tensor": ({}, {"q": X.to_sparse()}, ValueError),
    "a layout of another length": (
        {"cu_seqlens": SequenceLayout(torch.tensor([0, 4]), 4)},
        {"cu_seqlens": SequenceLayout(torch.tensor([0, 4]), 5)},
        ValueError,
    ),
    "no q": ({}, {"q": None}, TypeError),
    "no tensor": ({}, {"cu_seqlens": [0, 4]}, TypeError),
    "other dtypes": ({}, {"q": X.bfloat16()}, ValueError),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_no_check_is_lost_to_an_earlier_call(wrong: str, planned: list[str]):
    right, changed, error = WRONG[wrong]
    plain_call(**right)
    for _ in range(2):
        with pytest.raises(error, match="chunk_kda"):
            plain_call(**{**right, **changed})


def test_autocast_has_its_own_plan(planned: list[str]):
    with torch.autocast("cpu", torch.bfloat16):
        assert plain_call(q=X.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="dtype"):
        plain_call(q=X.bfloat16())


def test_contents_are_checked_each_time(planned: list[str]):
    plain_call()
    with wyfold.checked(), pytest.raises(ValueError, match="g must be <= 0"):
        plain_call(g=X)
    on_cpu = torch.tensor([0, 4])
    plain_call(cu_seqlens=on_cpu, cu_seqlens_cpu=on_cpu)
    with pytest.raises(ValueError, match="boundaries"):
        plain_call(cu_seqlens=on_cpu, cu_seqlens_cpu=torch.tensor([0, 3]))


def test_the_cache_is_cleared_when_full(planned: list[str], monkeypatch):
    monkeypatch.setattr(replay_cache, "CAPACITY", 3)
    for scale in range(1, 9):
        plain_call(scale=float(scale))
        assert len(replay_cache._entries) <= 3
