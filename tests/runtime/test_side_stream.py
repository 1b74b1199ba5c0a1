"""Fork/join on a side stream: which stream waits for which, in a call and in its replay."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from wyfold.autograd import delta_chunk, kernel_call
from wyfold.runtime import kernel_launch, recorder, segment_rule, side_stream
from wyfold.runtime.replay_cache import Recording

triton = pytest.importorskip("triton")

from tests.runtime.test_replay_cache import chunked, recordings, without_replay  # noqa: E402
from tests.runtime.test_replay_cache import lines as launches  # noqa: E402, F401
from triton.runtime import driver  # noqa: E402

CARD = torch.device("cuda", 0)


class Stream:
    """A stream of a fake GPU, which logs its waits in `lines`."""

    def __init__(self, lines: list[str], handle: int):
        self.lines, self.cuda_stream = lines, handle


class Event:
    """An event of the fake GPU."""

    def record(self, stream: Stream) -> None:
        self.recorded = stream.cuda_stream

    def wait(self, stream: Stream) -> None:
        stream.lines.append(f"{stream.cuda_stream} waits for {self.recorded}")


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Log of waits and stream changes. The current stream is 1 unless set; new streams have numbers from 10."""
    found: list[str] = []
    current = [Stream(found, 1)]

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        found.append(f"on {stream.cuda_stream}")
        try:
            yield
        finally:
            current.pop()
            found.append(f"on {current[-1].cuda_stream}")

    numbers = iter(range(10, 20))
    with (
        mock.patch.object(torch.cuda, "current_stream", lambda device: current[-1]),
        mock.patch.object(torch.cuda, "Stream", lambda device, priority: Stream(found, next(numbers))),
        mock.patch.object(torch.cuda, "Event", Event),
        mock.patch.object(torch.cuda, "stream", on),
        mock.patch.dict(side_stream._stream_pairs, clear=True),
    ):
        yield found


def test_the_streams_wait_for_each_other(lines):
    for _ in range(2):
        with side_stream.fork_side_stream(CARD) as away:
            with away:
                lines.append("side")
            lines.append("main")
    once = ["10 waits for 1", "on 10", "side", "on 1", "main", "1 waits for 10"]
    assert lines == once * 2


def test_each_stream_has_its_side_stream(lines):
    with side_stream.fork_side_stream(CARD), torch.cuda.stream(Stream(lines, 2)), side_stream.fork_side_stream(CARD):
        pass
    assert [line for line in lines if "waits" in line] == [
        *("10 waits for 1", "11 waits for 2"),
        *("2 waits for 11", "1 waits for 10"),
    ]


@pytest.mark.parametrize("there", [True, False])
def test_an_exception_joins_the_side_stream(lines, there: bool):
    """The exception frees memory that launches on the side stream may still use."""

    def broken() -> None:
        with side_stream.fork_side_stream(CARD) as away:
            with away if there else contextlib.nullcontext():
                raise KeyError

    with contextlib.suppress(KeyError):
        broken()
    assert [line for line in lines if "waits" in line] == ["10 waits for 1", "1 waits for 10"]


def test_no_streams_on_the_cpu(lines):
    with side_stream.fork_side_stream(torch.device("cpu")) as away, away:
        pass
    assert not side_stream._stream_pairs


@pytest.mark.parametrize("there", [True, False])
def test_an_exception_in_a_replay_joins_the_side_stream(lines, there: bool, monkeypatch):
    monkeypatch.setattr(kernel_launch, "enter_context", lambda given: None)
    monkeypatch.setattr(kernel_launch, "current_stream", lambda device: 1)
    broken = mock.Mock()
    broken.replay.side_effect = KeyboardInterrupt
    steps = (
        side_stream.ForkJoin(0, joins=False),
        side_stream.OnSideStream(broken, 0) if there else broken,
        side_stream.ForkJoin(0, joins=True),
    )
    with pytest.raises(KeyboardInterrupt):
        Recording(CARD, (), (), 0, steps, ()).run((), [])
    assert lines == ["10 waits for 1", "1 waits for 10"]


def test_only_launches_between_fork_and_join_are_recordable(lines):
    """A replay would allocate or free on the other stream."""
    x = torch.zeros(4)

    def allocates() -> None:
        with side_stream.fork_side_stream(CARD) as away, away:
            torch.empty(4)

    def frees() -> None:
        y = torch.empty(4)
        with side_stream.fork_side_stream(CARD) as away, away:
            del y

    assert recorder.record((x,), allocates)[1] == "aten::empty is called while a side stream is forked"
    assert recorder.record((x,), frees)[1] == "memory is freed while a side stream is forked"


def test_racing_threads_get_one_pair(lines):
    """Both create a pair before either stores one."""
    made = threading.Barrier(2)

    class Late(Event):
        def __init__(self) -> None:
            made.wait(1)

    found: list[side_stream.StreamPair] = []
    with mock.patch.object(torch.cuda, "Event", Late):
        threads = [threading.Thread(target=lambda: found.append(side_stream._stream_pair(0, 1))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 2
    assert found[0] is found[1]


def test_a_replay_forks_and_joins_alike(lines):
    """Fork, join and launches are recorded, and a launch is replayed on the stream of the same role."""
    steps: list[Any] = []
    launch = mock.Mock()
    launch.replay = lambda stream, *_: lines.append(f"launched on {stream}")
    launch.rebind = lambda to: launch
    with (
        kernel_launch.observe_steps(lambda step, kernel, *, new: steps.append(step)),
        side_stream.fork_side_stream(CARD) as away,
    ):
        with away:
            steps.append(kernel_launch._thread.step_map(launch))
        steps.append(launch)
    for stream, side in ((1, 10), (2, 11)):
        lines.clear()
        with torch.cuda.stream(Stream(lines, stream)):
            for step in steps:
                step.rebind(lambda n, offset: (n, offset)).replay(stream, [], [])
        assert lines[1:-1] == [
            *(f"{side} waits for {stream}", f"launched on {side}"),
            *(f"launched on {stream}", f"{stream} waits for {side}"),
        ]


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="no launch is bound in the interpreter")
@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("rule", ["gdn", "kda"])
def test_a_call_in_segments_is_replayed_on_both_streams(rule: str, long: bool, lines, launches, monkeypatch):  # noqa: F811
    """The forward of a dense batch forks only where segments are long."""
    op, given = chunked(rule)
    monkeypatch.setattr(kernel_call, "LONG", dict.fromkeys(("scalar", "channel"), 1 if long else 64))
    wanted = [x.requires_grad_() for x in given.values() if isinstance(x, torch.Tensor)]
    fork_side_stream = side_stream.fork_side_stream
    monkeypatch.setattr(delta_chunk, "fork_side_stream", lambda device: fork_side_stream(CARD))
    stream = lambda device: torch.cuda.current_stream(device).cuda_stream
    monkeypatch.setattr(driver.active, "get_current_stream", stream, raising=False)

    def called() -> list[tuple[str, int]]:
        launches.clear(), lines.clear()
        o = op(**given)
        torch.autograd.grad(o[0] if isinstance(o, tuple) else o, wanted, torch.ones_like(given["v"]))
        return [(name.removeprefix("wyfold_").removesuffix("_triton"), stream) for name, _, _, stream, *_ in launches]

    with segment_rule.forced(2):
        with without_replay():
            called()
            found = called()
        waits = [line for line in lines if "waits" in line]
        assert [called() for _ in range(3)] == [found] * 3
        assert [type(recording) for recording in recordings()] == [Recording] * 2
    assert waits == lines == ["10 waits for 1", "1 waits for 10"] * (2 if long else 1)
    side = 10 if long else 1
    assert found == [
        *(
            ("segment_grid", 1),
            ("prepare", 1),
            ("segment_summary", side),
            ("segment_fold", side),
            *([("scan", side)] if long else []),
            ("scan", 1),
        ),
        *(
            ("segment_grid", 1),
            ("prepare", 1),
            ("segment_summary_bwd", 10),
            ("segment_fold", 10),
            ("scan_bwd", 10),
            ("scan_bwd", 1),
        ),
        ("gradients", 1),
    ]
