"""What a row's function is told and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


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
class CheckResult:
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
    skip_reason: str = ""

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
class Check:
    """One promise of the scorecard."""

    number: int
    promise: str
    target: str
    check: Callable[[Scope], CheckResult]
