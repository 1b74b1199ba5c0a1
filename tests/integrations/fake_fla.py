"""A package `fla` with the registries and signatures of fla 0.5.2 or 0.6.0, whose own functions only record calls.

`fla_operators.json` holds parameters and defaults as recorded from the two releases.
"""

import functools
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from wyfold.integrations.fla.calls import OPERATORS

SIGNATURES = json.loads(Path(__file__).with_name("fla_operators.json").read_text())
VERSIONS = tuple(SIGNATURES)


class OwnCall(tuple):
    """Result of a fake function: its name, arguments and keywords."""


def stock(version: str, name: str) -> Callable[..., Any]:
    """A function with fla's signature that returns how it was called."""

    def function(*args: Any, **kwargs: Any) -> OwnCall:
        return OwnCall((name, args, kwargs))

    parameters = []
    for parameter, default in SIGNATURES[version][name].items():
        if parameter == "**":
            parameters.append(inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD))
            continue
        value = inspect.Parameter.empty if default == "required" else default
        parameters.append(inspect.Parameter(parameter, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=value))
    function.__name__ = name
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function


class BaseBackend:
    """What both versions ask of a backend."""

    backend_type = "base"
    priority = 5
    implementation = verifier = None

    @classmethod
    def is_available(cls) -> bool:
        return True

    @classmethod
    def is_enabled(cls) -> bool:
        return True

    def verify(self, name: str, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        verifier = self.verifier or getattr(self, f"{name}_verifier", None)
        if verifier is None:
            return True, None
        try:
            return verifier(*args, **kwargs)
        except Exception as error:
            return False, str(error)


class BackendRegistry:
    """Backends of one operation (0.5.2, and `gated_delta_rule` in 0.6.0) or of one function (0.6.0)."""

    loaded: ClassVar[set[str]] = set()

    def __init__(self) -> None:
        self.backends: dict[str, Any] = {}

    def register(self, backend: Any) -> None:
        self.backends[backend.backend_type] = backend

    @classmethod
    def ensure_initialized(cls, operation: str) -> None:
        cls.loaded.add(operation)

    def dispatch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            for backend in sorted(self.backends.values(), key=lambda backend: backend.priority):
                if not (backend.is_available() and backend.is_enabled()):
                    continue
                if not backend.verify(name, *args, **kwargs)[0]:
                    continue
                implementation = getattr(backend, name, None)
                if implementation is not None:
                    return implementation(*args, **kwargs)
            return function(*args, **kwargs)

        return wrapper


def _modules(version: str) -> dict[str, ModuleType]:
    modules = {name: ModuleType(name) for name in ("fla", "fla.ops", "fla.modules", "fla.layers")}
    registries = {"gated_delta_rule": BackendRegistry(), "kda": BackendRegistry()}
    functions: dict[Any, BackendRegistry] = {}
    for name, operator in OPERATORS.items():
        module = modules.setdefault(operator.module, ModuleType(operator.module))
        function = stock(version, name)
        if operator.registry:
            registry = registries[operator.module.rpartition(".")[2]]
            functions[function] = registry
            function = registry.dispatch(function)
        for place in (module, modules["fla.layers"]):
            setattr(place, name, function)
    vars(modules["fla"]).update(__version__=version)
    if version == "0.5.2":
        backends = modules["fla.ops.backends"] = ModuleType("fla.ops.backends")
        vars(backends).update(BaseBackend=BaseBackend, BackendRegistry=BackendRegistry)
        for operation, name in (("gated_delta_rule", "gdr_registry"), ("kda", "kda_registry")):
            place = f"fla.ops.{operation}.backends"
            modules[place] = ModuleType(place)
            setattr(modules[place], name, registries[operation])
    else:

        def register(entry: Any) -> Callable[[type], type]:
            registry = registries[entry] if isinstance(entry, str) else functions[inspect.unwrap(entry)]

            def decorator(backend: type) -> type:
                registry.register(backend())
                return backend

            return decorator

        backends = modules["fla.backends"] = ModuleType("fla.backends")
        vars(backends).update(BaseBackend=BaseBackend, register=register)
    backends._registries = registries  # type: ignore[attr-defined]  # for the tests
    for name, module in modules.items():
        module.__path__ = []
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    return modules


@contextmanager
def imported(version: str) -> Iterator[ModuleType]:
    """`fla` is this package while the context is open."""
    real = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "fla"}
    for name in real:
        del sys.modules[name]
    sys.modules.update(_modules(version))
    try:
        yield importlib.import_module("fla")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
            del sys.modules[name]
        sys.modules.update(real)
