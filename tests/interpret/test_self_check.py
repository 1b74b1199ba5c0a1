"""The comparison of a self-check, on kernels: right ones pass, a wrong one is refused with its figure."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests import processes
from tests.context_parallel.ranks import Case, failures_on_ranks

import wyfold
from wyfold import UnsupportedError, serving
from wyfold.cli import kernel_calls
from wyfold.cli.operators import OPERATOR_SPECS
from wyfold.context_parallel.rank_exchange import exchange_trials
from wyfold.cp import build_cp_context
from wyfold.kernels import self_check, table
from wyfold.kernels.trial import Trial, with_sequences
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape
from wyfold.runtime import kernel_configs, replay_cache, segment_rule
from wyfold.runtime.options import DeltaOptions

ROOT = Path(__file__).resolve().parents[2]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def unknown_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: torch.device) -> None:
    """This device, as one whose kernels are not verified, with a new cache. Few processors keep the checks small."""
    monkeypatch.setenv("WYFOLD_CACHE", str(tmp_path))
    monkeypatch.delenv("WYFOLD_SELF_CHECK", raising=False)
    monkeypatch.setattr(self_check, "unproven", lambda *_: True)
    monkeypatch.setattr(self_check, "_outcomes", {})
    monkeypatch.setattr(replay_cache, "_entries", {})
    monkeypatch.setattr(replay_cache, "_alike", {})
    if device.type == "cpu":
        monkeypatch.setattr(kernel_configs, "processors", lambda device: 4)


def delta(rule: str, dtype: torch.dtype, device: torch.device, *, form: str = "chunk", grad: bool = True, **more: Any):
    drawing = {name: more.pop(name) for name in ("gate", "beta", "state", "sequences") if name in more}
    a = inputs.draw("random", rule, Shape(1, 20, 1, 2, 16, 8), dtype=dtype, **drawing)
    a = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in a.items()}
    for x in a.values():
        if grad and isinstance(x, torch.Tensor) and x.is_floating_point():
            x.requires_grad_()
    return getattr(wyfold, f"{form}_{rule}")(**a, **more, backend="triton")


def ttt(dtype: torch.dtype, device: torch.device, D: int = 16):
    a = inputs.draw("random", "ttt_linear", Shape(1, 20, 1, 1, D, D), state="normal", dtype=dtype)
    a = {name: x.to(device).requires_grad_() for name, x in a.items()}
    return wyfold.chunk_ttt_linear(**a, output_final_state=True, backend="triton")


def served(name: str, dtype: torch.dtype, device: torch.device, T: int = 0, **more: Any):
    T = T or {"decode": 1, "verify": 3, "prefill": 20}[name]
    operator = {"gla": "gla", "dplr": "dplr_delta_rule", "gdn2": "gdn2"}.get(more.get("rule", ""), "gated_delta_rule")
    a = inputs.draw("random", operator, Shape(2, T, 1, 2, 16, 8), dtype=dtype)
    a = {"beta": None, "g": a.get("gk")} | {key: x for key, x in a.items() if key != "gk"}
    pool = torch.zeros(9, 2, 8, 16, device=device)
    slots = torch.arange(6, device=device).view(2, 3) if name == "verify" else torch.arange(2, device=device)
    more = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in (a | more).items()}
    where = {"pool": pool, "state_indices": slots, "state_v_first": True}
    return getattr(serving, name)(**where, backend="triton", **more)


def cut(device: torch.device):
    with segment_rule.forced(4):
        return delta("gated_delta_rule", FP32, device, state="normal", chunk_size=16)


def served_in_segments(device: torch.device):
    with segment_rule.forced(4):
        return served("prefill", FP32, device, T=100 if device.type == "cpu" else 300)


def states(device: torch.device) -> wyfold.TTTState:
    S, c = (torch.zeros(3, 2, n, 16, device=device) for n in (16, 1))
    return wyfold.TTTState(S, c, S.clone(), c.clone(), torch.zeros(3, dtype=torch.int32, device=device))


CU = torch.tensor([0, 9, 9, 20])
FLAGS = torch.tensor([True, False])
CALLS: dict[str, Callable[[torch.device], Any]] = {
    "GDN, bf16": lambda d: delta("gated_delta_rule", BF16, d),
    "GDN, fp16, gate inside, logits": lambda d: delta(
        "gated_delta_rule", FP16, d, gate="model", beta="logits", use_qk_l2norm_in_kernel=True
    ),
    "GDN, V first, kept states": lambda d: delta(
        "gated_delta_rule", BF16, d, grad=False, state_v_first=True, output_final_state=True,
        return_intermediate_states=True, checkpoint_every=64, chunk_size=64,
    ),
    "KDA, fp32, bounded, forward": lambda d: delta("kda", FP32, d, gate="model bounded", grad=False, chunk_size=32),
    "KDA, bf16, safe gate, packed": lambda d: delta("kda", BF16, d, safe_gate=True, cu_seqlens=CU.to(d), grad=False),
    "DeltaNet, bf16, factors kept": lambda d: delta("delta_rule", BF16, d, disable_recompute=True),
    "GDN, recurrent": lambda d: delta("gated_delta_rule", BF16, d, form="fused_recurrent", grad=False, gate="model"),
    "GDN, segments": cut,
    "TTT, bf16": lambda d: ttt(BF16, d),
    "TTT, fp32": lambda d: ttt(FP32, d),
    "TTT, bf16, narrow": lambda d: ttt(BF16, d, 3),
    "decode": lambda d: served("decode", BF16, d, has_initial_state=FLAGS),
    "verify": lambda d: served("verify", FP32, d, num_accepted_tokens=torch.tensor([1, 3])),
    "prefill": lambda d: served("prefill", BF16, d, has_initial_state=FLAGS),
    "prefill, segments": served_in_segments,
    "decode, DPLR": lambda d: served("decode", BF16, d, rule="dplr", has_initial_state=FLAGS),
    "verify, GDN-2": lambda d: served("verify", FP32, d, rule="gdn2"),
    "prefill, GLA": lambda d: served("prefill", BF16, d, rule="gla"),
    "prefill, DPLR": lambda d: served("prefill", BF16, d, rule="dplr"),
    "prefill, checkpoints": lambda d: served(
        "prefill", FP32, d, checkpoint_every=64, checkpoint_pool=torch.zeros(4, 2, 8, 16),
        checkpoint_indices=torch.zeros(2, 0, dtype=torch.int64), output_state_indices=torch.tensor([3, 4]),
    ),
    "convolution": lambda d: wyfold.causal_conv1d(
        torch.ones(2, 9, 24, device=d, dtype=BF16), torch.ones(24, 4, device=d), torch.ones(24, device=d),
        initial_state=torch.ones(2, 24, 3, device=d, requires_grad=True), activation="silu", backend="triton",
        output_final_state=True,
    ),
    "convolution, pool": lambda d: serving.conv1d_update(
        torch.ones(2, 24, device=d), torch.zeros(4, 24, 6, device=d), torch.ones(24, 4, device=d),
        num_accepted_tokens=torch.ones(2, dtype=torch.int32, device=d), backend="triton",
    ),
    "norms": lambda d: wyfold.rms_norm_gated(
        *(torch.ones(3, 24, device=d, dtype=BF16, requires_grad=True) for _ in range(2)), torch.ones(24, device=d),
        backend="triton",
    ),
    "gates": lambda d: wyfold.fused_gdn_gate(
        torch.ones(3, 4, device=d), torch.ones(4, device=d, requires_grad=True), backend="triton"
    ),
    "gates of channels": lambda d: wyfold.fused_kda_gate(
        torch.ones(3, 4, 8, device=d, dtype=FP16), None, torch.ones(32, device=d, requires_grad=True), -5.0,
        output_dtype=BF16, backend="triton",
    ),
    "write strengths": lambda d: wyfold.fused_beta_sigmoid(torch.ones(3, 4, device=d, dtype=BF16), backend="triton"),
    "rows": lambda d: wyfold.l2norm(torch.ones(3, 24, device=d), output_dtype=FP16, backend="triton"),
    "TTT, pool": lambda d: serving.ttt_decode(
        *(torch.ones(2, 1, 2, 16, device=d, dtype=BF16) for _ in range(3)), torch.ones(2, 16, device=d),
        torch.zeros(2, 16, device=d), 0.1, states(d), torch.arange(2, device=d), backend="triton",
    ),
    "convolution, prompts": lambda d: serving.conv1d_prefill(
        torch.ones(1, 20, 24, device=d, dtype=BF16), torch.zeros(4, 24, 3, device=d, dtype=BF16),
        torch.ones(24, 4, device=d, dtype=BF16), cu_seqlens=CU.to(d), state_indices=torch.arange(3, device=d),
        has_initial_state=torch.tensor([True, False, True], device=d), backend="triton",
    ),
    "kkt": lambda d: wyfold.chunk_scaled_dot_kkt(
        torch.ones(1, 20, 1, 16, device=d), torch.ones(1, 20, 2, device=d), -torch.ones(1, 20, 2, 16, device=d),
        cu_seqlens=CU.to(d), backend="triton",
    ),
    "solve_tril": lambda d: wyfold.solve_tril(torch.zeros(1, 20, 2, 32, device=d, dtype=BF16), backend="triton"),
}  # fmt: skip


VARIANTS = (
    "GDN, V first, kept states",
    "KDA, bf16, safe gate, packed",
    "DeltaNet, bf16, factors kept",
    "GDN, bf16",
    "TTT, bf16",
    "TTT, fp32",
    "prefill",
    "prefill, GLA",
)
"""Calls whose kernels another call checks too."""


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.release_if_interpreted] if name in VARIANTS else []) for name in CALLS],
)
def test_right_kernels_pass_once(name: str, device, capsys):
    for _ in range(2):
        CALLS[name](device)
    assert [found.state for found in self_check._outcomes.values()] == ["passed"]
    assert capsys.readouterr().err.count("comparing its kernels with the eager backend") == 1


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "GDN, bf16",
        "KDA, fp32, bounded, forward",
        "GDN, segments",
        pytest.param("TTT, bf16", marks=pytest.mark.release_if_interpreted),
        pytest.param("prefill", marks=pytest.mark.release_if_interpreted),
        "prefill, segments",
    ],
)
def test_the_check_launches_the_configurations_of_the_call(name: str, device, monkeypatch):
    """Every kernel and row that the call uses was used by its check."""
    used: set[tuple[str, str]] = set()
    usual = kernel_configs.row

    def noted(architecture: str, kernel: str, key: str) -> str:
        used.add((kernel, key))
        return usual(architecture, kernel, key)

    monkeypatch.setattr(kernel_configs, "row", noted)
    results = CALLS[name](device)
    checked = set(used)
    used.clear()
    results = CALLS[name](device)
    if isinstance(results, tuple) and results[0].requires_grad:
        results[0].sum().backward()
    assert used and used <= checked


def planted(monkeypatch: pytest.MonkeyPatch, stage: str, name: str, spoil: Callable[..., None]) -> None:
    """Let a launch of the Triton kernels be followed by `spoil`, which gets the launch's arguments."""
    module = table.kernel_module(stage, "triton")
    usual = getattr(module, name)

    def wrong(*arguments: Any, **more: Any) -> Any:
        found = usual(*arguments, **more)
        spoil(*arguments)
        return found

    monkeypatch.setattr(module, name, wrong)


def refusal(name: str, device: torch.device) -> str:
    with pytest.raises(UnsupportedError) as refused:
        CALLS[name](device)
    return refused.value.reasons["triton"]


def test_a_wrong_output_is_refused_with_its_figure(device, monkeypatch):
    """One element in 500 is wrong by a hundredth."""
    planted(monkeypatch, "solve_tril", "solve_tril", lambda A, grid, X: X[:, 17, :, 1].mul_(1.01))
    said = refusal("solve_tril", device)
    assert said.startswith(
        "the kernels of solve_tril (bfloat16, 2 x 32, without gradients) failed their self-check on "
    )
    assert "X has relative error" in said and 'use backend="eager"' in said
    assert refusal("solve_tril", device) == said


def test_a_wrong_gradient_alone_is_refused(device, monkeypatch):
    planted(monkeypatch, "norm", "rms_norm_gated_bwd", lambda *arguments: arguments[-1].x.mul_(1.02))
    said = refusal("norms", device)
    assert "dx has relative error" in said and "dg" not in said and "y has" not in said


def test_a_wrong_row_of_a_scan_is_refused(device, monkeypatch):
    """In 16 bits, where the kernels' error is large: one row of a state, by three hundredths."""
    planted(monkeypatch, "recurrent", "recurrent", lambda *arguments: arguments[7].leaving[:, :, :, 3].mul_(1.03))
    assert "pool has relative error" in refusal("decode", device)


def test_results_that_are_not_finite_are_refused(device, monkeypatch):
    planted(monkeypatch, "gate", "gate", lambda *arguments: arguments[-1][0].fill_(torch.nan))
    assert "y has relative error inf" in refusal("gates", device) or "not finite" in refusal("gates", device)


def test_a_compiled_call_is_checked_while_it_is_traced(device, capsys):
    x = torch.ones(2, 10, 24, device=device, requires_grad=True)
    call = torch.compile(lambda x: wyfold.l2norm(x, backend="triton"), fullgraph=True, backend="aot_eager")
    for _ in range(2):
        call(x).sum().backward()
    assert [found.state for found in self_check._outcomes.values()] == ["passed"]
    assert capsys.readouterr().err.count("first use of l2norm") == 1


@pytest.mark.long
def test_a_compiled_call_of_any_size_is_checked_for_few_and_many_programs(device, monkeypatch):
    monkeypatch.setattr(kernel_configs, "processors", lambda device: 20)
    q = inputs.draw("random", "gated_delta_rule", Shape(1, 20, 1, 2, 16, 8), dtype=BF16)
    q = {name: x.to(device) for name, x in q.items()}
    call = torch.compile(
        lambda **a: wyfold.chunk_gated_delta_rule(**a, backend="triton")[0],
        fullgraph=True, backend="aot_eager", dynamic=True,
    )  # fmt: skip
    call(**q)
    sequences = [trial.sequences for trial, _ in self_check._outcomes]
    assert sequences == [2, 5, 6] and len({trial._replace(sequences=0) for trial, _ in self_check._outcomes}) == 1
    assert all(found.state == "passed" for found in self_check._outcomes.values())


@pytest.mark.parametrize("sequences, checked", [(0, 8), (1, 8), (33, 8), (34, 66), (66, 66), (67, 67), (10_000, 67)])
def test_any_number_of_sequences_has_one_of_three_checks(sequences: int, checked: int, device, monkeypatch):
    """The hints of the check's launches are those of the call's."""
    monkeypatch.setattr(kernel_configs, "processors", lambda device: 132)
    v = torch.empty(1, 1, 1, 16, device=device)
    (found,) = with_sequences(Trial("op", "delta_fwd", (), ()), sequences, v)
    assert found.sequences == checked
    for factor in (1, 2):  # of the forward, of the backward
        hints = {
            kernel_configs.with_occupancy_hint(kernel_configs.LaunchKey(), factor * max(1, n), v.device)
            for n in (sequences, checked)
        }
        assert len(hints) == 1


def test_another_scale_is_no_other_kernel(device, capsys):
    for scale in (1.0, 0.3):
        delta("delta_rule", FP32, device, grad=False, scale=scale)
    assert capsys.readouterr().err.count("first use") == 1


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_the_launches_between_ranks_are_checked(dtype, device, monkeypatch):
    q, v = (torch.empty(1, 1, HV, D, device=device, dtype=dtype) for HV, D in ((1, 16), (2, 24)))
    trials = exchange_trials(OPTIONS, q, v)
    assert len(trials) == 2 and len(exchange_trials(OPTIONS._replace(save=False), q, v)) == 1
    for trial in trials:
        assert self_check.outcome(trial, device, run=True).state == "passed"
    self_check._outcomes.clear()
    planted(monkeypatch, "rank_carry", "rank_send", lambda borders, tails, out: out[:, 1, 3].mul_(1.1))
    said = self_check.outcome(trials[1]._replace(name="again"), device, run=True).refusal
    assert "sent has relative error" in said and "outer" not in said


def test_verification_has_a_call_for_every_operator_with_kernels(device, monkeypatch):
    """All calls are listed; those that are cheap in the interpreter are made."""
    monkeypatch.setattr(kernel_calls, "WIDTHS", (8, 16))
    calls = kernel_calls.kernel_calls(device, quick=True)
    named = {name.partition(",")[0].partition(" ")[0] for name in calls}
    assert named >= {spec.operator for spec in OPERATOR_SPECS.values() if spec.kernels}
    assert named >= {*serving.__all__} - {"decode_packed"}  # has the kernels of decode
    cheap = "l2norm", "rms_norm", "fused_", "solve", "chunk_scaled", "decode", "conv1d_update", "ttt_decode"
    chosen = {name: call for name, call in calls.items() if name.startswith(cheap) and "recurrent" not in name}
    with self_check.collecting() as found:
        for call in chosen.values():
            call()
    assert len(found) == len(chosen) >= 10 and all(record["passed"] for record in found.values())
    assert all(value["error"] <= value["allowed"] for record in found.values() for value in record["tensors"].values())
    assert len(kernel_calls.kernel_calls(device, quick=False)) == 6 * len(calls)


OPTIONS = DeltaOptions(
    operator="chunk_kda", recurrent=False, scale=1.0, qk_l2norm=False, activation="given", lower_bound=0.0, clamp=0.0,
    beta_logit=False, beta_most=1.0, state_v_first=False, state_dtype=FP32, final_state=True, chunk_size=16,
    checkpoint_every=0, save=True, keep_factors=False, backend="triton",
)  # fmt: skip


def over_ranks(given: None, group: dist.ProcessGroup) -> None:
    """Each rank checks the kernels of one rank and those between ranks, then all run."""
    self_check.unproven = lambda *_: True
    kernel_configs.processors = lambda device: 4
    context = build_cp_context(torch.tensor([0, 20, 90]), group)
    q = torch.ones(1, context.tokens, 1, 16, requires_grad=True)
    flags = {"use_qk_l2norm_in_kernel": True, "chunk_size": 16, "backend": "triton"}
    o, _ = wyfold.chunk_delta_rule(q, q, q, cp_context=context, **flags)
    o.sum().backward()
    found = {trial.operator: outcome.state for (trial, _), outcome in self_check._outcomes.items()}
    assert found == {"delta_fwd": "passed", "delta_rank_exchange": "passed"} and q.grad.isfinite().all()
    self_check._outcomes.clear()
    wyfold.chunk_gdn2(q, q, q, b=q, cp_context=context, chunk_size=16, backend="triton")
    # All pieces packed, a piece alone, and a piece with the identity beside its state.
    checked = [(trial.packed, trial.samples[2].rest[-1]) for trial, _ in self_check._outcomes]
    assert checked == [(True, 16), (False, 16), (False, 32)]


def refused_on_one_rank(given: None, group: dist.ProcessGroup) -> None:
    """A failed check on one rank is an error on all, and no rank waits for another."""
    self_check.unproven = lambda *_: True
    rank = dist.get_rank(group)
    answer = self_check.Outcome("failed", "dk is wrong on this card") if rank == 1 else self_check.Outcome("passed")
    self_check.outcome = lambda trial, device, run: answer
    context = build_cp_context(torch.tensor([0, 90]), group)
    q = torch.ones(1, context.tokens, 1, 16)
    try:
        wyfold.chunk_kda(q, q, q, cp_context=context, backend="triton")
    except ValueError as error:
        assert isinstance(error, UnsupportedError) == (rank == 1), error
        assert rank == 0 or "dk is wrong on this card" in str(error)
    else:
        raise AssertionError("not refused")


RANK_CASES = {
    "over ranks": Case(lambda: None, over_ranks),
    "refused on one rank": Case(lambda: None, refused_on_one_rank),
}


@pytest.mark.long
def test_ranks_check_for_themselves_and_fail_together(device, tmp_path):
    if device.type != "cpu":
        pytest.skip("the ranks of this test run interpreted kernels on CPUs")
    folder = tmp_path / "ranks"
    folder.mkdir()
    assert not failures_on_ranks([2], folder, "tests.interpret.test_self_check", "RANK_CASES")


PROCESS = """
import sys
import torch
from tests import conftest

if conftest.interpreting():
    conftest.repair_interpreter()
from wyfold.kernels import self_check
import wyfold

self_check.unproven = lambda *_: True
x = torch.ones(3, 24, device=sys.argv[1], requires_grad=True)
wyfold.l2norm(x, backend="triton").sum().backward()
print(next(iter(self_check._outcomes.values())).state)
"""


def process(device: torch.device) -> processes.Program:
    return processes.with_package().start(["-c", PROCESS, device.type])


@pytest.mark.long
def test_two_processes_at_once_and_one_after_them(device, tmp_path):
    """Both check or one finds the other's answer; the third finds it."""
    for running in [process(device), process(device)]:
        done = running.wait()
        assert done.stdout.strip() == "passed", done.stderr
    (file,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert file.suffix == ".json"
    done = process(device).wait()
    assert done.stdout.strip() == "passed" and "first use" not in done.stderr
