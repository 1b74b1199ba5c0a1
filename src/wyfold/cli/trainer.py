"""The training loop of `train` and `demo`: what decides a run's numbers, and how a run is stopped and resumed.

    run = Trainer(recipe, corpus, folder, device)
    run.train(...)          # True when finished, False when interrupted; the state is saved either way

On the CPU a resumed run takes the very steps an uninterrupted one takes, bit for bit: batches depend on the seed and a
cursor, and the model, the moments, the random state and the history all come back from the checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from wyfold.cli import Failure, UsageError, checkpoint, curve
from wyfold.cli.corpus import Batch, Corpus, Packs, Windows
from wyfold.cli.progress import Display
from wyfold.models import Decoder, DecoderConfig
from wyfold.parallel.team import Team

BETAS = (0.9, 0.95)
VOCABULARY = 256
HISTORY, CHECKPOINTS, CURVE = "metrics.jsonl", "checkpoint", "curve.png"


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
        replicas: Of the model, each with batches of its own: a step takes those of all.
        data: `Corpus.digest` of the text.
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

    def learning_rate(self, step: int, progress: float) -> float:
        """Rate of the step after `step` steps: linear warm-up times a cosine over `progress` in [0, 1]."""
        warm = min(1.0, (step + 1) / max(1, self.warmup))
        cosine = (1 + math.cos(math.pi * min(1.0, progress))) / 2
        return self.lr * warm * (self.lr_end + (1 - self.lr_end) * cosine)

    def check_same(self, stored: dict[str, Any], folder: Path) -> None:
        """Refuse to continue a run that was started with another recipe."""
        if stored["data"] != self.data:
            raise UsageError(f"the text of --data is not the one that the run in {folder} learns: give another --out")
        for field, wanted in dataclasses.asdict(self).items():
            if stored.get(field, 1 if field == "replicas" else None) != wanted:
                option = f"--{field.replace('_', '-')}"
                raise UsageError(
                    f"{option} is {wanted!r} here, but the run in {folder} was started with {stored.get(field)!r}: "
                    "give the same value to resume it, or another --out"
                )


class Trainer:
    """A run in its folder, new or taken up where its latest checkpoint stands.

    Args:
        recipe, corpus, folder: what is learned, from what, and where the run is kept.
        device: of model and batches.
        backend: of every operator, as `Decoder` takes it; like the device no part of the recipe.
        team: The processes of the run, of which this is one; None is a process alone. How many ranks share a replica
            is no part of the recipe either.

    Raises:
        UsageError: the folder's run has another recipe, the corpus is too short, or the model cannot be built so.
    """

    def __init__(
        self,
        recipe: Recipe,
        corpus: Corpus,
        folder: Path,
        device: torch.device,
        backend: str | None = None,
        team: Team | None = None,
    ) -> None:
        self.recipe, self.folder, self.backend = recipe, folder, backend
        self.team = Team(device) if team is None else team
        self.device = self.team.device
        cut = Packs if recipe.packed else Windows
        training, validation = corpus.split(recipe.held_out, at_document=recipe.packed)
        self.batches = cut(training, recipe.batch, recipe.length, recipe.seed)
        self.validation = cut(validation, recipe.batch, recipe.length, recipe.seed)
        self.step, self.elapsed = 0, 0.0
        self.history: list[dict[str, Any]] = []
        self.stopping = False

        found = checkpoint.latest(folder / CHECKPOINTS)
        if found is None:
            torch.manual_seed(recipe.seed)
            self._start(build(recipe, backend))
        else:
            self._resume(found)

    @property
    def finished(self) -> bool:
        """Whether the last step is taken."""
        return self.progress() >= 1

    @property
    def complete(self) -> bool:
        """Whether the last step is taken and its validation known: nothing is left to do."""
        return self.finished and self._evaluated()

    def progress(self) -> float:
        """Part of the run that is done, in [0, 1]."""
        if self.recipe.minutes is not None:
            return min(1.0, self.elapsed / (60 * self.recipe.minutes))
        return min(1.0, self.step / (self.recipe.steps or 1))

    def train(self, save_every: int) -> bool:
        """Train to the end and return True, or until SIGINT or SIGTERM and return False; saved in both cases."""
        self._rewrite_history()
        with _stop_on_signal(self), Display(self.recipe.steps, self.step, quiet=not self.team.leads) as display:
            saved = self.step
            while True:
                self.stopping = self.team.most(self.stopping) > 0
                # At the head of the round, so that a run stopped between a step and its evaluation resumes with it.
                due = self.step % self.recipe.eval_every == 0 or self.finished
                if due and not self.stopping and not self._evaluated():
                    bits = self.evaluate()
                    self._record({"step": self.step, "validation_bits_per_byte": bits})
                    display.say(f"step {self.step}: validation {bits:.3f} bits per byte")
                if self.stopping or self.finished:
                    break
                if self.step - saved >= save_every:
                    self.save()
                    saved = self.step
                entry = self._take_step()
                display.step(self.step, entry["loss"], entry["loss"] / math.log(2), entry["tokens_per_second"])
            self.save()
        self.draw()
        return self.complete

    def evaluate(self) -> float:
        """Bits per byte of the held-out part, or of its first `eval_bytes` bytes."""
        total = count = 0.0
        self.model.eval()
        with torch.no_grad():
            for batch in self.validation.in_order(self.recipe.eval_bytes):
                total += self.team.mean(self._loss(batch)).item() * batch.labels.numel()
                count += batch.labels.numel()
        self.model.train()
        return total / count / math.log(2)

    def save(self) -> None:
        """Checkpoint of this moment; one process writes it, all bring what they hold."""
        tensors = {"random_state": torch.get_rng_state()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"{name}/{key}"] = self.team.whole(value)
        weights = {name: self.team.whole(x) for name, x in self.model.state_dict().items()}
        record = {
            "recipe": dataclasses.asdict(self.recipe),
            "cursor": self.step * self.recipe.grad_accum,
            "elapsed": self.elapsed,
            "history": self.history,
            "torch": torch.__version__,
        }
        if self.team.leads:
            with torch.device("meta"):
                model = Decoder(self.model.config)
            model.load_state_dict(weights, assign=True)
            checkpoint.save(self.folder / CHECKPOINTS, self.step, record, tensors, model.save)
        self.team.most(0)  # nobody goes on, or ends, before it is there

    def draw(self) -> None:
        """Write the loss curve beside the checkpoints."""
        if not self.team.leads:
            return
        curve.draw(self.folder / CURVE, self.training_curve(), self.validation_curve(), self.folder.name)

    def training_curve(self) -> list[tuple[float, float]]:
        return [(entry["step"], entry["loss"] / math.log(2)) for entry in self.history if "loss" in entry]

    def validation_curve(self) -> list[tuple[float, float]]:
        key = "validation_bits_per_byte"
        return [(entry["step"], entry[key]) for entry in self.history if key in entry]

    def _take_step(self) -> dict[str, Any]:
        """One optimizer step; what the history keeps of it."""
        start = time.perf_counter()
        rate = self.recipe.learning_rate(self.step, self.progress())
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        parts, tokens = self.recipe.grad_accum, 0
        total = torch.zeros((), device=self.device)
        for part in range(parts):
            batch = self.batches.at((self.step * parts + part) * self.team.replicas + self.team.replica)
            loss = self._loss(batch) / parts
            self.team.backward(loss)
            total += self.team.mean(loss.detach())
            tokens += batch.ids.numel() * self.team.replicas
        norm = self.team.whole(nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)).item()
        mean = total.item()
        if not (math.isfinite(mean) and math.isfinite(norm)):
            # Before the update: the parameters in memory and the checkpoint on disk are both still good.
            raise Failure(
                f"step {self.step + 1}: loss {mean}, gradient norm {norm}; nothing was updated. What is in "
                f"{self.folder / CHECKPOINTS} is from before; a smaller --lr may help"
            )
        self.optimizer.step()
        self.step += 1
        seconds = self.team.most(time.perf_counter() - start)
        self.elapsed += seconds
        entry = {
            "step": self.step,
            "loss": mean,
            "gradient_norm": norm,
            "lr": rate,
            "tokens_per_second": round(tokens / seconds),
        }
        self._record(entry)
        return entry

    def _loss(self, batch: Batch) -> Tensor:
        """Mean negative log-likelihood of the labels, in nats; this process's share of it."""
        ids, labels, where = self.team.share(batch.ids, batch.labels, batch.lengths or None)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.dtype == "bfloat16"):
            _, loss = self.model(ids, labels, **where)
        return loss

    def _evaluated(self) -> bool:
        return any(point[0] == self.step for point in self.validation_curve()[-1:])

    def _record(self, entry: dict[str, Any]) -> None:
        self.history.append(entry)
        if not self.team.leads:
            return
        with (self.folder / HISTORY).open("a") as stream:
            stream.write(json.dumps(entry) + "\n")

    def _rewrite_history(self) -> None:
        """What was recorded after the checkpoint will happen again, so it leaves the file."""
        if not self.team.leads:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / HISTORY).write_text("".join(json.dumps(entry) + "\n" for entry in self.history))

    def _resume(self, found: Path) -> None:
        record, tensors = checkpoint.load(found)
        self.recipe.check_same(record["recipe"], self.folder)
        self.step, self.elapsed, self.history = record["step"], record["elapsed"], record["history"]
        self._start(Decoder.load(found / checkpoint.MODEL, backend=self.backend))
        torch.set_rng_state(tensors.pop("random_state"))
        parameters = dict(self.model.named_parameters())
        for key, value in tensors.items():
            name, _, moment = key.rpartition("/")
            self.optimizer.state[parameters[name]][moment] = self.team.like(value, parameters[name])

    def _start(self, model: Decoder) -> None:
        """This model, where and as it is trained, and an optimizer for it."""
        self.model = model.to(self.device)
        self.team.spread(self.model, self.model.blocks)
        self.optimizer = optimizer(self.model, self.recipe)


def build(recipe: Recipe, backend: str | None = None) -> Decoder:
    """The untrained model of a recipe."""
    try:
        return Decoder(
            DecoderConfig(
                vocab_size=VOCABULARY,
                pattern=recipe.layers,
                num_layers=recipe.depth,
                hidden_size=recipe.width,
                num_heads=recipe.heads,
                head_dim=recipe.head_dim,
                options={"attention": {"window": recipe.window}},
            ),
            backend=backend,
        )
    except ValueError as error:
        raise UsageError(f"no model can be built so: {error}") from error


def optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW; decay applies to the matrices that mix channels, not to norms, biases or the parameters of the decay."""
    matrices = {module.weight for module in model.modules() if isinstance(module, nn.Linear)}
    others = [parameter for parameter in model.parameters() if parameter not in matrices]
    groups = [{"params": list(matrices), "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=BETAS, fused=True)


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
