"""Launches that find their compiled kernel without Triton's help, after the first one like them.

Triton's own way into a kernel asks of each argument what the code may depend on, writes the answers out as a text, and
looks the compiled kernel up by it: 25 to 40 microseconds of a launch with fifty arguments, before the driver is asked
for anything. `launch_kernel` does that once per combination of answers and keeps the compiled kernel under a key that
holds the same answers, or finer ones. An observer of a call's launches (`observe_steps`) gets them in a form that can
be launched on other addresses without a lookup (`runtime/replay_cache.py`).

The ordinary way stays for all that is not recognised: the interpreter, a Triton whose compiled kernels look different,
arguments of other types, and a process whose launches are watched by hooks (profilers) or compiled for debugging.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class CompiledLaunch(NamedTuple):
    """A compiled kernel on one device.

    Attributes:
        run, function, metadata: What Triton launches it by.
        constants: The kernel's constexprs, which a launch passes along without reading them.
        descriptors: Place among the arguments of each, last one first, and what becomes of it there; none where `run`
            sees to that.
    """

    run: Callable[..., None]
    function: Any
    metadata: Any
    constants: tuple[Any, ...]
    descriptors: tuple[tuple[int, _DescriptorExpander], ...]


class PointerSlot(NamedTuple):
    """An argument of a launch that follows from an address: its place, and so many bytes behind a numbered tensor.

    `tensor` is the tensor itself until it is `rebind` to a number.
    """

    place: int
    tensor: Any
    offset: int


class RecordedLaunch(NamedTuple):
    """A launch that can be made again.

    Attributes:
        ready, programs: The kernel and its grid.
        arguments: As its launcher takes them; what is there in place of an address or a box is not looked at.
        pointers, boxes: Where those go.
        encoders: What makes each box of its address.
        encoded: Address and encoding of each box at the last launch.
    """

    ready: CompiledLaunch
    programs: int
    arguments: list[Any]
    pointers: tuple[PointerSlot, ...]
    boxes: tuple[PointerSlot, ...]
    encoders: tuple[Callable[[int], Any], ...]
    encoded: list[tuple[int, Any]]

    def rebind(self, to: Callable[[Any, int], tuple[Any, int]]) -> RecordedLaunch:
        """On other tensors; to: number, and bytes behind its first element, of what they were."""
        pointers, boxes = (
            tuple([PointerSlot(place, *to(x, offset)) for place, x, offset in places])
            for places in (self.pointers, self.boxes)
        )
        return self._replace(pointers=pointers, boxes=boxes)

    def replay(self, stream: Any, tensors: Sequence[Any], addresses: Sequence[int]) -> None:
        """Launch on numbered tensors at these addresses, without a look at the tensors."""
        ready, programs, arguments, pointers, boxes, encoders, encoded = self
        arguments = arguments.copy()
        for place, number, offset in pointers:
            arguments[place] = addresses[number] + offset
        for n, (place, number, offset) in enumerate(boxes):
            address = addresses[number] + offset
            known, box = encoded[n]
            if known != address:
                box = encoders[n](address)
                encoded[n] = address, box  # both at once: other threads launch as well
            arguments[place] = box
        ready.run(programs, 1, 1, stream, ready.function, ready.metadata, None, None, None, *arguments)


_compiled: dict[tuple[Any, ...], CompiledLaunch] = {}
_thread = threading.local()


@contextlib.contextmanager
def observe_steps(listener: Callable[..., None]) -> Iterator[None]:
    """Inside, `listener(launch, kernel, new=...)` gets this thread's launches and the steps passed to `emit_step`.

    launch is None where it cannot be made again; new: the kernel's code was looked up by Triton, or compiled. What is
    no launch comes in its place, and then kernel is None.
    """
    _thread.listener = listener
    try:
        yield
    finally:
        _thread.listener = None


def emit_step(step: Any) -> None:
    """Whoever hears this thread's launches: of something that belongs between them."""
    listener = getattr(_thread, "listener", None)
    if listener is not None:
        listener(step, None, new=False)


@contextlib.contextmanager
def redirect_steps(become: Callable[[Any], Any]) -> Iterator[None]:
    """Within, launches and waits are told of as what they `become`: there is more to making them again."""
    _thread.become = become
    try:
        yield
    finally:
        _thread.become = None


def map_step(step: Any) -> Any:
    """A launch or a wait as whoever hears this thread is to have it."""
    become = getattr(_thread, "become", None)
    return step if become is None else become(step)


@contextlib.contextmanager
def dry_run(taker: Callable[..., None]) -> Iterator[None]:
    """Within, this thread launches nothing: `taker(kernel, programs, arguments, fixed)` has it, if it is new."""
    _thread.taker = taker
    try:
        yield
    finally:
        _thread.taker = None


def launch_kernel(kernel: Any, programs: int, *arguments: Any, **fixed: Any) -> None:
    """Launch a kernel on the current device and its current stream: `kernel[(programs,)](*arguments, **fixed)`.

    Args:
        kernel: Decorated with `triton.jit`.
        programs: Of the grid, which has one dimension.
        arguments: Tensors, integers, tuples of integers, floats, descriptors and None, in the kernel's order: all that
            are no constexprs.
        fixed: Constexprs by name, and options of the launch.
    """
    enter_context(arguments)
    listener = getattr(_thread, "listener", None)
    taker = getattr(_thread, "taker", None)
    looked = None if not hasattr(kernel, "device_caches") or has_launch_hooks(kernel) else _specialization(arguments)
    if looked is None and taker is not None:
        return
    if looked is None:
        kernel[(programs,)](*arguments, **fixed)
        if listener is not None:
            listener(None, kernel, new=False)
        return
    kinds, flat = looked
    driver = sys.modules["triton"].runtime.driver.active
    device = driver.get_current_device()
    key = kernel.fn, device, kinds, tuple(fixed), tuple(fixed.values())
    ready = _compiled.get(key)
    if taker is not None:
        if ready is None:
            taker(kernel, programs, arguments, fixed)
        return
    if ready is None:
        compiled = kernel[(programs,)](*arguments, **fixed)
        if all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata")):
            constants = tuple([fixed[name] for name in kernel.arg_names[len(arguments) :]])
            _compiled[key] = _compiled_launch(compiled, arguments, constants)
        if listener is not None:
            listener(None, kernel, new=key in _compiled)
        return
    if listener is not None:
        launch = _recorded_launch(ready, programs, arguments)
        listener(None if launch is None else map_step(launch), kernel, new=False)
    run, function, metadata, constants, descriptors = ready
    for place, expand in descriptors:
        flat[place : place + 1] = expand(arguments[place])
    stream = driver.get_current_stream(device)
    run(programs, 1, 1, stream, function, metadata, None, None, None, *flat, *constants)


def enter_context(arguments: Sequence[Any]) -> None:
    """Make the device's context the calling thread's, which the driver wants before it encodes a box.

    A launch does so by itself, but boxes are encoded before it; and a thread of autograd may have done nothing on the
    device yet. To record an event is allowed while a graph is captured, and waits for nothing.
    """
    if not hasattr(_thread, "entered") and any(isinstance(x, Tensor) and x.is_cuda for x in arguments):
        torch.cuda.Event().record()
        _thread.entered = True


def current_device() -> int:
    """Number of the current device."""
    found: int = sys.modules["triton"].runtime.driver.active.get_current_device()
    return found


def current_stream(device: int) -> Any:
    """Its current stream, as a launcher takes it."""
    return sys.modules["triton"].runtime.driver.active.get_current_stream(device)


def _recorded_launch(ready: CompiledLaunch, programs: int, arguments: tuple[Any, ...]) -> RecordedLaunch | None:
    """A launch as it can be made again; None if Triton looks at its descriptors."""
    expanding = dict(ready.descriptors)
    flat: list[Any] = []
    pointers, boxes, encoders = [], [], []
    for place, x in enumerate(arguments):
        if isinstance(x, Tensor):
            pointers.append(PointerSlot(len(flat), x, 0))
            flat.append(0)
        elif hasattr(x, "block_shape"):
            encode = expanding[place].encoder(x) if place in expanding else None
            if encode is None:
                return None
            boxes.append(PointerSlot(len(flat), x.base, 0))
            encoders.append(encode)
            flat += (None, *x.shape, *x.strides)
        else:
            flat.append(x)
    flat += ready.constants
    encoded = [(-1, None)] * len(boxes)
    return RecordedLaunch(ready, programs, flat, tuple(pointers), tuple(boxes), tuple(encoders), encoded)


def _compiled_launch(compiled: Any, arguments: tuple[Any, ...], constants: tuple[Any, ...]) -> CompiledLaunch:
    """How to launch what was compiled for these arguments.

    Where Triton wraps its launcher in a function that looks for descriptors among all arguments, that function's own
    launcher is taken, if it is where it was in Triton 3.6 and 3.7: their places are known here.
    """
    known = compiled.run, compiled.function, compiled.packed_metadata, constants
    places = [place for place, x in enumerate(arguments) if hasattr(x, "block_shape")]
    within = _closure_variables(getattr(compiled.run, "launch", None))
    launcher, layouts = within.get("launcher"), within.get("tensordesc_meta", ())
    expand = getattr(sys.modules[type(compiled.run).__module__], "make_tensordesc_arg", None)
    if launcher is None or expand is None or len(layouts) != len(places):
        return CompiledLaunch(*known, ())
    run = copy.copy(compiled.run)
    run.launch = launcher
    descriptors = [(place, _DescriptorExpander(expand, layout)) for place, layout in zip(places, layouts, strict=True)]
    return CompiledLaunch(run, *known[1:], tuple(descriptors[::-1]))


class _DescriptorExpander:
    """What becomes of a descriptor of one layout: the box's encoding by the driver, then its matrix's sizes.

    Triton's function for that looks up the layout's numbers by name and finds its way to the driver each time; it is
    asked wherever they are not those of Triton 3.6 and 3.7, or a descriptor asks for more than such boxes.
    """

    def __init__(self, expand: Callable[[Any, Any], list[Any]], layout: Any):
        self.expand, self.layout = expand, layout
        names = ("swizzle", "elem_size", "elem_type", "block_size")
        elements = expand.__globals__.get("TMA_DTYPE_DEVICE_TO_HOST")
        utils = getattr(sys.modules["triton"].runtime.driver.active, "utils", None)
        encode = getattr(utils, "fill_tma_descriptor", None) or getattr(utils, "fill_tma_descriptor_tiled", None)
        self.encode = None
        if not (layout and elements and encode) or layout.get("fp4_padded", True):
            return
        if all(name in layout for name in names):
            swizzle, size, element, block = (layout[name] for name in names)
            self.encode, self.box = encode, (swizzle, size, elements[element], block)

    def __call__(self, x: Any) -> list[Any]:
        if self.encode is None or not _is_plain_descriptor(x):
            return self.expand(x, self.layout)
        shape, strides = x.shape, x.strides
        return [self.encode(x.base.data_ptr(), *self.box, shape, strides, 0), *shape, *strides]

    def encoder(self, x: Any) -> Callable[[int], Any] | None:
        """What makes the encoding of a box like x at another address; None where Triton has to be asked."""
        if self.encode is None or not _is_plain_descriptor(x):
            return None
        encode, box, shape, strides = self.encode, self.box, list(x.shape), list(x.strides)
        return lambda address: encode(address, *box, shape, strides, 0)


def _is_plain_descriptor(x: Any) -> bool:
    return x.padding == "zero" and not getattr(x, "round_f32_to_tf32", False)


def _closure_variables(function: Any) -> dict[str, Any]:
    """What a function written inside another one has of it."""
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells)} if cells else {}


def any_launch_hooks() -> bool:
    """Whether someone looks at all kernels' launches now."""
    return "triton" in sys.modules and has_launch_hooks()


def has_launch_hooks(*kernels: Any) -> bool:
    """Whether someone looks at these kernels' launches, or has them compiled in another way, or may for all we know."""
    try:
        knobs = sys.modules["triton"].knobs
        runtime = knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        return bool(
            # A chain of hooks, which may have none, or one hook, or None.
            getattr(enter, "calls", enter)
            or getattr(leave, "calls", leave)
            or any(kernel.pre_run_hooks for kernel in kernels)
            or runtime.debug
            or runtime.add_stages_inspection_hook
            or knobs.compilation.instrumentation_mode
        )
    except AttributeError:
        return True


def _specialization(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Any]] | None:
    """What code is compiled for, of each argument, and what its launch is given; None if one is not recognised.

    The former holds no tensor, no address and no length. The latter has addresses instead of tensors, which Triton's
    launcher takes as well, and then does not ask the driver whose they are: operators have made sure of that.
    """
    kinds: list[Any] = []
    flat = list(arguments)
    for place, x in enumerate(arguments):
        kind = type(x)
        if x is None:
            kinds.append(None)
        elif kind is Tensor or kind is torch.nn.Parameter:
            flat[place] = address = x.data_ptr()
            # Whole vectors may be loaded from the first element on, or not.
            kinds += x.dtype, address % 16 == 0
        elif kind is tuple:
            kinds.append(_integers_class(x))
        elif kind is int:
            kinds.append(_integer_class(x))
        elif kind is float:
            kinds.append(kind)
        elif hasattr(x, "block_shape"):
            # What the matrix is like is read at the launch.
            kinds += kind, x.base.dtype, *x.block_shape
        else:
            return None
    return tuple(kinds), flat


@functools.lru_cache(maxsize=4096)
def _integer_class(x: int) -> str:
    """Whether it is 1, a multiple of 16, of 32 bits, of 64 bits. Finer than for arguments that are not specialised."""
    return f"{x == 1} {x % 16 == 0} {-(2**31) <= x < 2**31} {x < 2**63}"


@functools.lru_cache(maxsize=4096)
def _integers_class(x: tuple[int, ...]) -> str:
    """Of strides, which repeat from call to call; those that come with a new length may be of a known kind."""
    return f"({', '.join(map(_integer_class, x))})"
