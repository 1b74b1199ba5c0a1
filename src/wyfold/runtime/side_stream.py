"""Fork/join on a high-priority side stream.

    with fork_side_stream(device) as on_side:
        with on_side:
            ...             # on the side stream, behind everything launched before the fork
        ...                 # on the main stream, which does not wait for the side stream
    ...                     # on the main stream, behind both

Each stream on which calls are made has one side stream, of PyTorch's 32 streams of this priority. Calls that are
captured in a graph and calls that are not therefore do not share a side stream as a rule.

Memory that both streams use is allocated before the fork and not freed before the join. What is allocated on the side
stream belongs to it, and is used on it alone until the join.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from wyfold.runtime import kernel_launch


@contextlib.contextmanager
def fork_side_stream(device: torch.device) -> Iterator[contextlib.AbstractContextManager[None]]:
    """Fork the side stream of a CUDA device's current stream, and join it at the end, also after an exception.

    Yields:
        Context in which launches go to the side stream; it may be entered again. On other devices it does nothing.
    """
    if device.type != "cuda":
        yield contextlib.nullcontext()
        return
    index = device.index or 0
    pair = _stream_pair(index, torch.cuda.current_stream(device).cuda_stream)
    try:
        pair.fork()
        kernel_launch.emit_step(ForkJoin(index, joins=False))
        yield _InSideStream(pair, index)
    finally:
        pair.join()
    kernel_launch.emit_step(ForkJoin(index, joins=True))


class _InSideStream(contextlib.AbstractContextManager[None]):
    """Context in which launches go to the side stream of a pair."""

    def __init__(self, pair: StreamPair, index: int):
        self._pair, self._index = pair, index

    def __enter__(self) -> None:
        with contextlib.ExitStack() as entered:
            entered.enter_context(torch.cuda.stream(self._pair.side))
            entered.enter_context(kernel_launch.redirect_steps(lambda step: OnSideStream(step, self._index)))
            self._entered = entered.pop_all()

    def __exit__(self, *_: object) -> None:
        self._entered.close()


Make: TypeAlias = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]


def on_side_stream(index: int, make: Make) -> Make:
    """A function that allocates as `make` does, on the side stream of a device's current stream."""

    def allocate(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        pair = _stream_pair(index, torch.cuda.current_stream(index).cuda_stream)
        with torch.cuda.stream(pair.side):
            return make(shape, stride, dtype)

    return allocate


class StreamPair(NamedTuple):
    """A stream, its side stream, and the events by which they wait for each other.

    It is created once, because creation takes longer than waiting. An event may be recorded again while a stream waits
    for it: the wait is for the earlier record.

    Attributes:
        main, side: The streams.
        forked, joined: Events that `fork` records on `main`, and `join` on `side`.
    """

    main: torch.cuda.Stream
    side: torch.cuda.Stream
    forked: torch.cuda.Event
    joined: torch.cuda.Event

    def fork(self) -> None:
        self.forked.record(self.main)
        self.forked.wait(self.side)

    def join(self) -> None:
        self.joined.record(self.side)
        self.joined.wait(self.main)


_stream_pairs: dict[tuple[int, int], StreamPair] = {}
"""Index of a device and handle of its main stream -> the pair."""


def _stream_pair(index: int, handle: int) -> StreamPair:
    """The pair of a device's current stream, whose handle this is."""
    pair = _stream_pairs.get((index, handle))
    if pair is None:
        main = torch.cuda.current_stream(index)
        side = torch.cuda.Stream(index, priority=-1)
        created = StreamPair(main, side, torch.cuda.Event(), torch.cuda.Event())
        pair = _stream_pairs.setdefault((index, handle), created)  # another thread may have stored one meanwhile
    return pair


class ForkJoin(NamedTuple):
    """Fork or join as a step of a recording. Between the two there are only launches, waits and memory of one stream.

    Attributes:
        device_index: Of the device.
        joins: Whether it is the join.
    """

    device_index: int
    joins: bool

    def replay(self, stream: Any, tensors: list[Any], addresses: list[int]) -> None:
        pair = _stream_pair(self.device_index, stream)
        if self.joins:
            pair.join()
        else:
            pair.fork()

    def rebind(self, to: Callable[[Any, int], tuple[Any, int]]) -> ForkJoin:
        return self


class OnSideStream(NamedTuple):
    """A launch or wait that is replayed on the side stream.

    Attributes:
        step: The launch or wait.
        device_index: Of the device.
    """

    step: Any
    device_index: int

    def replay(self, stream: Any, tensors: list[Any], addresses: list[int]) -> None:
        self.step.replay(_stream_pair(self.device_index, stream).side.cuda_stream, tensors, addresses)

    def rebind(self, to: Callable[[Any, int], tuple[Any, int]]) -> OnSideStream:
        return self._replace(step=self.step.rebind(to))
