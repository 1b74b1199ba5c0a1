"""Results of a proof as a JSON file that is valid after every row, a final table, and jobs that run in parallel.

A row is one finding: the part of the proof, the case, whether the promise held (None if nothing was promised), and
numbers. An interrupted run keeps the rows it has written.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wyfold.cli import results

LOG_LINES = 30
"""Last lines of a failed process's log that are kept as the reason."""

Add = Callable[..., None]
"""`add(part, case, held, **numbers)`."""


def add_arguments(parser: argparse.ArgumentParser, budget: float, spare: int = 2) -> None:
    """Add the options that every proof has; `spare` cores are left idle."""
    parser.add_argument("--out", type=Path, default=Path("proofs"), help="folder of the JSON (default: %(default)s)")
    parser.add_argument("--commit", help="of the tree this runs from, where git is not there to be asked")
    parser.add_argument(
        "--budget", type=float, default=budget, help="seconds; nothing is begun after them (default: %(default)s)"
    )
    parser.add_argument("--only", default="", help="parts of the proof, with commas (default: all)")
    parser.add_argument(
        "--at-once",
        type=int,
        default=max(2, (os.cpu_count() or 1) - spare),
        help=f"processes side by side (default: as many as cores, but for {spare})",
    )
    parser.add_argument("--job", help=argparse.SUPPRESS)  # internal: run one part, in a child process
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # internal: where the child writes its rows


class Ledger:
    """Rows of one proof.

    Args:
        name: Name of the proof and of its file.
        args: Parsed options of `add_arguments`.
    """

    def __init__(self, name: str, args: argparse.Namespace):
        self.began, self.args, self.file = time.monotonic(), args, f"{name}.json"
        self.parts = [part for part in args.only.split(",") if part]
        words = [f"--only={args.only}"] if args.only else []
        self.record = results.provenance("", []) | {"command": " ".join([f"tools/proofs/{name}.py", *words])}
        if args.commit:
            self.record["commit"] = args.commit
        self.rows: list[dict[str, Any]] = []
        self.record["rows"] = self.rows

    @property
    def left(self) -> float:
        """Seconds left of the budget."""
        return float(self.args.budget) - (time.monotonic() - self.began)

    def wants(self, part: str) -> bool:
        return not self.parts or part in self.parts

    def add(self, part: str, case: str, held: bool | None = None, **numbers: Any) -> None:
        row = {"part": part, "case": case, "held": held, **numbers, "at_s": round(time.monotonic() - self.began, 1)}
        self.rows.append(row)
        results.write(self.args.out, self.file, self.record)
        print(_line(row), flush=True)

    @contextmanager
    def step(self, part: str, case: str, needs_s: float = 0.0) -> Iterator[bool]:
        """Whether there is time for a step. An exception inside becomes a row, and the proof continues."""
        if self.left < needs_s:
            self.add(part, case, None, not_run=f"{self.left:.0f} s left, {needs_s:.0f} wanted")
            yield False
            return
        try:
            yield True
        except Exception as error:
            tail = traceback.format_exc().splitlines()[-LOG_LINES:]
            self.add(part, case, False, error=f"{type(error).__name__}: {error}"[:400], trace=tail)

    def close(self) -> int:
        """Print the table; return 1 if a promise was broken."""
        parts: dict[str, list[dict[str, Any]]] = {}
        for row in self.rows:
            parts.setdefault(row["part"], []).append(row)
        table = []
        for part, rows in parts.items():
            held, broken = (sum(row["held"] is said for row in rows) for said in (True, False))
            table.append((part, str(held), str(broken), str(sum("not_run" in row for row in rows))))
        results.show(self.file, ("part", "held", "broken", "not run"), table)
        for row in self.rows:
            if row["held"] is False:
                print(_line({key: value for key, value in row.items() if key != "trace"}))
        print(f"{time.monotonic() - self.began:.0f} s; {self.args.out / self.file}")
        return int(any(row["held"] is False for row in self.rows))


def _line(row: dict[str, Any]) -> str:
    mark = {True: "held", False: "BROKEN", None: ""}[row["held"]]
    rest = {key: value for key, value in row.items() if key not in ("part", "case", "held", "trace")}
    words = (f"{key}={_short(value)}" for key, value in rest.items())
    return f"{row['part']}: {row['case']}: {mark}  {' '.join(words)}"[:700]


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} {_short(item)}" for key, item in value.items()) + "}"
    return str(value)


def row_writer(file: Path) -> Add:
    """The `add` function of a job: writes each row as a JSON line, which the ledger reads when the job is over."""

    def add(part: str, case: str, held: bool | None = None, **numbers: Any) -> None:
        with file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"part": part, "case": case, "held": held, **numbers}) + "\n")

    return add


@dataclass
class Job:
    """Processes that start together, and whose rows are read when all have ended.

    Attributes:
        name: Name in the rows about failures.
        commands: Command of each process, without `--rows`.
        environments: Additional environment variables of each process.
        limit_s: Seconds after which remaining processes are killed.
        promised: Whether a process that fails, or is killed, breaks a promise. False for other projects' code.
    """

    name: str
    commands: Sequence[Sequence[str]]
    environments: Sequence[dict[str, str]] = ()
    limit_s: float = 120.0
    promised: bool = True
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    began: float = 0.0
    killed: bool = False

    @property
    def part(self) -> str:
        """The part of the proof that a failure is counted for."""
        return self.name.partition(":")[0]

    def begin(self, folder: Path) -> None:
        self.began = time.monotonic()
        for number, command in enumerate(self.commands):
            own = self.environments[number] if self.environments else {}
            with self._file(folder, number, "log").open("wb") as log:
                self.processes.append(
                    subprocess.Popen(
                        [*command, "--rows", str(self._file(folder, number, "jsonl"))],
                        env={**os.environ, **own},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

    def over(self) -> bool:
        """Whether all processes have ended; after the time limit they are killed."""
        if time.monotonic() - self.began > self.limit_s:
            self.killed = True
            self.end()
        return all(process.poll() is not None for process in self.processes)

    def end(self) -> None:
        """Kill the remaining processes and their children."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def read(self, folder: Path, ledger: Ledger) -> None:
        for number, process in enumerate(self.processes):
            rows = self._file(folder, number, "jsonl")
            for line in rows.read_text(encoding="utf-8").splitlines() if rows.exists() else ():
                ledger.add(**json.loads(line))
            if process.returncode:
                tail = self._file(folder, number, "log").read_text(errors="replace").splitlines()[-LOG_LINES:]
                ended = f"process {number} ended with {process.returncode}: {tail[-1] if tail else ''}"
                if process.returncode == -signal.SIGKILL and self.killed:
                    ended = f"process {number} did not end within {self.limit_s:.0f} s, and was killed"
                ledger.add(self.part, self.name, False if self.promised else None, error=ended[:400], trace=tail)

    def _file(self, folder: Path, number: int, kind: str) -> Path:
        return folder / f"{id(self)}.{number}.{kind}"


def run_parallel(ledger: Ledger, jobs: Sequence[Job], at_once: int) -> None:
    """Run jobs in parallel, with at most `at_once` processes. None starts or continues after the budget.

    Parallel jobs are for first runs, which mostly compile. Nothing that is timed may run here.
    """
    waiting, running = list(jobs), list[Job]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            while waiting or running:
                while waiting and (not running or _processes(running) + len(waiting[0].commands) <= at_once):
                    job = waiting.pop(0)
                    if ledger.left <= 0:
                        ledger.add(job.part, job.name, None, not_run="the budget is spent")
                        continue
                    job.limit_s = min(job.limit_s, ledger.left)
                    running.append(job)
                    job.begin(folder)
                for job in [job for job in running if job.over()]:
                    running.remove(job)
                    job.read(folder, ledger)
                time.sleep(0.1)
        finally:
            for job in running:
                job.end()


def _processes(running: Sequence[Job]) -> int:
    return sum(len(job.commands) for job in running)


def job_command(script: str, job: str, *words: str) -> list[str]:
    """The command that runs one job of a proof in a child process."""
    return [sys.executable, script, "--job", job, *words]
