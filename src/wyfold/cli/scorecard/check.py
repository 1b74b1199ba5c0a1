"""Checks of the scorecard: their definition, options and result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Scope:
    """Options of a check.

    Attributes:
        seed: Seed of all random draws.
        quick: Run a tenth of the cases. A check that promises a number of cases cannot pass then.
        tried: Called after every case, for a progress display.
    """

    seed: int = 0
    quick: bool = False
    tried: Callable[[], None] = lambda: None

    def count(self, promised: int) -> int:
        """Number of cases to run of those promised."""
        return max(1, promised // 10) if self.quick else promised


@dataclass
class CheckResult:
    """Result of a check, filled in case by case.

    Attributes:
        scope: Options of the check.
        promised: Least number of cases for a pass.
        cases: Number of cases so far.
        worst: Largest error so far; None if the check measures none.
        broken: One line for each failed case.
        skip_reason: Why the check could not run; empty if it ran.
    """

    scope: Scope
    promised: int = 1
    cases: int = 0
    worst: float | None = None
    broken: list[str] = field(default_factory=list)
    skip_reason: str = ""

    def case(self, holds: bool, otherwise: str) -> None:
        """Record a case; `otherwise` describes its failure."""
        self.cases += 1
        if not holds:
            self.broken.append(otherwise)
        self.scope.tried()

    def error(self, value: float, most: float, where: str) -> None:
        """Record a case with a measured error and its limit."""
        self.worst = max(value, self.worst or 0.0) if value == value else value
        self.case(value <= most, f"{where}: {value:.2e}, allowed {most:.0e}")


@dataclass(frozen=True)
class Check:
    """One check of the scorecard.

    Attributes:
        number: Number of the check.
        promise: What it verifies, in a few words.
        target: What must hold for a pass.
        check: Function that runs it.
    """

    number: int
    promise: str
    target: str
    check: Callable[[Scope], CheckResult]
