"""Shared memory: bytes that views share, and for every byte whether a write to it is pending.

An NVMMA layout whose rows are longer than its swizzle stores a tile as blocks of columns, each with all rows. Kernels
reinterpret such a tile as several narrow ones, so the blocks are modelled. The XOR permutation inside a swizzle is not,
because every view of the same bytes has the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from tests.emulator.fault import Fault
from tests.emulator.value import Value
from torch import Tensor

if TYPE_CHECKING:
    from tests.emulator.machine import Program

UNFENCED, LOADING = 1, 2
"""Marks of a byte: written by threads and not fenced since; destination of a TMA load in flight."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SharedMemory:
    """A view of shared memory: one tile, an array of tiles, or a part of a tile.

    Attributes:
        storage: The bytes of the view and their marks, 1-D; None if the view is not contiguous.
        data: The elements, [..., rows, columns]; if `blocked`, [..., rows, blocks, columns of a block].
        state: The marks, of the shape of `data`, as integers of the element's size.
        layout: Gluon layout of the allocation or the last reinterpretation.
        blocked: Whether rows are stored in blocks of columns.
        transposed: Whether a blocked tile is read with rows and columns swapped. Other tiles are permuted by strides.
    """

    def __init__(
        self,
        program: Program,
        storage: tuple[Tensor, Tensor] | None,
        views: tuple[Tensor, Tensor],
        layout: Any,
        blocked: bool,
        transposed: bool = False,
    ):
        self.program, self.storage, self.layout = program, storage, layout
        self.data, self.state = views
        self.blocked, self.transposed = blocked, transposed

    @staticmethod
    def allocate(program: Program, dtype: torch.dtype, shape: list[int], layout: Any) -> SharedMemory:
        """New memory. Floats are NaN, so that an uninitialised read cannot pass for a result."""
        count = dtype.itemsize * torch.Size(shape).numel()
        data, marks = torch.empty(count, dtype=torch.uint8), torch.zeros(count, dtype=torch.uint8)
        data.view(dtype).fill_(torch.nan if dtype.is_floating_point else 99)
        return SharedMemory.arranged(program, (data, marks), dtype, shape, layout)

    @staticmethod
    def arranged(
        program: Program, storage: tuple[Tensor, Tensor], dtype: torch.dtype, shape: list[int], layout: Any
    ) -> SharedMemory:
        """View `storage` as tiles."""
        span = getattr(layout, "swizzle_byte_width", 0) // dtype.itemsize
        blocked = len(shape) > 1 and 0 < span < shape[-1]
        if blocked:
            shape = [*shape[:-2], shape[-1] // span, shape[-2], span]
        views = [x.view(kind).view(shape) for x, kind in zip(storage, (dtype, _INTEGERS[dtype.itemsize]), strict=True)]
        if blocked:
            views = [x.transpose(-3, -2) for x in views]
        return SharedMemory(program, storage, (views[0], views[1]), layout, blocked)

    dtype = property(lambda self: self.data.dtype)

    @property
    def shape(self) -> list[int]:
        shape = list(self.data.shape)
        if self.blocked:
            shape[-2:] = [shape[-2] * shape[-1]]
        return shape[::-1] if self.transposed else shape

    # --- views ---

    def index(self, i: Any) -> SharedMemory:
        i, count = int(i), self.data.shape[0]
        if not 0 <= i < count:
            raise Fault(f"index {i} of an array of {count} tiles")
        storage = None
        if self.storage is not None:
            size = self.storage[0].numel() // count
            storage = self.storage[0][i * size : (i + 1) * size], self.storage[1][i * size : (i + 1) * size]
        return self._view(lambda x: x[i], storage)

    def slice(self, start: int, length: int, dim: int = 0) -> SharedMemory:
        if start % length:
            raise Fault(f"a slice of {length} at {start}: the compiler requires a multiple of its length")
        if not 0 <= start <= self.shape[dim] - length:
            raise Fault(f"a slice of {length} at {start} of {self.shape[dim]}")
        block = self.data.shape[-1]
        if self.blocked and dim == self.data.ndim - 2:
            if length > block:
                return self._view(lambda x: x.narrow(-2, start // block, length // block))
            narrowed = self._view(lambda x: x.select(-2, start // block).narrow(-1, start % block, length))
            narrowed.blocked = False
            return narrowed
        return self._view(lambda x: x.narrow(dim, start, length))

    def permute(self, order: Any) -> SharedMemory:
        if not self.blocked:
            return self._view(lambda x: x.permute(tuple(order)))
        if tuple(order) != (1, 0):
            raise Fault(f"a tile stored in blocks can only be transposed, got order {order}")
        return SharedMemory(self.program, None, (self.data, self.state), self.layout, True, not self.transposed)

    def reinterpret(self, dtype: torch.dtype, shape: Any, layout: Any) -> SharedMemory:
        """View all bytes as other tiles. Triton 3.8 and later do not compile a view of fewer bytes."""
        if self.storage is None:
            raise Fault("only contiguous shared memory can be reinterpreted")
        shape = [int(n) for n in shape]
        count, there = dtype.itemsize * torch.Size(shape).numel(), self.storage[0].numel()
        if count != there:
            raise Fault(f"{shape} {dtype} need {count} bytes of a view that has {there}")
        return SharedMemory.arranged(self.program, self.storage, dtype, shape, layout)

    def _keep_alive(self) -> None:
        """No-op: allocations never overlap here."""

    def _view(self, change: Callable[[Tensor], Tensor], storage: tuple[Tensor, Tensor] | None = None) -> SharedMemory:
        views = change(self.data), change(self.state)
        return SharedMemory(self.program, storage, views, self.layout, self.blocked, self.transposed)

    # --- accesses by threads ---

    def load(self, layout: Any = None) -> Value:
        self.check(fenced=False)
        return Value(self.now().clone(), layout)

    def store(self, x: Value) -> None:
        if x.shape != self.shape or x.dtype != self.dtype:
            raise Fault(f"a store of {x.shape} {x.dtype} to a tile of {self.shape} {self.dtype}")
        self.check(fenced=False)
        self.put(x.t)
        self._mark(UNFENCED)
        self.program.current.unfenced.append(lambda: self._mark(0))

    # --- accesses by TMA and MMAs ---

    def now(self) -> Tensor:
        """The current contents, [..., rows, columns]; may be a view."""
        x = self.data.flatten(-2) if self.blocked else self.data
        return x.mT if self.transposed else x

    def put(self, x: Tensor) -> None:
        """Overwrite the contents; x is [..., rows, columns]."""
        x = x.mT if self.transposed else x
        self.data.copy_(x.reshape(self.data.shape))

    def begin_load(self) -> None:
        """Mark the view as the destination of a TMA load, and fill it with NaN."""
        self.check(fenced=True)
        self.data.fill_(torch.nan if self.dtype.is_floating_point else 99)
        self._mark(LOADING)

    def end_load(self, x: Tensor) -> None:
        """Complete a TMA load."""
        self.put(x)
        self._mark(0)

    def check(self, *, fenced: bool) -> None:
        """Raise if a TMA load to this view is in flight or, with `fenced`, if a write by threads is not fenced."""
        if not fenced and not self.program.loads_in_flight:
            return
        marks = self.state.view(-1) if self.state.is_contiguous() else self.state
        if not bool(marks.any()):
            return
        ones = _repeated(1, self.dtype.itemsize)
        if bool((marks == LOADING * ones).any()):
            raise Fault("a tile is accessed while a load to it is in flight: no wait for its barrier or group")
        if fenced:
            raise Fault("TMA or an MMA uses shared memory that threads wrote: no fence_async_shared")

    def _mark(self, mark: int) -> None:
        self.state.fill_(_repeated(mark, self.dtype.itemsize))


def _repeated(mark: int, size: int) -> int:
    return int.from_bytes(bytes([mark] * size), "little")
