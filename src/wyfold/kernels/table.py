"""Which backend serves which launch: the whole of dispatch.

A row names a module by its path, imported at first use, so that no backend's dependencies are needed by another.
Without a demand, tensors on CUDA never land on eager, and tensors elsewhere always do; a demanded backend serves or
refuses. What a Triton version is good for on a GPU is data (`runtime/configs/support.json`).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from wyfold.runtime import check, kernel_configs
from wyfold.runtime.check import UnsupportedError
from wyfold.runtime.choices import BACKENDS
from wyfold.runtime.plan import Launch, Plan, explaining, settle
from wyfold.runtime.torch_ops import constant_to_compilers

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

Keys = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Row:
    """One implementation of a launch.

    Attributes:
        stage, backend: Which launch, in which language.
        module: Where it is.
        dtypes: What its tensors may hold.
        covers: Stages that a call with this one in it needs no launch for: it does their work on the way, but for what
            the call names as `kept`.
    """

    stage: str
    backend: str
    module: str
    dtypes: tuple[torch.dtype, ...]
    covers: tuple[str, ...] = ()

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)


STAGES = (
    "chunk_grid",
    "segment_grid",
    "prepare",
    "summary",
    "fold",
    "carry",
    "scan",
    "scan_bwd",
    "gradients",
    "recurrent",
    "slots",
    "ttt",
    "ttt_decode",
    "conv",
    "conv_slots",
    "norm",
    "gate",
    "kkt",
    "solve_tril",
)
COVERS = {"recurrent": ("prepare",), "scan": ("slots",)}
"""Stages whose kernels do others' work on the way: `Row.covers`."""

ROWS = (
    *(Row(stage, "eager", f"wyfold.kernels.{stage}.eager", check.FLOATS) for stage in STAGES),
    Row("ttt_open", "eager", "wyfold.kernels.ttt.eager", check.FLOATS),  # entered and left inside a mini-batch
    *(Row(stage, "triton", f"wyfold.kernels.{stage}.triton", FLOATS, COVERS.get(stage, ())) for stage in STAGES),
    *(
        Row(stage, "gluon", f"wyfold.kernels.{stage}.gluon", (torch.bfloat16,))
        for stage in ("prepare", "summary", "scan", "scan_bwd", "gradients", "recurrent", "ttt")
    ),
)


def plan(
    operator: str,
    device: torch.device,
    backend: str | None,
    *,
    forward: tuple[str, ...],
    backward: tuple[str, ...] = (),
    dtypes: tuple[torch.dtype, ...] = (),
    chunk_size: int | None = None,
    parts: int = 1,
    segments: int = 1,
    kept: tuple[str, ...] = (),
    copies: tuple[str, ...] = (),
    kernel_copies: tuple[str, ...] = (),
    box_copies: tuple[str, ...] = (),
    collectives: tuple[str, ...] = (),
    keys: Callable[[], Keys] = tuple,
    sizes: Keys = (),
) -> Plan:
    """Rows for the launches of one call. Inside `explain` this is where the call ends.

    Args:
        operator: Public name, for messages.
        device: Where the tensors are.
        backend: None for the table's choice, else a demand.
        forward, backward: Stages of each direction.
        dtypes: Of the call's floating tensors and results.
        chunk_size, copies, collectives: What else the caller decided, for the Plan.
        kernel_copies: Of the arguments, those that kernels alone would copy.
        box_copies: Those that kernels in Gluon would copy, which read them by the copy engine.
        parts: Parts that eager launches would cut the call into; kernels take it whole.
        segments: Most segments that one sequence is cut into.
        kept: Stages of the forward that are launched though another one covers them.
        keys: Gives (stage, what its launch configuration depends on) of every kernel; asked only to explain.
        sizes: (stage, words of such a key) that decide whether its kernels fit into a GPU at all.

    Raises:
        ValueError: backend is no backend's name.
        UnsupportedError: no row, or not the demanded backend's, serves every launch on this device.
    """
    check.choice(operator, "backend", backend, (None, *BACKENDS))
    choose = _choose if torch.compiler.is_compiling() else _remembered
    where = _where(device, backend) or _too_large(device, sizes)
    chosen, reasons = choose(device.type, backend, forward + backward, dtypes, where)
    if chosen is None:
        if backend is None:
            raise UnsupportedError(f"{operator}: no backend serves tensors on {device.type}", reasons)
        message = f"{operator}: backend={backend!r} cannot serve this call on {device.type}"
        raise UnsupportedError(message, {backend: reasons[backend]})
    launches = _named(_launched(forward, chosen, kept=kept)), _named(_launched(backward, chosen))
    parts = parts if chosen == "eager" else min(parts, 1)
    found = Plan(operator, chosen, *launches, dict(reasons), chunk_size, parts, copies, collectives)
    found = dataclasses.replace(found, segments=segments)
    if chosen == "triton" and explaining():
        found = _with_kernels(found, forward, backward, device, keys(), kept)
        in_gluon = any(".gluon)" in launched for launched in found.forward + found.backward)
        copied = copies + kernel_copies + (box_copies if in_gluon else ())
        found = dataclasses.replace(found, copies=tuple(dict.fromkeys(copied)))
    found = settle(found)
    if chosen == "triton" and device.type == "cuda":
        _warn_of_unverified(device)
    return found


def _with_kernels(
    plan: Plan,
    forward: tuple[str, ...],
    backward: tuple[str, ...],
    device: torch.device,
    keys: Keys,
    kept: tuple[str, ...],
) -> Plan:
    """The plan, and whose kernels it would launch, by which configurations, and which are new to the process.

    A stage of both directions may have a key for each, that of the way back behind the other.
    """
    where = kernel_configs.architecture(device)
    spoken = [language(stage, plan.backend, key, device) for stage, key in keys]
    named = zip(keys, spoken, strict=True)
    rows = tuple(
        [Launch(stage, key, kernel_configs.row(where, f"{stage}.{name}", key)) for (stage, key), name in named]
    )
    asked = [(stage, name) for (stage, _), name in zip(keys, spoken, strict=True)]
    there = _launched(forward, plan.backend, dict(asked[::-1]), kept)
    back = _launched(backward, plan.backend, dict(asked))
    words = dict(keys[::-1])
    fresh = []
    for row in dict.fromkeys(there + back):
        module = row.load()
        mine = module.kernels_of(words[row.stage]) if hasattr(module, "kernels_of") else None
        found = kernel_configs.compiled(module, device).items()
        fresh += [name for name, ready in found if not ready and (mine is None or name in mine)]
    # Where a module holds the kernels of several operators, the keys are their names.
    own = [name for name in fresh if name in {f"wyfold_{key}_{plan.backend}" for _, key in keys}]
    plan = dataclasses.replace(plan, forward=_named(there), backward=_named(back))
    return dataclasses.replace(plan, rows=rows, compiles=tuple(dict.fromkeys(own or fresh)))


def dtypes(*tensors: Tensor | None) -> tuple[torch.dtype, ...]:
    """Of the given tensors, for `plan`."""
    return tuple([x.dtype for x in tensors if x is not None])


def launches(stage: str, backend: str) -> ModuleType:
    """The module that holds a stage's launches on a backend."""
    return _loaded(stage, backend)


def serving(stage: str, backend: str, key: str, device: torch.device) -> ModuleType:
    """The module whose launch serves a stage of a call that runs on a backend."""
    return _loaded(stage, language(stage, backend, key, device))


def language(stage: str, backend: str, key: str, device: torch.device) -> str:
    """The backend whose kernel serves a stage of a call: that of the call's plan, or "gluon" in place of "triton".

    It is where the GPU's configurations have a row of it for the call's key: such a row says that it was measured
    there, and won. It takes the same arguments, and serves every call of the key: `explain` names what is launched.
    """
    if backend != "triton" or kernel_configs.interpreting() or _row(stage, "gluon") is None:
        return backend
    if stage == "scan" and not {"kept", "wide"}.isdisjoint(key.split()):
        return backend  # states on the way, or outputs of another dtype
    return "gluon" if kernel_configs.offers(kernel_configs.architecture(device), f"{stage}.gluon", key) else backend


@functools.cache
def _loaded(stage: str, backend: str) -> ModuleType:
    row = _row(stage, backend)
    if row is None:
        raise UnsupportedError(f"{stage}: not served", {backend: "has no such launch in this version"})
    return row.load()


class _Choice(NamedTuple):
    backend: str | None
    reasons: dict[str, str]


def _choose(
    device: str, demand: str | None, stages: tuple[str, ...], dtypes: tuple[torch.dtype, ...], where: str
) -> _Choice:
    reasons = {}
    for name in BACKENDS:
        reason = _refusal(name, device, stages, demand, dtypes, where)
        if reason:
            reasons[name] = reason
    if demand is not None:
        return _Choice(None if demand in reasons else demand, reasons)
    serving = [name for name in BACKENDS if name not in reasons]
    return _Choice(serving[-1] if serving else None, reasons)


_remembered = functools.lru_cache(maxsize=4096)(_choose)


def _row(stage: str, backend: str) -> Row | None:
    for row in ROWS:
        if row.stage == stage and row.backend == backend:
            return row
    return None


def _named(rows: list[Row]) -> tuple[str, ...]:
    return tuple([f"{row.stage} ({row.module})" for row in rows])


def _launched(
    stages: tuple[str, ...], backend: str, languages: dict[str, str] | None = None, kept: tuple[str, ...] = ()
) -> list[Row]:
    """Rows of the stages that a call launches on a backend, or on what stands in for it there, by stages, without those
    that another one of it covers and it does not keep."""
    rows = [row for row in ROWS if row.backend == backend and row.stage in stages]
    covered = {stage for row in rows for stage in row.covers} - {*kept}
    standing = [_row(row.stage, (languages or {}).get(row.stage, backend)) for row in rows if row.stage not in covered]
    return [row for row in standing if row is not None]


def _refusal(
    name: str,
    device: str,
    stages: tuple[str, ...],
    demand: str | None,
    dtypes: Iterable[torch.dtype],
    where: str,
) -> str:
    """Why a backend does not serve these launches; empty if it does."""
    if name == "gluon":
        return _IN_PLACE
    rows = [_row(stage, name) for stage in dict.fromkeys(stages)]
    missing = [stage for stage, row in zip(dict.fromkeys(stages), rows, strict=True) if row is None]
    if missing:
        return f"has no {', '.join(missing)} launch in this version"
    if name == "eager":
        return _EAGER_UNASKED if device == "cuda" and demand is None else ""
    if where:
        return where
    for row in rows:
        for dtype in dtypes:
            if row is not None and dtype not in row.dtypes:
                return f'does not compute in {str(dtype).removeprefix("torch.")}; backend="eager" does'
    return ""


_IN_PLACE = 'its kernels stand in for single launches of backend="triton", where configurations name them'

_EAGER_UNASKED = (
    'never chosen unasked for CUDA tensors; ask for it with backend="eager", '
    "an argument of every operator and of the layer or decoder around it"
)


@constant_to_compilers
def _where(device: torch.device, demand: str | None) -> str:
    """Why no kernel runs on this device in this process; empty if kernels do."""
    if device.type == "cuda":
        return kernel_configs.support(device).refusal or kernel_configs.interpreter_refusal()
    if device.type != "cpu" or demand is None:
        return f"never chosen unasked for tensors that are not on CUDA; these are on {device.type}"
    if demand != "triton":
        return f"backend={demand!r} was asked for"
    if kernel_configs.can_interpret():
        return kernel_configs.interpreter_refusal()
    return 'runs on CUDA tensors; these are on cpu, where backend="eager" runs'


@constant_to_compilers
def _too_large(device: torch.device, sizes: Keys) -> str:
    """Why kernels of these sizes do not fit into the device; empty if they do."""
    if device.type != "cuda":
        return ""
    where = kernel_configs.architecture(device)
    return next(filter(None, (kernel_configs.beyond(where, f"{stage}.triton", key) for stage, key in sizes)), "")


def refusal(device: torch.device, demand: str | None) -> str:
    """Why no kernel serves any call on a device, of those that demand a backend, or none; empty if kernels do."""
    return str(_where(device, demand))


_warned: list[str] = []


@constant_to_compilers
def _warn_of_unverified(device: torch.device) -> None:
    """Once in a process: this card, or this Triton on it, has not run the tests."""
    support = kernel_configs.support(device)
    if support.proof == "verified" or _warned:
        return
    warnings.warn(
        f"wyfold: unverified: the kernels were compiled for {support.architecture} under Triton {support.version}, but "
        "not all tests have passed on such a card; `wyfold verify` measures on this one how far each operator is from "
        "the float64 recurrence",
        stacklevel=2,
    )
    # Behind it: a warning that is an error may have ended a rehearsal, and has to end the call as well.
    _warned.append(support.architecture)
