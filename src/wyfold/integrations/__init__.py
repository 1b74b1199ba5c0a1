"""Wyfold under other people's names: `transformers` (patches of its models), `fla` (its operators' names and keywords).

Nothing here is imported by the rest of the library, and importing one of these modules imports no other package.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

__all__ = ["dtensor", "fla", "flops", "transformers"]

if TYPE_CHECKING:
    from wyfold.integrations import dtensor, fla, flops, transformers
else:

    def __getattr__(name: str) -> ModuleType:
        """Import the module of that name when it is first used, so that `import wyfold` makes all of them reachable."""
        if name not in __all__:
            raise AttributeError(f"module 'wyfold.integrations' has no attribute {name!r}", name=name)
        return importlib.import_module(f"wyfold.integrations.{name}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
