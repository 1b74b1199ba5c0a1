"""A kernel repository for `use_kernels=True`: a folder with which transformers runs Wyfold without importing it.

    write_kernel_repository("wyfold-fla")
    model.set_use_kernels(True, KernelConfig(kernel_mapping("wyfold-fla", "qwen3_next"), use_local_kernel=True))

The folder has the layout and the layer names of the hub's `kernels-community/fla`. It contains imports only, so the
package wyfold has to be installed.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from wyfold.integrations.transformers.families import FAMILIES
from wyfold.runtime import check

VARIANT = "build/torch-universal"
"""Folder of a build without compiled code, which fits every torch and device."""

_RULES = {
    False: {
        "chunk_gated_delta_rule": "chunk_gated_delta_rule",
        "fused_recurrent_gated_delta_rule": "recurrent_gated_delta_rule",
    },
    True: {
        "chunk_kda": "chunk_kimi_delta_attention",
        "fused_recurrent_kda": "recurrent_kimi_delta_attention",
    },
}
_CONVOLUTIONS = {"causal_conv1d_fn": "causal_conv1d_fn", "causal_conv1d_update": "causal_conv1d_update"}
_NORM = {"RMSNormGated": "FusedRMSNormGated"}
LAYERS = {**_RULES[False], **_RULES[True], **_CONVOLUTIONS, **_NORM}
"""Name in transformers' kernel mapping -> layer of the repository."""

_FILES = {
    "README.md": """---
license: apache-2.0
tags: [kernels]
---

Layers of the package wyfold, which has to be installed, under the names of kernels-community/fla.
""",
    f"{VARIANT}/__init__.py": '''"""Wyfold's layers and operators under fla's names."""

from wyfold.integrations.fla import *  # noqa: F403

from . import layers  # noqa: F401
''',
    f"{VARIANT}/layers.py": '''"""Layers that the package kernels puts in place of transformers' functions."""

from wyfold.integrations.transformers.hub_layers import (  # noqa: F401
'''
    + "".join(f"    {layer},\n" for layer in sorted(LAYERS.values()))
    + ")\n",
    f"{VARIANT}/metadata.json": json.dumps(
        {
            "id": "wyfold_fla_1",
            "name": "wyfold-fla",
            "version": 1,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": "cuda"},
        },
        indent=2,
    )
    + "\n",
}
"""Path in the repository -> contents."""


def write_kernel_repository(folder: str | os.PathLike[str]) -> Path:
    """Write a kernel repository in the layout of the hub.

    Args:
        folder: Path of a folder that does not exist, or is empty.

    Returns:
        The absolute path of the folder.

    Raises:
        FileExistsError: folder is a file, or has contents.

    Examples:
        >>> import tempfile
        >>> repository = write_kernel_repository(tempfile.mkdtemp())
        >>> sorted(path.name for path in repository.glob("build/*/*"))
        ['__init__.py', 'layers.py', 'metadata.json']
    """
    place = Path(folder).absolute()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise FileExistsError(f"write_kernel_repository: folder must be new or empty, got {place}")
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as temporary:
        whole = Path(temporary) / place.name
        for name, contents in _FILES.items():
            (whole / name).parent.mkdir(parents=True, exist_ok=True)
            (whole / name).write_text(contents, encoding="utf-8")
        whole.rename(place)
    return place


def kernel_mapping(folder: str | os.PathLike[str], family: str, *, norm: bool = False) -> dict[str, str]:
    """Mapping for transformers' `KernelConfig`, from the names that a model type uses to layers of the repository.

    Args:
        folder: A repository of `write_kernel_repository`.
        family: Name of a model type, as in `patch`.
        norm: Also map the gated norm.

    Returns:
        Name in transformers -> "folder:layer", to be used with `use_local_kernel=True`.

    Raises:
        ValueError: folder is no such repository, its path has a colon, or the model type is unknown.
    """
    check.flag("kernel_mapping", norm=norm)
    check.choice("kernel_mapping", "family", family, tuple(FAMILIES))
    place = Path(folder).absolute()
    if not (place / VARIANT / "metadata.json").is_file():
        raise ValueError(f"kernel_mapping: folder must be a kernel repository with {VARIANT}, got {place}")
    if ":" in str(place):
        raise ValueError(f"kernel_mapping: folder must have a path without colon, got {place}")
    layers = {**_RULES[FAMILIES[family].channel], **_CONVOLUTIONS, **(_NORM if norm else {})}
    return {name: f"{place}:{layer}" for name, layer in layers.items()}
