"""One training run on one GPU and over the GPUs of a host: losses, tokens per second, MFU, memory.

    PYTHONPATH=src:. python tools/proofs/training.py --commit HASH --out DIR [--steps N]

A hybrid of 420 million parameters reads the Python sources of the installed packages as bytes:

    rows of 65,536, shared by 1, 2 and 4 GPUs (`wyfold train --cp`)      equal batches, so losses must agree
    rows of 65,536, separate ones on each of 4 GPUs                      four times as many tokens in a step
    rows of 262,144, shared by 1 and 4 GPUs, with --recompute blocks     as many tokens on a rank as in a usual row

Every figure is what `wyfold train` itself reports; the first steps, in which kernels are compiled, are left out of the
medians. Without GPUs everything is tiny and over gloo, which only tests this file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from ledger import LOG_LINES, Ledger, add_arguments

CARDS = torch.cuda.device_count()
TINY = CARDS == 0
BYTES = 1 << 18 if TINY else 48 << 20
"""Bytes of text; a text of at least 30 MB is not read twice in a run."""
LENGTH, STEPS, WARM = (64, 6, 2) if TINY else (65536, 200, 20)
LONG = 4 * LENGTH
"""Bytes of a long row, at which a rank of four has as many tokens as one GPU has of a usual row."""
MODEL = {"layers": "gdn*3 attention", "depth": 20, "width": 1280, "heads": 10, "head-dim": 128, "window": 2048}
MODEL |= {"depth": 4, "width": 32, "heads": 2, "head-dim": 16, "window": 16} if TINY else {}
PART, TEXT = "training", "sources.txt"
APART = 0.005
"""Largest relative difference of two runs' losses at the end, each a mean of twenty steps."""
EFFICIENCY = 0.85
"""Least scaling efficiency of a step: throughput relative to one GPU's, divided by the number of GPUs."""


def gather_text(file: Path) -> int:
    """Write Python sources of the installed packages into one file; return its size."""
    written = 0
    with file.open("wb") as stream:
        for source in sorted(Path(sysconfig.get_path("purelib")).rglob("*.py")):
            content = source.read_bytes()
            if b"\0" not in content and written < BYTES:
                written += stream.write(content)
    return written


class Training:
    """One process tree of `wyfold train`, whose output goes to a file.

    Args:
        folder: Folder of all runs, with the text.
        gpus: Numbers of its GPUs.
        cp: Ranks that share a row.
        steps: Steps of the run.
        length: Bytes of a row.
    """

    def __init__(self, folder: Path, gpus: Sequence[int], cp: int, steps: int, length: int = LENGTH):
        self.gpus, self.cp, self.folder, self.length, self.steps = gpus, cp, folder, length, steps
        self.name = f"{len(gpus)} GPUs, --cp {cp}, {length}" if len(gpus) > 1 else f"1 GPU, {length}"
        self.out, self.log = folder / self.name, folder / f"{self.name}.log"
        words = ["-m", "wyfold", "train", "--data", str(folder / TEXT), "--out", str(self.out), "--cp", str(cp)]
        words += ["--steps", str(steps), "--length", str(length), "--batch", "1", "--lr", "0.0005", "--warmup", "40"]
        words += ["--eval-every", str(max(1, steps // 2)), "--eval-bytes", str(8 * length), "--save-every", str(steps)]
        words += [word for option, value in MODEL.items() for word in (f"--{option}", str(value))]
        words += ["--recompute", "blocks"] if length == LONG else []
        words += [] if TINY else ["--device", "cuda", "--dtype", "bfloat16"]
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={len(gpus)}"]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "OMP_NUM_THREADS": "4"}
        self.command = [*(launcher if len(gpus) > 1 else []), *words]
        with self.log.open("wb") as stream:
            self.process = subprocess.Popen(
                [sys.executable, *self.command], env=environment, stdout=stream, stderr=subprocess.STDOUT
            )

    def result(self, limit_s: float) -> dict[str, Any]:
        """Wait for the end of the run; return its losses and medians."""
        try:
            code = self.process.wait(max(1.0, limit_s))
        except subprocess.TimeoutExpired:
            self.process.terminate()
            code = self.process.wait()
        lines = self.log.read_text(errors="replace").splitlines()
        if code:
            return {"error": f"ended with {code}", "tail": lines[-LOG_LINES:]}
        history = [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]
        steps = [entry for entry in history if "loss" in entry]
        warm = steps[min(WARM, self.steps // 3) :]
        found: dict[str, Any] = {
            "command": " ".join(["wyfold", *self.command[self.command.index("wyfold") + 1 :]]).replace(
                f"{self.folder}/", ""
            ),
            "losses": [entry["loss"] for entry in steps],
            "validation": [value for entry in history for key, value in entry.items() if key.startswith("validation")],
            "tokens_per_second": statistics.median(entry["tokens_per_second"] for entry in warm),
            "said": [line for line in lines if line.startswith(("model:", "memory:", "speed:", "time:", "please"))],
        }
        return found | ({"mfu": statistics.median(entry["mfu"] for entry in warm)} if "mfu" in steps[0] else {})


def compare(ledger: Ledger, rows: dict[str, dict[str, Any]], many: Training) -> None:
    """Add a row about a run on several GPUs relative to that on one."""
    alone, found = rows[f"1 GPU, {many.length}"], rows[many.name]
    if "error" in alone or "error" in found:
        return
    efficiency = found["tokens_per_second"] / alone["tokens_per_second"] / len(many.gpus)
    figures: dict[str, Any] = {"efficiency": efficiency}
    per_rank = many.length // many.cp
    held = (
        TINY or per_rank < LENGTH or efficiency >= EFFICIENCY
    )  # below, the host launches more slowly than the GPU runs
    if many.cp == len(many.gpus):  # equal batches
        ends = [statistics.mean(side["losses"][-20:]) for side in (found, alone)]
        figures |= {"losses_apart": abs(ends[0] / ends[1] - 1)}
        figures["validation_apart"] = abs(found["validation"][-1] / alone["validation"][-1] - 1)
        held = held and max(figures["losses_apart"], figures["validation_apart"]) <= APART
    ledger.add(PART, f"{many.name}, relative to one", held, **figures)


def waves(most: int, steps: int) -> list[list[tuple[Any, ...]]]:
    """Settings of the runs: those of one wave run side by side, on GPUs that they do not share."""
    few, every = max(3, steps // 16), range(most)
    if most < 4:
        return [[([0], 1, steps), (every, most, steps)]]
    return [
        [([0], 1, steps), ([1, 2], 2, steps), ([3], 1, few, LONG)],
        [(every, 4, steps)],
        [(every, 1, steps // 6)],
        [(every, 4, few, LONG)],
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_arguments(parser, budget=400)
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each run (default: %(default)s)")
    args = parser.parse_args()
    ledger = Ledger("training", args)
    most = 2 if TINY else min(CARDS, 4)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        folder, rows = Path(name), dict[str, dict[str, Any]]()
        ledger.record["text_bytes"] = gather_text(folder / TEXT)
        for wave in waves(most, args.steps):
            runs = [Training(folder, *settings) for settings in wave]
            for run in runs:
                rows[run.name] = run.result(ledger.left)
                ledger.add(PART, run.name, "error" not in rows[run.name], **rows[run.name])
                shutil.rmtree(run.out, ignore_errors=True)
            for run in runs:
                if len(run.gpus) > 1:
                    compare(ledger, rows, run)
    return ledger.close()


if __name__ == "__main__":
    sys.exit(main())
