"""Dispatch table: which backends implement each launch, and which backend serves a call.

An entry names a module by its path and imports it at first use, so no backend needs another's dependencies.
With `backend=None`, CUDA tensors never run on eager and other tensors always do. A requested backend serves the call
or raises. Which Triton versions are verified on which GPU is data (`runtime/configs/support.json`). Elsewhere a call's
kernels pass a self-check before their first use (`kernels/self_check.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from wyfold.kernels import self_check
from wyfold.kernels.trial import Trial
from wyfold.runtime import check, kernel_configs, triton_support
from wyfold.runtime.check import UnsupportedError
from wyfold.runtime.choices import BACKENDS
from wyfold.runtime.chunk_layout import without_tables
from wyfold.runtime.kernel_configs import LaunchKey
from wyfold.runtime.plan import Launch, Plan, announce_plan, explaining
from wyfold.runtime.torch_ops import constant_to_compilers

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

StageKeys = Sequence[tuple[str, LaunchKey]]


@dataclass(frozen=True)
class DispatchEntry:
    """One implementation of a launch.

    Attributes:
        stage: Name of the launch, and of its folder in `wyfold.kernels`.
        backend: "eager", "triton" or "gluon".
        module: Import path of the implementation.
        dtypes: Dtypes its tensors may have.
        covers: Stages whose work this kernel fuses. A call with this stage skips their launches, except for the stages
            that it names as `kept`.
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
    "segment_summary",
    "segment_fold",
    "rank_carry",
    "scan",
    "scan_bwd",
    "gradients",
    "recurrent",
    "state_pool",
    "ttt",
    "ttt_decode",
    "conv",
    "conv_pool",
    "norm",
    "gate",
    "path_blocks",
    "path_attention",
    "kkt",
    "solve_tril",
    "low_rank_prepare",
    "low_rank_scan",
    "low_rank_scan_bwd",
    "low_rank_gradients",
    "low_rank_recurrent",
)
GLUON_STAGES = tuple(
    "prepare segment_summary segment_fold scan scan_bwd gradients recurrent ttt low_rank_prepare low_rank_scan".split()
)
COVERS = {"recurrent": ("prepare",), "low_rank_recurrent": ("low_rank_prepare",), "scan": ("state_pool",)}
"""Stages whose kernels fuse the work of other stages: `DispatchEntry.covers`."""

ENTRIES = (
    *(DispatchEntry(stage, "eager", f"wyfold.kernels.{stage}.eager", check.FLOATS) for stage in STAGES),
    DispatchEntry("path_cache_bwd", "eager", "wyfold.kernels.path_blocks.eager", check.FLOATS),
    DispatchEntry("ttt_open", "eager", "wyfold.kernels.ttt.eager", check.FLOATS),  # starts and ends inside a mini-batch
    *(
        DispatchEntry(stage, "triton", f"wyfold.kernels.{stage}.triton", FLOATS, COVERS.get(stage, ()))
        for stage in STAGES
    ),
    *(DispatchEntry(stage, "gluon", f"wyfold.kernels.{stage}.gluon", (torch.bfloat16,)) for stage in GLUON_STAGES),
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
    parts: Callable[[], int] = lambda: 1,
    segments: int = 1,
    kept: tuple[str, ...] = (),
    grids: tuple[str, ...] = (),
    saved: tuple[str, ...] = (),
    copies: tuple[str, ...] = (),
    kernel_copies: tuple[str, ...] = (),
    tma_copies: tuple[str, ...] = (),
    collectives: tuple[str, ...] = (),
    widths: str = "",
    keys: Callable[[], StageKeys] = tuple,
    sizes: Sequence[tuple[str, str]] = (),
    trials: Callable[[], tuple[Trial, ...]] = tuple,
    unrun: bool = False,
) -> Plan:
    """Choose the backend and the table entries for the launches of one call. Inside `explain` the call ends here.

    Args:
        operator: Public name, for messages.
        device: Device of the tensors.
        backend: Requested backend, or None to choose one.
        forward, backward: Stages of each direction.
        dtypes: Dtypes of the call's floating tensors and results.
        chunk_size, copies, collectives, widths: Decisions of the caller that the `Plan` reports.
        kernel_copies: Names of the arguments that only kernels would copy.
        tma_copies: Names of the arguments that only Gluon kernels would copy, to read them through TMA descriptors.
        parts: Returns the number of parts that eager launches cut the call into. Kernels run a call whole; for them it
            is called inside `explain` only, whose plan has 0 parts for a call without tokens.
        segments: Largest number of segments that one sequence is cut into.
        kept: Forward stages that are launched although another stage covers them.
        grids: Stages that kernels launch first in each direction, for the positions of chunks and segments.
        saved: Backward stages that kernels do not launch, because the forward saved their results.
        keys: Returns (stage, launch configuration key) of every kernel; called only inside `explain`.
        sizes: (stage, words of such a key) that decide whether the stage's kernels fit the GPU.
        trials: Returns small calls with the same kernels, for their self-check.
        unrun: Kernels of the call's widths have not run on any GPU, so verified ones make the self-check, too.

    Raises:
        ValueError: `backend` is not the name of a backend.
        UnsupportedError: No backend, or not the requested one, serves every launch on this device; or the kernels
            failed their self-check.
    """
    check.choice(operator, "backend", backend, (None, *BACKENDS))
    choose = _choose if torch.compiler.is_compiling() else _choose_cached
    device_refusal = _device_refusal(device, backend) or _size_refusal(device, sizes)
    chosen, reasons = choose(device.type, backend, forward + backward, dtypes, device_refusal)
    if chosen is None:
        if backend is None:
            raise UnsupportedError(f"{operator}: no backend serves tensors on {device.type}", reasons)
        message = f"{operator}: backend={backend!r} cannot serve this call on {device.type}: {reasons[backend]}"
        raise UnsupportedError(message, {backend: reasons[backend]})
    if chosen == "triton":
        forward = grids + forward
        backward = tuple(stage for stage in (grids + backward if backward else ()) if stage not in saved)
    launches = (
        _launch_names(_launched_entries(forward, chosen, kept=kept)),
        _launch_names(_launched_entries(backward, chosen)),
    )
    count = parts() if chosen == "eager" else min(parts(), 1) if explaining() else 1
    found = Plan(operator, chosen, *launches, dict(reasons), chunk_size, count, copies, collectives)
    checked = _self_check(operator, device, reasons, trials, unrun) if chosen == "triton" else ""
    found = dataclasses.replace(found, segments=segments, widths=widths, self_check=checked)
    if chosen == "triton" and explaining():
        found = _with_kernels(found, forward, backward, device, keys(), kept)
        in_gluon = any(".gluon)" in launched for launched in found.forward + found.backward)
        copied = copies + kernel_copies + (tma_copies if in_gluon else ())
        found = dataclasses.replace(found, copies=tuple(dict.fromkeys(copied)))
    return announce_plan(found)


def _self_check(
    operator: str,
    device: torch.device,
    reasons: dict[str, str],
    trials: Callable[[], tuple[Trial, ...]],
    unrun: bool,
) -> str:
    """State of the self-check of a call's kernels, which is made now if the call is to run.

    Raises:
        UnsupportedError: It failed, or it cannot be made.
    """
    if not self_check.unproven(device, unrun):
        return "verified"
    states = []
    for trial in trials():
        found = self_check.outcome(trial, device, run=not explaining())
        if found.refusal:
            message = f"{operator}: no backend serves this call on {device.type}"
            raise UnsupportedError(message, {**reasons, "triton": found.refusal})
        states.append(found.state)
    return "passed" if set(states) == {"passed"} else "not run"


def _with_kernels(
    plan: Plan,
    forward: tuple[str, ...],
    backward: tuple[str, ...],
    device: torch.device,
    keys: StageKeys,
    kept: tuple[str, ...],
) -> Plan:
    """Add to the plan the kernels' modules, their launch configurations, and the kernels not compiled yet.

    A stage used in both directions may have two keys. The backward's key then follows the forward's.
    """
    architecture = triton_support.architecture(device)
    backends = [selected_backend(stage, plan.backend, key, device) for stage, key in keys]
    rows = tuple(
        [
            Launch(stage, str(key), kernel_configs.row(architecture, f"{stage}.{name}", key))
            for (stage, key), name in zip(keys, backends, strict=True)
        ]
    )
    by_stage = [(stage, name) for (stage, _), name in zip(keys, backends, strict=True)]
    selected = dict(by_stage[::-1])
    forward_entries = _launched_entries(without_tables(forward, selected), plan.backend, selected, kept)
    backward_entries = _launched_entries(backward, plan.backend, dict(by_stage))
    stage_keys = dict(keys[::-1])
    uncompiled = []
    for entry in dict.fromkeys(forward_entries + backward_entries):
        module = entry.load()
        used = module.kernels_of(stage_keys[entry.stage]) if hasattr(module, "kernels_of") else None
        found = kernel_configs.compiled(module, device).items()
        uncompiled += [name for name, ready in found if not ready and (used is None or name in used)]
    # In a module with the kernels of several operators, the keys are kernel names.
    named = {f"wyfold_{key.launch}_{plan.backend}" for _, key in keys}
    operator_kernels = [name for name in uncompiled if name in named]
    plan = dataclasses.replace(plan, forward=_launch_names(forward_entries), backward=_launch_names(backward_entries))
    return dataclasses.replace(plan, rows=rows, compiles=tuple(dict.fromkeys(operator_kernels or uncompiled)))


def dtypes(*tensors: Tensor | None) -> tuple[torch.dtype, ...]:
    """Dtypes of the given tensors, for `plan`."""
    return tuple([x.dtype for x in tensors if x is not None])


def kernel_module(stage: str, backend: str) -> ModuleType:
    """Module of a stage's launches on a backend."""
    return _load_module(stage, backend)


def selected_module(stage: str, backend: str, key: LaunchKey, device: torch.device) -> ModuleType:
    """Module whose launch serves a stage of this call: `kernel_module`, or its Gluon substitute."""
    return _load_module(stage, selected_backend(stage, backend, key, device))


def selected_backend(stage: str, backend: str, key: LaunchKey, device: torch.device) -> str:
    """Backend whose kernel serves a stage of a call: the plan's backend, or "gluon" in place of "triton".

    Gluon is selected where the dispatch table has a row for the GPU and the call's key. A row means that the Gluon
    kernel was proved and measured faster there. It takes the same arguments and serves every call of the key. `explain`
    names the kernel that is launched.
    """
    if backend != "triton" or triton_support.interpreting() or _entry(stage, "gluon") is None:
        return backend
    return "gluon" if kernel_configs.dispatched(triton_support.architecture(device), stage, key) else backend


@functools.cache
def _load_module(stage: str, backend: str) -> ModuleType:
    entry = _entry(stage, backend)
    if entry is None:
        raise UnsupportedError(f"{stage}: not served", {backend: "has no such step in this version"})
    return entry.load()


class _Choice(NamedTuple):
    backend: str | None
    reasons: dict[str, str]


def _choose(
    device: str, requested: str | None, stages: tuple[str, ...], dtypes: tuple[torch.dtype, ...], device_refusal: str
) -> _Choice:
    reasons = {}
    for name in BACKENDS:
        reason = _backend_refusal(name, device, stages, requested, dtypes, device_refusal)
        if reason:
            reasons[name] = reason
    if requested is not None:
        return _Choice(None if requested in reasons else requested, reasons)
    serving = [name for name in BACKENDS if name not in reasons]
    return _Choice(serving[-1] if serving else None, reasons)


_choose_cached = functools.lru_cache(maxsize=4096)(_choose)


def _entry(stage: str, backend: str) -> DispatchEntry | None:
    for entry in ENTRIES:
        if entry.stage == stage and entry.backend == backend:
            return entry
    return None


def _launch_names(entries: list[DispatchEntry]) -> tuple[str, ...]:
    return tuple([f"{entry.stage} ({entry.module})" for entry in entries])


def _launched_entries(
    stages: tuple[str, ...], backend: str, substitutes: dict[str, str] | None = None, kept: tuple[str, ...] = ()
) -> list[DispatchEntry]:
    """Entries of the stages that a call launches, without covered stages that the call does not keep.

    Args:
        stages: Stages of one direction.
        backend: The plan's backend.
        substitutes: Backend of single stages, where it differs from the plan's.
        kept: Covered stages that are launched all the same.
    """
    entries = [entry for entry in ENTRIES if entry.backend == backend and entry.stage in stages]
    covered = {stage for entry in entries for stage in entry.covers} - {*kept}
    launched = [entry.stage for entry in entries if entry.stage not in covered]
    selected = [_entry(stage, (substitutes or {}).get(stage, backend)) for stage in launched]
    return [entry for entry in selected if entry is not None]


def _backend_refusal(
    name: str,
    device: str,
    stages: tuple[str, ...],
    requested: str | None,
    dtypes: Iterable[torch.dtype],
    device_refusal: str,
) -> str:
    """Reason why a backend does not serve these launches; empty if it does."""
    if name == "gluon":
        return _GLUON_SUBSTITUTES
    entries = [_entry(stage, name) for stage in dict.fromkeys(stages)]
    missing = [stage for stage, entry in zip(dict.fromkeys(stages), entries, strict=True) if entry is None]
    if missing:
        remedy = "" if name == "eager" else '; backend="eager" serves it'
        return f"has no kernel for this operator in this version (step {', '.join(missing)}){remedy}"
    if name == "eager":
        return _EAGER_ON_REQUEST if device == "cuda" and requested is None else ""
    if device_refusal:
        return device_refusal
    for entry in entries:
        for dtype in dtypes:
            if entry is not None and dtype not in entry.dtypes:
                return f'does not compute in {str(dtype).removeprefix("torch.")}; backend="eager" does'
    return ""


_GLUON_SUBSTITUTES = (
    'cannot be chosen itself: backend="triton" runs a Gluon kernel in place of a Triton kernel where it is faster'
)

_EAGER_ON_REQUEST = (
    'runs on CUDA tensors on request only; ask for it with backend="eager", '
    "an argument of every operator and of the layer or decoder around it"
)


@constant_to_compilers
def _device_refusal(device: torch.device, requested: str | None) -> str:
    """Reason why kernels cannot run on this device in this process; empty if they can."""
    if device.type == "cuda":
        return triton_support.support_of(device).refusal or triton_support.interpreter_refusal()
    if device.type != "cpu" or requested is None:
        on_request = "; the interpreter of Triton runs on request only" if triton_support.interpreting() else ""
        return f"runs on CUDA tensors; these are on {device.type}{on_request if device.type == 'cpu' else ''}"
    if requested != "triton":
        return f"the call says backend={requested!r}"
    if triton_support.can_interpret():
        return triton_support.interpreter_refusal()
    return 'its kernels need a CUDA GPU; leave backend out, or give backend="eager", to run in PyTorch'


@constant_to_compilers
def _size_refusal(device: torch.device, sizes: Sequence[tuple[str, str]]) -> str:
    """Reason why kernels of these sizes do not fit the device; empty if they do."""
    if device.type != "cuda":
        return ""
    architecture = triton_support.architecture(device)
    keys = ((stage, LaunchKey.parse(words)) for stage, words in sizes)
    limits = (kernel_configs.hardware_limit(architecture, f"{stage}.triton", key) for stage, key in keys)
    return next(filter(None, limits), "")


def refusal(device: torch.device, requested: str | None) -> str:
    """Reason why no kernel serves any call with this `backend` on a device; empty if kernels do."""
    return str(_device_refusal(device, requested))
