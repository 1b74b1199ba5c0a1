"""What one call will run, decided from metadata before anything runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Launch(NamedTuple):
    """A kernel's launch: the stage, what its configuration depends on, and the row of the table it gets."""

    stage: str
    key: str
    row: str

    def __str__(self) -> str:
        return f"{self.stage} ({self.key}): {self.row}"


@dataclass(frozen=True)
class Plan:
    """What a call runs, and why not something else.

    Attributes:
        operator: Public name of the operator.
        backend: The one every launch below comes from.
        forward, backward: Launches of each direction, in order, as "stage (module)". No backward: empty.
        refused: backend -> why it was not chosen.
        chunk_size: Rows of a chunk, or None for an operator without chunks.
        parts: Parts the call is cut into to bound its workspace, one after another, same bits; 0 without tokens.
        copies: Arguments that are copied because of their layout in memory.
        collectives: Collective operations over ranks.
        rows: Launch configurations of the kernels.
        compiles: Kernels that have not run in this process yet, and are compiled, or read from disk, before they do.
        segments: Most segments that a sequence is cut into, to be scanned side by side. Of a packed batch each is cut
            by its own length.
    """

    operator: str
    backend: str
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    chunk_size: int | None = None
    parts: int = 1
    copies: tuple[str, ...] = ()
    collectives: tuple[str, ...] = ()
    rows: tuple[Launch, ...] = ()
    compiles: tuple[str, ...] = ()
    segments: int = 1

    def __str__(self) -> str:
        rows = [("operator", self.operator), ("backend", self.backend)]
        rows += [("forward", ", ".join(self.forward)), ("backward", ", ".join(self.backward) or "none")]
        rows += [
            ("chunk size", "none" if self.chunk_size is None else str(self.chunk_size)),
            ("parts", str(self.parts)),
            ("segments", str(self.segments)),
        ]
        lists = ("copies", "collectives", "rows", "compiles")
        rows += [(name, ", ".join(map(str, getattr(self, name))) or "none") for name in lists]
        rows += [(f"not {backend}", reason) for backend, reason in self.refused.items()]
        return "\n".join(f"{name:12} {value}" for name, value in rows)


class _PlanAnnounced(BaseException):
    """Carries a plan out of an operator that was called only to be explained."""

    def __init__(self, plan: Plan):
        self.plan = plan


_explaining: list[int] = []  # threads inside `plan_of`; calls in the others run on


def explaining() -> bool:
    """Whether this call is made to be explained."""
    return bool(_explaining) and threading.get_ident() in _explaining


def announce_plan(plan: Plan) -> Plan:
    """The plan; inside `plan_of`, the end of the call."""
    if explaining():
        raise _PlanAnnounced(plan)
    return plan


def plan_of(call: Callable[[], Any]) -> Plan:
    """The plan that `call` settles on; nothing after that point runs."""
    thread = threading.get_ident()
    _explaining.append(thread)
    try:
        call()
    except _PlanAnnounced as settled:
        return settled.plan
    finally:
        _explaining.remove(thread)
    raise TypeError("explain: op must be an operator of wyfold; this one settled on no plan")
