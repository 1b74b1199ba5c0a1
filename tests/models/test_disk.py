"""Saving and loading a decoder."""

import dataclasses
import re
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from wyfold.models import Decoder, DecoderConfig


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_model_gives_the_same_bits(config, ids, dtype, tmp_path):
    model = Decoder(config).to(dtype)
    model.blocks[0].mixer.decay_parameters.float()
    model.save(tmp_path / "run" / "model")
    again = Decoder.load(tmp_path / "run" / "model")
    assert again.config == config
    assert [(n, p.dtype, p.requires_grad) for n, p in again.named_parameters()] == [
        (n, p.dtype, p.requires_grad) for n, p in model.named_parameters()
    ]
    assert torch.equal(again(ids)[0], model(ids)[0])
    assert sorted(path.name for path in (tmp_path / "run" / "model").iterdir()) == ["config.json", "model.safetensors"]


def test_names_on_disk_are_stable():
    names = set(Decoder(DecoderConfig(num_layers=1, pattern="attention", tied=False)).state_dict())
    assert names == {
        "embedding.weight",
        "blocks.0.mixer_norm.weight",
        "blocks.0.mixer.qkv.weight",
        "blocks.0.mixer.out.weight",
        "blocks.0.mlp_norm.weight",
        "blocks.0.mlp.up.weight",
        "blocks.0.mlp.out.weight",
        "norm.weight",
        "head.weight",
    }


def test_loading_errors_name_the_file(config, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        Decoder.load(tmp_path)
    Decoder(config).save(tmp_path)
    (tmp_path / "config.json").write_text(dataclasses.replace(config, num_layers=3).to_json())
    with pytest.raises(ValueError, match=r"^Decoder.load: .*model.safetensors must hold .*, 3 layers, got 5; "):
        Decoder.load(tmp_path)


def test_a_folder_that_is_no_path_is_named(config):
    with pytest.raises(TypeError, match=r"^Decoder.load: folder must be a str or a path, got int$"):
        Decoder.load(3)
    with pytest.raises(TypeError, match=r"^Decoder.save: folder must be a str or a path, got NoneType$"):
        Decoder(config).save(None)


def test_a_tensor_of_another_shape_is_named(config, tmp_path):
    """Before the model is built, also where names and the sizes of the configuration agree."""
    Decoder(config).save(tmp_path)
    file, name = tmp_path / "model.safetensors", "blocks.1.mlp.out.weight"
    tensors = load_file(file)
    tensors[name] = tensors[name].mT.contiguous()
    save_file(tensors, file)
    got = re.escape(str(list(tensors[name].shape)))
    with pytest.raises(ValueError, match=rf"^Decoder.load: {file} must hold .*, {name} .*, got {got}; "):
        Decoder.load(tmp_path)


def test_without_safetensors_the_package_is_named(config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for action in (lambda: Decoder(config).save(tmp_path), lambda: Decoder.load(tmp_path)):
        with pytest.raises(ImportError, match=r"need safetensors: pip install safetensors$"):
            action()
    assert list(tmp_path.iterdir()) == []
