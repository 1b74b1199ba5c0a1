"""The training loop of `train`, `tasks` and `demo`: steps, looks at what was held out, and how a run is resumed.

    run = Trainer(recipe, source, folder, device)
    run.train(...)          # True when finished, False when interrupted; the state is saved either way

On the CPU a resumed run takes the very steps an uninterrupted one takes, bit for bit: batches depend on the seed and a
cursor, and the model, the moments, the random state and the history all come back from the checkpoint.

The host does not wait for a GPU at every step: the next batch is drawn while the GPU works, and a step's loss is read
while the next step runs (`wyfold.cli.prefetch`). So that a NaN loss still ends a run before the update, the device
itself leaves parameters unchanged from then on.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from wyfold.cli import Failure, UsageError, checkpoint, integrity, mfu
from wyfold.cli.corpus import Batch, Corpus
from wyfold.cli.curve import points
from wyfold.cli.distributed import Team
from wyfold.cli.integrity import MODEL, RANDOM, SHARDS, TENSORS, DamagedError
from wyfold.cli.objectives import lesson_of
from wyfold.cli.prefetch import Ahead, Figures
from wyfold.cli.progress import Display
from wyfold.cli.recipe import Recipe, build, optimizer, stored_in
from wyfold.cli.rundir import CHECKPOINTS, CURVE, HISTORY
from wyfold.cli.synthetic import Task
from wyfold.models import Decoder
from wyfold.runtime import files

Looked = TypeVar("Looked")


class Trainer:
    """A run in its folder, new or taken up where its latest checkpoint stands.

    Args:
        recipe, source, folder: how is learned, what, and where the run is kept.
        device: of model and batches.
        backend: of every operator, as `Decoder` takes it; like the device no part of the recipe.
        team: The processes of the run, of which this is one; None is a process alone. How many ranks share a replica
            is no part of the recipe either.
        recompute: what a backward computes again, as `Decoder.recompute` takes it; no part of the recipe.
        peak: operations per second of one device, of which a step's share is told; None tells none.

    Raises:
        UsageError: the folder's run has another recipe, its newest checkpoint is damaged, the source has no such rows,
            or no model can be built so.
    """

    def __init__(
        self,
        recipe: Recipe,
        source: Corpus | Task,
        folder: Path,
        device: torch.device,
        backend: str | None = None,
        team: Team | None = None,
        *,
        recompute: str | None = None,
        peak: float | None = None,
    ) -> None:
        self.recipe, self.folder, self.backend, self.recompute = recipe, folder, backend, recompute
        self.team = Team(device) if team is None else team
        self.device = self.team.device
        found = integrity.newest(folder / CHECKPOINTS)
        if found is not None:
            # First: what makes no sense in another recipe is not what is to be said of it.
            recipe.check_same(integrity.read_record(found)["recipe"], folder)
        self._stored = None if found is None else folder
        with stored_in(self._stored):
            self.lesson = lesson_of(source, recipe)
        asked = None if self.team.sharded else self.lesson.at(0).places
        answers = None if asked is None else asked.shape[1]
        self.peak, self.flops = peak, 0 if peak is None else mfu.step_flops(recipe, self.lesson.vocabulary, answers)
        self.step, self.elapsed = 0, 0.0
        self.history: list[dict[str, Any]] = []
        self.stopping = False
        behind = self.team.reads_behind
        self.batches = Ahead(self.lesson.at, self.team.replicas, pinned=self.device.type == "cuda") if behind else None
        self.unread: Figures | None = None
        self.spoilt = torch.zeros((), device=self.device)
        self.mark = 0.0  # by the clock: since when the step to be read next was at work

        if found is None:
            torch.manual_seed(recipe.seed)
            self._start(build(recipe, backend, self.lesson.vocabulary))
        else:
            self._resume(found)

    @property
    def finished(self) -> bool:
        """Whether the last step is taken, or as much is known as was asked for."""
        looked = self.examinations()
        enough = self.recipe.stop_at is not None and looked and looked[-1][1] >= self.recipe.stop_at
        return self.progress() >= 1 or bool(enough)

    @property
    def complete(self) -> bool:
        """Whether the last step is taken and what is known then: nothing is left to do."""
        return self.finished and self._examined(last=True)

    def progress(self) -> float:
        """Part of the run that is done, in [0, 1]."""
        if self.recipe.minutes is not None:
            return min(1.0, self.elapsed / (60 * self.recipe.minutes))
        return min(1.0, self.step / (self.recipe.steps or 1))

    def train(self, save_every: int) -> bool:
        """Train to the end and return True, or until SIGINT or SIGTERM and return False; saved in both cases."""
        if not self.finished:
            with stored_in(self._stored):
                self._look(self.lesson.rehearse)
        self._rewrite_history()
        with _stop_on_signal(self), Display(self.recipe.steps, self.step, quiet=not self.team.leads) as display:
            saved = self.step
            while True:
                self.stopping = self.team.most(self.stopping) > 0
                # At the head of the round, so that a run stopped between a step and its examination resumes with it.
                due = self.step % self.recipe.eval_every == 0 or self.finished
                full = self.step - saved >= save_every
                if due or full or self.stopping:
                    self._show(display, self._read_behind())
                    self._refuse_spoilt_parameters()
                while due and not self.stopping and not self._examined(last=self.finished):
                    display.say(f"step {self.step}: validation {self.lesson.verdict(self.examine())}")
                if self.stopping or self.finished:
                    break
                if full:
                    self.save()
                    saved = self.step
                self._show(display, self._take_step())
            self.save()
        self.draw()
        return self.complete

    def examine(self) -> dict[str, Any]:
        """What the history keeps of a look at what was held out."""
        last = self.finished
        found = self._look(partial(self.lesson.examine, last=last))
        figures = {self.lesson.measure: found[self.lesson.measure]}
        figures |= {f"accuracy of rows of {length}": part for length, part in found.get("accuracy_at", {}).items()}
        for name, figure in figures.items():
            if not math.isfinite(figure):
                raise Failure(f"step {self.step}: {name} is {figure}. {self._advice}")
        entry = {"step": self.step, **found}
        if last:
            entry["last"] = True
        self._record(entry)
        return entry

    def _look(self, look: Callable[[Trainer], Looked]) -> Looked:
        """What `look` finds with the model as it is used after training."""
        self.model.eval()
        with torch.no_grad():
            found = look(self)
        self.model.train()
        self.team.reshard(self.model)
        return found

    def examinations(self) -> list[tuple[float, float]]:
        """(step, what tells how far the run has come), of every look."""
        return points(self.history, self.lesson.measure)

    def read(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, mean negative log-likelihood in nats, and labels; this process's share of them."""
        ids, labels, where = self.team.share(batch.ids, batch.labels, batch.lengths or None)
        if batch.places is not None and not self.team.sharded:
            # The product with the vocabulary is most of a small model's work, and most of it nobody asks for.
            places = batch.places.to(self.device, non_blocking=True)
            labels, where = labels.gather(1, places), {**where, "places": places}
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.dtype == "bfloat16"):
            logits, loss = self.model(ids, labels, **where)
        return logits, loss, labels

    def save(self) -> None:
        """Checkpoint of this moment, of which every process writes what it holds."""
        record = {
            "recipe": dataclasses.asdict(self.recipe),
            "cursor": self.step * self.recipe.grad_accum,
            "elapsed": self.elapsed,
            "history": self.history,
            "torch": torch.__version__,
        }
        root, tensors = self.folder / CHECKPOINTS, {RANDOM: torch.get_rng_state()}
        self.team.reshard(self.model)  # the optimizer's moments are those of the shards
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"{name}/{key}"] = value
        if self.team.sharded:
            tensors |= self.model.state_dict()
            checkpoint.save_shards(root, self.step, record, tensors, self.model.config, self.team)
        else:
            checkpoint.save(root, self.step, record, tensors, self.model.save)

    def draw(self) -> None:
        """Write the loss curve beside the checkpoints."""
        if not self.team.leads:
            return
        self.lesson.draw(self.folder / CURVE, self.history, self.folder.name)

    def _take_step(self) -> dict[str, Any] | None:
        """One optimizer step; what the history keeps of it, or of the one before where numbers are read behind."""
        began = time.perf_counter()
        if self.unread is None:
            self.mark = began
        rate = self.recipe.learning_rate(self.step, self.progress())
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        parts, tokens = self.recipe.grad_accum, 0
        total = torch.zeros((), device=self.device)
        for part in range(parts):
            batch = self._batch((self.step * parts + part) * self.team.replicas + self.team.replica)
            loss = self._loss(batch) / parts
            self.team.backward(loss)
            total += self.team.mean(loss.detach())
            tokens += batch.ids.numel() * self.team.replicas
        norm = self.team.whole(nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip))
        values = torch.stack([total, norm.to(total)])
        figures = Figures(self.step + 1, rate, tokens, values)
        if not self.team.reads_behind:
            self._refuse_spoilt(figures)
            self.optimizer.step()
            self.step += 1
            return self._known(figures)
        self.spoilt = torch.maximum(self.spoilt, values.isfinite().logical_not().any().to(self.spoilt))
        self.optimizer.found_inf = self.spoilt  # type: ignore[attr-defined]  # where it is one, nothing is updated
        self.optimizer.step()
        self.step += 1
        figures.host = time.perf_counter() - began
        entry = self._read_behind()
        self.unread = figures
        return entry

    def _read_behind(self) -> dict[str, Any] | None:
        """What the history keeps of the step whose numbers are still to be read."""
        figures, self.unread = self.unread, None
        if figures is None:
            return None
        self._refuse_spoilt(figures)
        return self._known(figures)

    def _refuse_spoilt(self, figures: Figures) -> None:
        """End the run at a step that has numbers that are none."""
        mean, norm = figures.read()
        if not (math.isfinite(mean) and math.isfinite(norm)):
            # Before the update: the parameters in memory and the checkpoint on disk are both still good.
            raise Failure(
                f"step {figures.number}: loss {mean}, gradient norm {norm}; nothing was updated. {self._advice}"
            )

    def _refuse_spoilt_parameters(self) -> None:
        """End the run where an update made parameters infinite or NaN: the loss before it was still finite."""
        self.team.reshard(self.model)
        finite = [self.team.held(x).isfinite().all() for x in self.model.parameters()]
        if self.team.most(not torch.stack(finite).all()) > 0:
            raise Failure(f"step {self.step}: parameters are infinite or NaN after the update. {self._advice}")

    @property
    def _advice(self) -> str:
        return f"What is in {self.folder / CHECKPOINTS} is from before; a smaller --lr may help"

    def _known(self, figures: Figures) -> dict[str, Any]:
        """Record a step that was taken."""
        mean, norm = figures.read()
        now = time.perf_counter()
        since, self.mark = self.team.most(now - self.mark), now
        self.elapsed += since
        # A step that is read as soon as it was asked for is over at once where the device waits for the host.
        seconds = max(since, figures.host)
        entry = {
            "step": figures.number,
            "loss": mean,
            "gradient_norm": norm,
            "lr": figures.rate,
            "tokens_per_second": round(figures.tokens / seconds),
        }
        if self.peak is not None:
            entry["mfu"] = self.flops / (seconds * self.team.processes * self.peak)
        self._record(entry)
        return entry

    def _show(self, display: Display, entry: dict[str, Any] | None) -> None:
        if entry is not None:
            share = f"  MFU {entry['mfu']:.1%}" if "mfu" in entry else ""
            loss = self.lesson.figures(entry["loss"])
            display.step(entry["step"], f"{loss}  {entry['tokens_per_second']:,} tokens/s{share}")

    def _batch(self, index: int) -> Batch:
        return self.lesson.at(index) if self.batches is None else self.batches.at(index)

    def _loss(self, batch: Batch) -> Tensor:
        return self.read(batch)[1]

    def _examined(self, *, last: bool) -> bool:
        """Whether this step's look is taken; `last` asks for the one that ends a run."""
        measured = (entry for entry in reversed(self.history) if self.lesson.measure in entry)
        entry = next(measured, {"step": -1})
        return bool(entry["step"] == self.step and (entry.get("last", False) or not last))

    def _record(self, entry: dict[str, Any]) -> None:
        self.history.append(entry)
        if not self.team.leads:
            return
        # Not before there is something to say: a backend that refuses the first look leaves no folder.
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / HISTORY
        try:
            with open(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666), "a") as stream:
                stream.write(_line(entry))
        except OSError as error:
            raise Failure(
                f"step {entry['step']}: {file} cannot be written ({error.strerror}). What is in "
                f"{self.folder / CHECKPOINTS} is whole; once it can be written, give the same command again"
            ) from error

    def _rewrite_history(self) -> None:
        """What was recorded after the checkpoint will happen again, so it leaves the file."""
        file = self.folder / HISTORY
        if not self.team.leads or not (self.history or file.exists()):
            return
        files.write(file, "".join(map(_line, self.history)))

    def _resume(self, found: Path) -> None:
        record, tensors = checkpoint.load(found)
        self.step, self.elapsed, self.history = record["step"], record["elapsed"], record["history"]
        if (found / SHARDS).is_dir():
            with torch.device("meta"):
                described = build(self.recipe, self.backend, self.lesson.vocabulary).state_dict()
            checkpoint.require_shards(found, described)
            self._start(build(self.recipe, self.backend, self.lesson.vocabulary))
            tensors = {RANDOM: torch.get_rng_state()}
            for name, parameter in self.model.named_parameters() if self.step else ():
                moments = {key: torch.zeros_like(parameter, requires_grad=False) for key in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[parameter] = {"step": torch.zeros((), device=self.device), **moments}
                tensors |= {f"{name}/{key}": value for key, value in self.optimizer.state[parameter].items()}
            checkpoint.load_shards(found, tensors | self.model.state_dict())
            _set_random_state(tensors[RANDOM], found)
            return
        try:
            model = Decoder.load(found / MODEL, backend=self.backend)
        except ValueError as error:
            raise UsageError(str(error)) from error
        self._start(model)
        _set_random_state(tensors.pop(RANDOM), found)
        parameters = dict(self.model.named_parameters())
        for key, value in tensors.items():
            name, _, moment = key.rpartition("/")
            self.optimizer.state[parameters[name]][moment] = self.team.like(value, parameters[name])

    def _start(self, model: Decoder) -> None:
        """This model, where and as it is trained, and an optimizer for it."""
        self.model = model.to(self.device)
        self.model.recompute(self.recompute)
        self.team.spread(self.model, self.model.blocks)
        self.optimizer = optimizer(self.model, self.recipe)


def _set_random_state(state: Tensor, folder: Path) -> None:
    """Give PyTorch's generator the state that a checkpoint has."""
    try:
        torch.set_rng_state(state)
    except (RuntimeError, TypeError) as error:
        raise DamagedError(folder / TENSORS, f"{RANDOM} is no state of PyTorch's generator ({error})") from error


def _line(entry: dict[str, Any]) -> str:
    """An entry of the history as a line of the file."""
    return json.dumps(entry, allow_nan=False) + "\n"


@contextmanager
def _stop_on_signal(run: Trainer) -> Iterator[None]:
    """SIGINT and SIGTERM let the step in progress finish; a second one stops at once, as if this were not here."""
    before: dict[int, Any] = {}

    def stop(number: int, frame: FrameType | None) -> None:
        run.stopping = True
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        restore()
