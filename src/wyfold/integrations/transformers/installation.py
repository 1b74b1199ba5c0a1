"""Replacements for one model type, shared by all patches with the same options.

The functions belong to a model type, so a second patch of the type finds them replaced. It shares these replacements;
the last patch to be undone restores the originals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from wyfold.integrations.transformers.arguments import Arguments, difference
from wyfold.integrations.transformers.calls import Calls
from wyfold.integrations.transformers.families import Family
from wyfold.integrations.transformers.forwards import intercept
from wyfold.integrations.transformers.packing import settled
from wyfold.integrations.transformers.report import Replaced, Report
from wyfold.runtime.check import UnsupportedError

OLDEST, NEWEST = "5.15", "5.24"
"""Versions of transformers: the first whose functions are looked up at every call, and the last one tested."""


class Options(NamedTuple):
    """Options of a patch, named as in `patch`."""

    packing: bool
    norm: bool
    on_unsupported: str


_installed: list[Installation] = []


def installed(family: Family, options: Options, version: str) -> Installation:
    """Return the installed replacements for a model type, or install them; a patch then calls `join`.

    Args:
        family: Model type.
        options: Options of the patch.
        version: Version of transformers.

    Raises:
        ValueError: An active patch has other options.
        UnsupportedError: This version keeps its functions elsewhere, or with other parameters.
    """
    for held in _installed:
        if held.family.name == family.name:
            held.refuse_other(options)
            return held
    new = Installation(family, options)
    try:
        new.replace(version)
    except BaseException:
        new.restore()
        raise
    _installed.append(new)
    return new


def refuse_old(version: str) -> None:
    """Raise UnsupportedError for a version of transformers whose layers store the functions themselves."""
    if _numbers(version) < _numbers(OLDEST):
        raise _unknown(version, "its layers store their functions when they are made")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _unknown(version: str, what: str) -> UnsupportedError:
    return UnsupportedError(
        "patch: this version cannot be patched",
        {f"transformers {version}": f"{what}; known are {OLDEST} to {NEWEST}"},
    )


class Installation:
    """Rebound names of one model type.

    Attributes:
        family: Model type.
        options: Options common to all patches that share it.
        replaced: Every rebound name.
    """

    def __init__(self, family: Family, options: Options):
        self.family, self.options, self.replaced = family, options, list[Replaced]()
        self._reports: list[Report] = []
        self._undo: list[Callable[[], None]] = []
        self._calls = Calls(family, self._reports, options.on_unsupported == "stock")

    # --- active patches ----------------------------------------------------------------------------------------------

    def join(self, report: Report, target: object) -> None:
        """Add a patch: count calls in its report until it leaves."""
        self._reports.append(report)
        report.replaced += self.replaced
        if self.options.norm and isinstance(target, nn.Module):
            report.kept |= self._hooked_norms(target)

    def leave(self, report: Report) -> None:
        """Remove a patch; removing the last one restores all names."""
        self._reports[:] = [held for held in self._reports if held is not report]
        if not self._reports:
            _installed.remove(self)
            self.restore()

    def restore(self) -> None:
        """Restore every rebound name."""
        while self._undo:
            self._undo.pop()()

    def refuse_other(self, options: Options) -> None:
        """Raise unless the options are those of the active patches."""
        for name, ours, theirs in zip(Options._fields, self.options, options, strict=True):
            if ours != theirs:
                raise ValueError(
                    f"patch: {name} must be {ours!r} for {self.family.name}, got {theirs!r}; an earlier patch holds "
                    "and serves every model of this type already: undo it first, or ask for the same"
                )

    # --- replacements ------------------------------------------------------------------------------------------------

    def replace(self, version: str) -> None:
        """Rebind the names that a modelling file looks up at every call."""
        family = self.family
        try:
            module = family.module
        except ModuleNotFoundError as error:
            if error.name is None or not family.module_name.startswith(error.name):
                raise
            raise _unknown(version, f"it has no model type {family.name}") from error
        names = [*family.functions.values(), family.model, family.norm]
        missing = [name for name in names if not hasattr(module, name)]
        if missing:
            raise _unknown(version, f"{module.__name__} has no {', '.join(missing)}")
        for purpose, name in family.functions.items():
            ours = self._replacing(version, purpose, f"{module.__name__}.{name}", getattr(module, name))
            self._rebind(module, name, ours, Replaced(family.name, module.__name__, name, self._calls.by(purpose)))
        if self.options.packing:
            self._intercept_forward(version, getattr(module, family.model))
        if self.options.norm:
            owner, where = getattr(module, family.norm), f"{module.__name__}.{family.norm}"
            ours = self._replacing(version, "norm", f"{where}.forward", owner.forward)
            self._rebind(owner, "forward", ours, Replaced(family.name, where, "forward", "wyfold.rms_norm_gated"))

    def _replacing(self, version: str, purpose: str, where: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Replacement for a function, which must have the replacement's parameters."""
        ours = self._calls.replacing(purpose, stock)
        found = difference(stock, ours)
        if found:
            raise _unknown(version, f"{where} {found}")
        return ours

    def _rebind(self, owner: Any, name: str, ours: object, replaced: Replaced) -> None:
        """Set owner.name to `ours`; `restore` undoes it unless other code has assigned the name since."""
        own, kept = name in vars(owner), vars(owner).get(name)

        def restore() -> None:
            if vars(owner).get(name) is not ours:
                return
            if own:
                setattr(owner, name, kept)
            else:
                delattr(owner, name)

        setattr(owner, name, ours)
        self._undo.append(restore)
        self.replaced.append(replaced)

    def _intercept_forward(self, version: str, owner: type[nn.Module]) -> None:
        """Settle boundaries before `forward` of a text model's class."""
        op, where = f"patch({self.family.name})", f"{self.family.module_name}.{owner.__name__}"
        try:
            arguments = Arguments.of(owner.forward)
        except LookupError as error:
            raise _unknown(version, f"forward of {where} has no parameter {error}") from None
        boundaries = self._calls.boundaries

        def handler(forward: Any, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            call = settled(op, arguments.by_name(op, args, kwargs))
            packed = call.get("cu_seq_lens_q")
            if packed is None:
                return forward(**call)
            if not self.family.separable:
                raise ValueError(
                    f"{op}: documents must come in separate rows, got several in one; the attention of this type "
                    "selects tokens from the whole row"
                )
            if torch.compiler.is_compiling():
                return forward(**call)
            before, boundaries.current = boundaries.current, packed
            try:
                return forward(**call)
            finally:
                boundaries.current = before

        self._undo.append(intercept(owner, handler))
        self.replaced.append(Replaced(self.family.name, where, "forward", "boundaries for all layers"))

    def _hooked_norms(self, model: nn.Module) -> dict[str, str]:
        """Gated norms whose `forward` was wrapped before the class's was replaced, which keep the stock function.

        The wrapper may load the weight, so it must run, and the function it calls cannot be replaced.
        """
        owner = getattr(self.family.module, self.family.norm)
        return {
            f"{path}.forward": "its wrapper, such as a hook, was made before the patch"
            for path, part in model.named_modules()
            if isinstance(part, owner) and "forward" in vars(part)
        }
