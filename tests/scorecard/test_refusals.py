"""Invalid calls of every operator: each is refused by argument, before anything is launched."""

import re

import pytest
from tests.scorecard.refusals import REFUSALS, Refusal, right_arguments

import wyfold
from wyfold.cli.operators import OPERATOR_SPECS
from wyfold.kernels import table
from wyfold.runtime import check, replay_cache

LEAST = 60
"""Least number of kinds of invalid calls."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stages looked up so far."""
    asked: list[str] = []
    usual = table.kernel_module
    monkeypatch.setattr(table, "kernel_module", lambda stage, backend: asked.append(stage) or usual(stage, backend))
    return asked


def fault(refusal: Refusal, launched: list[str]) -> str:
    """Why the refusal of an invalid call is insufficient; empty if it is good."""
    launched.clear()
    try:
        getattr(wyfold, refusal.operator)(**refusal.arguments())
    except (TypeError, ValueError) as error:
        text = str(error)
        if not isinstance(error, refusal.error) or (
            refusal.error is ValueError and isinstance(error, wyfold.UnsupportedError)
        ):
            return f"raised {type(error).__name__}: {text}"
        if launched:
            return f"launched {', '.join(launched)} before it was refused"
        if not re.search(rf"\b{refusal.argument}\b", text):
            return f"is not named in {text!r}"
        # Python's TypeError for an unknown or missing keyword has the form `operator() ...`.
        return "" if text.startswith((f"{refusal.operator}: ", f"{refusal.operator}() ")) else f"came as {text!r}"
    return "was accepted"


@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
def test_an_invalid_argument_is_named_before_any_launch(refusal: Refusal, launched: list[str]):
    assert fault(refusal, launched) == ""


@pytest.mark.parametrize("operator", sorted({refusal.operator for refusal in REFUSALS}))
def test_arguments_are_valid_before_they_are_changed(operator: str, launched: list[str]):
    OPERATOR_SPECS[operator].ours(right_arguments(operator))
    assert launched


def test_refusals_are_distinct_and_enough():
    names = [str(refusal) for refusal in REFUSALS]
    assert len(names) == len(set(names)) >= LEAST


def test_a_missing_argument_check_is_detected(launched: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(check, "flag", lambda op, **flags: None)
    monkeypatch.setattr(replay_cache, "_entries", {})  # plans cached without the check must not leak into other tests
    monkeypatch.setattr(replay_cache, "_alike", {})
    undetected = {refusal.argument for refusal in REFUSALS if fault(refusal, launched) == "was accepted"}
    assert "use_qk_l2norm_in_kernel" in undetected


def test_an_accepted_call_and_a_wrong_name_are_detected(launched: list[str]):
    assert fault(Refusal("l2norm", "x", "is fine", lambda right: {}), launched) == "was accepted"
    wrong_name = Refusal("l2norm", "weight", "is not what is wrong", lambda right: {"x": right["x"].int()})
    assert "is not named" in fault(wrong_name, launched)
