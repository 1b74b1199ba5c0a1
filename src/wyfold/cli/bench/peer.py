"""Records of another library that `bench` compares with: its functions, and where they run."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Loaded:
    """A library's function, imported.

    Attributes:
        ran: Full name of the function.
        call: Maps Wyfold's keyword arguments, extended by `prepare`, to the output.
        prepare: Makes further arguments, once, outside the timed region.
    """

    ran: str
    call: Callable[[Arguments], Tensor]
    prepare: Callable[[Arguments], Arguments] = lambda arguments: {}


@dataclass(frozen=True)
class Adapter:
    """One way to call an operator of a library.

    Attributes:
        load: Imports the function.
        variant: Name of this variant, if the library has several for the operator; else empty.
        backward: Whether it is differentiable.
        tuned: Whether Triton chooses its launch sizes in the first calls, at any length among the same ones.
    """

    load: Callable[[], Loaded]
    variant: str = ""
    backward: bool = True
    tuned: bool = False


@dataclass(frozen=True)
class Peer:
    """A library to compare with.

    Attributes:
        name: Name in `--peers`.
        module: Module to import.
        install: Command that installs it.
        adapters: Public operator of Wyfold -> adapters of the library.
        device: Type of device the library runs on.
        packages: Packages whose versions are recorded with a result.
        make_cp_context: (boundaries, process group) -> the library's `cp_context`; None without context parallelism.
    """

    name: str
    module: str
    install: str
    adapters: Mapping[str, tuple[Adapter, ...]]
    device: str = "cuda"
    packages: tuple[str, ...] = ()
    make_cp_context: Callable[[Tensor, Any], Any] | None = None

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None

    @property
    def variants(self) -> list[str]:
        """Variants of all operators, the values that `with_variant` accepts."""
        found = (adapter.variant for adapters in self.adapters.values() for adapter in adapters)
        return list(dict.fromkeys(variant for variant in found if variant))

    def with_variant(self, variant: str) -> Peer:
        """The peer restricted to one variant of each operator; unrestricted if `variant` is empty."""
        if not variant:
            return self
        kept = {op: tuple(a for a in adapters if a.variant in ("", variant)) for op, adapters in self.adapters.items()}
        return replace(self, adapters=kept)

    @property
    def versions(self) -> dict[str, str]:
        """Installed package -> version."""
        found = {}
        for package in self.packages:
            try:
                found[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        return found
