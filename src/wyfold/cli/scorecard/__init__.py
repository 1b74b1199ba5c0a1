"""The reliability scorecard: what the library promises, each promise one function that checks it.

`wyfold verify --row N` and the tests call the same functions. A row says how many cases it tried and which of them
broke; one that tried fewer than its promise names, or could not try, was not run, whatever it saw.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from wyfold.cli.scorecard import accuracy, bits, contract, installation
from wyfold.cli.scorecard.check import CheckResult, Scope

PASS, FAIL, NOT_RUN = "pass", "fail", "not run"


@dataclass(frozen=True)
class CheckRecord:
    """What came of a row.

    Attributes:
        row: Its number.
        promise, target: As the scorecard has them.
        outcome: "pass", "fail" or "not run".
        value: The largest error, or how many of the cases broke.
        cases: Tried.
        broken: One line each, the first twenty.
        note: Why it was not run.
        seconds: It took.
        seed: Of its inputs.
    """

    row: int
    promise: str
    target: str
    outcome: str
    value: str
    cases: int
    broken: tuple[str, ...]
    note: str
    seconds: float
    seed: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON: `pass` is true, false, or null where the row was not run."""
        return vars(self) | {"pass": {PASS: True, FAIL: False, NOT_RUN: None}[self.outcome]}


def run_check(number: int, scope: Scope) -> CheckRecord:
    """The record of one row; a number whose subject this version does not have was not run."""
    row = CHECKS.get(number)
    if row is None:
        return CheckRecord(number, "", "", NOT_RUN, "", 0, (), "its subject is not in this version", 0.0, scope.seed)
    began = time.perf_counter()
    try:
        result = row.check(scope)
    except Exception as error:  # whatever stops a row, the others are still to be seen
        result = CheckResult(scope)
        result.case(False, f"the check itself stopped: {type(error).__name__}: {error}")
    seconds = round(time.perf_counter() - began, 1)
    outcome, note = _outcome(result)
    value = f"{len(result.broken)} of {result.cases} broken"
    if result.worst is not None:
        value += f", largest error {result.worst:.1e}"
    broken = tuple(result.broken[:20])
    return CheckRecord(number, row.promise, row.target, outcome, value, result.cases, broken, note, seconds, scope.seed)


def _outcome(result: CheckResult) -> tuple[str, str]:
    if result.broken:
        return FAIL, ""
    if result.skip_reason:
        return NOT_RUN, result.skip_reason
    if result.cases < result.promised:
        return NOT_RUN, f"held in {result.cases} cases, the promise is about {result.promised}"
    return PASS, ""


CHECKS = {row.number: row for row in (*accuracy.CHECKS, *bits.CHECKS, *contract.CHECKS, *installation.CHECKS)}
"""Every row this version can try, by number."""
