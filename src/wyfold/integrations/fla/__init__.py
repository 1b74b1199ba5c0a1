"""fla's names for Wyfold's operators: switching a script takes one import.

    from wyfold.integrations.fla import chunk_gated_delta_rule     # was: from fla.ops.gated_delta_rule import ...

Names, argument order, keywords and defaults are those of fla-core 0.6.0; docs/migration.md lists the differences. For
code that imports `fla` itself, `install()` adds a stand-in module of that name to `sys.modules`.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from types import ModuleType

from wyfold.integrations.fla.modules import FusedRMSNormGated, L2Norm, ShortConvolution
from wyfold.integrations.fla.pieces import (
    causal_conv1d,
    chunk_scaled_dot_kkt_fwd,
    fused_gdn_gate,
    fused_kda_gate,
    l2norm,
    rms_norm_gated,
    solve_tril,
)
from wyfold.integrations.fla.recurrences import (
    chunk_delta_rule,
    chunk_gated_delta_rule,
    chunk_gdn,
    chunk_kda,
    chunk_ttt_linear,
    fused_chunk_ttt_linear,
    fused_recurrent_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
    fused_recurrent_kda,
)
from wyfold.runtime import check

__all__ = [
    "FusedRMSNormGated",
    "L2Norm",
    "ShortConvolution",
    "StandIn",
    "causal_conv1d",
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_kda",
    "chunk_scaled_dot_kkt_fwd",
    "chunk_ttt_linear",
    "fused_chunk_ttt_linear",
    "fused_gdn_gate",
    "fused_kda_gate",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_kda",
    "install",
    "l2norm",
    "rms_norm_gated",
    "solve_tril",
    "uninstall",
]

VERSION = "0.6.0"
"""Version of fla-core whose names these are."""

_Names = dict[str, object]

_DELTA: _Names = {"chunk_delta_rule": chunk_delta_rule, "fused_recurrent_delta_rule": fused_recurrent_delta_rule}
_GDN: _Names = {
    "chunk_gated_delta_rule": chunk_gated_delta_rule,
    "chunk_gdn": chunk_gdn,
    "fused_recurrent_gated_delta_rule": fused_recurrent_gated_delta_rule,
    "fused_recurrent_gdn": fused_recurrent_gdn,
}
_KDA: _Names = {"chunk_kda": chunk_kda, "fused_recurrent_kda": fused_recurrent_kda}
_TTT: _Names = {"chunk_ttt_linear": chunk_ttt_linear, "fused_chunk_ttt_linear": fused_chunk_ttt_linear}
_CONV: _Names = {"ShortConvolution": ShortConvolution, "causal_conv1d": causal_conv1d}
_NORM: _Names = {"FusedRMSNormGated": FusedRMSNormGated, "rms_norm_gated": rms_norm_gated}
_L2: _Names = {"L2Norm": L2Norm, "l2norm": l2norm}

MODULES: dict[str, _Names] = {
    "fla": {},
    "fla.ops": {**_DELTA, **_GDN, **_KDA},
    "fla.ops.delta_rule": _DELTA,
    "fla.ops.delta_rule.chunk": _DELTA,
    "fla.ops.delta_rule.fused_recurrent": _DELTA,
    "fla.ops.gated_delta_rule": _GDN,
    "fla.ops.gated_delta_rule.chunk": _GDN,
    "fla.ops.gated_delta_rule.fused_recurrent": _GDN,
    "fla.ops.gated_delta_rule.gate": {"fused_gdn_gate": fused_gdn_gate},
    "fla.ops.kda": _KDA,
    "fla.ops.kda.chunk": _KDA,
    "fla.ops.kda.fused_recurrent": _KDA,
    "fla.ops.kda.gate": {"fused_kda_gate": fused_kda_gate},
    "fla.ops.ttt": _TTT,
    "fla.ops.ttt.chunk": _TTT,
    "fla.ops.ttt.fused_chunk": _TTT,
    "fla.ops.utils": {"solve_tril": solve_tril},
    "fla.ops.utils.solve_tril": {"solve_tril": solve_tril},
    "fla.ops.common": {},
    "fla.ops.common.chunk_scaled_dot_kkt": {"chunk_scaled_dot_kkt_fwd": chunk_scaled_dot_kkt_fwd},
    "fla.modules": {
        "FusedRMSNormGated": FusedRMSNormGated,
        "L2Norm": L2Norm,
        "ShortConvolution": ShortConvolution,
    },
    "fla.modules.causal_conv1d": _CONV,
    "fla.modules.conv": _CONV,
    "fla.modules.convolution": _CONV,
    "fla.modules.fused_norm_gate": _NORM,
    "fla.modules.l2norm": _L2,
    "fla.modules.norm": {"FusedRMSNormGated": FusedRMSNormGated, "L2Norm": L2Norm},
}
"""Modules of the stand-in, parents first, and their names, including fla's old paths. Other names: ImportError."""


class StandIn:
    """Installed stand-in for `fla`; as a context manager it uninstalls itself at the end.

    Attributes:
        modules: Names in `sys.modules` that belong to the stand-in.
    """

    def __init__(self) -> None:
        self._real = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "fla"}
        made = {name: _made(name, names) for name, names in MODULES.items()}
        for name, module in made.items():
            parent, _, child = name.rpartition(".")
            if parent:
                vars(made[parent]).setdefault(child, module)  # a function of that name takes precedence, as in fla
        for name in self._real:
            del sys.modules[name]
        sys.modules.update(made)
        self.modules = tuple(made)

    def uninstall(self) -> None:
        """Remove the stand-in and restore the modules it shadowed; a second call has no effect."""
        global _standing
        if _standing is not self:
            return
        for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
            del sys.modules[name]
        sys.modules.update(self._real)
        _standing = None

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *error: object) -> None:
        self.uninstall()


_standing: StandIn | None = None


def install(force: bool = False) -> StandIn:
    """Make `import fla` import Wyfold's stand-in.

    Code imported earlier keeps the functions it has.

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


def _made(name: str, names: _Names) -> ModuleType:
    """A module with the given names, and no submodules on disk."""
    module = ModuleType(name, f"{name}, as far as Wyfold stands in for it (wyfold.integrations.fla).")
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
    module.__path__ = []
    module.__package__ = name
    vars(module).update(names, __all__=list(names), __version__=f"{VERSION}+wyfold")
    return module
