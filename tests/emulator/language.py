"""The kernel language on the emulator: `gl`, `tl` and the Hopper instructions.

`bind` runs the code of a kernel, and of every device function it can reach, with other globals. Language modules and
instructions are replaced by the ones in this file, device functions by their bound versions, constexprs by their
values. Objects are replaced by identity, so this file depends on no name in a kernel's module.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from tests.emulator import ptx
from tests.emulator.fault import Fault
from tests.emulator.machine import (
    Barrier,
    Barriers,
    Machine,
    Product,
    async_copy,
    commit_group,
    multiplied,
    product_wait,
    store_wait,
    tma_load,
    tma_store,
    wait_group,
)
from tests.emulator.shared_memory import SharedMemory
from tests.emulator.value import Pointer, Value, elementwise, matched
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere, hopper
from triton.runtime.jit import ConstexprFunction, JITFunction

from wyfold.tile.index import gluon as index

Shape = list[int] | tuple[int, ...]


def bind(kernel: JITFunction, machine: Machine) -> Callable[..., None]:
    """The kernel as a Python function. A call runs one program of `machine`."""
    language, instructions = Language(machine), _instructions(machine)
    replaced = {id(gl): language, id(tl): language} | {id(x): y for x, y in instructions}
    modules: dict[str, dict[str, Any]] = {}

    def globals_of(name: str) -> dict[str, Any]:
        if name not in modules:
            modules[name] = {"__builtins__": builtins, "__name__": name, "range": device_range}
            modules[name] |= {key: bound(x) for key, x in vars(sys.modules[name]).items() if not key.startswith("__")}
        return modules[name]

    def bound(x: Any) -> Any:
        if id(x) in replaced:
            return replaced[id(x)]
        if isinstance(x, JITFunction):
            replaced[id(x)] = _Later(x.fn, globals_of)
            return replaced[id(x)]
        if isinstance(x, ConstexprFunction):
            return x.fn
        return x.value if isinstance(x, tl.constexpr) else x

    return bound(kernel)


class _Later:
    """A device function that is bound at its first call, because modules may import each other."""

    def __init__(self, function: FunctionType, globals_of: Callable[[str], dict[str, Any]]):
        self.function, self.globals_of, self.bound = function, globals_of, None
        self.__name__ = function.__name__

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.bound is None:
            f = self.function
            defaults = tuple(x.value if isinstance(x, tl.constexpr) else x for x in f.__defaults__ or ())
            self.bound = FunctionType(f.__code__, self.globals_of(f.__module__), f.__name__, defaults, f.__closure__)
            self.bound.__kwdefaults__ = f.__kwdefaults__
        return self.bound(*arguments, **named)


def device_range(*ends: Any, **_: Any) -> Iterator[Any]:
    """`range` in a kernel: it yields values in registers if one of the bounds is one."""
    numbers = range(*map(int, ends))
    if not any(isinstance(end, Value) for end in ends):
        return iter(numbers)
    return (Value.of(number) for number in numbers)


def _instructions(machine: Machine) -> list[tuple[Any, Any]]:
    """Instructions that kernels import by name, each with its replacement."""

    def product(a: Any, b: Any, acc: Any, *, use_acc: Any = True, is_async: bool = False, **_: Any) -> Any:
        made = Product(machine.program, a, b, acc, bool(use_acc))
        return made if is_async else product_wait(machine.program, 0, [made])

    def product_now(a: Value, b: Value, acc: Value, input_precision: str | None = None) -> Value:
        return Value(acc.t + multiplied(a.t, b.t))

    def load(box: Any, at: Any, barrier: Any, tile: Any) -> None:
        tma_load(machine.program, box, at, barrier.index(0), tile)

    def wait(barrier: Any, phase: Any, pred: Any = True) -> None:
        if pred:
            barrier.index(0).wait(int(phase))

    def expect(barrier: Any, count: Any, pred: Any = True) -> None:
        if pred:
            barrier.index(0).expect(int(count))

    def arrive(barrier: Any, count: Any = 1, pred: Any = True) -> None:
        if pred:
            barrier.index(0).arrive(int(count))

    def site(name: str, instruction: Callable[..., Any]) -> Callable[..., Any]:
        """Record where the instruction is called, and skip it at `Machine.omit`."""

        def called(*arguments: Any, **named: Any) -> Any:
            caller = sys._getframe(1)
            place = f"{name} in {caller.f_code.co_name}, line {caller.f_lineno}"
            machine.sync_points.add(place)
            if place != machine.omit:
                return instruction(*arguments, **named)
            deps = named.get("deps", [None])
            return deps[0] if len(deps) == 1 else tuple(deps)

        return called

    def fence() -> None:
        machine.program.current.fence()

    def wait_for_stores(pendings: Any) -> None:
        store_wait(machine.program, int(pendings))

    def wait_for_products(n: Any, deps: list[Any]) -> Any:
        return product_wait(machine.program, int(n), deps)

    barriers = SimpleNamespace(
        MBarrierLayout=lambda: Barrier,
        init=site("init", lambda barrier, count: barrier.index(0).init(int(count))),
        wait=site("wait", wait),
        expect=site("expect", expect),
        arrive=site("arrive", arrive),
    )
    return [
        (hopper.mbarrier, barriers),
        (hopper.tma, SimpleNamespace(store_wait=site("store_wait", wait_for_stores))),
        (index.tma_load, load),
        (index.tma_store, lambda box, at, tile: tma_store(machine.program, box, at, tile)),
        (index.barrier, lambda: None),
        (index.copy_async, lambda tile, p, mask=None: async_copy(machine.program, tile, p, mask)),
        (index.reinterpret, lambda tile, *view: tile.reinterpret(*view)),
        (
            ampere.async_copy,
            SimpleNamespace(
                commit_group=site("commit_group", lambda: commit_group(machine.program)),
                wait_group=site("wait_group", lambda n=0: wait_group(machine.program, int(n))),
            ),
        ),
        (hopper.fence_async_shared, site("fence", fence)),
        (hopper.warpgroup_mma, product),
        (hopper.warpgroup_mma_wait, site("product_wait", wait_for_products)),
        (ampere.mma_v2, product_now),
    ]


class Language:
    """`gl` and `tl`. Layouts are Gluon's own classes, dtypes are torch's."""

    int1, int8, int32, int64 = torch.bool, torch.int8, torch.int32, torch.int64
    float16, bfloat16, float32, float64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
    constexpr = staticmethod(lambda x: x)
    static_range = range
    range = staticmethod(device_range)
    for _name in (
        "BlockedLayout", "DotOperandLayout", "NVMMADistributedLayout", "NVMMASharedLayout", "SharedLinearLayout",
        "SliceLayout", "SwizzledSharedLayout",
    ):  # fmt: skip
        locals()[_name] = getattr(gl, _name)

    def __init__(self, machine: Machine):
        self._machine = machine

    # --- the program ---

    def program_id(self, axis: int) -> Value:
        return Value.of(self._machine.program.number)

    def num_programs(self, axis: int) -> Value:
        return Value.of(self._machine.program.programs)

    def num_warps(self) -> int:
        return self._machine.program.current.warps

    def warp_specialize(self, functions: Any, warps: list[int], registers: list[int]) -> None:
        self._machine.program.specialize(functions, warps)

    def static_assert(self, true: Any, message: str = "") -> None:
        if not true:
            raise Fault(f"static_assert: {message}")

    # --- memory ---

    def allocate_shared_memory(self, dtype: torch.dtype, shape: Shape, layout: Any, value: Value | None = None) -> Any:
        program = self._machine.program
        if layout is Barrier:
            return Barriers(program, shape[0]) if len(shape) > 1 else Barrier(program)
        memory = SharedMemory.allocate(program, dtype, list(shape), layout)
        if value is not None:
            memory.store(value)
        return memory

    def load(self, p: Pointer, mask: Any = None, other: Any = 0) -> Value:
        return p.load(mask, other)

    def store(self, p: Pointer, x: Any, mask: Any = None) -> None:
        p.store(x, mask)

    # --- creation ---

    def arange(self, first: int, last: int, layout: Any = None) -> Value:
        count = last - first
        assert count & (count - 1) == 0, f"{count} is no power of two"
        return Value(torch.arange(first, last, dtype=torch.int32), layout)

    def zeros(self, shape: Shape, dtype: torch.dtype, layout: Any = None) -> Value:
        return Value(torch.zeros(tuple(shape), dtype=dtype), layout)

    def full(self, shape: Shape, x: Any, dtype: torch.dtype, layout: Any = None) -> Value:
        return Value(Value.of(x).t.to(dtype).expand(tuple(shape)), layout)

    # --- element by element ---

    def where(self, condition: Any, x: Any, y: Any) -> Value:
        condition = Value.of(condition).t
        if isinstance(x, int | float) and isinstance(y, int | float):
            x = Value.of(float(x) if isinstance(y, float) else x)
        return elementwise(lambda a, b: torch.where(condition, a, b), x, y)

    def minimum(self, x: Any, y: Any) -> Value:
        return elementwise(torch.minimum, x if isinstance(y, Value) else Value.of(x), y)

    def maximum(self, x: Any, y: Any) -> Value:
        return elementwise(torch.maximum, x if isinstance(y, Value) else Value.of(x), y)

    def fma(self, x: Any, y: Any, z: Any) -> Value:
        return elementwise(torch.add, elementwise(torch.mul, x if isinstance(y, Value) else Value.of(x), y), z)

    def abs(self, x: Value) -> Value:
        return Value(x.t.abs(), x.layout)

    def exp(self, x: Value) -> Value:
        return Value(x.t.exp(), x.layout)

    def exp2(self, x: Value) -> Value:
        return Value(torch.exp2(x.t), x.layout)

    def sqrt(self, x: Value) -> Value:
        return Value(x.t.sqrt(), x.layout)

    def rsqrt(self, x: Value) -> Value:
        return Value(x.t.rsqrt(), x.layout)

    def inline_asm_elementwise(
        self, asm: str, constraints: str, args: list[Value], dtype: Any, is_pure: bool, pack: int
    ) -> Any:
        if asm.startswith("griddepcontrol."):
            return Value.of(0)  # programs run one after another
        (x,) = args
        dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
        found = [Value(y, x.layout) for y in ptx.run(asm, constraints, x.t, x.layout, dtypes, pack)]
        return tuple(found) if isinstance(dtype, tuple) else found[0]

    # --- along an axis ---

    def sum(self, x: Value, axis: int | None = None) -> Value:
        return Value((x.t.sum() if axis is None else x.t.sum(axis)).to(x.dtype))

    def max(self, x: Value, axis: int | None = None) -> Value:
        return Value(x.t.amax() if axis is None else x.t.amax(axis))

    def min(self, x: Value, axis: int | None = None) -> Value:
        return Value(x.t.amin() if axis is None else x.t.amin(axis))

    def reduce(self, x: Any, axis: int, combine: Callable[..., Any]) -> Any:
        """A tree reduction of neighbours, which keeps the order of operands."""
        parts = [Value(y.t.movedim(axis, 0)) for y in (x if isinstance(x, tuple) else (x,))]
        while (count := parts[0].t.shape[0]) > 1:
            if count % 2:
                raise Fault(f"a reduction of {count} elements, not a power of two")
            found = combine(*(Value(y.t[0::2]) for y in parts), *(Value(y.t[1::2]) for y in parts))
            parts = list(found) if isinstance(found, tuple) else [found]
        parts = [Value(y.t[0]) for y in parts]
        return tuple(parts) if isinstance(x, tuple) else parts[0]

    def associative_scan(self, x: Value, axis: int, combine: Callable[..., Any]) -> Value:
        rows = [Value(y) for y in x.t.unbind(axis)]
        for i in range(1, len(rows)):
            rows[i] = combine(rows[i - 1], rows[i])
        return Value(torch.stack([row.t for row in rows], axis))

    # --- shapes ---

    def convert_layout(self, x: Value, layout: Any, assert_trivial: bool = False) -> Value:
        return Value(x.t, layout)

    def reshape(self, x: Value, shape: Shape) -> Value:
        return x.reshape(shape)

    def permute(self, x: Value, order: Shape) -> Value:
        return x.permute(order)

    def expand_dims(self, x: Value, axis: int) -> Value:
        return Value(x.t.unsqueeze(axis))

    def broadcast(self, x: Value, y: Value) -> tuple[Value, Value]:
        a, b = torch.broadcast_tensors(x.t, y.t)
        return Value(a), Value(b)

    def broadcast_to(self, x: Value, shape: Shape) -> Value:
        return Value(x.t.expand(tuple(shape)))

    def join(self, x: Any, y: Any) -> Value:
        return Value(torch.stack(torch.broadcast_tensors(*matched(x, y)), -1))

    def split(self, x: Value) -> tuple[Value, Value]:
        a, b = x.t.unbind(-1)
        return Value(a), Value(b)
