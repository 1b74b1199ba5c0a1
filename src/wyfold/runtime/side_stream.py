"""Launches beside others, on a stream of their own, which is served first.

    with fork_side_stream(device) as on_side:
        with on_side:
            ...             # is launched behind everything before it
        ...                 # does not wait for that, and makes use of what it leaves idle
    ...                     # waits for both

Each stream that calls are made on has one beside it, one of the 32 that PyTorch has of this priority, so that captured
calls and others do not meet as a rule. Memory that is used on both is asked for before, and is not given up
within; what is asked for aside is of that stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from wyfold.runtime import kernel_launch


class StreamPair(NamedTuple):
    """A stream, the one beside it, and what each waits for of the other: made once, for they take longer than waiting.

    An event may be recorded again while somebody waits for it, who then does not wait longer.
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
"""By the device's number and a stream's handle."""


@contextlib.contextmanager
def fork_side_stream(device: torch.device) -> Iterator[contextlib.AbstractContextManager[None]]:
    """What launches are made in that go to the stream beside the current one of a CUDA device; nowhere else on other
    devices. What comes after waits for them, also where the calls broke off: memory may be given up then."""
    if device.type != "cuda":
        yield contextlib.nullcontext()
        return
    number = device.index or 0
    pair = _stream_pair(number, torch.cuda.current_stream(device).cuda_stream)
    try:
        pair.fork()
        kernel_launch.emit_step(ForkJoin(number, joins=False))
        yield _on_side_stream(pair, number)
    finally:
        pair.join()
    kernel_launch.emit_step(ForkJoin(number, joins=True))


@contextlib.contextmanager
def _on_side_stream(pair: StreamPair, number: int) -> Iterator[None]:
    with torch.cuda.stream(pair.side), kernel_launch.redirect_steps(lambda step: OnSideStream(step, number)):
        yield


class ForkJoin(NamedTuple):
    """`fork` or `join` as a step of a call that is repeated. Between the two there are launches and waits alone."""

    number: int
    joins: bool

    def replay(self, stream: Any, tensors: list[Any], addresses: list[int]) -> None:
        pair = _stream_pair(self.number, stream)
        if self.joins:
            pair.join()
        else:
            pair.fork()

    def rebind(self, to: Callable[[Any, int], tuple[Any, int]]) -> ForkJoin:
        return self


class OnSideStream(NamedTuple):
    """A launch that was made aside, or a wait, as such a step."""

    step: Any
    number: int

    def replay(self, stream: Any, tensors: list[Any], addresses: list[int]) -> None:
        self.step.replay(_stream_pair(self.number, stream).side.cuda_stream, tensors, addresses)

    def rebind(self, to: Callable[[Any, int], tuple[Any, int]]) -> OnSideStream:
        return self._replace(step=self.step.rebind(to))


def _stream_pair(number: int, handle: int) -> StreamPair:
    """Of a device's current stream."""
    found = _stream_pairs.get((number, handle))
    if found is None:
        main = torch.cuda.current_stream(number)
        side = torch.cuda.Stream(number, priority=-1)
        # Another thread may have come first: all are to find the same.
        found = _stream_pairs.setdefault(
            (number, handle), StreamPair(main, side, torch.cuda.Event(), torch.cuda.Event())
        )
    return found
