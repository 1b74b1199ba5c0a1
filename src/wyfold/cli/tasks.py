"""Train every layer on every known task, and print one table of results.

Each run is a `wyfold train --task` with the task's settings, in a separate
folder below --out. The table has the command of each run. The same command
continues an interrupted table: finished runs are kept, an interrupted run is
continued. parity and s5 run with and without negative eigenvalues, which they
need. The table is also written as JSON, with machine, versions and commit of
every run.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from wyfold.cli import DONE, UsageError, records, results, say, train
from wyfold.cli.arguments import add_backend, device, found_device, gate_bound, seed_number
from wyfold.cli.train import rundir
from wyfold.cli.train.integrity import DamagedError
from wyfold.cli.train.recipe import DELTA_LAYERS
from wyfold.cli.train.settings import TASKS
from wyfold.runtime import pattern

LAYERS = ("delta_net", "gated_delta_net", "kda")
STATE_TRACKING = ("parity", "s5")
TABLE = "tasks.json"


@dataclass(frozen=True)
class Cell:
    """One run of the table.

    Args:
        task, layers: Options of `wyfold train`.
        neg_eigval: Whether negative eigenvalues are allowed.
        seed: Seed of the run.
        further: Further words of the command.
    """

    task: str
    layers: str
    neg_eigval: bool
    seed: int
    further: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        sign = "-neg" if self.neg_eigval else ""
        options = "".join(self.further).replace("--", "-").replace("/", "_")
        return f"{self.task}-{self.layers.replace(' ', '+').replace('*', 'x')}{sign}{options}-seed{self.seed}"

    def words(self) -> list[str]:
        """Options of the command, without device, backend and output folder."""
        sign = ["--neg-eigval"] if self.neg_eigval else []
        return ["--task", self.task, "--layers", self.layers, *sign, "--seed", str(self.seed), *self.further]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wyfold tasks`."""
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs", "tasks"),
        metavar="DIR",
        help="folder of the runs and the table (default: %(default)s)",
    )
    parser.add_argument(
        "--task", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help="only these tasks (default: all)"
    )
    parser.add_argument(
        "--layers",
        nargs="+",
        default=list(LAYERS),
        metavar="PATTERN",
        help=f"patterns (default: {', '.join(LAYERS)})",
    )
    parser.add_argument(
        "--kda-lower-bound",
        type=gate_bound,
        metavar="X",
        help="--kda-lower-bound of `wyfold train`, for models with kda layers",
    )
    parser.add_argument("--seed", nargs="+", type=seed_number, default=[0], help="seeds of the runs (default: 0)")
    parser.add_argument("--device", type=device, default="cpu", help="PyTorch device (default: %(default)s)")
    add_backend(parser)
    parser.add_argument(
        "--train",
        default="",
        metavar="OPTIONS",
        help='further options of every `wyfold train`, as one argument, such as --train="--width 256 --heads 4"',
    )


def run(args: argparse.Namespace) -> int:
    """Run all cells in turn. Returns 0 if all are finished, 130 if one was interrupted."""
    results.ready(args.out)
    if args.kda_lower_bound is not None and not any("kda" in layers for layers in args.layers):
        raise UsageError(f"--kda-lower-bound: there is no kda layer in --layers {shlex.join(args.layers)}")
    args.device = found_device(args.device)
    try:
        cells = list(_cells(args))
    except ValueError as error:
        raise UsageError(f"--train: {error}") from error
    for cell in cells:
        # Refuse invalid options of any cell before the first one is trained.
        train.check_run(_parsed([*cell.words(), "--out", str(args.out / cell.name)]))
    where = ["--device", str(args.device), *(["--backend", args.backend] if args.backend else [])]
    runs = []
    for number, cell in enumerate(cells, 1):
        folder = args.out / cell.name
        words = [*cell.words(), *where, "--out", str(folder)]
        say(f"\n[{number}/{len(cells)}] wyfold train {shlex.join(words)}", flush=True)
        code = train.run(_parsed(words))
        if code != DONE:
            return code
        runs.append(_result(folder / rundir.RESULT))
        # After every run, so that an interruption leaves a table of the finished runs.
        results.write(args.out, TABLE, {"kind": "tasks", **_provenance(args), "runs": runs})
    results.show(
        "known tasks, answers on held-out rows that are right", COLUMNS, [row(found) for found in runs], labels=4
    )
    say(f"\ntable: {args.out / TABLE}")
    return DONE


COLUMNS = ("task", "layers", "eigenvalues", "seed", "parameters", "steps", "seconds", "accuracy", "at other lengths")


def _result(file: Path) -> dict[str, Any]:
    """Read the result of a finished run."""
    try:
        return records.read(file, records.TaskResult)
    except DamagedError as damage:
        raise damage.advice("", "remove it, and the same command writes it again from the run's checkpoint") from damage


def row(found: dict[str, Any]) -> tuple[str, ...]:
    """Cells of the table for the result of a run."""
    recipe = found["recipe"]
    own, bound = str(recipe["length"]), recipe["kda_lower_bound"]
    gate = "" if bound is None else f", gate above {bound:g}"
    conv = ", convolution" if recipe["gla_conv"] else ""
    others = {length: part for length, part in found.get("accuracy_at", {}).items() if length != own}
    return (
        recipe["task"],
        f"{pattern.built(recipe['layers'], recipe['depth'])}; {recipe['width']}{gate}{conv}",
        "[-1, 1]" if recipe["neg_eigval"] else "[0, 1]",
        str(recipe["seed"]),
        f"{found['parameters']:,}",
        str(found["step"]),
        f"{found['seconds']:.0f}",
        f"{found['accuracy']:.2%} at {own}",
        ", ".join(f"{part:.2%} at {length}" for length, part in others.items()),
    )


def _cells(args: argparse.Namespace) -> Iterator[Cell]:
    for task in args.task:
        for layers in args.layers:
            signs = (True, False) if task in STATE_TRACKING and _has_delta_layer(layers) else (False,)
            for neg_eigval in signs:
                for seed in args.seed:
                    bound = _bound(args) if "kda" in layers else []
                    yield Cell(task, layers, neg_eigval, seed, (*bound, *shlex.split(args.train)))


def _has_delta_layer(layers: str) -> bool:
    """Whether a pattern has a layer with eigenvalues to choose. An invalid pattern counts: its run is refused."""
    try:
        return bool(set(DELTA_LAYERS) & set(pattern.parse(layers)))
    except ValueError:
        return True


def _bound(args: argparse.Namespace) -> list[str]:
    """Option of `wyfold train` that bounds the gate of kda layers; empty if it was not given."""
    return [] if args.kda_lower_bound is None else ["--kda-lower-bound", f"{args.kda_lower_bound:g}"]


def _parsed(words: list[str]) -> argparse.Namespace:
    """Parse options of `wyfold train`."""
    parser = _TrainOptionsParser(allow_abbrev=False, add_help=False)
    train.add_arguments(parser)
    return parser.parse_args(words)


class _TrainOptionsParser(argparse.ArgumentParser):
    """Argument parser that reports errors as errors of --train."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"--train: {message}")


def _provenance(args: argparse.Namespace) -> dict[str, Any]:
    words = [
        "--task",
        *args.task,
        "--layers",
        *args.layers,
        "--seed",
        *map(str, args.seed),
        "--device",
        args.device.type,
        *_bound(args),
    ]
    return results.provenance("tasks", [*words, *([f"--train={args.train}"] if args.train else [])])
