"""A recorded call: allocations, kernel launches, torch operations, all-gathers and waits for them, in order.

A recording holds no tensor and no address. Its tensors are numbered: the arguments of the call first, then those the
call allocates. `Recording.run` keeps one list of tensors and one of addresses, both indexed by these numbers, and
replays one step after another on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from wyfold.runtime import kernel_launch
from wyfold.runtime.side_stream import ForkJoin, OnSideStream


class Recording(NamedTuple):
    """A recorded call.

    Attributes:
        device: Device of the call.
        kernels: Triton kernels of the launches.
        same_tensor: Pairs of arguments, by number, that must be the same tensor.
        made: Number of tensors that are not arguments.
        steps: What the call does, in order.
        results: What the call returns, with the number of a tensor in its place: a number, None, or a tuple or list of
            these.
        zeros: Index and text of each zero among the call's values. The text includes the sign.
    """

    device: torch.device
    kernels: tuple[Any, ...]
    same_tensor: tuple[tuple[int, int], ...]
    made: int
    steps: tuple[Step, ...]
    results: Any
    zeros: tuple[tuple[int, str], ...] = ()

    def guards_hold(self, given: tuple[Any, ...], values: tuple[Any, ...]) -> bool:
        """Whether a call with this key may be replayed: conditions that the cache key does not cover.

        The signs of zeros and the aliasing of arguments must match, no hook may observe the kernels' launches, and the
        recording's device must be current.
        """
        for place, zero in self.zeros:
            if str(values[place]) != zero:
                return False
        for one, other in self.same_tensor:
            if given[one] is not given[other]:
                return False
        if kernel_launch.has_launch_hooks(*self.kernels):
            return False
        return kernel_launch.current_device() == (self.device.index or 0)

    def run(self, given: tuple[Any, ...], addresses: list[int]) -> Any:
        """Replay the call and return its results.

        Args:
            given: The call's tensors.
            addresses: Their addresses.
        """
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
            # Join the side stream before memory is freed that its launches may still use, and wait for launched
            # collectives, whose memory PyTorch keeps until then.
            for left in (step, *steps):
                wait = left.step if isinstance(left, OnSideStream) else left
                launched = isinstance(wait, WaitCollective) and tensors[wait.tensor] is not None
                if left is not None and (launched or isinstance(left, ForkJoin)):
                    left.replay(stream, tensors, addresses)
            raise
        return _with_tensors(self.results, tensors)


def _with_tensors(results: Any, tensors: list[Any]) -> Any:
    """`Recording.results` with tensors in the places of their numbers."""
    kind = type(results)
    if kind is int:
        return tensors[results]
    if kind is tuple:
        return tuple([tensors[x] if type(x) is int else _with_tensors(x, tensors) for x in results])
    return results if results is None else [_with_tensors(x, tensors) for x in results]


class Step(Protocol):
    """One step of a recorded call. Steps that are not defined here: `RecordedLaunch`, `ForkJoin`, `OnSideStream`."""

    def replay(self, stream: Any, tensors: list[Any], addresses: list[int]) -> None:
        """Do the step on numbered tensors.

        Args:
            stream: The call's stream, as a launcher takes it.
            tensors: By number; entries are added and removed.
            addresses: By number.
        """

    def rebind(self, to: Callable[[Any, int], tuple[Any, int]]) -> Step:
        """The same step with its pointers renumbered.

        Args:
            to: Maps a tensor (or its number) and a byte offset to the new number and offset.
        """


class Allocate(NamedTuple):
    """Allocation of tensor number `tensor`."""

    tensor: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]

    def replay(self, stream: Any, tensors: list[Any], addresses: list[int]) -> None:
        number, shape, stride, dtype, make = self
        tensors[number] = x = make(shape, stride, dtype)
        addresses[number] = x.data_ptr()

    def rebind(self, to: Callable[[Any, int], tuple[Any, int]]) -> Allocate:
        return self


def allocator(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """A function that allocates a tensor on a device, which is the current one, from shape, strides and dtype.

    PyTorch's compiled graphs allocate by the same functions, in half the time of `torch.empty_strided`. Where
    deterministic algorithms are demanded, `torch.empty_strided` fills the memory, and they do not.
    """
    fast = None if torch.are_deterministic_algorithms_enabled() else _FAST_EMPTY.get(device.type)
    return fast or (lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype, device=device))


_FAST_EMPTY = {name: getattr(torch._C._dynamo.guards, f"_empty_strided_{name}", None) for name in ("cpu", "cuda")}


class Free(NamedTuple):
    """Release of tensor number `tensor`, so that later allocations can reuse its memory."""

    tensor: int

    def replay(self, stream: Any, tensors: list[Any], addresses: list[int]) -> None:
        tensors[self.tensor] = None

    def rebind(self, to: Callable[[Any, int], tuple[Any, int]]) -> Free:
        return self


class View(NamedTuple):
    """A view of a numbered tensor, as an argument of an `Operation`.

    Attributes:
        tensor: Number of the viewed tensor.
        shape, stride: Of the view, in elements.
        offset: Elements between the first element of the tensor and that of the view.
    """

    tensor: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensors: list[Any]) -> Tensor:
        """The view of the tensor that has this number now."""
        whole: Tensor = tensors[self.tensor]
        if not self.offset and self.shape == whole.shape and self.stride == whole.stride():
            return whole
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)


class Operation(NamedTuple):
    """An operation of PyTorch, or an all-gather.

    Attributes:
        operator: The overload or method that is called.
        arguments: Positional arguments; a `View` stands for a tensor.
        keywords: Keyword arguments, none of them a tensor.
        made: Number of the result, or None if the result is one of the arguments.
    """

    operator: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    made: int | None

    def replay(self, stream: Any, tensors: list[Any], addresses: list[int]) -> None:
        arguments = [x.of(tensors) if type(x) is View else x for x in self.arguments]
        result = self.operator(*arguments, **self.keywords)
        if self.made is not None:
            tensors[self.made] = result
            addresses[self.made] = result.data_ptr()

    def rebind(self, to: Callable[[Any, int], tuple[Any, int]]) -> Operation:
        return self


class WaitCollective(NamedTuple):
    """Stream-side wait until a collective has written tensor number `tensor`. Later launches wait for it."""

    tensor: int

    def replay(self, stream: Any, tensors: list[Any], addresses: list[int]) -> None:
        x = tensors[self.tensor]
        if stream == kernel_launch.current_stream(x.device.index or 0):
            wait_collective(x)
        else:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
                wait_collective(x)

    def rebind(self, to: Callable[[Any, int], tuple[Any, int]]) -> WaitCollective:
        return self


def wait_collective(x: Tensor) -> None:
    """Make the current stream wait until the collective that writes `x` is done."""
    torch.ops._c10d_functional.wait_tensor(x)
