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
from wyfold.runtime.recording import Ask, Course, Drop, Operation, Part, Step, Wait
from wyfold.runtime.side_stream import Turn

Result = TypeVar("Result")

SMALL = 1 << 20
"""Bytes up to which memory that no one will see is asked for in one piece: the allocator treats larger ones apart."""

ALIGNMENT = 512
"""Of what the allocator returns, and so of every piece."""

ASKS = frozenset(f"aten::{name}" for name in ("empty", "new_empty", "empty_strided", "new_empty_strided", "empty_like"))
"""Operations that only ask for memory."""

DOES = frozenset(
    f"aten::{name}"
    for name in (
        *("zero_", "fill_", "copy_", "clone", "_to_copy", "_unsafe_view", "new_zeros", "zeros_like"),
        *("add_", "arange", "full", "mul", "sub", "floor_divide", "cumsum", "sum", "eye", "index_copy_"),
    )
)
"""Operations that are repeated as they are: the shape of what they return follows from shapes, and autocast leaves them
alone, or what they are called on here, integers and float32."""


WAITS = "_c10d_functional::wait_tensor"
"""What a `Wait` does."""


def listened(tensors: tuple[Any, ...], run: Callable[[], Result]) -> tuple[Result, Course | str]:
    """`run()`, and the course of calls that are equal to it, or why they have none; see `recalled`.

    The reason is empty if a kernel was compiled meanwhile: the next such call is to be heard instead.
    """
    listener = _Listener(tensors)
    try:
        with torch_ops.alone(), kernel_launch.heard(listener.launched), listener:
            result = run()
        return result, listener.course(result)
    finally:
        listener.watches.clear()  # which hold it, and with it the tensors it was given


class _Unheard(Exception):
    """Why a call has no course."""


class _Piece(NamedTuple):
    """What a tensor is a part of: a numbered tensor, and the bytes behind its first element."""

    tensor: int
    offset: int


class Hearing(TorchDispatchMode):
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


class _Listener(Hearing):
    """Hears one call. Its tensors are numbered as they come: those given, then those made."""

    def __init__(self, given: tuple[Any, ...]):
        super().__init__()
        self.given, self.device = given, given[0].device
        self.pieces: dict[int, _Piece] = {}  # by `id` of every tensor that is there
        self.watches: dict[int, weakref.ref[Tensor]] = {}  # of the same, to know when it is gone
        self.whole: dict[int, weakref.ref[Tensor]] = {}  # what was made, by number
        self.alike: list[tuple[int, int]] = []
        self.sizes: dict[int, int] = {}  # bytes of what was made
        self.alive: dict[int, int] = {}  # how many tensors are parts of it
        self.steps: list[Step] = []
        self.kernels: list[Any] = []
        self.refusal, self.compiled = "", False
        self.forked = False  # launches are made aside, which nothing but launches and waits may come between
        for number, x in enumerate(given):
            if x is not None and id(x) in self.pieces:
                self.alike.append((self.pieces[id(x)].tensor, number))
            elif x is not None:
                self.know(x, _Piece(number, 0))

    def know(self, x: Tensor, piece: _Piece) -> None:
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
            self.steps.append(Drop(number))

    def of(self, x: Any, _: int = 0) -> _Piece:
        if id(x) not in self.pieces:
            raise _Unheard("a tensor is used that nobody made")
        return self.pieces[id(x)]

    @contextlib.contextmanager
    def hearing(self) -> Iterator[None]:
        """Within, what is not understood is noted, and the call goes on."""
        try:
            yield
        except _Unheard as reason:
            self.refusal = self.refusal or str(reason)

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = func(*args, **kwargs)
        name = func._schema.name
        with self.hearing():
            if name == WAITS:
                self.steps.append(kernel_launch.as_told(Wait(self.of(args[0]).tensor)))
                return found
            if self.forked and not func.is_view:
                raise _Unheard(f"{name} is called while launches are made aside")
            if name in ASKS:
                number = self.make(found)
                self.steps.append(Ask(number, tuple(found.shape), found.stride(), found.dtype, self.device))
            elif func.is_view:
                for view in (found,) if isinstance(found, Tensor) else found:
                    self.see(args[0], view)
            elif name in DOES:
                self.do(func, args, kwargs, found)
            else:
                raise _Unheard(f"{name} is called")
        return found

    def make(self, x: Tensor) -> int:
        """A new tensor's number."""
        if x.device != self.device:
            raise _Unheard(f"memory is asked for on {x.device}")
        number = len(self.given) + len(self.sizes)
        self.sizes[number] = x.untyped_storage().nbytes()
        self.know(x, _Piece(number, 0))
        self.whole[number] = weakref.ref(x)
        return number

    def see(self, x: Tensor, view: Tensor) -> None:
        """A view of x."""
        number, offset = self.of(x)
        if view.dtype != x.dtype:
            raise _Unheard("a tensor is seen as another dtype")
        if view is not x:
            self.know(view, _Piece(number, offset + int(view.storage_offset() - x.storage_offset()) * x.itemsize))

    def do(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Tensor) -> None:
        """An operation that will be repeated."""
        if any(isinstance(x, Tensor) for x in kwargs.values()):
            raise _Unheard("a tensor is given by name")
        arguments = tuple([self.part(x) if isinstance(x, Tensor) else x for x in args])
        number = None if any(found is x for x in args) else self.make(found)
        self.steps.append(Operation(func, arguments, kwargs, number))

    def part(self, x: Tensor) -> Part:
        number, offset = self.of(x)
        return Part(number, tuple(x.shape), x.stride(), offset // x.itemsize)

    def launched(self, launch: Step | None, kernel: Any, *, new: bool) -> None:
        """As `bound.heard` tells it."""
        with self.hearing():
            if new:
                self.compiled = True
            elif launch is None:
                raise _Unheard("Triton looks at a launch")
            else:
                if type(launch) is Turn:
                    self.forked = not launch.joins
                self.steps.append(launch.moved(self.of))
                if kernel is not None:
                    self.kernels.append(kernel)

    def course(self, result: Any) -> Course | str:
        """What calls like this one do, or why there is no saying."""
        if self.compiled:
            return ""
        with self.hearing():
            if not self.kernels:
                raise _Unheard("nothing is launched")
            if self.refusal:
                raise _Unheard(self.refusal)
            if type(result) is not tuple and result is not None and not isinstance(result, Tensor):
                raise _Unheard(f"the result is a {type(result).__name__}")
            return self.written(result if type(result) is tuple else (result,), single=type(result) is not tuple)
        return self.refusal

    def written(self, results: tuple[Any, ...], *, single: bool) -> Course:
        numbers = [None if x is None else self.of(x).tensor for x in results]
        seen = {number: x for number, x in zip(numbers, results) if number is not None}
        asked = {step.tensor: step for step in self.steps if type(step) is Ask}
        for number, x in seen.items():
            self.check_result(x, asked.get(number))
        if len(seen) + numbers.count(None) < len(numbers):
            raise _Unheard("two results share memory")
        used = {x.tensor for step in self.steps if type(step) is Operation for x in step.arguments if type(x) is Part}
        small = [n for n in asked if n not in seen and n not in used and self.sizes[n] <= SMALL]
        room, place = len(self.given) + len(self.sizes), {}
        size = 0
        for number in small:
            place[number] = room, size
            size += -(-self.sizes[number] // ALIGNMENT) * ALIGNMENT
        steps: list[Step] = [Ask(room, (size,), (1,), torch.uint8, self.device)] if small else []
        for step in self.steps:
            if type(step) is Ask and step.tensor in seen:
                x = seen[step.tensor]
                steps.append(step._replace(shape=tuple(x.shape), stride=x.stride()))
            elif not (isinstance(step, Ask | Drop) and step.tensor in place):
                steps.append(
                    step.moved(lambda n, offset: (place[n][0], place[n][1] + offset) if n in place else (n, offset))
                )
        while type(steps[-1]) is Drop:  # as everything is in the end
            steps.pop()
        made = len(self.sizes) + 1
        return Course(self.device, tuple(self.kernels), tuple(self.alike), made, tuple(steps), tuple(numbers), single)

    def check_result(self, x: Tensor, asked: Ask | None) -> None:
        """It is one of those given, or is all of what was made, in the place of which it will be asked for."""
        number, offset = self.of(x)
        if number < len(self.given):
            if x is not self.given[number]:
                raise _Unheard("a result is a view of an argument")
            return
        span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride())) if x.numel() else 0
        # Memory is asked for in the result's shape; what an operation returns has the one it has.
        if offset or span * x.itemsize != self.sizes[number] or (asked is None and x is not self.whole[number]()):
            raise _Unheard("a result is a part of something")
