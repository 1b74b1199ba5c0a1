"""Objectives of a run: text, measured in bits per byte, or a known task, measured by accuracy.

An objective has the batches of a run, evaluates the model, and formats and draws the results. The training loop does
not depend on the kind of objective.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from wyfold.cli import UsageError, out_of_memory
from wyfold.cli.train import curve, synthetic
from wyfold.cli.train.corpus import Batch, Corpus, PackedBatches, WindowBatches
from wyfold.cli.train.recipe import Recipe
from wyfold.cli.train.settings import CHOICES
from wyfold.models import IGNORED

if TYPE_CHECKING:
    from wyfold.cli.train.trainer import Trainer

History = curve.History


class Objective(Protocol):
    """Interface of an objective.

    Attributes:
        vocabulary: Number of tokens of the model.
        metric: Key of the main metric in the evaluation entries of the history.
        higher_is_better: Whether the metric grows as the model improves.
    """

    vocabulary: int
    metric: str
    higher_is_better: bool

    def at(self, index: int) -> Batch:
        """Batch number `index`, counted from the first of the run."""

    def probe_memory(self, run: Trainer) -> None:
        """Run the model once on the rows of the final evaluation that need more memory than training.

        Raises:
            UsageError: there is not enough memory.
        """

    def evaluate(self, run: Trainer, *, last: bool) -> dict[str, Any]:
        """Evaluate the model on held-out data. The last evaluation of a run has all metrics."""

    def describe_loss(self, loss: float) -> str:
        """Text for the loss of a step, which is in nats."""

    def describe_evaluation(self, entry: dict[str, Any]) -> str:
        """Text for an evaluation entry."""

    def draw(self, file: Path, history: History, title: str) -> None:
        """Write the curves."""

    def sketch(self, history: History) -> str:
        """Draw the curves as text."""


class TextObjective:
    """Next-byte prediction on a text."""

    vocabulary, metric, higher_is_better = 256, "validation_bits_per_byte", False

    def __init__(self, corpus: Corpus, recipe: Recipe) -> None:
        cut = PackedBatches if recipe.packed else WindowBatches
        training, validation = corpus.split(recipe.held_out, at_document=recipe.packed)
        self.batches = cut(training, recipe.batch, recipe.length, recipe.seed)
        self.validation = cut(validation, recipe.batch, recipe.length, recipe.seed)
        self.eval_size = recipe.eval_bytes

    def at(self, index: int) -> Batch:
        return self.batches.at(index)

    def probe_memory(self, run: Trainer) -> None:
        """No-op: every evaluation reads the same bytes."""

    def evaluate(self, run: Trainer, *, last: bool) -> dict[str, Any]:
        """Bits per byte of the validation part, or of its first `eval_bytes` bytes."""
        total = count = 0.0
        for batch in self.validation.in_order(self.eval_size):
            total += run.world.mean_loss(run.read(batch)[1]).item() * batch.labels.numel()
            count += batch.labels.numel()
        return {self.metric: total / count / math.log(2)}

    def describe_loss(self, loss: float) -> str:
        return f"loss {loss:.3f}  {loss / math.log(2):.3f} bits/byte"

    def describe_evaluation(self, entry: dict[str, Any]) -> str:
        return f"{entry[self.metric]:.3f} bits per byte"

    def draw(self, file: Path, history: History, title: str) -> None:
        curve.draw(file, _losses(history, math.log(2)), curve.points(history, self.metric), title)

    def sketch(self, history: History) -> str:
        return curve.sketch(_losses(history, math.log(2)), curve.points(history, self.metric))


class TaskObjective:
    """A task of `wyfold.cli.train.synthetic`."""

    metric, higher_is_better = "accuracy", True

    def __init__(self, task: synthetic.Task, recipe: Recipe) -> None:
        self.vocabulary = task.vocabulary
        self.batches = _training(task, recipe)
        lengths = dict.fromkeys((recipe.length, *recipe.eval_lengths))
        try:
            self.held_out = [
                # As many tokens per batch as in training, for every length of row.
                synthetic.TaskBatches(
                    task, max(1, recipe.batch * recipe.length // length), length, recipe.seed, "examination"
                )
                for length in lengths
            ]
        except UsageError as error:  # training rows were accepted above, so --eval-lengths is at fault
            raise UsageError(f"--eval-lengths {' '.join(map(str, recipe.eval_lengths))}: {error}") from error
        self.eval_size = recipe.eval_bytes

    def at(self, index: int) -> Batch:
        return self.batches.at(index)

    def probe_memory(self, run: Trainer) -> None:
        """Run one batch of each length whose batches have more tokens than those of training."""
        own, *others = self.held_out
        for rows in others:
            if rows.batch * rows.length <= own.batch * own.length:
                continue
            try:
                run.read(rows.at(0))
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                raise UsageError(
                    f"--eval-lengths {rows.length}: not enough memory for one row of so many tokens: give shorter ones"
                ) from error

    def evaluate(self, run: Trainer, *, last: bool) -> dict[str, Any]:
        """Accuracy of answers and of whole rows; in the last evaluation also the accuracy at other lengths."""
        answers, rows = self._right(run, self.held_out[0])
        found: dict[str, Any] = {self.metric: answers, "whole_rows": rows}
        if last and self.held_out[1:]:
            others = {str(rows.length): self._right(run, rows)[0] for rows in self.held_out[1:]}
            found["accuracy_at"] = {str(self.held_out[0].length): answers, **others}
        return found

    def describe_loss(self, loss: float) -> str:
        return f"loss {loss:.4f}"

    def describe_evaluation(self, entry: dict[str, Any]) -> str:
        right = f"{entry[self.metric]:.2%} of the answers, {entry['whole_rows']:.2%} of the rows right"
        lengths = "".join(f", {part:.2%} at {length}" for length, part in entry.get("accuracy_at", {}).items())
        return right + lengths.replace(",", "; by length:", 1)

    def draw(self, file: Path, history: History, title: str) -> None:
        curve.draw_task(file, _losses(history), curve.points(history, self.metric), title)

    def sketch(self, history: History) -> str:
        return curve.sketch((), curve.points(history, self.metric), legend="answers that are right")

    def _right(self, run: Trainer, rows: synthetic.TaskBatches) -> tuple[float, float]:
        """Accuracy of answers and of whole rows; NaN if a loss is not finite."""
        sums, total = torch.zeros(4), 0.0
        for batch in rows.in_order(self.eval_size):
            logits, loss, labels = run.read(batch)
            total += run.world.mean_loss(loss).item()
            asked = labels != IGNORED
            right = (logits.argmax(-1) == labels) & asked
            # Per row, because a row may be shared by several processes.
            missed, counted = (run.world.mean_loss(x.sum(1).double()).cpu() for x in (asked & ~right, asked))
            parts = (counted - missed, counted, (missed == 0).double(), torch.ones_like(missed))
            sums += torch.stack([part.sum() for part in parts])
        if not math.isfinite(total):  # argmax of NaN logits still returns an index
            return math.nan, math.nan
        return (sums[0] / sums[1]).item(), (sums[2] / sums[3]).item()


def objective_of(source: Corpus | synthetic.Task, recipe: Recipe) -> Objective:
    """Objective of a recipe for a text or a task."""
    return TextObjective(source, recipe) if isinstance(source, Corpus) else TaskObjective(source, recipe)


def task_of(name: str, *, pairs: int, vocabulary: int) -> synthetic.Task:
    """Task of that name, with the free parameters of its definition."""
    given = {"pairs": pairs, "vocabulary": vocabulary}
    return synthetic.TASKS[name](**{option: given[option] for option, tasks in CHOICES.items() if name in tasks})


def _training(task: synthetic.Task, recipe: Recipe) -> synthetic.TaskBatches | synthetic.Curriculum:
    rows = recipe.batch, recipe.length, recipe.seed
    if not recipe.curriculum:
        return synthetic.TaskBatches(task, *rows, "training")
    recall = cast(synthetic.AssociativeRecall, task)  # `train.require_possible` refuses a curriculum of another task
    return synthetic.Curriculum(recall, *rows, recipe.curriculum * recipe.grad_accum * recipe.replicas)


def _losses(history: History, unit: float = 1.0) -> list[tuple[float, float]]:
    return [(step, loss / unit) for step, loss in curve.points(history, "loss")]
