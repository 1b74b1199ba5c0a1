"""Integrations with other libraries.

`transformers` patches its models, `fla` offers its names and keywords, `vllm` and `sglang` are plug-ins of serving
engines, `megatron` and `torchtitan` have layers for the configurations of these trainers, `dtensor` adds tensor
parallelism, and `flops` registers FLOP formulas. The rest of the library imports none of these, and importing one
imports no other package.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

__all__ = ["dtensor", "fla", "flops", "megatron", "sglang", "torchtitan", "transformers", "vllm"]

if TYPE_CHECKING:
    from wyfold.integrations import dtensor, fla, flops, megatron, sglang, torchtitan, transformers, vllm
else:

    def __getattr__(name: str) -> ModuleType:
        """Import a submodule on first use, so that `import wyfold` suffices to reach it."""
        if name not in __all__:
            raise AttributeError(f"module 'wyfold.integrations' has no attribute {name!r}", name=name)
        return importlib.import_module(f"wyfold.integrations.{name}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
