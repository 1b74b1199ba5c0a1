"""How a call becomes a course: everything that reaches the device is heard, and where each tensor of it comes from."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from wyfold.runtime import kernel_launch, torch_ops
from wyfold.runtime.recording import Allocate, Free, Operation, Recording, Step, View, WaitCollective
from wyfold.runtime.side_stream import ForkJoin

Result = TypeVar("Result")

POOLED_BYTES = 1 << 20
"""Bytes up to which memory that no one will see is asked for in one piece: the allocator treats larger ones apart."""

ALIGNMENT = 512
"""Of what the allocator returns, and so of every piece."""

ALLOCATIONS = frozenset(
    f"aten::{name}" for name in ("empty", "new_empty", "empty_strided", "new_empty_strided", "empty_like")
)
"""Operations that only ask for memory."""

REPEATABLE = frozenset(
    f"aten::{name}"
    for name in (
        *("zero_", "fill_", "copy_", "clone", "_to_copy", "_unsafe_view", "new_zeros", "zeros_like"),
        *("add_", "arange", "full", "mul", "sub", "floor_divide", "cumsum", "sum", "eye", "index_copy_"),
    )
)
"""Operations that are repeated as they are: the shape of what they return follows from shapes, and autocast leaves them
alone, or what they are called on here, integers and float32."""


WAIT_TENSOR = "_c10d_functional::wait_tensor"
"""What a `WaitCollective` does."""


def record(tensors: tuple[Any, ...], run: Callable[[], Result]) -> tuple[Result, Recording | str]:
    """`run()`, and the course of calls that are equal to it, or why they have none; see `replayed`.

    The reason is empty if a kernel was compiled meanwhile: the next such call is to be heard instead.
    """
    listener = _Recorder(tensors)
    try:
        with torch_ops.bypass_dispatch(), kernel_launch.observe_steps(listener.launched), listener:
            result = run()
        return result, listener.course(result)
    finally:
        listener.watches.clear()  # which hold it, and with it the tensors it was given


class _NotRecordable(Exception):
    """Why a call has no course."""


class _Location(NamedTuple):
    """What a tensor is a part of: a numbered tensor, and the bytes behind its first element."""

    tensor: int
    offset: int


class OperationMode(TorchDispatchMode):
    """A mode for which PyTorch does not import its compiler: that takes seconds, in the first call of a process."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # in inference mode nobody has taken these apart before
            found = func.decompose(*args, **kwargs)
        return self.operation(func, args, kwargs) if found is NotImplemented else found

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operation of PyTorch comes to that is no other ones together."""
        raise NotImplementedError


class _Recorder(OperationMode):
    """Hears one call. Its tensors are numbered as they come: those given, then those made."""

    def __init__(self, given: tuple[Any, ...]):
        super().__init__()
        self.given, self.device = given, given[0].device
        self.pieces: dict[int, _Location] = {}  # by `id` of every tensor that is there
        self.watches: dict[int, weakref.ref[Tensor]] = {}  # of the same, to know when it is gone
        self.whole: dict[int, weakref.ref[Tensor]] = {}  # what was made, by number
        self.same_tensor: list[tuple[int, int]] = []
        self.sizes: dict[int, int] = {}  # bytes of what was made
        self.alive: dict[int, int] = {}  # how many tensors are parts of it
        self.steps: list[Step] = []
        self.kernels: list[Any] = []
        self.refusal, self.compiled = "", False
        self.forked = False  # launches are made aside, which nothing but launches and waits may come between
        for number, x in enumerate(given):
            if x is not None and id(x) in self.pieces:
                self.same_tensor.append((self.pieces[id(x)].tensor, number))
            elif x is not None:
                self.know(x, _Location(number, 0))

    def know(self, x: Tensor, piece: _Location) -> None:
        self.pieces[id(x)] = piece
        self.alive[piece.tensor] = self.alive.get(piece.tensor, 0) + 1
        self.watches[id(x)] = weakref.ref(x, functools.partial(self.forget, id(x), piece.tensor))

    def forget(self, identity: int, number: int, _: object) -> None:
        """A tensor is no longer there."""
        del self.pieces[identity], self.watches[identity]
        self.alive[number] -= 1
        if not self.alive[number]:
            if self.forked:
                self.refusal = self.refusal or "memory is given up while launches are made aside"
            self.steps.append(Free(number))

    def of(self, x: Any, _: int = 0) -> _Location:
        if id(x) not in self.pieces:
            raise _NotRecordable("a tensor is used that nobody made")
        return self.pieces[id(x)]

    @contextlib.contextmanager
    def hearing(self) -> Iterator[None]:
        """Within, what is not understood is noted, and the call goes on."""
        try:
            yield
        except _NotRecordable as reason:
            self.refusal = self.refusal or str(reason)

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = func(*args, **kwargs)
        name = func._schema.name
        with self.hearing():
            if name == WAIT_TENSOR:
                self.steps.append(kernel_launch.map_step(WaitCollective(self.of(args[0]).tensor)))
                return found
            if self.forked and not func.is_view:
                raise _NotRecordable(f"{name} is called while launches are made aside")
            if name in ALLOCATIONS:
                number = self.make(found)
                self.steps.append(Allocate(number, tuple(found.shape), found.stride(), found.dtype, self.device))
            elif func.is_view:
                for view in (found,) if isinstance(found, Tensor) else found:
                    self.see(args[0], view)
            elif name in REPEATABLE:
                self.do(func, args, kwargs, found)
            else:
                raise _NotRecordable(f"{name} is called")
        return found

    def make(self, x: Tensor) -> int:
        """A new tensor's number."""
        if x.device != self.device:
            raise _NotRecordable(f"memory is asked for on {x.device}")
        number = len(self.given) + len(self.sizes)
        self.sizes[number] = x.untyped_storage().nbytes()
        self.know(x, _Location(number, 0))
        self.whole[number] = weakref.ref(x)
        return number

    def see(self, x: Tensor, view: Tensor) -> None:
        """A view of x."""
        number, offset = self.of(x)
        if view.dtype != x.dtype:
            raise _NotRecordable("a tensor is seen as another dtype")
        if view is not x:
            self.know(view, _Location(number, offset + int(view.storage_offset() - x.storage_offset()) * x.itemsize))

    def do(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Tensor) -> None:
        """An operation that will be repeated."""
        if any(isinstance(x, Tensor) for x in kwargs.values()):
            raise _NotRecordable("a tensor is given by name")
        arguments = tuple([self.part(x) if isinstance(x, Tensor) else x for x in args])
        number = None if any(found is x for x in args) else self.make(found)
        self.steps.append(Operation(func, arguments, kwargs, number))

    def part(self, x: Tensor) -> View:
        number, offset = self.of(x)
        return View(number, tuple(x.shape), x.stride(), offset // x.itemsize)

    def launched(self, launch: Step | None, kernel: Any, *, new: bool) -> None:
        """As `bound.observe_steps` tells it."""
        with self.hearing():
            if new:
                self.compiled = True
            elif launch is None:
                raise _NotRecordable("Triton looks at a launch")
            else:
                if type(launch) is ForkJoin:
                    self.forked = not launch.joins
                self.steps.append(launch.rebind(self.of))
                if kernel is not None:
                    self.kernels.append(kernel)

    def course(self, result: Any) -> Recording | str:
        """What calls like this one do, or why there is no saying."""
        if self.compiled:
            return ""
        with self.hearing():
            if not self.kernels:
                raise _NotRecordable("nothing is launched")
            if self.refusal:
                raise _NotRecordable(self.refusal)
            if type(result) is not tuple and result is not None and not isinstance(result, Tensor):
                raise _NotRecordable(f"the result is a {type(result).__name__}")
            return self.written(result if type(result) is tuple else (result,), single=type(result) is not tuple)
        return self.refusal

    def written(self, results: tuple[Any, ...], *, single: bool) -> Recording:
        numbers = [None if x is None else self.of(x).tensor for x in results]
        seen = {number: x for number, x in zip(numbers, results) if number is not None}
        asked = {step.tensor: step for step in self.steps if type(step) is Allocate}
        for number, x in seen.items():
            self.check_result(x, asked.get(number))
        if len(seen) + numbers.count(None) < len(numbers):
            raise _NotRecordable("two results share memory")
        used = {x.tensor for step in self.steps if type(step) is Operation for x in step.arguments if type(x) is View}
        small = [n for n in asked if n not in seen and n not in used and self.sizes[n] <= POOLED_BYTES]
        room, place = len(self.given) + len(self.sizes), {}
        size = 0
        for number in small:
            place[number] = room, size
            size += -(-self.sizes[number] // ALIGNMENT) * ALIGNMENT
        steps: list[Step] = [Allocate(room, (size,), (1,), torch.uint8, self.device)] if small else []
        for step in self.steps:
            if type(step) is Allocate and step.tensor in seen:
                x = seen[step.tensor]
                steps.append(step._replace(shape=tuple(x.shape), stride=x.stride()))
            elif not (isinstance(step, Allocate | Free) and step.tensor in place):
                steps.append(
                    step.rebind(lambda n, offset: (place[n][0], place[n][1] + offset) if n in place else (n, offset))
                )
        while type(steps[-1]) is Free:  # as everything is in the end
            steps.pop()
        made = len(self.sizes) + 1
        return Recording(
            self.device, tuple(self.kernels), tuple(self.same_tensor), made, tuple(steps), tuple(numbers), single
        )

    def check_result(self, x: Tensor, asked: Allocate | None) -> None:
        """It is one of those given, or is all of what was made, in the place of which it will be asked for."""
        number, offset = self.of(x)
        if number < len(self.given):
            if x is not self.given[number]:
                raise _NotRecordable("a result is a view of an argument")
            return
        span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride())) if x.numel() else 0
        # Memory is asked for in the result's shape; what an operation returns has the one it has.
        if offset or span * x.itemsize != self.sizes[number] or (asked is None and x is not self.whole[number]()):
            raise _NotRecordable("a result is a part of something")
