"""Known tasks on one GPU, several runs at a time: `python tools/proofs/tasks.py --out DIR [--commit HASH]`.

| task | what must be shown | of |
|---|---|---|
| mqar | more than 99 % of the answers: rows of 512, 64 pairs, vocabulary 8192 | each layer, models 64, 128, 256 wide |
| parity, s5 | beyond the training length: with eigenvalues in [-1, 1] yes, in [0, 1] no | each layer, both ranges |
| mqar, parity, s5 | nothing: what they learn is listed | GLA and RWKV-7 as published |
| s_niah | learned | GDN |
| ttt | each loss of 200 steps on the default text: within 2 % between GPU and CPU | TTT-Linear |

Each run is a `wyfold train` process with a separate folder below --runs. A single small model leaves the GPU waiting
for the host, so --workers runs share it. A run that exceeds its seconds is interrupted as by Ctrl-C, which saves its
state, and so is every run at the end of the budget. Repeating the command continues them, and keeps finished ones. A
run of recall that has not begun to learn after PATIENCE steps is replaced by the cell's next settings, and idle workers
try those in parallel. All runs of a cell stop when one of them has reached the goal. DIR/tasks.json lists everything
that was tried, and is rewritten every few seconds. The table comes last; `--table FILE.json` prints that of
docs/tasks.md from a stored file.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

LAYERS = ("delta_net", "gated_delta_net", "kda")
FURTHER = {
    "mqar": ("gla --gla-conv", "gated_delta_net2"),
    "parity": ("gated_delta_product", "rwkv7"),
    "s5": ("gated_delta_product", "rwkv7"),
}
"""Further layers of a task. Of recall with 128 channels only. Of RWKV-7 the published range stands in the place of
[0, 1].
"""
PUBLISHED = {"mqar": ("gla",), "parity": ("rwkv7",), "s5": ("rwkv7", "rwkv7 --depth 4")}
"""Layers as published, whose results are listed without a goal: GLA without a convolution, RWKV-7 with eigenvalues from
-0.46.
"""
TASKS = ("mqar", "parity", "s5", "s_niah", "ttt")

LEARNED, BEYOND = 0.99, 0.9
"""Required share of correct answers: at the training length, and at twice to four times that length."""
BEGUN = 0.05
"""Share of correct answers above which a run has begun to learn and is continued, instead of trying other settings."""
PATIENCE = 2000
"""Steps after which a run that has not begun to learn is given up. With a curriculum, every run that learned recall had
begun by then (docs/tasks.md: by 1,000).
"""
ENDING = 25
"""Seconds of the budget that interrupted runs need to save their state."""

Row = dict[str, Any]


@dataclass
class Run:
    """One `wyfold train`.

    Args:
        name: Name of its folder.
        words: Arguments of the command, without folder and device.
        seconds: Seconds after which it is interrupted.
        device: Device of the run; None: the default of all runs.
        begun, spent: Time of its last start, and its seconds until then.
        cut: Whether it was interrupted.
    """

    name: str
    words: str
    seconds: float
    device: str | None = None
    begun: float = 0.0
    spent: float = 0.0
    process: subprocess.Popen[bytes] | None = None
    log: IO[bytes] | None = None
    cut: bool = False

    def start(self, folder: Path, device: str) -> None:
        where = folder / self.name
        folder.mkdir(parents=True, exist_ok=True)
        threads = "4" if self.device == "cpu" else "1"  # a process on the GPU uses one CPU thread
        command = [sys.executable, "-m", "wyfold", "train", *shlex.split(self.words)]
        command += ["--device", self.device or device, "--out", str(where)]
        self.log = self._output(folder).open("ab")
        environment = {**os.environ, "OMP_NUM_THREADS": threads}
        self.begun, self.cut = time.monotonic(), False
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT, env=environment)

    def _output(self, folder: Path) -> Path:
        """File of what it prints, beside its folder: `wyfold train` refuses a new run's folder that is not empty."""
        return folder / f"{self.name}.log"

    def stop(self) -> None:
        """Interrupt it; it finishes its step and saves."""
        if self.process is not None and self.process.poll() is None and not self.cut:
            self.process.send_signal(signal.SIGINT)
            self.cut = True

    def close(self) -> None:
        """Record that its process has ended."""
        self.spent, self.begun = self.now, 0.0
        if self.log is not None:
            self.log.close()

    @property
    def over(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    @property
    def now(self) -> float:
        """Seconds that it has run so far."""
        return self.spent + (time.monotonic() - self.begun if self.begun else 0.0)

    def found(self, folder: Path) -> Row:
        """Its results so far."""
        where = folder / self.name
        history = _history(where / "metrics.jsonl")
        looks = [entry for entry in history if "accuracy" in entry]
        losses = [entry["loss"] for entry in history if "loss" in entry]
        result = where / "result.json"
        row: Row = {
            "words": self.words,
            "seconds": round(self.now, 1),
            "cut": self.cut,
            "step": history[-1]["step"] if history else 0,
            "loss": round(sum(losses[-20:]) / len(losses[-20:]), 4) if losses else None,
            "accuracy": looks[-1]["accuracy"] if looks else None,
            "curve": [[entry["step"], round(entry["accuracy"], 4)] for entry in looks],
        }
        if result.exists():
            row["result"] = json.loads(result.read_text())
        elif self.over and not self.cut and self.process is not None and self.process.returncode:
            row["refused"] = self._output(folder).read_text(errors="replace")[-800:]
        return row


@dataclass
class Cell:
    """One goal, and the runs that may reach it; the next run starts only if those before did not.

    Args:
        name: Name of the cell.
        task: The task that is learned.
        tries: Runs, likeliest first.
        together: Whether all of the runs are needed for the goal.
        required: Whether there is a goal. Without one every run is finished.
        taken: Number of runs that were started.
    """

    name: str
    task: str
    tries: list[Run]
    together: bool = False
    required: bool = True
    taken: int = field(default=0)

    def rows(self, folder: Path) -> list[Row]:
        return [run.found(folder) for run in self.tries[: self.taken]]

    def verdict(self, folder: Path) -> tuple[bool | None, str]:
        """Whether the goal is reached (None: open), and a description."""
        rows = self.rows(folder)
        if self.task == "ttt":
            return compared(*(folder / run.name / "metrics.jsonl" for run in self.tries))
        best = max(rows, key=lambda row: row["accuracy"] or 0.0, default=None)
        if best is None or best["accuracy"] is None:
            return None, "nothing yet"
        at, own = best.get("result", {}).get("accuracy_at", {}), best["accuracy"]
        said = f"{own:.2%}" + "".join(f", {part:.2%} at {length}" for length, part in list(at.items())[1:])
        if not self.required:
            return (True if all("result" in row for row in rows) else None), said
        if self.task in ("mqar", "s_niah"):
            return (True if own > LEARNED else None if "result" not in best else False), said
        if "result" not in best:
            return None, said
        further = list(at.values())[1]
        if "--neg-eigval" in best["words"]:
            return own > LEARNED and further > BEYOND, said
        return further < BEYOND, said


SETTINGS = {
    "mqar": "--dtype bfloat16 --save-every 1000",
    "parity": "--steps 800",
    "s5": "--steps 3000",
    "s_niah": "--dtype bfloat16 --layers gated_delta_net",
    "ttt": "--layers ttt_linear --steps 200 --seed 0",
}
"""Differences from the task's own settings (`wyfold train`, src/wyfold/cli/train/settings.py)."""

SMALL = {
    "mqar": "--batch 4 --length 64 --pairs 8 --vocabulary 64 --steps 20 --eval-every 10 --eval-bytes 512 --head-dim 16 "
    "--curriculum 9",
    "parity": "--batch 4 --steps 20 --eval-every 10 --eval-bytes 512",
    "s5": "--batch 4 --steps 20 --eval-every 10 --eval-bytes 512",
    "s_niah": "--layers gated_delta_net --steps 20 --length 64 --batch 4 --eval-lengths 128 --eval-bytes 512",
    "ttt": "--layers ttt_linear --steps 20 --width 16 --depth 1 --heads 1 --head-dim 8 --batch 2 --length 32 "
    "--eval-bytes 64",
}

HEADS = {"gated_delta_net": 4}
"""Number of heads for associative recall, if it is not 2, with 128 channels each.

Each GDN head has one decay rate, set at initialisation. Most heads decay a key long before it is queried, so GDN gets
more heads. KDA has a rate per channel, and DeltaNet does not decay.
"""

OWN_STEPS = {("parity", "rwkv7"): "--steps 4000", ("s5", "rwkv7 --depth 4"): "--steps 1500"}
"""Words of a task's runs with these layers: of 800 steps, RWKV-7 begins to learn parity in the last 400."""

RATES = {"mqar": (2e-3, 3e-3, 1e-3, 1.5e-3, 7e-4), "parity": (3e-3, 5e-3), "s5": (5e-3, 3e-3)}
"""Learning rates of the tries in order; each try has another seed, from 0."""


def cells(only: list[str], small: bool) -> list[Cell]:
    """The table, longest runs first. Of mqar the middle width comes first, so that an early end leaves some of each."""
    words = SMALL if small else SETTINGS
    made = []
    if "ttt" in only:
        runs = [Run("ttt-device", words["ttt"], 240), Run("ttt-cpu", words["ttt"], 400, "cpu")]
        made.append(Cell("ttt", "ttt", runs, together=True))
    for width in (128, 64, 256) if "mqar" in only else ():
        for layers in (*LAYERS, *(FURTHER["mqar"] if width == 128 else ())):
            made.append(Cell(f"mqar {layers} {width}", "mqar", _tries("mqar", layers, width, words["mqar"])))
    if "s_niah" in only:
        made.append(Cell("s_niah gated_delta_net", "s_niah", [Run("s_niah", f"--task s_niah {words['s_niah']}", 240)]))
    own_steps = {} if small else OWN_STEPS
    for task in ("s5", "parity"):
        for layers in (*LAYERS, *FURTHER[task]) if task in only else ():
            own = own_steps.get((task, layers), words[task])
            made.append(Cell(f"{task} {layers} [-1, 1]", task, _tries(task, f"{layers} --neg-eigval", None, own)))
            if layers not in PUBLISHED[task]:
                runs = _tries(task, layers, None, words[task])[:1]
                made.append(Cell(f"{task} {layers} [0, 1]", task, runs))
    for task, several in PUBLISHED.items():
        for layers in several if task in only else ():
            own = own_steps.get((task, layers), words[task])
            runs = _tries(task, layers, 128 if task == "mqar" else None, own)[:2]
            made.append(Cell(f"{task} {layers} as published", task, runs, required=False))
    return made


def _tries(task: str, layers: str, width: int | None, words: str) -> list[Run]:
    """Runs with each of the learning rates.

    Args:
        task, words: Of the command.
        layers: Layers, perhaps with further options.
        width: Channels of the model. None: the task's.
    """
    name = layers.replace(" --", "-").replace(" ", "-") + (f"-{width}" if width else "")
    size = f" --width {width} --heads {HEADS.get(layers, 2)}" if width else ""
    return [
        Run(
            f"{task}-{name}-{seed}",
            f"--task {task} --layers {layers}{size} --seed {seed} --lr {rate} {words}",
            600 if task == "mqar" else 400,
        )
        for seed, rate in enumerate(RATES[task])
    ]


def compared(mine: Path, theirs: Path) -> tuple[bool | None, str]:
    """Compare the losses of two runs step by step."""
    left, right = ({e["step"]: e["loss"] for e in _history(file) if "loss" in e} for file in (mine, theirs))
    steps = sorted(left.keys() & right.keys())
    if not steps:
        return None, "nothing yet"
    worst = max(abs(left[step] - right[step]) / right[step] for step in steps)
    said = f"{worst:.4%} apart at most over {len(steps)} steps, {left[steps[-1]]:.4f} nats at the last"
    return (worst < 0.02 if len(steps) == 200 else None), said  # the goal needs all 200 steps


def _history(file: Path) -> list[Row]:
    entries = []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:  # a line that is being written
            break
    return entries


def finished(run: Run, folder: Path) -> bool:
    """Whether an earlier invocation has completed the run."""
    if (folder / run.name / "result.json").exists():
        return True
    losses = [entry for entry in _history(folder / run.name / "metrics.jsonl") if "loss" in entry]
    return run.name.startswith("ttt") and len(losses) == 200  # training on a text writes no result.json


def work(table: list[Cell], args: argparse.Namespace, until: float, keep: Any) -> None:
    """Run in parallel until every goal is reached or the time is over."""
    running: list[tuple[Cell, Run]] = []
    told = 0.0

    def next_run() -> tuple[Cell, Run] | None:
        busy = {id(cell) for cell, _ in running}
        # First cells without a run, in order; then further runs of open cells.
        for cell in sorted(table, key=lambda cell: 0 if cell.together else cell.taken):
            alone = cell.task != "mqar" and id(cell) in busy
            if cell.taken and not cell.together and (alone or cell.verdict(args.runs)[0]):
                continue
            for run in cell.tries[: cell.taken]:
                resting = run.cut and (cell, run) not in running and not finished(run, args.runs)
                if resting and (run.found(args.runs)["accuracy"] or 0.0) > BEGUN:
                    return cell, run  # runs that have begun to learn continue
            if cell.taken < len(cell.tries):
                cell.taken += 1
                return cell, cell.tries[cell.taken - 1]
        return None

    def hopeless(cell: Cell, run: Run) -> bool:
        """Whether the run's cell is decided, or the run is unlikely to learn."""
        found = run.found(args.runs)
        late = found["step"] > PATIENCE and (found["accuracy"] or 0.0) < BEGUN
        return cell.task == "mqar" and cell.required and (late or bool(cell.verdict(args.runs)[0]))

    while True:
        now = time.monotonic()
        for pair in list(running):
            run = pair[1]
            if run.over:
                running.remove(pair)
                run.close()
            elif now - run.begun > run.seconds or now > until:
                run.stop()
        while len(running) < args.workers and time.monotonic() < until - 40:
            chosen = next_run()
            if chosen is None:
                break
            if not finished(chosen[1], args.runs):
                chosen[1].start(args.runs, args.device)
                running.append(chosen)
        if now - told > 5:
            told = now
            keep()
            for cell, run in running:
                if hopeless(cell, run):
                    run.stop()
        if not running:
            return
        if now > until + ENDING - 8:
            for _, run in running:
                if run.process is not None:
                    run.process.kill()
        time.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder of tasks.json")
    parser.add_argument("--commit", help="what is being run, for the record")
    parser.add_argument("--budget", type=float, default=540, help="seconds (default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--cells", nargs="+", default=[""], metavar="WORD", help="of the table, by their names")
    parser.add_argument("--workers", type=int, default=10, help="runs at a time (default: %(default)s)")
    parser.add_argument("--runs", type=Path, default=Path("runs", "proof"), help="their folder (default: %(default)s)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="shapes that only show that the program runs")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of a stored file, run nothing")
    args = parser.parse_args()
    if args.table is not None:
        print(markdown(json.loads(args.table.read_text())))
        return 0
    if args.out is None:
        parser.error("--out is needed")

    begun = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    table = [cell for cell in cells(args.only, args.small) if any(words in cell.name for words in args.cells)]
    record: Row = {"kind": "tasks-side-by-side", "commit": args.commit, "workers": args.workers, "device": args.device}

    def keep() -> None:
        record["seconds"] = round(time.monotonic() - begun, 1)
        record["cells"] = {}
        for cell in table:
            shown, said = cell.verdict(args.runs) if cell.taken else (None, "not begun")
            tries = {run.name: run.found(args.runs) for run in cell.tries[: cell.taken]}
            record["cells"][cell.name] = {"shown": shown, "said": said, "tries": tries}
        unfinished = args.out / ".tasks.json"
        unfinished.write_text(json.dumps(record, indent=1))
        unfinished.replace(args.out / "tasks.json")

    work(table, args, begun + args.budget - ENDING, keep)
    keep()
    print(f"{record['seconds']:.0f} s, {args.workers} at a time on {args.device}\n")
    for name, cell in record["cells"].items():
        tries = [f"{row['step']} steps {row['seconds']:.0f} s{' cut' * row['cut']}" for row in cell["tries"].values()]
        mark = {True: "shown", False: "NOT", None: "open"}[cell["shown"]]
        print(f"{name:32} {mark:6} {cell['said']}  [{'; '.join(tries)}]")
        for row in cell["tries"].values():
            if "refused" in row:
                print(f"    {row['refused'].strip()[-300:]}")
    return int(not all(cell["shown"] for cell in record["cells"].values()))


def markdown(record: Row) -> str:
    """The table of docs/tasks.md: every run that ended or was interrupted."""
    lines = [
        "| task | layers | width, heads | eigenvalues | seed, learning rate | parameters | steps | seconds | right |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in record["cells"].values():
        for row in cell["tries"].values():
            if row["accuracy"] is None:
                continue
            result = row.get("result")
            conv = ", convolution" if "--gla-conv" in row["words"] else ""
            if result is None:
                words = dict(zip(row["words"].split(), row["words"].split()[1:], strict=False))
                size = f"{words.get('--width', '')}, {words.get('--heads', '')}"
                lines.append(
                    f"| {words['--task']} | {words.get('--layers', '')}{conv} | {size} | | {words['--seed']}, "
                    f"{words['--lr']} | | {row['step']:,}, cut | {row['seconds']:.0f} | {row['accuracy']:.2%} |"
                )
                continue
            recipe = result["recipe"]
            own = str(recipe["length"])
            at = {own: result["accuracy"]} | result.get("accuracy_at", {})
            right = ", ".join(f"{part:.2%} at {length}" for length, part in at.items())
            lowest = "-0.46" if recipe["layers"] == "rwkv7" else "0"
            sign = "[-1, 1]" if recipe["neg_eigval"] else f"[{lowest}, 1]"
            size = f"{recipe['width']}, {recipe['heads']} x {recipe['head_dim']}"
            lines.append(
                f"| {recipe['task']} | {recipe['layers']} x {recipe['depth']}{conv} | {size} | {sign} | "
                f"{recipe['seed']}, {recipe['lr']:g} | {result['parameters']:,} | {result['step']:,} | "
                f"{result['seconds']:.0f} | {right} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
