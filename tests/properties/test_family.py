"""The family's promises for GLA, DeltaProduct and the low-rank rules, most of them bit for bit.

Packed equals separate; the past does not depend on the future; a call split at a chunk boundary equals one call; the
same inputs give the same bits, in any memory layout, in any number of threads and where a checkpoint repeats the call.
Every gate is accurate in packed calls, and every length in `make compile`. The tests of PaTH attention are beside it.
"""

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from tests.ops.family_calls import (
    CASES,
    F64,
    GATED,
    RULES,
    STATES,
    agree,
    drawn,
    fed_back,
    of_tokens,
    operator,
    require_packed_is_separate,
    tokens,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from wyfold.reference import inputs
from wyfold.reference.shapes import EVERY_LENGTH, Shape

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "0": torch.zeros_like,
    "slow": lambda x: -1e-3 * x,
    "fast": lambda x: -5 * x,
    "-80": lambda x: torch.full_like(x, -80),
    "-inf": lambda x: torch.full_like(x, -torch.inf),
}
"""Gates as functions of uniform numbers."""


def mixed(x: Tensor) -> Tensor:
    """One of `GATES` for each token and channel."""
    which = (len(GATES) * torch.rand(x.shape, generator=torch.Generator().manual_seed(1))).int()
    return sum((gate(x).where(which == n, 0) for n, gate in enumerate(GATES.values())), torch.zeros_like(x))


@pytest.mark.release
@pytest.mark.parametrize(("rule", "form"), CASES)
def test_every_length(rule: str, form: str, results, float64_bounds):
    """One token loop has all lengths, in a batch whose rows end early: a token of zeros leaves the state unchanged."""
    N = len(EVERY_LENGTH)
    a = drawn(rule, Shape(N, N, 1, 2, 8, 16), gate="weak", dtype=F64)
    fed = fed_back(a)
    for b, T in enumerate(EVERY_LENGTH):
        for x in of_tokens(tokens(rule, a | {"o": fed["o"]}, T)).values():
            x[b] = 0
    truth = results(RULES[rule].loop, a, None, fed)
    for b, T in enumerate(EVERY_LENGTH):

        def alone(found: dict[str, Any], b: int = b, T: int = T) -> dict[str, Any]:
            rows = {name: x[b : b + 1] for name, x in found.items() if isinstance(x, Tensor)}
            return tokens(rule, found | rows, 0, T)

        agree(float64_bounds, results(operator(rule, form), alone(a), None, alone(fed)), alone(truth))


@pytest.mark.parametrize("gate", ["mixed", *(pytest.param(gate, marks=pytest.mark.release) for gate in GATES)])
@pytest.mark.parametrize(("rule", "form"), GATED)
def test_gates_packed_with_empty_and_short_sequences(rule: str, form: str, gate: str, results, float64_bounds):
    a = drawn(rule, Shape(1, 90, 2, 4, 16, 8), sequences=5, dtype=F64)
    decays = torch.rand(a[RULES[rule].gate].shape, generator=torch.Generator().manual_seed(0), dtype=F64)
    a |= {
        RULES[rule].gate: (GATES | {"mixed": mixed})[gate](decays),
        "cu_seqlens": torch.tensor([0, 33, 33, 34, 35, 82]),
    }
    fed = fed_back(a)
    agree(float64_bounds, *(results(op, a, None, fed) for op in (operator(rule, form), RULES[rule].loop)))


@pytest.mark.parametrize(("lengths", "dtype"), [([1, 16, 0, 33], torch.float32), ([65, 2], torch.bfloat16)], ids=str)
@pytest.mark.parametrize(("rule", "form"), CASES)
def test_packed_is_separate(rule: str, form: str, lengths: list[int], dtype: torch.dtype, results):
    a = drawn(rule, Shape(1, sum(lengths) + 3, 1, 2, 24, 16), sequences=len(lengths), dtype=dtype)
    require_packed_is_separate(rule, form, a, [0, *accumulate(lengths)], results)


@pytest.mark.parametrize(
    "t", [1, pytest.param(15, marks=pytest.mark.release), 16, pytest.param(40, marks=pytest.mark.release)]
)
@pytest.mark.parametrize(("rule", "form"), CASES)
def test_nothing_after_t_reaches_t(rule: str, form: str, t: int, results):
    op, shape = operator(rule, form), Shape(1, 53, 2, 2, 8, 16)
    a, other = drawn(rule, shape), drawn(rule, shape, seed=1, gate="weak")
    fed = {"o": fed_back(a)["o"]}
    fed["o"][:, t:] = 0  # a loss on the first t tokens
    truth = results(op, a, None, fed)
    past, later = tokens(rule, a, 0, t), tokens(rule, other, t)
    for chosen in (of_tokens(a).keys(), *({name} for name in of_tokens(a))):
        future = a | {name: torch.cat([past[name], later[name]], 1) for name in chosen}
        got = results(op, future, None, fed)
        for name, x in tokens(rule, truth, 0, t).items():
            if name != "state":
                assert torch.equal(tokens(rule, got, 0, t)[name], x), (name, chosen)
    for name, x in of_tokens(tokens(rule, truth, t)).items():
        assert name == "o" or not x.any(), name
    assert torch.equal(op(**past)[0], truth["o"][:, :t])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rule", "form"), CASES)
def test_a_split_call(rule: str, form: str, dtype: torch.dtype, results):
    """Updates of a token begin no chunk, so that a cut is where a token and a chunk of updates end."""
    op, cuts = operator(rule, form), [0, 16, 64, 90] if form == "chunk" else [0, 1, 17, 90]
    a = drawn(rule, Shape(2, 90, 1, 2, 8, 16), dtype=dtype)
    whole = results(op, a)
    leaves = {name: x.detach().requires_grad_() for name, x in a.items() if isinstance(x, Tensor)}
    outputs, state = [], leaves["initial_state"]
    for begin, end in pairwise(cuts):
        o, state = op(**tokens(rule, a | leaves, begin, end) | {"initial_state": state})
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
    truth = results(op, a, None, fed)
    placed = {name: place(x) if isinstance(x, Tensor) else x for name, x in a.items()}
    got = results(op, placed, None, {name: place(x) for name, x in fed.items()})
    assert all(torch.equal(got[name], x) for name, x in truth.items())


@pytest.mark.parametrize(("rule", "form"), CASES)
def test_rows_and_heads_of_a_batch_and_repeats(rule: str, form: str, threads: int, results):
    op, a = operator(rule, form), drawn(rule, Shape(3, 37, 2, 4, 16, 24))
    fed = fed_back(a)
    batch = results(op, a, None, fed)
    again = results(op, a, None, fed)
    assert all(torch.equal(again[name], x) for name, x in batch.items())

    def first_heads(found: dict[str, Any]) -> dict[str, Any]:
        """One row, with the first key head and its two value heads."""
        rows = {
            name: x[1:2].split(x.shape[1 if name in STATES else 2] // 2, 1 if name in STATES else 2)[0]
            for name, x in found.items()
            if isinstance(x, Tensor)
        }
        return found | rows

    for name, x in results(op, first_heads(a), None, first_heads(fed)).items():
        assert torch.equal(x, first_heads(batch)[name]), name


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("rule", "form"), CASES)
def test_activation_checkpointing(rule: str, form: str, reentrant: bool, results):
    op, a = operator(rule, form), drawn(rule, Shape(1, 40, 1, 2, 8, 16))
    plain = results(op, a)
    leaves = {name: x.clone().requires_grad_() for name, x in a.items() if isinstance(x, Tensor)}

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return op(**a | dict(zip(leaves, tensors)))

    o, state = checkpoint(call, *leaves.values(), use_reentrant=reentrant)
    torch.autograd.backward([o, state], [inputs.incoming(o, 0), inputs.incoming(state, 1)])
    assert torch.equal(o, plain["o"]) and torch.equal(state, plain["state"])
    assert all(torch.equal(x.grad, plain[f"d{name}"]) for name, x in leaves.items())


KEPT = {"gdn2": ("g", "b", "w"), "rwkv7": ("w",), "mul_rwkv7": ("w",), "dplr": ("gk",)}
"""Rule -> arguments that autocast leaves as they are: gates and strengths. Of the other rules, decays and beta."""


@pytest.mark.parametrize(("rule", "form"), CASES)
def test_autocast_casts_the_rows_and_nothing_else(rule: str, form: str, results):
    op, a = operator(rule, form), drawn(rule, Shape(1, 20, 1, 2, 8, 8), gate="weak")
    kept = {"initial_state", *KEPT.get(rule, ("g", "gv", "beta"))}
    with torch.autocast("cpu", torch.bfloat16):
        got = results(op, a)
    plain = results(
        op, {name: x if name in kept or not isinstance(x, Tensor) else x.bfloat16() for name, x in a.items()}
    )
    assert got["o"].dtype == torch.bfloat16 and got["state"].dtype == torch.float32
    for name, x in plain.items():
        assert torch.equal(got[name], x.to(got[name].dtype)), name
