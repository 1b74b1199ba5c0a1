"""Kernels that Triton tunes: processes that compile launch each size once, and a choice takes less time."""

from typing import Any

import pytest
import triton
from triton import testing
from triton.runtime import autotuner

from wyfold.cli.bench import precompile
from wyfold.cli.bench.cases import Case
from wyfold.cli.bench.peer import Adapter, Loaded, Peer
from wyfold.cli.bench.tuning import TIMED_MS, WARM_MS, compile_only, quick_choice
from wyfold.reference.shapes import Shape


class Kernel:
    """A kernel of one argument that records the launch sizes it was called with, and cannot run with eight warps."""

    def __init__(self) -> None:
        self.launched: list[int] = []
        self.fn = lambda x: None

    def run(self, x: int, *, num_warps: int, **_: Any) -> None:
        self.launched.append(num_warps)
        if num_warps == 8:
            raise autotuner.OutOfResources(2, 1, "shared memory")


class Driver:
    """A driver without a GPU, which times as that of a GPU does."""

    def get_benchmarker(self) -> Any:
        return testing.do_bench


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(autotuner.driver, "_active", Driver())
    return Kernel()


def tuned(kernel: Kernel) -> autotuner.Autotuner:
    configs = [triton.Config({}, num_warps=warps) for warps in (1, 2, 4, 8, 16, 32)]
    return autotuner.Autotuner(kernel, ["x"], configs, ["x"], None, None)


def test_shares_launch_every_size_and_time_none(kernel, monkeypatch):
    monkeypatch.setattr(testing, "do_bench", lambda *_, **__: pytest.fail("timed"))
    for share, sizes in enumerate([[1, 16], [2, 32], [4]]):
        kernel.launched.clear()
        with compile_only(share, 4):
            tuned(kernel).run(0)
        assert kernel.launched == [*sizes, sizes[0]], "every size of the share once, then the call itself"
    with compile_only(3, 4), pytest.raises(autotuner.OutOfResources):  # eight warps alone
        tuned(kernel).run(0)


def test_a_kernel_with_fewer_sizes_than_shares_runs_in_each(kernel):
    with compile_only(6, 7):
        tuned(kernel).run(0)
    assert kernel.launched == [1, 1]


def test_one_process_launches_all_sizes_that_can_run(kernel):
    with compile_only(0, 1):
        tuned(kernel).run(0)
    assert kernel.launched == [1, 2, 4, 8, 16, 32, 1]


def test_a_quick_choice_times_less_and_ends(kernel, monkeypatch):
    asked: list[dict[str, Any]] = []

    def timed(call: Any, **options: Any) -> list[float]:
        asked.append(options)
        call()
        return [1.0 / len(asked)] * 3  # the last is the fastest

    monkeypatch.setattr(testing, "do_bench", timed)
    with quick_choice():
        tuned(kernel).run(0)
    assert kernel.launched[-1] == 32 and len(asked) == 6
    assert all((options["warmup"], options["rep"]) == (WARM_MS, TIMED_MS) for options in asked)
    assert testing.do_bench is timed


def test_what_triton_tunes_is_shared_out_after_everything_else():
    """All processes of one implementation run all of its cases."""
    adapters = (
        Adapter(lambda: Loaded("library.tuned", lambda arguments: arguments["v"]), tuned=True),
        Adapter(lambda: Loaded("library.plain", lambda arguments: arguments["v"])),
    )
    library = Peer("library", "json", "", {"chunk_dplr_delta_rule": adapters})
    cases = [Case("dplr", Shape(1, 4096, 2, 2, 64, 64), "mid", "float32", mode, 0) for mode in ("fwd", "fwdbwd")]
    found = precompile.jobs(cases, [library], [])
    shares = [("library.tuned", share) for share in range(precompile.SHARES)]
    assert [(job.ran, job.share) for job in found] == [
        ("library.plain", None),
        ("wyfold.chunk_dplr_delta_rule", None),
        *shares,
    ]
    assert all(job.cases == cases for job in found)
