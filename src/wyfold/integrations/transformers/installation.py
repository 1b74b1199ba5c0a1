"""Replacements for one model type, shared by all patches with the same options.

Since transformers 5.15 the functions belong to a model type, so a second patch of the type finds them replaced. It
shares these replacements; the last patch to be undone restores the originals.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from wyfold.integrations.transformers.arguments import Arguments, missing_parameters
from wyfold.integrations.transformers.calls import Calls
from wyfold.integrations.transformers.families import ON_LAYERS, Family, layers_of
from wyfold.integrations.transformers.forwards import intercept
from wyfold.integrations.transformers.packing import settled
from wyfold.integrations.transformers.report import Replaced, Report
from wyfold.runtime.check import UnsupportedError

KNOWN = "4.57 to 5.24"
"""Tested versions of transformers."""


class Options(NamedTuple):
    """Options of a patch, named as in `patch`."""

    packing: bool
    norm: bool
    on_unsupported: str


_installed: list[Installation] = []


def installed(family: Family, options: Options, target: object, version: str) -> Installation:
    """Return the installed replacements for a model type, or install them; a patch then calls `join`.

    Args:
        family: Model type.
        options: Options of the patch.
        target: `patch`'s target; up to 5.14 it must be a model.
        version: Version of transformers.

    Raises:
        ValueError: An active patch has other options or shares only some layers, or target is not a model where it
            must be one.
        UnsupportedError: This version keeps its functions elsewhere, or with other parameters.
    """
    layers = _layers(family, target, version) if family.on_layers else []
    new = Installation(family, options, [layer for _, layer in layers])
    for held in _installed:
        if held.shares(new):
            held.refuse_other(new)
            return held
    try:
        if family.on_layers:
            new.replace_on_layers(layers, target, version)
        else:
            new.replace_in_module(version)
    except BaseException:
        new.restore()
        raise
    _installed.append(new)
    return new


def _layers(family: Family, target: object, version: str) -> list[tuple[str, Any]]:
    """Layers of one model that store the functions as attributes, as up to 5.14."""
    if not isinstance(target, nn.Module):
        raise ValueError(
            f"patch: target must be a model with transformers {version}, whose layers keep the functions themselves, "
            f"got {target!r}"
        )
    layers = list(layers_of(target, family))
    if not layers:
        raise _unknown(version, f"no layer of {type(target).__name__} keeps {ON_LAYERS['chunk']}")
    return layers


def _unknown(version: str, what: str) -> UnsupportedError:
    return UnsupportedError(
        "patch: this version cannot be patched", {f"transformers {version}": f"{what}; known are {KNOWN}"}
    )


class Installation:
    """Rebound names of one model type, or up to 5.14 of one model's layers.

    Attributes:
        family: Model type.
        options: Options common to all patches that share it.
        replaced: Every rebound name.
    """

    def __init__(self, family: Family, options: Options, layers: list[Any]):
        self.family, self.options, self.replaced = family, options, list[Replaced]()
        self._layers = {id(layer): layer for layer in layers}  # kept alive, so that ids stay unique
        self._reports: list[Report] = []
        self._undo: list[Callable[[], None]] = []
        self._calls = Calls(family, self._reports, options.on_unsupported == "stock", family.on_layers)

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

    def shares(self, other: Installation) -> bool:
        """Whether both replace a name of the same owner."""
        if self.family.name != other.family.name:
            return False
        return not (self._layers or other._layers) or not self._layers.keys().isdisjoint(other._layers)

    def refuse_other(self, other: Installation) -> None:
        """Raise unless the other installation has the same layers and options."""
        if self._layers.keys() != other._layers.keys():
            raise ValueError(
                f"patch: target must be the model that an earlier patch of {self.family.name} serves, got one that "
                "shares some of its layers; undo the earlier patch first"
            )
        for name, ours, theirs in zip(Options._fields, self.options, other.options, strict=True):
            if ours != theirs:
                raise ValueError(
                    f"patch: {name} must be {ours!r} for {self.family.name}, got {theirs!r}; an earlier patch holds "
                    "and serves every model of this type already: undo it first, or ask for the same"
                )

    # --- replacements ------------------------------------------------------------------------------------------------

    def replace_in_module(self, version: str) -> None:
        """Rebind the names that a modelling file looks up at every call, since 5.15."""
        family, module = self.family, self.family.module
        names = [*family.functions.values(), family.model, family.norm]
        missing = [name for name in names if not hasattr(module, name)]
        if missing:
            raise _unknown(version, f"{module.__name__} has no {', '.join(missing)}")
        for purpose, name in family.functions.items():
            stock = getattr(module, name)
            self._require_parameters(version, purpose, f"{module.__name__}.{name}", stock)
            ours = functools.wraps(stock)(self._calls.replacing(purpose, stock))
            self._rebind(module, name, ours, Replaced(family.name, module.__name__, name, self._calls.by(purpose)))
        if self.options.packing:
            self._intercept_forward(version, getattr(module, family.model), None)
        self._replace_norm(version)

    def replace_on_layers(self, layers: list[tuple[str, Any]], model: Any, version: str) -> None:
        """Rebind attributes of one model's layers, which pass no boundaries on, up to 5.14."""
        family = self.family
        for path, layer in layers:
            for purpose, name in ON_LAYERS.items():
                if name in vars(layer):
                    ours = self._calls.replacing(purpose, vars(layer)[name])
                    self._rebind(layer, name, ours, Replaced(family.name, path, name, self._calls.by(purpose)))
        if self.options.packing:
            for owner, parts in family.text_models(model).items():
                self._intercept_forward(version, owner, parts)
        self._replace_norm(version)

    def _require_parameters(self, version: str, purpose: str, where: str, stock: Callable[..., Any]) -> None:
        missing = missing_parameters(purpose, stock)
        if missing:
            raise _unknown(version, f"{where} has no parameter {', '.join(missing)}")

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

    def _intercept_forward(self, version: str, owner: type[nn.Module], only: list[nn.Module] | None) -> None:
        """Settle boundaries before `forward` of a text model's class. only: restrict to these instances."""
        op, where = f"patch({self.family.name})", f"{self.family.module_name}.{owner.__name__}"
        try:
            arguments = Arguments.of(owner.forward)
        except LookupError as error:
            raise _unknown(version, f"forward of {where} has no parameter {error}") from None
        concerned = None if only is None else {id(model) for model in only}
        boundaries = self._calls.boundaries

        def handler(forward: Any, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if concerned is not None and id(model) not in concerned:
                return forward(*args, **kwargs)
            call = settled(op, arguments.by_name(op, args, kwargs))
            packed = call.get("cu_seq_lens_q")
            if packed is None:
                return forward(**call)
            self._refuse_inseparable(op, model)
            if torch.compiler.is_compiling() and not self._layers:
                return forward(**call)
            before, boundaries.current = boundaries.current, packed
            try:
                return forward(**call)
            finally:
                boundaries.current = before

        self._undo.append(intercept(owner, handler))
        self.replaced.append(Replaced(self.family.name, where, "forward", "boundaries for all layers"))

    def _refuse_inseparable(self, op: str, model: nn.Module) -> None:
        """Refuse packed documents of a model that cannot separate them."""
        if not self.family.separable:
            raise ValueError(
                f"{op}: documents must come in separate rows, got several in one; the attention of this type selects "
                "tokens from the whole row"
            )
        if not self._layers:
            return
        # Layers of old versions read boundaries only during the forward, and only in the replaced functions.
        if model.training and any(getattr(part, "gradient_checkpointing", False) for part in model.modules()):
            raise ValueError(
                f"{op}: gradient checkpointing must be off for packed documents with transformers before 5.15, got it "
                "on"
            )
        for path, layer in layers_of(model, self.family):
            if ON_LAYERS["conv"] not in vars(layer):
                raise ValueError(
                    f"{op}: packed documents need transformers 5.15 or later; the convolution of {path} knows no "
                    "boundaries"
                )

    def _replace_norm(self, version: str) -> None:
        if not self.options.norm:
            return
        family = self.family
        owner = getattr(family.module, family.norm)
        where = f"{family.module_name}.{family.norm}"
        self._require_parameters(version, "norm", f"{where}.forward", owner.forward)
        ours = functools.wraps(owner.forward)(self._calls.norm(owner.forward))
        self._rebind(owner, "forward", ours, Replaced(family.name, where, "forward", "wyfold.rms_norm_gated"))

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
