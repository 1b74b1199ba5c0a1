"""Training loop of `train`, `tasks` and `demo`: steps, evaluations, checkpoints, resuming.

    run = Trainer(recipe, source, folder, device)
    run.train(...)          # True when finished, False when interrupted; the state is saved either way

On the CPU a resumed run takes the same steps as an uninterrupted one, bit for bit. Batches depend on the seed and a
cursor; model, moments, random state and history are restored from the checkpoint.

The host does not wait for a GPU at every step. The next batch is drawn while the GPU works, and the loss of a step is
read while the next step runs (`prefetch`). After a NaN loss the device skips all updates, so the run still
ends with the parameters from before.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from msgspec.structs import asdict
from torch import Tensor, nn

from wyfold.cli import Failure, UsageError
from wyfold.cli.distributed import World
from wyfold.cli.train import checkpoint, history, integrity, mfu
from wyfold.cli.train.corpus import Batch, Corpus
from wyfold.cli.train.curve import points
from wyfold.cli.train.headers import MODEL, RANDOM, SHARDS
from wyfold.cli.train.objectives import objective_of
from wyfold.cli.train.prefetch import BatchPrefetcher, StepMetrics
from wyfold.cli.train.progress import Display, explain_wait, reason_to_wait
from wyfold.cli.train.recipe import Recipe, build, optimizer, stored_in
from wyfold.cli.train.rundir import CHECKPOINTS, CURVE
from wyfold.cli.train.synthetic import Task
from wyfold.models import Decoder

Found = TypeVar("Found")


class Trainer:
    """A run in its folder: a new one, or one that continues from its newest checkpoint.

    Device, backend, number of ranks per replica and recomputation are not part of the recipe.

    Args:
        recipe: Settings of the run.
        source: Text or task to learn.
        folder: Folder of the run.
        device: Device of model and batches.
        backend: Backend of every operator, as in `Decoder`.
        world: Processes of the run; None for a single process.
        recompute: What a backward recomputes, as in `Decoder.recompute`.
        peak: Peak operations per second of one device, for the MFU; None to omit the MFU.

    Raises:
        UsageError: the run in the folder has another recipe, its newest checkpoint is damaged, the source is too short
            for the rows, or the model cannot be built.
    """

    def __init__(
        self,
        recipe: Recipe,
        source: Corpus | Task,
        folder: Path,
        device: torch.device,
        backend: str | None = None,
        world: World | None = None,
        *,
        recompute: str | None = None,
        peak: float | None = None,
    ) -> None:
        self.recipe, self.folder, self.backend, self.recompute = recipe, folder, backend, recompute
        self.world = World(device) if world is None else world
        self.device = self.world.device
        found = integrity.newest(folder / CHECKPOINTS)
        if found is not None:
            # First, because an error caused by a differing recipe would be misleading.
            recipe.check_same(integrity.read_record(found)["recipe"], folder)
        self._stored = None if found is None else folder
        with stored_in(self._stored):
            self.objective = objective_of(source, recipe)
        asked = None if self.world.sharded else self.objective.at(0).places
        answers = None if asked is None else asked.shape[1]
        self.peak, self.flops = peak, 0 if peak is None else mfu.step_flops(recipe, self.objective.vocabulary, answers)
        self.step, self.elapsed = 0, 0.0
        self.history: list[dict[str, Any]] = []
        self.stopping = False
        self.explained: set[str] = set()
        deferred = self.world.async_metrics
        self.batches = BatchPrefetcher(self.objective.at, self.world.replicas, self.device) if deferred else None
        self.pending: StepMetrics | None = None
        self.nonfinite = torch.zeros((), device=self.device)
        self.step_started = 0.0  # start of the step whose metrics are read next, by perf_counter

        if found is None:
            torch.manual_seed(recipe.seed)
            self._start(build(recipe, backend, self.objective.vocabulary))
        else:
            self._resume(found)

    @property
    def finished(self) -> bool:
        """Whether the last step is taken, the time left is too short for one, or the accuracy `stop_at` is reached."""
        timed = self.step - (self.pending is not None)  # `elapsed` does not have the step that is read next
        if self.recipe.minutes is not None and timed:
            average = self.elapsed / timed  # of the steps so far, which a resumed run knows too
            if average * (self.step + 1) > 60 * self.recipe.minutes:
                return True
        looked = self.evaluations()
        enough = self.recipe.stop_at is not None and looked and looked[-1][1] >= self.recipe.stop_at
        return self.progress() >= 1 or bool(enough)

    @property
    def complete(self) -> bool:
        """Whether the last step and the last evaluation are done."""
        return self.finished and self._evaluated(last=True)

    @property
    def peak_memory(self) -> int:
        """Largest number of bytes that tensors of this process have held on its GPU."""
        return torch.cuda.max_memory_allocated(self.device)

    def progress(self) -> float:
        """Fraction of the run that is done, in [0, 1]."""
        if self.recipe.minutes is not None:
            return min(1.0, self.elapsed / (60 * self.recipe.minutes))
        return min(1.0, self.step / (self.recipe.steps or 1))

    def train(self, save_every: int) -> bool:
        """Train to the end and return True, or until SIGINT or SIGTERM and return False. Saves in both cases."""
        if not self.finished:
            with stored_in(self._stored):
                self._in_eval_mode(self.objective.probe_memory)
        if self.world.is_main:
            history.rewrite(self.folder, self.history)
        with _stop_on_signal(self), Display(self.recipe.steps, self.step, quiet=not self.world.is_main) as display:
            saved = self.step
            while True:
                self.stopping = self.world.all_reduce_max(self.stopping) > 0
                if self.step == 1 and self.recipe.minutes is not None:  # its time says whether a second one fits
                    self._show(display, self._read_pending())
                # At the start of an iteration, so that a run stopped between a step and its evaluation resumes with the
                # latter.
                due = self.step % self.recipe.eval_every == 0 or self.finished
                full = self.step // save_every > saved // save_every  # multiples, also after a resume
                if due or full or self.stopping:
                    self._show(display, self._read_pending())
                    self._require_finite_parameters()
                while due and not self.stopping and not self._evaluated(last=self.finished):
                    with self._explain_first("evaluation"):
                        entry = self.evaluate()
                    display.say(f"step {self.step}: validation {self.objective.describe_evaluation(entry)}")
                if self.stopping or self.finished:
                    break
                if full:
                    self.save()
                    saved = self.step
                with self._explain_first("step"):
                    taken = self._take_step()
                self._show(display, taken)
            self.save()
        self.draw()
        return self.complete

    def _explain_first(self, what: str) -> AbstractContextManager[None]:
        """Explain a long wait for the first evaluation, or the first step, of this process."""
        if what in self.explained:
            return nullcontext()
        self.explained.add(what)
        return explain_wait(f"the first {what} of this process{reason_to_wait(self.device)}", self.world.is_main)

    def evaluate(self) -> dict[str, Any]:
        """Evaluate the model and record the entry of the history, which is returned."""
        last = self.finished
        found = self._in_eval_mode(partial(self.objective.evaluate, last=last))
        figures = {self.objective.metric: found[self.objective.metric]}
        figures |= {f"accuracy of rows of {length}": part for length, part in found.get("accuracy_at", {}).items()}
        for name, figure in figures.items():
            if not math.isfinite(figure):
                raise Failure(f"step {self.step}: {name} is {figure}. {self._advice}")
        entry = {"step": self.step, **found}
        if last:
            entry["last"] = True
        self._record(entry)
        return entry

    def _in_eval_mode(self, evaluation: Callable[[Trainer], Found]) -> Found:
        """Call `evaluation` with the model in eval mode, without gradients."""
        self.model.eval()
        with torch.no_grad():
            found = evaluation(self)
        self.model.train()
        self.world.reshard(self.model)
        return found

    def evaluations(self) -> list[tuple[float, float]]:
        """(step, main metric) of every evaluation."""
        return points(self.history, self.objective.metric)

    def read(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Forward pass: logits, mean negative log-likelihood in nats, and labels; this process's shard of them."""
        ids, labels, where = self.world.local_batch(batch.ids, batch.labels, batch.lengths or None)
        if batch.places is not None and not self.world.sharded:
            # Compute logits only where there are labels: the output projection is most of a small model's work.
            places = batch.places.to(self.device, non_blocking=True)
            labels, where = labels.gather(1, places), {**where, "places": places}
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.dtype == "bfloat16"):
            logits, loss = self.model(ids, labels, **where)
        return logits, loss, labels

    def save(self) -> None:
        """Write a checkpoint. Every process writes its shards."""
        record = {
            "recipe": asdict(self.recipe),
            "cursor": self.step * self.recipe.grad_accum,
            "elapsed": self.elapsed,
            "history": self.history,
            "torch": torch.__version__,
        }
        root, tensors = self.folder / CHECKPOINTS, {RANDOM: torch.get_rng_state()}
        self.world.reshard(self.model)  # the optimizer's moments belong to the sharded parameters
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"{name}/{key}"] = value
        if self.world.sharded:
            tensors |= self.model.state_dict()
            checkpoint.save_shards(root, self.step, record, tensors, self.model.config, self.world)
        else:
            checkpoint.save(root, self.step, record, tensors, self.model.save)

    def draw(self) -> None:
        """Write the loss curve into the run's folder."""
        if not self.world.is_main:
            return
        self.objective.draw(self.folder / CURVE, self.history, self.folder.name)

    def _take_step(self) -> dict[str, Any] | None:
        """Take one optimizer step. Returns its history entry, or with `async_metrics` that of the step before."""
        began = time.perf_counter()
        if self.pending is None:
            self.step_started = began
        rate = self.recipe.learning_rate(self.step, self.progress())
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        parts, tokens = self.recipe.grad_accum, 0
        total = torch.zeros((), device=self.device)
        for part in range(parts):
            index = (self.step * parts + part) * self.world.replicas + self.world.replica
            batch = self.objective.at(index) if self.batches is None else self.batches.at(index)
            loss = self._loss(batch) / parts
            self.world.backward(loss)
            total += self.world.mean_loss(loss.detach())
            tokens += batch.ids.numel() * self.world.replicas
        norm = self.world.full_tensor(nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip))
        values = torch.stack([total, norm.to(total)])
        figures = StepMetrics(self.step + 1, rate, tokens, values)
        if not self.world.async_metrics:
            self._require_finite(figures)
            self.optimizer.step()
            self.step += 1
            return self._record_step(figures)
        self.nonfinite = torch.maximum(self.nonfinite, values.isfinite().logical_not().any().to(self.nonfinite))
        self.optimizer.found_inf = self.nonfinite  # type: ignore[attr-defined]  # 1 makes AdamW skip the update
        self.optimizer.step()
        self.step += 1
        figures.host = time.perf_counter() - began
        entry = self._read_pending()
        self.pending = figures
        return entry

    def _read_pending(self) -> dict[str, Any] | None:
        """Read the metrics of the pending step and return its history entry; None if there is none."""
        figures, self.pending = self.pending, None
        if figures is None:
            return None
        self._require_finite(figures)
        return self._record_step(figures)

    def _require_finite(self, figures: StepMetrics) -> None:
        """Raise Failure if loss or gradient norm of a step are not finite."""
        mean, norm = figures.read()
        if not (math.isfinite(mean) and math.isfinite(norm)):
            # No update was made: parameters and checkpoint are both still finite.
            raise Failure(
                f"step {figures.number}: loss {mean}, gradient norm {norm}; nothing was updated. {self._advice}"
            )

    def _require_finite_parameters(self) -> None:
        """Raise Failure if parameters are infinite or NaN, which an update can cause though its loss was finite."""
        self.world.reshard(self.model)
        finite = [self.world.local_tensor(x).isfinite().all() for x in self.model.parameters()]
        if self.world.all_reduce_max(not torch.stack(finite).all()) > 0:
            raise Failure(f"step {self.step}: parameters are infinite or NaN after the update. {self._advice}")

    @property
    def _advice(self) -> str:
        return f"What is in {self.folder / CHECKPOINTS} is from before; a smaller --lr may help"

    def _record_step(self, figures: StepMetrics) -> dict[str, Any]:
        """Record a step in the history and return its entry."""
        mean, norm = figures.read()
        now = time.perf_counter()
        since, self.step_started = self.world.all_reduce_max(now - self.step_started), now
        self.elapsed += since
        # If the device waits for the host, a step may be finished when it is read; the launch time is a lower bound.
        seconds = max(since, figures.host)
        entry = {
            "step": figures.number,
            "loss": mean,
            "gradient_norm": norm,
            "lr": figures.rate,
            "tokens_per_second": round(figures.tokens / seconds),
        }
        if self.peak is not None:
            entry["mfu"] = self.flops / (seconds * self.world.processes * self.peak)
        self._record(entry)
        return entry

    def _show(self, display: Display, entry: dict[str, Any] | None) -> None:
        if entry is not None:
            share = f"  MFU {entry['mfu']:.1%}" if "mfu" in entry else ""
            loss = self.objective.describe_loss(entry["loss"])
            display.step(entry["step"], f"{loss}  {entry['tokens_per_second']:,} tokens/s{share}")

    def _loss(self, batch: Batch) -> Tensor:
        return self.read(batch)[1]

    def _evaluated(self, *, last: bool) -> bool:
        """Whether this step is evaluated; with `last`, whether that was the final evaluation."""
        measured = (entry for entry in reversed(self.history) if self.objective.metric in entry)
        entry = next(measured, {"step": -1})
        return bool(entry["step"] == self.step and (entry.get("last", False) or not last))

    def _record(self, entry: dict[str, Any]) -> None:
        self.history.append(entry)
        if self.world.is_main:
            history.append(self.folder, entry)

    def _resume(self, found: Path) -> None:
        record, tensors = checkpoint.load(found)
        self.step, self.elapsed, self.history = record["step"], record["elapsed"], record["history"]
        if (found / SHARDS).is_dir():
            with torch.device("meta"):
                described = build(self.recipe, self.backend, self.objective.vocabulary).state_dict()
            checkpoint.require_shards(found, described)
            self._start(build(self.recipe, self.backend, self.objective.vocabulary))
            tensors = {RANDOM: torch.get_rng_state()}
            for name, parameter in self.model.named_parameters() if self.step else ():
                moments = {key: torch.zeros_like(parameter, requires_grad=False) for key in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[parameter] = {"step": torch.zeros((), device=self.device), **moments}
                tensors |= {f"{name}/{key}": value for key, value in self.optimizer.state[parameter].items()}
            checkpoint.load_shards(found, tensors | self.model.state_dict())
            checkpoint.set_random_state(tensors[RANDOM], found)
            return
        try:
            model = Decoder.load(found / MODEL, backend=self.backend)
        except ValueError as error:
            raise UsageError(str(error)) from error
        self._start(model)
        checkpoint.set_random_state(tensors.pop(RANDOM), found)
        parameters = dict(self.model.named_parameters())
        for key, value in tensors.items():
            name, _, moment = key.rpartition("/")
            self.optimizer.state[parameters[name]][moment] = self.world.shard_like(value, parameters[name])

    def _start(self, model: Decoder) -> None:
        """Move the model to the device, shard it, and make its optimizer."""
        self.model = model.to(self.device)
        self.model.recompute(self.recompute)
        self.world.shard_model(self.model, self.model.blocks)
        self.optimizer = optimizer(self.model, self.recipe)


@contextmanager
def _stop_on_signal(run: Trainer) -> Iterator[None]:
    """Stop after the current step on SIGINT or SIGTERM. A second signal has its usual effect at once."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def stop(number: int, frame: FrameType | None) -> None:
        run.stopping = True
        restore()

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        restore()
