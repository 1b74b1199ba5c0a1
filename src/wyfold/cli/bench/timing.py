"""Interleaved timing: on a CPU by the clock; on a GPU by events, kernel by kernel, and from a CUDA graph.

On a GPU the L2 cache is flushed by a write of 256 MiB before every timed call. The turn of an implementation is a short
burst of calls, queued without waiting. The host therefore runs ahead of the device, as in a training step. Each round
starts with another implementation.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wyfold.cli.catalog import BURST

Run = Callable[[], object]

FLUSHED = 256 * 2**20
"""Bytes written between two calls to flush the cache, several times its size."""
COPIED = 2**30
"""Bytes copied to measure the memory bandwidth."""
PROFILED = 3
"""Calls over which kernel times are averaged."""

METHOD_CPU = "implementations alternate in one process after one warm-up run each; medians"
METHOD_GPU = (
    f"implementations alternate in one process, on the same tensors; bursts of {BURST} calls, L2 flushed before each; "
    "CUDA events; medians. host: host clock around the same calls. kernels: sum of durations by torch.profiler, "
    f"mean of {PROFILED} calls. graph: replays of one captured call, timed like the calls"
)


@dataclass(frozen=True)
class Kernel:
    """Launches of one kernel in one call.

    Attributes:
        name: Name in the profiler.
        count: Launches per call.
        milliseconds: Device time of all its launches per call.
    """

    name: str
    count: float
    milliseconds: float


@dataclass(frozen=True)
class CallTimes:
    """Times of one implementation, one number per call.

    Attributes:
        device: Milliseconds between the CUDA events around each call.
        host: Milliseconds of the host inside each call.
    """

    device: list[float]
    host: list[float]


def round_order(count: int, rounds: int) -> list[list[int]]:
    """Order of the implementations in each round: all of them, each round starting with the next one."""
    return [[(i + turn) % count for i in range(count)] for turn in range(rounds)]


def interleaved(runs: Sequence[Run], rounds: int) -> list[list[float]]:
    """Milliseconds of every run in every round, by the clock of the process."""
    for run in runs:
        run()
    times: list[list[float]] = [[] for _ in runs]
    for turn in round_order(len(runs), rounds):
        for which in turn:
            began = time.perf_counter_ns()
            runs[which]()
            times[which].append((time.perf_counter_ns() - began) / 1e6)
    return times


def spread(times: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles, minimum, maximum and number of times."""
    low, _, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else (times[0],) * 3
    return {
        "median": statistics.median(times),
        "quartile1": low,
        "quartile3": high,
        "least": min(times),
        "most": max(times),
        "rounds": len(times),
    }


class Gpu:
    """Measurements on the current CUDA device."""

    def __init__(self) -> None:
        # No other code fills 16-bit integers, so the profiler can separate this kernel from those of an implementation.
        self.cache = torch.empty(FLUSHED // 2, dtype=torch.int16, device="cuda")
        self.flushing = frozenset(self._profile(self.flush))

    def flush(self) -> None:
        """Flush the L2 cache by writing more than it holds."""
        self.cache.fill_(1)

    def interleaved(self, runs: Sequence[Run], rounds: int) -> list[CallTimes]:
        """Device and host times of every run, in interleaved bursts after one warm-up run each."""
        for run in runs:
            run()
        turns = [CallTimes([], []) for _ in runs]
        torch.cuda.synchronize()
        for turn in round_order(len(runs), rounds):
            for which in turn:
                self._burst(runs[which], turns[which])
        return turns

    def _burst(self, run: Run, turns: CallTimes) -> None:
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(BURST)]
        for begin, end in marks:
            self.flush()
            begin.record()
            began = time.perf_counter_ns()
            run()
            turns.host.append((time.perf_counter_ns() - began) / 1e6)
            end.record()
        torch.cuda.synchronize()
        turns.device.extend(begin.elapsed_time(end) for begin, end in marks)

    def kernels(self, run: Run) -> list[Kernel]:
        """Kernels of one call, the longest first. Memory copies and fills of the driver are included."""

        def calls() -> None:
            for _ in range(PROFILED):
                self.flush()
                run()

        found = [
            Kernel(name, len(durations) / PROFILED, sum(durations) / 1e3 / PROFILED)
            for name, durations in self._profile(calls).items()
            if name not in self.flushing
        ]
        return sorted(found, key=lambda kernel: kernel.milliseconds, reverse=True)

    def captured(self, run: Run) -> Run:
        """Capture one call in a CUDA graph and return its replay, which overwrites the same results.

        Raises:
            RuntimeError: the call synchronises with the device, or does something else that cannot be captured.
        """
        home, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(home)
        with torch.cuda.stream(side):
            for _ in range(2):
                run()
        home.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                kept = run()
        finally:
            torch.cuda.set_stream(home)  # a failed capture leaves its stream current

        def replay() -> object:
            graph.replay()
            return kept

        return replay

    @staticmethod
    def peak_mib(run: Run) -> float:
        """Peak of PyTorch's allocator during a call, above its level before the call, results included."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del results
        return peak / 2**20

    def copy_rate(self) -> float:
        """Bytes per second, read plus written, of a large copy; the rate of the byte floor."""
        source, target = (torch.empty(COPIED, dtype=torch.int8, device="cuda") for _ in range(2))
        (turns,) = self.interleaved([lambda: target.copy_(source)], 10)
        return 2 * COPIED / (statistics.median(turns.device) / 1e3)

    def _profile(self, run: Run) -> dict[str, list[float]]:
        """Kernel name -> microseconds of each of its launches."""
        from torch.profiler import ProfilerActivity, profile

        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run()
            torch.cuda.synchronize()
        durations: dict[str, list[float]] = {}
        for event in profiler.events() or ():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                durations.setdefault(event.name, []).append(event.time_range.elapsed_us())
        return durations


def card() -> dict[str, str]:
    """Driver, clocks, temperature and power of the current GPU from nvidia-smi; empty if that fails."""
    clocks = ("clocks.sm", "clocks.mem", "clocks_event_reasons.active")
    fields = ("name", "driver_version", *clocks, "temperature.gpu", "power.draw")
    # nvidia-smi numbers all GPUs of the machine, PyTorch those that the process may use.
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    which = f"--id={0 if uuid is None else f'GPU-{uuid}'}"
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", which]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields, (word.strip() for word in printed.split(","))))
