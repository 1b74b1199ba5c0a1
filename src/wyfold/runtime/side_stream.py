"""Launches beside others, on a stream of their own, which is served first.

    with beside(device) as aside:
        with aside:
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


class Pair(NamedTuple):
    """A stream, the one beside it, and what each waits for of the other: made once, for they take longer than waiting.

    An event may be recorded again while somebody waits for it, who then does not wait longer.
    """

    here: torch.cuda.Stream
    there: torch.cuda.Stream
    forked: torch.cuda.Event
    joined: torch.cuda.Event

    def fork(self) -> None:
        self.forked.record(self.here)
        self.forked.wait(self.there)

    def join(self) -> None:
        self.joined.record(self.there)
        self.joined.wait(self.here)


_pairs: dict[tuple[int, int], Pair] = {}
"""By the device's number and a stream's handle."""


@contextlib.contextmanager
def beside(device: torch.device) -> Iterator[contextlib.AbstractContextManager[None]]:
    """What launches are made in that go to the stream beside the current one of a CUDA device; nowhere else on other
    devices. What comes after waits for them, also where the calls broke off: memory may be given up then."""
    if device.type != "cuda":
        yield contextlib.nullcontext()
        return
    number = device.index or 0
    pair = _pair(number, torch.cuda.current_stream(device).cuda_stream)
    try:
        pair.fork()
        kernel_launch.tell(Turn(number, joins=False))
        yield _aside(pair, number)
    finally:
        pair.join()
    kernel_launch.tell(Turn(number, joins=True))


@contextlib.contextmanager
def _aside(pair: Pair, number: int) -> Iterator[None]:
    with torch.cuda.stream(pair.there), kernel_launch.elsewhere(lambda step: Aside(step, number)):
        yield


class Turn(NamedTuple):
    """`fork` or `join` as a step of a call that is repeated. Between the two there are launches and waits alone."""

    number: int
    joins: bool

    def again(self, stream: Any, tensors: list[Any], addresses: list[int]) -> None:
        pair = _pair(self.number, stream)
        if self.joins:
            pair.join()
        else:
            pair.fork()

    def moved(self, to: Callable[[Any, int], tuple[Any, int]]) -> Turn:
        return self


class Aside(NamedTuple):
    """A launch that was made aside, or a wait, as such a step."""

    step: Any
    number: int

    def again(self, stream: Any, tensors: list[Any], addresses: list[int]) -> None:
        self.step.again(_pair(self.number, stream).there.cuda_stream, tensors, addresses)

    def moved(self, to: Callable[[Any, int], tuple[Any, int]]) -> Aside:
        return self._replace(step=self.step.moved(to))


def _pair(number: int, handle: int) -> Pair:
    """Of a device's current stream."""
    found = _pairs.get((number, handle))
    if found is None:
        here = torch.cuda.current_stream(number)
        there = torch.cuda.Stream(number, priority=-1)
        # Another thread may have come first: all are to find the same.
        found = _pairs.setdefault((number, handle), Pair(here, there, torch.cuda.Event(), torch.cuda.Event()))
    return found
