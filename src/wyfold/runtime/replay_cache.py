"""Calls that repeat an earlier one: the launches of then, on the tensors of now.

Between an operator's arguments and its launches lies Python that looks at metadata alone: it checks, plans, makes
views, asks for memory, and finds the kernel for each launch. Calls that are equal in all it may look at come to the
same launches, with the same numbers and other addresses. Before the first such call its kernels are compiled
(`runtime/precompile.py`); `replayed` listens to the second one and writes down what reaches the device: memory asked
for, kernels launched, copies made, collectives waited for. The calls that follow do that and nothing else.

What is kept is found by value, holds no tensor and no address, and is given up where it is not understood: a call with
any other operation in it, of which there are many, goes the ordinary way every time. So does every call that somebody
else listens to, differentiates or compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from wyfold.runtime import check, kernel_configs, kernel_launch, torch_ops
from wyfold.runtime.plan import explaining
from wyfold.runtime.precompile import precompile_kernels
from wyfold.runtime.recorder import record
from wyfold.runtime.recording import Recording

Result = TypeVar("Result")

CAPACITY = 2048
"""Calls remembered, and kinds of them; when there are more, all are forgotten."""

DEVICES = frozenset(("cuda",))
"""Types of device whose calls are remembered: elsewhere nothing is launched."""

_recordings: dict[tuple[Any, ...], Recording | str] = {}
"""What calls came to. A text says why not; an empty one that such a call was seen once."""

_precompiled: set[tuple[Any, ...]] = set()
"""Calls, apart from their lengths and real numbers, whose kernels were compiled before them."""


class Lengths(tuple[int, ...]):
    """Numbers among a call's values of which kernels know whether there are any, and no more, as of lengths."""


def replayed(tensors: tuple[Any, ...], values: tuple[Any, ...], run: Callable[[], Result]) -> Result:
    """`run()`, or what it would do.

    Args:
        tensors: All tensors that `run` works on, the first one on the device of the call; None where there is none. In
            what they hold, it may look only where it would see the same at every such call.
        values: All else that `run` depends on, and a name for it; by value. `Lengths` among them make no other kernels.
        run: Returns None, a tensor or a tuple of these, each newly made or one of `tensors`. Called twice where it is
            new, first with nothing written or launched, so it changes nothing by other ways.
    """
    if torch.compiler.is_compiling():
        return run()
    addresses: list[int] = []
    key = _key(tensors, values, addresses)
    try:
        recording = None if key is None else _recordings.get(key)
    except TypeError:  # an argument that is nothing legal
        key = None
    if key is None:
        return run()
    if type(recording) is Recording:
        return recording.run(tensors, addresses) if recording.guards_hold(tensors, values) else run()
    if recording is None:
        if len(_recordings) >= CAPACITY:
            _recordings.clear()
        _recordings[key] = ""
        _compile(tensors, values, run)
        return run()
    if recording or kernel_launch.any_launch_hooks():
        return run()
    result, recording = record(tensors, run)
    if type(recording) is Recording:
        recording = recording._replace(zeros=tuple([(n, str(values[n])) for n in zero_positions(values)]))
    _recordings[key] = recording
    return result


def forget() -> None:
    """Every call is new again: after a change of what the package reads once."""
    _recordings.clear()
    _precompiled.clear()


def _compile(tensors: tuple[Any, ...], values: tuple[Any, ...], run: Callable[[], object]) -> None:
    """Kernels of a call whose like there was none, whatever its lengths and real numbers.

    Of lengths, kernels know as a rule only what they make of strides: which of them are multiples of 16.
    """
    looks = tuple([None if x is None else (x.dtype, *_widths(x), *[n % 16 == 0 for n in x.stride()]) for x in tensors])
    flags = tuple([None if type(x) is float else tuple(map(bool, x)) if type(x) is Lengths else x for x in values])
    kind = flags, tuple(map(type, values)), tensors[0].device, looks, kernel_configs.table_version()
    if kind not in _precompiled:
        if len(_precompiled) >= CAPACITY:
            _precompiled.clear()
        _precompiled.add(kind)
        precompile_kernels(run, tensors[0].device)


def _widths(x: Tensor) -> tuple[int, ...]:
    """What a model has in common: neither batch nor tokens, [B, T, HV] or [B, T, HV, K], nor the number of an index."""
    return tuple(x.shape[-2 if x.dim() > 3 else -1 :]) if x.is_floating_point() else ()


def _key(tensors: tuple[Any, ...], values: tuple[Any, ...], addresses: list[int]) -> tuple[Any, ...] | None:
    """Everything that such a call may depend on, by value, and the tensors' addresses; None if it is to be left alone.

    Of an address, kernels and launchers ask whether it is a multiple of 16.
    """
    first = tensors[0]
    if not isinstance(first, Tensor) or first.device.type not in DEVICES:
        return None
    if not torch_ops.in_plain_eager() or check.checking_contents() or explaining():
        return None
    differentiable = torch.is_grad_enabled()
    # True is 1 to a dictionary, but no flag.
    key: list[Any] = [
        values,
        tuple(map(type, values)),
        kernel_configs.table_version(),
        torch_ops.autocast_dtype(first.device.type),
    ]
    try:
        for x in tensors:
            if x is None:
                addresses.append(0)
                key.append(None)
                continue
            kind = type(x)
            if kind is not Tensor and kind is not torch.nn.Parameter:
                return None
            address = x.data_ptr()
            # A tensor without memory stands for something else; so does one that is negated when it is read.
            if (not address and x.numel()) or x.is_neg() or (differentiable and x.requires_grad):
                return None
            addresses.append(address)
            key += x.shape, x.stride(), x.dtype, x.device, address % 16
    except RuntimeError:  # a tensor without strides
        return None
    return tuple(key)


def zero_positions(values: tuple[Any, ...]) -> list[int]:
    """Places of zeros among real numbers: those of either sign are equal, and need not come to the same."""
    return [n for n, value in enumerate(values) if type(value) is float and value == 0.0]
