"""Fast kernel launch: after the first launch of a kind, the compiled kernel is found without Triton's lookup.

For each argument and each field of a record, Triton's `JITFunction.run` determines what the code may depend on, formats
that as text, and looks the compiled kernel up by the text. With fifty of them that takes 25 to 40 microseconds before
the driver is called. `launch_kernel` does it once for each cache key and keeps the compiled kernel. Its keys
distinguish at least what Triton distinguishes.

A recorder can observe a thread's launches (`observe_steps`). It gets each as a `RecordedLaunch`, which launches again
on other addresses without any lookup (`runtime/replay_cache.py`). A dry run (`dry_run`) launches nothing and only
reports kernels that are not compiled.

Triton itself launches where something is not recognised. That is so under the interpreter, with a Triton whose compiled
kernels look different, for arguments of other types, and with launch hooks (profilers) or debug compilation.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor


class CompiledLaunch(NamedTuple):
    """A compiled kernel on one device, in the form in which it is launched.

    Attributes:
        run: Triton's launcher.
        function: The driver's handle of the kernel.
        metadata: Packed, as the launcher takes it.
        constants: Values of the kernel's constexprs. The launcher takes them and does not read them.
        expanders: Index among the arguments of each tensor descriptor, last one first, and what expands it into the
            launcher's arguments. Empty if `run` expands descriptors itself.
        owner: Triton's object of the compiled kernel. From Triton 3.8 its end unloads the kernel from the device.
    """

    run: Callable[..., None]
    function: Any
    metadata: Any
    constants: tuple[Any, ...]
    expanders: tuple[tuple[int, _DescriptorExpander], ...]
    owner: Any


_launches: dict[tuple[Any, ...], CompiledLaunch] = {}
"""Kernel, device, specialization of the arguments, constexprs and options -> the launch."""

_thread = threading.local()
"""State of a thread: `observer`, `step_map` and `collector` of the contexts below, and `entered`. Each may be unset."""


def launch_kernel(kernel: Any, programs: int, /, *arguments: Any, **named: Any) -> None:
    """Launch a kernel on the current device and its current stream: `kernel[(programs,)](*arguments, **named)`.

    An argument is a tensor, an integer, a tuple of integers, a float, a tensor descriptor, None, or a record: a
    NamedTuple of these, except descriptors.

    Args:
        kernel: Decorated with `triton.jit`. Its constexprs come last.
        programs: Size of the grid, which has one dimension.
        arguments: The kernel's first arguments, in its order.
        named: All other arguments by name, constexprs, and options of the launch.

    Raises:
        TypeError: An argument is missing.
    """
    enter_context(arguments, named)
    observer = getattr(_thread, "observer", None)
    collector = getattr(_thread, "collector", None)
    # Triton itself launches interpreted kernels, hooked kernels, and kernels with unknown types of arguments.
    by_triton = not hasattr(kernel, "device_caches") or has_launch_hooks(kernel)
    if not by_triton:
        arguments = _by_position(kernel, arguments, named)
    specialization = None if by_triton else _specialization(arguments)
    if specialization is None:
        if collector is None:
            kernel[(programs,)](*arguments, **named)
            if observer is not None:
                observer(None, kernel, new=False)
        return
    kinds, flat = specialization
    driver = sys.modules["triton"].runtime.driver.active
    device = driver.get_current_device()
    key = kernel.fn, device, kinds, tuple(named), tuple(named.values())
    launch = _launches.get(key)
    if collector is not None:
        if launch is None:
            collector(kernel, programs, arguments, named)
        return
    if launch is None:
        _launch_and_keep(key, kernel, programs, arguments, named)
        if observer is not None:
            observer(None, kernel, new=key in _launches)
        return
    if observer is not None:
        recorded = _recorded_launch(launch, programs, arguments)
        observer(None if recorded is None else map_step(recorded), kernel, new=False)
    run, function, metadata, constants, expanders, _ = launch
    for place, expand in expanders:
        flat[place : place + 1] = expand(arguments[place])
    stream = driver.get_current_stream(device)
    run(programs, 1, 1, stream, function, metadata, None, None, None, *flat, *constants)


def _by_position(kernel: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """All arguments that are no constexprs, in the kernel's order; those after `arguments` are taken out of `named`."""
    names, constexprs = kernel.arg_names, kernel.constexprs
    missing = names[len(arguments) : constexprs[0] if constexprs else None]
    try:
        return (*arguments, *[named.pop(name) for name in missing]) if missing else arguments
    except KeyError as error:
        raise TypeError(f"launch_kernel: {kernel.fn.__name__} needs an argument {error}") from None


def _launch_and_keep(
    key: tuple[Any, ...], kernel: Any, programs: int, arguments: tuple[Any, ...], fixed: dict[str, Any]
) -> None:
    """Launch through Triton, which compiles the kernel or looks it up, and keep what it launched under the key."""
    compiled = kernel[(programs,)](*arguments, **fixed)
    if all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata")):
        constants = tuple([fixed[name] for name in kernel.arg_names[len(arguments) :]])
        _launches[key] = _compiled_launch(compiled, arguments, constants)


def enter_context(arguments: Sequence[Any], named: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Make the device's context current on the calling thread, which the driver needs to encode a descriptor.

    A launch does this by itself, but descriptors are encoded before it, and a thread of autograd may not have used the
    device yet. Recording an event is allowed during graph capture and waits for nothing.
    """
    if not hasattr(_thread, "entered") and any(map(_is_on_cuda, (*arguments, *named.values()))):
        torch.cuda.Event().record()
        _thread.entered = True


def _is_on_cuda(x: Any) -> bool:
    """Whether an argument is a CUDA tensor, or has one."""
    return any(map(_is_on_cuda, x)) if isinstance(x, tuple) else isinstance(x, Tensor) and x.is_cuda


def current_device() -> int:
    """Index of the current device."""
    index: int = sys.modules["triton"].runtime.driver.active.get_current_device()
    return index


def current_stream(device: int) -> Any:
    """Handle of a device's current stream, as a launcher takes it."""
    return sys.modules["triton"].runtime.driver.active.get_current_stream(device)


# --- specialization: what a compiled kernel depends on


def _specialization(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Any]] | None:
    """Specialization key of the arguments, and the launcher's arguments; None if an argument is not recognised.

    The key holds everything that the compiled code depends on, but no tensor, address or length. The launcher's
    arguments have addresses instead of tensors. Triton's launcher then does not query the driver for the device of each
    tensor, which the operators have checked. A record is a tuple among them, and in the key it is one as well.
    """
    kinds: list[Any] = []
    flat = list(arguments)
    for place, x in enumerate(arguments):
        kind = type(x)
        if x is None:
            kinds.append(None)
        elif kind is Tensor or kind is torch.nn.Parameter:
            flat[place] = address = x.data_ptr()
            # Alignment decides whether whole vectors are loaded.
            kinds += x.dtype, address % 16 == 0
        elif kind is tuple:
            kinds.append(_integers_class(x))
        elif isinstance(x, tuple):
            record = _specialization(x)
            if record is None:
                return None
            kinds.append(record[0])
            flat[place] = tuple(record[1])
        elif kind is int:
            kinds.append(_integer_class(x))
        elif kind is float:
            kinds.append(kind)
        elif hasattr(x, "block_shape"):
            # Shape and strides of a descriptor's tensor are read at the launch.
            kinds += kind, x.base.dtype, *x.block_shape
        else:
            return None
    return tuple(kinds), flat


@functools.lru_cache(maxsize=4096)
def _integer_class(x: int) -> str:
    """Whether an integer is 1, a multiple of 16, of 32 bits, of 64 bits.

    For an argument that Triton does not specialise on, this is finer than necessary.
    """
    return f"{x == 1} {x % 16 == 0} {-(2**31) <= x < 2**31} {x < 2**63}"


@functools.lru_cache(maxsize=4096)
def _integers_class(x: tuple[int, ...]) -> str:
    """Classes of strides. Strides repeat from call to call, and those of a new length often have known classes."""
    return f"({', '.join(map(_integer_class, x))})"


def any_launch_hooks() -> bool:
    """Whether a hook observes all kernels' launches now."""
    return "triton" in sys.modules and has_launch_hooks()


def has_launch_hooks(*kernels: Any) -> bool:
    """Whether hooks observe these kernels' launches or change their compilation.

    True under a Triton whose settings have other names.
    """
    try:
        knobs = sys.modules["triton"].knobs
        runtime = knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        for kernel in kernels:
            if kernel.pre_run_hooks:
                return True
        return bool(
            # Each is a chain of hooks, which may be empty, or one hook, or None.
            getattr(enter, "calls", enter)
            or getattr(leave, "calls", leave)
            or runtime.debug
            or runtime.add_stages_inspection_hook
            or knobs.compilation.instrumentation_mode
        )
    except AttributeError:
        return True


# --- recording and dry runs


ENCODINGS = 256
"""Most encodings that are kept of a descriptor of a recorded launch."""


class PointerSlot(NamedTuple):
    """An argument of a launch, or a field of a record, that is computed from an address.

    Attributes:
        slot: Index in `RecordedLaunch.arguments`.
        tensor: The tensor; after `RecordedLaunch.rebind`, its number.
        offset: Bytes behind the tensor's first element.
    """

    slot: int
    tensor: Any
    offset: int


class RecordSlot(NamedTuple):
    """A record among the arguments of a launch, with tensors among its fields.

    Attributes:
        slot: Index in `RecordedLaunch.arguments`.
        begin, end: Where its fields are there.
    """

    slot: int
    begin: int
    end: int


class RecordedLaunch(NamedTuple):
    """A launch as a step of a recording.

    Attributes:
        launch, programs: The kernel, and the size of the grid.
        arguments: Of the launcher, then the fields of its records. Entries at the slots below are placeholders.
        own: Number of the launcher's arguments.
        pointers: Slots of tensors.
        records: Slots of records that have tensors.
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
    records: tuple[RecordSlot, ...]
    descriptors: tuple[PointerSlot, ...]
    encoders: tuple[Callable[[int], Any], ...]
    encoded: tuple[dict[int, Any], ...]

    def rebind(self, to: Callable[[Any, int], tuple[Any, int]]) -> RecordedLaunch:
        """The same launch with its slots renumbered; see `recording.Step`."""

        def numbered(slots: Sequence[PointerSlot]) -> tuple[PointerSlot, ...]:
            return tuple([PointerSlot(slot, *to(x, offset)) for slot, x, offset in slots])

        return self._replace(pointers=numbered(self.pointers), descriptors=numbered(self.descriptors))

    def replay(self, stream: Any, tensors: Sequence[Any], addresses: Sequence[int]) -> None:
        """Launch on numbered tensors at these addresses. The tensors themselves are not read."""
        launch, programs, arguments, own, pointers, records, descriptors, encoders, encoded = self
        arguments = arguments.copy()
        for slot, number, offset in pointers:
            arguments[slot] = addresses[number] + offset
        for slot, begin, end in records:
            arguments[slot] = tuple(arguments[begin:end])
        for (slot, number, offset), encode, known in zip(descriptors, encoders, encoded):
            address = addresses[number] + offset
            encoding = known.get(address)
            if encoding is None:
                if len(known) >= ENCODINGS:
                    known.clear()
                known[address] = encoding = encode(address)
            arguments[slot] = encoding
        run, function, metadata, *_ = launch
        run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments[:own])


def _recorded_launch(launch: CompiledLaunch, programs: int, arguments: tuple[Any, ...]) -> RecordedLaunch | None:
    """A launch in the form that can be replayed; None if Triton has to expand its descriptors."""
    expanders = dict(launch.expanders)
    flat: list[Any] = []
    pointers, descriptors, encoders = [], [], []
    records: list[tuple[int, tuple[Any, ...]]] = []
    for place, x in enumerate(arguments):
        if isinstance(x, Tensor):
            pointers.append(PointerSlot(len(flat), x, 0))
            flat.append(0)
        elif isinstance(x, tuple) and any(isinstance(field, Tensor) for field in x):
            records.append((len(flat), x))
            flat.append(None)
        elif hasattr(x, "block_shape"):
            encode = expanders[place].encoder(x) if place in expanders else None
            if encode is None:
                return None
            descriptors.append(PointerSlot(len(flat), x.base, 0))
            encoders.append(encode)
            flat += (None, *x.shape, *x.strides)
        else:
            flat.append(x)
    flat += launch.constants
    own, slots = len(flat), []
    for slot, fields in records:
        slots.append(RecordSlot(slot, len(flat), len(flat) + len(fields)))
        pointers += [PointerSlot(len(flat) + n, x, 0) for n, x in enumerate(fields) if isinstance(x, Tensor)]
        flat += [0 if isinstance(x, Tensor) else x for x in fields]
    encoded = tuple([dict[int, Any]() for _ in descriptors])
    return RecordedLaunch(
        launch, programs, flat, own, tuple(pointers), tuple(slots), tuple(descriptors), tuple(encoders), encoded
    )


@contextlib.contextmanager
def observe_steps(observer: Callable[..., None]) -> Iterator[None]:
    """Report this thread's launches, and the steps passed to `emit_step`, to `observer(step, kernel, new=...)`.

    `step` is None for a launch that cannot be replayed. `kernel` is None for a step that is no launch. `new` means that
    Triton compiled the kernel or looked it up.
    """
    _thread.observer = observer
    try:
        yield
    finally:
        _thread.observer = None


def emit_step(step: Any) -> None:
    """Report a step that is no launch (e.g. a stream fork) to this thread's observer, if there is one."""
    observer = getattr(_thread, "observer", None)
    if observer is not None:
        observer(step, None, new=False)


@contextlib.contextmanager
def redirect_steps(step_map: Callable[[Any], Any]) -> Iterator[None]:
    """Pass recorded launches and waits through `step_map`, because a replay needs more, such as another stream."""
    _thread.step_map = step_map
    try:
        yield
    finally:
        _thread.step_map = None


def map_step(step: Any) -> Any:
    """A launch or wait as this thread's observer is to record it: passed through the `step_map` in force, if any."""
    step_map = getattr(_thread, "step_map", None)
    return step if step_map is None else step_map(step)


@contextlib.contextmanager
def dry_run(collector: Callable[..., None]) -> Iterator[None]:
    """Launch nothing on this thread, and report each kernel that has not been launched like this.

    Reported as `collector(kernel, programs, arguments, fixed)`, with the arguments of `launch_kernel`.
    """
    _thread.collector = collector
    try:
        yield
    finally:
        _thread.collector = None


# --- Triton's launcher and tensor descriptors


def _compiled_launch(compiled: Any, arguments: tuple[Any, ...], constants: tuple[Any, ...]) -> CompiledLaunch:
    """The `CompiledLaunch` of a kernel that Triton compiled for these arguments.

    For a kernel with descriptors, Triton wraps its launcher in a function that searches all arguments for them. Their
    places are known here, so the wrapped launcher is used, where it is found as in Triton 3.6 to 3.9.
    """
    run, places = compiled.run, [place for place, x in enumerate(arguments) if hasattr(x, "block_shape")]
    closure = _closure_variables(getattr(run, "launch", None))
    launcher = closure.get("launcher")
    expand = _descriptor_function(sys.modules[type(run).__module__])
    # Descriptors without a layout are passed as pointer, shape and strides.
    layouts = closure.get("tensordesc_meta") or [None] * len(places)
    expanders: list[tuple[int, _DescriptorExpander]] = []
    if launcher is not None and expand is not None and len(layouts) == len(places):
        run = copy.copy(run)
        run.launch = launcher
        expanders = [(place, _DescriptorExpander(expand, layout)) for place, layout in zip(places, layouts)]
    return CompiledLaunch(run, compiled.function, compiled.packed_metadata, constants, tuple(expanders[::-1]), compiled)


def _descriptor_function(module: Any) -> Callable[[Any, Any], list[Any]] | None:
    """Function of a launcher's module from a descriptor and its layout to the launcher's arguments, or None.

    From Triton 3.8 it also gets the launcher's other arguments, which the one for CUDA names `_` and does not read.
    """
    function = getattr(module, "make_tensordesc_arg", None)
    if function is None:
        return None
    more = list(inspect.signature(function).parameters)[2:]
    if not more:
        return function
    return functools.partial(function, _=None) if more == ["_"] else None


class _DescriptorExpander:
    """Expands descriptors of one layout into the launcher's arguments: the driver's encoding, shape and strides.

    Triton's own function (`expand`) looks the layout's numbers up by name and finds the driver again at each call. It
    is used where the layout's names are not those of Triton 3.6 to 3.9, and for descriptors with other options.
    """

    def __init__(self, expand: Callable[[Any, Any], list[Any]], layout: Any):
        self.expand, self.layout = expand, layout
        names = ("swizzle", "elem_size", "elem_type", "block_size")
        elements = getattr(expand, "func", expand).__globals__.get("TMA_DTYPE_DEVICE_TO_HOST")
        utils = getattr(sys.modules["triton"].runtime.driver.active, "utils", None)
        encode = getattr(utils, "fill_tma_descriptor", None) or getattr(utils, "fill_tma_descriptor_tiled", None)
        self.encode = None
        if not (layout and elements and encode) or layout.get("fp4_padded", True):
            return
        if all(name in layout for name in names):
            swizzle, size, element, block = (layout[name] for name in names)
            self.encode, self.block = encode, (swizzle, size, elements[element], block)

    def __call__(self, x: Any) -> list[Any]:
        if self.encode is None or not _is_plain_descriptor(x):
            return self.expand(x, self.layout)
        shape, strides = x.shape, x.strides
        return [self.encode(x.base.data_ptr(), *self.block, shape, strides, 0), *shape, *strides]

    def encoder(self, x: Any) -> Callable[[int], Any] | None:
        """A function from an address to the encoding of `x` there; None if only Triton can encode it."""
        if self.encode is None or not _is_plain_descriptor(x):
            return None
        encode, block, shape, strides = self.encode, self.block, list(x.shape), list(x.strides)
        return lambda address: encode(address, *block, shape, strides, 0)


def _is_plain_descriptor(x: Any) -> bool:
    """Whether a descriptor pads with zeros and does not round float32 to TF32."""
    return x.padding == "zero" and not getattr(x, "round_f32_to_tf32", False)


def _closure_variables(function: Any) -> dict[str, Any]:
    """Variables of enclosing functions that a function uses, by name."""
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells)} if cells else {}
