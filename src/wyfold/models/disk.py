"""A decoder on disk: its configuration as JSON, its tensors as safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from wyfold.models.config import NOT_IN_SHAPES, DecoderConfig
from wyfold.runtime import files
from wyfold.runtime.files import CONFIG_FILE, WEIGHTS_FILE, TensorInfo

__all__ = ["CONFIG_FILE", "WEIGHTS_FILE", "loadable", "read", "read_header", "write", "write_tensors"]


def write(folder: Path, config: DecoderConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write both files, each atomically."""
    _safetensors()
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS_FILE, {name: x.detach().contiguous() for name, x in tensors.items()})
    files.write(folder / CONFIG_FILE, config.to_json())


def loadable(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Check that tensors to be saved are complete ordinary ones; return them under the names that `load` expects.

    Raises:
        ValueError: A tensor is missing, too many, of another shape, sharded or offloaded; the message names it.
    """
    found = {name.replace("_orig_mod.", ""): x for name, x in tensors.items()}  # compiled submodules add a prefix
    named = "Decoder.save: state_dict"
    for wrong, what in ((expected.keys() - found.keys(), "hold"), (found.keys() - expected.keys(), "not hold")):
        if wrong:
            raise ValueError(
                f"{named} must {what} {min(wrong)} ({len(wrong)} such names); modules that adapters or wrappers "
                "replaced have other names: merge or unwrap them, or pass state_dict= with the decoder's own"
            )
    for name, x in found.items():
        if x.shape != expected[name].shape:
            raise ValueError(f"{named} must hold {name} {list(expected[name].shape)}, got {list(x.shape)}")
        if type(x) not in (Tensor, Parameter) or x.device.type == "meta":
            kind = "one on the meta device" if x.device.type == "meta" else f"a {type(x).__name__}"
            raise ValueError(
                f"{named} must hold ordinary tensors, got {kind} for {name}; gather what is sharded or offloaded "
                "(torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True, "
                "wyfold.integrations.dtensor.whole, accelerate.utils.modeling.get_state_dict_offloaded_model) and "
                "pass it as state_dict= from one process"
            )
    return found


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file atomically.

    Raises:
        OSError: The file cannot be written, for example because the disk is full.
    """
    from safetensors import SafetensorError

    with files.replacing(file) as temporary:
        try:
            _safetensors().save_file(dict(tensors), temporary)
        except SafetensorError as error:
            raise files.os_error(error) from error


def read_header(folder: Path) -> tuple[DecoderConfig, dict[str, TensorInfo]]:
    """Read the configuration and the weights' header, and check that they agree in depth and width.

    Returns:
        Configuration, and tensor name -> dtype and shape.

    Raises:
        FileNotFoundError: One of the files is missing.
        ValueError: A file is damaged or the two disagree; the message names the file.
    """
    _safetensors()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).exists():
            inside = _newest_inside(folder)
            given = "a folder that Decoder.save wrote" if inside is None else f"the decoder inside: {inside}"
            raise FileNotFoundError(f"Decoder.load: {folder / name} is missing; give {given}")
    try:
        text = files.read_bytes(folder / CONFIG_FILE, files.LARGEST_CONFIG).decode("utf-8")
        config = DecoderConfig.from_json(text, required=NOT_IN_SHAPES)
    except (ValueError, TypeError) as error:  # invalid UTF-8 raises a ValueError too
        raise ValueError(f"Decoder.load: {folder / CONFIG_FILE} is damaged: {error}") from error
    try:
        infos = files.read_header(folder / WEIGHTS_FILE)
    except ValueError as error:
        raise ValueError(f"Decoder.load: {folder / WEIGHTS_FILE} is damaged: {error}") from error
    # Check before a model is built: its memory must follow from the tensors present, not from a number in a file.
    blocks = len({name.split(".")[1] for name in infos if name.startswith("blocks.")})
    embedding = infos.get("embedding.weight")
    if blocks != config.num_layers:
        raise _difference(folder, f"{config.num_layers} layers", blocks)
    if embedding is None or embedding.shape != (config.vocab_size, config.hidden_size):
        described = f"embedding.weight {[config.vocab_size, config.hidden_size]}"
        raise _difference(folder, described, embedding and list(embedding.shape))
    return config, infos


def _newest_inside(folder: Path) -> Path | None:
    """The newest decoder in a run of `wyfold train`, in its checkpoints, or in one checkpoint; None without one."""
    if (folder / "model" / CONFIG_FILE).exists() and (folder / "model" / WEIGHTS_FILE).exists():
        return folder / "model"
    steps = [path.parents[1] for below in ("", "checkpoint/") for path in folder.glob(f"{below}step-*/model/*.json")]
    numbered = {int(path.name[5:]): path / "model" for path in steps if path.name[5:].isdecimal()}
    found = [numbered[step] for step in sorted(numbered) if (numbered[step] / WEIGHTS_FILE).exists()]
    return found[-1] if found else None


def require_same(folder: Path, infos: Mapping[str, TensorInfo], expected: Mapping[str, Tensor]) -> None:
    """Check that the weights have the names, shapes and kinds of dtype of the configuration's model.

    Raises:
        ValueError: A tensor differs; the message names the first one.
    """
    for name, x in expected.items():
        found = infos.get(name)
        if found is None or found.shape != tuple(x.shape):
            raise _difference(folder, f"{name} {list(x.shape)}", found and list(found.shape))
        if found.dtype not in files.FLOATING:
            raise _difference(folder, f"{name} in floating point", found.dtype)
    for name in infos.keys() - expected.keys():
        raise _difference(folder, f"no {name}", list(infos[name].shape))


def read(folder: Path, device: torch.device | str) -> dict[str, Tensor]:
    """Read the tensors of the weights' file onto `device`.

    Raises:
        ValueError: The file cannot be read; the message names it.
    """
    from safetensors import SafetensorError

    try:
        found: dict[str, Tensor] = _safetensors().load_file(folder / WEIGHTS_FILE, device=str(device))
    except (SafetensorError, UnicodeEncodeError) as error:
        raise ValueError(f"Decoder.load: {folder / WEIGHTS_FILE} cannot be read ({error})") from error
    return found


def _difference(folder: Path, described: str, found: object) -> ValueError:
    held = "nothing of this name" if found is None else found
    return ValueError(
        f"Decoder.load: {folder / WEIGHTS_FILE} must hold what {CONFIG_FILE} beside it describes, {described}, "
        f"got {held}; one of the two files is damaged or of another model"
    )


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("Decoder.save and Decoder.load need safetensors: pip install safetensors") from error
    return safetensors.torch
