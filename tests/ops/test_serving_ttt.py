"""TTT-Linear decoded from pools: the recurrent form's results, in place, with other slots unchanged."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import wyfold
from wyfold import TTTState, serving
from wyfold.ops import serving_ttt as operators
from wyfold.reference.error import judge, require

H, HV, D, C = 2, 4, 16, 16
TOKENS = ("q", "k", "v", "eta", "eta_col")


def drawn(N: int, T: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {
        "q": torch.randn(N, T, H, D, dtype=dtype),
        "k": torch.nn.functional.normalize(torch.randn(N, T, H, D), dim=-1).to(dtype),
        "v": torch.randn(N, T, HV, D, dtype=dtype),
        "w": 1 + 0.1 * torch.randn(HV, D),
        "b": 0.1 * torch.randn(HV, D),
        "eta": 0.1 * torch.rand(N, T, HV, 1),
    }


def a_pool(slots: int, *positions: int, dtype: torch.dtype = torch.float32) -> TTTState:
    """A pool with sequences at these positions; the other slots are NaN."""
    S, c = (torch.randn(slots, HV, rows, D) for rows in (D, 1))
    G, a = (0.1 * torch.randn(slots, HV, rows, D) for rows in (D, 1))
    position = torch.tensor([*positions, *[7] * (slots - len(positions))], dtype=torch.int32)
    for x in (G, a):
        x[position == 0] = 0
    for x in (S, c, G, a):
        x[len(positions) :] = torch.nan
    return TTTState(*(x.to(dtype) for x in (S, c, G, a)), position)


def to(x: Any, device: torch.device) -> Any:
    return TTTState(*(y.to(device) for y in x)) if isinstance(x, TTTState) else {n: y.to(device) for n, y in x.items()}


@pytest.mark.parametrize("residual", ["o", "q"])
def test_tokens_one_by_one_are_the_recurrent_call(residual: str, backend: str, device):
    """From any position, across a mini-batch's end, in any slots; a skipped row is zero and writes nothing."""
    N, T = 3, 3
    a, before = drawn(N, T), a_pool(6, 14, 0, 3, 15)
    a["eta_col"] = 0.5 + torch.rand(N, T, HV, 1)
    slots = torch.tensor([3, 0, 2])
    options = {"residual": residual, "scale": 0.7, "chunk_size": C}
    entering = TTTState(*(x[slots] for x in before))
    yardstick = recurrent(a, entering, **options)
    wide = TTTState(*(x.double() for x in entering[:4]), entering.position)
    truth = recurrent({name: x.double() for name, x in a.items()}, wide, **options)

    pool, rows = to(TTTState(*(x.clone() for x in before)), device), [0, 2, 4]
    padded, found = torch.tensor([3, -1, 0, 6, 2], device=device), []
    for t in range(T):
        tokens = {n: torch.full((5, 1, *x.shape[2:]), torch.nan) for n, x in a.items() if n in TOKENS}
        for n, x in tokens.items():
            x[rows] = a[n][:, t : t + 1]
        o = serving.ttt_decode(**to(a | tokens, device), pool=pool, state_indices=padded, backend=backend, **options)
        assert not o[[1, 3]].any()
        found.append(o[rows])
    left = torch.cat(found, 1), *(x[slots.to(device)] for x in pool)
    names = "o", *TTTState._fields[:4]
    require(*(judge(x.cpu(), y, z, name=n) for n, x, y, z in zip(names, left, truth, yardstick, strict=False)))
    assert torch.equal(left[-1].cpu(), truth[-1])
    for x, y in zip(pool, before, strict=True):
        assert torch.equal(x[[1, 4, 5]].cpu().nan_to_num(9.0), y[[1, 4, 5]].nan_to_num(9.0))


def recurrent(a: dict[str, Any], state: TTTState, **options: Any) -> tuple[Tensor, ...]:
    o, left = wyfold.fused_recurrent_ttt_linear(**a, state=state, output_final_state=True, backend="eager", **options)
    return o, *left


def test_forms_of_a_call_agree_bit_for_bit(backend: str, device):
    """[1, N, ..] rows, a number as step size, a given output, strided slots, no state_indices."""
    a, before = drawn(2, 1), to(a_pool(2, 15, 4), device)
    a = to(a | {"eta": torch.full((2, 1, HV, 1), 0.125)}, device)
    pools = [TTTState(*(x.clone() for x in before)) for _ in range(3)]
    wide = TTTState(*(torch.stack([x, torch.zeros_like(x)], 1)[:, 0] for x in before))
    o = serving.ttt_decode(**a, pool=pools[0], backend=backend)
    turned = {n: x.transpose(0, 1) if n in TOKENS else x for n, x in a.items()}
    out = torch.full_like(turned["v"], torch.nan)
    assert serving.ttt_decode(**turned, pool=pools[1], out=out, backend=backend) is out
    number = serving.ttt_decode(**a | {"eta": 0.125}, pool=wide, backend=backend)
    named = serving.ttt_decode(**a, pool=pools[2], state_indices=torch.arange(2, device=device), backend=backend)
    assert all(torch.equal(o, x) for x in (out.transpose(0, 1), number, named))
    assert all(torch.equal(x, y) for other in (pools[1], wide, pools[2]) for x, y in zip(other, pools[0], strict=True))
    assert pools[0].position.tolist() == [0, 5] and not pools[0].grad[0].any()


def test_opcheck(monkeypatch):
    seen = []
    monkeypatch.setattr(operators, "call", lambda operator, *arguments: seen.append((operator, arguments)))
    serving.ttt_decode(**drawn(2, 1), pool=a_pool(3, 15, 0, 4), state_indices=torch.tensor([2, 0]), backend="eager")
    ((operator, arguments),) = seen
    arguments[13].zero_()  # unwritten slots are NaN, which never compares equal
    torch.library.opcheck(operator, arguments)


def test_storage_is_rounded_once(backend: str, device):
    a, before = to(drawn(2, 1, torch.float16), device), to(a_pool(2, 15, 4, dtype=torch.float16), device)
    pool, exact = TTTState(*(x.clone() for x in before)), TTTState(*(x.float() for x in before[:4]), before[4].clone())
    o = serving.ttt_decode(**a, pool=pool, backend=backend)
    assert torch.equal(o, serving.ttt_decode(**a, pool=exact, backend=backend))
    assert all(torch.equal(x, y.to(x.dtype)) for x, y in zip(pool, exact, strict=True))


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no state": ({"pool": (1, 2, 3, 4, 5)}, TypeError, "pool must be a TTTState, got tuple"),
    "two tokens": ({"q": torch.zeros(2, 2, H, D)}, ValueError, "q must be [N, 1, H, K] or [1, N, H, K]"),
    "position": (
        {"pool": a_pool(2, 0, 0)._replace(position=torch.zeros(2))},
        ValueError,
        "pool.position must be [slots]",
    ),
    "slots": ({"state_indices": torch.zeros(3, dtype=torch.int64)}, ValueError, "state_indices must be [2]"),
    "gradient": ({"w": torch.ones(HV, D, requires_grad=True)}, ValueError, "w must not require a gradient"),
    "shared": (
        {"pool": a_pool(2, 0, 0)._replace(grad=torch.zeros(1, HV, D, D).expand(2, HV, D, D))},
        ValueError,
        "pool.grad must hold no two numbers in one place",
    ),
}


def test_an_overlapping_pool_is_refused_after_an_ordinary_one():
    """Both have the same sizes, but must not share a cached plan."""
    call, pool = drawn(2, 1), a_pool(2, 0, 0)
    shared = pool._replace(state=torch.zeros(1, HV, D, D).expand(2, HV, D, D))
    serving.ttt_decode(**call, pool=pool)
    with pytest.raises(ValueError, match=r"ttt_decode: pool\.state must hold no two numbers in one place"):
        serving.ttt_decode(**call, pool=shared)
    serving.ttt_decode(**call, pool=pool, out=torch.zeros(2, 1, HV, D))
    with pytest.raises(ValueError, match="ttt_decode: out must hold no two numbers in one place"):
        serving.ttt_decode(**call, pool=pool, out=torch.zeros(D).expand(2, 1, HV, D))


@pytest.mark.parametrize("name", BAD)
def test_errors(name: str):
    given, error, message = BAD[name]
    with pytest.raises(error, match=re.escape(message)):
        serving.ttt_decode(**{**drawn(2, 1), "pool": a_pool(2, 0, 0), **given})


def test_checked_refuses_repeated_slots():
    with wyfold.checked(), pytest.raises(ValueError, match="distinct slots"):
        serving.ttt_decode(**drawn(2, 1), pool=a_pool(2, 0, 0), state_indices=torch.tensor([1, 1]))
