"""Short convolution with a pool: `causal_conv1d` bit for bit, and other slots unchanged."""

from typing import Any

import pytest
import torch
from torch import Tensor

import wyfold
from wyfold import serving

D, W, T = 40, 4, 6
SLOTS = (4, 2, -1, 8)
LIVE = [0, 1, 3]


def drawn(device: torch.device, S: int, *, turned: bool, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Four sequences, one of them skipped, and a pool whose unused slots are NaN."""
    x, weight, bias = torch.randn(4, T, D).to(dtype), torch.randn(D, W), torch.randn(D)
    state, pool = torch.randn(4, D, W - 1).to(dtype), torch.full((9, D, S), torch.nan, dtype=dtype)
    slots = torch.tensor(SLOTS, dtype=torch.int32)
    pool[slots[LIVE].long(), :, : W - 1] = state[LIVE]
    if S > W - 1:
        pool[slots[LIVE].long(), :, W - 1 :] = 7
    pool = pool.to(device)
    found = {"x": x, "weight": weight, "bias": bias, "state": state, "slots": slots}
    return {name: t.to(device) for name, t in found.items()} | {"pool": pool.mT.contiguous().mT if turned else pool}


def whole(a: dict[str, Any], rows: slice | Tensor, x: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """`causal_conv1d` of the same inputs."""
    y, left = wyfold.causal_conv1d(
        x, a["weight"], a["bias"], initial_state=a["state"][rows], output_final_state=True, activation="silu",
        backend=backend,
    )  # fmt: skip
    assert left is not None
    return y, left


def others(pool: Tensor) -> Tensor:
    return pool[[0, 1, 3, 5, 6, 7]]


@pytest.mark.parametrize("S, turned", [(3, False), (6, True)])
def test_token_by_token_and_in_one_call(S: int, turned: bool, backend: str, device: torch.device):
    a = drawn(device, S, turned=turned)
    expected, left = whole(a, slice(None), a["x"], backend)
    filter_of = {"state_indices": a["slots"], "activation": "silu", "backend": backend}
    steps, chunk = a["pool"].clone(), a["pool"].clone()
    outputs = [
        serving.conv1d_update(x, steps, a["weight"], a["bias"], out=torch.full_like(x, torch.nan), **filter_of)
        for x in a["x"].unbind(1)
    ]
    y = serving.conv1d_prefill(a["x"], chunk, a["weight"], a["bias"], **filter_of)
    for got, pool in ((torch.stack(outputs, 1), steps), (y, chunk)):
        assert torch.equal(got[LIVE], expected[LIVE]) and not got[2].any()
        assert torch.equal(pool[list(a["slots"][LIVE]), :, : W - 1], left[LIVE])
        assert others(pool).isnan().all()


def test_rejected_drafts_are_skipped_by_their_number(backend: str, device: torch.device):
    """After n drafted tokens of which k were accepted, the next call continues from the inputs of k tokens."""
    a = drawn(device, W - 1 + 2, turned=False, dtype=torch.float16)
    filter_of = {"state_indices": a["slots"], "activation": "silu", "backend": backend}
    y = serving.conv1d_update(a["x"][:, :3], a["pool"], a["weight"], a["bias"], **filter_of)
    assert torch.equal(y[LIVE], whole(a, slice(None), a["x"][:, :3], backend)[0][LIVE])
    for accepted in ((1, 3, 1, 2), (0, 9, 0, 3)):
        pool = a["pool"].clone()
        y = serving.conv1d_update(
            a["x"][:, 3:5], pool, a["weight"], a["bias"], num_accepted_tokens=torch.tensor(accepted, device=device),
            **filter_of,
        )  # fmt: skip
        for n in LIVE:
            k, row = min(max(accepted[n], 1), 3), slice(n, n + 1)
            expected, _ = whole(a, row, torch.cat([a["x"][row, :k], a["x"][row, 3:5]], 1), backend)
            assert torch.equal(y[n], expected[0, k:]), (accepted, n)
        assert others(pool).isnan().all()


def test_packed_new_and_empty_sequences(backend: str, device: torch.device):
    a = drawn(device, W - 1 + 2, turned=False)
    lengths, given = (2, 0, 1, 3), torch.tensor([True, True, True, False], device=device)
    cu = torch.tensor([0, 2, 2, 3, 6], device=device)
    x = torch.full((1, 8, D), torch.nan, device=device)
    x[0, :6] = torch.cat([a["x"][n, :length] for n, length in enumerate(lengths)])
    filter_of = {
        "state_indices": a["slots"], "cu_seqlens": cu, "has_initial_state": given, "activation": "silu",
        "backend": backend,
    }  # fmt: skip
    a["state"][3] = 0
    for op in (serving.conv1d_update, serving.conv1d_prefill):
        pool = a["pool"].clone()
        y = op(x, pool, a["weight"], a["bias"], **filter_of)
        assert not y[0, 2].any() and not y[0, 6:].any()
        for n, begin in ((0, 0), (3, 3)):
            expected, left = whole(a, slice(n, n + 1), a["x"][n : n + 1, : lengths[n]], backend)
            assert torch.equal(y[0, begin : begin + lengths[n]], expected[0])
            entry = lengths[n] - 1 if op is serving.conv1d_update else 0
            assert torch.equal(pool[a["slots"][n].item(), :, entry : entry + W - 1], left[0])
        assert torch.equal(pool[2, :, : W - 1], a["pool"][2, :, : W - 1]) and others(pool).isnan().all()


def test_strided_slots_flags_and_counts(backend: str, device: torch.device):
    """Columns of a table are read with their strides."""
    a = drawn(device, W - 1 + 2, turned=False)
    given = torch.tensor([True, False, True, True], device=device)
    accepted = torch.tensor([3, 1, 2, 2], device=device)
    for op, named in (
        (serving.conv1d_update, {"has_initial_state": given, "num_accepted_tokens": accepted}),
        (serving.conv1d_prefill, {"has_initial_state": given}),
    ):
        named["state_indices"] = a["slots"]
        apart = {name: torch.stack([x, torch.full_like(x, 1)], -1)[..., 0] for name, x in named.items()}
        pools = a["pool"].clone(), a["pool"].clone()
        y, again = (
            op(a["x"][:, :2], pool, a["weight"], a["bias"], backend=backend, **flags)
            for pool, flags in zip(pools, (named, apart))
        )
        assert torch.equal(again, y) and torch.equal(pools[1].nan_to_num(9), pools[0].nan_to_num(9))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "taps": ({"weight": torch.randn(8, 9)}, r"weight must be \[D, W\] with W from 2 to 8"),
    "room": ({"pool": torch.zeros(3, 8, 2)}, r"pool must be \[slots, D, S >= W-1\]"),
    "pieces": ({"pool": torch.zeros(3, 8, 6)[:, :, ::2]}, "pool must hold each slot in one piece"),
    "overlapping": ({"pool": torch.zeros(5, 8, 3).as_strided((3, 8, 3), (12, 3, 1))}, "pool must hold no two numbers"),
    "out repeated": ({"out": torch.zeros(8).expand(2, 8)}, "out must hold no two numbers in one place"),
    "drafts": ({"x": torch.randn(2, 2, 8)}, r"x must have at most S - W \+ 2 = 1 tokens"),
    "slots": ({"state_indices": torch.zeros(3, dtype=torch.int64)}, r"state_indices must be \[2\] int32 or int64"),
    "out": ({"out": torch.zeros(2, 7)}, "out must have the shape of x"),
    "out's dtype": ({"out": torch.zeros(2, 8, dtype=torch.float16)}, "out must have the dtype of x"),
    "gradient": ({"weight": torch.randn(8, 4, requires_grad=True)}, "weight must not require a gradient"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors(name: str):
    given, message = REFUSED[name]
    call = {"x": torch.randn(2, 8), "pool": torch.zeros(3, 8, 3), "weight": torch.randn(8, 4)} | given
    with pytest.raises(ValueError, match=f"^conv1d_update: {message}"):
        serving.conv1d_update(**call)


def test_checked_refuses_repeated_slots():
    call = {"x": torch.randn(2, 8), "pool": torch.zeros(3, 8, 3), "weight": torch.randn(8, 4)}
    with wyfold.checked(), pytest.raises(ValueError, match="conv1d_update: state_indices must hold distinct slots"):
        serving.conv1d_update(**call, state_indices=torch.tensor([1, 1]))


def test_explain(backend: str, device: torch.device):
    a = drawn(device, 3, turned=False)
    for op, launches in ((serving.conv1d_update, ["conv_pool"]), (serving.conv1d_prefill, ["state_pool", "conv"])):
        plan = wyfold.explain(op, a["x"][:, :1], a["pool"], a["weight"], backend=backend)
        assert sorted(launch.split(" ")[0] for launch in plan.forward) == sorted(launches)
