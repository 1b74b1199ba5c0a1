"""A compiled kernel in the form in which it is launched, and its tensor descriptors as the launcher takes them."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple


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


def compiled_launch(compiled: Any, arguments: tuple[Any, ...], constants: tuple[Any, ...]) -> CompiledLaunch:
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


def _is_plain_descriptor(x: Any) -> bool:
    """Whether a descriptor pads with zeros and does not round float32 to TF32."""
    return x.padding == "zero" and not getattr(x, "round_f32_to_tf32", False)


def _closure_variables(function: Any) -> dict[str, Any]:
    """Variables of enclosing functions that a function uses, by name."""
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells)} if cells else {}
