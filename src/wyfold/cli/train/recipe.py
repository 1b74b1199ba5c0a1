"""Recipe of a run, and the model and optimizer that it defines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict, fields

from wyfold.cli import UsageError
from wyfold.cli.train.schema import Settings, shortened
from wyfold.runtime.pattern import parse

if TYPE_CHECKING:  # refusing a run does not import torch
    import torch
    from torch import nn

    from wyfold.models import Decoder

BETAS = (0.9, 0.95)
CONV = 4
"""Length of the short convolution of gla layers, which is that of the other layers."""
DELTA_LAYERS = ("delta_net", "gated_delta_net", "kda", "gated_delta_net2", "gated_delta_product", "rwkv7")


class Recipe(Settings, frozen=True):
    """All settings that determine the numbers of a run. Two runs of one recipe on one machine are equal.

    Attributes are those of `Settings`.
    """

    def __post_init__(self) -> None:
        """Accept any layers: `build` refuses an invalid pattern that is an option."""

    def learning_rate(self, step: int, progress: float) -> float:
        """Learning rate after `step` steps: linear warm-up times a cosine over `progress` in [0, 1]."""
        warm = min(1.0, (step + 1) / max(1, self.warmup))
        cosine = (1 + math.cos(math.pi * min(1.0, progress))) / 2
        return self.lr * warm * (self.lr_end + (1 - self.lr_end) * cosine)

    def check_same(self, stored: dict[str, Any], folder: Path) -> None:
        """Raise UsageError if the stored recipe of a run differs from this one."""
        first, here = stored_recipe(stored), asdict(self)
        # `task` first and `data` last: another task changes other settings, and other options change the definition.
        for field in ("task", *(field for field in here if field not in ("task", "data"))):
            wanted, then = here[field], first[field]
            if json.dumps(then) == json.dumps(wanted):
                continue
            if field in ("steps", "minutes"):
                raise UsageError(
                    f"{_duration(here)} here, but the run in {folder} was started with {_duration(first)}: the length "
                    "of a run cannot be changed, also if it is finished, because the learning rate falls to its end. "
                    "Leave it out to resume an unfinished run, or give another --out for a longer or shorter one"
                )
            if field == "replicas":
                raise UsageError(
                    f"the processes and --cp here make {wanted} replicas, but the run in {folder} was started with "
                    f"{then}: start {then} times --cp processes to resume it, or give another --out"
                )
            raise UsageError(
                f"--{field.replace('_', '-')} is {shortened(wanted)} here, but the run in {folder} was started with "
                f"{shortened(then)}: leave it out or give the same value to resume it, or give another --out"
            )
        if first["data"] != self.data:
            other = "the text of --data" if self.task is None else f"the definition of {self.task}"
            same = "the text it was started with, or " if self.task is None else ""
            raise UsageError(f"{other} is not the one that the run in {folder} learns: give {same}another --out")


def _duration(recipe: Mapping[str, Any]) -> str:
    steps, minutes = recipe["steps"], recipe["minutes"]
    return f"--steps {steps}" if minutes is None else f"--minutes {minutes:g}"


def stored_recipe(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Complete a stored recipe: fields that its version did not have get their default."""
    found = {field.name: stored.get(field.name, field.default) for field in fields(Recipe)}
    return found | {"eval_lengths": tuple(found["eval_lengths"])}


@contextmanager
def stored_in(folder: Path | None) -> Iterator[None]:
    """Name the run's folder in a refusal of its stored recipe; with None, options are those of the command line."""
    try:
        yield
    except UsageError as error:
        if folder is None:
            raise
        raise UsageError(f"{folder}: the recipe of this run is refused: {error}; give another --out") from error


def build(recipe: Recipe, backend: str | None = None, vocabulary: int = 256) -> Decoder:
    """Build the untrained model of a recipe, for a vocabulary of that size."""
    from wyfold.models import Decoder, DecoderConfig

    options: dict[str, dict[str, Any]] = {"attention": {"window": recipe.window}}
    if recipe.neg_eigval:
        options |= {layer: {"allow_neg_eigval": True} for layer in DELTA_LAYERS}
    if recipe.kda_lower_bound is not None:
        options["kda"] = options.get("kda", {}) | {"lower_bound": recipe.kda_lower_bound}
    if recipe.gla_conv:
        options["gla"] = {"short_conv": CONV}
    try:
        if not recipe.neg_eigval and "gated_delta_product" in parse(recipe.layers):  # its default, the paper's, is True
            options["gated_delta_product"] = {"allow_neg_eigval": False}
        config = DecoderConfig(
            vocab_size=vocabulary,
            pattern=recipe.layers,
            num_layers=recipe.depth,
            hidden_size=recipe.width,
            num_heads=recipe.heads,
            head_dim=recipe.head_dim,
            options=options,
        )
    except ValueError as error:
        raise UsageError(f"no model can be built so: {error}") from error
    if recipe.neg_eigval and not set(DELTA_LAYERS) & set(config.layers):
        raise UsageError(f"--neg-eigval: there is no delta-rule layer in --layers {recipe.layers!r}")
    if recipe.kda_lower_bound is not None and "kda" not in config.layers:
        raise UsageError(f"--kda-lower-bound: there is no kda layer in --layers {recipe.layers!r}")
    if recipe.gla_conv and "gla" not in config.layers:
        raise UsageError(f"--gla-conv: there is no gla layer in --layers {recipe.layers!r}")
    return Decoder(config, backend=backend)


def optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW. Weight decay applies to the weights of linear layers, not to norms, biases or decay parameters."""
    import torch
    from torch import nn

    matrices = {module.weight for module in model.modules() if isinstance(module, nn.Linear)}
    others = [parameter for parameter in model.parameters() if parameter not in matrices]
    groups = [{"params": list(matrices), "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=BETAS, fused=True)
