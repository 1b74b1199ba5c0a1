"""The scorecard's checks detect planted errors, and too few cases are not a pass."""

import itertools

import pytest
import torch

from wyfold.cli import scorecard
from wyfold.cli.catalog import SCORECARD_CHECKS
from wyfold.cli.operators import OPERATOR_SPECS
from wyfold.cli.scorecard import CHECKS, FAIL, NOT_RUN, PASS, bits, contract, run_check
from wyfold.cli.scorecard.accuracy import written_last
from wyfold.cli.scorecard.check import Check, CheckResult, Scope
from wyfold.cli.scorecard.installation import unsafe
from wyfold.cli.scorecard.refusals import REFUSALS, Refusal, right_arguments
from wyfold.kernels.scan import eager as scan_stage
from wyfold.ops import plan_cache
from wyfold.runtime import check

QUICK = Scope(seed=3, quick=True)


# --- records ---------------------------------------------------------------------------------------------------------


def row_of(monkeypatch: pytest.MonkeyPatch, check) -> scorecard.CheckRecord:
    monkeypatch.setitem(CHECKS, 99, Check(99, "a promise", "a target", check))
    return run_check(99, Scope(seed=5))


def test_all_cases_that_hold_are_a_pass(monkeypatch):
    def holds(scope):
        result = CheckResult(scope, promised=2)
        result.case(True, "")
        result.error(1e-12, 1e-10, "here")
        return result

    record = row_of(monkeypatch, holds)
    assert (record.outcome, record.cases, record.seed) == (PASS, 2, 5)
    assert record.as_dict()["pass"] is True
    assert "1.0e-12" in record.value


@pytest.mark.parametrize("error", [1e-9, float("nan")])
def test_one_broken_case_is_a_fail_and_keeps_its_line(error, monkeypatch):
    def breaks(scope):
        result = CheckResult(scope, promised=5)  # a failure counts also with fewer cases than promised
        result.error(error, 1e-10, "chunk_kda: dk")
        return result

    record = row_of(monkeypatch, breaks)
    assert record.outcome == FAIL
    assert record.as_dict()["pass"] is False
    assert "chunk_kda: dk" in record.broken[0]


def test_a_row_that_stops_is_a_fail(monkeypatch):
    record = row_of(monkeypatch, lambda scope: 1 // 0)
    assert record.outcome == FAIL
    assert "ZeroDivisionError" in record.broken[0]


@pytest.mark.parametrize(("promised", "why"), [(3, ""), (1, "there is no GPU")])
def test_what_did_not_run_is_no_pass(promised, why, monkeypatch):
    def stops(scope):
        result = CheckResult(scope, promised=promised, skip_reason=why)
        result.case(True, "")
        return result

    record = row_of(monkeypatch, stops)
    assert record.outcome == NOT_RUN
    assert record.as_dict()["pass"] is None
    assert record.note


def test_a_row_without_a_subject_was_not_run():
    record = run_check(34, Scope())
    assert (record.outcome, record.cases) == (NOT_RUN, 0)
    assert "no check of this number" in record.note


def test_every_row_due_on_the_cpu_is_there():
    assert SCORECARD_CHECKS == tuple(sorted(CHECKS))


# --- rows that hold --------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("number", [1, 2, 5, 6, 7, 12, 13, 14, 15, 17, 18, 19, 26, 29, 39, 40])
def test_a_tenth_of_the_cases_holds(number):
    record = run_check(number, QUICK)
    assert not record.broken
    assert record.cases


@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
def test_bad_input_is_named_before_any_launch(refusal: Refusal):
    assert contract.refused(refusal) == ""


@pytest.mark.parametrize("operator", sorted({refusal.operator for refusal in REFUSALS}))
def test_what_the_refusals_spoil_was_right(operator: str):
    with contract.launches_counted() as launched:
        OPERATOR_SPECS[operator].ours(right_arguments(operator))
    assert launched


def test_refusals_are_as_many_as_promised_and_all_different():
    names = [str(refusal) for refusal in REFUSALS]
    assert len(names) == len(set(names)) >= contract.REFUSED


def test_every_registered_operator_is_seen_by_opcheck():
    seen = {name.partition(".")[0] for name in contract.recorded_calls()}
    assert seen == contract.registered()


def test_every_pair_of_options_has_a_cell():
    cells = contract.pairwise(0)
    for a, b in itertools.combinations(contract.FACTORS, 2):
        seen = {(str(cell[a]), str(cell[b])) for cell in cells}
        wanted = itertools.product(map(str, contract.FACTORS[a]), map(str, contract.FACTORS[b]))
        assert seen == set(wanted), (a, b)


def test_strides_are_strange_and_values_are_not():
    x = torch.randn(2, 5, 3, 4)
    for kind, make in bits.STRIDES.items():
        strange = make(x)
        assert (strange.stride(), strange.storage_offset()) != (x.stride(), 0), kind
        if "expanded" not in kind:
            assert torch.equal(strange, x), kind


# --- rows that must fail ---------------------------------------------------------------------------------------------


def plant(monkeypatch: pytest.MonkeyPatch, spoil) -> None:
    """Apply `spoil` to the outputs of the scan, in place."""
    usual = scan_stage.scan

    def planted(inputs, factors, S, table, scale, out, leaving):
        left = usual(inputs, factors, S, table, scale, out, leaving)
        spoil(out)
        return left

    monkeypatch.setattr(scan_stage, "scan", planted)


@pytest.mark.parametrize("number", [2, 19])
def test_a_row_shifted_by_one_token_is_found(number, monkeypatch):
    plant(monkeypatch, lambda out: out.copy_(out.roll(1, dims=1)))
    assert run_check(number, QUICK).outcome == FAIL


def test_a_look_at_the_future_is_found(monkeypatch):
    plant(monkeypatch, lambda out: out[:, :-1].add_(out[:, 1:].clone(), alpha=1e-3))
    assert run_check(13, QUICK).outcome == FAIL


def test_a_leak_between_packed_sequences_is_found(monkeypatch):
    plant(monkeypatch, lambda out: out.add_(out.mean(1, keepdim=True) * 1e-6))
    assert run_check(12, QUICK).outcome == FAIL


def test_rounding_to_less_is_found(monkeypatch):
    plant(monkeypatch, lambda out: out.copy_(out.bfloat16()))
    assert run_check(7, QUICK).outcome == FAIL


def test_a_check_left_out_is_found(monkeypatch):
    monkeypatch.setattr(check, "flag", lambda op, **flags: None)
    monkeypatch.setattr(plan_cache, "_plans", {})  # plans cached without the check must not leak into other tests
    record = run_check(17, Scope())
    assert record.outcome == FAIL
    assert any("use_qk_l2norm_in_kernel" in line for line in record.broken)


def test_a_refusal_that_comes_late_is_found(monkeypatch):
    late = Refusal("l2norm", "x", "is fine", lambda right: {})
    assert contract.refused(late) == "was accepted"
    monkeypatch.setitem(OPERATOR_SPECS, "l2norm", OPERATOR_SPECS["l2norm"])
    wrong_name = Refusal("l2norm", "weight", "is not what is wrong", lambda right: {"x": right["x"].int()})
    assert "is not named" in contract.refused(wrong_name)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import pickle", ["pickle"]),
        ("from urllib import request", ["urllib"]),
        ("import subprocess", ["subprocess"]),
        ("x = torch.load(path)", ["torch.load"]),
        ("read(checkpoint.FileSystemReader(folder))", ["checkpoint.FileSystemReader"]),
        ("run('ls', shell=True)", ["run"]),
        ("model.eval()", []),
    ],
)
def test_what_is_unsafe_in_a_source_is_seen(text, found):
    assert unsafe(text, in_cli=False) == found


def test_only_the_command_line_starts_processes():
    assert unsafe("import subprocess", in_cli=True) == []


def test_the_dictionary_forgets_at_borders_and_resets():
    eye = torch.eye(8)
    arguments = {
        "q": eye[[0, 0, 0, 0]].view(1, 4, 1, 8),
        "k": eye[[0, 1, 0, 1]].view(1, 4, 1, 8),
        "v": torch.arange(4.0).view(1, 4, 1, 1).expand(1, 4, 1, 8) + 1,
        "beta": torch.ones(1, 4, 1),
        "g": torch.zeros(1, 4, 1),
    }
    assert written_last(arguments, None)[0, :, 0, 0].tolist() == [1, 1, 3, 3]
    assert written_last(arguments, [1, 3])[0, :, 0, 0].tolist() == [1, 0, 3, 3]
    arguments["g"] = torch.tensor([0, 0, 0, -torch.inf]).view(1, 4, 1)
    assert written_last(arguments, None)[0, :, 0, 0].tolist() == [1, 1, 3, 0]
