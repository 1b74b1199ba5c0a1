"""Recorder: turns one execution of a call into a `Recording`.

The recorder sees PyTorch's operations as a dispatch mode and kernel launches as an observer of
`kernel_launch.launch_kernel`. It numbers every allocation and follows views back to it. Allocations, launches,
operations and waits become steps on these numbers. It gives up, with a reason, on anything that a replay could not
repeat exactly.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from wyfold.runtime import kernel_launch, torch_modes
from wyfold.runtime.recording import Allocate, Free, Operation, Recording, Step, View, WaitCollective, allocator
from wyfold.runtime.side_stream import ForkJoin, on_side_stream

Result = TypeVar("Result")

POOLED_BYTES = 1 << 20
"""Largest workspace tensor that is kept to the end of the call. PyTorch's allocator keeps larger tensors in a separate
pool."""

ALIGNMENT = 512
"""Alignment in bytes of what PyTorch's allocator returns, and of each tensor in a shared allocation."""

ALLOCATIONS = frozenset(
    f"aten::{name}" for name in ("empty", "new_empty", "empty_strided", "new_empty_strided", "empty_like")
)
"""Operations that allocate and do not write."""

WRITTEN = {
    "aten::new_zeros": Tensor.zero_,
    "aten::zeros_like": Tensor.zero_,
    "aten::clone": Tensor.copy_,
    "aten::_to_copy": Tensor.copy_,
}
"""Operations that allocate and write: the method that writes. A replay allocates their result as a launch's."""

METHODS = {
    f"aten::{name}": getattr(Tensor, name)
    for name in (
        "zero_",
        "fill_",
        "copy_",
        "add_",
        "mul",
        "sub",
        "floor_divide",
        "cumsum",
        "sum",
        "index_fill_",
        "addmm_",
    )
}
"""Operations that a replay calls as methods, which takes a half to a tenth of the time (docs/facts/host.md, HOST-4)."""

REPEATABLE = frozenset((*METHODS, *WRITTEN, "aten::_unsafe_view", "aten::arange", "aten::full"))
"""Operations that a replay calls again. Shapes of their results follow from shapes alone, and autocast does not affect
them on the dtypes they are used with here, integers and float32. It never affects operations in place."""

PRODUCTS: dict[Any, Callable[..., Any]] = {torch.ops.aten.mm.out: torch.mm, torch.ops.aten.addmm.out: torch.addmm}
"""Matrix products that are written to a given tensor, `out`, which autocast does not affect either."""

ALL_GATHER, WAIT_TENSOR = "_c10d_functional::all_gather_into_tensor", "_c10d_functional::wait_tensor"
"""A collective, which a replay launches again, and the wait for one, which becomes a `WaitCollective`."""


def record(tensors: tuple[Any, ...], run: Callable[[], Result]) -> tuple[Result, Recording | str]:
    """Run a call and record it.

    Args:
        tensors: All tensors that `run` works on, the first one on the device of the call; None for an absent one.
        run: Returns None, a tensor, a list or a tuple of these.

    Returns:
        The result of `run()`, and the recording, or the reason why there is none. The reason is empty if a kernel was
        compiled meanwhile: the next such call can be recorded.
    """
    recorder = _Recorder(tensors)
    try:
        with torch_modes.bypass_dispatch(), kernel_launch.observe_steps(recorder.add_launch), recorder:
            result = run()
        return result, recorder.finish(result)
    finally:
        recorder.weakrefs.clear()  # their callbacks keep the recorder alive, and it keeps the call's tensors alive


class OperationMode(TorchDispatchMode):
    """Dispatch mode for the operations that remain after decomposition.

    Unlike its base class it does not make PyTorch import its compiler. That import takes seconds in the first call of a
    process.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # in inference mode, composite operations arrive here before they are decomposed
            result = func.decompose(*args, **kwargs)
        return self.operation(func, args, kwargs) if result is NotImplemented else result

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Result of an operation that is not composed of others."""
        raise NotImplementedError


def _write_product(product: Callable[..., Any], *tensors: Tensor) -> None:
    """Write a product of all tensors but the last one to that one."""
    *factors, out = tensors
    product(*factors, out=out)


class _NotRecordable(Exception):
    """Reason why a call cannot be recorded."""


class _Location(NamedTuple):
    """First element of a tensor: number of the tensor it is part of, and bytes behind the first element of that."""

    tensor: int
    offset: int


class _Recorder(OperationMode):
    """Records one call. Tensors are numbered in order of appearance: arguments first, then allocations.

    Attributes:
        given, device: Arguments of the call, and its device.
        make: Allocates memory there in a replay.
        locations: `id` of each live tensor -> its location.
        weakrefs: The same keys -> a reference whose callback reports the end of the tensor.
        allocated: Number -> the tensor as it was allocated.
        sizes: Number -> bytes of an allocation.
        live_views: Number -> count of live tensors that are part of it.
        same_tensor: Pairs of arguments that are one tensor.
        steps, kernels: Of the recording.
        refusal: First reason why the call cannot be recorded; empty so far.
        compiled: Whether a kernel was compiled or looked up by Triton meanwhile.
        forked: Whether a side stream is forked. Between fork and join only launches and waits can be replayed, and
            allocations of one stream's own memory.
        on_side: Numbers of the allocations on a side stream.
        in_fork: Numbers of the allocations since the fork.
    """

    def __init__(self, given: tuple[Any, ...]):
        super().__init__()
        self.given, self.device = given, given[0].device
        self.make = allocator(self.device)
        self.locations: dict[int, _Location] = {}
        self.weakrefs: dict[int, weakref.ref[Tensor]] = {}
        self.allocated: dict[int, weakref.ref[Tensor]] = {}
        self.same_tensor: list[tuple[int, int]] = []
        self.sizes: dict[int, int] = {}
        self.live_views: dict[int, int] = {}
        self.steps: list[Step] = []
        self.kernels: list[Any] = []
        self.refusal, self.compiled = "", False
        self.forked = False
        self.on_side, self.in_fork = set[int](), set[int]()
        for number, x in enumerate(given):
            if x is not None and id(x) in self.locations:
                self.same_tensor.append((self.locations[id(x)].tensor, number))
            elif x is not None:
                self.track(x, _Location(number, 0))

    # --- steps, as they happen

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute an operation of PyTorch and record it."""
        result = func(*args, **kwargs)
        name = func._schema.name
        with self.keeping_refusal():
            if name == WAIT_TENSOR:
                self.steps.append(kernel_launch.map_step(WaitCollective(self.locate(args[0]).tensor)))
                return result
            if self.forked and not func.is_view and name not in ALLOCATIONS:
                raise _NotRecordable(f"{name} is called while a side stream is forked")
            if name in ALLOCATIONS:
                self.add_allocation(result)
            elif func in PRODUCTS and kwargs.keys() == {"out"}:
                write = functools.partial(_write_product, PRODUCTS[func])
                self.steps.append(Operation(write, tuple(map(self.view_of, (*args, result))), {}, None))
            elif func.is_view:
                for view in (result,) if isinstance(result, Tensor) else result:
                    self.track_view(args[0], view)
            elif name in REPEATABLE or name == ALL_GATHER:
                self.add_operation(func, args, kwargs, result)
            else:
                raise _NotRecordable(f"{name} is called")
        return result

    def add_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        if any(isinstance(x, Tensor) for x in kwargs.values()):
            raise _NotRecordable("a tensor is passed by keyword")
        name = func._schema.name
        if name in WRITTEN:
            self.add_allocation(result)
            sources = (args[0],) if WRITTEN[name] is Tensor.copy_ else ()
            self.steps.append(Operation(WRITTEN[name], tuple(map(self.view_of, (result, *sources))), {}, None))
            return
        arguments = tuple([self.view_of(x) if isinstance(x, Tensor) else x for x in args])
        number = None if any(result is x for x in args) else self.number_allocation(result)
        self.steps.append(Operation(METHODS.get(name, func), arguments, kwargs, number))

    def add_allocation(self, x: Tensor) -> None:
        """Record the allocation of a tensor."""
        number, make = self.number_allocation(x), self.make
        if self.forked:
            self.in_fork.add(number)
        if kernel_launch.redirects_steps():
            self.on_side.add(number)
            make = on_side_stream(self.device.index or 0, make)
        self.steps.append(Allocate(number, tuple(x.shape), x.stride(), x.dtype, make))

    def add_launch(self, step: Step | None, kernel: Any, *, new: bool) -> None:
        """Record a launch, or a step without a kernel; the observer of `kernel_launch.observe_steps`."""
        with self.keeping_refusal():
            if new:
                self.compiled = True
            elif step is None:
                raise _NotRecordable("Triton has to expand a launch's descriptors")
            else:
                if type(step) is ForkJoin:
                    self.forked = not step.joins
                    self.in_fork.clear()
                self.steps.append(step.rebind(self.locate_for_launch))
                if kernel is not None:
                    self.kernels.append(kernel)

    @contextlib.contextmanager
    def keeping_refusal(self) -> Iterator[None]:
        """Turn `_NotRecordable` into `refusal` and let the call go on."""
        try:
            yield
        except _NotRecordable as reason:
            self.refusal = self.refusal or str(reason)

    # --- which memory a tensor is part of

    def track(self, x: Tensor, location: _Location) -> None:
        """Remember where a tensor is, until it is gone."""
        self.locations[id(x)] = location
        self.live_views[location.tensor] = self.live_views.get(location.tensor, 0) + 1
        self.weakrefs[id(x)] = weakref.ref(x, functools.partial(self.untrack, id(x), location.tensor))

    def untrack(self, identity: int, number: int, _: object) -> None:
        """Forget a tensor that is gone. With the last tensor on it an allocation is freed."""
        del self.locations[identity], self.weakrefs[identity]
        self.live_views[number] -= 1
        if not self.live_views[number]:
            if self.forked and number not in self.in_fork:
                self.refusal = self.refusal or "memory is freed while a side stream is forked"
            self.steps.append(Free(number))

    def track_view(self, x: Tensor, view: Tensor) -> None:
        number, offset = self.locate(x)
        if view.dtype != x.dtype:
            raise _NotRecordable("a tensor is viewed as another dtype")
        if view is not x:
            self.track(view, _Location(number, offset + int(view.storage_offset() - x.storage_offset()) * x.itemsize))

    def locate(self, x: Any) -> _Location:
        """Location of a tensor."""
        if id(x) not in self.locations:
            raise _NotRecordable("a tensor of unknown origin is used")
        return self.locations[id(x)]

    def locate_for_launch(self, x: Any, _: int = 0) -> _Location:
        """Location of a tensor that a launch on the current stream uses."""
        location = self.locate(x)
        number = location.tensor
        if number in self.in_fork and (number in self.on_side) is not kernel_launch.redirects_steps():
            raise _NotRecordable("memory of one stream is used on the other")
        return location

    def view_of(self, x: Tensor) -> View:
        number, offset = self.locate(x)
        return View(number, tuple(x.shape), x.stride(), offset // x.itemsize)

    def number_allocation(self, x: Tensor) -> int:
        """The number of a newly allocated tensor."""
        if x.device != self.device:
            raise _NotRecordable(f"memory is allocated on {x.device}")
        number = len(self.given) + len(self.sizes)
        self.sizes[number] = x.untyped_storage().nbytes()
        self.track(x, _Location(number, 0))
        self.allocated[number] = weakref.ref(x)
        return number

    # --- the recording

    def finish(self, result: Any) -> Recording | str:
        """The recording of the call that returned `result`, or the reason why there is none."""
        if self.compiled:
            return ""
        with self.keeping_refusal():
            if not self.kernels:
                raise _NotRecordable("no kernel is launched")
            if self.refusal:
                raise _NotRecordable(self.refusal)
            returned: dict[int, Tensor] = {}
            return self.assemble(self.number_results(result, returned), returned)
        return self.refusal

    def number_results(self, result: Any, returned: dict[int, Tensor]) -> Any:
        """The result with each tensor replaced by its number; `returned` gets number -> tensor."""
        if result is None:
            return None
        if isinstance(result, Tensor):
            number = self.locate(result).tensor
            if number in returned:
                raise _NotRecordable("two results share memory")
            returned[number] = result
            return number
        if type(result) is tuple or type(result) is list:
            return type(result)([self.number_results(x, returned) for x in result])
        raise _NotRecordable(f"the result is a {type(result).__name__}")

    def assemble(self, results: Any, returned: dict[int, Tensor]) -> Recording:
        """Build the recording. Workspace tensors of one lifetime and stream share an allocation."""
        allocations = {step.tensor: step for step in self.steps if type(step) is Allocate}
        for number, x in returned.items():
            self.check_result(x, allocations.get(number))
        operands = {
            x.tensor for step in self.steps if type(step) is Operation for x in step.arguments if type(x) is View
        }
        workspace = [n for n in allocations if n not in returned and n not in operands]
        shared: dict[tuple[bool, tuple[int, int]], int] = {}
        moved: dict[int, tuple[int, int]] = {}
        sizes: Counter[int] = Counter()
        for number, lifetime in zip(workspace, self.lifetimes(workspace)):
            memory = shared.setdefault((number in self.on_side, lifetime), len(self.given) + len(self.sizes) + len(shared))
            moved[number] = memory, sizes[memory]
            sizes[memory] += -(-self.sizes[number] // ALIGNMENT) * ALIGNMENT
        users = Counter(memory for memory, _ in moved.values())
        steps: list[Step] = []
        for step in self.steps:
            if type(step) is Allocate and step.tensor in returned:
                x = returned[step.tensor]
                steps.append(step._replace(shape=tuple(x.shape), stride=x.stride()))
            elif type(step) is Allocate and step.tensor in moved:
                memory = moved[step.tensor][0]
                if memory in sizes:  # made with the first of its tensors
                    steps.append(Allocate(memory, (sizes.pop(memory),), (1,), torch.uint8, step.make))
            elif type(step) is Free and step.tensor in moved:
                memory = moved[step.tensor][0]
                users[memory] -= 1
                if not users[memory]:  # and freed with the last one
                    steps.append(Free(memory))
            else:
                steps.append(
                    step.rebind(lambda n, offset: (moved[n][0], moved[n][1] + offset) if n in moved else (n, offset))
                )
        while type(steps[-1]) is Free:  # the end of a replay frees everything
            steps.pop()
        made = len(self.sizes) + len(shared)
        same_tensor = tuple(self.same_tensor)
        return Recording(self.device, tuple(self.kernels), same_tensor, made, tuple(steps), results)

    def lifetimes(self, workspace: list[int]) -> list[tuple[int, int]]:
        """Lifetimes of tensors: how many others were freed before one was made, and how many made before it was freed.

        Together, tensors of one lifetime take no more memory than apart. Small tensors live as long as the call: they
        take little, and are neither counted nor freed earlier.
        """
        small = {n for n in workspace if self.sizes[n] <= POOLED_BYTES}
        made, freed = 0, 0
        born: dict[int, int] = {}
        died: dict[int, int] = {}
        for step in self.steps:
            if type(step) is Allocate and step.tensor not in small:
                made, born[step.tensor] = made + 1, freed
            elif type(step) is Operation and step.made is not None:
                made += 1
            elif type(step) is Free and step.tensor not in small:
                freed, died[step.tensor] = freed + 1, made
        return [(0, made) if n in small else (born[n], died.get(n, made)) for n in workspace]

    def check_result(self, x: Tensor, allocation: Allocate | None) -> None:
        """Check that a result is an argument or a whole allocation.

        Args:
            x: The result.
            allocation: Step that allocates it, whose shape and strides a replay replaces by the result's. None for an
                argument and for the result of an operation, which keeps its shape.
        """
        number, offset = self.locate(x)
        if number < len(self.given):
            if x is not self.given[number]:
                raise _NotRecordable("a result is a view of an argument")
            return
        span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride())) if x.numel() else 0
        whole = not offset and span * x.itemsize == self.sizes[number]
        if not whole or (allocation is None and x is not self.allocated[number]()):
            raise _NotRecordable("a result is part of an allocation")
