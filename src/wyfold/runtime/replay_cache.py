"""Replay cache: calls with the same metadata re-issue recorded launches on new tensors.

Between an operator's arguments and its launches there is Python code that reads metadata only. It checks arguments,
plans, makes views, allocates memory and looks up the kernel of each launch. Calls with equal metadata therefore issue
the same launches with the same numbers; only addresses differ. `replayed` treats calls with one cache key in order:

1. The first call has its kernels compiled in parallel (`runtime/precompile.py`), then runs as usual.
2. The second call runs under a recorder (`runtime/recorder.py`), which writes down what reaches the device:
   allocations, kernel launches, copies and waits for collectives. The result is a `Recording`.
3. Every later call replays the recording (`runtime/recording.py`).

Keys compare by value. A recording holds no tensor and no address. A call that contains an operation the recorder does
not know is never recorded and always runs as usual. So does a call under autograd, a compiler, a profiler or any
other mode that observes it.
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
"""Most entries of each cache below. A full cache is cleared as a whole."""

DEVICES = frozenset(("cuda",))
"""Device types whose calls are cached. On other devices no kernel is launched."""

_recordings: dict[tuple[Any, ...], Recording | str] = {}
"""Cache key -> recording. A text is the reason why there is none; an empty text means one such call has run."""

_precompiled: set[tuple[Any, ...]] = set()
"""Keys of calls whose kernels were precompiled. Lengths and real numbers are not part of these keys."""


class Lengths(tuple[int, ...]):
    """Counts among a call's values, such as numbers of tokens. Zero or not zero is all that selects a kernel."""


def replayed(tensors: tuple[Any, ...], values: tuple[Any, ...], run: Callable[[], Result]) -> Result:
    """Return `run()`, or replay an earlier call with the same metadata.

    Args:
        tensors: All tensors that `run` works on, the first one on the device of the call; None for an absent one. `run`
            may read their contents only where the outcome is the same for every call with this key.
        values: Everything else that `run` depends on, and a name for it. Compared by value. `Lengths` among them do not
            select other kernels.
        run: Returns None, a tensor or a tuple of these, each newly allocated or one of `tensors`. Without a cache entry
            it is called twice, the first time as a dry run without writes or launches. It must have no other effects.
    """
    if torch.compiler.is_compiling():
        return run()
    addresses: list[int] = []
    key = _key(tensors, values, addresses)
    if key is None:
        return run()
    try:
        recording = _recordings.get(key)
    except TypeError:  # an argument of an illegal type, which cannot be hashed
        return run()
    if type(recording) is Recording:
        return recording.run(tensors, addresses) if recording.guards_hold(tensors, values) else run()
    if recording is None:
        if len(_recordings) >= CAPACITY:
            _recordings.clear()
        _recordings[key] = ""
        _precompile(tensors, values, run)
        return run()
    if recording or kernel_launch.any_launch_hooks():
        return run()
    result, recording = record(tensors, run)
    if type(recording) is Recording:
        recording = recording._replace(zeros=tuple([(n, str(values[n])) for n in zero_positions(values)]))
    _recordings[key] = recording
    return result


def forget() -> None:
    """Clear the cache, after a change of something that the package reads once."""
    _recordings.clear()
    _precompiled.clear()


def _precompile(tensors: tuple[Any, ...], values: tuple[Any, ...], run: Callable[[], object]) -> None:
    """Precompile the kernels of a call, unless a call with the same kernels had them precompiled.

    Kernels depend on a length only through the strides it implies, and on these only through divisibility by 16.
    """
    layouts = tuple(
        [None if x is None else (x.dtype, *_widths(x), *[n % 16 == 0 for n in x.stride()]) for x in tensors]
    )
    flags = tuple([None if type(x) is float else tuple(map(bool, x)) if type(x) is Lengths else x for x in values])
    key = flags, tuple(map(type, values)), tensors[0].device, layouts, kernel_configs.table_version()
    if key not in _precompiled:
        if len(_precompiled) >= CAPACITY:
            _precompiled.clear()
        _precompiled.add(key)
        precompile_kernels(run, tensors[0].device)


def _widths(x: Tensor) -> tuple[int, ...]:
    """Extents that a model fixes: without batch and tokens of [B, T, HV] or [B, T, HV, K]; () for an index tensor."""
    return tuple(x.shape[-2 if x.dim() > 3 else -1 :]) if x.is_floating_point() else ()


def _key(tensors: tuple[Any, ...], values: tuple[Any, ...], addresses: list[int]) -> tuple[Any, ...] | None:
    """Cache key of a call: everything it may depend on, by value. None if the call must run as usual.

    Kernels and launchers depend on an address only through its remainder modulo 16.

    Args:
        tensors, values: As for `replayed`.
        addresses: Filled with the tensors' addresses, 0 for None.
    """
    first = tensors[0]
    if not isinstance(first, Tensor) or first.device.type not in DEVICES:
        return None
    if not torch_ops.in_plain_eager() or check.checking_contents() or explaining():
        return None
    differentiable = torch.is_grad_enabled()
    # The types of the values are part of the key: 1 equals True, but is not a legal flag.
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
            # A tensor without memory is a placeholder. A lazily negated one does not hold its values.
            if (not address and x.numel()) or x.is_neg() or (differentiable and x.requires_grad):
                return None
            addresses.append(address)
            key += x.shape, x.stride(), x.dtype, x.device, address % 16
    except RuntimeError:  # a tensor without strides
        return None
    return tuple(key)


def zero_positions(values: tuple[Any, ...]) -> list[int]:
    """Indices of float zeros in `values`. 0.0 equals -0.0 in a cache key, but results may differ."""
    return [n for n, value in enumerate(values) if type(value) is float and value == 0.0]
