"""What a run learns: text, measured in bits per byte, or a known task, measured by the answers that are right.

A lesson has the batches of a run and knows how what was learned is measured, told and drawn. The training loop knows
nothing of either kind.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from wyfold.cli import UsageError, curve, out_of_memory, synthetic
from wyfold.cli.corpus import Batch, Corpus, Packs, Windows
from wyfold.cli.recipe import Recipe
from wyfold.cli.settings import CHOICES
from wyfold.models import IGNORED

if TYPE_CHECKING:
    from wyfold.cli.trainer import Trainer

History = curve.History


class Lesson(Protocol):
    """One kind of thing to learn.

    Attributes:
        vocabulary: Of the model.
        measure: Name of the number by which the history's entries tell how far a run has come.
        better_up: Whether that number is one that grows.
    """

    vocabulary: int
    measure: str
    better_up: bool

    def at(self, index: int) -> Batch:
        """Batch number `index`, counted from the first of the run."""

    def rehearse(self, run: Trainer) -> None:
        """Run the model once on what it is examined on at the end of the run and on nothing before.

        Raises:
            UsageError: there is not enough memory for it.
        """

    def examine(self, run: Trainer, *, last: bool) -> dict[str, Any]:
        """What the model knows of what was held out; at the end of a run, all there is to say."""

    def figures(self, loss: float) -> str:
        """A step's loss, in nats, in words."""

    def verdict(self, entry: dict[str, Any]) -> str:
        """An examination in words."""

    def draw(self, file: Path, history: History, title: str) -> None:
        """Write the curves."""

    def sketch(self, history: History) -> str:
        """The curves in text."""


class Text:
    """Bytes, each to be told from those before it."""

    vocabulary, measure, better_up = 256, "validation_bits_per_byte", False

    def __init__(self, corpus: Corpus, recipe: Recipe) -> None:
        cut = Packs if recipe.packed else Windows
        training, validation = corpus.split(recipe.held_out, at_document=recipe.packed)
        self.batches = cut(training, recipe.batch, recipe.length, recipe.seed)
        self.validation = cut(validation, recipe.batch, recipe.length, recipe.seed)
        self.looked_at = recipe.eval_bytes

    def at(self, index: int) -> Batch:
        return self.batches.at(index)

    def rehearse(self, run: Trainer) -> None:
        """Nothing: every look reads the same bytes."""

    def examine(self, run: Trainer, *, last: bool) -> dict[str, Any]:
        """Bits per byte of the held-out part, or of its first `eval_bytes` bytes."""
        total = count = 0.0
        for batch in self.validation.in_order(self.looked_at):
            total += run.team.mean(run.read(batch)[1]).item() * batch.labels.numel()
            count += batch.labels.numel()
        return {self.measure: total / count / math.log(2)}

    def figures(self, loss: float) -> str:
        return f"loss {loss:.3f}  {loss / math.log(2):.3f} bits/byte"

    def verdict(self, entry: dict[str, Any]) -> str:
        return f"{entry[self.measure]:.3f} bits per byte"

    def draw(self, file: Path, history: History, title: str) -> None:
        curve.draw(file, _losses(history, math.log(2)), curve.points(history, self.measure), title)

    def sketch(self, history: History) -> str:
        return curve.sketch(_losses(history, math.log(2)), curve.points(history, self.measure))


class Known:
    """A task of `wyfold.cli.synthetic`."""

    measure, better_up = "accuracy", True

    def __init__(self, task: synthetic.Task, recipe: Recipe) -> None:
        self.vocabulary = task.vocabulary
        self.batches = _training(task, recipe)
        lengths = dict.fromkeys((recipe.length, *recipe.eval_lengths))
        try:
            self.held_out = [
                # As many tokens at a time as in training, however long the rows.
                synthetic.Rows(task, max(1, recipe.batch * recipe.length // length), length, recipe.seed, "examination")
                for length in lengths
            ]
        except UsageError as error:  # the rows of training are legal, or there were no batches
            raise UsageError(f"--eval-lengths {' '.join(map(str, recipe.eval_lengths))}: {error}") from error
        self.looked_at = recipe.eval_bytes

    def at(self, index: int) -> Batch:
        return self.batches.at(index)

    def rehearse(self, run: Trainer) -> None:
        """Read one batch of each length whose rows have more tokens than the batches of training."""
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

    def examine(self, run: Trainer, *, last: bool) -> dict[str, Any]:
        """Parts of the answers, and of the rows, that are all right; at the end also of rows of other lengths."""
        answers, rows = self._right(run, self.held_out[0])
        found: dict[str, Any] = {self.measure: answers, "whole_rows": rows}
        if last and self.held_out[1:]:
            others = {str(rows.length): self._right(run, rows)[0] for rows in self.held_out[1:]}
            found["accuracy_at"] = {str(self.held_out[0].length): answers, **others}
        return found

    def figures(self, loss: float) -> str:
        return f"loss {loss:.4f}"

    def verdict(self, entry: dict[str, Any]) -> str:
        said = f"{entry[self.measure]:.2%} of the answers, {entry['whole_rows']:.2%} of the rows right"
        lengths = "".join(f", {part:.2%} at {length}" for length, part in entry.get("accuracy_at", {}).items())
        return said + lengths.replace(",", "; by length:", 1)

    def draw(self, file: Path, history: History, title: str) -> None:
        curve.draw_task(file, _losses(history), curve.points(history, self.measure), title)

    def sketch(self, history: History) -> str:
        return curve.sketch((), curve.points(history, self.measure), legend="answers that are right")

    def _right(self, run: Trainer, rows: synthetic.Rows) -> tuple[float, float]:
        """Parts of the answers and of the rows that are right; NaN where a loss is not finite."""
        sums, total = torch.zeros(4), 0.0
        for batch in rows.in_order(self.looked_at):
            logits, loss, labels = run.read(batch)
            total += run.team.mean(loss).item()
            asked = labels != IGNORED
            right = (logits.argmax(-1) == labels) & asked
            # Per row, since a row may lie on several processes.
            missed, counted = (run.team.mean(x.sum(1).double()).cpu() for x in (asked & ~right, asked))
            parts = (counted - missed, counted, (missed == 0).double(), torch.ones_like(missed))
            sums += torch.stack([part.sum() for part in parts])
        if not math.isfinite(total):  # logits that are NaN have a largest one all the same
            return math.nan, math.nan
        return (sums[0] / sums[1]).item(), (sums[2] / sums[3]).item()


def lesson_of(source: Corpus | synthetic.Task, recipe: Recipe) -> Lesson:
    """The lesson that a recipe makes of a text or a task."""
    return Text(source, recipe) if isinstance(source, Corpus) else Known(source, recipe)


def task_of(name: str, *, pairs: int, vocabulary: int) -> synthetic.Task:
    """The task of that name, with the choices that its definition leaves open."""
    given = {"pairs": pairs, "vocabulary": vocabulary}
    return synthetic.TASKS[name](**{option: given[option] for option, tasks in CHOICES.items() if name in tasks})


def _training(task: synthetic.Task, recipe: Recipe) -> synthetic.Rows | synthetic.Curriculum:
    rows = recipe.batch, recipe.length, recipe.seed
    if not recipe.curriculum:
        return synthetic.Rows(task, *rows, "training")
    if not isinstance(task, synthetic.AssociativeRecall):
        raise UsageError(f"--curriculum: is for --task mqar, got {recipe.task}")
    return synthetic.Curriculum(task, *rows, recipe.curriculum * recipe.grad_accum * recipe.replicas)


def _losses(history: History, unit: float = 1.0) -> list[tuple[float, float]]:
    return [(step, loss / unit) for step, loss in curve.points(history, "loss")]
