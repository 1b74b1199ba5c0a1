"""Which backend serves which launch: the whole of dispatch.

A row names a module by its path, imported at first use, so that no backend's dependencies are needed by another. Without a
demand, tensors on CUDA never land on eager, and tensors elsewhere always do; a demanded backend serves or refuses.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import MappingProxyType, ModuleType

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
        "ttt_recurrent",
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
    reasons = {name: reason for name in BACKENDS if (reason := _refusal(name, device, forward + backward, backend))}
    if backend in reasons or len(reasons) == len(BACKENDS):
        wanted = "no backend" if backend is None else f"backend={backend!r} cannot"
        message = f"{operator}: {wanted} serve{'s' if backend is None else ''} tensors on {device.type}"
        raise UnsupportedError(message, reasons if backend is None else {backend: reasons[backend]})
    chosen = backend or next(name for name in reversed(BACKENDS) if name not in reasons)
    refused = MappingProxyType({name: reason for name, reason in reasons.items() if name != chosen})
    describe = {row.stage: f"{row.stage} ({row.module})" for row in ROWS if row.backend == chosen}
    launches = (tuple(describe[stage] for stage in stages) for stages in (forward, backward))
    return settle(Plan(operator, chosen, *launches, refused, chunk_size, parts, copies))


def launches(stage: str, backend: str) -> ModuleType:
    """The module that holds a stage's launches on a backend."""
    return next(row for row in ROWS if (row.stage, row.backend) == (stage, backend)).load()


def _refusal(name: str, device: torch.device, stages: tuple[str, ...], demand: str | None) -> str:
    missing = [stage for stage in stages if not any((row.stage, row.backend) == (stage, name) for row in ROWS)]
    if missing:
        return f"has no {', '.join(dict.fromkeys(missing))} launch in this version"
    if name == "eager" and device.type == "cuda" and demand is None:
        return 'never chosen unasked for CUDA tensors; ask for it with backend="eager"'
    return ""
