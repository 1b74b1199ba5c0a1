"""Replacement of functions in a serving engine's modules, after the engine has imported them.

A plug-in is loaded in each process of an engine, before the process chooses a device. Importing the modules of layers
then would initialise CUDA in processes that are forked later. So the plug-in waits until the engine imports them.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple


class Record(NamedTuple):
    """Signatures of an engine's functions, as in the version that was tested.

    Attributes:
        package: Name of the engine.
        version: Version of the engine.
        modules: Module -> name, dotted for a method -> names of its parameters in order. Where a module imports a
            function from another, its name is listed in the module that calls it.
    """

    package: str
    version: str
    modules: dict[str, dict[str, list[str]]]

    @staticmethod
    def read(path: Path) -> Record:
        """Read a record from a JSON file with these three keys."""
        return Record(**json.loads(path.read_text(encoding="utf-8")))

    def differences(self, module: ModuleType) -> list[str]:
        """Compare a module with this record.

        Returns:
            One sentence per difference, empty if the signatures are those that were tested.
        """
        found = []
        for name, expected in self.modules[module.__name__].items():
            try:
                function: Any = functools.reduce(getattr, name.split("."), module)
                parameters = list(inspect.signature(function).parameters)
            except (AttributeError, TypeError, ValueError):
                found.append(f"{module.__name__} has no function {name}")
                continue
            if parameters != expected:
                found.append(f"{name} takes ({', '.join(parameters)}) instead of ({', '.join(expected)})")
        return found


REPLACED = "_wyfold_replaced"
"""Attribute of a module whose functions were replaced."""

Install = Callable[[ModuleType], str | None]
"""Replaces functions of a module. Returns a sentence that says what was replaced, or None if nothing was."""


def plug_in(record: Record, installs: dict[str, Install], variable: str, log: logging.Logger) -> None:
    """Install each replacement when its module is imported, unless an environment variable is "0".

    Nothing here raises: an engine without these replacements runs its own kernels. What was replaced is one line of the
    log, at level INFO; what prevents it is one at level ERROR.

    Args:
        record: Signatures of every module in `installs`.
        installs: Module -> replacement of its functions.
        variable: Name of the environment variable.
        log: Logger whose lines the engine prints.
    """
    if environment_value(variable) == "0":
        log.info("Wyfold replaces nothing in %s, because %s=0.", record.package, variable)
        return
    for name, install in installs.items():
        on_import(name, functools.partial(_install, record, install, log))


def environment_value(variable: str) -> str | None:
    """Value of an environment variable of the engine's process, or None."""
    return os.environ.get(variable)


def _install(record: Record, install: Install, log: logging.Logger, module: ModuleType) -> None:
    if getattr(module, REPLACED, False):  # the plug-in was loaded twice
        return
    try:
        differences = record.differences(module)
        if differences:
            log.error(
                "Wyfold leaves %s to %s. It was tested with %s %s, and here %s.",
                module.__name__, record.package, record.package, record.version, "; ".join(differences),
            )  # fmt: skip
            return
        replaced = install(module)
        setattr(module, REPLACED, True)
        if replaced is not None:
            log.info("%s", replaced)
    except Exception:
        log.exception("Wyfold could not replace the kernels of %s. %s keeps its own.", module.__name__, record.package)


def with_fallback(ours: Callable[..., Any], engines: Callable[..., Any], log: logging.Logger) -> Callable[..., Any]:
    """Call `ours`; where it refuses its arguments, which it does before any work, call the engine's function.

    Each of the first 16 different refusals is one line of the log, at level ERROR.

    Args:
        ours: Refuses with a ValueError (as UnsupportedError is) or TypeError.
        engines: Function of the same signature.
        log: Logger whose lines the engine prints.
    """
    refusals: set[str] = set()

    @functools.wraps(engines)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return ours(*args, **kwargs)
        except (ValueError, TypeError) as refusal:
            if str(refusal) not in refusals and len(refusals) < 16:
                refusals.add(str(refusal))
                log.error("The engine's own %s serves a call that Wyfold refuses: %s", engines.__qualname__, refusal)
            return engines(*args, **kwargs)

    return call


_waiting: dict[str, list[Callable[[ModuleType], None]]] = {}


def on_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call `action(module)` once the module has been imported: now, or right after its first import.

    Args:
        name: Dotted name of the module.
        action: Called once in a process. An exception it raises reaches the code that imports the module.
    """
    if name in sys.modules:
        action(sys.modules[name])
        return
    _waiting.setdefault(name, []).append(action)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a module with the other finders, and calls the waiting actions after its code has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's spec if actions wait for it, else None."""
        if fullname not in _waiting:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                # The spec's loader serves this module alone.
                spec.loader.exec_module = _followed(spec.loader.exec_module, _waiting.pop(fullname))  # type: ignore
                return spec
        return None


def _followed(
    execute: Callable[[ModuleType], None], actions: list[Callable[[ModuleType], None]]
) -> Callable[[ModuleType], None]:
    def execute_and_act(module: ModuleType) -> None:
        execute(module)
        for action in actions:
            action(module)

    return execute_and_act
