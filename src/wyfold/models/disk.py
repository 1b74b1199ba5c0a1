"""A decoder on disk: its configuration as JSON, its tensors as safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wyfold.models.config import DecoderConfig

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"


def write(folder: Path, config: DecoderConfig, tensors: Mapping[str, Tensor]) -> None:
    """Both files, each whole or not at all."""
    safetensors = _safetensors()
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{WEIGHTS_FILE}.part"
    safetensors.save_file({name: x.detach().contiguous() for name, x in tensors.items()}, unfinished)
    unfinished.replace(folder / WEIGHTS_FILE)
    unfinished = folder / f"{CONFIG_FILE}.part"
    unfinished.write_text(config.to_json(), encoding="utf-8")
    unfinished.replace(folder / CONFIG_FILE)


def read(folder: Path, device: torch.device | str) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """What `write` wrote, the tensors on `device`."""
    safetensors = _safetensors()
    config = DecoderConfig.from_json((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    return config, safetensors.load_file(folder / WEIGHTS_FILE, device=str(device))


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("Decoder.save and Decoder.load need safetensors: pip install 'wyfold[cli]'") from error
    return safetensors.torch
