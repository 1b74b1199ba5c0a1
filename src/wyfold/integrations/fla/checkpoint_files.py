"""A folder that fla's `save_pretrained` wrote: a configuration, and tensors in one safetensors file or several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from wyfold.runtime import files

INDEX_FILE = "model.safetensors.index.json"
LARGEST_INDEX = 2**26
"""Most bytes of an index, which names every tensor."""


def read_config(folder: Path) -> dict[str, Any]:
    """Fields of config.json.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is no JSON object.
    """
    file = folder / files.CONFIG_FILE
    if not file.is_file():
        raise FileNotFoundError(f"from_fla: {file} is missing; give a folder that fla's save_pretrained wrote")
    return _json(file)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Tensors of a checkpoint in one file or several.

    Raises:
        FileNotFoundError: There is no safetensors file.
        ValueError: A file is damaged.
    """
    names = [files.WEIGHTS_FILE]
    if not (folder / files.WEIGHTS_FILE).is_file():
        index = folder / INDEX_FILE
        if not index.is_file():
            raise FileNotFoundError(
                f"from_fla: {folder} must hold {files.WEIGHTS_FILE} or {INDEX_FILE}, got neither; pickled weights are "
                "not read: load them with fla and save_pretrained(safe_serialization=True)"
            )
        held = _json(index, LARGEST_INDEX).get("weight_map")
        if not isinstance(held, dict) or not all(isinstance(name, str) for name in held.values()):
            raise ValueError(f"from_fla: {index} must map tensors to files in weight_map, got {type(held).__name__}")
        names = sorted(set(held.values()))
    weights: dict[str, Tensor] = {}
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"from_fla: {INDEX_FILE} must name files beside it, got {name!r}")
        weights |= _read_file(folder / name)
    return weights


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise ImportError("from_fla: folders need safetensors: pip install safetensors", name=error.name) from error
    if not file.is_file():
        raise FileNotFoundError(f"from_fla: {file} is missing")
    try:
        found: dict[str, Tensor] = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"from_fla: {file} cannot be read ({error})") from error
    return found


def _json(file: Path, most: int = files.LARGEST_CONFIG) -> dict[str, Any]:
    try:
        found = json.loads(files.read_bytes(file, most).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"from_fla: {file} must be a JSON object, got none ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"from_fla: {file} must be a JSON object, got {type(found).__name__}")
    return found
