"""Run the cases of `bench`: check every implementation, then time them interleaved; one result row each."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from wyfold.cli import described, results
from wyfold.cli.bench import memory, timing
from wyfold.cli.bench.cases import Case
from wyfold.cli.bench.implementations import AccuracyCheck, BenchImplementation, implementations_of, make_call, plan
from wyfold.cli.bench.peer import Peer
from wyfold.cli.bench.peers import PEERS
from wyfold.cli.bench.tensors import packed_lengths
from wyfold.cli.catalog import OURS, VARIANTS
from wyfold.cli.operators import Arguments
from wyfold.reference.shapes import Shape
from wyfold.runtime.check import UnsupportedError

TimedCall = tuple[dict[str, Any], timing.Run]
"""Result row of an implementation, and its call."""


class BenchSession:
    """Settings and progress of a `bench` run.

    Attributes:
        cases: Number of cases of the run.
        rounds: Timing rounds per case.
        graph: Whether calls are also timed from a CUDA graph.
        cold: Whether first calls in a fresh process are timed.
        began: Start of the run, of `time.perf_counter`.
        done: Cases finished so far.
        gpu: The GPU to measure on; None before the first case that needs it.
        copy_rate: Bytes per second of a large copy on that GPU; None without a GPU.
        uncompiled: (case, full name of a peer's implementation) -> why it is not run: compiling took too long.
    """

    def __init__(self, cases: int, rounds: int, graph: bool, cold: bool):
        self.cases, self.rounds, self.graph, self.cold = cases, rounds, graph, cold
        self.began, self.done = time.perf_counter(), 0
        self.gpu: timing.Gpu | None = None
        self.copy_rate: float | None = None
        self.uncompiled: dict[tuple[Case, str], str] = {}

    def open_gpu(self, case: Case) -> None:
        """Open the GPU and measure its copy rate when the first case needs it."""
        if case.on_gpu and self.gpu is None:
            self.gpu = timing.Gpu()
            self.copy_rate = self.gpu.copy_rate()

    @property
    def spent(self) -> float:
        """Seconds since the start of the run."""
        return time.perf_counter() - self.began

    def log(self, line: str) -> None:
        results.say(f"[{self.done + 1}/{self.cases}, {self.spent:.0f} s] {line}")


def run_cases(
    group: Sequence[Case], peers: Sequence[Peer], also: Sequence[str], session: BenchSession
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each case of the group, one per implementation. Only correct implementations are timed."""
    session.open_gpu(group[0])
    arguments = group[0].arguments()
    checker = AccuracyCheck(group[0], arguments)
    for case in group:
        everyone = implementations_of(case, peers, also)
        found = [_row(case, implementation, arguments, checker, session) for implementation in everyone]
        fed = case.incoming(arguments) if case.backward else None
        right: list[TimedCall] = [
            (row, make_call(c, case, arguments, fed)) for c, row in zip(everyone, found) if row["correct"]
        ]
        if session.gpu is not None:
            right = _runnable(right, case)
        session.log(f"timing {case.title}: {len(right)} implementations, {session.rounds} rounds")
        if session.gpu is None:
            _time_on_cpu(right, session)
        else:
            _time_on_gpu(right, session.gpu, session)
        del right, fed
        release_memory(case)
        for row, implementation in zip(found, everyone):
            if row["correct"]:
                row["ns_per_token_head"] = row["milliseconds"]["median"] * 1e6 / max(1, case.token_heads)
                _in_other_processes(row, case, implementation, session)
        session.done += 1
        yield found


def _runnable(right: Sequence[TimedCall], case: Case) -> list[TimedCall]:
    """Drop implementations whose plain call fails. Everything is compiled after this call."""
    running = []
    for row, call in right:
        try:
            call()
            running.append((row, call))
        except Exception as error:  # a peer may run out of memory; Wyfold may not
            release_memory(case)
            row |= {"correct": False, "refused": error_line(error), "failed": True}
    return running


def _time_on_cpu(right: Sequence[TimedCall], session: BenchSession) -> None:
    times = timing.interleaved([call for _, call in right], session.rounds)
    for (row, _), mine in zip(right, times):
        row["milliseconds"] = timing.spread(mine)


def _time_on_gpu(right: Sequence[TimedCall], gpu: timing.Gpu, session: BenchSession) -> None:
    """Time the calls, then profile kernels and memory, then time the calls from CUDA graphs. Capture may fail."""
    for (row, _), turns in zip(right, gpu.interleaved([call for _, call in right], session.rounds)):
        row["milliseconds"], row["host_milliseconds"] = timing.spread(turns.device), timing.spread(turns.host)
        row["floor"] |= {"milliseconds": row["floor"]["bytes"] / (session.copy_rate or 1) * 1e3}
        row["times_floor"] = row["milliseconds"]["median"] / row["floor"]["milliseconds"]
    at_work = timing.card()
    for row, call in right:
        row["card"] = at_work
        kernels = gpu.kernels(call)
        row["kernels"] = [asdict(kernel) for kernel in kernels]
        row["kernel_milliseconds"] = sum(kernel.milliseconds for kernel in kernels)
        row["peak"] = {"above_inputs_mib": gpu.peak_mib(call), "method": memory.METHOD_GPU}
    if not session.graph:
        return
    graphs: list[TimedCall] = []
    for row, call in right:
        try:
            graphs.append((row, gpu.captured(call)))
            torch.cuda.synchronize()
        except (
            Exception
        ) as error:  # a peer that synchronises with the device cannot be captured; its row shows the error
            row["graph_refused"] = error_line(error)
    for (row, _), turns in zip(graphs, gpu.interleaved([replay for _, replay in graphs], session.rounds)):
        row["graph_milliseconds"] = timing.spread(turns.device)


def _row(
    case: Case, implementation: BenchImplementation, arguments: Arguments, checker: AccuracyCheck, session: BenchSession
) -> dict[str, Any]:
    """Result row of one implementation, checked but not yet timed."""
    session.log(f"checking {case.title} by {implementation.ran}")
    row: dict[str, Any] = {
        **asdict(case),
        "packed_sequences": len(packed_lengths(case.name)) or None,
        "contender": implementation.name,
        "ran": implementation.ran,
        "launches": {},
        "judged": checker.method,
        **dict.fromkeys(("errors", "worst_error", "worst_tensor", "kernels", "kernel_milliseconds", "card")),
        **dict.fromkeys(("milliseconds", "host_milliseconds", "graph_milliseconds", "ns_per_token_head")),
        **dict.fromkeys(("times_floor", "first_call_seconds", "peak")),
        **dict.fromkeys(("refused", "graph_refused", "peak_missing", "first_call_missing"), ""),
        "floor": {"bytes": case.floor_bytes(arguments)},
        "correct": False,
        "within_limits": False,
        "failed": False,
    }
    if case.backward and not implementation.backward:
        return row | {"refused": "has no backward"}
    if late := session.uncompiled.get((case, implementation.ran)):
        return row | {"refused": late}
    try:
        found = checker.check_call(implementation, case.backward, ours=implementation.name == OURS)
        row["launches"] = plan(implementation, case, arguments)
    except UnsupportedError as refusal:
        return row | {"refused": error_line(refusal)}
    except Exception as error:  # a peer may refuse with any exception; a bug of Wyfold fails the run at its end
        if implementation.name == OURS:
            results.say(traceback.format_exc())
        release_memory(case)
        return row | {"refused": error_line(error), "failed": True}
    return row | found.row


def release_memory(case: Case) -> None:
    """Return unused device memory, so that other processes can allocate it. Raises if the device failed."""
    if case.on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def error_line(error: BaseException) -> str:
    """Class and message of an exception in one line, truncated; a compiler's message may be thousands of lines."""
    return f"{type(error).__name__}: {described(error)[:400]}"


def _in_other_processes(
    row: dict[str, Any], case: Case, implementation: BenchImplementation, session: BenchSession
) -> None:
    """Measure in a fresh process: peak memory on a CPU, and the time of a first call."""
    wanted = [] if case.on_gpu else [("peak", "peak_missing", memory.in_fresh_process)]
    if session.cold:
        wanted.append(("first_call_seconds", "first_call_missing", memory.first_call))
    for figure, missing, ask in wanted:
        session.log(f"measuring {figure} of {case.title} by {implementation.ran}")
        request = {**asdict(case), "ran": implementation.ran, "contender": implementation.name}
        try:
            answer = ask(request | {"threads": torch.get_num_threads()})
            row[figure] = answer["seconds"] if figure == "first_call_seconds" else answer
        except RuntimeError as failure:  # for example killed for memory: the row stays without this figure
            row[missing] = str(failure)


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request of `_in_other_processes` in this process, which must be fresh."""
    torch.set_num_threads(request.pop("threads"))
    name, ran, what = request.pop("contender"), request.pop("ran"), request.pop("what", "peak")
    case = request_case(request)
    implementation = chosen_implementation(case, name, ran)
    call = make_call(implementation, case, case.arguments())
    if what == "first call":
        if case.backward:
            memory.first_backward(case.device)
        wait(case)
        return memory.seconds(call, lambda: wait(case))
    few = replace(case, shape=replace(case.shape, B=1, T=min(case.shape.T, 64)))
    return memory.peak(make_call(implementation, few, few.arguments()), call)


def request_case(fields: dict[str, Any]) -> Case:
    """The case of a request, from the JSON of its fields."""
    return Case(**{**fields, "shape": Shape(**fields["shape"])})


def chosen_implementation(case: Case, contender: str, ran: str) -> BenchImplementation:
    """The implementation of a request: of Wyfold or of the peer `contender`, with the full name `ran`."""
    peers = [PEERS[contender]] if contender != OURS else []
    (implementation,) = (c for c in implementations_of(case, peers, list(VARIANTS)) if c.ran == ran)
    return implementation


def wait(case: Case) -> None:
    if case.on_gpu:
        torch.cuda.synchronize()
