"""Runs every promise of serving on this machine: `python tools/proofs/serving.py --out DIR`.

Parts that compile run first, each in a separate process and many in parallel. Timed parts follow, one process at a time
on an otherwise idle GPU. Every part records its result after each promise and ends before its deadline. The result file
is rewritten with each new result, so an interrupted run keeps what it has found.

A line of the table PASSES if every one of its promises was tried and held, FAILS if one broke, and is SHORT if the
deadline came first. On a CPU the lines that capture graphs, detect synchronisation or measure time are not run; the
others are small.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tools.proofs import serving_compiled, serving_promises, serving_times
from tools.proofs.serving_paths import RULES, Case, conv_paths, paths, ttt_path
from tools.proofs.serving_promises import Promise

from wyfold.cli import results
from wyfold.cli.bench import timing
from wyfold.ops.doctor import versions

WANTED = {
    "bits": "split at every token, k of n, slots, poison, cuts at 64, every gate: all bitwise",
    "graphs": f"{serving_promises.PACKINGS} random packings replayed, bitwise",
    "sync": "no call waits for the device",
    "compile": "fullgraph, forward and backward, at most 2 compilations for 4 lengths, results near eager",
    "ttt": "ttt_decode as near as the chunk form, slots and poison bitwise",
    "bandwidth": "decode at 80 % of a copy of the states' bytes, batch 64 and 1024",
    "fla": "1.3 times as fast as fla's fused_recurrent",
    "context": "a token takes as long after 1M tokens as after 1k, within 5 %",
    "host": "at most 60 us of host time a call, medians",
    "generate": "`wyfold generate`: memory constant in length",
}
TIMED = ("bandwidth", "fla", "context", "host", "generate")
OF_A_CARD = ("graphs", "sync", "bandwidth", "fla", "host")
PASS, FAIL, SHORT, NOT_RUN = "PASS", "FAIL", "SHORT", "NOT RUN"

FIRST_SHARE = 0.56
"""Share of the budget for the parts that compile."""
TIMED_SHARES = {"bandwidth": 4, "context": 5, "host": 2, "generate": 4}
"""Shares of the remaining time for the timed parts; unused time goes to the others."""
MOST_WORKERS = min(20, 4 + (os.cpu_count() or 1))
GRACE = 4.0
"""Seconds that a part may exceed its deadline inside one promise before it is killed."""

WRITTEN_EVERY = 2.0
"""Seconds between two versions of the result while no part ends."""

Figures = dict[str, Any]
Promises = Callable[[float], Iterator[Promise]]
"""A function from the deadline to the promises of a part."""


@dataclass(frozen=True)
class Part:
    """The promises of one process.

    Attributes:
        lines: Lines of the table that its promises count for.
        promises: Function that makes the promises.
        figures: Numbers that are filled in by the promises.
    """

    lines: tuple[str, ...]
    promises: Promises
    figures: Figures = field(default_factory=dict)


def parts(device: torch.device, backend: str | None) -> dict[str, Part]:
    """Every part by name, slowest first."""
    on_card = device.type == "cuda"
    found: dict[str, Part] = {}
    for subject in reversed(serving_compiled.OPERATOR_SPECS):
        found[f"compile:{subject}:inductor"] = _compiling(subject, "inductor", device, backend)
    for width in (128, 64) if on_card else (16,):
        for rule in reversed(RULES):
            for v_first in (False, True):
                case = Case(rule, v_first, width, device, backend)
                found[case.title] = Part(("bits", "sync", "graphs"), _without_deadline(partial(_of_rule, case)))
    for subject in reversed(serving_compiled.OPERATOR_SPECS):
        found[f"compile:{subject}:aot_eager"] = _compiling(subject, "aot_eager", device, backend)
    if on_card:
        found["warm"] = Part(TIMED[:1], _without_deadline(partial(_precompile, device, backend)))
    for rule in RULES[1:]:
        case = Case(rule, True, 64 if on_card else 16, device, backend)
        found[f"gates:{rule}"] = Part(("bits",), _without_deadline(partial(serving_promises.gates, case)))
    for name, some in (("conv", _of_conv), ("ttt", _of_ttt), ("decoder", serving_promises.decoder)):
        lines = ("ttt", "sync", "graphs") if name == "ttt" else ("bits", "sync", "graphs")
        found[name] = Part(lines, _without_deadline(partial(some, device, backend, small=not on_card)))
    bandwidth: Figures = {}
    found["bandwidth"] = Part(
        ("bandwidth", "fla"), _without_deadline(partial(serving_times.bandwidth, device, backend, bandwidth)), bandwidth
    )
    context: Figures = {}
    longest = 2**20 if on_card else 8192
    found["context"] = Part(
        ("context",), _without_deadline(partial(serving_times.context, device, backend, context, longest)), context
    )
    host: Figures = {}
    found["host"] = Part(("host",), _without_deadline(partial(serving_times.host, device, backend, host)), host)
    generate: Figures = {}
    found["generate"] = Part(("generate",), partial(serving_times.generate, device, backend, generate), generate)
    return found


def _compiling(subject: str, compiler: str, device: torch.device, backend: str | None) -> Part:
    sizes = serving_compiled.Sizes() if device.type == "cuda" else serving_compiled.SMALL
    figures: Figures = {}
    make = partial(serving_compiled.compiled, subject, compiler, device, backend, sizes, figures)
    return Part(("compile",), _without_deadline(make), figures)


def _without_deadline(make: Callable[[], Iterator[Promise]]) -> Promises:
    return lambda until: make()


def _of_rule(case: Case) -> Iterator[Promise]:
    small = case.device.type != "cuda"
    yield from serving_promises.bits(case, small)
    yield from serving_promises.sync(paths(case), paths(case, rows=9, tokens=333))
    yield from serving_promises.graphs(paths(case))


def _of_conv(device: torch.device, backend: str | None, *, small: bool) -> Iterator[Promise]:
    yield from serving_promises.conv_bits(device, backend, T=20 if small else 70)
    yield from serving_promises.sync(conv_paths(device, backend), conv_paths(device, backend, rows=9, tokens=333))
    yield from serving_promises.graphs(conv_paths(device, backend))


def _of_ttt(device: torch.device, backend: str | None, *, small: bool) -> Iterator[Promise]:
    yield from serving_promises.ttt(device, backend, small)
    yield from serving_promises.sync(iter([ttt_path(device, backend)]), iter([ttt_path(device, backend, 9)]))
    yield from serving_promises.graphs(iter([ttt_path(device, backend)]))


def _precompile(device: torch.device, backend: str | None) -> Iterator[Promise]:
    """Compiles kernels in advance, so that none compiles while others are timed; makes no promise."""
    serving_times.warm(device, backend)
    yield from ()


# --- child: one part
# ---------------------------------------------------------------------------------------------------


def run_part(part: Part, lines: tuple[str, ...], file: Path | None, until: float) -> dict[str, Any]:
    """Try a part's promises one after another until its deadline, and record the results after each.

    Args:
        part: Name of the part.
        lines: Lines of the table to try; promises of other lines are skipped.
        file: Result file, rewritten after each promise; None writes nothing.
        until: Deadline in the seconds of `time.time`.
    """
    began = time.time()
    lines = tuple(line for line in lines if line in part.lines)
    found: dict[str, Any] = {
        "seconds": 0.0, "ended": False, "figures": part.figures,
        "lines": {line: {"planned": 0, "held": 0, "broken": []} for line in lines},
    }  # fmt: skip

    def keep() -> None:
        found["seconds"] = round(time.time() - began, 1)
        if file is not None:
            results.write(file.parent, file.name, found)

    promises = [promise for promise in part.promises(until) if promise.line in lines]
    for promise in promises:
        found["lines"][promise.line]["planned"] += 1
    keep()
    for promise in promises:
        if time.time() > until:
            break
        try:
            broken = promise.broken()
        except subprocess.TimeoutExpired:  # the deadline
            break
        except Exception as error:  # an error of one promise does not stop the others
            traceback.print_exc()
            broken = f"{type(error).__name__}: {error}"
        line = found["lines"][promise.line]
        line["held"] += not broken
        if broken:
            line["broken"].append(f"{promise.name}: {broken}"[:1500])
        keep()
    else:
        found["ended"] = True
        keep()
    return found


# --- parent: all parts
# -------------------------------------------------------------------------------------------------


class Run:
    """Parts as processes, and their results so far."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        self.args, self.folder = args, folder
        self.lines: tuple[str, ...] = args.only
        self.record: dict[str, Any] = {
            "what": "Promises of the serving operators, and what they cost",
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            **_machine(args.device),
            "versions": versions(),
            "commit": args.commit,
            "command": shlex.join(["python", *sys.argv]),
            "rows": [],
        }
        self.file = f"{self._stem()}.json"
        self.written = 0.0
        self.stopped: dict[str, str] = {}
        self.names: list[str] = []

    def _stem(self) -> str:
        machine = self.record["gpu"].split()[-1].lower() if "gpu" in self.record else "cpu"
        return f"{machine}-{self.record['date']}-serving-proofs"

    def go(self, names: list[str], until: float, workers: int) -> None:
        """Run parts, `workers` at a time; those past their deadline are killed."""
        waiting, running = list(names), {}
        self.names += names
        while waiting or running:
            while waiting and len(running) < workers and time.time() < until:
                name = waiting.pop(0)
                running[name] = self._start(name, until)
            if not running:
                break
            time.sleep(0.3)
            before = len(running)
            for name, process in list(running.items()):
                late = time.time() > until + GRACE
                if late and process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # including its children
                    process.wait()
                if process.poll() is not None:
                    del running[name]
                    self._ended(name, process.returncode, late)
            if len(running) < before or time.time() - self.written > WRITTEN_EVERY:
                self.write()
        for name in waiting:
            self.stopped[name] = "not begun: the clock had ended"
        self.write()

    def _start(self, name: str, until: float) -> subprocess.Popen[bytes]:
        command = [
            sys.executable, str(Path(__file__).resolve()), "--part", name, "--until", str(until), "--out",
            str(self.folder), "--only", ",".join(self.lines), "--device", str(self.args.device),
            *(["--backend", self.args.backend] if self.args.backend else []),
            *(["--peers", self.args.peers] if self.args.peers else []),
        ]  # fmt: skip
        # One thread for inductor: starting its worker pool takes longer than compiling a module of this size.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        with (self.folder / f"{_plain(name)}.said").open("wb") as said:
            return subprocess.Popen(
                command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True, env=environment
            )

    def _ended(self, name: str, status: int, late: bool) -> None:
        found = self._found(name)
        broken = found is not None and any(line["broken"] for line in found["lines"].values())
        if status or broken:
            said = (self.folder / f"{_plain(name)}.said").read_text(encoding="utf-8", errors="replace")
            why = "ended by its clock" if late else f"ended with {status}"
            self.stopped[name] = f"{why}; last words: {said[-1500:]}"
        figures = "" if found is None else f", {found['seconds']} s"
        results.say(f"{name}: {'late' if late else 'done'}{figures}")

    def _found(self, name: str) -> dict[str, Any] | None:
        file = self.folder / f"{_plain(name)}.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None

    def write(self) -> None:
        """Write the result so far."""
        seen = {name: self._found(name) for name in self.names}
        known = parts(self.args.device, self.args.backend)
        self.record["rows"] = [self._row(line, seen, known) for line in WANTED if line in self.args.asked]
        results.write(self.args.out, self.file, self.record)
        self.written = time.time()

    def _row(self, line: str, seen: dict[str, dict[str, Any] | None], known: dict[str, Part]) -> dict[str, Any]:
        if line not in self.lines:
            return {
                "line": line,
                "wanted": WANTED[line],
                "verdict": NOT_RUN,
                "figure": self.args.left_out[line],
                "parts": {},
            }
        own = {
            name: found for name, found in seen.items()
            if line in known[name].lines and name != "warm" and (found is None or line in found["lines"])
        }  # fmt: skip
        parts_of: dict[str, Any] = {}
        for name, found in own.items():
            parts_of[name] = {"seconds": 0.0, "ended": False, "planned": None, "held": 0, "broken": []}
            if found is not None:
                tried = found["lines"][line]
                done = len(tried["broken"]) + tried["held"] == tried["planned"]
                parts_of[name] = {"seconds": found["seconds"], "ended": done, **tried}
                if found["figures"]:
                    parts_of[name]["figures"] = found["figures"]
            if name in self.stopped and not (parts_of[name]["ended"] and not parts_of[name]["broken"]):
                parts_of[name]["said"] = self.stopped[name]
        counted = [part for part in parts_of.values() if part["planned"] is not None]
        planned, held = (sum(part[key] for part in counted) for key in ("planned", "held"))
        broken = [f"{name}: {text}" for name, part in parts_of.items() for text in part["broken"]]
        ended = sum(part["ended"] for part in parts_of.values())
        verdict = FAIL if broken else PASS if parts_of and ended == len(parts_of) and planned else SHORT
        slowest = max((part["seconds"] for part in parts_of.values()), default=0.0)
        figure = f"{held} of {planned} promises held, {ended} of {len(parts_of)} parts ended, slowest {slowest:.1f} s"
        if broken:
            figure += f"; BROKEN {len(broken)}: {'; '.join(broken[:3])[:400]}"
        figure += _short_figures(parts_of)
        return {"line": line, "wanted": WANTED[line], "verdict": verdict, "figure": figure, "parts": parts_of}

    def show(self) -> None:
        rows = [[row["line"], row["verdict"], row["figure"]] for row in self.record["rows"]]
        results.show(f"serving proofs, wrote {self.args.out / self.file}", ("line", "verdict", "figure"), rows)


def _short_figures(parts_of: dict[str, Any]) -> str:
    """The figures that are short enough for a table line."""
    short = {
        key: value for part in parts_of.values() for key, value in part.get("figures", {}).items()
        if key.startswith(("least", "long over")) or "prompts" in key or "MiB more" in key
    }  # fmt: skip
    return "".join(f"; {key}: {round(x, 3) if isinstance(x, float) else x}" for key, x in short.items())


def _plain(name: str) -> str:
    return name.replace("/", "-").replace(":", "-")


def _machine(device: torch.device) -> dict[str, str]:
    if device.type != "cuda":
        return {}
    card = timing.card()
    return {"gpu": card.get("name", "cuda"), "driver": card.get("driver_version", "")}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the result goes there, as JSON")
    parser.add_argument("--commit", default="", help="of the sources, for the result")
    parser.add_argument("--budget", type=float, default=260.0, help="seconds for all of it (default: %(default)s)")
    parser.add_argument("--only", default=",".join(WANTED), help="lines with commas (default: %(default)s)")
    parser.add_argument("--parts", default="", help="only these parts, by the beginnings of their names, with commas")
    parser.add_argument(
        "--workers",
        type=int,
        default=MOST_WORKERS,
        help="processes side by side (default: %(default)s)",
    )
    parser.add_argument("--peers", default="", metavar="PATH", help="a folder in which fla is found")
    parser.add_argument("--device", type=torch.device, help="default: a GPU if there is one")
    parser.add_argument("--backend", help="of every operator; default: the table's choice")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.device = args.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.asked = tuple(line for line in args.only.split(",") if line)
    if unknown := set(args.asked) - set(WANTED):
        parser.error(f"--only: unknown {', '.join(sorted(unknown))}; there are {', '.join(WANTED)}")
    on_card = args.device.type == "cuda"
    args.left_out = {} if on_card else dict.fromkeys(OF_A_CARD, "needs a GPU")
    if args.peers:
        sys.path.insert(0, args.peers)
    if on_card and importlib.util.find_spec("fla") is None:
        args.left_out["fla"] = "fla is not installed, nor in --peers"
    args.only = tuple(line for line in args.asked if line not in args.left_out)
    return args


def main() -> int:
    """Run one part or all of them; return 0 if every line that ran passed."""
    began, args = time.time(), _arguments()
    known = parts(args.device, args.backend)
    if args.part:
        run_part(known[args.part], args.only, args.out / f"{_plain(args.part)}.json", args.until)
        return 0
    if args.device.type != "cuda":
        results.say("no timings, graphs or watch on a CPU: lines of a card are not run")
    wanted = [name for name, part in known.items() if set(part.lines) & set(args.only)]
    if args.parts:
        wanted = [name for name in wanted if name.startswith(tuple(args.parts.split(",")))]
    timed = [name for name in wanted if set(known[name].lines) <= set(TIMED) and name != "warm"]
    first = [name for name in wanted if name not in timed]
    with tempfile.TemporaryDirectory() as folder:
        run = Run(args, Path(folder))
        end = began + args.budget - GRACE - 2
        if first:
            run.go(first, began + args.budget * FIRST_SHARE if timed else end, args.workers)
        for n, name in enumerate(timed):
            share = TIMED_SHARES[name] / sum(TIMED_SHARES[other] for other in timed[n:])
            run.go([name], time.time() + (end - time.time()) * share, 1)
    run.show()
    return int(any(row["verdict"] in (FAIL, SHORT) for row in run.record["rows"]))


if __name__ == "__main__":
    sys.exit(main())
