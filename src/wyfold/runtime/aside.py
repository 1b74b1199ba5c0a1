"""Launches beside others, on a stream of their own, which is served first.

    with beside(device) as aside:
        with aside:
            ...             # is launched behind everything before it
        ...                 # does not wait for that, and makes use of what it leaves idle
    ...                     # waits for both

Each stream that calls are made on has one beside it, so that captured calls and others do not meet. Memory that is used
aside is asked for before, and is not given up within.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from wyfold.runtime import bound

_beside: dict[tuple[int, int], torch.cuda.Stream] = {}
"""By the device's number and a stream's handle."""


@contextlib.contextmanager
def beside(device: torch.device) -> Iterator[contextlib.AbstractContextManager[None]]:
    """What launches are made in that go to the stream beside the current one of a CUDA device; nowhere else on other
    devices. What comes after waits for them, also where the calls broke off: memory may be given up then."""
    if device.type != "cuda":
        yield contextlib.nullcontext()
        return
    fork(device)
    bound.tell(Turn(fork, device))
    try:
        yield _aside(device)
    finally:
        join(device)
    bound.tell(Turn(join, device))


@contextlib.contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    with torch.cuda.stream(_pair(device)[1]), bound.elsewhere(lambda launch: Aside(launch, device)):
        yield


def fork(device: torch.device) -> None:
    here, there = _pair(device)
    there.wait_stream(here)


def join(device: torch.device) -> None:
    here, there = _pair(device)
    here.wait_stream(there)


class Turn(NamedTuple):
    """`fork` or `join` as a step of a call that is repeated."""

    turn: Callable[[torch.device], None]
    device: torch.device

    def again(self, stream: Any, tensors: list[Any], addresses: list[int]) -> None:
        self.turn(self.device)

    def moved(self, to: Callable[[Any, int], tuple[Any, int]]) -> Turn:
        return self


class Aside(NamedTuple):
    """A launch that was made aside, as such a step."""

    launch: bound.Launch
    device: torch.device

    def again(self, stream: Any, tensors: list[Any], addresses: list[int]) -> None:
        self.launch.again(_pair(self.device)[1].cuda_stream, tensors, addresses)

    def moved(self, to: Callable[[Any, int], tuple[Any, int]]) -> Aside:
        return self._replace(launch=self.launch.moved(to))


def _pair(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """The current stream, and the one beside it."""
    here = torch.cuda.current_stream(device)
    key = here.device_index, here.cuda_stream
    if key not in _beside:
        _beside[key] = torch.cuda.Stream(device, priority=-1)
    return here, _beside[key]
