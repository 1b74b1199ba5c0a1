"""Run an installed fla on Wyfold's operators, without a changed line in the program that uses it.

    with wyfold.integrations.fla.accelerate() as accelerated:
        model(input_ids)
    print(accelerated.report)

fla 0.5.2 and 0.6.0 dispatch whole calls of `chunk_gated_delta_rule` and `chunk_kda` to registered backends, in both
directions; Wyfold registers one. The other functions are not dispatched, so their names are rebound in every module
that has imported them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from wyfold.integrations.fla.calls import OPERATORS, Arguments, Declined, run
from wyfold.runtime.check import UnsupportedError

SERVED = "wyfold"

DEFAULT = (
    "chunk_gated_delta_rule",
    "chunk_kda",
    "chunk_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
    "fused_recurrent_delta_rule",
)
"""Functions that `accelerate` takes by default: the recurrences."""

PRIORITY = -1
"""Before fla's own backends, whose priorities are 0 and higher."""


@dataclass
class Report:
    """Report of one acceleration, updated while it is active and valid afterwards.

    Attributes:
        version: Version of fla.
        registered: Functions that fla's registry dispatches to Wyfold.
        rebound: Function -> modules whose names were rebound.
        calls: (function, outcome) -> number of calls. The outcome is "wyfold", or the reason why fla ran the call.
            Calls of the whole process are counted while the acceleration is active, except in compiled code.
    """

    version: str
    registered: list[str] = field(default_factory=list)
    rebound: dict[str, list[str]] = field(default_factory=dict)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def served(self) -> int:
        """Number of calls that Wyfold ran."""
        return sum(times for (_, outcome), times in self.calls.items() if outcome == SERVED)

    @property
    def left(self) -> dict[str, int]:
        """Reason -> number of calls left to fla."""
        reasons: Counter[str] = Counter()
        for (_, outcome), times in self.calls.items():
            if outcome != SERVED:
                reasons[outcome] += times
        return dict(reasons)

    def __str__(self) -> str:
        lines = [f"fla {self.version}"]
        lines += [f"  {name}: registered as a backend" for name in self.registered]
        lines += [f"  {name}: rebound in {', '.join(modules)}" for name, modules in self.rebound.items()]
        lines += [f"  {times} x {name}: {outcome}" for (name, outcome), times in sorted(self.calls.items())]
        return "\n".join(lines)


class Acceleration:
    """Active acceleration; as a context manager it undoes itself at the end.

    Attributes:
        operators: fla's functions that it takes.
        report: Taken functions and outcomes of calls.
    """

    def __init__(self, operators: tuple[str, ...], report: Report):
        self.operators, self.report = operators, report

    def undo(self) -> Report:
        """Give the functions back to fla, unless another acceleration takes them; a second call has no effect."""
        with _lock:
            if self in _active:
                _active.remove(self)
                for name in self.operators:
                    if not _taken(name) and name in _rebindings:
                        _rebindings.pop(name).restore()
        return self.report

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


_active: list[Acceleration] = []
_rebindings: dict[str, _Rebinding] = {}
_lock = threading.RLock()


def accelerate(operators: Iterable[str] | None = None) -> Acceleration:
    """Make an installed fla run on Wyfold's operators.

    Each call is checked separately. Wyfold runs it if the result is what fla's own kernels compute, within rounding;
    otherwise fla runs it, and the report counts the reason: a context of fla's context parallelism, an unknown keyword,
    `use_graph`, returned intermediate states, K above 256 or V above 512, mixed dtypes, an
    unsupported card. Calls that are wrong are left to fla too, which raises its own error. fla's layers, models,
    parameters and checkpoints are unchanged.

    `chunk_gated_delta_rule` and `chunk_kda` are taken through fla's registry of backends, so that every caller is
    reached. The other functions are rebound in the modules that have imported them. A reference that is stored
    elsewhere, such as an attribute of a layer, keeps fla's function; `wyfold.integrations.transformers.patch` reaches
    transformers' own.

    Args:
        operators: Names of fla's functions. None: the recurrences, "chunk_gated_delta_rule", "chunk_kda",
            "chunk_delta_rule" and their "fused_recurrent_" forms. Also possible are "causal_conv1d" and
            "rms_norm_gated".

    Returns:
        The acceleration, with `.report` and `.undo()`; also a context manager. Several can be active; a function goes
        back to fla when the last one that takes it is undone.

    Raises:
        ModuleNotFoundError: fla is not installed.
        TypeError: operators is neither None nor names.
        ValueError: A name is unknown, or the imported fla is Wyfold's stand-in.
        UnsupportedError: This version of fla has no registry of backends, or it was switched off.
    """
    names = _chosen(operators)
    fla = _fla()
    report = Report(str(getattr(fla, "__version__", "of unknown version")))
    acceleration = Acceleration(names, report)
    with _lock:
        try:
            for name in names:
                if OPERATORS[name].registry:
                    _register(name, report.version)
                    report.registered.append(name)
                else:
                    if name not in _rebindings:
                        _rebindings[name] = _Rebinding(name)
                    report.rebound[name] = _rebindings[name].modules
        except BaseException:
            for name in report.rebound:
                if not _taken(name):
                    _rebindings.pop(name).restore()
            raise
        _active.append(acceleration)
    return acceleration


def _chosen(operators: Iterable[str] | None) -> tuple[str, ...]:
    if operators is None:
        return DEFAULT
    names = () if isinstance(operators, str) or not isinstance(operators, Iterable) else tuple(operators)
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"accelerate: operators must be names of fla's functions, or None, got {operators!r}")
    for name in names:
        if name not in OPERATORS:
            raise ValueError(f"accelerate: operators must be among {', '.join(OPERATORS)}, got {name!r}")
    return tuple(dict.fromkeys(names))


def _fla() -> ModuleType:
    """fla itself, not the stand-in."""
    try:
        fla = importlib.import_module("fla")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "accelerate: needs fla, which is not installed: pip install flash-linear-attention", name=error.name
        ) from error
    if str(getattr(fla, "__version__", "")).endswith("+wyfold"):
        raise ValueError("accelerate: fla must be the installed package, got Wyfold's stand-in, which needs no help")
    return fla


def _taken(name: str) -> bool:
    return any(name in acceleration.operators for acceleration in _active)


def _count(name: str, outcome: str) -> None:
    if not torch.compiler.is_compiling():  # a changing counter would cause recompilation at every call
        for acceleration in _active:
            if name in acceleration.operators:
                acceleration.report.calls[name, outcome] += 1


def _named(parameters: tuple[str, ...], args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
    """Arguments by the names that this version of fla gives them."""
    if len(args) > len(parameters) or not kwargs.keys().isdisjoint(parameters[: len(args)]):
        raise Declined("arguments that fla's signature does not have")
    return {**dict(zip(parameters, args, strict=False)), **kwargs}


def _positional(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a function's parameters, without `**kwargs`."""
    parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD)


# --- functions that fla dispatches -----------------------------------------------------------------------------------


def _register(name: str, version: str) -> None:
    """Register a backend for one function, once for each imported fla; it is enabled while an acceleration is active.

    Neither version of fla can remove a backend.
    """
    function = getattr(importlib.import_module(OPERATORS[name].module), name)
    backends = _backends(version)
    if function in _registered:
        return
    backend = _backend(name, _positional(function), backends.BaseBackend)
    operation = OPERATORS[name].module.rpartition(".")[2]
    if hasattr(backends, "register"):  # 0.6.0: by the name of an operation, or by function
        backends.register(operation if operation == "gated_delta_rule" else function)(backend)
    else:  # 0.5.2: a registry for each operation
        backends.BackendRegistry.ensure_initialized(operation)
        registry = {"gated_delta_rule": "gdr_registry", "kda": "kda_registry"}[operation]
        getattr(importlib.import_module(f"{OPERATORS[name].module}.backends"), registry).register(backend())
    _registered.add(function)


_registered: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def _backends(version: str) -> ModuleType:
    """fla's module of backends."""
    for name in ("fla.backends", "fla.ops.backends"):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        if getattr(module, "_DISPATCH_DISABLED", False):
            raise UnsupportedError(
                "accelerate: fla's backends are switched off",
                {f"fla {version}": "it was imported with FLA_DISABLE_BACKEND_DISPATCH=1; start without it"},
            )
        return module
    raise UnsupportedError(
        "accelerate: this version of fla has no registry of backends",
        {f"fla {version}": "0.5.2 and 0.6.0 are known; install one of them"},
    )


def _backend(name: str, parameters: tuple[str, ...], base: type) -> type:
    """Class of a backend that runs `name` on Wyfold.

    fla asks the verifier first, and calls the function if it agrees. Only the operator knows whether it can run a call,
    so the verifier runs it and the function hands over the result. Both happen on one thread, one after the other.
    """
    ready = threading.local()

    def verifier(self: Any, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        try:
            result = run(name, _named(parameters, args, kwargs))
        except Declined as reason:
            _count(name, str(reason))
            return False, str(reason)
        except Exception as error:  # fla would take any error of a verifier for a refusal
            ready.outcome = None, error
            return True, None
        _count(name, SERVED)
        ready.outcome = result, None
        return True, None

    def function(self: Any, *args: Any, **kwargs: Any) -> Any:
        (result, error), ready.outcome = ready.outcome, None
        if error is not None:
            raise error
        return result

    return type(
        "WyfoldBackend",
        (base,),
        {
            "backend_type": "wyfold",
            "priority": PRIORITY,
            "is_enabled": staticmethod(lambda: _taken(name)),
            f"{name}_verifier": verifier,
            name: function,
        },
    )


# --- functions that fla does not dispatch ----------------------------------------------------------------------------


class _Rebinding:
    """One function's names, rebound in all modules that have imported it.

    Attributes:
        modules: Modules with a rebound name.
    """

    def __init__(self, name: str):
        stock = getattr(importlib.import_module(OPERATORS[name].module), name)
        self._stock, self._ours = stock, _replacement(name, stock)
        self._names: list[tuple[ModuleType, str]] = []
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType):
                found = [key for key, value in list(vars(module).items()) if value is stock]
                self._names += [(module, key) for key in found]
        for module, key in self._names:
            setattr(module, key, self._ours)
        self.modules = sorted({module.__name__ for module, _ in self._names})

    def restore(self) -> None:
        """Restore every name, unless other code has assigned it since."""
        for module, key in self._names:
            if vars(module).get(key) is self._ours:
                setattr(module, key, self._stock)


def _replacement(name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Function that runs on Wyfold what it can, and otherwise calls `stock`."""
    parameters = _positional(stock)

    @functools.wraps(stock)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if not _taken(name):  # imported from fla while it was rebound, and called afterwards
            return stock(*args, **kwargs)
        try:
            result = run(name, _named(parameters, args, kwargs))
        except Declined as reason:
            _count(name, str(reason))
            return stock(*args, **kwargs)
        _count(name, SERVED)
        return result

    return replacement
