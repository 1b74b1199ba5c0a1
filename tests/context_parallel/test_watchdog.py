"""A lost rank raises an exception on the others, and a watch leaves no thread behind."""

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.context_parallel.ranks import Case, failures_on_ranks

import wyfold
from wyfold.context_parallel import watchdog as module
from wyfold.cp import RankLost, Watch, build_cp_context

SOON_S = 20
"""Seconds within which survivors must raise, on two busy cores; the group's own timeout is twice as long."""


def raised(inside: Callable[[], object], group: dist.ProcessGroup, **options: Any) -> RankLost:
    """Return the RankLost that a watch raises in a function that never returns."""
    began = time.monotonic()
    try:
        with Watch(group, **options):
            inside()
    except RankLost as lost:
        assert time.monotonic() - began < SOON_S
        assert_no_thread()
        return lost
    raise AssertionError("nobody noticed")


def forever() -> None:
    """Loop forever without a collective."""
    while True:
        time.sleep(0.01)


def assert_no_thread() -> None:
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("wyfold")]
    assert not left, left


@contextmanager
def patched(**values: Any) -> Iterator[None]:
    """Set constants of the watchdog module for a block."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


# --- one rank dies -------------------------------------------------------------------------------


def killed(_: None, group: dist.ProcessGroup) -> None:
    """Rank 1 of 3 is killed between forward and backward; rank 2 waits in its backward, rank 0 outside of calls."""
    context = build_cp_context(None, group, total_tokens=90)
    q = torch.ones(1, context.tokens, 1, 8, requires_grad=True)

    def step() -> None:
        o, _ = wyfold.chunk_kda(q, q, q, cp_context=context)
        if group.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if group.rank() == 2:
            o.sum().backward()
        forever()

    assert str(raised(step, group)).startswith("Watch: rank 1 of 3 is gone")


# --- all ranks live ------------------------------------------------------------------------------


def one_after_another(_: None, group: dist.ProcessGroup) -> None:
    """Ranks may leave at different times, and enter a second watch of the same group."""
    for turn in range(2):
        with Watch(group) as watch:
            assert any(thread.name.startswith("wyfold watch") for thread in threading.enumerate())
            dist.barrier(group)
            time.sleep(0.3 * ((group.rank() + turn) % 3))
        assert watch.lost == ""
        assert_no_thread()
    with pytest.raises(ValueError, match="entered once"):
        watch.__enter__()


def the_same_error(_: None, group: dist.ProcessGroup) -> None:
    """If all ranks raise the same error, each keeps its own exception."""
    with pytest.raises(ValueError, match="everywhere"), Watch(group):
        time.sleep(0.3 * group.rank())
        raise ValueError("everywhere")
    assert_no_thread()


def an_error_of_one(_: None, group: dist.ProcessGroup) -> None:
    """An error on one rank is RankLost on the others, which would wait for it."""
    with patched(GRACE_S=0.5):
        if group.rank() == 1:
            with pytest.raises(KeyError), Watch(group):
                raise KeyError("mine")
        else:
            lost = raised(forever, group)
            assert str(lost) == f"Watch: rank 1 of {group.size()} left because of an error of its own"


def a_broken_channel(_: None, group: dist.ProcessGroup) -> None:
    """If only the heartbeat channel fails, no rank is stopped."""

    class Broken:
        def __init__(self, *_: object):
            pass

        def alltoall_base(self, *_: object) -> None:
            raise RuntimeError("cable. Look at it")

    usual, dist.ProcessGroupGloo = dist.ProcessGroupGloo, Broken
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with Watch(group) as watch:
                dist.barrier(group)
    finally:
        dist.ProcessGroupGloo = usual
    assert watch.lost == ""
    assert any("all ranks are here" in str(warning.message) for warning in said)


def silence(_: None, group: dist.ProcessGroup) -> None:
    """A rank that lives but sends no heartbeat is lost."""
    if group.rank() == 1:
        with warnings.catch_warnings(), patched(PERIOD_S=4.0):
            warnings.simplefilter("ignore")  # a warning: when it looks again, all others have answered
            with Watch(group, silence_s=1):
                threading.Event().wait(4.5)
    else:
        with patched(ROLL_S=0.5):
            lost = raised(forever, group, silence_s=1)
            assert str(lost).startswith(f"Watch: rank 1 of {group.size()} is gone: ended, or silent for 1 s")
            assert isinstance(lost.__cause__, RankLost)


def a_broken_collective(_: None, group: dist.ProcessGroup) -> None:
    """A broken collective after a rank has left is reported as RankLost, not as the collective's error."""
    with pytest.raises(KeyError) if group.rank() == 1 else pytest.raises(RankLost) as found, Watch(group):
        if group.rank() == 1:
            raise KeyError("mine")
        time.sleep(1)  # until the others have received it
        raise RuntimeError("Connection closed by peer")
    if group.rank() != 1:
        assert str(found.value) == f"Watch: rank 1 of {group.size()} left because of an error of its own"
        assert str(found.value.__cause__) == "Connection closed by peer"


def named_inside_the_block(_: None, group: dist.ProcessGroup) -> None:
    """RankLost names the rank also if it is caught inside the block."""
    with patched(GRACE_S=0.5):
        if group.rank() == 1:
            with pytest.raises(KeyError), Watch(group):
                raise KeyError("mine")
        else:
            with pytest.raises(RankLost), Watch(group):
                with pytest.raises(RankLost, match="rank 1 of 3 left because of an error of its own"):
                    forever()


def an_end_without_an_error(_: None, group: dist.ProcessGroup) -> None:
    """`sys.exit()` is not an error."""
    with pytest.raises(SystemExit) if group.rank() == 1 else nullcontext(), Watch(group) as watch:
        dist.barrier(group)
        if group.rank() == 1:
            raise SystemExit(0)
        time.sleep(1)
    assert watch.lost == ""


LIVING = {run.__name__: Case(lambda: None, run) for run in (one_after_another, the_same_error, a_broken_channel)}
LIVING |= {
    run.__name__: Case(lambda: None, run) for run in (an_error_of_one, a_broken_collective, named_inside_the_block)
}
LIVING |= {run.__name__: Case(lambda: None, run) for run in (an_end_without_an_error, silence)}
KILLED = {"killed": Case(lambda: None, killed)}


def test_survivors_raise_and_name_the_rank(tmp_path: Path):
    found = failures_on_ranks([3], tmp_path, "tests.context_parallel.test_watchdog", "KILLED", dying=[1])
    assert not found, found


def test_living_ranks_are_left_alone_and_lost_ones_are_not(tmp_path: Path):
    found = failures_on_ranks([3], tmp_path, "tests.context_parallel.test_watchdog", "LIVING")
    assert not found, found


@pytest.fixture
def alone() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_one_rank_is_not_watched(alone):
    with Watch(alone) as watch:
        assert_no_thread()
    assert watch.lost == ""


def test_invalid_arguments(alone):
    with pytest.raises(ValueError, match=r"^Watch: silence_s must be positive, got 0$"):
        Watch(alone, silence_s=0)
    with pytest.raises(TypeError, match=r"^Watch: mesh_or_group must be a ProcessGroup or a DeviceMesh, got int$"):
        Watch(3)
