"""Schemas of the JSON files of runs: types, ranges, no unknown fields. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from wyfold.runtime import pattern

MOST = 2**63 - 1

Count = Annotated[int, Meta(ge=0, le=MOST)]
Positive = Annotated[int, Meta(ge=1, le=MOST)]
Rate = Annotated[float, Meta(ge=0)]
"""Finite: JSON has no NaN or infinity, and msgspec refuses numbers that round to infinity."""
PositiveRate = Annotated[float, Meta(gt=0)]
Part = Annotated[float, Meta(ge=0, le=1)]
Text = Annotated[str, Meta(max_length=4096)]


class Model(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """`config.json`: the fields and defaults of `DecoderConfig`, which checks their combination.

    Fields without a default change results without changing the name or shape of a tensor.
    """

    vocab_size: Positive = 256
    hidden_size: Positive = 256
    num_layers: Positive = 4
    pattern: Text = "gdn*3 attention"
    num_heads: Positive = 4
    num_v_heads: Positive | None = None
    head_dim: Positive
    head_v_dim: Positive | None = None
    conv_size: Positive = 4
    mlp_size: Positive | None = None
    tied: bool = True
    norm_eps: Part
    options: dict[str, dict[str, bool | int | float | str | None]]


class Settings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Fields of a recipe, `wyfold.cli.train.recipe.Recipe`. Those that older versions did not write have a default.

    Attributes:
        data: `Corpus.digest` of the text, or the definition of the task.
        layers: Pattern of the layers, repeated to `depth`.
        depth: Number of layers.
        width: Channels of the model.
        heads, head_dim: Heads of every mixer, channels of a head.
        window: Positions that attention looks back.
        packed: Whether documents are kept separate (`PackedBatches`) or form one text (`WindowBatches`).
        batch, length, grad_accum: Rows of a batch, tokens of a row, batches of a step.
        steps, minutes: One of them is None. With minutes the schedule follows the clock, and no two runs are equal.
        lr, warmup, lr_end: Peak learning rate, steps to reach it, and the fraction of it at the end of the cosine.
        weight_decay: Weight decay of the matrices.
        clip: Largest gradient norm.
        held_out: Fraction of the text kept for validation.
        eval_every, eval_bytes: Steps between evaluations, bytes or tokens of an evaluation.
        seed: Seed of the initial parameters and of the batches.
        dtype: "float32", or "bfloat16" for autocast.
        replicas: Number of replicas of the model. A step takes one set of batches per replica.
        task: Known task to learn instead of a text, or None.
        pairs, vocabulary: Free parameters of the task; 0 if its definition does not have them.
        neg_eigval: Whether delta-rule layers may have negative eigenvalues (beta in [0, 2]).
        stop_at: Accuracy on held-out rows at which the run of a task ends early; None to take all steps.
        curriculum: Steps in which the rows of mqar grow from an eighth of their length (`synthetic.Curriculum`).
        eval_lengths: Further lengths of row for the final evaluation of a task.
        kda_lower_bound: Lower bound of the log decays of kda layers; None for the gate without a bound.
        gla_conv: Whether gla layers have a short convolution.
    """

    data: Text
    layers: Text
    depth: Positive
    width: Positive
    heads: Positive
    head_dim: Positive
    window: Positive
    packed: bool
    batch: Positive
    length: Positive
    grad_accum: Positive
    steps: Positive | None
    minutes: PositiveRate | None
    lr: PositiveRate
    warmup: Count
    lr_end: Rate
    weight_decay: Rate
    clip: PositiveRate
    held_out: Part
    eval_every: Positive
    eval_bytes: Positive
    seed: Annotated[int, Meta(ge=0)]
    dtype: Literal["float32", "bfloat16"]
    replicas: Positive = 1
    task: Literal["mqar", "s_niah", "parity", "s5"] | None = None
    pairs: Count = 0
    vocabulary: Count = 0
    neg_eigval: bool = False
    stop_at: Part | None = None
    curriculum: Count = 0
    eval_lengths: tuple[Positive, ...] = ()
    kda_lower_bound: Annotated[float, Meta(ge=-5, lt=0)] | None = None
    gla_conv: bool = False

    def __post_init__(self) -> None:
        """Refuse an invalid layer pattern in a file, which would otherwise be printed and built."""
        pattern.parse(self.layers)


class Entry(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Entry of a run's history: a step, or an evaluation. Fields may be missing, but not null."""

    step: Count
    loss: float | UnsetType = UNSET
    gradient_norm: Rate | UnsetType = UNSET
    lr: Rate | UnsetType = UNSET
    tokens_per_second: Count | UnsetType = UNSET
    mfu: Rate | UnsetType = UNSET
    validation_bits_per_byte: Rate | UnsetType = UNSET
    accuracy: Part | UnsetType = UNSET
    whole_rows: Part | UnsetType = UNSET
    accuracy_at: dict[Count, Part] | UnsetType = UNSET
    last: bool | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Refuse an entry that is neither a step nor an evaluation, or lacks a required field."""
        present = [name for name in REQUIRED if getattr(self, name) is not UNSET]
        if len(present) != 1:
            raise ValueError(f"an entry must have one of {', '.join(REQUIRED)}, got {' and '.join(present) or 'none'}")
        missing = [name for name in REQUIRED[present[0]] if getattr(self, name) is UNSET]
        if missing:
            raise ValueError(f"an entry with {present[0]} must have {', '.join(missing)}")


REQUIRED: dict[str, tuple[str, ...]] = {
    "loss": ("gradient_norm", "lr", "tokens_per_second"),
    "validation_bits_per_byte": (),
    "accuracy": ("whole_rows",),
}
"""Field that determines the kind of an entry -> other required fields of that kind."""


class TrainingRecord(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`training.json` of a checkpoint."""

    recipe: Settings
    cursor: Count
    elapsed: Rate
    history: list[Entry]
    torch: Text
    step: Count
    files: dict[str, Count] | UnsetType = UNSET

    def fault(self) -> str:
        """Describe the first contradiction between fields; empty if there is none."""
        recipe = self.recipe
        if (recipe.steps is None) == (recipe.minutes is None):
            return "its recipe must have either steps or minutes"
        if recipe.seed >= 2**64:
            return "its recipe's seed has more than 64 bits"
        if recipe.steps is not None and self.step > recipe.steps:
            return f"it is of step {self.step}, its recipe ends at {recipe.steps}"
        if self.cursor != self.step * recipe.grad_accum:
            return f"cursor {self.cursor} is not step {self.step} times grad_accum {recipe.grad_accum}"
        return history_fault(self.history, self.step)


def shortened(value: object) -> str:
    """`repr` of a value for a message, truncated to 80 characters."""
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def history_fault(history: list[Entry], last: int | None = None) -> str:
    """Describe the first entry that is out of order; empty if every step is recorded once, in order.

    Args:
        history: Entries of a run.
        last: Number of the last step; None if unknown.
    """
    step = before = 0
    for number, entry in enumerate(history, 1):
        trained = entry.loss is not UNSET
        if entry.step < before or (last is not None and entry.step > last) or (trained and entry.step != step + 1):
            return f"entry {number} of the history is of step {entry.step}, out of order"
        before, step = entry.step, step + trained
    if last is not None and step != last:
        return f"the history ends at step {step}, the checkpoint is of step {last}"
    return ""
