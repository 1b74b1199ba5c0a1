"""Plan of one call: the launches it will make, decided from metadata before anything runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Launch(NamedTuple):
    """Lookup of one kernel's launch configuration.

    Attributes:
        stage: Stage that the kernel computes.
        key: What the configuration depends on, as words.
        row: Row of the configuration table that applies.
    """

    stage: str
    key: str
    row: str

    def __str__(self) -> str:
        return f"{self.stage} ({self.key}): {self.row}"


@dataclass(frozen=True)
class Plan:
    """The launches of one call, and the reasons against other backends.

    The text of a plan has a line for each field that says something about the call, and names a launch's module only
    where its backend is not the plan's.

    Attributes:
        operator: Public name of the operator.
        backend: Backend of every launch below.
        forward, backward: Launches of each direction, in order, as "stage (module)". Empty if there is no backward.
        refused: backend -> why it was not chosen.
        chunk_size: Tokens of a chunk, or None where no result depends on one.
        parts: Number of parts that are processed one after another to bound the workspace, with the same bits; 0
            without tokens.
        copies: Arguments that are copied because of their layout in memory.
        collectives: Collective operations over ranks.
        rows: Launch configurations of the kernels.
        compiles: Kernels that have not run in this process yet. They are compiled, or read from disk, before they run.
        segments: Most segments of a sequence that are scanned in parallel. In a packed batch each sequence is cut by
            its length.
        widths: Widths that kernels have in place of the caller's; empty if they have those.
        self_check: State of the kernels' self-check: "verified" where the support table vouches for them, else
            "passed" or "not run". Empty without kernels.
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
    widths: str = ""
    self_check: str = ""

    def __str__(self) -> str:
        rows = [("operator", self.operator), ("backend", _backend_words(self.backend))]
        for direction in ("forward", "backward"):
            if launches := getattr(self, direction):
                rows.append((direction, ", ".join(_launch_words(launch, self.backend) for launch in launches)))
        if self.widths:
            rows.append(("widths", self.widths))
        if self.chunk_size is not None:
            rows.append(("chunk size", f"{self.chunk_size} tokens"))
        if self.parts != 1:
            rows.append(
                ("parts", f"{self.parts}, one after another, to bound memory" if self.parts else "0: no tokens")
            )
        if self.segments > 1:
            rows.append(("segments", f"up to {self.segments} of a sequence, in parallel"))
        lists = {"copied": self.copies, "sent": self.collectives, "settings": self.rows, "to compile": self.compiles}
        rows += [(name, ", ".join(map(str, values))) for name, values in lists.items() if values]
        if self.self_check:
            rows.append(("self-check", self.self_check))
        # Gluon is never the backend of a call: where its kernels run, their launches say so.
        rows += [(f"not {backend}", reason) for backend, reason in self.refused.items() if backend != "gluon"]
        return "\n".join(f"{name:12} {value}" for name, value in rows)


def _backend_words(backend: str) -> str:
    return {"eager": "eager (PyTorch)", "triton": "triton (GPU kernels)"}.get(backend, backend)


def _launch_words(launch: str, backend: str) -> str:
    """Stage of a launch "stage (module)", with the launch's backend if it is not the plan's."""
    stage, _, module = launch.partition(" ")
    own = module.strip("()").rpartition(".")[2]
    return stage if own in ("", backend) else f"{stage} ({own})"


class _PlanAnnounced(BaseException):
    """Carries the plan out of an operator that was called only to be explained."""

    def __init__(self, plan: Plan):
        self.plan = plan


_explaining: list[int] = []  # identifiers of the threads inside `plan_of`; calls on other threads run normally


def explaining() -> bool:
    """Whether this thread is inside `plan_of`."""
    return bool(_explaining) and threading.get_ident() in _explaining


def announce_plan(plan: Plan) -> Plan:
    """Return the plan; inside `plan_of`, end the call here."""
    if explaining():
        raise _PlanAnnounced(plan)
    return plan


def plan_of(call: Callable[[], Any]) -> Plan:
    """Run `call` up to the point where it announces its plan, and return the plan."""
    thread = threading.get_ident()
    _explaining.append(thread)
    try:
        call()
    except _PlanAnnounced as settled:
        return settled.plan
    finally:
        _explaining.remove(thread)
    raise TypeError("explain: op must be an operator of wyfold; this one settled on no plan")
