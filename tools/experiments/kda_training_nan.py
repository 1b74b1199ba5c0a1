"""Where the NaN comes from that training KDA in bfloat16 meets now and then (docs/facts.md, KDA-NAN-1), on one card.

    PYTHONPATH=src:. python tools/experiments/kda_training_nan.py train --processes 8 --seconds 60 --out DIR
    PYTHONPATH=src:. python tools/experiments/kda_training_nan.py operator --processes 8 --seconds 30 --out DIR

`train`: associative recall, some processes side by side. After every launch of a KDA backward, recalled or not, the
device counts what is not finite in every tensor that is there, given or made, and where the first such number is;
nothing waits. Where a step's gradients have a NaN, before they are clipped, the counts are printed, launch by launch:
memory that is not written yet may hold anything, so what counts is the first launch after which a tensor that it wrote
is not finite. The same batch is then tried again, recalled and not. `operator`: the operator alone on gates as strong
as training makes them, on q, k and v that are slices of one tensor, under gradients most of which are zero, with shared
memory filled with NaN before every call; every result of a call must have the bits of the first.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tests.accuracy import shared_memory
from torch import Tensor, nn

import wyfold
from wyfold.cli import main as wyfold_main
from wyfold.cli import trainer
from wyfold.runtime import bound, recall
from wyfold.runtime.course import Course

EVENTS = 3
SETTINGS = [(width, seed, rate) for seed in range(8) for width, rate in ((64, 0.005), (128, 0.003))]


# --- training --------------------------------------------------------------------------------------------------------


class Counts:
    """What is not finite after each launch of a backward, counted on the device."""

    def __init__(self):
        self.found: list[tuple[str, str, Tensor]] = []

    def count(self, kernel: str, tensors: dict[str, Tensor]) -> None:
        for name, x in tensors.items():
            x = x.detach()
            x = x.view(torch.float32) if x.dtype == torch.uint8 else x
            if x.is_floating_point() and x.numel():
                wrong = x.isfinite().logical_not_().flatten()
                about = f"{name} {str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
                self.found.append((kernel, about, torch.stack([wrong.sum(), wrong.to(torch.uint8).argmax()])))

    def said(self) -> list[str]:
        """One line for each tensor that has such numbers, in the order of the launches."""
        numbers = torch.stack([x for _, _, x in self.found]).tolist() if self.found else []
        return [
            f"after {kernel}: {about}: {count}, first at {first}"
            for (kernel, about, _), (count, first) in zip(self.found, numbers)
            if count
        ]


counts = Counts()


class Look(NamedTuple):
    """A step of a course that counts what its launches have left so far; the first tensors were given."""

    kernel: str
    given: int

    def again(self, stream: Any, tensors: list[Any], addresses: list[int]) -> None:
        made = {f"made {n}": x for n, x in enumerate(tensors) if n >= self.given and isinstance(x, Tensor)}
        counts.count(self.kernel, made)


def watched_take(self: Course, given: tuple[Any, ...], addresses: list[int]) -> Any:
    """`Course.take`, a look after every launch of a backward."""
    names = [kernel.fn.__name__ for kernel in self.kernels]
    if not any("gradients" in name for name in names):
        return TAKE(self, given, addresses)
    counts.count("nothing yet", {f"given {n}": x for n, x in enumerate(given) if isinstance(x, Tensor)})
    steps, launches = [], iter(names)
    for step in self.steps:
        steps += [step, Look(next(launches), len(given))] if isinstance(step, bound.Launch) else [step]
    return TAKE(self._replace(steps=tuple(steps)), given, addresses)


TAKE = Course.take


def spoilt(model: nn.Module) -> dict[str, int]:
    """How many numbers of each parameter's gradient are not finite."""
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = torch.stack([x.isfinite().logical_not().sum() for x in grads.values()]).tolist()
    return {name: n for name, n in zip(grads, found) if n}


def train(width: int, seed: int, rate: float, seconds: float) -> None:
    """Steps as the trainer takes them, but looked at one by one."""
    began, events, who = time.time(), 0, f"{width}-{seed}"

    def gradients(self, batch) -> tuple[float, dict[str, int]]:
        counts.found.clear()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(batch)
        self.team.backward(loss)
        return float(loss), spoilt(self.model)

    def take_step(self):
        nonlocal events
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate(self.step, self.progress())
        batch = self._batch(self.step)
        loss, wrong = gradients(self, batch)
        if wrong:
            events += 1
            print(f"{who} step {self.step}, loss {loss}: {wrong}", *counts.said(), sep=f"\n{who}    ", flush=True)
            for how in ("recalled", "recalled", "recalled", "not recalled", "not recalled"):
                recall.DEVICES = frozenset(("cuda",)) if how == "recalled" else frozenset()
                loss, again = gradients(self, batch)
                print(f"{who} again, {how}, loss {loss}: {again}", *(counts.said() if again else ()), flush=True)
            recall.DEVICES = frozenset(("cuda",))
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
            self.optimizer.step()
        self.step += 1
        if events == EVENTS or time.time() - began > seconds:
            print(f"{who} ends at step {self.step}, {events} times", flush=True)
            os._exit(0)

    Course.take, trainer.Trainer._take_step, trainer.Trainer._show = watched_take, take_step, lambda *_: None
    with tempfile.TemporaryDirectory() as folder:
        words = f"--layers kda --width {width} --heads 2 --seed {seed} --lr {rate} --dtype bfloat16"
        words += f" --save-every 1000000 --device cuda --out {folder}"
        wyfold_main(["train", "--task", "mqar", *words.split()])


# --- the operator ----------------------------------------------------------------------------------------------------


def operator(seed: int, seconds: float) -> None:
    """Whether the operator repeats itself."""
    B, T, H, K = 64, 512, 2, 128
    draw = torch.Generator("cuda").manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, device="cuda", generator=draw)
    qkv = make(B, T, 3 * H * K).bfloat16().requires_grad_()
    g, beta = make(B, T, H, K).bfloat16().requires_grad_(), make(B, T, H).bfloat16().requires_grad_()
    A_log = torch.full((H,), 2.5, device="cuda").requires_grad_()
    dt_bias = (make(H, K) - 2.2).requires_grad_()
    do = make(B, T, H, K).bfloat16() * 1e-5
    do *= torch.rand(B, T, 1, 1, device="cuda", generator=draw) < 0.125
    leaves, sink = [qkv, g, beta, A_log, dt_bias], shared_memory.sink(qkv.device)
    first, turns, events, end = None, 0, 0, time.time() + seconds
    while time.time() < end:
        q, k, v = (x.unflatten(-1, (H, K)) for x in qkv.split(H * K, dim=-1))
        inside = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
        shared_memory.fill(sink, shared_memory.NANS)
        o = wyfold.chunk_kda(q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, **inside)[0]
        shared_memory.fill(sink, shared_memory.NANS)
        found = [o.detach(), *torch.autograd.grad(o, leaves, do)]
        if first is None:
            first = [x.clone() for x in found]
        apart = torch.stack([(x != y).sum() for x, y in zip(found, first, strict=True)]).tolist()
        events += any(apart)
        if any(apart) and events < 4:
            print(f"operator {seed} turn {turns}: apart in o, qkv, g, beta, A_log, dt_bias: {apart}", flush=True)
        turns += 1
    print(f"operator {seed}: {turns} turns, {events} times apart", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=("train", "operator"))
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each process")
    parser.add_argument("--out", type=Path, required=True, help="folder of a text for each process")
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)  # how this program asks for one process
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    if args.number is None:
        args.out.mkdir(parents=True, exist_ok=True)
        files = [(args.out / f"{args.part}-{n}.txt").open("w") for n in range(args.processes)]
        running = [
            subprocess.Popen([sys.executable, *sys.argv, "--number", str(n)], stdout=file, stderr=subprocess.STDOUT)
            for n, file in enumerate(files)
        ]
        failed = [process.wait() for process in running]
        for file in files:
            print(Path(file.name).read_text())
        sys.exit(any(failed))
    elif args.part == "train":
        train(*SETTINGS[args.number % len(SETTINGS)], args.seconds)
    else:
        operator(args.number, args.seconds)


if __name__ == "__main__":
    main()
