"""The family's promises for the rules whose transition is diagonal plus low rank, bit for bit.

Packed equals separate; the past does not depend on the future; a call split at a chunk boundary equals one call; the
same inputs give the same bits, in any memory layout and any number of threads.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import wyfold
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape

RULES = ("dplr_delta_rule", "iplr_delta_rule", "gdn2", "comba")
CASES = [(rule, form) for rule in RULES for form in ("chunk", "fused_recurrent")]
CASES += [("mul_rwkv7", "fused_mul_recurrent")]
STATES = ("initial_state", "state", "dinitial_state")


def operator(rule: str, form: str) -> Callable[..., Any]:
    return getattr(wyfold, f"{form}_{rule.removeprefix('mul_')}")


def drawn(rule: str, shape: Shape, **options: Any) -> dict[str, Any]:
    return inputs.draw("random", rule, shape, **{"gate": "any", "state": "normal", **options})


def on_tokens(found: dict[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Results or arguments with every per-token tensor changed."""
    return {name: x if name in STATES or not isinstance(x, Tensor) else change(x) for name, x in found.items()}


def fed_back(a: dict[str, Any]) -> dict[str, Tensor]:
    return {"o": inputs.incoming(a["v"], 1), "state": inputs.incoming(a["initial_state"], 2)}


@pytest.mark.parametrize(("lengths", "dtype"), [([1, 16, 0, 33], torch.float32), ([65, 2], torch.bfloat16)], ids=str)
@pytest.mark.parametrize(("rule", "form"), CASES)
def test_packed_is_separate(rule: str, form: str, lengths: list[int], dtype: torch.dtype, threads: int, results):
    op, total = operator(rule, form), sum(lengths)
    a = drawn(rule, Shape(1, total + 3, 1, 2, 24, 16), sequences=len(lengths), dtype=dtype)
    fed = fed_back(a)
    for x in (*on_tokens(a, lambda x: x).values(), fed["o"]):
        if x.shape[1] == total + 3:
            x[:, total:] = torch.nan  # never read
    cu = torch.tensor([0, *lengths]).cumsum(0)
    together = results(op, a, None, fed, cu_seqlens=cu, output_final_state=True)
    for n, (begin, end) in enumerate(pairwise(cu.tolist())):

        def part(found: dict[str, Any], n: int = n, begin: int = begin, end: int = end) -> dict[str, Any]:
            found = {name: x[n : n + 1] if name in STATES else x for name, x in found.items()}
            return on_tokens(found, lambda x: x[:, begin:end])

        alone = results(op, part(a), None, part(fed), output_final_state=True)
        for name, x in part(together).items():
            assert torch.equal(alone[name], x), (name, n)
    padding = on_tokens(together, lambda x: x[:, total:])
    assert not any(x.any() for name, x in padding.items() if name not in STATES)


@pytest.mark.parametrize(
    "t", [1, pytest.param(15, marks=pytest.mark.release), 16, pytest.param(40, marks=pytest.mark.release)]
)
@pytest.mark.parametrize(("rule", "form"), CASES)
def test_nothing_after_t_reaches_t(rule: str, form: str, t: int, results):
    op, shape = operator(rule, form), Shape(1, 53, 2, 2, 8, 16)
    a, other = drawn(rule, shape), drawn(rule, shape, seed=1, gate="weak")
    fed = {"o": inputs.incoming(a["v"], 1)}
    fed["o"][:, t:] = 0  # a loss on the first t tokens
    truth = results(op, a, None, fed)
    tokens = on_tokens(a, lambda x: x).keys() - {"initial_state"}
    for chosen in (tokens, *({name} for name in tokens)):
        future = a | {name: torch.cat([a[name][:, :t], other[name][:, t:]], 1) for name in chosen}
        got = results(op, future, None, fed)
        for name, x in truth.items():
            past = slice(None) if name in STATES else slice(0, t)
            assert torch.equal(got[name][:, past], x[:, past]), (name, chosen)
    for name in tokens:
        assert not truth[f"d{name}"][:, t:].any(), name
    assert torch.equal(op(**on_tokens(a, lambda x: x[:, :t]))[0], truth["o"][:, :t])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rule", "form"), CASES)
def test_a_split_call(rule: str, form: str, dtype: torch.dtype, results):
    op, cuts = operator(rule, form), [0, 16, 64, 90] if form == "chunk" else [0, 1, 17, 90]
    a = drawn(rule, Shape(2, 90, 1, 2, 8, 16), dtype=dtype)
    whole = results(op, a, output_final_state=True)
    leaves = {name: x.detach().requires_grad_() for name, x in a.items()}
    outputs, state = [], leaves["initial_state"]
    for begin, end in pairwise(cuts):
        piece = on_tokens(leaves, lambda x, begin=begin, end=end: x[:, begin:end]) | {"initial_state": state}
        o, state = op(**piece, output_final_state=True)
        outputs.append(o)
    o = torch.cat(outputs, 1)
    assert torch.equal(o, whole["o"]) and torch.equal(state, whole["state"])
    arrows = [inputs.incoming(o, 0), inputs.incoming(state, 1)]
    for name, dx in zip(leaves, torch.autograd.grad([o, state], list(leaves.values()), arrows)):
        assert torch.equal(dx, whole[f"d{name}"]), name


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def every_other(x: Tensor) -> Tensor:
    return torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2]


def inside_more_tokens(x: Tensor) -> Tensor:
    return torch.cat([x.new_full((x.shape[0], 2, *x.shape[2:]), torch.nan), x], 1)[:, 2:]


@pytest.mark.parametrize("place", [heads_first, every_other, inside_more_tokens], ids=lambda place: place.__name__)
@pytest.mark.parametrize(("rule", "form"), CASES)
def test_strides(rule: str, form: str, place: Callable[[Tensor], Tensor], results):
    op, a = operator(rule, form), drawn(rule, Shape(2, 21, 2, 4, 16, 8), gate="weak")
    fed = fed_back(a)
    truth = results(op, a, None, fed, output_final_state=True)
    placed = {name: place(x) for name, x in a.items()}
    got = results(op, placed, None, {name: place(x) for name, x in fed.items()}, output_final_state=True)
    assert all(torch.equal(got[name], x) for name, x in truth.items())


@pytest.mark.parametrize(("rule", "form"), CASES)
def test_rows_and_heads_of_a_batch_and_repeats(rule: str, form: str, threads: int, results):
    op, a = operator(rule, form), drawn(rule, Shape(3, 37, 2, 4, 16, 24))
    fed = fed_back(a)
    batch = results(op, a, None, fed, output_final_state=True)
    again = results(op, a, None, fed, output_final_state=True)
    assert all(torch.equal(again[name], x) for name, x in batch.items())
    # One row, with the first key head and its two value heads.
    heads = [x.shape[1 if name in STATES else 2] // 2 for name, x in a.items()]
    alone = {name: x[1:2, :n] if name in STATES else x[1:2, :, :n] for (name, x), n in zip(a.items(), heads)}
    fed = {"o": fed["o"][1:2, :, :2], "state": fed["state"][1:2, :2]}
    for name, x in results(op, alone, None, fed, output_final_state=True).items():
        there = batch[name][1:2]
        assert torch.equal(x, there[:, :2] if name in STATES else there[:, :, : x.shape[2]]), name
