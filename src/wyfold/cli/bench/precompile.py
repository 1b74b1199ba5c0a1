"""Compile the kernels of all cases in parallel processes, before any case is timed.

Kernels of libraries compile for seconds to minutes on one core each. One process compiles what one implementation needs
for one operator with one set of heads, widths and options, at every length, in both directions and under all given
decays. Kernels that Triton tunes are compiled by several, which share their launch sizes, for a short sequence.
Compiled kernels stay in the caches of the libraries on disk, where the process that times finds them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from wyfold.cli import results
from wyfold.cli.bench.cases import Case
from wyfold.cli.bench.implementations import implementations_of, make_call
from wyfold.cli.bench.peer import Peer
from wyfold.cli.bench.runner import chosen_implementation, error_line, release_memory, request_case
from wyfold.cli.bench.tuning import compile_only
from wyfold.cli.catalog import DECAYS, OURS

UNTUNED = "FLA_CACHE_RESULTS=0"
"""Setting of a compiling process. What fla times while other processes use the GPU must not choose its kernels."""

SHARES = 4
"""Processes that share the launch sizes of one implementation which Triton tunes."""
SHORT = 1024
"""Tokens for which they compile: several such processes need a GPU's memory at once."""


@dataclass
class CompileJob:
    """What one process compiles.

    Attributes:
        contender: Name of the implementation's library.
        ran: Full name of the implementation.
        cases: Cases that it runs once.
        share: Number of its share of the launch sizes; None if Triton does not tune the implementation.
    """

    contender: str
    ran: str
    cases: list[Case] = field(default_factory=list)
    share: int | None = None

    @property
    def part(self) -> str:
        """What a message adds about the share."""
        return "" if self.share is None else f", launch sizes {self.share + 1} of {SHARES}"


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
        what = f"{job.cases[0].title}: {job.ran}{job.part}"
        results.say(f"[{spent:.0f} s] {'compiled' if finished else 'no time to compile'} {what}")
        return finished

    with ThreadPoolExecutor(processes) as pool:
        return [job for job, finished in zip(waiting, pool.map(run, waiting), strict=True) if not finished]


def jobs(cases: Iterable[Case], peers: Sequence[Peer], also: Sequence[str]) -> list[CompileJob]:
    """The processes' work: other libraries first, whose compilation takes longest, and last what Triton tunes."""
    found: dict[tuple[Any, ...], CompileJob] = {}
    for case in cases:
        s = case.shape
        gate = "given" if case.gate in DECAYS else case.gate
        length = s.T if case.op == "path" else 0  # its kernels differ by length, and compile for a minute each
        alike = (case.op, length, s.H, s.HV, s.K, s.V, gate, case.norm, case.dtype, case.gate_dtype, case.chunk)
        for implementation in implementations_of(case, peers, also):
            if not implementation.backward and case.backward:
                continue
            for share in range(SHARES) if implementation.tuned else (None,):
                job = found.setdefault(
                    (*alike, implementation.ran, share),
                    CompileJob(implementation.name, implementation.ran, share=share),
                )
                job.cases.append(case)
    return sorted(found.values(), key=lambda job: (job.share is not None, job.contender == OURS))


def compile_here(request: dict[str, Any]) -> dict[str, Any]:
    """Run a job's cases once each in this process. Returns the cases' titles with their errors, where they failed."""
    failed, share = {}, request["share"]
    for fields in request["cases"]:
        case = request_case(fields)
        if share is not None:
            case = replace(case, shape=replace(case.shape, T=min(case.shape.T, SHORT)))
        try:
            with compile_only(share or 0, 1 if share is None else SHARES) if case.on_gpu else nullcontext():
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
        "share": job.share,
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
