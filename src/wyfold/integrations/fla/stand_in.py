"""A stand-in for `fla`: modules of fla's names that hold Wyfold's functions and classes.

`install` puts a finder before all others on `sys.meta_path`. It makes the modules of `MODULES` and `LATER` when a
program imports them. A name that is not among them is an ImportError that says so and names Wyfold.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from wyfold.integrations.fla.stand_in_names import INSTEAD, LATER, MODULES
from wyfold.runtime import check

VERSION = "0.6.0"
"""Version of fla-core whose names these are."""


def _missing(module: str, name: str) -> str:
    remedy = INSTEAD.get(name, f"uninstall the stand-in and use flash-linear-attention {VERSION} where it is needed")
    return f"Wyfold stands in for fla here (wyfold.integrations.fla.install), and its {module} has no {name}: {remedy}"


class StandIn(MetaPathFinder, Loader):
    """Installed stand-in for `fla`; as a context manager it uninstalls itself at the end.

    Attributes:
        modules: Names of the modules that belong to the stand-in.
    """

    modules = tuple(dict.fromkeys([*MODULES, *LATER]))

    def __init__(self) -> None:
        self._real = {name: module for name, module in sys.modules.items() if _is_fla(name)}
        for name in self._real:
            del sys.modules[name]
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Say that a module of fla's comes from here; for the import system.

        Raises:
            ModuleNotFoundError: It is a module of fla's, or a name, that the stand-in does not have.
        """
        if not _is_fla(fullname):
            return None
        if fullname not in self.modules:
            parent, _, child = fullname.rpartition(".")
            # Python discards an error that names the module which `from parent import child` tried last.
            raise ModuleNotFoundError(_missing(parent, child), name=parent)
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Fill a module with its names; for the import system."""
        name = module.__name__
        module.__doc__ = f"{name}, as far as Wyfold stands in for it (wyfold.integrations.fla)."
        later, names = LATER.get(name, ("", ()))
        if later:
            _found(name, later)
        for child in self.modules:
            if child.rpartition(".")[0] == name and child != "fla.models":
                importlib.import_module(child)
        own = MODULES.get(name, {})  # after the children: a function of a child's name takes precedence, as in fla
        vars(module).update(own, __all__=[*own, *names], __version__=f"{VERSION}+wyfold")
        vars(module)["__getattr__"] = lambda attribute: _attribute(name, later, names, attribute)
        if name == "fla" and importlib.util.find_spec("transformers") is not None:
            # As in fla, `import fla` registers its models; one that cannot says why when fla.models is imported.
            try:
                importlib.import_module("fla.models")
            except ImportError:
                sys.modules.pop("fla.models", None)

    def uninstall(self) -> None:
        """Remove the stand-in and restore the modules it shadowed; a second call has no effect."""
        global _standing
        if _standing is not self:
            return
        sys.meta_path.remove(self)
        for name in [name for name in sys.modules if _is_fla(name)]:
            del sys.modules[name]
        sys.modules.update(self._real)
        _standing = None

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *error: object) -> None:
        self.uninstall()


def _is_fla(name: str) -> bool:
    return name.partition(".")[0] == "fla"


def _found(name: str, later: str) -> ModuleType:
    """The module that has the names of `name`."""
    try:
        return importlib.import_module(later)
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] != "transformers":
            raise
        raise ImportError(
            f"{name}: Wyfold stands in for fla here, and its models need transformers; pip install transformers",
            name=name,
        ) from missing


def _attribute(module: str, later: str, names: Sequence[str], attribute: str) -> object:
    """What a module's `__getattr__` finds: a name that is looked up when asked for, or fla's own top-level names."""
    if attribute in names:
        return getattr(_found(module, later), attribute)
    if module == "fla" and not attribute.startswith("_"):
        if attribute == "models":
            return importlib.import_module("fla.models")
        if attribute in MODULES["fla.layers"]:
            return MODULES["fla.layers"][attribute]
        if attribute in LATER["fla.models"][1]:
            return getattr(importlib.import_module("fla.models"), attribute)
    raise AttributeError(_missing(module, attribute))


_standing: StandIn | None = None


def install(force: bool = False) -> StandIn:
    """Make `import fla` import Wyfold's stand-in.

    Code imported earlier keeps the functions it has. Where transformers is installed, `import fla` also registers the
    models of `fla.models` with it, as fla does.

    Args:
        force: Install even if another fla can be imported, which is then shadowed until `uninstall`.

    Returns:
        The stand-in, with `.uninstall()`; also a context manager. Repeated calls return the same object.

    Raises:
        TypeError: force is not a bool.
        ImportError: Another fla can be imported (a folder of that name suffices), and force is False.

    Examples:
        >>> import wyfold.integrations.fla
        >>> with wyfold.integrations.fla.install():
        ...     from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        >>> chunk_gated_delta_rule is wyfold.integrations.fla.chunk_gated_delta_rule
        True
    """
    global _standing
    check.flag("install", force=force)
    if _standing is None:
        place = None if force else _importable()
        if place is not None:
            raise ImportError(
                f"install: another fla is importable, {place}, and is not shadowed unasked; import from "
                "wyfold.integrations.fla, or install(force=True)",
                name="fla",
            )
        _standing = StandIn()
    return _standing


def uninstall() -> None:
    """Remove the stand-in, if installed."""
    if _standing is not None:
        _standing.uninstall()


def _importable() -> str | None:
    """Location of another importable fla, which may be a folder without an `__init__.py`; None if there is none."""
    imported = "fla" in sys.modules
    spec = sys.modules["fla"].__spec__ if imported else importlib.util.find_spec("fla")
    if spec is None:
        return "imported already" if imported else None
    return spec.origin or ", ".join(spec.submodule_search_locations or ()) or "imported already"
