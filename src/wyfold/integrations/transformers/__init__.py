"""Models of transformers on Wyfold's operators, without a fork.

    with patch(model):
        model(input_ids, position_ids=...)

Rebound are names: the functions that a modelling file calls (transformers 5.15 and later) or keeps on its layers (4.57
to 5.14), and `forward` of the class that hands positions to the layers. Parameters, configurations, and with them
loading and saving stay as they are.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from wyfold.integrations.transformers.calls import Boundaries, Calls
from wyfold.integrations.transformers.families import FAMILIES, ON_LAYERS, Family, chosen, layers_of
from wyfold.integrations.transformers.packing import settled
from wyfold.integrations.transformers.report import Replaced, Report
from wyfold.runtime import check
from wyfold.runtime.check import UnsupportedError

__all__ = ["FAMILIES", "Family", "Patch", "Replaced", "Report", "patch"]

_patched: set[tuple[int, str]] = set()


class Patch:
    """A patch that holds; also a context that undoes it at its end.

    Attributes:
        report: What was replaced, and what became of every call.
    """

    def __init__(self, report: Report):
        self.report = report
        self._undo: list[Callable[[], None]] = []

    def undo(self) -> Report:
        """Put everything back; a second time does nothing. Returns the report."""
        while self._undo:
            self._undo.pop()()
        return self.report

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def _rebind(self, owner: Any, name: str, replacement: object, told: Replaced) -> None:
        """owner.name is the replacement until `undo`."""
        key = id(owner), name  # alive as long as the key is: `restore` holds it
        if key in _patched:
            raise ValueError(f"patch: {told.where}.{name} must be patched once at a time; undo the patch that holds")
        own, kept = name in vars(owner), vars(owner).get(name)

        def restore() -> None:
            _patched.discard(key)
            if own:
                setattr(owner, name, kept)
            else:
                delattr(owner, name)

        setattr(owner, name, replacement)
        _patched.add(key)
        self._undo.append(restore)
        self.report.replaced.append(told)


def patch(
    target: nn.Module | str | list[str] | tuple[str, ...] | None = None,
    *,
    packing: bool = True,
    norm: bool = False,
    on_unsupported: str = "raise",
) -> Patch:
    """Let models of transformers run on Wyfold.

    Replaced are the chunked and the token-by-token delta rule, the short convolution over a sequence and over one more
    token, and on demand the gated norm. The decision is made call by call, by what the operators support on that
    device, with that dtype and head size.

    Since transformers 5.15 the functions belong to a model type, and every model of the type follows; before, they
    belong to the layers of one model, which has to be given.

    Args:
        target: A model; names of model types ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "olmo_hybrid",
            "kimi_linear", "bailing_hybrid", "glm5_next"); None for every one of these that is imported.
        packing: Keep documents apart that are packed into a row by `position_ids` that begin again, by `cu_seq_lens_q`
            or by `seq_idx`: attention, convolution and recurrence get the same boundaries, and no cache is kept.
            Reading positions waits for the device once per forward. Refused are packed documents of "qwen4_exp" and
            "glm5_next", whose attention picks its tokens from the whole row.
        norm: Replace the gated norm too.
        on_unsupported: "raise", or "stock": such a call runs the model's own code, and the report says why and
            how often. Calls with packed documents always raise.

    Returns:
        The patch: `.report`, `.undo()`, and a context manager that undoes at its end.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        TypeError: target is neither a model nor names.
        ValueError: an unknown type, nothing to patch, or a patch of the same names holds already.
        UnsupportedError: this version of transformers keeps its functions elsewhere.

    While it holds, a patched model raises ValueError on packed documents together with a cache or with padding, on
    positions that contradict given boundaries, and on padding on the right where a cache is filled, which the CPU and
    `wyfold.checked()` see.
    """
    check.flag("patch", packing=packing, norm=norm)
    check.choice("patch", "on_unsupported", on_unsupported, ("raise", "stock"))
    families = chosen(target)
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "patch: needs transformers, which is not installed: pip install transformers", name=error.name
        ) from error
    patched = Patch(Report(transformers.__version__))
    try:
        for family in families:
            calls = Calls(family, patched.report, on_unsupported == "stock", Boundaries())
            if family.on_layers:
                _patch_layers(patched, calls, target, packing)
            else:
                _patch_module(patched, calls, packing)
            if norm:
                _patch_norm(patched, calls)
    except BaseException:
        patched.undo()
        raise
    return patched


def _patch_module(patched: Patch, calls: Calls, packing: bool) -> None:
    """Since 5.15: the names a modelling file looks up at every call."""
    family = calls.family
    module = family.module
    missing = [name for name in (*family.functions.values(), family.model, family.norm) if not hasattr(module, name)]
    if missing:
        raise _unknown(patched, f"{module.__name__} has no {', '.join(missing)}")
    for purpose, name in family.functions.items():
        stock = getattr(module, name)
        told = Replaced(family.name, module.__name__, name, calls.by(purpose))
        patched._rebind(module, name, functools.wraps(stock)(calls.replacing(purpose, stock)), told)
    if packing:
        owner = getattr(module, family.model)
        _hear_positions(patched, calls, owner, owner.forward, module.__name__)


def _patch_layers(patched: Patch, calls: Calls, target: object, packing: bool) -> None:
    """Up to 5.14: attributes of one model's layers, which hand no boundaries on."""
    family = calls.family
    if not isinstance(target, nn.Module):
        raise ValueError(
            f"patch: target must be a model with transformers {patched.report.version}, whose layers keep the "
            f"functions themselves, got {target!r}"
        )
    layers = list(layers_of(target, family))
    if not layers:
        raise _unknown(patched, f"no layer of {type(target).__name__} keeps {ON_LAYERS['chunk']}")
    for path, layer in layers:
        for purpose, name in ON_LAYERS.items():
            if name in vars(layer):
                stock = vars(layer)[name]
                told = Replaced(family.name, path, name, calls.by(purpose))
                patched._rebind(layer, name, calls.replacing(purpose, stock), told)
    if packing:
        for path, part in target.named_modules():
            if type(part).__name__ == family.model:
                _hear_positions(patched, calls, part, part.forward, path or type(part).__name__)


def _unknown(patched: Patch, what: str) -> UnsupportedError:
    reason = f"{what}; known are 4.57 to 5.23"
    return UnsupportedError("patch: this version cannot be patched", {f"transformers {patched.report.version}": reason})


def _hear_positions(patched: Patch, calls: Calls, owner: Any, stock: Callable[..., Any], where: str) -> None:
    """Let `forward` of a text model, of its class or of one instance, settle the boundaries before it begins."""
    op = f"patch({calls.family.name})"
    names = [p.name for p in inspect.signature(stock).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    bound = isinstance(owner, nn.Module)

    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        model, given = (owner, args) if bound else (args[0], args[1:])
        call = settled(op, {**dict(zip(names if bound else names[1:], given)), **kwargs})
        if call.get("cu_seq_lens_q") is not None and not calls.family.separable:
            raise ValueError(
                f"{op}: documents must come in rows of their own, got several in one; the attention of this type picks "
                "its tokens from the whole row"
            )
        if not bound:
            return stock(model, **call)
        if call.get("cu_seq_lens_q") is not None:
            _refuse_unheard(op, model, calls.family)
        calls.boundaries.current = call.get("cu_seq_lens_q")
        try:
            return stock(**call)
        finally:
            calls.boundaries.current = None

    place = where if bound else f"{where}.{owner.__name__}"
    told = Replaced(calls.family.name, place, "forward", "boundaries for all layers")
    patched._rebind(owner, "forward", forward, told)


def _refuse_unheard(op: str, model: nn.Module, family: Family) -> None:
    """Layers of old versions learn of boundaries while the model runs, and through the functions that were replaced."""
    if model.training and any(getattr(part, "gradient_checkpointing", False) for part in model.modules()):
        raise ValueError(
            f"{op}: gradient checkpointing must be off for packed documents with transformers before 5.15, got it on"
        )
    for path, layer in layers_of(model, family):
        if ON_LAYERS["conv"] not in vars(layer):
            raise ValueError(
                f"{op}: packed documents need transformers 5.15 or later; the convolution of {path} knows no boundaries"
            )


def _patch_norm(patched: Patch, calls: Calls) -> None:
    family = calls.family
    owner = getattr(family.module, family.norm)
    told = Replaced(family.name, f"{family.module_name}.{family.norm}", "forward", "wyfold.rms_norm_gated")
    patched._rebind(owner, "forward", functools.wraps(owner.forward)(calls.norm(owner.forward)), told)
