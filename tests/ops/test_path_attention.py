"""PaTH attention against the token loop, and what the operator promises bit for bit."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import wyfold
from wyfold import PathKeys, UnsupportedError, reference
from wyfold.autograd import path_kernels
from wyfold.kernels import table
from wyfold.kernels.path_records import CHUNK
from wyfold.reference import inputs
from wyfold.reference.shapes import EVERY_LENGTH, PACKINGS
from wyfold.runtime.kernel_configs import LaunchKey, hardware_limit

op = wyfold.parallel_path_attn

GATES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "none": lambda x: None,
    "0": torch.zeros_like,
    "slow": lambda x: -1e-3 * x,
    "fast": lambda x: -5 * x,
    "-80": lambda x: torch.full_like(x, -80),
    "-inf": lambda x: torch.full_like(x, -torch.inf),
    "some -inf": lambda x: torch.where(x < 0.2, -torch.inf, -x),
    "mixed": lambda x: x.new_tensor([0, -1e-3, -5, -80, -torch.inf])[(5 * x).int().clamp(max=4)],
}


def drawn(T: int, H=1, HQ=2, K=8, V=16, gate="slow", B=1, dtype=torch.float64, seed=0) -> dict[str, Tensor]:
    """Arguments of a call; beta in [0, 2]."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(B, T, *size, generator=generator, dtype=torch.float64)

    found = {"q": normal(HQ, K), "k": normal(H, K), "v": normal(H, V)}
    found = {name: x.to(dtype) for name, x in found.items()}
    wide = torch.promote_types(dtype, torch.float32)
    found["w"] = torch.nn.functional.normalize(normal(H, K), dim=-1).to(wide)
    found["beta"] = 2 * torch.special.ndtr(normal(H)).to(wide)
    g = GATES[gate](torch.special.ndtr(normal(HQ)).to(wide))
    return found if g is None else found | {"g": g}


def measured(
    function: Callable[..., Any], a: dict[str, Tensor], keys: bool = False, **options: Any
) -> dict[str, Tensor]:
    """o, k_cache with `keys`, and the gradients of all arguments."""
    leaves = {name: x.detach().requires_grad_() for name, x in a.items()}
    o, cached = function(**leaves, use_cache=keys, **options)
    results = {"o": o} | ({"k_cache": cached} if keys else {})
    fed = {name: inputs.incoming(x.detach(), seed) for seed, (name, x) in enumerate(results.items())}
    into = [name for name, x in results.items() if x.requires_grad]  # not the loop's over no sequence
    gradients = [torch.zeros_like(x) for x in leaves.values()]
    if into:
        outputs, incoming = ([of[name] for name in into] for of in (results, fed))
        gradients = torch.autograd.grad(outputs, list(leaves.values()), incoming, materialize_grads=True)
    found = results | {f"d{name}": dx for name, dx in zip(leaves, gradients, strict=True)}
    return {name: x.detach() for name, x in found.items()}


def check(bounds, got: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    for name, x in truth.items():
        (bounds.gradient if name.startswith("d") else bounds.output)(name, got[name], x)


# --- against the token loop ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", GATES)
def test_every_length(gate: str, float64_bounds):
    """Every third length with one of the gates, and with every gate those around a chunk and a block."""
    offset = list(GATES).index(gate)
    for T in sorted({*EVERY_LENGTH[3 * offset :: 3 * len(GATES)], 1, 64, 65, 129}):
        a = drawn(T, gate=gate, seed=T)
        check(float64_bounds, measured(op, a, keys=True), measured(reference.path_attention, a, keys=True))


@pytest.mark.release
@pytest.mark.parametrize("gate", GATES)
def test_every_length_with_every_gate(gate: str, float64_bounds):
    for T in EVERY_LENGTH:
        a = drawn(T, gate=gate, seed=T)
        check(float64_bounds, measured(op, a, keys=True), measured(reference.path_attention, a, keys=True))


@pytest.mark.parametrize("gate", ["none", "slow", "some -inf"])
@pytest.mark.parametrize(("H", "HQ", "K", "V"), [(2, 2, 16, 8), (2, 6, 8, 24), (1, 4, 40, 8)])
def test_heads_and_widths(H: int, HQ: int, K: int, V: int, gate: str, float64_bounds):
    a = drawn(70, H, HQ, K, V, gate, B=2)
    for options in ({}, {"scale": 0.3, "gate_scaled": False}):
        truth = measured(reference.path_attention, a, **options)
        check(float64_bounds, measured(op, a, **options), truth)


@pytest.mark.parametrize("gate", ["none", "slow", "some -inf"])
def test_blocks_beyond_blocks(gate: str, float64_bounds):
    """Rows that pass the map of a whole block on their way to another."""
    a = drawn(4 * CHUNK + 70, gate=gate)
    check(float64_bounds, measured(op, a, keys=True), measured(reference.path_attention, a, keys=True))


@pytest.mark.parametrize("name", PACKINGS)
def test_packed(name: str, float64_bounds):
    packing = PACKINGS[name]
    a, cu = drawn(packing.tokens, 2, 4, gate="mixed"), torch.tensor(packing.cu_seqlens)
    for x in a.values():
        x[:, packing.cu_seqlens[-1] :] = torch.nan
    got, truth = (measured(f, a, keys=True, cu_seqlens=cu) for f in (op, reference.path_attention))
    check(float64_bounds, got, truth)
    assert not any(x[:, packing.cu_seqlens[-1] :].any() for x in got.values())
    layout = wyfold.SequenceLayout(cu, packing.tokens)
    assert all(torch.equal(got[name], x) for name, x in measured(op, a, keys=True, cu_seqlens=layout).items())


def test_without_reflections_it_is_softmax_attention(float64_bounds):
    a = drawn(150, 2, 4, gate="none")
    a["beta"] *= 0
    q, k, v = (a[name].transpose(1, 2) for name in "qkv")
    truth = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    float64_bounds.output("o", op(**a)[0], truth.transpose(1, 2))


def test_two_equal_reflections_cancel(float64_bounds):
    """Strength 2, each direction twice in a row: every second query sees the keys as they were written."""
    a = drawn(60, gate="none")
    a["beta"][:] = 2
    a["w"] = a["w"][:, ::2].repeat_interleave(2, dim=1)
    a["k"][:, ::2], a["v"][:, ::2] = 0, 0  # written between the two
    plain = op(**a | {"beta": torch.zeros_like(a["beta"])})[0]
    float64_bounds.output("o", op(**a)[0][:, 1::2], plain[:, 1::2])


# --- bit for bit -----------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_equals_separate(dtype: torch.dtype, threads: int):
    lengths = [65, 0, 1, 200, 64]
    a = drawn(sum(lengths), 2, 4, 16, 8, dtype=dtype)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    together = measured(op, a, cu_seqlens=cu)
    for start, stop in pairwise(cu.tolist()):
        alone = {name: x[:, start:stop] for name, x in a.items()}
        leaves = {name: x.detach().requires_grad_() for name, x in alone.items()}
        o, _ = op(**leaves)
        fed = inputs.incoming(together["o"], 0)[:, start:stop]
        gradients = torch.autograd.grad(o, list(leaves.values()), fed)
        assert torch.equal(o, together["o"][:, start:stop])
        for name, dx in zip(leaves, gradients, strict=True):
            assert torch.equal(dx, together[f"d{name}"][:, start:stop]), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_batch_is_its_rows(dtype: torch.dtype, threads: int):
    a = drawn(150, 2, 4, 16, 8, B=3, dtype=dtype)
    together = measured(op, a)
    for n in range(3):
        row = {name: x[n : n + 1] for name, x in a.items()}
        leaves = {name: x.detach().requires_grad_() for name, x in row.items()}
        o, _ = op(**leaves)
        gradients = torch.autograd.grad(o, list(leaves.values()), inputs.incoming(together["o"], 0)[n : n + 1])
        assert torch.equal(o, together["o"][n : n + 1])
        for name, dx in zip(leaves, gradients, strict=True):
            assert torch.equal(dx, together[f"d{name}"][n : n + 1]), name


@pytest.mark.parametrize("t", [1, 63, 64, 130, 199])
@pytest.mark.parametrize("gate", ["none", "slow", "some -inf"])
def test_nothing_after_t_reaches_t(gate: str, t: int):
    a, other = (drawn(200, gate=gate, seed=seed, dtype=torch.float32) for seed in (0, 1))
    later = {name: torch.cat([x[:, :t], other[name][:, t:]], 1) for name, x in a.items()}

    def of(arguments: dict[str, Tensor]) -> dict[str, Tensor]:
        leaves = {name: x.detach().requires_grad_() for name, x in arguments.items()}
        o, _ = op(**leaves)
        fed = inputs.incoming(o.detach())
        fed[:, t:] = 0  # a loss on the first t tokens
        return {"o": o.detach()} | dict(zip(leaves, torch.autograd.grad(o, list(leaves.values()), fed), strict=True))

    truth, got = of(a), of(later)
    assert all(torch.equal(got[name][:, :t], x[:, :t]) for name, x in truth.items())
    assert not any(got[name][:, t:].any() for name in a)
    assert torch.equal(op(**{name: x[:, :t] for name, x in a.items()})[0], truth["o"][:, :t])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_and_repeats(dtype: torch.dtype):
    a = drawn(100, 2, 4, dtype=dtype)
    truth = measured(op, a, keys=True)
    strided = {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in a.items()}
    strided["q"] = torch.stack([a["q"]] * 2, -1)[..., 0]
    for arguments in (a, strided):
        got = measured(op, arguments, keys=True)
        assert all(torch.equal(got[name], x) for name, x in truth.items())


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool):
    a = drawn(100, 2, 4, dtype=torch.float32)
    truth = measured(op, a)
    leaves = {name: x.detach().requires_grad_() for name, x in a.items()}
    o = checkpoint(lambda *x: op(*x)[0], *leaves.values(), use_reentrant=reentrant)
    o.backward(inputs.incoming(o.detach()))
    assert torch.equal(o, truth["o"])
    assert all(torch.equal(x.grad, truth[f"d{name}"]) for name, x in leaves.items())


def test_autocast_casts_q_k_and_v_and_nothing_else():
    a = drawn(100, 2, 4, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = measured(op, a, keys=True)
    narrow = {name: x.bfloat16() if name in "qkv" else x for name, x in a.items()}
    assert got["o"].dtype == torch.bfloat16
    for name, x in measured(op, narrow, keys=True).items():
        assert torch.equal(got[name], x.to(got[name].dtype)), name


@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.release), True], ids=["dense", "packed"])
def test_compiles_to_one_graph(packed: bool):
    torch._dynamo.reset()
    a = drawn(100, 2, 4, dtype=torch.float32)
    options = {"cu_seqlens": torch.tensor([0, 33, 33, 34, 96])} if packed else {}
    got, truth = (measured(f, a, **options) for f in (torch.compile(op, backend="aot_eager", fullgraph=True), op))
    assert all(torch.equal(got[name], x) for name, x in truth.items())


def test_a_gradient_has_its_arguments_dtype():
    got = measured(op, drawn(40, 2, 4, dtype=torch.bfloat16), keys=True)
    narrow = {"o", "k_cache", "dq", "dk", "dv"}
    assert {name for name, x in got.items() if x.dtype == torch.bfloat16} == narrow
    assert all(got[name].dtype == torch.float32 for name in got.keys() - narrow)


# --- continuation ----------------------------------------------------------------------------------------------------


def continued(a: dict[str, Tensor], cuts: list[int], repeated: int = 0) -> tuple[Tensor, Tensor]:
    """Outputs and last keys of calls for the tokens between cuts.

    Args:
        a: Arguments of one call.
        cuts: First token of each call but the first.
        repeated: Tokens before each call whose keys it gets as they were written, with their w and beta.
    """
    outputs, T, previous, keys, done = [], a["k"].shape[1], 0, a["k"][:, :0], 0
    for stop in [*cuts, T]:
        at = max(0, previous - repeated)
        if at < done:  # the cache is already past these tokens
            at = done
        past = PathKeys(keys, a["v"][:, :at], a["g"][:, :at] if "g" in a else None, torch.full((a["k"].shape[0],), at))
        tokens = {name: x[:, previous if name == "q" else at : stop] for name, x in a.items()}
        o, found = op(**tokens, past=past, use_cache=True)
        outputs.append(o)
        if stop - at > repeated:
            keys, done = found, stop
        previous = stop
    return torch.cat(outputs, 1), found


@pytest.mark.parametrize("gate", ["none", "slow", "some -inf"])
@pytest.mark.parametrize(("cuts", "repeated"), [([90], 0), ([1, 2, 40, 140], 0), ([*range(60, 75)], 5), ([0, 3, 3], 4)])
def test_calls_continue_earlier_ones(cuts: list[int], repeated: int, gate: str, float64_bounds):
    a = drawn(150, 2, 4, gate=gate, B=2)
    truth, keys = op(**a, use_cache=True)
    o, found = continued(a, cuts, repeated)
    float64_bounds.output("o", o, truth)
    float64_bounds.output("k_cache", found, keys)


@pytest.mark.parametrize("gate", ["none", "slow"])
def test_gradients_pass_through_the_keys(gate: str, float64_bounds):
    a = drawn(150, 2, 4, gate=gate)
    found = []
    for run in (lambda **x: continued(x, [90, 91]), lambda **x: op(**x, use_cache=True)):
        leaves = {name: x.detach().requires_grad_() for name, x in a.items()}
        results = run(**leaves)
        fed = [inputs.incoming(x.detach(), seed) for seed, x in enumerate(results)]
        found.append(dict(zip(leaves, torch.autograd.grad(results, list(leaves.values()), fed), strict=True)))
    for name, truth in found[1].items():
        float64_bounds.gradient(f"d{name}", found[0][name], truth)


def test_sequences_may_have_different_numbers_of_keys(float64_bounds):
    counts = [0, 1, 70, 33]
    a = drawn(75, 2, 4, gate="slow", B=4)
    keys, values, gates = (torch.full_like(a[name][:, :70], torch.nan) for name in ("k", "v", "g"))
    truth, last = [], {name: x[:, :5].clone() for name, x in a.items()}
    for n, count in enumerate(counts):
        row = {name: x[n : n + 1, : count + 5] for name, x in a.items()}
        truth.append(op(**row)[0][:, count:])
        for name, x in row.items():
            last[name][n] = x[0, count:]
        if count:
            keys[n, -count:] = op(**{name: x[:, :count] for name, x in row.items()}, use_cache=True)[1]
            values[n, -count:], gates[n, -count:] = row["v"][0, :count], row["g"][0, :count]
    # Rows without a key still hold NaN: they are never read.
    leaves = [x.requires_grad_() for x in (*last.values(), keys, values, gates)]
    earlier = PathKeys(keys, values, gates, torch.tensor(counts, dtype=torch.int32))
    o, found = op(**last, past=earlier, use_cache=True)
    float64_bounds.output("o", o, torch.cat(truth))
    gradients = torch.autograd.grad([o, found], leaves, [torch.ones_like(o), torch.ones_like(found)])
    assert all(dx.isfinite().all() for dx in gradients)
    missing = torch.arange(70) < 70 - torch.tensor(counts)[:, None]
    assert all(not dx[missing].any() for dx in gradients[-3:])


# --- refusals --------------------------------------------------------------------------------------------------------


def past(N=1, S=3, H=1, HQ=2, K=8, V=16) -> PathKeys:
    return PathKeys(
        torch.zeros(N, S, H, K), torch.zeros(N, S, H, V), torch.zeros(N, S, HQ), torch.full((N,), S, dtype=torch.int64)
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(1, 5, 3, 8)}, ValueError, r"g must be \[B, T, HQ\] = \[1, 5, 3\], got \[1, 5, 2\]"),
        ({"k": torch.zeros(1, 5, 4, 8)}, ValueError, r"v must be \[B, T, H, V\] = \[1, 5, 4, V\], got"),
        ({"q": torch.zeros(1, 4, 2, 8)}, ValueError, r"k must be \[B, T, H, K\] = \[1, 4, H, 8\], got"),
        ({"v": torch.zeros(1, 5, 1, 12)}, ValueError, "v must have width V a multiple of 8 from 8 to 128, got 12"),
        ({"v": torch.zeros(1, 5, 1, 136)}, ValueError, "v must have width V a multiple of 8 from 8 to 128, got 136"),
        ({"v": torch.zeros(1, 5, 1, 16).bfloat16()}, ValueError, "v must have the dtype of q, float32, got bfloat16"),
        ({"beta": torch.ones(1, 5, 1, dtype=torch.int64)}, ValueError, "beta must be float32, .*, got int64"),
        ({"w": None}, TypeError, "w must be a torch.Tensor, got NoneType"),
        ({"scale": 0.0}, ValueError, "scale must be above 0, got 0.0"),
        ({"scale": "1"}, TypeError, "scale must be a number, got str"),
        ({"gate_scaled": 1}, TypeError, "gate_scaled must be True or False, got 1"),
        ({"use_cache": None}, TypeError, "use_cache must be True or False, got None"),
        ({"cu_seqlens": torch.tensor([0, 6])}, ValueError, "cu_seqlens must end at most at T = 5, got 6"),
        ({"past": (1, 2)}, TypeError, "past must be a PathKeys or None, got tuple"),
        ({"past": past(), "cu_seqlens": torch.tensor([0, 5])}, ValueError, "past must come without cu_seqlens"),
        ({"past": past(N=2)}, ValueError, r"past.keys must be \[N, S, H, K\] = \[1, S, 1, 8\], got \[2, 3, 1, 8\]"),
        ({"past": past()._replace(gates=None)}, ValueError, "past.gates must be given if g is, .*, got None"),
        (
            {"past": past()._replace(counts=torch.ones(1))},
            ValueError,
            "past.counts must be int32 or int64, got float32",
        ),
        ({"past": past()._replace(counts=torch.tensor([4]))}, ValueError, r"past.counts must be .* S = 3, got \[4\]"),
        ({"past": past()._replace(counts=torch.tensor([-1]))}, ValueError, r"past.counts must be .*, got \[-1\]"),
        (
            {"past": past(), "q": torch.zeros(1, 6, 2, 8)},
            ValueError,
            "q must have at most the T = 5 tokens of k, got 6",
        ),
    ],
)
def test_errors_name_the_argument(change: dict[str, Any], error: type[Exception], message: str):
    a = drawn(5, dtype=torch.float32)
    with pytest.raises(error, match=f"^parallel_path_attn: {message}"):
        op(**a | change)


def test_query_heads_are_a_multiple_of_the_key_heads():
    a = drawn(5, H=2, HQ=2, gate="none", dtype=torch.float32)
    with pytest.raises(
        ValueError, match=r"^parallel_path_attn: q must have a multiple of the 2 heads of k, v, w and beta"
    ):
        op(**a | {"q": torch.zeros(1, 5, 3, 8)})


def test_a_positive_gate_is_refused_inside_checked():
    a = drawn(5)
    with wyfold.checked(), pytest.raises(ValueError, match="parallel_path_attn: g must be <= 0"):
        op(**a | {"g": -a["g"]})


@pytest.mark.parametrize(
    ("H", "tokens", "group", "count"), [(32, 8192, 1, 8), (32, 32768, 1, 1), (4, 100, 1, 4), (8, 8192, 16, 1)]
)
def test_heads_of_which_a_backward_holds_workspaces(H: int, tokens: int, group: int, count: int):
    assert path_kernels._heads_at_once(H, tokens, group) == count


def test_widths_that_fit_no_gpu_are_named(monkeypatch: pytest.MonkeyPatch):
    """To the table of kernels that exceed a GPU, by their keys."""
    noted, usual = [], table.plan
    monkeypatch.setattr(
        table, "plan", lambda *args, **options: noted.append(options["sizes"]) or usual(*args, **options)
    )
    op(**drawn(5, dtype=torch.float32, K=128))
    ((stage, words),) = noted[0]
    key = LaunchKey.parse(words)
    for architecture in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120"):
        assert "in float32 at K above 64" in hardware_limit(architecture, f"{stage}.triton", key)
    assert "tensor memory than there is in float32" in hardware_limit("sm_100", f"{stage}.triton", key._replace(K=16))
    half = key._replace(dtype="fp16")
    assert "in float16 at K above 64" in hardware_limit("sm_89", f"{stage}.triton", half)
    assert not hardware_limit("sm_90", f"{stage}.triton", half)
    assert not hardware_limit("sm_89", f"{stage}.triton", half._replace(K=64))


def test_no_kernel_passes_gradients_through_keys(monkeypatch: pytest.MonkeyPatch):
    a = drawn(5, dtype=torch.float32)
    plan = wyfold.explain(op, **a)
    assert plan.backend == "eager" and {*plan.backward} == {*plan.forward}
    assert plan.forward == (
        "path_blocks (wyfold.kernels.path_blocks.eager)", "path_attention (wyfold.kernels.path_attention.eager)"
    )  # fmt: skip
    a["w"].requires_grad_()
    monkeypatch.setattr(table, "_device_refusal", lambda device, backend: "")  # as if kernels could run here
    with pytest.raises(UnsupportedError) as refused:
        op(**a, use_cache=True, backend="triton")
    assert "has no kernel for this operator in this version (step path_cache_bwd)" in refused.value.reasons["triton"]
    assert 'backend="eager" serves it' in refused.value.reasons["triton"]
