"""Which backend serves which launch: the whole of dispatch.

A row names a module by its path, imported at first use, so that no backend's dependencies are needed by another.
Without a demand, tensors on CUDA never land on eager, and tensors elsewhere always do; a demanded backend serves or
refuses.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

import torch

from wyfold.runtime import check
from wyfold.runtime.check import UnsupportedError
from wyfold.runtime.plan import Plan, settle

BACKENDS = ("eager", "triton", "gluon")


@dataclass(frozen=True)
class Row:
    """One implementation of a launch."""

    stage: str
    backend: str
    module: str

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)


ROWS = tuple(
    Row(stage, "eager", f"wyfold.stages.{stage}.eager")
    for stage in (
        "prepare",
        "scan",
        "scan_bwd",
        "gradients",
        "recurrent",
        "ttt",
        "conv",
        "norm",
        "gate",
        "kkt",
        "solve_tril",
    )
)


def plan(
    operator: str,
    device: torch.device,
    backend: str | None,
    *,
    forward: tuple[str, ...],
    backward: tuple[str, ...] = (),
    chunk_size: int | None = None,
    parts: int = 1,
    copies: tuple[str, ...] = (),
) -> Plan:
    """Rows for the launches of one call. Inside `explain` this is where the call ends.

    Args:
        operator: Public name, for messages.
        device: Where the tensors are.
        backend: None for the table's choice, else a demand.
        forward, backward: Stages of each direction.
        chunk_size, parts, copies: What else the caller decided, for the Plan.

    Raises:
        ValueError: backend is no backend's name.
        UnsupportedError: no row, or not the demanded backend's, serves every launch on this device.
    """
    check.choice(operator, "backend", backend, (None, *BACKENDS))
    reasons = {}
    for name in BACKENDS:
        reason = _refusal(name, device, forward + backward, backend)
        if reason:
            reasons[name] = reason
    if backend in reasons or len(reasons) == len(BACKENDS):
        if backend is None:
            raise UnsupportedError(f"{operator}: no backend serves tensors on {device.type}", reasons)
        message = f"{operator}: backend={backend!r} cannot serve this call on {device.type}"
        raise UnsupportedError(message, {backend: reasons[backend]})
    chosen = backend or [name for name in BACKENDS if name not in reasons][-1]
    return settle(
        Plan(operator, chosen, _named(forward, chosen), _named(backward, chosen), reasons, chunk_size, parts, copies)
    )


def launches(stage: str, backend: str) -> ModuleType:
    """The module that holds a stage's launches on a backend."""
    row = _row(stage, backend)
    if row is None:
        raise UnsupportedError(f"{stage}: not served", {backend: "has no such launch in this version"})
    return row.load()


def _row(stage: str, backend: str) -> Row | None:
    for row in ROWS:
        if row.stage == stage and row.backend == backend:
            return row
    return None


def _named(stages: tuple[str, ...], backend: str) -> tuple[str, ...]:
    return tuple([f"{row.stage} ({row.module})" for row in ROWS if row.backend == backend and row.stage in stages])


def _refusal(name: str, device: torch.device, stages: tuple[str, ...], demand: str | None) -> str:
    missing = [stage for stage in stages if _row(stage, name) is None]
    if missing:
        return f"has no {', '.join(dict.fromkeys(missing))} launch in this version"
    if name == "eager" and device.type == "cuda" and demand is None:
        return (
            'never chosen unasked for CUDA tensors; ask for it with backend="eager", '
            "an argument of every operator and of the layer or decoder around it"
        )
    return ""
