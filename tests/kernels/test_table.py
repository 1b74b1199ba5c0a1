"""Dispatch: the selected backend and the reasons of refusals, for simulated GPUs and Triton versions."""

import json
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import wyfold
from wyfold import UnsupportedError, serving
from wyfold.kernels import table
from wyfold.runtime import kernel_configs, triton_support
from wyfold.runtime.kernel_configs import LaunchKey
from wyfold.runtime.plan import Plan
from wyfold.runtime.triton_support import support_for

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
SCAN = {"forward": ("scan",), "backward": ("scan_bwd",)}


@pytest.fixture
def card(monkeypatch):
    """`card("sm_89", "3.7.1")` simulates this GPU and Triton version."""

    def insert(architecture: str, version: str, *, verified: bool | None = None) -> None:
        support = support_for(architecture, version)
        support = support if verified is None else support._replace(verified=verified)
        monkeypatch.setattr(triton_support, "support_of", lambda device: support)
        monkeypatch.setattr(triton_support, "architecture", lambda device: architecture)
        monkeypatch.setattr(kernel_configs, "processors", lambda device: 132)

    return insert


def plan(device: torch.device = CUDA, backend: str | None = None, dtypes=(BF16,), stages=None, sizes=()) -> Plan:
    return table.plan("chunk_kda", device, backend, dtypes=dtypes, sizes=sizes, **(stages or SCAN))


def refused(**arguments) -> dict[str, str]:
    with pytest.raises(UnsupportedError) as refusal:
        plan(**arguments)
    return refusal.value.reasons


@pytest.mark.parametrize("stage", [row.stage for row in table.ENTRIES if row.backend == "triton"])
def test_a_listed_card_gets_the_kernels(stage: str, card):
    card("sm_90", "3.6.0", verified=True)
    found = plan(stages={"forward": (stage,)})
    assert found.backend == "triton" and found.forward == (f"{stage} (wyfold.kernels.{stage}.triton)",)
    assert "eager" in found.refused


def test_every_kernel_file_has_its_row():
    files = Path(table.__file__).parent.glob("*/triton*")
    assert {row.stage for row in table.ENTRIES if row.backend == "triton"} == {file.parent.name for file in files}


@pytest.mark.parametrize("stage", ["ttt_open"])
def test_a_launch_without_a_kernel_is_refused_by_name(stage: str, card):
    card("sm_90", "3.6.0")
    reasons = refused(stages={"forward": (stage,)})
    assert reasons["triton"] == (
        f'has no kernel for this operator in this version (step {stage}); backend="eager" serves it'
    )
    assert 'ask for it with backend="eager"' in reasons["eager"]


def test_float64_is_refused_with_an_alternative(card):
    card("sm_90", "3.6.0")
    for dtypes in ((F64,), (BF16, F64), (F32, F32, F64)):
        assert refused(dtypes=dtypes)["triton"] == 'does not compute in float64; backend="eager" does'
    assert plan(dtypes=(F64,), backend="eager").backend == "eager"


@pytest.mark.parametrize(
    "limit", json.loads(triton_support.config_text("support"))["beyond"], ids=lambda limit: limit["key"]
)
def test_oversized_kernels_are_refused_with_an_alternative(limit: dict, card):
    """Sizes listed in support.json are refused on the listed architectures and only there."""
    sizes = (
        (
            limit["kernel"].removesuffix(".triton"),
            limit["key"].replace("BK", "K") + " C16" * (" C" not in limit["key"]),
        ),
    )
    for architecture in limit["architectures"]:
        card(architecture, "3.6.0", verified=True)
        for demand in (None, "triton"):
            reason = refused(backend=demand, sizes=sizes)["triton"]
            assert reason == f"{limit['reason']} on {architecture}; {limit['remedy']}"
        assert plan(backend="eager", sizes=sizes).backend == "eager"
        assert plan(sizes=((sizes[0][0], "bf16 K8 C16"),)).backend == "triton"
    if "sm_90" not in limit["architectures"]:
        card("sm_90", "3.6.0", verified=True)
        assert plan(sizes=sizes).backend == "triton"
    assert plan(device=CPU, sizes=sizes).backend == "eager"


def test_an_operator_names_sizes_that_do_not_fit(card):
    card("sm_100", "3.6.0", verified=True)
    with FakeTensorMode():
        wide, narrow = (torch.empty(1, 40, 2, D, device="cuda") for D in (72, 64))
        w = {x: torch.empty(2, x.shape[-1], device="cuda") for x in (wide, narrow)}
        assert wyfold.explain(wyfold.chunk_ttt_linear, *[narrow] * 3, *[w[narrow]] * 2, 0.1).backend == "triton"
        half = (x.bfloat16() for x in [wide] * 3)
        assert wyfold.explain(wyfold.chunk_ttt_linear, *half, *[w[wide]] * 2, 0.1).backend == "triton"
        with pytest.raises(UnsupportedError, match=r"^chunk_ttt_linear: ") as refusal:
            wyfold.chunk_ttt_linear(*[wide] * 3, *[w[wide]] * 2, 0.1)
    assert "tensor memory" in refusal.value.reasons["triton"]


@pytest.mark.parametrize("architecture, over", [("sm_100", 136), ("sm_120", 256)])
def test_a_prompt_is_refused_where_its_chunks_do_not_fit(architecture: str, over: int, card):
    card(architecture, "3.6.0", verified=True)
    with FakeTensorMode():
        wide, beta = torch.empty(1, 40, 2, over, device="cuda"), torch.empty(1, 40, 2, device="cuda")
        pool, slots = torch.empty(3, 2, over, over, device="cuda"), torch.empty(1, dtype=torch.int32, device="cuda")
        with pytest.raises(UnsupportedError) as refusal:
            serving.prefill(*[wide] * 3, None, beta, pool, slots, state_v_first=False)
    assert "needs more" in refusal.value.reasons["triton"] and architecture in refusal.value.reasons["triton"]


@pytest.mark.parametrize("architecture, most, over", [("sm_100", 128, 136), ("sm_120", 248, 256)])
def test_a_delta_rule_names_the_chunks_that_fit(architecture: str, most: int, over: int, card):
    card(architecture, "3.6.0", verified=True)
    with FakeTensorMode():
        wide, narrow = (torch.empty(1, 40, 2, K, device="cuda") for K in (over, most))
        g = torch.empty(1, 40, 2, device="cuda")
        for q, options in ((narrow, {}), (wide, {"chunk_size": 32}), (wide.bfloat16(), {})):
            v = narrow.to(q.dtype)
            assert wyfold.explain(wyfold.chunk_gated_delta_rule, q, q, v, g, **options).backend == "triton"
        with pytest.raises(UnsupportedError, match=r"^chunk_gated_delta_rule: ") as refusal:
            wyfold.chunk_gated_delta_rule(wide, wide, narrow, g)
    assert "chunk_size=32 fits" in refusal.value.reasons["triton"]


@pytest.mark.parametrize(
    "architecture, version, reason",
    [("sm_90", "3.5.0", "known to be wrong on sm_90"), ("sm_90", "", "Triton is not installed")],
)
def test_a_bad_or_missing_triton_is_refused(architecture: str, version: str, reason: str, card):
    card(architecture, version)
    for demand in (None, "triton"):
        assert reason in refused(backend=demand)["triton"]
    assert plan(backend="eager").backend == "eager"


@pytest.mark.parametrize("architecture, version", [("sm_75", "3.6.0"), ("sm_103", "3.7.1"), ("sm_90", "4.2.0")])
def test_a_card_or_version_that_is_not_listed_gets_the_kernels(architecture: str, version: str, card):
    """Their self-check at first use is tested in `test_self_check.py`."""
    card(architecture, version)
    assert plan().backend == "triton"
    with FakeTensorMode():
        q = torch.empty(1, 40, 2, 16, device="cuda")
        found = wyfold.explain(wyfold.chunk_kda, q, q, q)
    assert found.backend == "triton" and not any(".gluon)" in launched for launched in found.forward)


def test_explain_lists_rows_and_uncompiled_kernels(card, monkeypatch):
    """The plan names configuration rows, "default" where none fits these widths, and kernels not compiled yet."""
    card("sm_89", "3.6.0")
    names = kernel_configs.compiled
    monkeypatch.setattr(kernel_configs, "compiled", lambda *args: {name: {} for name in names(*args)})
    with FakeTensorMode():
        q, beta = torch.empty(1, 40, 2, 24, device="cuda", dtype=BF16), torch.empty(1, 40, 2, device="cuda")
        found = wyfold.explain(wyfold.chunk_kda, q, q, q, q, beta, chunk_size=32)
        norm = wyfold.explain(wyfold.l2norm, q)
    assert [row.stage for row in found.rows] == ["prepare", "scan", "scan_bwd", "gradients"]
    for stage, key, row in found.rows:
        assert key.startswith("bf16 K24 V24 C32 channel")
        assert row == kernel_configs.row(
            "sm_89", f"{stage}.triton", LaunchKey.parse(key)
        ) and f"{stage} ({key}): {row}" in str(found)
    assert set(found.compiles) >= {"wyfold_scan_triton", "wyfold_gradients_triton"}
    assert norm.compiles == ("wyfold_l2norm_triton", "wyfold_l2norm_bwd_triton")


def test_tensors_off_cuda_default_to_eager(card):
    card("sm_90", "3.6.0")
    found = plan(device=CPU)
    assert found.backend == "eager" and "these are on cpu" in found.refused["triton"]
    assert plan(device=torch.device("meta")).backend == "eager"


def test_triton_on_the_cpu_requires_the_interpreter(card, monkeypatch):
    card("sm_90", "3.6.0")
    monkeypatch.setattr(triton_support, "can_interpret", lambda: False)
    assert "need a CUDA GPU" in refused(device=CPU, backend="triton")["triton"]
    monkeypatch.setattr(triton_support, "can_interpret", lambda: True)
    monkeypatch.setattr(triton_support, "_repaired_interpreter", False)
    assert "TRITON_INTERPRET=1" in refused(device=CPU, backend="triton")["triton"]
    monkeypatch.setattr(triton_support, "_repaired_interpreter", True)
    assert plan(device=CPU, backend="triton").backend == "triton"
    assert plan(device=CPU).backend == "eager"


@pytest.mark.parametrize("operator", ["chunk_gated_delta_rule", "chunk_kda"])
def test_fake_cuda_tensors_are_planned_for_kernels(operator: str, card):
    """With fake tensors a CUDA call is checked and planned without a GPU, and no kernel is launched."""
    card("sm_90", "3.6.0", verified=True)
    with FakeTensorMode():
        q = torch.empty(1, 70, 2, 16, device="cuda", dtype=BF16)
        assert wyfold.explain(getattr(wyfold, operator), q, q, q).backend == "triton"
        o, state = getattr(wyfold, operator)(q, q, q, output_final_state=True)
    assert (o.shape, o.dtype, o.device.type) == (q.shape, BF16, "cuda")
    assert (state.shape, state.dtype) == ((1, 2, 16, 16), F32)


def test_a_compiled_call_plans_while_it_is_traced():
    """With `fullgraph`, dispatch causes no graph break, and the choice equals that of an uncompiled call."""
    seen = []
    compiled = torch.compile(
        wyfold.l2norm, backend=lambda graph, _: seen.append(graph) or graph.forward, fullgraph=True
    )
    x = torch.randn(3, 16)
    assert torch.equal(compiled(x), wyfold.l2norm(x))
    assert len(seen) == 1 and "l2norm_fwd" in seen[0].code and "'eager'" in seen[0].code
