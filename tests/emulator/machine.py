"""An emulator of one Hopper multiprocessor, for Gluon kernels on a machine without a GPU.

`Machine.launch` takes the place of a kernel launch: it runs the kernel's own Python source (`language.py` binds the
names), one program after another. Asynchronous work happens at its worst moment, so that a program whose result depends
on timing raises a `Fault` or returns NaN:

- Partitions of `warp_specialize` are threads of which exactly one runs. They switch at synchronisations only, so a run
  is repeatable, and a deadlock is found at once.
- A TMA load fills its tile with NaN when it is issued. The data lands at once (`copies="early"`), or only when every
  partition waits ("late"). The bytes that a barrier expects and the bytes that land must agree.
- The source tile of a TMA store must not change before a `store_wait` covers the store.
- An asynchronous warpgroup MMA is computed when it is issued, and again at its wait if its shared memory changed.
  Elements that differ become NaN, since the hardware could have read either value. A change is therefore harmless only
  if no element that is used depends on it, as with padding rows, which kernels mask out.
- Shared memory that threads wrote, and barriers that they initialised, need a `fence_async_shared` before TMA or an MMA
  uses them.
- A TMA box must begin inside its tensor. Global loads and stores must stay inside their tensor's memory.

Not emulated: the warps of one partition (barriers between them are no-ops), reuse of shared memory by the allocator,
bank conflicts, register and shared memory limits, the order of global stores of different programs.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from tests.emulator.fault import Fault
from tests.emulator.shared_memory import SharedMemory
from tests.emulator.value import Pointer, Value
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from wyfold.runtime.kernel_configs import Config, processors, tuned
from wyfold.runtime.kernel_launch import launch_kernel


class Machine:
    """Settings of the emulator, and a log of what ran on it.

    Attributes:
        copies: "early": TMA loads and stores happen when they are issued; "late": when they are waited for, as copies
            that are not TMA's always do.
        order: Which runnable partition runs: the "first" or "last" in `warp_specialize`'s list, or the seed of random
            choices. Producers come last in the list: "last" lets them run as far ahead as barriers allow.
        launches: Names of the kernels that ran.
        loads: TMA loads that were issued.
        sync_points: Synchronisation instructions that ran, each with its function and line.
        omit: One of `sync_points` to skip, to show that it is needed; None skips none.
        changed: MMAs whose result depends on when they read shared memory, which changed in flight.
    """

    def __init__(self, copies: str = "late", order: str | int = "last"):
        if copies not in ("early", "late"):
            raise ValueError(f"Machine: copies must be 'early' or 'late', got {copies!r}")
        if order not in ("first", "last") and not isinstance(order, int):
            raise ValueError(f"Machine: order must be 'first', 'last' or a seed, got {order!r}")
        self.copies, self.order = copies, order
        self.launches: list[str] = []
        self.loads = 0
        self.sync_points: set[str] = set()
        self.omit: str | None = None
        self.changed: list[str] = []
        self.program = Program(self, 0, 1, 4)
        self._random = random.Random(order)

    def __repr__(self) -> str:
        return f"{self.copies} copies, {self.order} partition ahead"

    @contextlib.contextmanager
    def installed(self, module: ModuleType, config: Config) -> Iterator[None]:
        """Run launches of `module` on this machine, with `config`. Its globals are found by identity, not by name."""
        places = {id(launch_kernel): self.launch, id(tuned): lambda *_: config, id(processors): lambda _: 1}
        ours = {name: places[id(x)] for name, x in vars(module).items() if id(x) in places}
        with mock.patch.dict(vars(module), ours):
            yield

    def launch(self, kernel: Any, programs: int, /, *arguments: Any, **named: Any) -> None:
        """Run every program of a grid. Takes the arguments of `wyfold.runtime.kernel_launch.launch_kernel`."""
        from tests.emulator.language import bind  # imports this module

        function = bind(kernel, self)
        constexprs = {kernel.arg_names[n] for n in kernel.constexprs}
        given = [_argument(x) for x in arguments]
        others = {
            name: x if name in constexprs else _argument(x) for name, x in named.items() if name in kernel.arg_names
        }
        for number in range(programs):
            self.program = Program(self, number, programs, named.get("num_warps", 4))
            self.program.run(lambda: function(*given, **others))
        self.launches.append(kernel.fn.__name__)

    def choose(self, able: list[Partition]) -> Partition:
        """The next partition to run, of those that can."""
        if isinstance(self.order, int):
            return self._random.choice(able)
        return able[0 if self.order == "first" else -1]


def _argument(x: Any) -> Any:
    """Convert a launch argument to what the kernel receives."""
    if isinstance(x, TensorDescriptor):
        return Descriptor(x)
    if isinstance(x, Tensor):
        return Pointer(x)
    if isinstance(x, tuple):
        return type(x)(*map(_argument, x)) if hasattr(x, "_fields") else tuple(map(_argument, x))
    return Value.of(x) if isinstance(x, int | float) else x


# --- programs and partitions -----------------------------------------------------------------------------------------


class Partition:
    """One group of warps, and its asynchronous work that is not waited for yet.

    Attributes:
        turn: Released when the partition may run.
        waits_for: Barrier and phase parity; None if it can run.
        products, stores: In flight, in order of issue.
        copies: Groups of asynchronous copies in flight, the last of which is open.
        unfenced: Callbacks that mark this partition's writes as fenced.
    """

    def __init__(self, name: str, warps: int):
        self.name, self.warps = name, warps
        self.turn = threading.Semaphore(0)
        self.waits_for: tuple[Barrier, int] | None = None
        self.products: list[Product] = []
        self.stores: list[Callable[[], None]] = []
        self.copies: list[list[Callable[[], None]]] = [[]]
        self.unfenced: list[Callable[[], None]] = []

    def can_run(self) -> bool:
        return self.waits_for is None or self.waits_for[0].passed(self.waits_for[1])

    def finish(self) -> None:
        if self.products:
            raise Fault(f"{self.name} ends while a product is in flight")
        if self.stores:
            raise Fault(f"{self.name} ends while TMA stores are in flight: no store_wait")

    def fence(self) -> None:
        for clear in self.unfenced:
            clear()
        self.unfenced.clear()


class _Stopped(BaseException):
    """Unwinds a partition after another one failed."""


class Program:
    """One program of a grid: its partitions, barriers and TMA loads in flight."""

    def __init__(self, machine: Machine, number: int, programs: int, warps: int):
        self.machine, self.number, self.programs = machine, number, programs
        self.current = self.whole = Partition("the program", warps)
        self.partitions: list[Partition] = []
        self.done = threading.Semaphore(0)
        self.error: BaseException | None = None
        self.barriers: list[Barrier] = []
        self.loads_in_flight = 0

    def run(self, function: Callable[[], None]) -> None:
        function()
        self.whole.finish()
        if self.loads_in_flight:
            raise Fault("the program ends while loads to shared memory are in flight: no wait for them")
        if any(barrier.bytes_missing for barrier in self.barriers):
            raise Fault("the program ends while a barrier expects bytes that no TMA load delivers")

    def specialize(self, functions: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: list[int]) -> None:
        """Run one partition per function until all have returned. The first uses the program's default warps."""
        counts = [self.whole.warps, *warps]
        self.partitions = [
            Partition(f"partition {i} ({function.__name__})", count)
            for i, ((function, _), count) in enumerate(zip(functions, counts, strict=True))
        ]
        threads = [
            threading.Thread(target=self._thread, args=(partition, function, arguments))
            for partition, (function, arguments) in zip(self.partitions, functions, strict=True)
        ]
        for thread in threads:
            thread.start()
        self._next().turn.release()
        self.done.acquire()
        for thread in threads:
            thread.join()
        self.current = self.whole
        if self.error is not None:
            raise self.error

    def yield_turn(self) -> None:
        """Switch to another partition if `Machine.order` says so. Called at every synchronisation."""
        if self.current is self.whole:
            return
        mine, following = self.current, self._next()
        if following is not mine:
            following.turn.release()
            mine.turn.acquire()
        if self.error is not None:
            raise _Stopped
        self.current = mine

    def _thread(self, partition: Partition, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        partition.turn.acquire()
        self.current = partition
        try:
            if self.error is None:
                with torch.no_grad():  # a thread has its own mode, with gradients
                    function(*arguments)
                partition.finish()
        except _Stopped:
            pass
        except BaseException as error:  # re-raised in the launching thread
            error.add_note(f"in {partition.name}")
            self.error = self.error or error
        self.partitions.remove(partition)
        if self.partitions:
            self._next().turn.release()
        else:
            self.done.release()

    def _next(self) -> Partition:
        """The partition to run now. Late TMA loads land when every partition waits."""
        able = [partition for partition in self.partitions if partition.can_run()]
        if not able and self.error is None:
            for partition in self.partitions:
                if partition.waits_for is not None:
                    partition.waits_for[0].land()
            able = [partition for partition in self.partitions if partition.can_run()]
            if not able:
                waits = ", ".join(f"{partition.name} for {partition.waits_for}" for partition in self.partitions)
                self.error = Fault(f"every partition waits: {waits}")
        return self.machine.choose(able) if self.error is None else self.partitions[0]


# --- barriers --------------------------------------------------------------------------------------------------------


class Barrier:
    """An mbarrier. A phase completes when no arrival and no byte is missing.

    Attributes:
        count: Arrivals per phase.
        phase: Number of completed phases.
        fenced: Whether a fence followed its initialisation.
        late: TMA loads in flight, which complete on this barrier.
    """

    def __init__(self, program: Program):
        self.program = program
        self.count = self.arrivals_missing = self.bytes_missing = self.phase = 0
        self.fenced = True
        self.late: list[Callable[[], None]] = []
        program.barriers.append(self)

    def __repr__(self) -> str:
        return (
            f"phase {self.phase} of a barrier, {self.arrivals_missing} arrivals and {self.bytes_missing} bytes missing"
        )

    def init(self, count: int) -> None:
        self.count = self.arrivals_missing = count
        self.fenced = False
        self.program.current.unfenced.append(lambda: setattr(self, "fenced", True))

    def expect(self, count: int) -> None:
        self.bytes_missing += count
        self.arrive(1)

    def arrive(self, count: int) -> None:
        self._check()
        self.arrivals_missing -= count
        if self.arrivals_missing < 0:
            raise Fault("more arrivals at a barrier than it was initialised for")
        self._advance()
        self.program.yield_turn()

    def wait(self, phase: int) -> None:
        """Block until the phase of this parity has completed."""
        self._check()
        mine = self.program.current
        mine.waits_for = self, phase
        if mine is not self.program.whole:
            self.program.yield_turn()
        elif not self.passed(phase):
            self.land()
        if not self.passed(phase):
            raise Fault(f"a wait never ends: for {self!r}")
        mine.waits_for = None

    def passed(self, phase: int) -> bool:
        return self.phase % 2 != phase

    def issued(self, land: Callable[[], None]) -> None:
        """Register a TMA load that completes on this barrier."""
        self._check()
        if not self.fenced:
            raise Fault("TMA uses a barrier that is not fenced since it was initialised")
        self.program.loads_in_flight += 1
        self.late.append(land)
        if self.program.machine.copies == "early":
            self.land()
        self.program.yield_turn()

    def landed(self, count: int) -> None:
        self.program.loads_in_flight -= 1
        self.bytes_missing -= count
        self._advance()

    def land(self) -> None:
        late, self.late = self.late, []
        for land in late:
            land()

    def _advance(self) -> None:
        if self.arrivals_missing == 0 and self.bytes_missing == 0:
            self.phase += 1
            self.arrivals_missing = self.count

    def _check(self) -> None:
        if self.count == 0:
            raise Fault("a barrier is used before it was initialised")

    def index(self, i: Any) -> Barrier:
        if int(i) != 0:
            raise Fault(f"barrier {int(i)} of one")
        return self

    def _keep_alive(self) -> None:
        """No-op, as in `SharedMemory`."""


class Barriers:
    """An array of barriers."""

    def __init__(self, program: Program, count: int):
        self.barriers = [Barrier(program) for _ in range(count)]

    def index(self, i: Any) -> Barrier:
        if not 0 <= int(i) < len(self.barriers):
            raise Fault(f"barrier {int(i)} of {len(self.barriers)}")
        return self.barriers[int(i)]

    def _keep_alive(self) -> None:
        """No-op, as in `SharedMemory`."""


# --- TMA -------------------------------------------------------------------------------------------------------------


class Descriptor:
    """A kernel's TMA descriptor argument: boxes of a tensor in global memory."""

    def __init__(self, descriptor: TensorDescriptor):
        base = descriptor.base
        self.dtype, self.layout = base.dtype, descriptor.layout
        self.shape, self.block_shape = list(descriptor.shape), list(descriptor.block_shape)
        self.block_type = SimpleNamespace(nbytes=torch.Size(self.block_shape).numel() * base.itemsize)
        if base.data_ptr() % 16 or any(s * base.itemsize % 16 for s in descriptor.strides[:-1]):
            raise Fault("TMA needs a base address and row strides that are multiples of 16 bytes")
        if max(self.block_shape) > 256 and len(self.block_shape) > 1:
            raise Fault(f"a TMA box has at most 256 rows and columns, got {self.block_shape}")
        self.matrix = base.as_strided(self.shape, descriptor.strides)

    def region(self, at: list[Any]) -> tuple[slice, ...]:
        """The slice of the tensor that a box covers; its end may be out of bounds."""
        places = [int(i) for i in at]
        if not all(0 <= i < size for i, size in zip(places, self.shape, strict=True)):
            raise Fault(f"a TMA box at {places} begins outside of its tensor, {self.shape}")
        return tuple(slice(i, i + size) for i, size in zip(places, self.block_shape, strict=True))


def tma_load(program: Program, box: Descriptor, at: list[Any], barrier: Barrier, tile: SharedMemory) -> None:
    """Copy a box to shared memory, zero where it is out of bounds, and count its bytes on a barrier."""
    here = box.matrix[box.region(at)]
    if tile.shape != box.block_shape or tile.dtype != box.dtype:
        raise Fault(f"a TMA load of {box.block_shape} {box.dtype} into a tile of {tile.shape} {tile.dtype}")
    tile.begin_load()

    def land() -> None:
        x = torch.zeros(box.block_shape, dtype=box.dtype)
        x[tuple(map(slice, here.shape))] = here
        tile.end_load(x)
        barrier.landed(box.block_type.nbytes)

    program.machine.loads += 1
    barrier.issued(land)


def async_copy(program: Program, tile: SharedMemory, pointer: Pointer, mask: Any) -> None:
    """Copy from global to shared memory, zero where the mask is false, as part of the partition's open group."""
    x = pointer.load(mask, 0)
    tile.begin_load()
    program.loads_in_flight += 1

    def land() -> None:
        tile.end_load(x.t)
        program.loads_in_flight -= 1

    program.current.copies[-1].append(land)


def commit_group(program: Program) -> None:
    """Close the partition's open group of asynchronous copies."""
    program.current.copies.append([])


def wait_group(program: Program, pendings: int) -> None:
    """Wait until at most `pendings` closed groups of this partition are in flight."""
    copies = program.current.copies
    while len(copies) > pendings + 1:
        for land in copies.pop(0):
            land()


def tma_store(program: Program, box: Descriptor, at: list[Any], tile: SharedMemory) -> None:
    """Copy a tile to the part of a box that is in bounds."""
    to = box.matrix[box.region(at)]
    if tile.shape != box.block_shape or tile.dtype != box.dtype:
        raise Fault(f"a TMA store of a tile of {tile.shape} {tile.dtype} to {box.block_shape} {box.dtype}")
    tile.check(fenced=True)
    issued = tile.now().clone()

    def land() -> None:
        if not torch.equal(_bits(issued), _bits(tile.now())):
            raise Fault("a tile was overwritten while a TMA store read it: no store_wait")
        to.copy_(issued[tuple(map(slice, to.shape))])

    if program.machine.copies == "early":
        land()
    program.current.stores.append(land)
    program.yield_turn()


def store_wait(program: Program, pendings: int) -> None:
    """Wait until at most `pendings` stores of this partition may still read shared memory."""
    program.yield_turn()
    stores = program.current.stores
    while len(stores) > pendings:
        stores.pop(0)()


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


# --- matrix products -------------------------------------------------------------------------------------------------


def multiplied(a: Tensor, b: Tensor) -> Tensor:
    """A tensor core's product: float32 operands are truncated to TF32, the result is float32."""
    if a.dtype != b.dtype:
        raise Fault(f"a product of {a.dtype} and {b.dtype}")
    return _operand(a) @ _operand(b)


def _operand(x: Tensor) -> Tensor:
    if x.dtype == torch.float32:
        return (x.contiguous().view(torch.int32) & -0x2000).view(torch.float32)
    return x.float()


class Product:
    """An asynchronous warpgroup MMA, acc + a b.

    It must be waited for before it is used, except as the accumulator of another MMA.

    Attributes:
        a: Left operand, in registers or shared memory.
        b: Right operand, in shared memory.
        acc: Accumulator, which may be a `Product` in flight; None is zero.
        result: None until it is waited for.
    """

    def __init__(self, program: Program, a: Any, b: Any, acc: Any, use_acc: bool):
        self.program, self.a, self.b = program, a, b
        self.acc = acc if use_acc else None
        self.result: Value | None = None
        for operand in (a, b):
            if isinstance(operand, SharedMemory):
                operand.check(fenced=True)
        self.product, self.versions = multiplied(*self._operands()), self._versions()
        program.current.products.append(self)

    dtype = torch.float32
    shape = property(lambda self: list(self.product.shape))

    def __getattr__(self, name: str) -> Any:
        raise Fault(f"a product is used before it was waited for: its attribute {name}")

    def finish(self) -> None:
        if self._versions() != self.versions:
            again = multiplied(*self._operands())
            same = (again == self.product) | (again.isnan() & self.product.isnan())
            if not bool(same.all()):
                self.program.machine.changed.append(f"{self.program.current.name}: {int((~same).sum())} numbers")
                self.product = torch.where(same, again, torch.nan)
        before = self.acc.result if isinstance(self.acc, Product) else self.acc
        self.result = Value(self.product if self.acc is None else self.product + before.t)

    def _operands(self) -> list[Tensor]:
        return [x.now() if isinstance(x, SharedMemory) else x.t for x in (self.a, self.b)]

    def _versions(self) -> list[int]:
        """Version counters of the operands' shared memory."""
        return [x.data._version for x in (self.a, self.b) if isinstance(x, SharedMemory)]


def product_wait(program: Program, pendings: int, deps: list[Any]) -> Any:
    """Wait until at most `pendings` MMAs of this partition are in flight; return the values of `deps`."""
    program.yield_turn()
    products = program.current.products
    while len(products) > pendings:
        products.pop(0).finish()
    found = []
    for x in deps:
        value = x.result if isinstance(x, Product) else x
        if value is None:
            raise Fault("a product is used before it was waited for")
        found.append(value)
    return found[0] if len(found) == 1 else tuple(found)
