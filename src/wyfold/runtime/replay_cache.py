"""Replay cache: calls with the same metadata reuse a plan and re-issue recorded launches on new tensors.

Between an operator's arguments and its launches there is Python code that reads metadata only. It checks arguments,
plans, makes views, allocates memory and looks up the kernel of each launch. Calls with equal metadata therefore issue
the same launches with the same numbers; only addresses differ.

There are two boundaries, with one kind of cache key (`_key`):

- A registered operator (`torch_ops.call`), in either direction. Its schema lists every tensor, list and scalar.
- A public function (`planned`), whose arguments are two tuples: tensors, and everything else. Its plan is cached for
  every call. Its launches are recorded for a call without gradients, where no registered operator is reached at all.

Behind a boundary are module-level functions that see the arguments and nothing else. So the key, which has every
argument, has everything that a launch can depend on. A boundary treats calls with one key in order:

1. The first call of an operator has its kernels compiled in parallel (`runtime/precompile.py`). Then it runs as usual.
2. The second call runs under a recorder (`runtime/recorder.py`), which writes down what reaches the device:
   allocations, kernel launches, copies and waits for collectives. The result is a `Recording`.
3. Every later call replays the recording (`runtime/recording.py`).

Keys compare by value. A recording holds no tensor and no address. A call that contains an operation the recorder does
not know is never recorded and always runs as usual. So does a call under autograd, a compiler, a profiler or any
other mode that observes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from wyfold.runtime import check, kernel_configs, kernel_launch, segment_rule, torch_modes, triton_support
from wyfold.runtime.plan import explaining
from wyfold.runtime.precompile import precompile_kernels
from wyfold.runtime.recorder import record
from wyfold.runtime.recording import Recording

Plan = TypeVar("Plan")
Result = TypeVar("Result")

CAPACITY = 4096
"""Most entries of each cache below. A full cache is cleared as a whole."""

DEVICES = frozenset(("cuda",))
"""Device types whose calls are recorded. On other devices no kernel is launched."""


class _Entry:
    """What is known of calls with one key.

    Attributes:
        plan: Plan of the public function, or None.
        recording: Recording of the call. A text is the reason why there is none; an empty text means that one such call
            has run, and None that none has.
    """

    __slots__ = ("plan", "recording")

    def __init__(self) -> None:
        self.plan: Any = None
        self.recording: Recording | str | None = None


_entries: dict[tuple[Any, ...], _Entry] = {}
"""Cache key -> what is known of such calls."""

_precompiled: set[tuple[Any, ...]] = set()
"""Keys of calls whose kernels were precompiled. Lengths and real numbers are not part of these keys."""


class Lengths(tuple[int, ...]):
    """Counts among a call's values, such as numbers of tokens. Zero or not zero is all that selects a kernel."""


class PublicOperator(NamedTuple, Generic[Plan, Result]):
    """What a public function does behind its boundary. Both are functions of a module, without captured variables.

    Their arguments are the tensors and the values of a call, as they were passed to `planned`.

    Attributes:
        make_plan: Checks the call and returns its plan, from metadata alone; never None.
        run: Runs a checked call by its plan. Returns None, a tensor or a tuple of these, each newly allocated or one of
            the tensors, and has no other effect than to write tensors.
    """

    make_plan: Callable[[Any, Any], Plan]
    run: Callable[[Plan, Any, Any], Result]


def planned(operator: PublicOperator[Plan, Result], tensors: tuple[Any, ...], values: tuple[Any, ...]) -> Result:
    """Check, plan and run a call of a public function, or replay an earlier call with the same metadata.

    Args:
        operator: What to do.
        tensors: All tensors of the call; None for an absent one. The first one decides the device.
        values: All other arguments, compared by type and value.
    """
    known = find_call(operator, tensors, values)
    if known is None:
        return operator.run(operator.make_plan(tensors, values), tensors, values)
    if known.can_replay():
        found: Result = known.replay()
        return found
    plan = known.plan_by(operator.make_plan)
    if known.is_second():
        recorded: Result = known.record(lambda: operator.run(plan, tensors, values))
        return recorded
    return operator.run(plan, tensors, values)


def find_call(head: Any, tensors: tuple[Any, ...], values: tuple[Any, ...]) -> KnownCall | None:
    """What is known of calls like this one; None if nothing may be kept of it.

    Args:
        head: The registered operator's name, or the public operator.
        tensors, values: All that the call depends on.
    """
    plain = torch_modes.in_plain_eager()
    if not plain and (torch.compiler.is_compiling() or torch_modes.tracing() is not None):
        return None
    if explaining() or check.checking_contents() or not isinstance(tensors[0], Tensor):
        return None
    addresses: list[int] = []
    try:
        key, unfit = _key(head, tensors, values, addresses)
        entry = _entries.get(key)
    except (TypeError, RuntimeError):
        # A tensor without strides or storage, an argument that is no tensor, or a value that cannot be hashed.
        return None
    if entry is None:
        if len(_entries) >= CAPACITY:
            _entries.clear()
        entry = _entries[key] = _Entry()
    recordable = plain and not unfit and tensors[0].device.type in DEVICES
    return KnownCall(entry, recordable, head, tensors, values, addresses)


class KnownCall:
    """A call, and what is known of calls with its key."""

    __slots__ = ("_addresses", "_entry", "_head", "_recordable", "_tensors", "_values")

    def __init__(
        self,
        entry: _Entry,
        recordable: bool,
        head: Any,
        tensors: tuple[Any, ...],
        values: tuple[Any, ...],
        addresses: list[int],
    ):
        self._entry, self._recordable, self._head = entry, recordable, head
        self._tensors, self._values, self._addresses = tensors, values, addresses

    def plan_by(self, make_plan: Callable[[Any, Any], Plan]) -> Plan:
        """The plan of the calls with this key."""
        plan: Plan | None = self._entry.plan
        if plan is None:
            plan = make_plan(self._tensors, self._values)
            if not zero_positions(self._values):
                self._entry.plan = plan
        return plan

    def can_replay(self) -> bool:
        """Whether there is a recording that may be replayed."""
        recording = self._entry.recording
        return type(recording) is Recording and self._recordable and recording.guards_hold(self._tensors, self._values)

    def replay(self) -> Any:
        """Replay the recording and return its results."""
        recording: Any = self._entry.recording
        return recording.run(self._tensors, self._addresses)

    def is_first(self) -> bool:
        """Whether no such call has run yet. From now on one has."""
        first = self._recordable and self._entry.recording is None
        if first:
            self._entry.recording = ""
        return first

    def is_second(self) -> bool:
        """Whether one such call has run, and this one is to be recorded. Called once for each call."""
        waiting = not self.is_first() and self._recordable and self._entry.recording == ""
        return waiting and not kernel_launch.any_launch_hooks()

    def precompile(self, run: Callable[[], object]) -> None:
        """Precompile the kernels of a call, unless a call with the same kernels had them precompiled.

        Kernels depend on a length only through the strides it implies, and on these only through divisibility by 16.
        """
        layouts = tuple(
            [None if x is None else (x.dtype, *_widths(x), *[n % 16 == 0 for n in x.stride()]) for x in self._tensors]
        )
        values = self._values
        flags = tuple([None if type(x) is float else tuple(map(bool, x)) if type(x) is Lengths else x for x in values])
        device = self._tensors[0].device
        key = self._head, flags, tuple(map(type, values)), device, layouts, kernel_configs.table_version()
        if key not in _precompiled:
            if len(_precompiled) >= CAPACITY:
                _precompiled.clear()
            _precompiled.add(key)
            precompile_kernels(run, device)

    def record(self, run: Callable[[], Any]) -> Any:
        """Run the call and record it."""
        result, recording = record(self._tensors, run)
        if type(recording) is Recording:
            zeros = tuple([(n, str(self._values[n])) for n in zero_positions(self._values)])
            recording = recording._replace(zeros=zeros)
        self._entry.recording = recording
        return result


def forget() -> None:
    """Clear the cache, after a change of something that the package reads once."""
    _entries.clear()
    _precompiled.clear()


def _widths(x: Tensor) -> tuple[int, ...]:
    """Extents that a model fixes: without batch and tokens of [B, T, HV] or [B, T, HV, K]; () for an index tensor."""
    return tuple(x.shape[-2 if x.dim() > 3 else -1 :]) if x.is_floating_point() else ()


def _key(
    head: Any, tensors: tuple[Any, ...], values: tuple[Any, ...], addresses: list[int]
) -> tuple[tuple[Any, ...], bool]:
    """Cache key of a call: everything it may depend on, by value.

    Kernels and launchers depend on an address only through its remainder modulo 16. The types of the values are part of
    the key: 1 equals True, but is not a legal flag.

    Args:
        head, tensors, values: As for `find_call`.
        addresses: Filled with the tensors' addresses, 0 for None.

    Returns:
        The key, and whether the call must not be recorded because of its tensors: one requires a gradient, or its
        memory does not hold its values.
    """
    device = tensors[0].device
    differentiable, unfit = torch.is_grad_enabled(), False
    key: list[Any] = [head, values, tuple(map(type, values)), *_process_state(device.type)]
    for x in tensors:
        if x is None:
            addresses.append(0)
            key.append(None)
            continue
        kind = type(x)
        if kind is not Tensor and kind is not torch.nn.Parameter:
            raise TypeError(f"{kind.__name__} is no plain tensor")
        address = x.data_ptr()
        addresses.append(address)
        key += x.shape, x.stride(), x.dtype, x.device, address % 16
        if differentiable and x.requires_grad:
            key.append(True)
            unfit = True
        # A tensor without memory is a placeholder. A lazily negated one does not hold its values.
        elif (not address and x.numel()) or x.is_neg():
            unfit = True
    return tuple(key), unfit


def _process_state(device: str) -> tuple[Any, ...]:
    """State of the process that plans and launches read."""
    around = kernel_configs.table_version(), segment_rule.forcing(), torch_modes.autocast_dtype(device)
    return around if device == "cuda" else (*around, triton_support.interpreter_state())


def zero_positions(values: tuple[Any, ...]) -> list[int]:
    """Indices of float zeros in `values`. 0.0 equals -0.0 in a cache key, but results may differ."""
    return [n for n, value in enumerate(values) if type(value) is float and value == 0.0]
