"""Comparison of a checkpoint's safetensors headers with its configuration. Imports no torch.

Each function returns the first fault as the end of a sentence about the file, or an empty string.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from wyfold.cli.train.schema import Model, shortened
from wyfold.runtime import files
from wyfold.runtime.files import CONFIG_FILE, WEIGHTS_FILE, TensorInfo

MODEL, TENSORS, RECORD, SHARDS, SUMS = "model", "training.safetensors", "training.json", "shards", "SHA256SUMS"
CONFIG, WEIGHTS = f"{MODEL}/{CONFIG_FILE}", f"{MODEL}/{WEIGHTS_FILE}"
RANDOM = "random_state"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")

MARKS = {
    "rwkv7": "r_k",
    "ttt_linear": "token_step",
    "path_attention": "bt_proj.weight",
    "gla": "decay_up.bias",
    "gated_delta_net2": "erase.weight",
    "kda": "decay_down.weight",
    "gated_delta_net": "decay.weight",
    "gated_delta_product": "gate.weight",
    "delta_net": "beta.weight",
}
"""Mixer -> a parameter that no later mixer of this table has. Softmax attention has none of them."""

Infos = Mapping[str, TensorInfo]
"""Header of a file: tensor -> shape and dtype."""


def recipe_fault(recipe: Mapping[str, Any], model: Model) -> str:
    """Compare the configuration with the recipe in the checkpoint's record."""
    for setting, field in (
        ("layers", "pattern"),
        ("depth", "num_layers"),
        ("width", "hidden_size"),
        ("heads", "num_heads"),
        ("head_dim", "head_dim"),
    ):
        held, wanted = getattr(model, field), recipe[setting]
        if held != wanted:
            return f"{field} is {shortened(held)}, the recipe in {RECORD} has {shortened(wanted)}"
    return ""


def weights_fault(model: Model, period: Sequence[str], infos: Infos) -> str:
    """Compare weights and configuration as far as that needs no model; `Decoder.load` compares the rest.

    Args:
        model: Configuration.
        period: Layers of its pattern.
        infos: Header of the weights.
    """
    blocks = {name.split(".")[1] for name in infos if name.startswith("blocks.")}
    if blocks != {str(number) for number in range(len(blocks))} or len(blocks) != model.num_layers:
        return f"it has {len(blocks)} layers, {CONFIG_FILE} beside it {model.num_layers}"
    for number in range(model.num_layers):
        named, mixer = period[number % len(period)], mixer_of(infos, f"blocks.{number}.mixer.")
        if named != mixer:
            return f"layer {number} is {mixer}, {CONFIG_FILE} beside it has {named}"
    expected = {"embedding.weight": (model.vocab_size, model.hidden_size), "norm.weight": (model.hidden_size,)}
    if not model.tied:
        expected["head.weight"] = expected["embedding.weight"]
    for name, shape in expected.items():
        found = infos.get(name)
        if found is None or found.shape != shape:
            held = "none" if found is None else list(found.shape)
            return f"{name} must be {list(shape)} as in {CONFIG_FILE}, got {held}"
    wrong = next(((name, info.dtype) for name, info in infos.items() if info.dtype not in files.FLOATING), None)
    return "" if wrong is None else f"{wrong[0]} must be in floating point, got {wrong[1]}"


def mixer_of(names: Collection[str], prefix: str) -> str:
    """Name of the mixer whose parameter names start with `prefix`, by `MARKS`."""
    return next((mixer for mixer, name in MARKS.items() if prefix + name in names), "attention")


def shards_fault(model: Model, headers: Sequence[Infos]) -> str:
    """Compare the total sizes of all shards with the configuration. The reader of shards checks each shard."""
    held: Counter[str] = Counter()
    for infos in headers:
        held.update({name: math.prod(info.shape) for name, info in infos.items()})
    if not held:
        return ""  # an earlier format, which the reader of shards refuses
    blocks = {name.split(".")[1] for name in held if name.startswith("blocks.")}
    if len(blocks) != model.num_layers:
        return f"its files have {len(blocks)} layers, {CONFIG} {model.num_layers}"
    numbers = model.vocab_size * model.hidden_size
    if held["embedding.weight"] != numbers:
        return f"embedding.weight must have {numbers} numbers as in {CONFIG}, got {held['embedding.weight']}"
    return ""


def moments_fault(weights: Infos, tensors: Infos, *, begun: bool) -> str:
    """Require exactly the optimizer moments of the parameters; none before the first step."""
    for name, info in tensors.items():
        parameter, _, moment = name.rpartition("/")
        if name == RANDOM:
            fits = info.dtype == "U8" and len(info.shape) == 1
        else:
            weight = weights.get(parameter)
            shape = () if moment == "step" else weight and weight.shape
            named = weight is not None and moment in MOMENTS
            fits = named and info.shape == shape and info.dtype in files.FLOATING
        if not fits:
            return f"{name} {list(info.shape)} belongs to no parameter in {WEIGHTS}"
    wanted = [RANDOM, *(f"{name}/{moment}" for name in weights for moment in MOMENTS if begun)]
    missing = next((name for name in wanted if name not in tensors), None)
    return f"it has no {missing}" if missing else ""
