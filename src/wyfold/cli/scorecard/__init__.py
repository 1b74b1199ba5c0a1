"""The reliability scorecard: what the library promises, each promise one function that checks it.

`wyfold verify --row N` and the tests call the same functions. A row says how many cases it tried and which of them
broke; one that tried fewer than its promise names, or could not try, was not run, whatever it saw.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PASS, FAIL, NOT_RUN = "pass", "fail", "not run"


@dataclass(frozen=True)
class Scope:
    """How a row is to be run.

    Attributes:
        seed: Of every draw.
        quick: A tenth of the cases, for a first look; a row that promises a number of cases cannot pass so.
        tried: Told of every case, for a progress display.
    """

    seed: int = 0
    quick: bool = False
    tried: Callable[[], None] = lambda: None

    def count(self, promised: int) -> int:
        """Cases to try of those promised."""
        return max(1, promised // 10) if self.quick else promised


@dataclass
class Finding:
    """What a row's function saw.

    Attributes:
        scope: Told of every case.
        promised: Least number of cases the row's target names.
        cases: Tried so far.
        worst: Largest error seen, where the row measures one.
        broken: One line for each case that broke the promise.
        why_not: Why the row could not be tried.
    """

    scope: Scope
    promised: int = 1
    cases: int = 0
    worst: float | None = None
    broken: list[str] = field(default_factory=list)
    why_not: str = ""

    def case(self, holds: bool, otherwise: str) -> None:
        """One case, and the line that says how it broke if it did."""
        self.cases += 1
        if not holds:
            self.broken.append(otherwise)
        self.scope.tried()

    def error(self, value: float, most: float, where: str) -> None:
        """One case with a measured error."""
        self.worst = max(value, self.worst or 0.0) if value == value else value
        self.case(value <= most, f"{where}: {value:.2e}, allowed {most:.0e}")


@dataclass(frozen=True)
class Row:
    """One promise of the scorecard."""

    number: int
    promise: str
    target: str
    check: Callable[[Scope], Finding]


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
    row = rows().get(number)
    if row is None:
        return Record(number, "", "", NOT_RUN, "", 0, (), "its subject is not in this version", 0.0, scope.seed)
    began = time.perf_counter()
    finding = row.check(scope)
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


def rows() -> dict[int, Row]:
    """Every row this version can try, by number."""
    from wyfold.cli.scorecard import accuracy, bits, contract, house

    found = (*accuracy.ROWS, *bits.ROWS, *contract.ROWS, *house.ROWS)
    return {row.number: row for row in sorted(found, key=lambda row: row.number)}


CPU = (1, 2, 5, 6, 7, 12, 13, 14, 15, 17, 18, 19, 26, 29, 39, 40)
"""Rows whose CPU half is due in this version."""
