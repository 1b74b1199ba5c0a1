"""DPLR, IPLR, RWKV-7, GDN-2 and Comba on kernels: accuracy against the float64 token loop, and promises about bits.

Inputs are surrounded by NaN. Targets of float32 decide where the arithmetic is float32. In 16 bits the yardstick is the
error of half an ulp on 16-bit inputs.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.interpret.test_delta_ops import floating, moved
from tests.ops.low_rank_calls import OPERATORS
from torch import Tensor

import wyfold
from wyfold.kernels import self_check
from wyfold.reference import inputs
from wyfold.reference.error import half_ulp_away, judge, require, rms
from wyfold.reference.shapes import Shape
from wyfold.reference.targets import GRADIENTS, target

RULES = [name for name in OPERATORS if name.startswith("chunk")]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = {FP32: Shape(1, 39, 1, 2, 24, 40), BF16: Shape(1, 38, 2, 2, 40, 24), FP16: Shape(2, 18, 1, 1, 16, 16)}
PACKED = [0, 0, 33, 34, 66]
PER_TOKEN = ("q", "r", "k", "v", "a", "b", "w", "g", "gk", "p", "beta")


def drawn(name: str, shape: Shape, gate: str = "any", **more: Any) -> dict[str, Any]:
    a = inputs.draw("random", OPERATORS[name][2], shape, gate=gate, state="normal", **more)
    return a | {"output_final_state": True}


def require_accurate(name: str, a: dict[str, Any], device, guarded, results, **options: Any) -> None:
    """Require every result and gradient of the kernels within its limits."""
    op, loop, _ = OPERATORS[name]
    eager = results(op, a, (), backend="eager", **options)
    fed = {part: inputs.incoming(eager[part], 7) for part in ("o", "state")}
    there = {part: guarded(x.to(device)) if floating(x) else moved(x, device) for part, x in a.items()}
    got = results(op, there, None, {part: x.to(device) for part, x in fed.items()}, backend="triton", **options)
    meant = {part: x for part, x in options.items() if part not in ("chunk_size", "disable_recompute")}

    def truth_of(wide) -> dict[str, Tensor]:
        numbered = {part: wide(x, i) if floating(x) else x for i, (part, x) in enumerate(a.items())}
        return results(loop, numbered, None, {part: wide(x, -i) for i, (part, x) in enumerate(fed.items(), 1)}, **meant)

    truth = truth_of(lambda x, i: x.double())
    assert got.keys() == truth.keys()
    dtype, found = a["v"].dtype, []
    away = []
    if dtype == BF16 or (dtype == FP16 and device.type != "cpu"):
        away = [truth_of(lambda x, i, seed=seed: half_ulp_away(x.to(dtype), 100 * seed + i)) for seed in range(1, 4)]
    for part, x in truth.items():
        row = {"dinitial_state": "dh0"}.get(part, part)
        row = "dq" if row.startswith("d") and row not in GRADIENTS else row
        if away:
            furthest = max((other[part] for other in away), key=lambda y, x=x: rms(y, x))
            allowed = {"yardstick": furthest.to(got[part].dtype)}
        elif got[part].dtype != FP32:
            allowed = {"yardstick": x.to(got[part].dtype)}
        else:
            allowed = {"target": target(row, FP32)}
        found.append(judge(got[part].cpu(), x, name=part, per_token=x.ndim == 3, **allowed))
    require(*found)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(
            pytest.param(
                name, FP32, marks=[] if name != "chunk_iplr_delta_rule" else pytest.mark.release_if_interpreted
            )
            for name in RULES
        ),
        # One rule with two columns and one with one.
        *((f"chunk_{rule}", dtype) for dtype in (BF16, FP16) for rule in ("dplr_delta_rule", "comba")),
    ],
    ids=str,
)
def test_every_rule_and_dtype(name: str, dtype: torch.dtype, device, guarded, results):
    require_accurate(name, drawn(name, SHAPES[dtype], dtype=dtype), device, guarded, results)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("fused_recurrent_dplr_delta_rule", FP32, marks=pytest.mark.release_if_interpreted),
        ("fused_recurrent_gdn2", BF16),
        ("fused_recurrent_comba", FP32),
    ],
    ids=str,
)
def test_token_by_token(name: str, dtype: torch.dtype, device, guarded, results):
    require_accurate(name, drawn(name, SHAPES[dtype], dtype=dtype), device, guarded, results)


@pytest.mark.parametrize(
    ("name", "C"),
    [
        *(pytest.param("chunk_dplr_delta_rule", C, marks=pytest.mark.release_if_interpreted) for C in (16, 32)),
        ("chunk_dplr_delta_rule", 64),
        ("chunk_gdn2", 32),
    ],
    ids=str,
)
def test_packed_in_every_chunk_size(name: str, C: int, device, guarded, results):
    """With grouped heads, an empty sequence and one token, and tokens past the last boundary."""
    # Gradients of two columns in float32 and chunks of 64 exceed every GPU's shared memory, and are refused.
    dtype = BF16 if C == 64 and device.type == "cuda" else FP32
    a = drawn(name, Shape(1, 71, 1, 2, 8, 16), sequences=4, dtype=dtype)
    for part in PER_TOKEN:
        if part in a:
            a[part][:, PACKED[-1] :] = torch.nan
    a["cu_seqlens"] = torch.tensor(PACKED)
    require_accurate(name, a, device, guarded, results, chunk_size=C)


@pytest.mark.parametrize(("H", "width"), [(2, 8), (1, 32)])
@pytest.mark.parametrize("cu_seqlens", [[0, 5], [0, 1, 4, 5]], ids=str)
def test_short_sequences_in_float32(cu_seqlens: list[int], H: int, width: int, device, guarded, results):
    """In chunks of 32 dq and da were wrong by a tenth and more on a GPU: see H200-4 in docs/facts/hopper.md."""
    a = drawn("chunk_iplr_delta_rule", Shape(1, 5, H, H, width, width), sequences=len(cu_seqlens) - 1)
    a["cu_seqlens"] = torch.tensor(cu_seqlens)
    require_accurate("chunk_iplr_delta_rule", a, device, guarded, results, chunk_size=32)


def test_packed_token_by_token(device, guarded, results):
    """RWKV-7 with its rates multiplied inside, where the gradients of kk and a are each other's products."""
    name = "fused_mul_recurrent_rwkv7"
    a = drawn(name, Shape(1, 71, 1, 2, 8, 16), sequences=4)
    for part in (*PER_TOKEN, "kk"):
        if part in a:
            a[part][:, PACKED[-1] :] = torch.nan
    a["cu_seqlens"] = torch.tensor(PACKED)
    require_accurate(name, a, device, guarded, results)


@pytest.mark.parametrize("v_first", [False, True])
def test_one_token_a_call(v_first: bool, device):
    """Bits of a token do not depend on the number of tokens of its call. States between are those of shorter calls."""
    a = drawn("fused_recurrent_dplr_delta_rule", Shape(2, 12, 1, 2, 24, 16), dtype=BF16)
    a = {part: moved(x, device) for part, x in a.items()} | {"backend": "triton", "state_v_first": v_first}
    if v_first:
        a["initial_state"] = a["initial_state"].mT.contiguous()
    op = wyfold.fused_recurrent_dplr_delta_rule
    o, state, states = op(**a, return_intermediate_states=True, checkpoint_every=5)
    running, outputs = a["initial_state"], []
    for t in range(12):
        piece = {part: x[:, t : t + 1] if part in PER_TOKEN else x for part, x in a.items()}
        one, running = op(**piece | {"initial_state": running})
        outputs.append(one)
        if (t + 1) % 5 == 0:
            assert torch.equal(states[:, t // 5], running)
    assert torch.equal(torch.cat(outputs, 1), o) and torch.equal(running, state)


@pytest.mark.parametrize("gate", ["zero", "-88", "reset one", "alternating", "-20"])
def test_strong_gates(gate: str, device, guarded, results):
    """With many anchors in a chunk of 32, and pairs of rows after strong gates."""
    a = drawn("chunk_dplr_delta_rule", Shape(1, 40, 1, 1, 16, 16), gate)
    require_accurate("chunk_dplr_delta_rule", a, device, guarded, results, scale=0.3, chunk_size=32)


@pytest.mark.parametrize("gate", ["model", "model bounded"])
def test_gate_inside_and_norms(gate: str, device, guarded, results):
    a = drawn("chunk_gdn2", Shape(1, 40, 1, 2, 16, 24), gate)
    require_accurate("chunk_gdn2", a, device, guarded, results, use_qk_l2norm_in_kernel=True)


@pytest.mark.parametrize(("name", "gate"), [("chunk_comba", "any"), ("chunk_gdn2", "model")])
def test_slices_of_channels(name: str, gate: str, device, guarded, results):
    """Gradients of beta and of A_log are summed over slices of channels, the last of which is not full."""
    require_accurate(name, drawn(name, Shape(1, 20, 1, 2, 72, 8), gate), device, guarded, results)


@pytest.mark.parametrize(
    "name", ["chunk_comba", pytest.param("fused_recurrent_comba", marks=pytest.mark.release_if_interpreted)]
)
def test_norms_of_rows_that_differ(name: str, device, guarded, results):
    """Each of q, k and p has its own norm in every token, and p is read a token early."""
    a = drawn(name, Shape(1, 83, 1, 2, 16, 24), "weak")
    for part in ("q", "k", "p"):
        a[part] = a[part] * (0.5 + torch.rand(1, 83, 1, 1))
    require_accurate(name, a, device, guarded, results, use_qk_l2norm_in_kernel=True)


@pytest.mark.parametrize("keys", ["identical", "two clusters"])
def test_repeated_keys(keys: str, device, guarded, results):
    """The folded form rounds no large number: in 16 bits, repeated keys with slow gates cost no more than others."""
    a = drawn("chunk_rwkv7", Shape(1, 64, 1, 1, 32, 32), "-1e-3", keys=keys, dtype=BF16)
    require_accurate("chunk_rwkv7", a, device, guarded, results)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [pytest.param("chunk_rwkv7", BF16, marks=pytest.mark.release_if_interpreted), ("chunk_comba", FP32)],
    ids=str,
)
def test_packed_is_separate_and_repeats(name: str, dtype: torch.dtype, device, results):
    op, borders = OPERATORS[name][0], [0, 17, 17, 35, 36]
    a = drawn(name, Shape(1, 39, 1, 1, 24, 16), sequences=4, dtype=dtype)
    a = {part: moved(x, device) for part, x in a.items()} | {"backend": "triton", "chunk_size": 16}
    fed = {"o": inputs.incoming(a["v"], 1), "state": inputs.incoming(a["initial_state"], 2)}
    for x in (*(a[part] for part in PER_TOKEN if part in a), fed["o"]):
        x[:, 36:] = torch.nan
    cu = torch.tensor(borders, device=device)
    packed, again = (results(op, a, None, fed, cu_seqlens=cu) for _ in range(2))
    assert all(torch.equal(again[part], x) for part, x in packed.items())
    require_separate_bits(results, op, a, fed, packed, borders)


def require_separate_bits(
    results: Any, op: Any, a: dict[str, Any], fed: dict[str, Tensor], packed: dict[str, Tensor], borders: Any
) -> None:
    """Every packed sequence has the bits of a separate call, in outputs, states and gradients."""
    for n, (begin, end) in enumerate(pairwise(borders)):
        alone = {part: x[:, begin:end] if part in PER_TOKEN else x for part, x in a.items()}
        alone["initial_state"] = a["initial_state"][n : n + 1]
        got = results(op, alone, None, {"o": fed["o"][:, begin:end], "state": fed["state"][n : n + 1]})
        for part, x in got.items():
            mine = packed[part][n : n + 1] if "state" in part else packed[part][:, begin:end]
            assert torch.equal(mine, x), (part, n)


@pytest.mark.parametrize(
    "name", [pytest.param("chunk_dplr_delta_rule", marks=pytest.mark.release_if_interpreted), "chunk_gdn2"]
)
def test_layouts_split_calls_and_kept_factors(name: str, device, results):
    """Strides, a split at a chunk, kept factors, V-first states and intermediate ones change no bit."""
    op = OPERATORS[name][0]
    a = drawn(name, Shape(1, 40, 2, 2, 16, 24), dtype=BF16)
    a = {part: moved(x, device) for part, x in a.items()} | {"backend": "triton", "chunk_size": 16}
    fed = {"o": inputs.incoming(a["v"], 1), "state": inputs.incoming(a["initial_state"], 2)}
    whole = results(op, a, None, fed)
    assert all(torch.equal(whole[part], x) for part, x in results(op, a, None, fed, disable_recompute=True).items())
    strided = {
        part: x.transpose(1, 2).contiguous().transpose(1, 2) if part in PER_TOKEN else x for part, x in a.items()
    }
    assert all(torch.equal(whole[part], x) for part, x in results(op, strided, None, fed).items())
    v_first = a | {"initial_state": a["initial_state"].mT, "state_v_first": True}
    turned = results(op, v_first, None, fed | {"state": fed["state"].mT})
    assert all(torch.equal(whole[part], x.mT if "state" in part else x) for part, x in turned.items())
    outputs, state = [], a["initial_state"]
    for begin, end in ((0, 16), (16, 40)):
        piece = {part: x[:, begin:end] if part in PER_TOKEN else x for part, x in a.items()}
        o, state = op(**piece | {"initial_state": state})
        outputs.append(o)
    assert torch.equal(torch.cat(outputs, 1), whole["o"]) and torch.equal(state, whole["state"])
    o, _, states = op(**a, return_intermediate_states=True, checkpoint_every=16)
    first = {part: x[:, :16] if part in PER_TOKEN else x for part, x in a.items()}
    assert torch.equal(o, whole["o"]) and torch.equal(states[:, 0], op(**first)[1])


def test_no_tokens(device, results):
    a = drawn("chunk_dplr_delta_rule", Shape(2, 0, 1, 1, 16, 16), gate="zero")
    a = {part: moved(x, device) for part, x in a.items()}
    got = results(wyfold.chunk_dplr_delta_rule, a, backend="triton")
    assert torch.equal(got["state"], a["initial_state"]) and got["o"].shape == (2, 0, 1, 16)


def test_the_plan_names_the_kernels(device):
    q = torch.randn(1, 20, 1, 8, device=device)
    for op in (wyfold.chunk_dplr_delta_rule, wyfold.chunk_gdn2):
        plan = wyfold.explain(op, *(q,) * 6, backend="triton")
        assert plan.backend == "triton" and plan.segments == 1
        steps = [launch.partition(" ")[0] for launch in (*plan.forward, *plan.backward)]
        forward, backward = ["low_rank_prepare", "low_rank_scan"], ["low_rank_scan_bwd", "low_rank_gradients"]
        assert steps == [*forward, "low_rank_prepare", *backward]
        assert {stage for stage, _, _ in plan.rows} == {*forward, *backward}
    plan = wyfold.explain(wyfold.fused_recurrent_gdn2, *(q,) * 6, backend="triton")
    assert [launch.partition(" ")[0] for launch in plan.forward] == ["low_rank_recurrent"]
    assert [launch.partition(" ")[0] for launch in plan.backward] == ["low_rank_prepare", *backward]


@pytest.mark.parametrize(
    "name", [pytest.param("chunk_comba", marks=pytest.mark.release_if_interpreted), "fused_recurrent_gdn2"]
)
def test_the_self_check_of_the_kernels_passes(name: str, device):
    a = drawn(name, Shape(1, 8, 1, 2, 8, 8), "weak", dtype=BF16)
    a = {part: moved(x, device) for part, x in a.items()} | {"backend": "triton"}
    a["v"].requires_grad_()
    with self_check.collecting() as found:
        OPERATORS[name][0](**a)
    assert found and all(record["passed"] for record in found.values()), found


def test_every_gpu_checks_chunks_that_never_ran(device, monkeypatch):
    """Also where the support table has a verified entry."""
    asked = []
    monkeypatch.setattr(self_check, "unproven", lambda device, unrun=False: asked.append(unrun))
    q = torch.randn(1, 20, 1, 8, device=device)
    for size in (16, 32, 64):
        wyfold.explain(wyfold.chunk_dplr_delta_rule, *(q,) * 6, chunk_size=size, backend="triton")
    wyfold.explain(wyfold.fused_recurrent_gdn2, *(q,) * 6, backend="triton")
    wyfold.explain(wyfold.chunk_kda, *(q,) * 4, q[..., 0], backend="triton")
    assert asked == [True, False, False, False, False]
