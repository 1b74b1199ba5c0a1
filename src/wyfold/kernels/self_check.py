"""Check of a kernel at its first use on a GPU, or under a Triton, that is not verified.

A call is planned before it is launched. Where the support table has no verified entry, the plan's kernels are first run
once on a small call with the same dtypes, widths and options, forward and, with gradients, backward, and compared with
the eager backend (`kernels/verdicts.py`). The outcome is remembered in memory, and by card, toolchain and kernel
sources in the user's cache folder (`runtime/user_cache.py`), one file per check.

The check runs on a new thread. What is set for the caller's thread has no effect there: autocast, dispatch
modes, compilers, streams, a dry run. Two processes may make the same check at once; neither waits for the other, and no
collective is called.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch

from wyfold.kernels.trial import Sample, Trial
from wyfold.kernels.verdicts import verdicts
from wyfold.runtime import triton_support, user_cache
from wyfold.runtime.torch_ops import constant_to_compilers


class Outcome(NamedTuple):
    """Answer of the self-check for one plan.

    Attributes:
        state: "verified": the support table vouches for the kernels. "passed", "failed": of a check. "not run": the
            first call makes the check. "refused": WYFOLD_SELF_CHECK forbids it, or it cannot be made now.
        refusal: Reason against running the kernels; empty if they may run, or if that is not known yet.
    """

    state: str
    refusal: str = ""


_trusting = False
_lock = threading.Lock()
_outcomes: dict[tuple[Trial, str], Outcome] = {}
_collected: dict[tuple[Trial, str], dict[str, Any]] | None = None
_said: set[str] = set()


def trust_kernels() -> None:
    """Make no self-check in this process. For the test suite, which is the check of a card."""
    global _trusting
    _trusting = True


@contextlib.contextmanager
def collecting() -> Iterator[dict[tuple[Trial, str], dict[str, Any]]]:
    """Context in which every plan on kernels is checked, verified or not and remembered or not, for `wyfold verify`.

    The yielded dictionary has the record of each check. The context applies to all threads of the process.
    """
    global _collected
    before, _collected = _collected, {}
    try:
        yield _collected
    finally:
        _collected = before


@constant_to_compilers
def unproven(device: torch.device, unrun: bool = False) -> bool:
    """Whether kernels need a self-check on a device: on GPUs without a verified entry in the support table.

    Args:
        unrun: Kernels of this kind have not run on any GPU. They are checked on verified ones, too.
    """
    if _collected is not None:
        return device.type == "cuda" or triton_support.interpreting()
    return device.type == "cuda" and not _trusting and (unrun or not triton_support.support_of(device).verified)


def outcome(trial: Trial, device: torch.device, *, run: bool) -> Outcome:
    """Remembered outcome of a trial, or that of running it now.

    Args:
        trial: The check.
        device: Where the call runs.
        run: Whether the check may run; otherwise the outcome may be "not run".
    """
    # Plain tuples of numbers that are not symbolic: compilers pass no others (docs/facts/host.md, TORCH-3).
    samples = tuple([None if sample is None else (*sample[:3], _plain(sample.rest)) for sample in trial.samples])
    return Outcome(*_outcome((*trial[:2], samples, _plain(trial.values), *_plain(trial[4:])), device, run))


def _plain(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values, with constants for symbols of a compiler, whose text specialises them, and for tensors of a trace."""
    if not torch.compiler.is_compiling():
        return tuple([x.item() if isinstance(x, torch.Tensor) else x for x in values])
    return tuple([_constant(x) for x in values])


def _constant(x: Any) -> Any:
    if isinstance(x, bool):
        return x
    return int(f"{x}") if isinstance(x, int) else float(f"{x}") if isinstance(x, float) else x


@constant_to_compilers
def _outcome(fields: tuple[Any, ...], device: torch.device, run: bool) -> tuple[str, str]:
    name, operator, samples, *others = fields
    trial = Trial(name, operator, tuple([None if x is None else Sample(*x) for x in samples]), *others)
    key = trial, card(device)
    found = _outcomes.get(key) if _collected is None else None
    if found is not None:
        return found.state, found.refusal
    with _lock:
        found = _outcomes.get(key) if _collected is None or key in _collected else None
        if found is None and _collected is None:
            found = _remembered(trial, device)
        if found is None:
            found = _first_use(trial, device) if run else _before_first_use()
    return found.state, found.refusal


def card(device: torch.device) -> str:
    """Name and architecture of a device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name} ({triton_support.architecture(device)})"


@functools.cache
def toolchain() -> Mapping[str, str]:
    """Versions that kernel code depends on, and a hash of the sources of the kernels."""
    found = {"triton": triton_support.triton_version(), "torch": torch.__version__}
    found["cuda"] = str(torch.version.hip or torch.version.cuda)
    found["ptxas"] = _ptxas()
    found["interpreted"] = str(triton_support.can_interpret())
    return found | {"sources": _source_hash()}


def folder() -> Path | None:
    """Folder of remembered outcomes; None without a home."""
    base = user_cache.cache_folder()
    return None if base is None else base / "self_check"


def remembered_here() -> list[tuple[float, dict[str, Any]]]:
    """Records of this toolchain in the cache folder, each with the time its file was written, in order of time."""
    base, found = folder(), []
    for file in sorted(base.glob("*/*.json")) if base is not None and base.is_dir() else ():
        record = user_cache.read(file)
        if record is not None and record.get("toolchain") == dict(toolchain()):
            with contextlib.suppress(OSError):  # another process may have removed it
                found.append((file.stat().st_mtime, record))
    return sorted(found, key=lambda entry: entry[0])


# --- memory and file --------------------------------------------------------------------------------------------------


def _identity(trial: Trial, device: torch.device) -> dict[str, Any]:
    """Everything that an outcome depends on."""
    return {"card": card(device), "toolchain": dict(toolchain()), "check": repr(trial)}


def _file(identity: Mapping[str, Any]) -> Path | None:
    base = folder()
    words = hashlib.sha256(repr(sorted(identity["toolchain"].items())).encode()).hexdigest()[:16]
    check = hashlib.sha256(f"{identity['card']} {identity['check']}".encode()).hexdigest()[:32]
    return None if base is None else base / words / f"{check}.json"


def _remembered(trial: Trial, device: torch.device) -> Outcome | None:
    """Outcome in the cache folder; None if there is none that can be read."""
    identity = _identity(trial, device)
    file = _file(identity)
    record = None if file is None else user_cache.read(file)
    if record is None or any(record.get(name) != value for name, value in identity.items()):
        return None
    passed, refusal = record.get("passed"), record.get("refusal")
    if not isinstance(passed, bool) or not isinstance(refusal, str) or passed != (not refusal):
        return None
    found = Outcome("passed" if passed else "failed", refusal)
    _outcomes[trial, identity["card"]] = found
    return found


def _remember(trial: Trial, device: torch.device, record: dict[str, Any]) -> None:
    identity = _identity(trial, device)
    file = _file(identity)
    reason = "there is no home folder" if file is None else user_cache.write(file, identity | record)
    if reason:
        _say(
            f"the outcome of the self-check could not be stored in {folder() or 'a cache folder'} ({reason}); "
            f"the next process checks again. {user_cache.FOLDER} names another folder",
            once=True,
        )


def _before_first_use() -> Outcome:
    """Outcome of a check that has not run."""
    if user_cache.self_check_setting() == "refuse":
        return Outcome("refused", _FORBIDDEN)
    return Outcome("not run")


_FORBIDDEN = (
    f"these kernels are not verified on this card under this Triton, and {user_cache.SELF_CHECK}=refuse forbids the "
    'self-check at first use; run `wyfold verify` once, or use backend="eager"'
)
_CAPTURING = (
    "these kernels are not verified on this card under this Triton, and their self-check cannot run while a CUDA graph "
    "is captured; make one such call before the capture, or run `wyfold verify` once"
)
_NO_MEMORY = (
    "the self-check of {} found no free memory on the GPU, which says nothing of its kernels; free some and call "
    "again, or run `wyfold verify` once"
)


def _first_use(trial: Trial, device: torch.device) -> Outcome:
    """Run a check and remember its outcome."""
    if _collected is None and user_cache.self_check_setting() == "refuse":
        return Outcome("refused", _FORBIDDEN)
    if capturing(device):
        return Outcome("refused", _CAPTURING)
    where = f"{card(device)} under Triton {toolchain()['triton'] or 'unknown'}"
    if _collected is None:
        _say(f"first use of {trial} on {where}: comparing its kernels with the eager backend, once")
    try:
        judged = _on_new_thread(lambda: verdicts(trial, device), device)
    except torch.OutOfMemoryError:
        return Outcome("refused", _NO_MEMORY.format(trial))  # not kept: the next call tries again
    except Exception as error:
        # Not stored: another process may hold the GPU.
        found = Outcome("failed", _refusal(trial, where, f"they raised {type(error).__name__}: {_first_line(error)}"))
        record: dict[str, Any] = {"operator": str(trial), "passed": False, "refusal": found.refusal, "tensors": {}}
    else:
        failed = [verdict for verdict in judged if not verdict.passed]
        found = Outcome("failed", _refusal(trial, where, "; ".join(map(_figure, failed)))) if failed else _PASSED
        tensors = {v.name: {"error": _number(v.measured.rms), "allowed": _number(v.limits.rms)} for v in judged}
        record = {"operator": str(trial), "passed": not failed, "refusal": found.refusal, "tensors": tensors}
        _remember(trial, device, record)
    if _collected is not None:
        _collected[trial, card(device)] = record
    _outcomes[trial, card(device)] = found
    return found


_PASSED = Outcome("passed")


def capturing(device: torch.device) -> bool:
    """Whether the current stream of a GPU is captured in a graph."""
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _refusal(trial: Trial, where: str, figure: str) -> str:
    return (
        f'the kernels of {trial} failed their self-check on {where}: {figure}; use backend="eager", and please report '
        "it with the file that `wyfold verify --out DIR` writes"
    )


def _figure(verdict: Any) -> str:
    """The first error of a tensor that is over its limit, and the limit."""
    for measure, label in (("rms", "relative error"), ("row", "relative error of the worst row"), ("largest", "error")):
        error, limit = getattr(verdict.measured, measure), getattr(verdict.limits, measure)
        if not error <= limit:
            return f"{verdict.name} has {label} {error:.1e}, allowed are {limit:.1e}"
    return f"{verdict.name} is {verdict.reason}"


def _number(x: float) -> float | str:
    """A number as JSON has it, which knows no infinity."""
    return float(f"{x:.4g}") if math.isfinite(x) else str(x)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300]


def _say(text: str, *, once: bool = False) -> None:
    """Write one line to stderr; with `once`, at most once per process."""
    if once:
        if text in _said:
            return
        _said.add(text)
    sys.stderr.write(f"wyfold: {text}\n")
    sys.stderr.flush()


def _on_new_thread(run: Callable[[], Any], device: torch.device) -> Any:
    """Result of `run` on a thread that has none of the caller's settings, or the exception that it raised."""
    found: list[Any] = []

    def call() -> None:
        try:
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                found.append(run())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=call, name="wyfold self-check")
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


@functools.cache
def _ptxas() -> str:
    """Version of the assembler that Triton uses; empty where it cannot be found."""
    try:
        knobs = importlib.import_module("triton").knobs
        return str(knobs.nvidia.ptxas.version)
    except Exception:  # not an NVIDIA GPU, or a Triton with other names
        return ""


@functools.cache
def _source_hash() -> str:
    """Hash of all files that decide what is launched."""
    digest = hashlib.sha256()
    package = resources.files("wyfold")
    for name in ("autograd", "kernels", "runtime", "tile"):
        with resources.as_file(package / name) as root:
            for file in sorted(root.rglob("*")):
                if file.suffix in (".py", ".json"):
                    digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:32]
