"""Hook of MkDocs: a fenced block named `math` becomes MathML, which browsers set without a script.

GitHub sets the same blocks. Several lines are an `align*` environment.
"""

from __future__ import annotations

from typing import Any

from latex2mathml.converter import convert


def on_config(config: Any) -> Any:
    """Add the block to those of pymdownx.superfences."""
    fences = config["mdx_configs"].setdefault("pymdownx.superfences", {})
    fences["custom_fences"] = [{"name": "math", "class": "math", "format": formula}]
    return config


def formula(source: str, *_: Any, **__: Any) -> str:
    """HTML of one block."""
    return f'<div class="math">{convert(source, display="block")}</div>'
