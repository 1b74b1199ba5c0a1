"""A launch as a step of a recording: it launches again on other addresses without any lookup."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from wyfold.runtime.compiled_launch import CompiledLaunch
from wyfold.runtime.direct_launch import TENSOR_MAP, DirectLaunch, direct_launch, is_tensor_map

ENCODINGS = 256
"""Most encodings that are kept of a descriptor of a recorded launch."""


PointerSlot: TypeAlias = tuple[int, Any, int]
"""An argument that is computed from an address: its index in `RecordedLaunch.arguments`, the tensor (after
`RecordedLaunch.rebind` its number), and bytes behind the tensor's first element. Python unpacks a plain tuple in half
the time of a named one."""


def recorded_launch(launch: CompiledLaunch, programs: int, arguments: tuple[Any, ...]) -> RecordedLaunch | None:
    """A launch in the form that can be replayed; None if Triton has to expand its descriptors."""
    expanders = dict(launch.expanders)
    flat: list[Any] = []
    pointers, descriptors, encoders = [], [], []
    records: list[tuple[int, tuple[Any, ...]]] = []
    for place, x in enumerate(arguments):
        if isinstance(x, Tensor):
            pointers.append((len(flat), x, 0))
            flat.append(0)
        elif isinstance(x, tuple) and any(isinstance(field, Tensor) for field in x):
            records.append((len(flat), x))
            flat.append(None)
        elif hasattr(x, "block_shape"):
            encode = expanders[place].encoder(x) if place in expanders else None
            if encode is None:
                return None
            descriptors.append((len(flat), x.base, 0))
            encoders.append(encode)
            flat += (None, *x.shape, *x.strides)
        else:
            flat.append(x)
    flat += launch.constants
    own, slots = len(flat), []
    for slot, fields in records:
        slots.append((slot, len(flat), len(flat) + len(fields)))
        pointers += [(len(flat) + n, x, 0) for n, x in enumerate(fields) if isinstance(x, Tensor)]
        flat += [0 if isinstance(x, Tensor) else x for x in fields]
    encoded = tuple([dict[int, Any]() for _ in descriptors])
    direct = None
    if all(is_tensor_map(encode(x.data_ptr())) for encode, (_, x, _) in zip(encoders, descriptors)):
        places = [place for place, *_ in pointers], slots, [place for place, *_ in descriptors]
        direct = direct_launch(launch, programs, flat, own, *places)
    return RecordedLaunch(
        launch, programs, flat, own, tuple(pointers), tuple(slots), tuple(descriptors), tuple(encoders), encoded, direct
    )


class RecordedLaunch(NamedTuple):
    """A launch as a step of a recording.

    Attributes:
        launch, programs: The kernel, and the size of the grid.
        arguments: Of the launcher, then the fields of its records. Entries at the slots below are placeholders.
        own: Number of the launcher's arguments.
        pointers: Slots of tensors, in the arguments or in the fields of records.
        records: For each record that has tensors: its slot, and where its fields begin and end in `arguments`.
        descriptors: Slots of tensor descriptors.
        encoders: For each descriptor, the function that encodes it for an address.
        encoded: For each descriptor, its encodings by address. Layers of a model replay one launch on other addresses,
            which repeat from step to step.
    """

    launch: CompiledLaunch
    programs: int
    arguments: list[Any]
    own: int
    pointers: tuple[PointerSlot, ...]
    records: tuple[tuple[int, int, int], ...]
    descriptors: tuple[PointerSlot, ...]
    encoders: tuple[Callable[[int], Any], ...]
    encoded: tuple[dict[int, Any], ...]
    direct: DirectLaunch | None = None

    def rebind(self, to: Callable[[Any, int], tuple[Any, int]]) -> RecordedLaunch:
        """The same launch with its slots renumbered; see `recording.Step`."""

        def numbered(slots: Sequence[PointerSlot]) -> tuple[PointerSlot, ...]:
            return tuple([(slot, *to(x, offset)) for slot, x, offset in slots])

        return self._replace(pointers=numbered(self.pointers), descriptors=numbered(self.descriptors))

    def replay(self, stream: Any, tensors: Sequence[Any], addresses: Sequence[int]) -> None:
        """Launch on numbered tensors at these addresses. The tensors themselves are not read."""
        if self.direct is not None:
            self._launch_directly(self.direct, stream, addresses)
            return
        launch, programs, arguments, own, pointers, records, descriptors, encoders, encoded, _ = self
        arguments = arguments.copy()
        for slot, number, offset in pointers:
            arguments[slot] = addresses[number] + offset
        for slot, begin, end in records:
            arguments[slot] = tuple(arguments[begin:end])
        for (slot, number, offset), encode, known in zip(descriptors, encoders, encoded):
            address = addresses[number] + offset
            arguments[slot] = known.get(address) or _encoded(encode, known, address)
        run, function, metadata = launch[:3]
        run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments[:own])

    def _launch_directly(self, direct: DirectLaunch, stream: Any, addresses: Sequence[int]) -> None:
        arrays = direct.arrays()
        numbers = arrays.numbers
        for slot, number, offset in self.pointers:
            numbers[slot] = addresses[number] + offset
        if self.descriptors:
            parameters, encodings = arrays.parameters, arrays.encodings
            for n, (_, number, offset) in enumerate(self.descriptors):
                known, address = self.encoded[n], addresses[number] + offset
                encodings[n] = encoding = known.get(address) or _encoded(self.encoders[n], known, address)
                parameters[direct.tensor_maps[n]] = id(encoding) + TENSOR_MAP
        direct.run(arrays, stream)


def _encoded(encode: Callable[[int], Any], known: dict[int, Any], address: int) -> Any:
    """Encode a descriptor for an address, and keep the encoding."""
    if len(known) >= ENCODINGS:
        known.clear()
    known[address] = encoding = encode(address)
    return encoding
