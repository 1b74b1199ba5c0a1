"""`explain` returns the plan of the call, runs nothing, and raises the errors of the call."""

import threading

import pytest
import torch

import wyfold
from wyfold import UnsupportedError, explain
from wyfold.autograd import delta as pipeline
from wyfold.autograd import workspace
from wyfold.kernels import table
from wyfold.runtime import plan as plans

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
    assert plan.chunk_size == (64 if recurrent else 16)
    assert plan.copies == plan.collectives == plan.compiles == ()
    assert set(plan.refused) == {"triton", "gluon"}
    assert "stand in for" in plan.refused["gluon"]
    assert "has no " in plan.refused["triton"] or "these are on cpu" in plan.refused["triton"]
    for row in (op.__name__, "eager", "chunk size", "not triton", "prepare (wyfold.kernels.prepare.eager)"):
        assert row in str(plan)


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
    assert set(refused.value.reasons) == {"gluon"} and "stand in for" in refused.value.reasons["gluon"]
    assert "stand in for" in str(refused.value)


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
