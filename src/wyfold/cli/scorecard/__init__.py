"""The reliability scorecard: what the library promises, each promise one function that checks it.

`wyfold verify --row N` and the tests call the same functions. A row says how many cases it tried and which of them
broke; one that tried fewer than its promise names, or could not try, was not run, whatever it saw.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from wyfold.cli.scorecard import accuracy, bits, contract, installation
from wyfold.cli.scorecard.finding import Finding, Scope

PASS, FAIL, NOT_RUN = "pass", "fail", "not run"


@dataclass(frozen=True)
class Record:
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


def run_row(number: int, scope: Scope) -> Record:
    """The record of one row; a number whose subject this version does not have was not run."""
    row = ROWS.get(number)
    if row is None:
        return Record(number, "", "", NOT_RUN, "", 0, (), "its subject is not in this version", 0.0, scope.seed)
    began = time.perf_counter()
    try:
        finding = row.check(scope)
    except Exception as error:  # whatever stops a row, the others are still to be seen
        finding = Finding(scope)
        finding.case(False, f"the check itself stopped: {type(error).__name__}: {error}")
    seconds = round(time.perf_counter() - began, 1)
    outcome, note = _outcome(finding)
    value = f"{len(finding.broken)} of {finding.cases} broken"
    if finding.worst is not None:
        value += f", largest error {finding.worst:.1e}"
    broken = tuple(finding.broken[:20])
    return Record(number, row.promise, row.target, outcome, value, finding.cases, broken, note, seconds, scope.seed)


def _outcome(finding: Finding) -> tuple[str, str]:
    if finding.broken:
        return FAIL, ""
    if finding.why_not:
        return NOT_RUN, finding.why_not
    if finding.cases < finding.promised:
        return NOT_RUN, f"held in {finding.cases} cases, the promise is about {finding.promised}"
    return PASS, ""


ROWS = {row.number: row for row in (*accuracy.ROWS, *bits.ROWS, *contract.ROWS, *installation.ROWS)}
"""Every row this version can try, by number."""
