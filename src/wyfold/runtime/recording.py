"""What a call does once everything is decided: memory asked for, kernels launched, operations of PyTorch, collectives
waited for, in order.

A course holds no tensor and no address. Its tensors are numbered: first those that a call is given, then those that it
makes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from wyfold.runtime import kernel_launch
from wyfold.runtime.side_stream import ForkJoin


class Step(Protocol):
    """Something that reaches the device, or keeps memory."""

    def replay(self, stream: Any, tensors: list[Any], addresses: list[int]) -> None:
        """Do it on numbered tensors at these addresses, and on this stream, or the one beside it."""

    def rebind(self, to: Callable[[Any, int], tuple[Any, int]]) -> Step:
        """The same of other tensors; to: number, and bytes behind its first element, of what they were."""


class Allocate(NamedTuple):
    """Memory is asked for, which becomes a numbered tensor."""

    tensor: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def replay(self, stream: Any, tensors: list[Any], addresses: list[int]) -> None:
        number, shape, stride, dtype, device = self
        tensors[number] = x = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        addresses[number] = x.data_ptr()

    def rebind(self, to: Callable[[Any, int], tuple[Any, int]]) -> Allocate:
        return self


class Free(NamedTuple):
    """A tensor is needed no more: its memory is there for the next one."""

    tensor: int

    def replay(self, stream: Any, tensors: list[Any], addresses: list[int]) -> None:
        tensors[self.tensor] = None

    def rebind(self, to: Callable[[Any, int], tuple[Any, int]]) -> Free:
        return self


class View(NamedTuple):
    """A tensor as an operation is given it: a view, from so many elements behind a numbered tensor's first one on."""

    tensor: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensors: list[Any]) -> Tensor:
        whole: Tensor = tensors[self.tensor]
        if not self.offset and self.shape == whole.shape and self.stride == whole.stride():
            return whole
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)


class Operation(NamedTuple):
    """An operation of PyTorch.

    Attributes:
        operator, keywords: Called as they are.
        arguments: `View`s among them stand for tensors.
        made: Number of its result, or None where that is one of the arguments.
    """

    operator: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    made: int | None

    def replay(self, stream: Any, tensors: list[Any], addresses: list[int]) -> None:
        arguments = [x.of(tensors) if type(x) is View else x for x in self.arguments]
        found = self.operator(*arguments, **self.keywords)
        if self.made is not None:
            tensors[self.made] = found
            addresses[self.made] = found.data_ptr()

    def rebind(self, to: Callable[[Any, int], tuple[Any, int]]) -> Operation:
        return self


class WaitCollective(NamedTuple):
    """What is launched after this waits until a collective has written its result, a numbered tensor."""

    tensor: int

    def replay(self, stream: Any, tensors: list[Any], addresses: list[int]) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            wait_collective(tensors[self.tensor])

    def rebind(self, to: Callable[[Any, int], tuple[Any, int]]) -> WaitCollective:
        return self


def wait_collective(x: Tensor) -> None:
    """`WaitCollective`, on the current stream."""
    torch.ops._c10d_functional.wait_tensor(x)


class Recording(NamedTuple):
    """One call.

    Attributes:
        device: Where.
        kernels: Of the launches.
        alike: Pairs among the given that must be one tensor.
        made: How many tensors there are besides.
        steps: What is done, in order.
        results: Numbers of the tensors that are returned, or None.
        single: Whether it is one instead of a tuple.
        zeros: Places of zeros among the call's values, and these in words, which tell their signs.
    """

    device: torch.device
    kernels: tuple[Any, ...]
    same_tensor: tuple[tuple[int, int], ...]
    made: int
    steps: tuple[Step, ...]
    results: tuple[int | None, ...]
    single: bool
    zeros: tuple[tuple[int, str], ...] = ()

    def guards_hold(self, given: tuple[Any, ...], values: tuple[Any, ...]) -> bool:
        """Whether a call on these may take it now: on its device, with nobody watching its kernels."""
        for place, zero in self.zeros:
            if str(values[place]) != zero:
                return False
        for one, other in self.same_tensor:
            if given[one] is not given[other]:
                return False
        return not kernel_launch.has_launch_hooks(*self.kernels) and kernel_launch.current_device() == (
            self.device.index or 0
        )

    def run(self, given: tuple[Any, ...], addresses: list[int]) -> Any:
        """Results of a call on these tensors, whose addresses are known already."""
        kernel_launch.enter_context(given)
        stream = kernel_launch.current_stream(self.device.index or 0)
        tensors = [*given, *[None] * self.made]
        addresses = addresses + [0] * self.made
        steps = iter(self.steps)
        step: Step | None = None
        try:
            for step in steps:
                step.replay(stream, tensors, addresses)
        except BaseException:
            # Or memory would be given up that launches aside still use.
            for left in (step, *steps):
                if type(left) is ForkJoin:
                    left.replay(stream, tensors, addresses)
            raise
        if self.single:
            (result,) = self.results
            return None if result is None else tensors[result]
        return tuple([None if result is None else tensors[result] for result in self.results])
