"""Serving: states in a pool, updated in place, on both backends.

A decoded token has the bits of the differentiable call, whose accuracy is tested elsewhere. All tolerances are zero.
"""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

import wyfold
from wyfold import serving
from wyfold.ops import serving_call
from wyfold.ops.delta_plan import best_chunk_size
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape
from wyfold.runtime import segment_rule

RULES = ("delta_rule", "gated_delta_rule", "kda")
TOKENS = ("q", "k", "v", "g", "beta")
Call = dict[str, Any]


# No gate is a scalar gate left out.
@pytest.fixture(params=[pytest.param("delta_rule", marks=pytest.mark.release_if_interpreted), *RULES[1:]])
def rule(request: pytest.FixtureRequest) -> str:
    return request.param


def drawn(
    rule: str, device: torch.device, backend: str, N: int = 4, T: int = 1, K: int = 16, V: int = 24, **more: Any
) -> Call:
    """Tokens and options of a call; norm, gate and sigmoid in the kernel unless drawn otherwise."""
    given = {"gate": None if rule == "delta_rule" else "model", "beta": "logits", "state": "none"} | more
    a = {"g": None} | inputs.draw("random", rule, Shape(N, T, 1, 2, K, V), **given)
    a |= {"use_qk_l2norm_in_kernel": True, "backend": backend}
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in a.items()}


def a_pool(
    device: torch.device, slots: int = 9, *, v_first: bool = False, dtype: torch.dtype = torch.float32
) -> Tensor:
    return torch.randn(slots, 2, *((24, 16) if v_first else (16, 24))).to(device, dtype)


def at(a: Call, tokens: slice) -> Call:
    return a | {name: a[name][:, tokens] for name in TOKENS if a[name] is not None}


def alone(rule: str, a: Call, state: Tensor | None, v_first: bool = False, **more: Any) -> tuple[Tensor, Tensor]:
    """The differentiable call of the same tokens."""
    op, call = getattr(wyfold, f"fused_recurrent_{rule}"), dict(a)
    if rule == "delta_rule":
        del call["g"]
    dtype = torch.float32 if state is None else state.dtype
    return op(
        **call, initial_state=state, output_final_state=True, state_v_first=v_first, state_dtype=dtype, **more
    )  # fmt: skip


def index(*numbers: int, device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(numbers, device=device, dtype=dtype)


@pytest.mark.parametrize("v_first", [False, True], ids=["K first", "V first"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_decode_is_the_recurrent_call_in_place(rule: str, stored: torch.dtype, v_first: bool, backend: str, device):
    """For every row, in any slot; other slots, here NaN, are unchanged."""
    a = drawn(rule, device, backend, dtype=torch.float16)
    before = a_pool(device, v_first=v_first, dtype=stored)
    before[5:] = torch.nan
    slots = index(3, 0, 4, 1, device=device)
    pool = before.clone()
    o = serving.decode(**a, pool=pool, state_indices=slots, state_v_first=v_first)
    expected, state = alone(rule, a, before[slots.long()], v_first)
    assert torch.equal(o, expected) and torch.equal(pool[slots.long()], state)
    assert torch.equal(pool[2], before[2]) and pool[5:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_heads_of_128_channels_in_bfloat16(rule: str, dtype: torch.dtype, backend: str, device):
    """They have a separate kernel for one token, with the bits of the recurrent call and of a draft."""
    a = drawn(rule, device, backend, N=5, K=128, V=128, dtype=dtype)
    before = torch.randn(7, 2, 128, 128).to(device, torch.bfloat16)
    before[5:] = torch.nan
    slots, pool, drafted = index(3, -1, 6, 0, 9, device=device), before.clone(), before.clone()
    there, to = index(1, 1, 0, 1, 1, device=device).bool(), index(3, 1, 5, -1, 2, device=device)
    where = {"state_indices": slots, "has_initial_state": there, "output_state_indices": to, "state_v_first": False}
    o = serving.decode(**a, pool=pool, **where)
    entering = before[[3, 0, 4, 0, 0]]
    entering[2] = 0
    expected, state = alone(rule, a, entering)
    live = [0, 2, 3]
    assert torch.equal(o[live], expected[live]) and not o[[1, 4]].any()
    assert torch.equal(pool[[3, 5]], state[[0, 2]]) and torch.equal(pool[[0, 1, 2, 4]], before[[0, 1, 2, 4]])
    assert pool[6].isnan().all()
    pool = before.clone()
    o = serving.decode(**a, pool=pool, state_indices=slots, state_v_first=False)
    draft = serving.verify(**a, pool=drafted, state_indices=slots[:, None], state_v_first=False)
    assert torch.equal(o.nan_to_num(7), draft.nan_to_num(7))
    assert torch.equal(pool.nan_to_num(7), drafted.nan_to_num(7)) and torch.equal(pool[3], state[0])


OPTIONS: dict[str, tuple[Call, Call]] = {
    "ready-made": ({"gate": "weak", "beta": "sigmoid"}, {}),
    "no beta": ({"gate": "weak", "beta": "sigmoid"}, {"beta": None}),
    "raised gate": ({"gate": "any", "beta": "sigmoid"}, {"safe_gate": True, "lower_bound": -0.5}),
    "bounded gate": ({"gate": "model bounded"}, {}),
    "doubled": ({}, {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True, "scale": -0.3}),
    "not normalised": ({}, {"use_qk_l2norm_in_kernel": False}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_decode_takes_the_options_of_the_recurrent_call(name: str, backend: str, device):
    drawn_with, given = OPTIONS[name]
    a = drawn("kda", device, backend, **drawn_with) | given
    pool = a_pool(device)
    before = pool.clone()
    o = serving.decode(**a, pool=pool, state_v_first=False)
    expected, state = alone("kda", a, before[:4])
    assert torch.equal(o, expected) and torch.equal(pool[:4], state) and torch.equal(pool[4:], before[4:])


@pytest.mark.parametrize("name", OPTIONS)
def test_verify_and_prefill_take_the_same_options(name: str, backend: str, device):
    """With every gate, `verify` equals the recurrent form and `prefill` the chunk form."""
    drawn_with, given = OPTIONS[name]
    a = drawn("kda", device, backend, N=2, T=3, **drawn_with) | given
    before, columns = a_pool(device), torch.arange(6, device=device).view(2, 3)
    pool = before.clone()
    o = serving.verify(**a, pool=pool, state_indices=columns, state_v_first=False)
    expected, state = alone("kda", a, before[[0, 3]])
    assert torch.equal(o, expected) and torch.equal(pool[[2, 5]], state)
    pool = before.clone()
    o = serving.prefill(**a, pool=pool, state_v_first=False)
    expected, state = wyfold.chunk_kda(**a, initial_state=before[:2], output_final_state=True)
    assert torch.equal(o, expected) and torch.equal(pool[:2], state)


def test_a_checkpoint_that_is_not_reached_is_not_stored(backend: str, device):
    """Its row may hold any slot: there are as many rows as a full packing needs."""
    a, pool, between = drawn("gated_delta_rule", device, backend, N=1, T=130), a_pool(device), a_pool(device, 5)
    before = between.clone()
    serving.prefill(
        **a, pool=pool, cu_seqlens=torch.tensor([0, 63, 130], device=device), state_v_first=False, checkpoint_every=64,
        checkpoint_pool=between, checkpoint_indices=index(3, 1, device=device),
    )  # fmt: skip
    assert not torch.equal(between[3], before[3])
    assert torch.equal(between[[0, 1, 2, 4]], before[[0, 1, 2, 4]])


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_a_skipped_sequence_stores_no_checkpoint(packed: bool, backend: str, device):
    """The checkpoints of other sequences keep their rows."""
    a, pool, between = drawn("kda", device, backend, N=3, T=64), a_pool(device), a_pool(device, 5)
    call = {"state_v_first": False, "checkpoint_every": 64, "checkpoint_pool": between}
    where = index(4, 0, 2, device=device)
    if packed:
        a |= {name: a[name].reshape(1, -1, *a[name].shape[2:]) for name in TOKENS if a[name] is not None}
        call["cu_seqlens"] = torch.tensor([0, 64, 128, 192], device=device)
    else:
        where = where[:, None]
    before = between.clone()
    serving.prefill(**a, **call, pool=pool, state_indices=index(6, -1, 3, device=device), checkpoint_indices=where)
    assert torch.equal(between[[4, 2]], pool[[6, 3]]) and torch.equal(between[[0, 1, 3]], before[[0, 1, 3]])


def test_rows_and_slots_permuted(rule: str, backend: str, device):
    """Neither the order of rows nor the numbers of slots change a bit."""
    a, before = drawn(rule, device, backend), a_pool(device)
    slots, rows = index(7, 2, 0, 5, device=device).long(), torch.tensor([2, 0, 3, 1], device=device)
    first, second = before.clone(), before.flip(0).contiguous()
    o = serving.decode(**a, pool=first, state_indices=slots, state_v_first=False)
    mixed = a | {name: a[name][rows] for name in TOKENS if a[name] is not None}
    p = serving.decode(**mixed, pool=second, state_indices=(8 - slots)[rows], state_v_first=False)
    assert torch.equal(p, o[rows]) and torch.equal(second.flip(0), first)


@pytest.mark.parametrize("pad", [-1, 0])
def test_skipped_rows_read_and_write_nothing(pad: int, rule: str, backend: str, device):
    a, pool = drawn(rule, device, backend), a_pool(device)
    before = pool.clone()
    pool[[0, 8]] = torch.nan
    slots = index(pad, 4, 9, 6, device=device)
    out = torch.full_like(a["v"], torch.nan)
    o = serving.decode(**a, pool=pool, state_indices=slots, state_v_first=False, pad_slot_id=pad, out=out)
    assert o is out and not o[[0, 2]].any()
    expected, state = alone(
        rule, {n: x[[1, 3]] if n in TOKENS and x is not None else x for n, x in a.items()}, before[[4, 6]]
    )
    assert torch.equal(o[[1, 3]], expected) and torch.equal(pool[[4, 6]], state)
    assert pool[[0, 8]].isnan().all() and torch.equal(pool[[1, 2, 3, 5, 7]], before[[1, 2, 3, 5, 7]])


def test_new_sequences_and_output_slots(rule: str, backend: str, device):
    """A new sequence starts from zeros and ignores its slot; a state may be written to another slot or to none."""
    a, pool = drawn(rule, device, backend), a_pool(device)
    pool[1] = torch.nan
    before = pool.clone()
    slots, to = index(0, 1, 2, 3, device=device), index(6, 1, -1, 99, device=device)
    given = torch.tensor([True, False, True, False], device=device)
    o = serving.decode(
        **a, pool=pool, state_indices=slots, state_v_first=False, has_initial_state=given, output_state_indices=to
    )
    entering = torch.where(given.view(-1, 1, 1, 1), before[:4], 0)
    expected, state = alone(rule, a, entering)
    assert torch.equal(o, expected) and torch.equal(pool[[6, 1]], state[:2])
    untouched = [0, 2, 3, 4, 5, 7, 8]
    assert torch.equal(pool[untouched], before[untouched])


def test_one_row_of_tokens_and_strided_tokens(rule: str, backend: str, device):
    """[1, N, ..] means [N, 1, ..]; views of a projection and strided slots are read with their strides."""
    a, before = drawn(rule, device, backend), a_pool(device)
    pool = before.clone()
    o = serving.decode(**a, pool=pool, state_v_first=False)
    turned = a | {name: a[name].transpose(0, 1).contiguous() for name in TOKENS if a[name] is not None}
    second = before.clone()
    p = serving.decode(**turned, pool=second, state_v_first=False)
    assert p.shape == (1, 4, 2, 24) and torch.equal(p[0], o[:, 0]) and torch.equal(second, pool)
    room = torch.full((9, 3, 2, 16, 24), torch.nan, device=device)
    apart = room[:, 1].copy_(before)
    assert torch.equal(serving.decode(**turned, pool=apart, state_v_first=False, out=torch.empty_like(p)), p)
    assert torch.equal(apart, pool) and room[:, ::2].isnan().all()


@pytest.mark.parametrize("op", [serving.decode, serving.verify, serving.prefill])
def test_strided_slots_flags_and_counts(op: Any, backend: str, device):
    """Columns of a table are read with their strides."""
    a, before = drawn("gated_delta_rule", device, backend, N=3, T=1), a_pool(device, 12)
    flags = torch.tensor([True, False, True], device=device)
    slots = index(7, 2, 0, device=device)
    given: Call = {"has_initial_state": flags, "state_indices": slots, "output_state_indices": slots + 1}
    if op is serving.verify:
        given["state_indices"] = torch.arange(6, device=device).view(3, 2)
        given["output_state_indices"] = given["state_indices"] + 6
        given["num_accepted_tokens"] = index(2, 1, 1, device=device)
    apart = {name: torch.stack([x, torch.full_like(x, 1)], -1)[..., 0] for name, x in given.items()}
    assert not any(x.is_contiguous() for x in apart.values())
    first, second = before.clone(), before.clone()
    o = op(**a, pool=first, state_v_first=False, **given)
    assert torch.equal(op(**a, pool=second, state_v_first=False, **apart), o) and torch.equal(second, first)


@pytest.mark.parametrize("rule", RULES[1:])
@pytest.mark.parametrize("bound", [None, -3.0])
def test_decode_packed_is_decode_with_everything_inside(rule: str, bound: float | None, backend: str, device):
    a = drawn(rule, device, backend) | {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    mixed = torch.cat([a[name].flatten(1) for name in ("q", "k", "v")], 1)
    first, slots = a_pool(device), index(3, -1, 8, 0, device=device)
    second, third = first.clone(), first.clone()
    arguments = a | {"lower_bound": bound, "allow_neg_eigval": True, "state_v_first": False}
    o = serving.decode(**arguments, pool=first, state_indices=slots)
    raw = a["g"][:, 0], a["beta"][:, 0], a["A_log"], a["dt_bias"]
    flags = {"heads": (1, 2), "dims": (16, 24), "state_v_first": False, "lower_bound": bound, "allow_neg_eigval": True}
    p = serving.decode_packed(mixed, *raw, second, slots, backend=backend, **flags)
    assert torch.equal(p, o[:, 0]) and torch.equal(second, first)
    out = torch.empty_like(p)
    flat = raw[0].flatten(1), *raw[1:]
    assert serving.decode_packed(mixed, *flat, third, slots, backend=backend, out=out, **flags) is out
    assert torch.equal(out, o[:, 0]) and torch.equal(third, first)


def test_verify_keeps_the_state_after_every_token(rule: str, backend: str, device):
    """And continues after the accepted tokens: k of n drafts equal k steps."""
    T, a = 3, drawn(rule, device, backend, T=3)
    columns = index(*range(11, -1, -1), device=device).view(4, T)
    columns[2, 1], columns[3, 0] = -1, 40  # a state that is not stored, and a sequence that is skipped
    before = a_pool(device, 12)
    pool, steps = before.clone(), before.clone()
    o = serving.verify(**a, pool=pool, state_indices=columns, state_v_first=False)
    state = before[columns[:, 0].long().clamp(max=11)]
    for t in range(T):
        expected, state = alone(rule, at(a, slice(t, t + 1)), state)
        assert torch.equal(o[:3, t : t + 1], expected[:3])
        for n in range(3):
            if columns[n, t] >= 0:
                steps[columns[n, t].item()] = state[n]
    assert torch.equal(pool, steps) and not o[3].any()
    for accepted in ((0, 1, 2, 3), (1, 3, 9, 2)):
        again, more = pool.clone(), drawn(rule, device, backend, T=2, seed=1)
        given = index(*accepted, device=device, dtype=torch.int64)
        o = serving.verify(**more, pool=again, state_indices=columns, num_accepted_tokens=given, state_v_first=False)
        starts = [columns[n, min(max(k - 1, 0), T - 1)].item() for n, k in enumerate(accepted)]
        live = [n for n, start in enumerate(starts) if 0 <= start < 12]
        cut = {name: x[live] if name in TOKENS and x is not None else x for name, x in more.items()}
        expected, state = alone(rule, cut, pool[[starts[n] for n in live]])
        assert torch.equal(o[live], expected)
        for n, x in zip(live, state):
            if columns[n, 1] >= 0:
                assert torch.equal(again[columns[n, 1].item()], x)
        assert not o[[n for n in range(4) if n not in live]].any()


def test_verify_of_packed_drafts(rule: str, backend: str, device):
    """Drafts of any lengths in one row; zero outputs past the last boundary; separate output slots."""
    lengths = (2, 0, 3, 1)
    a = drawn(rule, device, backend, N=1, T=8)
    for name in TOKENS:
        if a[name] is not None:
            a[name][:, 6:] = torch.nan
    before = a_pool(device, 24)
    pool = before.clone()
    columns = torch.arange(12, device=device).view(4, 3)
    cu = torch.tensor([0, 2, 2, 5, 6], device=device)
    o = serving.verify(
        **a, pool=pool, state_indices=columns, output_state_indices=columns + 12, cu_seqlens=cu, state_v_first=False
    )
    expected = before.clone()
    begin = 0
    for n, length in enumerate(lengths):
        state = before[3 * n][None]
        for t in range(length):
            y, state = alone(rule, at(a, slice(begin + t, begin + t + 1)), state)
            assert torch.equal(o[:, begin + t : begin + t + 1], y)
            expected[12 + 3 * n + t] = state[0]
        begin += length
    assert torch.equal(pool, expected) and not o[:, 6:].any()


@pytest.mark.parametrize("v_first", [False, True], ids=["K first", "V first"])
def test_prefill_is_the_chunk_call_in_place(rule: str, v_first: bool, backend: str, device):
    """Long, single-token and empty sequences; skipped, new, and with output slots; with checkpoints."""
    lengths, slots, to = (65, 1, 0, 20, 2), (3, 0, -1, 9, 5), (3, 7, 2, 1, 99)
    a = drawn(rule, device, backend, N=1, T=90)
    before, between = a_pool(device, v_first=v_first), a_pool(device, 5, v_first=v_first)
    given = torch.tensor([True, False, True, True, True], device=device)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], device=device)
    pool, checkpoints = before.clone(), between.clone()
    o = serving.prefill(
        **a, pool=pool, state_indices=index(*slots, device=device), output_state_indices=index(*to, device=device),
        has_initial_state=given, cu_seqlens=cu, state_v_first=v_first, checkpoint_every=64,
        checkpoint_pool=checkpoints, checkpoint_indices=index(2, device=device),
    )  # fmt: skip
    op, call = getattr(wyfold, f"chunk_{rule}"), dict(a)
    if rule == "delta_rule":
        del call["g"]
    entering = torch.stack([before[3], torch.zeros_like(before[0]), before[0], before[0], before[5]])
    expected, state, states = op(
        **call, initial_state=entering, output_final_state=True, cu_seqlens=cu, state_v_first=v_first,
        return_intermediate_states=True, checkpoint_every=64,
    )  # fmt: skip
    expected[:, 66:86] = 0  # the row without a slot
    assert torch.equal(o, expected)
    assert torch.equal(pool[[3, 7]], state[:2]) and torch.equal(checkpoints[2], states[0])
    untouched = [0, 1, 2, 4, 5, 6, 8]
    assert torch.equal(pool[untouched], before[untouched])
    assert torch.equal(checkpoints[[0, 1, 3, 4]], between[[0, 1, 3, 4]])


@pytest.mark.parametrize("v_first", [False, True], ids=["K first", "V first"])
def test_values_of_512_channels(rule: str, v_first: bool, backend: str, device):
    """A prompt and a token of heads as wide as those of fla's default layer."""
    a = drawn(rule, device, backend, N=1, T=21, K=8, V=512)
    before = torch.randn(3, 2, *((512, 8) if v_first else (8, 512))).to(device)
    pool, slots, where = before.clone(), index(2, device=device), {"state_v_first": v_first}
    op, call = getattr(wyfold, f"chunk_{rule}"), at(a, slice(20))
    if rule == "delta_rule":
        del call["g"]
    expected, state = op(**call, initial_state=before[2:], output_final_state=True, **where)
    assert torch.equal(serving.prefill(**at(a, slice(20)), pool=pool, state_indices=slots, **where), expected)
    assert torch.equal(pool[2:], state) and torch.equal(pool[:2], before[:2])
    token = at(a, slice(20, 21))
    expected, state = alone(rule, token, pool[2:].clone(), v_first)
    assert torch.equal(serving.decode(**token, pool=pool, state_indices=slots, **where), expected)
    assert torch.equal(pool[2:], state)
    if not v_first:
        with pytest.raises(ValueError, match="v must have width V a multiple of 8 from 8 to 512, got 520"):
            b = drawn(rule, device, backend, N=1, K=8, V=520)
            serving.decode(**b, pool=torch.zeros(3, 2, 8, 520, device=device), state_indices=slots, **where)


POOLS: dict[str, tuple[torch.dtype, bool, bool]] = {
    "K first": (torch.float32, False, False),
    "V first": (torch.float32, True, False),
    "bfloat16": (torch.bfloat16, True, False),
    "float16": (torch.float16, False, False),
    "slots apart": (torch.float32, False, True),
}


@pytest.mark.parametrize(
    "v_first",
    [pytest.param(False, id="K first", marks=pytest.mark.release_if_interpreted), pytest.param(True, id="V first")],
)
def test_prefill_in_segments_is_the_chunk_call_in_segments(rule: str, v_first: bool, backend: str, device):
    """Cut, single-token, empty and skipped sequences; new ones, and output slots."""
    C = best_chunk_size(torch.empty(1, 1, 1, 16, device=device), torch.empty(1, 1, 2, 24), channel_gate=rule == "kda")
    lengths, slots, to = (5 * C + 5, 1, 0, 4 * C + 6, 2), (3, 0, -1, 9, 5), (3, 7, 2, 1, 99)
    begin, end = lengths[0] + 1, sum(lengths[:4])
    # A strong gate would hide the cut.
    a = drawn(rule, device, backend, N=1, T=end + 4, gate=None if rule == "delta_rule" else "-1e-3")
    before, cu = a_pool(device, v_first=v_first), torch.tensor([0, *torch.tensor(lengths).cumsum(0)], device=device)
    given, pool = torch.tensor([True, False, True, True, True], device=device), before.clone()
    flags = {"cu_seqlens": cu, "state_v_first": v_first}
    call = {name: x for name, x in a.items() if name != "g" or rule != "delta_rule"}
    entering = torch.stack([before[3], torch.zeros_like(before[0]), before[0], before[0], before[5]])
    with segment_rule.forced(3):
        where = {"state_indices": index(*slots, device=device), "output_state_indices": index(*to, device=device)}
        where |= {"pool": pool, "has_initial_state": given}
        plan = wyfold.explain(serving.prefill, **a, **where, **flags)
        o = serving.prefill(**a, **where, **flags)
        op = getattr(wyfold, f"chunk_{rule}")
        expected, state = op(**call, initial_state=entering, output_final_state=True, **flags)
        whole, _ = op(**call, initial_state=entering, max_splits=1, **flags)
    stages = [launch.split(" ")[0] for launch in plan.forward]
    assert plan.segments == 3 and {"state_pool", "segment_summary", "segment_fold"} <= {*stages}
    expected[:, begin:end] = 0  # the row without a slot
    assert torch.equal(o, expected) and not torch.equal(o[:, :begin], whole[:, :begin])
    after = before.clone()
    after[[3, 7]] = state[:2]
    assert torch.equal(pool, after)


KINDS = (
    ("K first", False),
    ("V first", True),
    ("bfloat16", True),
    ("float16", False),
    ("slots apart", False),
    ("slots apart", True),
)


@pytest.mark.parametrize(
    "kind, packed, rule",
    [
        pytest.param(*kind, rule, marks=[pytest.mark.release_if_interpreted] if rule == "delta_rule" else [])
        for i, kind in enumerate(KINDS)
        for rule in RULES[i % 2 :: 2]
    ],
)
def test_prefill_finds_each_state_in_its_slot(kind: str, packed: bool, rule: str, backend: str, device):
    """Slots in any order, in place and separate; with rows without a slot, without tokens, without a state, and with a
    state that is not stored. Unused slots and tokens of skipped rows hold NaN."""
    stored, v_first, apart = POOLS[kind]
    lengths, slots, to = (33, 20, 0, 17, 1, 20), (7, -1, 2, 4, 10, 0), (8, 3, 5, 1, 6, -1)
    given = torch.tensor([True, True, True, False, True, True], device=device)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], device=device) if packed else None
    a = drawn(rule, device, backend, **({"N": 1, "T": 100} if packed else {"N": 6, "T": 20}))
    for name in TOKENS:
        if a[name] is not None:
            rows = a[name][0].split((*lengths, 9)) if packed else a[name]
            for x in (rows[1], rows[4], *rows[6:]):
                x.fill_(torch.nan)
    full = torch.full((10, 3, 2, *((24, 16) if v_first else (16, 24))), torch.nan, device=device, dtype=stored)
    before = full[:, 1] if apart else full[:, 1].contiguous()
    named = [7, 2, 0]
    before[named] = a_pool(device, 3, v_first=v_first, dtype=stored)
    entering = torch.zeros(6, *before.shape[1:], device=device)
    entering[[0, 2, 5]] = before[named].float()
    clean = a | {name: a[name].nan_to_num(0) for name in TOKENS if a[name] is not None}
    op, call = getattr(wyfold, f"chunk_{rule}"), dict(clean)
    if rule == "delta_rule":
        del call["g"]
    expected, left = op(
        **call, initial_state=entering, output_final_state=True, cu_seqlens=cu, state_v_first=v_first
    )  # fmt: skip
    skipped = [expected[:, 33:53], expected[:, 70:71]] if packed else [expected[1], expected[4]]
    for x in skipped:
        x.zero_()
    for elsewhere in (False, True):
        room = full.clone()
        pool = room[:, 1] if apart else before.clone()
        target = {"output_state_indices": index(*to, device=device)} if elsewhere else {}
        out = torch.full_like(a["v"], torch.nan)
        serving.prefill(
            **a, pool=pool, state_indices=index(*slots, device=device), has_initial_state=given, cu_seqlens=cu,
            state_v_first=v_first, out=out, **target,
        )  # fmt: skip
        assert torch.equal(out, expected)
        pooled = before.clone()
        for n, slot in enumerate(to if elsewhere else slots):
            if n not in (1, 4) and slot >= 0:
                pooled[slot] = left[n].to(stored)
        assert torch.equal(pool.nan_to_num(9.0), pooled.nan_to_num(9.0))
        assert not apart or room[:, ::2].isnan().all()


@pytest.mark.parametrize("pad", [-1, 0])
def test_prefill_without_indices(pad: int, backend: str, device):
    """Row n uses slot n; there may be fewer slots than rows, and the first slot may be padding."""
    a, before = drawn("kda", device, backend, N=4, T=20), a_pool(device, 3)
    pool = before.clone()
    o = serving.prefill(**a, pool=pool, state_v_first=False, pad_slot_id=pad)
    expected, left = wyfold.chunk_kda(
        **at(a, slice(None)), initial_state=torch.cat([before, before[:1]]), output_final_state=True
    )
    live = list(range(pad + 1, 3))
    assert torch.equal(o[live], expected[live]) and torch.equal(pool[live], left[live])
    others = [n for n in range(4) if n not in live]
    assert not o[others].any() and torch.equal(pool[: pad + 1], before[: pad + 1])


def test_a_prompt_in_pieces(rule: str, backend: str, device):
    """Two packed prompts of 130 and 70 tokens, split at multiples of 64 into two calls."""
    a, before = drawn(rule, device, backend, N=1, T=200), a_pool(device)
    flags = {"state_indices": index(6, 2, device=device), "state_v_first": False}
    whole, pieces = before.clone(), before.clone()
    o = serving.prefill(**a, pool=whole, cu_seqlens=index(0, 130, 200, device=device), **flags)
    for first, second in ((slice(0, 128), slice(130, 194)), (slice(128, 130), slice(194, 200))):
        those = torch.cat([torch.arange(200, device=device)[x] for x in (first, second)])
        piece = a | {name: a[name][:, those] for name in TOKENS if a[name] is not None}
        cu = index(0, first.stop - first.start, len(those), device=device)
        assert torch.equal(serving.prefill(**piece, pool=pieces, cu_seqlens=cu, **flags), o[:, those])
    assert torch.equal(pieces, whole)


def test_a_prompt_of_no_tokens(backend: str, device):
    """The state is unchanged, or zero without an initial state, and is written to its output slot."""
    a, before = drawn("kda", device, backend, N=3, T=0), a_pool(device)
    pool, given = before.clone(), torch.tensor([True, False, True], device=device)
    o = serving.prefill(
        **a, pool=pool, state_indices=index(4, 1, 99, device=device), has_initial_state=given,
        output_state_indices=index(7, 1, 0, device=device), state_v_first=False,
    )  # fmt: skip
    expected = before.clone()
    expected[7], expected[1] = before[4], 0
    assert o.shape == (3, 0, 2, 24) and torch.equal(pool, expected)


APART: dict[str, Any] = {
    "tokens before": lambda x: x.new_empty(3, x.shape[1] + 5, 2, 24)[:, 5:],
    "heads first": lambda x: x.new_empty(3, 2, x.shape[1], 24).transpose(1, 2),
    "tokens first": lambda x: x.new_empty(x.shape[1], 3, 2, 24).transpose(0, 1),
    "columns between": lambda x: x.new_empty(3, x.shape[1], 2, 48)[..., ::2],
}


@pytest.mark.parametrize("where", APART)
@pytest.mark.parametrize("op", [serving.prefill, serving.verify])
def test_a_strided_output_is_zero_for_skipped_rows(op: Any, where: str, backend: str, device):
    a = drawn("gated_delta_rule", device, backend, N=3, T=20 if op is serving.prefill else 2)
    slots = index(4, -1, 9, device=device)
    if op is serving.verify:
        slots = torch.stack([slots, slots + 1], 1)
    out, first = APART[where](a["v"]).fill_(torch.nan), a_pool(device)
    second = first.clone()
    expected = op(**a, pool=first, state_indices=slots, state_v_first=False)
    assert op(**a, pool=second, state_indices=slots, state_v_first=False, out=out) is out
    assert torch.equal(out, expected) and torch.equal(first, second) and not out[1:].any()


@pytest.mark.parametrize("where", APART)
def test_a_strided_output_of_segments(where: str, backend: str, device):
    """Several launches write parts of it."""
    a = drawn("gated_delta_rule", device, backend, N=3, T=264)
    out, first = APART[where](a["v"]).fill_(torch.nan), a_pool(device)
    second = first.clone()
    with segment_rule.forced(2):
        expected = serving.prefill(**a, pool=first, state_v_first=False)
        assert serving.prefill(**a, pool=second, state_v_first=False, out=out) is out
    assert torch.equal(out, expected) and torch.equal(first, second) and not out.isnan().any()


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
def test_prefill_of_a_batch_into_a_narrow_pool(stored: torch.dtype, backend: str, device):
    a, before = drawn("gated_delta_rule", device, backend, N=2, T=20), a_pool(device, dtype=stored)
    pool, out = before.clone(), torch.empty(2, 20, 2, 24, device=device)
    assert serving.prefill(**a, pool=pool, state_v_first=False, out=out) is out
    expected, state = wyfold.chunk_gdn(**a, initial_state=before[:2].float(), output_final_state=True)
    assert torch.equal(out, expected) and torch.equal(pool[:2], state.to(stored))
    assert torch.equal(pool[2:], before[2:])


# --- empty calls and errors ------------------------------------------------------------------------------------------


def test_no_rows(backend: str, device):
    a, pool = drawn("kda", device, backend, N=0), a_pool(device)
    before = pool.clone()
    assert serving.decode(**a, pool=pool, state_v_first=False).shape == (0, 1, 2, 24)
    assert torch.equal(pool, before)


REFUSED: dict[str, tuple[Call, str]] = {
    "tokens": ({"q": torch.randn(2, 2, 1, 16)}, r"q must be \[N, 1, H, K\] or \[1, N, H, K\]"),
    "pool": ({"pool": torch.randn(9, 2, 24, 16)}, r"pool must be \[slots, HV, K, V\]"),
    "pool dtype": ({"pool": torch.zeros(9, 2, 16, 24, dtype=torch.float64)}, "pool must be float32, bfloat16 or"),
    "pool in pieces": ({"pool": torch.randn(9, 2, 24, 16).mT}, "pool must hold each head's state in one piece"),
    "pool repeated": ({"pool": torch.randn(2, 16, 24).expand(9, 2, 16, 24)}, "pool must hold no two numbers in one"),
    "pool overlapping": (
        {"pool": torch.randn(10, 16, 24).as_strided((9, 2, 16, 24), (384, 384, 24, 1))},
        "pool must hold no two numbers in one place",
    ),
    "slots": ({"state_indices": torch.zeros(3, dtype=torch.int32)}, r"state_indices must be \[4\] int32 or int64"),
    "slots' dtype": ({"state_indices": torch.zeros(4)}, "state_indices must be .* got .* float32"),
    "fresh": ({"has_initial_state": torch.ones(4)}, "has_initial_state must be .* bool"),
    "elsewhere": ({"output_state_indices": torch.zeros(4, 1, dtype=torch.int64)}, "output_state_indices must be"),
    "out": ({"out": torch.zeros(4, 1, 2, 16)}, "out must be"),
    "out repeated": ({"out": torch.zeros(1, 1, 1, 24).expand(4, 1, 2, 24)}, "out must hold no two numbers in one"),
    "out's dtype": ({"out": torch.zeros(4, 1, 2, 24, dtype=torch.float16)}, "out must have the dtype of v"),
    "pad": ({"pad_slot_id": -2}, "pad_slot_id must be at least -1"),
    "pad beyond int64": ({"pad_slot_id": 2**63}, "pad_slot_id must be at most 9223372036854775807"),
    "a rule in a list": ({"rule": ["delta"]}, r"rule must be one of .* got \['delta'\]"),
    "a gradient": ({"v": torch.randn(4, 1, 2, 24, requires_grad=True)}, "v must not require a gradient"),
    "doubled": ({"allow_neg_eigval": True, "use_beta_sigmoid_in_kernel": False}, "allow_neg_eigval must come with"),
    "a bound": ({"lower_bound": 1.0}, "lower_bound must be below 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_decode_refuses(name: str):
    given, message = REFUSED[name]
    a = drawn("kda", torch.device("cpu"), "eager") | {"pool": a_pool(torch.device("cpu")), "state_v_first": False}
    before = a["pool"].clone()
    with pytest.raises(ValueError, match=f"^decode: {message}"):
        serving.decode(**a | given)
    assert torch.equal(a["pool"], before)


def test_the_layout_of_the_pool_must_be_given():
    a = drawn("kda", torch.device("cpu"), "eager")
    with pytest.raises(TypeError, match="state_v_first"):
        serving.decode(**a, pool=a_pool(torch.device("cpu")))


def test_decode_packed_and_verify_errors_name_the_operator():
    pool, columns = a_pool(torch.device("cpu")), torch.zeros(4, 2, dtype=torch.int64)
    flags: Call = {"heads": (1, 2), "dims": (16, 24), "state_v_first": False}
    raw = torch.randn(4, 2), torch.randn(4, 2), None, None, pool
    with pytest.raises(ValueError, match=r"^decode_packed: mixed_qkv must be .* = \[N, 80\], got \[4, 79\]"):
        serving.decode_packed(torch.randn(4, 79), *raw, **flags)
    with pytest.raises(ValueError, match=r"^decode_packed: raw_g must be .* = \[4, 2\], \[4, 2, 16\] or \[4, 32\]"):
        serving.decode_packed(torch.randn(4, 80), torch.randn(4, 3), *raw[1:], **flags)
    with pytest.raises(TypeError, match=r"^decode_packed: heads must be two ints"):
        serving.decode_packed(torch.randn(4, 80), *raw, **flags | {"heads": 2})
    a = drawn("kda", torch.device("cpu"), "eager", T=3) | {"pool": pool, "state_v_first": False}
    with pytest.raises(ValueError, match=r"^verify: state_indices must have a column for each of T = 3 tokens, got 2"):
        serving.verify(**a, state_indices=columns)
    with pytest.raises(ValueError, match=r"^verify: state_indices must be \[N, C\]"):
        serving.verify(**a, state_indices=columns[:, 0])
    with pytest.raises(ValueError, match=r"^verify: num_accepted_tokens must be \[4\]"):
        serving.verify(**a, state_indices=torch.zeros(4, 3, dtype=torch.int64), num_accepted_tokens=columns)


def test_prefill_refuses_a_cap_below_one():
    a = drawn("kda", torch.device("cpu"), "eager") | {"pool": a_pool(torch.device("cpu")), "state_v_first": False}
    with pytest.raises(ValueError, match=r"^prefill: max_splits must be at least 1, got 0"):
        serving.prefill(**a, max_splits=0)


def test_prefill_refuses_incomplete_checkpoint_arguments():
    a = drawn("kda", torch.device("cpu"), "eager", T=40) | {"pool": a_pool(torch.device("cpu")), "state_v_first": False}
    where: Call = {"checkpoint_pool": a["pool"].clone(), "checkpoint_indices": torch.zeros(4, 2, dtype=torch.int64)}
    for given, message in (
        (
            {"checkpoint_every": 16},
            "checkpoint_every, checkpoint_pool and checkpoint_indices must come together, got no checkpoint_pool, "
            "checkpoint_indices",
        ),
        (where | {"checkpoint_every": 10}, "checkpoint_every must be a multiple of the chunk, 16, got 10"),
        (where | {"checkpoint_every": 32}, r"checkpoint_indices must be \[4, 1\]"),
        (where | {"checkpoint_every": 16, "checkpoint_pool": a["pool"][:, :1]}, "checkpoint_pool must be"),
        (
            where | {"checkpoint_every": 16, "checkpoint_pool": a["pool"].clone().requires_grad_()},
            "checkpoint_pool must not require a gradient",
        ),
    ):
        with pytest.raises(ValueError, match=f"^prefill: {message}"):
            serving.prefill(**a | given)


def test_checked_refuses_repeated_slots():
    a, pool = drawn("kda", torch.device("cpu"), "eager"), a_pool(torch.device("cpu"))
    with wyfold.checked(), pytest.raises(ValueError, match="decode: state_indices must hold distinct slots"):
        serving.decode(**a, pool=pool, state_indices=torch.tensor([1, -1, 3, 1]), state_v_first=False)
    nobody = drawn("kda", torch.device("cpu"), "eager", N=0)
    with wyfold.checked():
        serving.decode(**a, pool=pool, state_indices=torch.tensor([1, -1, 3, -1]), state_v_first=False)
        slots = torch.zeros(0, dtype=torch.int64)
        serving.decode(**nobody, pool=pool, state_indices=slots, output_state_indices=slots, state_v_first=False)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_checked_refuses_checkpoints_that_share_a_slot(packed: bool):
    """Only stored checkpoints count: not those of skipped rows, past a packing's last one, or without a slot."""
    device = torch.device("cpu")
    a, pool = drawn("kda", device, "eager", N=3, T=32), a_pool(device)
    flags: Call = {"state_v_first": False, "checkpoint_every": 16, "checkpoint_pool": a_pool(device, 5)}
    slots, rows = index(6, -1, 3, device=device), 6
    cases = [((0, 1, 2, 2, 3, 4), True), ((0, 1, 1, 4, 3, 4), True), ((-1, -1, 7, 7, 5, 5), True)]
    cases += [((0, 1, 2, 3, 4, 1), False), ((2, 2, 0, 0, 3, 4), False)]
    if packed:
        a |= {name: a[name].reshape(1, -1, *a[name].shape[2:]) for name in TOKENS if a[name] is not None}
        flags["cu_seqlens"] = index(0, 40, 65, 96, device=device)  # two, one and one of them
        cases = [((0, 1, 2, 3, 3, 3), True), ((0, 1, 1, 4, 4, 4), True), ((-1, 7, 7, -1, 2, 2), True)]
        cases += [((0, 1, 3, 1, 2, 4), False), ((2, 2, 0, 1, 3, 4), False)]
    for named, right in cases:
        where = index(*named, device=device) if packed else index(*named, device=device).view(3, rows // 3)
        refused = pytest.raises(ValueError, match=r"^prefill: checkpoint_indices must hold")
        with wyfold.checked(), contextlib.nullcontext() if right else refused:
            serving.prefill(**a, **flags, pool=pool, state_indices=slots, checkpoint_indices=where)
    everyone = index(0, 0, 1, 2, 3, 4, device=device)
    where = everyone if packed else everyone.view(3, 2)
    with wyfold.checked(), pytest.raises(ValueError, match="prefill: checkpoint_indices must hold distinct slots"):
        serving.prefill(**a, **flags, pool=pool, checkpoint_indices=where)


@pytest.mark.parametrize("op", [serving.decode, serving.prefill])
def test_checked_refuses_writes_to_slots_that_are_read(op: Any):
    """A state may be written in place, or to a slot that no row reads; skipped and new rows do not read theirs."""
    a, pool = drawn("kda", torch.device("cpu"), "eager"), a_pool(torch.device("cpu"))
    flags: Call = {"state_indices": torch.tensor([1, 2, 11, 4]), "state_v_first": False}
    flags["has_initial_state"] = torch.tensor([True, True, True, False])
    for to in ((1, 7, 2, 8), (4, 2, 1, 0), (-1, 11, 3, 5)):
        with wyfold.checked():
            op(**a, pool=pool, output_state_indices=torch.tensor(to), **flags)
    for to in ((2, 1, 7, 8), (1, 5, 6, 2)):
        with (
            wyfold.checked(),
            pytest.raises(ValueError, match=f"^{op.__name__}: output_state_indices must name no slot"),
        ):
            op(**a, pool=pool, output_state_indices=torch.tensor(to), **flags)
    with wyfold.checked(), pytest.raises(ValueError, match="must name no slot that another row starts from"):
        op(**a, pool=pool, output_state_indices=torch.tensor([4, 2, 3, 1]), state_v_first=False)


def test_checked_ignores_slots_that_are_not_written():
    """Output slots of skipped rows, and columns after a draft's last token."""
    device = torch.device("cpu")
    a, pool, flags = drawn("kda", device, "eager", N=3), a_pool(device), {"state_v_first": False}
    draft = drawn("kda", device, "eager", N=2, T=2)
    columns, to = index(0, 1, 2, 3, 4, 5, device=device).view(2, 3), index(6, 7, 3, 8, 4, 3, device=device).view(2, 3)
    packed = draft | {name: draft[name].flatten(0, 1)[None] for name in TOKENS if draft[name] is not None}
    with wyfold.checked():
        slots = {"state_indices": index(1, -1, 9, device=device), "output_state_indices": index(3, 3, 3, device=device)}
        serving.decode(**a, pool=pool, **slots, **flags)
        slots = {"state_indices": columns, "output_state_indices": to}
        serving.verify(**draft, pool=pool, **slots, **flags)
        serving.verify(**packed, pool=pool, cu_seqlens=index(0, 1, 3, device=device), **slots, **flags)
        with pytest.raises(ValueError, match="verify: output_state_indices must hold distinct slots"):
            serving.verify(**draft, pool=pool, **slots | {"output_state_indices": to.flip(1)}, **flags)


def test_checked_refuses_drafts_that_write_slots_others_read():
    """A row reads only the column of its last accepted token."""
    device = torch.device("cpu")
    a, pool = drawn("kda", device, "eager", N=2, T=2), a_pool(device)
    columns, to = index(0, 1, 2, 3, device=device).view(2, 2), index(6, 3, 7, 8, device=device).view(2, 2)
    where = {"state_indices": columns, "output_state_indices": to, "state_v_first": False}
    for counts, crosses in ((None, False), ((2, 0), False), ((1, 2), True), ((0, 9), True)):
        accepted = None if counts is None else torch.tensor(counts)
        with (
            wyfold.checked(),
            pytest.raises(ValueError, match=r"^verify: output_state_indices must name no slot that another row starts")
            if crosses
            else contextlib.nullcontext(),
        ):
            serving.verify(**a, pool=pool, num_accepted_tokens=accepted, **where)


# --- through PyTorch -------------------------------------------------------------------------------------------------


def test_explain_decode(backend: str, device):
    a = drawn("kda", device, backend) | {"pool": a_pool(device), "state_v_first": False}
    plan = wyfold.explain(serving.decode, **a)
    assert (plan.operator, plan.backend, plan.backward) == ("decode", backend, ())
    stages = ["prepare", "recurrent"] if backend == "eager" else ["recurrent"]
    assert [launch.split(" ")[0] for launch in plan.forward] == stages
    assert [row.key for row in plan.rows] == ([] if backend == "eager" else ["fp32 K16 V24 KV channel alone"])


@pytest.mark.parametrize("between", [False, True], ids=["", "states between"])
def test_explain_prefill(between: bool, backend: str, device):
    """Kernels access slots directly; only checkpoints take a separate launch."""
    a = drawn("kda", device, backend, T=64) | {"pool": a_pool(device), "state_v_first": False}
    if between:
        a |= {"checkpoint_every": 64, "checkpoint_pool": a_pool(device)}
        a["checkpoint_indices"] = torch.zeros(4, 1, dtype=torch.int64, device=device)
    plan = wyfold.explain(serving.prefill, **a)
    stages = ["prepare", "scan"] + ["state_pool"] * (backend == "eager" or between)
    assert [launch.split(" ")[0] for launch in plan.forward] == stages
    rows = [] if backend == "eager" else ["state_pool"] * between + ["prepare", "scan"]
    assert [row.stage for row in plan.rows] == rows


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_opcheck(name: str, backend: str, device, monkeypatch):
    seen, operator = [], serving_call.serve_op
    monkeypatch.setattr(serving_call, "serve_op", lambda *arguments: seen.append(arguments) or operator(*arguments))
    a = drawn("delta_rule", device, backend, T=1 if name == "decode" else 16)
    a |= {"pool": a_pool(device), "state_v_first": False, "state_indices": index(3, -1, 0, 5, device=device)}
    if name == "prefill":
        a |= {"checkpoint_every": 16 if backend == "eager" else 64, "checkpoint_pool": a_pool(device)}
        a["checkpoint_indices"] = torch.zeros(4, 16 // a["checkpoint_every"], dtype=torch.int64, device=device)
    with torch.enable_grad():
        getattr(serving, name)(**a)
    torch.library.opcheck(operator, seen[0])


def test_fullgraph_with_other_rows_and_slots(backend: str, device):
    """One graph; a pool passed as an argument is updated in place."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(serving.decode, backend=counter, fullgraph=True)
    before = a_pool(device)
    for N in (4, 3, 5):
        a = drawn("gated_delta_rule", device, backend, N=N) | {"state_v_first": False}
        slots = torch.randperm(9)[:N].to(device)
        first, second = before.clone(), before.clone()
        room = torch.zeros(N, 3, 2, 24, device=device)[:, 1:2]
        o = compiled(**a, pool=first, state_indices=slots, out=room)
        assert torch.equal(o, serving.decode(**a, pool=second, state_indices=slots)) and torch.equal(first, second)
    assert counter.frame_count <= 2
    torch._dynamo.reset()


def test_a_cuda_graph_serves_other_slots_without_synchronisation(rule: str, backend: str, device):
    """Captured once; tokens, slots, flags and states change between replays of the graph."""
    if device.type != "cuda":
        pytest.skip(f"tensors are on {device.type}")
    a, pool = drawn(rule, device, backend), a_pool(device)
    slots, given = index(0, 1, 2, 3, device=device), torch.ones(4, dtype=torch.bool, device=device)
    out = torch.empty_like(a["v"])
    call = {**a, "pool": pool, "state_indices": slots, "has_initial_state": given, "state_v_first": False, "out": out}
    serving.decode(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        serving.decode(**call)
    for seed in range(20):
        torch.manual_seed(seed)
        for name in TOKENS:
            if a[name] is not None:
                a[name].copy_(torch.randn_like(a[name]))
        slots.copy_(torch.randperm(12)[:4] - 1)
        given.copy_(torch.rand(4) > 0.3)
        pool.copy_(torch.randn_like(pool))
        plain = pool.clone()
        graph.replay()
        replayed = out.clone()
        torch.cuda.set_sync_debug_mode("error")
        try:
            serving.decode(**call | {"pool": plain})
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(replayed, out) and torch.equal(pool, plain)
