"""Optional packages, the extras of pyproject.toml that bring them, and the commands that install them."""

_COMMAND_LINE = ("filelock", "matplotlib", "msgspec", "numpy", "rich", "safetensors")

EXTRAS = {
    "cli": _COMMAND_LINE,
    "report": (*_COMMAND_LINE, "plotly"),
    "bench": (*_COMMAND_LINE, "transformers"),
    "transformers": ("transformers",),
}
"""Extra -> the packages that it brings, which are imported under the same names."""


def install_command(extra: str) -> str:
    """How to install an extra of `EXTRAS`, whether or not a package index has Wyfold."""
    return f'pip install ".[{extra}]" in a clone of Wyfold, or pip install {" ".join(EXTRAS[extra])}'
