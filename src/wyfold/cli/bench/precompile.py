"""Compile the kernels of all cases in parallel processes, before any case is timed.

Kernels of libraries compile for seconds to minutes on one core each. One process compiles what one implementation needs
for one operator with one set of heads, widths and options, at every length and in both directions. Compiled kernels
stay in the caches of the libraries on disk, where the process that times finds them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from wyfold.cli import results
from wyfold.cli.bench.cases import Case
from wyfold.cli.bench.implementations import implementations_of, make_call
from wyfold.cli.bench.peer import Peer
from wyfold.cli.bench.runner import chosen_implementation, error_line, release_memory, request_case
from wyfold.cli.catalog import OURS

UNTUNED = "FLA_CACHE_RESULTS=0"
"""Setting of a compiling process. What fla times while other processes use the GPU must not choose its kernels."""


@dataclass
class CompileJob:
    """What one process compiles.

    Attributes:
        contender: Name of the implementation's library.
        ran: Full name of the implementation.
        cases: Cases that it runs once.
    """

    contender: str
    ran: str
    cases: list[Case] = field(default_factory=list)


def compile_all(
    cases: Iterable[Case], peers: Sequence[Peer], also: Sequence[str], processes: int, deadline: float | None
) -> list[CompileJob]:
    """Compile in so many processes at once. Returns the jobs that were not finished at the deadline.

    A process that fails leaves its error to the case: there the implementation runs again, and its row has the error.

    Args:
        cases: All cases.
        peers: Libraries whose implementations run.
        also: Flags of Wyfold, as in `implementations_of`.
        processes: Processes at once.
        deadline: Of `time.perf_counter`; later processes are killed, or not started. None: none.
    """
    waiting = list(jobs(cases, peers, also))
    began = time.perf_counter()

    def run(job: CompileJob) -> bool:
        left = None if deadline is None else deadline - time.perf_counter()
        finished = (left is None or left > 0) and _in_a_process(job, left)
        spent = time.perf_counter() - began
        results.say(
            f"[{spent:.0f} s] {'compiled' if finished else 'no time to compile'} {job.cases[0].title}: {job.ran}"
        )
        return finished

    with ThreadPoolExecutor(processes) as pool:
        return [job for job, finished in zip(waiting, pool.map(run, waiting), strict=True) if not finished]


def jobs(cases: Iterable[Case], peers: Sequence[Peer], also: Sequence[str]) -> list[CompileJob]:
    """The processes' work, that of other libraries first: their compilation takes longer."""
    found: dict[tuple[Any, ...], CompileJob] = {}
    for case in cases:
        s = case.shape
        alike = (case.op, s.H, s.HV, s.K, s.V, case.gate, case.norm, case.dtype, case.gate_dtype, case.chunk)
        for implementation in implementations_of(case, peers, also):
            if implementation.backward or not case.backward:
                job = found.setdefault(
                    (*alike, implementation.ran), CompileJob(implementation.name, implementation.ran)
                )
                job.cases.append(case)
    return sorted(found.values(), key=lambda job: job.contender == OURS)


def compile_here(request: dict[str, Any]) -> dict[str, Any]:
    """Run a job's cases once each in this process. Returns the cases' titles with their errors, where they failed."""
    failed = {}
    for fields in request["cases"]:
        case = request_case(fields)
        try:
            make_call(chosen_implementation(case, request["contender"], request["ran"]), case, case.arguments())()
        except Exception as error:  # the row of the case will have it
            failed[case.title] = error_line(error)
        release_memory(case)
    return failed


def _in_a_process(job: CompileJob, seconds: float | None) -> bool:
    """Run a job in a child process. Returns whether it ended in time."""
    request = {
        "what": "compile",
        "contender": job.contender,
        "ran": job.ran,
        "threads": 1,
        "cases": [asdict(case) for case in job.cases],
    }
    command = ["env", UNTUNED, sys.executable, "-m", "wyfold", "bench", "--measure", json.dumps(request)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return False
    failed = {} if done.returncode else json.loads(done.stdout.splitlines()[-1])
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        failed["all"] = f"exit code {done.returncode}: {lines[-1] if lines else 'no message'}"
    for title, error in failed.items():
        results.say(f"compiling {job.ran}, {title}: {error}")
    return True
