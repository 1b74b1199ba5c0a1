"""The scorecard's checks detect planted errors, and too few cases are not a pass."""

import itertools

import pytest
import torch

from wyfold.cli import scorecard
from wyfold.cli.catalog import SCORECARD_CHECKS
from wyfold.cli.operators import OPERATOR_SPECS
from wyfold.cli.scorecard import CHECKS, FAIL, NOT_RUN, PASS, bits, contract, run_check
from wyfold.cli.scorecard.accuracy import dictionary_reference
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


def test_only_good_cases_are_a_pass(monkeypatch):
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
def test_one_failed_case_is_a_fail_and_is_listed(error, monkeypatch):
    def breaks(scope):
        result = CheckResult(scope, promised=5)  # a failure counts also with fewer cases than promised
        result.error(error, 1e-10, "chunk_kda: dk")
        return result

    record = row_of(monkeypatch, breaks)
    assert record.outcome == FAIL
    assert record.as_dict()["pass"] is False
    assert "chunk_kda: dk" in record.broken[0]


def test_an_exception_is_a_fail(monkeypatch):
    record = row_of(monkeypatch, lambda scope: 1 // 0)
    assert record.outcome == FAIL
    assert "ZeroDivisionError" in record.broken[0]


@pytest.mark.parametrize(("promised", "why"), [(3, ""), (1, "there is no GPU")])
def test_a_check_that_did_not_run_is_no_pass(promised, why, monkeypatch):
    def stops(scope):
        result = CheckResult(scope, promised=promised, skip_reason=why)
        result.case(True, "")
        return result

    record = row_of(monkeypatch, stops)
    assert record.outcome == NOT_RUN
    assert record.as_dict()["pass"] is None
    assert record.note


def test_an_unknown_number_is_not_run():
    record = run_check(34, Scope())
    assert (record.outcome, record.cases) == (NOT_RUN, 0)
    assert "no check of this number" in record.note


def test_the_catalogue_lists_every_check():
    assert SCORECARD_CHECKS == tuple(sorted(CHECKS))


# --- rows that hold --------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("number", [1, 2, 5, 6, 7, 12, 13, 14, 15, 17, 18, 19, 26, 29, 39, 40])
def test_a_tenth_of_the_cases_passes(number):
    record = run_check(number, QUICK)
    assert not record.broken
    assert record.cases


@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
def test_invalid_arguments_are_named_before_any_launch(refusal: Refusal):
    assert contract.refusal_fault(refusal) == ""


@pytest.mark.parametrize("operator", sorted({refusal.operator for refusal in REFUSALS}))
def test_arguments_of_refusals_are_valid_before_they_are_changed(operator: str):
    with contract.launches_counted() as launched:
        OPERATOR_SPECS[operator].ours(right_arguments(operator))
    assert launched


def test_refusals_are_distinct_and_enough():
    names = [str(refusal) for refusal in REFUSALS]
    assert len(names) == len(set(names)) >= contract.REFUSED


def test_opcheck_covers_every_registered_operator():
    seen = {name.partition(".")[0] for name in contract.recorded_calls()}
    assert seen == contract.registered()


def test_every_pair_of_options_occurs():
    combinations = contract.pairwise(0)
    for a, b in itertools.combinations(contract.FACTORS, 2):
        seen = {(str(combination[a]), str(combination[b])) for combination in combinations}
        wanted = itertools.product(map(str, contract.FACTORS[a]), map(str, contract.FACTORS[b]))
        assert seen == set(wanted), (a, b)


def test_layouts_change_strides_and_keep_values():
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
def test_a_shift_by_one_token_is_detected(number, monkeypatch):
    plant(monkeypatch, lambda out: out.copy_(out.roll(1, dims=1)))
    assert run_check(number, QUICK).outcome == FAIL


def test_acausality_is_detected(monkeypatch):
    plant(monkeypatch, lambda out: out[:, :-1].add_(out[:, 1:].clone(), alpha=1e-3))
    assert run_check(13, QUICK).outcome == FAIL


def test_a_leak_between_packed_sequences_is_detected(monkeypatch):
    plant(monkeypatch, lambda out: out.add_(out.mean(1, keepdim=True) * 1e-6))
    assert run_check(12, QUICK).outcome == FAIL


def test_lower_precision_is_detected(monkeypatch):
    plant(monkeypatch, lambda out: out.copy_(out.bfloat16()))
    assert run_check(7, QUICK).outcome == FAIL


def test_a_missing_argument_check_is_detected(monkeypatch):
    monkeypatch.setattr(check, "flag", lambda op, **flags: None)
    monkeypatch.setattr(plan_cache, "_plans", {})  # plans cached without the check must not leak into other tests
    record = run_check(17, Scope())
    assert record.outcome == FAIL
    assert any("use_qk_l2norm_in_kernel" in line for line in record.broken)


def test_a_late_refusal_is_detected(monkeypatch):
    late = Refusal("l2norm", "x", "is fine", lambda right: {})
    assert contract.refusal_fault(late) == "was accepted"
    monkeypatch.setitem(OPERATOR_SPECS, "l2norm", OPERATOR_SPECS["l2norm"])
    wrong_name = Refusal("l2norm", "weight", "is not what is wrong", lambda right: {"x": right["x"].int()})
    assert "is not named" in contract.refusal_fault(wrong_name)


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
def test_unsafe_code_is_detected(text, found):
    assert unsafe(text, in_cli=False) == found


def test_only_the_command_line_starts_processes():
    assert unsafe("import subprocess", in_cli=True) == []


def test_the_dictionary_is_cleared_at_borders_and_resets():
    eye = torch.eye(8)
    arguments = {
        "q": eye[[0, 0, 0, 0]].view(1, 4, 1, 8),
        "k": eye[[0, 1, 0, 1]].view(1, 4, 1, 8),
        "v": torch.arange(4.0).view(1, 4, 1, 1).expand(1, 4, 1, 8) + 1,
        "beta": torch.ones(1, 4, 1),
        "g": torch.zeros(1, 4, 1),
    }
    assert dictionary_reference(arguments, None)[0, :, 0, 0].tolist() == [1, 1, 3, 3]
    assert dictionary_reference(arguments, [1, 3])[0, :, 0, 0].tolist() == [1, 0, 3, 3]
    arguments["g"] = torch.tensor([0, 0, 0, -torch.inf]).view(1, 4, 1)
    assert dictionary_reference(arguments, None)[0, :, 0, 0].tolist() == [1, 1, 3, 0]
