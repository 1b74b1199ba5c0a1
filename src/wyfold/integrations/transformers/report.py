"""What a patch replaced, and what became of every call."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

SERVED = "wyfold"


class Replaced(NamedTuple):
    """One name that was rebound.

    Attributes:
        family: Model type.
        where: Module, class or layer.
        name: Name in it.
        by: What stands there now.
    """

    family: str
    where: str
    name: str
    by: str


@dataclass
class Report:
    """The account of one patch, live while it holds and kept afterwards.

    Attributes:
        version: Of transformers.
        replaced: Every name that was rebound.
        calls: (model type, name, outcome) -> times. The outcome is "wyfold", or why the model's own code ran.
            Inside compiled code nothing is counted. Calls of all models of a type count, while the patch holds.
        kept: Modules of the given model that run their stock function, and why.
    """

    version: str
    replaced: list[Replaced] = field(default_factory=list)
    calls: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    kept: dict[str, str] = field(default_factory=dict)

    @property
    def served(self) -> int:
        """Calls that Wyfold served."""
        return sum(times for (*_, outcome), times in self.calls.items() if outcome == SERVED)

    @property
    def stock(self) -> dict[str, int]:
        """Reason -> calls that were left to the model's own code."""
        reasons: Counter[str] = Counter()
        for (*_, outcome), times in self.calls.items():
            if outcome != SERVED:
                reasons[outcome] += times
        return dict(reasons)

    def __str__(self) -> str:
        lines = [f"transformers {self.version}: {len(self.replaced)} names replaced"]
        lines += [f"  {where}.{name} <- {by}" for _, where, name, by in self.replaced]
        lines += [f"  {where} keeps its own: {why}" for where, why in self.kept.items()]
        lines += [
            f"  {times} x {family} {name}: {outcome}" for (family, name, outcome), times in sorted(self.calls.items())
        ]
        return "\n".join(lines)
