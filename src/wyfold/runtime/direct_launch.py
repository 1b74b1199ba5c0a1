"""Launch of a compiled kernel by the driver itself, past Triton's launcher.

Triton's launcher is a C function of all arguments, constants included. It gets fifty to seventy of them, checks the
type of each, and copies those that the kernel has into the driver's array. In a recorded launch only addresses change.
So the array is kept, and a replay writes addresses into it.

Triton 3.6 alone is known: later versions pass the arguments in other ways, and their launchers are used.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from wyfold.runtime.compiled_launch import CompiledLaunch

KNOWN = (3, 6)
"""Version of Triton whose launches are known."""

_FORMATS = {"i1": "q", "i8": "q", "i16": "q", "i32": "q", "i64": "q", "u1": "Q", "u8": "Q", "u16": "Q", "u32": "Q"}
_FORMATS |= {"u64": "Q", "fp32": "f", "f32": "f", "fp64": "d", "f64": "d"}
"""Type of a scalar in a kernel's signature -> how it is packed. The driver reads as many bytes as the type has."""

TENSOR_MAP = 128
"""Bytes between the beginning of Triton's object of an encoded descriptor and the encoding. Both are aligned to it."""


class _Config(ctypes.Structure):
    """`CUlaunchConfig` of the driver."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


class DirectLaunch(NamedTuple):
    """A kernel's launch as the driver takes it.

    Attributes:
        launch: The driver's function.
        function: The driver's handle of the kernel.
        programs, threads, shared: Size of the grid, threads of a program, and bytes of its shared memory.
        numbers: 8 bytes for each argument and each field of a record, as of `RecordedLaunch.arguments`, and then for
            each number in tuples. Those of addresses are zero.
        order: Place of each of the kernel's parameters in `numbers`; -1 for the encoding of a descriptor.
        tensor_maps: Parameter of each descriptor, in the order of `RecordedLaunch.descriptors`.
        unused: Argument arrays that no thread is launching with.
    """

    launch: Callable[..., int]
    function: ctypes.c_void_p
    programs: int
    threads: int
    shared: int
    numbers: bytes
    order: tuple[int, ...]
    tensor_maps: tuple[int, ...]
    unused: list[_Arrays]

    def arrays(self) -> _Arrays:
        """Arrays to launch with, which the caller puts back into `unused`."""
        try:
            return self.unused.pop()
        except IndexError:
            return _Arrays(self)

    def run(self, arrays: _Arrays, stream: int) -> None:
        """Launch on a stream.

        Raises:
            RuntimeError: The driver refuses the launch.
        """
        arrays.config.stream = stream
        status = self.launch(arrays.config_pointer, self.function, arrays.parameters_pointer, None)
        if status:
            raise RuntimeError(f"Triton Error [CUDA]: {_error_text(status)}")
        self.unused.append(arrays)


class _Arrays:
    """Memory of one launch: its numbers, the pointers to its parameters, and its configuration."""

    __slots__ = ("config", "config_pointer", "encodings", "numbers", "parameters", "parameters_pointer")

    def __init__(self, launch: DirectLaunch):
        self.numbers = (ctypes.c_uint64 * (len(launch.numbers) // 8)).from_buffer_copy(launch.numbers)
        first = ctypes.addressof(self.numbers)
        self.parameters = (ctypes.c_uint64 * len(launch.order))(*[first + 8 * max(place, 0) for place in launch.order])
        self.encodings: list[Any] = [None] * len(launch.tensor_maps)  # kept alive while they are read
        self.config = _Config((launch.programs, 1, 1), (launch.threads, 1, 1), launch.shared, None, None, 0)
        self.config_pointer = ctypes.c_void_p(ctypes.addressof(self.config))
        self.parameters_pointer = ctypes.c_void_p(ctypes.addressof(self.parameters))


def direct_launch(
    launch: CompiledLaunch,
    programs: int,
    arguments: Sequence[Any],
    own: int,
    pointers: Sequence[int],
    records: Sequence[tuple[int, int, int]],
    descriptors: Sequence[int],
) -> DirectLaunch | None:
    """A recorded launch as the driver takes it; None if anything about it is not known.

    Args:
        launch, programs, arguments, own: As of `RecordedLaunch`.
        pointers: Places of addresses among the arguments.
        records: As of `RecordedLaunch`.
        descriptors: Places of descriptors among the arguments.
    """
    function, plain = _driver_launch(), _plain_metadata(launch)
    if function is None or plain is None:
        return None
    parameters = _Parameters(arguments, pointers, records, descriptors)
    try:
        for place, kind in enumerate(_expanded(launch.owner.src.signature)):
            parameters.add(kind, arguments[place], place)
    except (_Unknown, AttributeError, IndexError, OverflowError, struct.error):
        return None
    if place + 1 != own or len(parameters.tensor_maps) != len(descriptors):
        return None
    # The kernel's last two parameters are memory that the launcher would allocate: there is none.
    order = (*parameters.order, *parameters.constant(0, "u64"), *parameters.constant(0, "u64"))
    warps, shared = plain
    handle = ctypes.c_void_p(launch.function)
    numbers, maps = b"".join(parameters.numbers), tuple(parameters.tensor_maps)
    return DirectLaunch(function, handle, programs, 32 * warps, shared, numbers, order, maps, [])


class _Unknown(Exception):
    """A parameter is of an unknown type."""


class _Parameters:
    """Parameters of a kernel, in order, and the numbers that they point to."""

    def __init__(
        self,
        arguments: Sequence[Any],
        pointers: Sequence[int],
        records: Sequence[tuple[int, int, int]],
        descriptors: Sequence[int],
    ):
        self.arguments, self.pointers, self.descriptors = arguments, set(pointers), list(descriptors)
        self.records = {slot: range(begin, end) for slot, begin, end in records}
        self.numbers, self.order, self.tensor_maps = [bytes(8)] * len(arguments), list[int](), list[int]()

    def add(self, kind: Any, value: Any, place: int | None) -> None:
        """Add an argument of a type of the signature. place: its place, or None for a number in a tuple."""
        if isinstance(kind, tuple):
            fields = self.records.get(-1 if place is None else place)
            members = [(value, None) for value in value] if fields is None else [(self.arguments[n], n) for n in fields]
            if len(members) != len(kind):
                raise _Unknown
            for member, (value, place) in zip(kind, members, strict=True):
                self.add(member, value, place)
        elif kind == "constexpr":
            return
        elif kind == "nvTmaDesc":
            if place not in self.descriptors or self.descriptors.index(place) != len(self.tensor_maps):
                raise _Unknown
            self.tensor_maps.append(len(self.order))
            self.order.append(-1)
        elif place is not None and place in self.pointers:
            if kind[0] != "*":
                raise _Unknown
            self.order.append(place)
        else:
            self.order += self.constant(value, kind)

    def constant(self, value: Any, kind: str) -> tuple[int]:
        """Add a number; return its place."""
        if kind not in _FORMATS or type(value) not in (int, float, bool):
            raise _Unknown
        self.numbers.append(struct.pack(f"<{_FORMATS[kind]}", value).ljust(8, b"\0"))
        return (len(self.numbers) - 1,)


def _expanded(signature: dict[str, Any]) -> list[Any]:
    """Types of the launcher's arguments: those of the signature, with shape and strides behind each descriptor."""
    found: list[Any] = []
    for kind in signature.values():
        if isinstance(kind, str) and kind.startswith("tensordesc"):
            rank = kind.partition("[")[2].partition("]")[0].count(",") + 1
            found += ["nvTmaDesc", *["i32"] * rank, *["i64"] * rank]
        else:
            found.append(kind)
    return found


def _plain_metadata(launch: CompiledLaunch) -> tuple[int, int] | None:
    """Warps and shared memory of a kernel that is launched without attributes and scratch memory; else None."""
    metadata = getattr(launch.owner, "metadata", None)
    refused = "launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size"
    if metadata is None or any(getattr(metadata, name, True) for name in refused):
        return None
    warps, clusters, shared = launch.metadata
    return (warps, shared) if clusters == 1 else None


@functools.cache
def _driver_launch() -> Callable[..., int] | None:
    """The driver's function, if Triton is the version that is known."""
    version = getattr(sys.modules.get("triton"), "__version__", "").split(".")[:2]
    if version != [str(n) for n in KNOWN]:
        return None
    try:
        function: Callable[..., int] = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    except (OSError, AttributeError):
        return None
    return function


def is_tensor_map(encoding: Any) -> bool:
    """Whether an encoded descriptor is an object of Triton's whose memory is known."""
    return type(encoding).__name__ == "PyCUtensorMap" and id(encoding) % TENSOR_MAP == 0


def _error_text(status: int) -> str:
    """Text of an error of the driver."""
    text = ctypes.c_char_p()
    ctypes.CDLL("libcuda.so.1").cuGetErrorString(status, ctypes.byref(text))
    return (text.value or str(status).encode()).decode()
