"""What decides the numbers of a run: its recipe, and the model and optimizer that follow from it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wyfold.cli import UsageError
from wyfold.cli.schema import shortened

if TYPE_CHECKING:  # a run that is refused does not wait for torch
    import torch
    from torch import nn

    from wyfold.models import Decoder

BETAS = (0.9, 0.95)
DELTA_LAYERS = ("delta_net", "gated_delta_net", "kda")


@dataclass(frozen=True)
class Recipe:
    """What decides the numbers of a run; two runs of one recipe on one machine are equal.

    Args:
        layers, depth, width, heads, head_dim, window: of the model; `layers` is repeated to `depth`.
        packed: documents stay apart (`Packs`), or are one text (`Windows`).
        batch, length, grad_accum: rows, bytes of a row, and batches of one step.
        steps, minutes: one of them is None; with minutes the schedule follows the clock and no two runs are equal.
        lr, warmup, lr_end: peak, steps to reach it, and the part of it that the cosine ends on.
        weight_decay, clip: of the matrices; largest gradient norm.
        held_out, eval_every, eval_bytes: part kept for validation, steps between two looks at it, bytes of a look.
        seed: of the model's first parameters and of the batches.
        dtype: "float32", or "bfloat16" for autocast.
        data: `Corpus.digest` of the text, or the definition of the task.
        replicas: Of the model, each with batches of its own: a step takes those of all.
        task, pairs, vocabulary: a known task in the place of text, and what its definition leaves open.
        neg_eigval: whether delta-rule layers may turn their state over (beta in [0, 2]).
        kda_lower_bound: what the log decays of kda layers stay above; None: the gate without a bound.
        stop_at: accuracy on held-out rows at which the run of a task is over before its last step.
        curriculum: steps in which the rows of mqar grow from an eighth of their length (`synthetic.Curriculum`).
        eval_lengths: further lengths of row a task's model is examined on, once, at the end.
    """

    data: str
    layers: str
    depth: int
    width: int
    heads: int
    head_dim: int
    window: int
    packed: bool
    batch: int
    length: int
    grad_accum: int
    steps: int | None
    minutes: float | None
    lr: float
    warmup: int
    lr_end: float
    weight_decay: float
    clip: float
    held_out: float
    eval_every: int
    eval_bytes: int
    seed: int
    dtype: str
    replicas: int = 1
    task: str | None = None
    pairs: int = 0
    vocabulary: int = 0
    neg_eigval: bool = False
    stop_at: float | None = None
    curriculum: int = 0
    eval_lengths: tuple[int, ...] = ()
    kda_lower_bound: float | None = None

    def learning_rate(self, step: int, progress: float) -> float:
        """Rate of the step after `step` steps: linear warm-up times a cosine over `progress` in [0, 1]."""
        warm = min(1.0, (step + 1) / max(1, self.warmup))
        cosine = (1 + math.cos(math.pi * min(1.0, progress))) / 2
        return self.lr * warm * (self.lr_end + (1 - self.lr_end) * cosine)

    def check_same(self, stored: dict[str, Any], folder: Path) -> None:
        """Refuse to continue a run that was started with another recipe."""
        first, here = begun(stored), dataclasses.asdict(self)
        # Another task has other settings, and other options make another definition: the cause is what is to be said.
        for field in ("task", *(field for field in here if field not in ("task", "data"))):
            wanted, then = here[field], first[field]
            if json.dumps(then) == json.dumps(wanted):
                continue
            if field == "steps" and None in (wanted, then):
                raise UsageError(
                    f"{_duration(here)} here, but the run in {folder} was started with {_duration(first)}: "
                    "leave it out to resume it, or give another --out"
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


def begun(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe that a run was started with, as its record has it; what was no option then has its first meaning."""
    found = {field.name: stored.get(field.name, field.default) for field in dataclasses.fields(Recipe)}
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
    """The untrained model of a recipe, for that many tokens."""
    from wyfold.models import Decoder, DecoderConfig

    options: dict[str, dict[str, Any]] = {"attention": {"window": recipe.window}}
    if recipe.neg_eigval:
        options |= {layer: {"allow_neg_eigval": True} for layer in DELTA_LAYERS}
    if recipe.kda_lower_bound is not None:
        options["kda"] = options.get("kda", {}) | {"lower_bound": recipe.kda_lower_bound}
    try:
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
    return Decoder(config, backend=backend)


def optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW; decay applies to the matrices that mix channels, not to norms, biases or the parameters of the decay."""
    import torch
    from torch import nn

    matrices = {module.weight for module in model.modules() if isinstance(module, nn.Linear)}
    others = [parameter for parameter in model.parameters() if parameter not in matrices]
    groups = [{"params": list(matrices), "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=BETAS, fused=True)
