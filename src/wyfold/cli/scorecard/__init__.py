"""Reliability scorecard: promises of the library, each verified by one function.

| number | check | file |
|---|---|---|
| 1 | all definitions of an operator agree in float64 | `accuracy` |
| 2 | one-hot keys and integer values give exact answers | `accuracy` |
| 5 | repeated and correlated keys stay accurate | `accuracy` |
| 6 | every gate from 0 to -inf is legal and accurate | `accuracy` |
| 7 | float32 results keep float32 accuracy where TF32 is allowed | `accuracy` |
| 12 | a packed or batched sequence has the bits of the sequence alone | `bits` |
| 13 | later tokens do not change earlier outputs | `bits` |
| 14 | a sequence split at a state has the bits of the whole sequence | `bits` |
| 15 | strides of arguments do not change a bit | `bits` |
| 17 | invalid arguments are refused by name before any launch | `contract` |
| 18 | each combination of options is accurate or refused | `contract` |
| 19 | every length and every packing works | `contract` |
| 26 | operators pass opcheck and compile without graph breaks | `contract` |
| 29 | no call depends on earlier or concurrent calls | `bits` |
| 39 | import and first use are fast | `installation` |
| 40 | the wheel is reproducible, needs torch only, and uses nothing unsafe | `installation` |

Numbers identify the checks in options and stored results; they are not consecutive. `wyfold verify --row N` and the
tests call the same functions. A check counts its cases and lists those that failed. It is "not run" if it could not
run, or ran fewer cases than it promises.
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
    """Outcome of a check.

    Attributes:
        row: Number of the check.
        promise, target: As in `Check`.
        outcome: "pass", "fail" or "not run".
        value: Number of failed cases, and the largest error if the check measures one.
        cases: Number of cases that ran.
        broken: One line for each failed case, at most twenty.
        note: Why it was not run; empty otherwise.
        seconds: Duration.
        seed: Seed of the inputs.
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
        """Fields of the JSON result; `pass` is true, false, or null if the check was not run."""
        return vars(self) | {"pass": {PASS: True, FAIL: False, NOT_RUN: None}[self.outcome]}


def run_check(number: int, scope: Scope) -> CheckRecord:
    """Run one check. An unknown number gives the outcome "not run"."""
    row = CHECKS.get(number)
    if row is None:
        return CheckRecord(
            number, "", "", NOT_RUN, "", 0, (), "this version has no check of this number", 0.0, scope.seed
        )
    began = time.perf_counter()
    try:
        result = row.check(scope)
    except Exception as error:  # an exception fails this check; the others still run
        result = CheckResult(scope)
        result.case(False, f"the check itself stopped: {type(error).__name__}: {error}")
    seconds = round(time.perf_counter() - began, 1)
    outcome, note = _outcome(result)
    value = f"{len(result.broken)} of {result.cases} failed"
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
        return NOT_RUN, f"passed {result.cases} cases, but a pass needs {result.promised}"
    return PASS, ""


CHECKS = {row.number: row for row in (*accuracy.CHECKS, *bits.CHECKS, *contract.CHECKS, *installation.CHECKS)}
"""Number -> check."""
