"""Cases of an emulated kernel: every combination of its axes, and a default subset for every run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

SCHEDULES = [("late", "last"), ("early", "first")]
"""Settings of `Machine`: copies land late while producers run ahead; copies land early while consumers run ahead."""


class Case(NamedTuple):
    """One combination.

    Attributes:
        values: One value of every axis.
        schedule: One of `SCHEDULES`.
        default: Whether it runs without `--draws`.
        release: Whether `make compile` runs it without `--draws`.
    """

    values: tuple[Any, ...]
    schedule: tuple[str, str]
    default: bool
    release: bool

    def __str__(self) -> str:
        return _text((*self.values, *self.schedule))


def cases(*axes: Sequence[Any]) -> list[Case]:
    """All combinations. The default ones are one for every value of the first axis, with the schedules in turn.

    Those of a release are two, one with each schedule. Every value of the other axes is in one of the default cases.
    """
    lengths = [len(axis) for axis in axes]
    default, release = set(), set()
    for i in range(max(2, *lengths)):
        default.add((*((i + i // n * (axis > 0)) % n for axis, n in enumerate(lengths)), i % 2))
    for i in range(max(2 * lengths[0], *lengths)):
        release.add((*(i // 2 % n if axis == 0 else (i + i // n) % n for axis, n in enumerate(lengths)), i % 2))
    found = []
    for *indices, (number, schedule) in itertools.product(*map(range, lengths), enumerate(SCHEDULES)):
        key, values = (*indices, number), tuple(axis[i] for axis, i in zip(axes, indices, strict=True))
        found.append(Case(values, schedule, key in default, key in release - default))
    for axis, values in enumerate(axes):
        assert all(any(case.default and case.values[axis] == x for case in found) for x in values)
    return found


def _text(x: Any) -> str:
    """Values as part of a test's name."""
    if isinstance(x, dict):
        return " ".join(f"{name}={_text(y)}" for name, y in x.items())
    if isinstance(x, tuple):
        return " ".join(map(_text, x))
    return ",".join(map(_text, x)) if isinstance(x, list) else str(x)
