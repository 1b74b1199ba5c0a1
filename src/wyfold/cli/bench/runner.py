"""One case of `bench` after another: who runs is judged, timed in turns, and measured; a row says what was found."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from wyfold.cli import described, results
from wyfold.cli.bench import memory, timing
from wyfold.cli.bench.cases import Case, packed_lengths
from wyfold.cli.bench.implementations import Contender, Judge, contenders, plan, prepared
from wyfold.cli.bench.peers import PEERS, Peer
from wyfold.cli.catalog import OURS, VARIANTS
from wyfold.cli.operators import Arguments
from wyfold.reference.shapes import Shape
from wyfold.runtime.check import UnsupportedError

Runner = tuple[dict[str, Any], timing.Run]
"""The row of a contender and its call."""


class Track:
    """Where cases run: the rounds, what is measured, the card if it is one, and how far the whole run has come."""

    def __init__(self, cases: int, rounds: int, graph: bool, cold: bool):
        self.cases, self.rounds, self.graph, self.cold = cases, rounds, graph, cold
        self.began, self.done = time.perf_counter(), 0
        self.gpu: timing.Gpu | None = None
        self.copy_rate: float | None = None

    def enter(self, case: Case) -> None:
        """The card, when the first case needs it."""
        if case.on_gpu and self.gpu is None:
            self.gpu = timing.Gpu()
            self.copy_rate = self.gpu.copy_rate()

    def say(self, line: str) -> None:
        results.say(f"[{self.done + 1}/{self.cases}, {time.perf_counter() - self.began:.0f} s] {line}")


def race(
    group: Sequence[Case], peers: Sequence[Peer], also: Sequence[str], track: Track
) -> Iterator[list[dict[str, Any]]]:
    """The rows of each case of the group, one per contender, as they are found; those that are right take turns."""
    track.enter(group[0])
    arguments = group[0].arguments()
    judge = Judge(group[0], arguments)
    for case in group:
        everyone = contenders(case, peers, also)
        found = [_row(case, contender, arguments, judge, track) for contender in everyone]
        fed = case.incoming(arguments) if case.backward else None
        right: list[Runner] = [
            (row, prepared(c, case, arguments, fed)) for c, row in zip(everyone, found) if row["correct"]
        ]
        if track.gpu is not None:
            right = _that_run(right, case)
        track.say(f"timing {case.title}: {len(right)} contenders, {track.rounds} rounds of turns")
        if track.gpu is None:
            _time_on_cpu(right, track)
        else:
            _time_on_gpu(right, track.gpu, track)
        del right, fed
        give_back(case)
        for row, contender in zip(found, everyone):
            if row["correct"]:
                row["ns_per_token_head"] = row["milliseconds"]["median"] * 1e6 / max(1, case.token_heads)
                _in_other_processes(row, case, contender, track)
        track.done += 1
        yield found


def _that_run(right: Sequence[Runner], case: Case) -> list[Runner]:
    """Those whose call does not fail when nothing else of theirs is kept; it has compiled everything by then."""
    running = []
    for row, call in right:
        try:
            call()
            running.append((row, call))
        except Exception as error:  # a library may run out of memory here, ours may not
            give_back(case)
            row |= {"correct": False, "refused": said(error), "failed": True}
    return running


def _time_on_cpu(right: Sequence[Runner], track: Track) -> None:
    times = timing.interleaved([call for _, call in right], track.rounds)
    for (row, _), mine in zip(right, times):
        row["milliseconds"] = timing.spread(mine)


def _time_on_gpu(right: Sequence[Runner], gpu: timing.Gpu, track: Track) -> None:
    """Calls, then what they launch and hold, then the same calls from graphs, which may fail."""
    for (row, _), turns in zip(right, gpu.interleaved([call for _, call in right], track.rounds)):
        row["milliseconds"], row["host_milliseconds"] = timing.spread(turns.device), timing.spread(turns.host)
        row["floor"] |= {"milliseconds": row["floor"]["bytes"] / (track.copy_rate or 1) * 1e3}
        row["times_floor"] = row["milliseconds"]["median"] / row["floor"]["milliseconds"]
    at_work = timing.card()
    for row, call in right:
        row["card"] = at_work
        kernels = gpu.kernels(call)
        row["kernels"] = [asdict(kernel) for kernel in kernels]
        row["kernel_milliseconds"] = sum(kernel.milliseconds for kernel in kernels)
        row["peak"] = {"above_inputs_mib": gpu.peak_mib(call), "method": memory.METHOD_GPU}
    if not track.graph:
        return
    graphs: list[Runner] = []
    for row, call in right:
        try:
            graphs.append((row, gpu.captured(call)))
            torch.cuda.synchronize()
        except Exception as error:  # a peer that waits for the device cannot be captured; that is its answer
            row["graph_refused"] = said(error)
    for (row, _), turns in zip(graphs, gpu.interleaved([replay for _, replay in graphs], track.rounds)):
        row["graph_milliseconds"] = timing.spread(turns.device)


def _row(case: Case, contender: Contender, arguments: Arguments, judge: Judge, track: Track) -> dict[str, Any]:
    """The row of one contender, checked but not yet timed."""
    track.say(f"checking {case.title} by {contender.ran}")
    row: dict[str, Any] = {
        **asdict(case),
        "packed_sequences": len(packed_lengths(case.name)) or None,
        "contender": contender.name,
        "ran": contender.ran,
        "launches": {},
        "judged": judge.by,
        **dict.fromkeys(("errors", "worst_error", "worst_tensor", "kernels", "kernel_milliseconds", "card")),
        **dict.fromkeys(("milliseconds", "host_milliseconds", "graph_milliseconds", "ns_per_token_head")),
        **dict.fromkeys(("times_floor", "first_call_seconds", "peak")),
        **dict.fromkeys(("refused", "graph_refused", "peak_missing", "first_call_missing"), ""),
        "floor": {"bytes": case.floor_bytes(arguments)},
        "correct": False,
        "within_limits": False,
        "failed": False,
    }
    if case.backward and not contender.backward:
        return row | {"refused": "has no backward"}
    try:
        found = judge.finding(contender, case.backward, ours=contender.name == OURS)
        row["launches"] = plan(contender, case, arguments)
    except UnsupportedError as refusal:
        return row | {"refused": said(refusal)}
    except Exception as error:  # another library's way to say no is its own; a bug of ours fails the run, at its end
        if contender.name == OURS:
            results.say(traceback.format_exc())
        give_back(case)
        return row | {"refused": said(error), "failed": True}
    return row | found.row


def give_back(case: Case) -> None:
    """Memory that nothing uses any more, if the device still answers: other processes have cases too."""
    if case.on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def said(error: BaseException) -> str:
    """An error in one line; a compiler's may be thousands."""
    return f"{type(error).__name__}: {described(error)[:400]}"


def _in_other_processes(row: dict[str, Any], case: Case, contender: Contender, track: Track) -> None:
    """What only a process without a past can tell: peak memory on a CPU, and how long a first call takes."""
    wanted = [] if case.on_gpu else [("peak", "peak_missing", memory.in_fresh_process)]
    if track.cold:
        wanted.append(("first_call_seconds", "first_call_missing", memory.first_call))
    for figure, missing, ask in wanted:
        track.say(f"measuring {figure} of {case.title} by {contender.ran}")
        request = {**asdict(case), "ran": contender.ran, "contender": contender.name}
        try:
            answer = ask(request | {"threads": torch.get_num_threads()})
            row[figure] = answer["seconds"] if figure == "first_call_seconds" else answer
        except RuntimeError as failure:  # killed for memory, say: the row stays, without the figure
            row[missing] = str(failure)


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """The figure that is asked for, of the request's case in this process, which should be fresh."""
    torch.set_num_threads(request.pop("threads"))
    name, ran, what = request.pop("contender"), request.pop("ran"), request.pop("what", "peak")
    case = Case(**{**request, "shape": Shape(**request["shape"])})
    peers = [PEERS[name]] if name != OURS else []
    (contender,) = (c for c in contenders(case, peers, list(VARIANTS)) if c.ran == ran)
    call = prepared(contender, case, case.arguments())
    if what == "first call":
        if case.backward:
            memory.first_backward(case.device)
        wait(case)
        return memory.seconds(call, lambda: wait(case))
    few = replace(case, shape=replace(case.shape, B=1, T=min(case.shape.T, 64)))
    return memory.peak(prepared(contender, few, few.arguments()), call)


def wait(case: Case) -> None:
    if case.on_gpu:
        torch.cuda.synchronize()
