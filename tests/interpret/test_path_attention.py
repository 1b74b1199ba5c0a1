"""PaTH attention on kernels: against the token loop, and bit for bit where promised. Blocks have two chunks here."""

from itertools import pairwise

import pytest
import torch

import wyfold
from wyfold import PathKeys, UnsupportedError, reference
from wyfold.autograd import path_kernels
from wyfold.autograd.path_records import PathOptions, PathTensors
from wyfold.kernels import table, verdicts
from wyfold.kernels.path_widths import key_width
from wyfold.ops import path_attention
from wyfold.reference import error, inputs
from wyfold.reference.targets import target

op = wyfold.parallel_path_attn
backward = table.kernel_module("path_attention", "triton").backward


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Blocks of two chunks, so that short sequences pass several."""
    monkeypatch.setattr(table.kernel_module("path_blocks", "triton"), "BLOCK", 2)


def drawn(T: int, device, *, gate="some -inf", K=16, V=24, B=1, dtype=torch.float32, seed=0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(B, T, *size, generator=generator)

    found = {"q": normal(2, K).to(dtype), "k": normal(1, K).to(dtype), "v": normal(1, V).to(dtype)}
    found["w"] = torch.nn.functional.normalize(normal(1, K), dim=-1)
    found["beta"] = 2 * torch.sigmoid(normal(1))
    x = torch.special.ndtr(normal(2))
    if gate != "none":
        found["g"] = {"slow": -1e-2 * x, "some -inf": torch.where(x < 0.02, -torch.inf, -x)}[gate]
    return {name: x.to(device) for name, x in found.items()}


def truth_of(a: dict[str, torch.Tensor], **options):
    wide = {name: x.cpu().double() for name, x in a.items()}
    return reference.path_attention(**wide, use_cache=True, **options)


def close(name: str, got: torch.Tensor, truth: torch.Tensor, yardstick: torch.Tensor) -> None:
    """Judge a float32 result. Keys that reflections nearly cancel have no limit of their rows."""
    allowed = yardstick.cpu() if name == "o" else None
    error.require(error.judge(got.cpu(), truth, allowed, name=name, target=target("o", got.dtype)))


@pytest.mark.parametrize("gate", ["none", "some -inf"])
def test_dense_calls_are_the_token_loop(gate: str, device):
    a = drawn(202, device, gate=gate)
    got, eager, truth = op(**a, use_cache=True, backend="triton"), op(**a, use_cache=True, backend="eager"), truth_of(a)
    for name, *tensors in zip(("o", "k_cache"), got, truth, eager, strict=True):
        close(name, *tensors)


def test_packed_sequences_are_those_of_single_calls(device):
    lengths, spare = [65, 0, 1, 200, 64], 7
    a = drawn(sum(lengths) + spare, device, gate="slow")
    for x in a.values():
        x[:, sum(lengths) :] = torch.nan
    cu = torch.tensor([0, *lengths], device=device).cumsum(0)
    o, keys = op(**a, cu_seqlens=cu, use_cache=True, backend="triton")
    assert not o[:, sum(lengths) :].any() and not keys[:, sum(lengths) :].any()
    for start, stop in pairwise(cu.tolist()):
        alone = {name: x[:, start:stop].clone() for name, x in a.items()}
        for got, part in zip((o, keys), op(**alone, use_cache=True, backend="triton"), strict=True):
            assert torch.equal(got[:, start:stop], part)


def test_the_past_strides_and_repeats_change_no_bit(device):
    a = drawn(200, device, gate="slow", B=2)
    truth, keys = op(**a, use_cache=True, backend="triton")
    strided = {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in a.items()}
    shifted = {name: x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x) for name, x in a.items()}
    for other in (strided, shifted):
        again = op(**other, use_cache=True, backend="triton")
        assert torch.equal(again[0], truth) and torch.equal(again[1], keys)
    assert torch.equal(op(**{name: x[:, :130] for name, x in a.items()}, backend="triton")[0], truth[:, :130])
    assert torch.equal(op(**{name: x[1:] for name, x in a.items()}, backend="triton")[0], truth[1:])


@pytest.mark.parametrize("gate", ["none", "some -inf"])
def test_continuation(gate: str, device):
    """Rows with different numbers of earlier keys; of the next call's tokens, only the last have queries."""
    counts, T, skipped = [0, 100, 33], 70, 66
    a = drawn(100 + T, device, gate=gate, B=3)
    keys, values = (torch.full_like(a[name][:, :100], torch.nan) for name in ("k", "v"))
    gates = torch.full_like(a["g"][:, :100], torch.nan) if "g" in a else None
    last = {name: torch.empty_like(x[:, :T]) for name, x in a.items()}
    truths, caches = [], []
    for n, count in enumerate(counts):
        row = {name: x[n : n + 1, : count + T] for name, x in a.items()}
        truth, cache = truth_of(row)
        truths.append(truth[:, count + skipped :])
        caches.append(cache)
        for name, x in row.items():
            last[name][n] = x[0, count:]
        if count:
            keys[n, 100 - count :] = truth_of({name: x[:, :count] for name, x in row.items()})[1][0].to(keys)
            values[n, 100 - count :] = row["v"][0, :count]
            if gates is not None:
                gates[n, 100 - count :] = row["g"][0, :count]
    past = PathKeys(keys, values, gates, torch.tensor(counts, device=device))
    last["q"] = last["q"][:, skipped:]
    got, eager = (op(**last, past=past, use_cache=True, backend=name) for name in ("triton", "eager"))
    close("o", got[0], torch.cat(truths), eager[0])
    for n, count in enumerate(counts):
        assert not got[1][n, : 100 - count].any()
        close("k_cache", got[1][n : n + 1, 100 - count :], caches[n], eager[1][n : n + 1, 100 - count :])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.release_if_interpreted)], ids=str
)
def test_16_bits(dtype: torch.dtype, packed: bool, device):
    """The self-check's comparison: the error is that of half an ulp on the inputs."""
    a = {name: x.requires_grad_(packed) for name, x in drawn(16, device, gate="slow", dtype=dtype).items()}
    cu = torch.tensor([0, 16], device=device) if packed else None
    tensors = PathTensors(*a.values(), None, None, None, None, cu)
    checked = path_attention._trial(tensors, PathOptions(0.25, 0.25, not packed, "triton"))
    found = verdicts.verdicts(checked._replace(tokens=300, sequences=2), device)
    assert [verdict.name for verdict in found] == ["o", *(f"d{name}" for name in a)] if packed else ["o", "keys"]
    error.require(*found)


def test_keys_of_narrow_heads_pass_their_check_in_every_draw(device):
    """Strengths between 0 and 1 would shorten keys of 8 numbers to less than their rounding, and fail the check."""
    a = drawn(16, device, K=8, dtype=torch.bfloat16)
    checked = path_attention._trial(
        PathTensors(*a.values(), None, None, None, None, None), PathOptions(0.25, 0.25, True, "triton")
    )
    for draw in range(3):
        error.require(*verdicts._verdicts(checked._replace(tokens=400, draw=draw), device))


def test_heads_in_groups_and_grouped_queries_change_no_bit(device, monkeypatch):
    """Heads and queries are computed in the backward a few at a time. Two query heads read one key head of three."""
    generator = torch.Generator().manual_seed(3)
    q, do = (torch.randn(1, 200, 6, 16, generator=generator).to(device) for _ in range(2))
    k, v, w = (torch.randn(1, 200, 3, 16, generator=generator).to(device) for _ in range(3))
    beta, g = torch.rand(1, 200, 3, generator=generator), -torch.rand(1, 200, 6, generator=generator)
    a = [q, k, v, torch.nn.functional.normalize(w, dim=-1), beta.to(device), g.to(device)]

    def gradients() -> tuple[torch.Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in a]
        return torch.autograd.grad(op(*leaves, backend="triton")[0], leaves, do)

    whole = gradients()
    monkeypatch.setattr(path_kernels, "TOKENS_AT_ONCE", 1)
    few_lanes(monkeypatch)
    assert all(map(torch.equal, gradients(), whole))


def test_a_call_without_tokens(device):
    a = drawn(5, device, gate="slow")
    empty = {name: x[:, :0] for name, x in a.items()}
    assert op(**empty, backend="triton")[0].shape == (1, 0, 2, 24)
    past = PathKeys(a["k"], a["v"], a["g"], torch.tensor([5], device=device))
    assert torch.equal(op(**empty, past=past, use_cache=True, backend="triton")[1], a["k"])


def test_gradients_through_keys_are_refused_with_a_remedy(device):
    a = drawn(5, device)
    a["q"].requires_grad_()
    with pytest.raises(UnsupportedError) as refused:
        op(**a, use_cache=True, backend="triton")
    reason = refused.value.reasons["triton"]
    assert "has no kernel for this operator in this version (step path_cache_bwd)" in reason
    assert 'backend="eager" serves it' in reason


def gradients_of(backend: str, a: dict[str, torch.Tensor], cu: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Gradients of a loss that weighs each output by a fixed number; "truth" is the token loop in float64."""
    dtype = torch.float64 if backend == "truth" else None
    leaves = {key: x.to(dtype or x.dtype).detach().requires_grad_() for key, x in a.items()}
    if backend == "truth":
        leaves = {key: x.cpu().detach().requires_grad_() for key, x in leaves.items()}
        o, _ = reference.path_attention(**leaves, cu_seqlens=None if cu is None else cu.cpu())
    else:
        o, _ = op(**leaves, cu_seqlens=cu, backend=backend)
    fed = inputs.incoming(truth_of(a)[0]).to(o)
    return {key: x.cpu() for key, x in zip(leaves, torch.autograd.grad(o, list(leaves.values()), fed), strict=True)}


def few_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of two tiles."""
    monkeypatch.setattr(backward, "KEPT_TILES", 1)
    monkeypatch.setattr(backward, "LANES", 2)


@pytest.mark.parametrize("lengths", [None, [200, 0, 1, 459]], ids=["dense", "packed"])
def test_turns_with_a_part_of_the_blocks_change_no_bit(lengths: list[int] | None, device, monkeypatch):
    """Two chunks of queries and one or two blocks at a time, of five blocks in each row."""
    a = drawn(660, device, gate="slow", dtype=torch.bfloat16, B=1 if lengths else 2)
    cu = torch.tensor([0, *lengths], device=device).cumsum(0) if lengths else None
    leaves = [x.requires_grad_() for x in a.values()]
    do = torch.randn(a["v"].shape[0], 660, 2, 24, generator=torch.Generator().manual_seed(7)).to(device)

    def gradients() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(op(*leaves, cu_seqlens=cu, backend="triton")[0], leaves, do.bfloat16())

    whole, turns = gradients(), []
    few_lanes(monkeypatch)
    monkeypatch.setattr(backward, "RANGES", 3)
    made = backward._turns
    monkeypatch.setattr(backward, "_turns", lambda *sizes: turns.extend(made(*sizes)) or made(*sizes))
    assert all(map(torch.equal, gradients(), whole))
    assert len({begin for _, begin in turns}) > 2


@pytest.mark.parametrize(
    ("packed", "gate"),
    [
        pytest.param(False, "none", marks=pytest.mark.release_if_interpreted),
        (False, "some -inf"),
        (True, "none"),
        pytest.param(True, "some -inf", marks=pytest.mark.release_if_interpreted),
    ],
)
def test_gradients_are_those_of_the_token_loop(gate: str, packed: bool, device, monkeypatch):
    few_lanes(monkeypatch)
    a = drawn(330, device, gate=gate, seed=1)
    cu = torch.tensor([0, 1, 1, 329], device=device) if packed else None
    found, eager, truth = (gradients_of(name, a, cu) for name in ("triton", "eager", "truth"))
    limit = target("dq", torch.float32)
    for key, x in truth.items():
        per_token = x.ndim == 3
        error.require(error.judge(found[key], x, eager[key], name=f"d{key}", target=limit, per_token=per_token))


@pytest.mark.parametrize(
    "seed",
    [
        0,
        pytest.param(2, marks=pytest.mark.release_if_interpreted),
        pytest.param(3, marks=pytest.mark.release_if_interpreted),
    ],
)
def test_gradients_of_queries_with_one_heavy_key(seed: int, device, monkeypatch):
    """Of a query with nearly all weight on one earlier key, gradients are small differences: <do, o> must agree with
    the gradients of the weights to their last bits."""
    few_lanes(monkeypatch)
    a = drawn(330, device, seed=seed)
    found, eager, truth = (gradients_of(name, a, None) for name in ("triton", "eager", "truth"))
    limit = target("dq", torch.float32)
    for key in "qk":
        error.require(error.judge(found[key], truth[key], eager[key], name=f"d{key}", target=limit))


def test_tiles_are_never_narrow():
    assert [key_width(width) for width in (8, 24, 64, 72)] == [64, 64, 64, 128]
