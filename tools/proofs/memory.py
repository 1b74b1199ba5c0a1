"""Memory accesses and races: every operator's kernels under compute-sanitizer, on a GPU.

    PYTHONPATH=src:. python tools/proofs/memory.py --commit HASH --out DIR

Plain processes make each call once, to compile it. Processes under the sanitizer repeat the calls that are compiled.
Each of them ends after a while, because its summary is printed at its end, and another one replaces it. PyTorch's own
kernels are not checked. Every tensor is a separate allocation with padding behind it. The planted faults (`planted.py`)
must be found, otherwise the absence of errors proves nothing. DIR gets memory.json, rewritten every few seconds; a call
counts as covered when the process that made it has ended with a summary. The calls are in `memory_calls.py`.

With --sanitizer none --device cpu under TRITON_INTERPRET=1 it runs without a GPU, and without findings.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tools.proofs.first_calls import machine

from wyfold.cli import results

SANITIZER = "/usr/local/cuda/bin/compute-sanitizer"
PADDING = 8192
"""Padding bytes behind each allocation, for the rows of an overhanging tile."""
CLOSING = 25
"""Seconds before the end of the budget in which no call starts."""
KEPT = 12
"""Lines of the sanitizer's errors that are kept per call."""

SUMMARY = re.compile(
    r"(?:ERROR SUMMARY: (\d+) error)|(?:RACECHECK SUMMARY: \d+ hazards? .*\((\d+) errors?, (\d+) warn)"
)
TELLING = re.compile(r"=+ +(Invalid|Error|Warning|Race|Potential|Program hit|Misaligned|Stack|Out|Unaligned|Internal)")


@dataclass
class Group:
    """Calls that are checked with one tool.

    Attributes:
        name: Name in the record.
        tool: Tool of the sanitizer; empty for none.
        kernels: Parts of the names of the kernels that are checked.
        calls: Name of a set of `memory_calls`.
        processes: Number of parallel processes.
        turn: Seconds after which a process takes no further call.
        planted: Whether an error must be found.
    """

    name: str
    tool: str
    kernels: tuple[str, ...]
    calls: str
    processes: int
    turn: float
    planted: bool = False


SCANS = ("wyfold_scan", "wyfold_segment_summary", "wyfold_ttt_gluon", "wyfold_ttt_triton", "wyfold_ttt_bwd")
GROUPS = (
    Group("compiling", "", (), "all", 12, 1e9),
    Group("planted, memcheck", "memcheck", ("wyfold",), "planted write", 1, 60, True),
    Group("planted, racecheck", "racecheck", SCANS, "planted race", 1, 60, True),
    Group("memcheck", "memcheck", ("wyfold",), "memory", 8, 60),
    Group("racecheck of scans", "racecheck", SCANS, "races", 5, 45),
    Group("racecheck of prepare and gradients", "racecheck", ("wyfold_prepare", "wyfold_gradients"), "sides", 2, 45),
)


@dataclass
class Process:
    """A process that makes calls of a group, and the file it writes to."""

    group: Group
    output: Path
    running: subprocess.Popen[bytes]
    began: float = field(default_factory=time.time)
    ended: float | None = None
    cut: bool = False

    def found(self) -> dict[str, Any]:
        """The results that it has written so far."""
        calls: dict[str, dict[str, Any]] = {}
        now, summary, said = "", None, list[str]()
        for line in self.output.read_text(errors="replace").splitlines():
            if line.startswith("@"):
                word, name, *rest = line[1:].split("\t")
                now = name if word == "call" else ""
                call = calls.setdefault(name, {"ended": False, "complaints": []})
                if word == "done":
                    call |= {"ended": True, "seconds": float(rest[0]), "finite": rest[1] == "True"}
                    call["kernels"] = rest[2].split()
                elif word == "failed":
                    call["failed"] = rest[0]
            elif line.startswith("=") and (match := SUMMARY.search(line)):
                summary = {"errors": int(match[1] or match[2] or 0), "warnings": int(match[3] or 0)}
            elif line.startswith("=") and TELLING.match(line):
                (calls[now]["complaints"] if now else said).append(line.strip("= "))
        for call in calls.values():
            call["complaints"] = call["complaints"][:KEPT]
        seconds = (self.ended or time.time()) - self.began
        return {
            "group": self.group.name, "seconds": round(seconds, 1), "summary": summary, "cut_off": self.cut,
            "returned": self.running.poll(), "beside_calls": said[:KEPT], "calls": calls,
        }  # fmt: skip


class Queue:
    """Calls of a group, each taken once by the first process that requests it. A folder shares it among processes."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def take(self, names: list[str]) -> str | None:
        """The first call that no process has taken."""
        for name in names:
            try:
                os.close(os.open(self._mark(name), os.O_CREAT | os.O_EXCL))
                return name
            except FileExistsError:
                continue
        return None

    def left(self, names: list[str]) -> list[str]:
        return [name for name in names if not self._mark(name).exists()]

    def put(self, name: str) -> None:
        self._mark(name).touch()

    def _mark(self, name: str) -> Path:
        return self.folder / re.sub(r"\W+", "_", name)


# --- child: makes calls
# ------------------------------------------------------------------------------------------------


def calls_of(which: str, device: Any) -> dict[str, Callable[[], Any]]:
    """A set of calls by name, those with the longest compilation first."""
    from tools.proofs import memory_calls as calls

    planted = calls.planted(device)
    sets = {
        "memory": lambda: calls.memory(device),
        "races": lambda: calls.races(device),
        "sides": lambda: calls.sides(device),
        "planted write": lambda: {name: call for name, call in planted.items() if "write" in name},
        "planted race": lambda: {name: call for name, call in planted.items() if "race" in name},
        "all": lambda: planted | calls.memory(device) | calls.races(device) | calls.sides(device),
    }
    return dict(sorted(sets[which]().items(), key=lambda item: _quickest_last(item[0])))


def wanted(names: list[str], word: str) -> list[str]:
    """Selected names. Planted faults are always included."""
    return [name for name in names if word in name or name.startswith("planted")]


def _quickest_last(name: str) -> int:
    words = ("planted", "256", "chunk_kda", "chunk_gated", "chunk_delta", "chunk_ttt")
    return next((n for n, word in enumerate(words) if word in name), len(words))


def work(args: argparse.Namespace) -> None:
    """Make calls until none is left or the time is over."""
    group = next(group for group in GROUPS if group.name == args.work)
    import torch
    from tools.proofs.memory_calls import launched_kernels

    device, shared = torch.device(args.device), args.out
    calls, queue, compiled = calls_of(group.calls, device), Queue(shared / group.name), Queue(shared / "compiled")
    ends = min(args.until, time.time() + group.turn)
    with launched_kernels() as kernels:
        while time.time() < ends:
            possible = wanted(list(calls), args.only)
            ready = possible if not group.tool else [name for name in possible if name not in compiled.left(possible)]
            name = queue.take(ready)
            if name is None:
                if not queue.left(possible):
                    break
                time.sleep(0.5)
                continue
            kernels.clear()
            print(f"@call\t{name}", flush=True)
            began = time.time()
            try:
                torch.manual_seed(0)
                results = calls[name]()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                finite = all(bool(x.cpu().isfinite().all()) for x in results)
                print(f"@done\t{name}\t{time.time() - began:.2f}\t{finite}\t{' '.join(kernels)}", flush=True)
            except Exception as error:  # an error of one call does not stop the others
                traceback.print_exc()
                print(f"@failed\t{name}\t{type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
            if not group.tool:
                compiled.put(name)


# --- parent: starts processes
# --------------------------------------------------------------------------------------------


def options_of(group: Group, sanitizer: str, port: int) -> list[str]:
    """The sanitizer's command line.

    The sanitizer searches ten ports for a free one, so each process gets its own range. Its launch timeout is long,
    because importing PyTorch in parallel is slow; a program that the sanitizer gives up on hangs at its first launch.
    """
    if not group.tool or sanitizer == "none":
        return []
    common = [
        "--launch-timeout",
        "60",
        "--target-processes",
        "application-only",
        "--port",
        str(port),
        "--show-backtrace",
        "device",
    ]
    named = [word for kernel in group.kernels for word in (filters(sanitizer), f"kns={kernel}")]
    if group.tool == "racecheck":
        return [sanitizer, "--tool", "racecheck", "--racecheck-report", "all", *common, *named]
    strict = ["--padding", str(PADDING), "--destroy-on-device-error", "kernel", "--ignore-getprocaddress-notfound"]
    return [sanitizer, "--tool", group.tool, *strict, *common, *named]


def filters(sanitizer: str) -> str:
    """The names of the kernel filter options in this version."""
    said = subprocess.run([sanitizer, "--help"], capture_output=True, text=True, check=True).stdout
    return "--kernel-name" if "--kernel-name " in said else "--kernel-regex"


def begin(group: Group, number: int, shared: Path, args: argparse.Namespace, until: float) -> Process:
    output = shared / f"{number}.output"
    program = [sys.executable, "-m", "tools.proofs.memory", "--work", group.name, "--out", str(shared)]
    program += ["--until", str(until), "--device", args.device, "--only", args.only]
    with output.open("wb") as file:
        running = subprocess.Popen(
            [*options_of(group, args.sanitizer, 49152 + 16 * number), *program],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | environment(args.cache),
        )
    return Process(group, output, running)


def environment(cache: Path) -> dict[str, str]:
    return {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_MODULE_LOADING": "LAZY",
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "TRITON_CACHE_DIR": str(cache),
        "TRITON_STORE_BINARY_ONLY": "1",
    }


def oversee(args: argparse.Namespace, shared: Path) -> dict[str, Any]:
    """Start processes, replace them while calls are left, write their results, and kill those over their time."""
    began, processes = time.time(), list[Process]()
    names = json.loads(query("--list", args))
    names = {which: wanted(some, args.only) for which, some in names.items()}
    record: dict[str, Any] = {
        "what": "compute-sanitizer over Wyfold's kernels",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": args.commit,
        "budget": args.budget,
        **machine(),
        "sanitizer": version(args.sanitizer),
    }
    try:
        return watched(args, shared, began, names, record, processes)
    finally:  # each process is in a separate session, so that the sanitizer ends with its program
        for p in processes:
            if p.running.poll() is None:
                os.killpg(p.running.pid, signal.SIGKILL)


def watched(
    args: argparse.Namespace,
    shared: Path,
    began: float,
    names: dict[str, list[str]],
    record: dict[str, Any],
    processes: list[Process],
) -> dict[str, Any]:
    ends, written = began + args.budget, 0.0
    while True:
        now = time.time()
        for p in processes:
            if p.ended is None and p.running.poll() is not None:
                p.ended = now
        busy = {group.name: [p for p in processes if p.group is group and p.ended is None] for group in GROUPS}
        until = ends - CLOSING
        for group in GROUPS:
            left = Queue(shared / group.name).left(names[group.calls])
            # The first processes start together; a later one needs time to import and to make a call.
            ready = now < until - 20 or not processes
            while ready and len(busy[group.name]) < min(group.processes, len(left)):
                process = begin(group, len(processes), shared, args, until)
                processes.append(process)
                busy[group.name].append(process)
        over = not any(busy.values())
        if now > ends - 4:
            for p in processes:
                if p.ended is None:
                    os.killpg(p.running.pid, signal.SIGKILL)
                    p.running.wait()
                    p.ended, p.cut = now, True
            over = True
        if over or now - written > 5:
            record |= collected(processes, names) | {"seconds": round(now - began, 1)}
            results.write(args.out, "memory.json", record)
            written = now
        if over:
            return record
        time.sleep(0.3)


def collected(processes: list[Process], names: dict[str, list[str]]) -> dict[str, Any]:
    """Results of all processes, by group."""
    found = [p.found() for p in processes]
    groups = {}
    for group in GROUPS:
        mine = [p for p in found if p["group"] == group.name]
        whole = [p for p in mine if p["summary"] is not None or (not group.tool and p["returned"] == 0)]
        covered = [name for p in whole for name, call in p["calls"].items() if call["ended"]]
        begun = [name for p in mine for name in p["calls"]]
        groups[group.name] = {
            "calls": len(names[group.calls]),
            "covered": len(covered),
            "without_a_summary": [name for name in begun if name not in covered],
            "never_begun": [name for name in names[group.calls] if name not in begun],
            "errors": sum(p["summary"]["errors"] for p in whole if p["summary"]),
            "warnings": sum(p["summary"]["warnings"] for p in whole if p["summary"]),
            "processes": len(mine),
            "cut_off": sum(p["cut_off"] for p in mine),
            "seconds": round(sum(p["seconds"] for p in mine), 1),
            "kernels": sorted({k for p in whole for call in p["calls"].values() for k in call.get("kernels", ())}),
        }
    return {"groups": groups, "processes": found}


def query(question: str, args: argparse.Namespace) -> str:
    """One line of output of a child process: names of calls need an import of PyTorch."""
    command = [sys.executable, "-m", "tools.proofs.memory", question, "--device", args.device, "--out", str(args.out)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment(args.cache))
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout.splitlines()[-1]


def version(sanitizer: str) -> str:
    if sanitizer == "none":
        return "none"
    said = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=True).stdout
    return next((line for line in said.splitlines() if line.startswith("Version")), said.strip())


def report(record: dict[str, Any]) -> int:
    """Print a table; return whether every result is as required."""
    wrong = []
    print(f"{'':36} {'covered':>9} {'errors':>7} {'warnings':>9} {'processes':>10} {'cut off':>8} {'s':>7}")
    for group in GROUPS:
        g = record["groups"][group.name]
        covered = f"{g['covered']}/{g['calls']}"
        print(
            f"{group.name:36} {covered:>9} {g['errors']:7} {g['warnings']:9} {g['processes']:10} {g['cut_off']:8}"
            f" {g['seconds']:7.0f}"
        )
        if group.planted != bool(g["errors"]):
            wrong.append(f"{group.name}: {'nothing was found' if group.planted else 'errors'}")
        if not group.planted:
            wrong += [f"{group.name}: not covered: {name}" for name in g["without_a_summary"] + g["never_begun"]]
    for process in record["processes"]:
        for name, call in process["calls"].items():
            if "failed" in call or not call.get("finite", True):
                wrong.append(f"{process['group']}: {name}: {call.get('failed', 'results are not finite')}")
            if call["complaints"] and "planted" not in name:
                wrong += [f"{process['group']}: {name}: {line}" for line in call["complaints"][:2]]
    for name in ("memcheck", "racecheck of scans"):
        seen, looked_for = record["groups"][name]["kernels"], next(g.kernels for g in GROUPS if g.name == name)
        seen = [kernel for kernel in seen if any(part in kernel for part in looked_for)]
        missing = [kernel for kernel in kernels() if any(part in kernel for part in looked_for) and kernel not in seen]
        print(f"{name}: {len(seen)} kernels; not one of {', '.join(missing) or 'them missing'}")
    print(*wrong[:40], f"{len(wrong)} findings, {record['seconds']:.0f} s", sep="\n")
    return 1 if wrong else 0


def kernels() -> list[str]:
    """Names of all kernels, from the sources."""
    files = Path(__file__).parents[2].glob("src/wyfold/kernels/**/*.py")
    return sorted(
        {name for file in files for name in re.findall(r"^def (wyfold_\w+)\(", file.read_text(), re.MULTILINE)}
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=240, help="seconds (default: %(default)s)")
    parser.add_argument("--sanitizer", default=SANITIZER, help="none: without one (default: %(default)s)")
    parser.add_argument("--cache", type=Path, help="of compiled kernels (default: TRITON_CACHE_DIR, or an empty one)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="calls whose name holds this")
    # Internal options for child processes.
    parser.add_argument("--list", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.list:
        import torch

        print(json.dumps({g.calls: list(calls_of(g.calls, torch.device("cpu"))) for g in GROUPS}))
        return 0
    if args.work:
        work(args)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as shared:
        kept = os.environ.get("TRITON_CACHE_DIR")
        args.cache = args.cache or (Path(kept) if kept else Path(shared, "triton"))
        return report(oversee(args, Path(shared)))


if __name__ == "__main__":
    sys.exit(main())
