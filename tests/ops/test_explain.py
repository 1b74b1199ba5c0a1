"""`explain` returns the plan of the call, runs nothing, and raises the errors of the call."""

import re
import threading
import traceback
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import wyfold
from wyfold import UnsupportedError, explain
from wyfold.autograd import delta as pipeline
from wyfold.autograd import workspace
from wyfold.kernels import table
from wyfold.runtime import plan as plans

PAGE = (Path(__file__).resolve().parents[2] / "docs/explain.md").read_text(encoding="utf-8")

OPERATORS = (
    wyfold.chunk_delta_rule,
    wyfold.chunk_gated_delta_rule,
    wyfold.chunk_kda,
    wyfold.fused_recurrent_delta_rule,
    wyfold.fused_recurrent_gated_delta_rule,
    wyfold.fused_recurrent_kda,
)


def meta(*size: int) -> torch.Tensor:
    return torch.empty(size, device="meta")


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.__name__)
def test_plans(op, monkeypatch):
    monkeypatch.setattr(pipeline, "_forward_op", None)  # a call would fail
    q = torch.randn(2, 50, 2, 16)
    plan = explain(op, q, q, q)
    recurrent = op.__name__.startswith("fused")
    assert plan.operator == op.__name__ and plan.backend == "eager"
    stages = ["prepare", "recurrent"] if recurrent else ["prepare", "scan"]
    back = stages if recurrent else ["prepare", "scan_bwd", "gradients"]
    assert [launch.split(" ")[0] for launch in plan.forward] == stages
    assert [launch.split(" ")[0] for launch in plan.backward] == back
    assert all(f"(wyfold.kernels.{launch.split(' ')[0]}.eager)" in launch for launch in plan.forward + plan.backward)
    assert plan.chunk_size == (None if recurrent else 16)
    assert plan.copies == plan.collectives == plan.compiles == ()
    assert set(plan.refused) == {"triton", "gluon"}
    assert "in place of a Triton kernel" in plan.refused["gluon"]
    assert "has no " in plan.refused["triton"] or "these are on cpu" in plan.refused["triton"]
    labels = {line[:12].strip() for line in str(plan).splitlines()}
    assert labels == {
        "operator",
        "backend",
        "forward",
        "backward",
        "not triton",
        *([] if recurrent else ["chunk size"]),
    }
    assert "wyfold." not in str(plan) and "none" not in str(plan)


def test_meta_tensors_suffice_and_size_is_free():
    q = meta(1, 1_000_000, 64, 128)
    assert explain(wyfold.chunk_gdn, q, q, q, meta(1, 1_000_000, 64), chunk_size=32).chunk_size == 32


def test_the_plan_is_the_one_that_runs(monkeypatch):
    """The explained plan equals the plan of the call on the same tensors."""
    seen = []
    monkeypatch.setattr(table, "announce_plan", lambda plan: seen.append(plan) or plans.announce_plan(plan))
    q = torch.randn(1, 40, 2, 16)
    for options in ({}, {"chunk_size": 64}, {"backend": "eager"}, {"cu_seqlens": torch.tensor([0, 3, 40])}):
        explained = explain(wyfold.chunk_delta_rule, q, q, q, **options)
        wyfold.chunk_delta_rule(q, q, q, **options)
        assert seen[-2] == seen[-1] == explained


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("op", (wyfold.chunk_kda, wyfold.fused_recurrent_kda), ids=lambda op: op.__name__)
def test_the_number_of_parts_bounds_the_actual_parts(op, packed: bool, monkeypatch):
    monkeypatch.setattr(workspace, "WORKSPACE_BYTES", 1)
    cut = []
    parts = workspace.parts
    monkeypatch.setattr(workspace, "parts", lambda *sizes: cut.append(parts(*sizes)) or cut[-1])
    q = torch.randn(1, 700, 1, 8)
    options = {"cu_seqlens": torch.tensor([0, 100, 100, 690])} if packed else {}
    promised = explain(op, q, q, q, **options).parts
    op(q, q, q, **options)
    # For a packed call the number follows from sizes alone, for any boundaries.
    assert 1 < len(cut[0]) <= promised <= len(cut[0]) + (1 if packed else 0)
    assert explain(op, q[:, :0], q[:, :0], q[:, :0]).parts == 0


def test_errors_of_the_call():
    q = torch.randn(1, 40, 2, 16)
    with pytest.raises(ValueError, match=r"chunk_kda: k must be \[B, T, H, K\]"):
        explain(wyfold.chunk_kda, q, q[:, :7], q)
    with pytest.raises(TypeError, match="unexpected keyword argument 'head_first'"):
        explain(wyfold.chunk_kda, q, q, q, head_first=True)
    with pytest.raises(UnsupportedError) as refused:
        explain(wyfold.chunk_kda, q, q, q, backend="gluon")
    assert set(refused.value.reasons) == {"gluon"} and "cannot be chosen" in refused.value.reasons["gluon"]
    assert "cannot be chosen" in str(refused.value)


def test_a_refusal_is_one_sentence_with_the_reason_and_the_remedy():
    q = torch.randn(1, 40, 2, 16)
    for call in (
        lambda: explain(wyfold.chunk_kda, q, q, q, backend="triton"),
        lambda: wyfold.l2norm(q, backend="triton"),
    ):
        with pytest.raises(UnsupportedError) as refused:
            call()
        text = str(refused.value)
        assert text.count("\n") == 0 and "backend='triton' cannot serve this call on cpu: " in text
        assert "need a CUDA GPU" in text and 'backend="eager"' in text
        assert text.endswith(refused.value.reasons["triton"])


def test_a_refusal_of_explain_has_no_frames_of_the_operator():
    q = torch.randn(1, 40, 2, 16)
    with pytest.raises(UnsupportedError) as refused:
        explain(wyfold.chunk_kda, q, q, q, backend="triton")
    frames = [frame.name for frame in traceback.extract_tb(refused.value.__traceback__)]
    assert frames == ["test_a_refusal_of_explain_has_no_frames_of_the_operator", "explain"]
    assert refused.value.__suppress_context__


def test_explain_raises_the_calls_late_errors():
    """Including the errors that a call checks last."""
    q, w = torch.randn(1, 3, 1, 8), torch.ones(1, 8)
    for op, arguments in (
        (wyfold.chunk_kda, {"q": q, "k": q, "v": q, "scale": "1"}),
        (wyfold.chunk_ttt_linear, {"q": q, "k": q, "v": q, "w": w, "b": w, "eta": 0.1, "scale": "1"}),
        (wyfold.fused_beta_sigmoid, {"x": q, "scale": "1"}),
        (wyfold.l2norm, {"x": q, "eps": "1"}),
    ):
        with pytest.raises(TypeError, match="must be a number, got str"):
            explain(op, **arguments)


def test_a_batch_of_single_tokens_is_one_part():
    """Decoding: a batch is split into parts only if its chunks exceed the workspace."""
    q = torch.empty(32, 1, 8, 64, device="meta")
    assert explain(wyfold.fused_recurrent_kda, q, q, q).parts == 1
    assert explain(wyfold.chunk_kda, q, q, q).parts == 1


def test_only_operators_have_a_plan():
    with pytest.raises(TypeError, match="explain: op must be an operator of wyfold"):
        explain(torch.add, torch.ones(1), torch.ones(1))
    q = torch.randn(1, 3, 1, 8)
    assert wyfold.chunk_delta_rule(q, q, q)[0].isfinite().all()  # explain's state has been reset


def test_explaining_in_one_thread_leaves_calls_in_others_alone():
    q = torch.randn(1, 3, 1, 8)
    explaining, called, failures = threading.Event(), threading.Event(), []

    def slow_operator(q):
        explaining.set()
        called.wait(10)
        return wyfold.chunk_delta_rule(q, q, q)

    def other_thread():
        explaining.wait(10)
        try:
            wyfold.chunk_delta_rule(q, q, q)
        except BaseException as error:
            failures.append(error)
        called.set()

    thread = threading.Thread(target=other_thread)
    thread.start()
    assert explain(slow_operator, q).operator == "chunk_delta_rule"
    thread.join()
    assert failures == []


def test_a_name_is_no_operator():
    with pytest.raises(TypeError, match="explain: op must be an operator of wyfold, the function itself, got 'gdn'"):
        wyfold.explain("gdn", torch.zeros(1))


def outputs_of(section: str) -> list[str]:
    """The outputs that a section of the page shows."""
    return re.findall(r"^```text\n(.*?)\n```", PAGE.partition(f"\n## {section}")[2].partition("\n## ")[0], re.M | re.S)


def test_the_page_shows_what_is_printed(capsys):
    names: dict[str, object] = {}
    exec(re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)[0], names)
    plan, refusal = outputs_of("Explain a call")
    assert capsys.readouterr().out.strip() == plan
    q, g = names["q"], names["g"]
    with pytest.raises(UnsupportedError) as refused:
        explain(wyfold.chunk_gated_delta_rule, q, q, q, g, g, backend="triton")
    assert str(refused.value) == refusal
    with wyfold.checked(), pytest.raises(ValueError, match=r"g must be <= 0") as illegal:
        wyfold.chunk_gated_delta_rule(q, q, q, g + 0.5, g)
    assert outputs_of("Check contents") == [str(illegal.value)]


def test_the_page_has_every_field_of_a_plan():
    section = PAGE.partition("\n## Explain a call")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `[^|]+\| `(\w+)` \|", section, re.M)
    assert rows == [*dict.fromkeys(rows)] and set(rows) == {field.name for field in fields(plans.Plan)}


def test_the_page_shows_how_doctor_begins_without_a_gpu(monkeypatch):
    """Its lines and their names; the values are another machine's."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    report = wyfold.doctor()
    (shown,) = outputs_of("Examine a machine")
    printed = str(report).splitlines()
    assert printed[0] == shown.splitlines()[0]
    names = [[line.strip().partition("  ")[0] for line in text] for text in (printed, shown.splitlines())]
    assert names[0][: len(names[1])] == names[1]


def test_the_page_has_every_field_of_the_report():
    section = PAGE.partition("\n## Examine a machine")[2].partition("\n## ")[0]
    named = set(re.findall(r"^\|[^|]+\| `(\w+)[^|]*` \|", section, re.M))
    assert named == {field.name for field in fields(wyfold.doctor())}


def test_the_glossary_has_every_step_that_a_plan_can_name():
    page = Path(__file__).resolve().parents[2] / "docs/glossary.md"
    section = page.read_text(encoding="utf-8").partition("\n## Steps of a call\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \|", section, re.M)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted({entry.stage for entry in table.ENTRIES})
