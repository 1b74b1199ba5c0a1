"""Report of a patch: replaced names and outcomes of calls."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

SERVED = "wyfold"


class Replaced(NamedTuple):
    """One rebound name.

    Attributes:
        family: Model type.
        where: Module, class or layer.
        name: Name in it.
        by: Name of the replacement.
    """

    family: str
    where: str
    name: str
    by: str


@dataclass
class Report:
    """Report of one patch, updated while the patch is active and valid afterwards.

    Attributes:
        version: Version of transformers.
        replaced: Every rebound name.
        calls: (model type, name, outcome) -> number of calls. The outcome is "wyfold", or the reason why the model's
            own code ran. Calls of all models of a type are counted while the patch is active, except in compiled code.
        kept: Modules of the given model that keep their stock function -> reason.
    """

    version: str
    replaced: list[Replaced] = field(default_factory=list)
    calls: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    kept: dict[str, str] = field(default_factory=dict)

    @property
    def served(self) -> int:
        """Number of calls that Wyfold ran."""
        return sum(times for (*_, outcome), times in self.calls.items() if outcome == SERVED)

    @property
    def stock(self) -> dict[str, int]:
        """Reason -> number of calls left to the model's own code."""
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
