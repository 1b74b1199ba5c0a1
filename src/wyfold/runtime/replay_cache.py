"""Replay cache: calls with the same metadata reuse a plan and re-issue recorded launches on new tensors.

Between an operator's arguments and its launches there is Python code that reads metadata only. It checks arguments,
plans, makes views, allocates memory and looks up the kernel of each launch. Calls with equal metadata therefore issue
the same launches with the same numbers; only addresses differ.

There are two boundaries, with one kind of cache key (`_look_up`):

- A registered operator (`torch_ops.call`), in either direction. Its schema lists every tensor, list and scalar.
- A public function (`planned`), whose arguments are two tuples: tensors, and everything else. Its plan is cached for
  every call. Its launches are recorded for a call without gradients, where no registered operator is reached at all.
  With gradients, its entry has the recording of the first registered operator in it (`call_around`).

A key costs more time than the replay of a short call. So a call is first compared with the last one like it (`_Alike`).

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

import threading
from collections.abc import Callable
from operator import is_
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


class _Alike(NamedTuple):
    """What is remembered of a call, by which the next one like it is recognised without building its key.

    Attributes:
        check: `_comparison` with its tensors.
        places: For each tensor 1 + its address modulo 16; 0 if it has no memory, and -1 for None.
        device: Type of its device.
        state: Types of the values, whether autograd is on, and `_process_state`.
        entry: The entry of its key.
        held: Whether the memory of all tensors has their values.
        differentiated: Whether a tensor requires a gradient.
    """

    check: Callable[..., bool]
    places: list[int]
    device: str
    state: tuple[Any, ...]
    entry: _Entry
    held: bool
    differentiated: bool


_KINDS = frozenset((type(None), Tensor, torch.nn.Parameter))
"""Types of the tensors of a call of which anything is kept."""

_entries: dict[tuple[Any, ...], _Entry] = {}
"""Cache key -> what is known of such calls."""

_alike: dict[tuple[Any, ...], _Alike] = {}
"""Head, values, and shape of the first tensor -> the last such call."""

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
    _thread.around = known
    try:
        return operator.run(plan, tensors, values)
    finally:
        _thread.around = None


class _ThreadState(threading.local):
    """State of a thread.

    Attributes:
        around: The differentiated call of a public function that this thread is in; None after the first call of a
            registered operator in it.
    """

    around: KnownCall | None = None


_thread = _ThreadState()


def call_around(arguments: tuple[Any, ...], tensors: int) -> KnownCall | None:
    """The differentiated call whose key serves this call of a registered operator as well; None if there is none.

    That is so for the first call of a registered operator, if it gets the same tensors: its other arguments follow from
    the key of the public function.

    Args:
        arguments: Of the registered operator.
        tensors: Number of its tensors, if they are its first arguments; else 0.
    """
    around, _thread.around = _thread.around, None
    return around if around is not None and around.serves(arguments, tensors) else None


def in_differentiated_call() -> bool:
    """Whether this thread is in a call of a public function on plain tensors, outside all modes."""
    return _thread.around is not None and _thread.around.held


def find_call(head: Any, tensors: tuple[Any, ...], values: tuple[Any, ...]) -> KnownCall | None:
    """What is known of calls like this one; None if nothing may be kept of it.

    Args:
        head: The registered operator's name, or the public operator.
        tensors, values: All that the call depends on.
    """
    plain = torch_modes.in_plain_eager()
    if not plain and (torch.compiler.is_compiling() or torch_modes.tracing() is not None):
        return None
    if explaining() or check.checking_contents() or tensors[0] is None or not _KINDS.issuperset(map(type, tensors)):
        return None
    try:
        addresses = [-1 if x is None else x.data_ptr() for x in tensors]
        places = [address if address <= 0 else 1 + address % 16 for address in addresses]
        about = head, values, tensors[0].shape
        alike = _alike.get(about)
        if (
            alike is None
            or alike.places != places
            or alike.state != (tuple(map(type, values)), torch.is_grad_enabled(), *_process_state(alike.device))
            or not alike.check(*[x for x in tensors if x is not None])
        ):
            alike = _look_up(head, values, tensors, places)
            _keep(_alike, about, alike)
    except (TypeError, RuntimeError):
        # A tensor without strides or storage, or a value that cannot be hashed.
        return None
    held = plain and alike.held and alike.device in DEVICES
    return KnownCall(alike.entry, held, held and not alike.differentiated, head, tensors, values, addresses)


class KnownCall:
    """A call, and what is known of calls with its key."""

    __slots__ = ("_addresses", "_entry", "_head", "_held", "_recordable", "_tensors", "_values")

    def __init__(
        self,
        entry: _Entry,
        held: bool,
        recordable: bool,
        head: Any,
        tensors: tuple[Any, ...],
        values: tuple[Any, ...],
        addresses: list[int],
    ):
        self._entry, self._held, self._recordable, self._head = entry, held, recordable, head
        self._tensors, self._values, self._addresses = tensors, values, addresses

    @property
    def held(self) -> bool:
        """Whether the call is made outside all modes, on tensors whose memory has their values."""
        return self._held

    def serves(self, arguments: tuple[Any, ...], tensors: int) -> bool:
        """Whether this is a differentiated call that serves a registered operator (`call_around`); from now on it does.

        Its entry then has the operator's recording, because the call as a whole is never recorded.
        """
        inside = self._held and not self._recordable and tensors == len(self._tensors)
        self._recordable = inside and all(map(is_, self._tensors, arguments))
        return self._recordable

    def serves_function(self) -> bool:
        """Whether this is a differentiated call, and its entry that of an autograd function; from now on it is.

        The function's forward runs without autograd, so it can be recorded, although the call as a whole is never.
        """
        differentiated = self._held and not self._recordable
        self._recordable = differentiated
        return differentiated

    def plan_by(self, make_plan: Callable[[Any, Any], Plan]) -> Plan:
        """The plan of the calls with this key."""
        plan: Plan | None = self._entry.plan
        if plan is None:
            plan = make_plan(self._tensors, self._values)
            if not zero_positions(self._values):
                self._entry.plan = plan
        return plan

    def run(self, run: Callable[[], Any]) -> Any:
        """Replay the call if there is a recording; else run it, and precompile or record it."""
        if self.can_replay():
            return self.replay()
        if self.is_first():
            self.precompile(run)
        elif self.is_second():
            return self.record(run)
        return run()

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
    _alike.clear()
    _precompiled.clear()


def _widths(x: Tensor) -> tuple[int, ...]:
    """Extents that a model fixes: without batch and tokens of [B, T, HV] or [B, T, HV, K]; () for an index tensor."""
    return tuple(x.shape[-2 if x.dim() > 3 else -1 :]) if x.is_floating_point() else ()


def _look_up(head: Any, values: tuple[Any, ...], tensors: tuple[Any, ...], places: list[int]) -> _Alike:
    """The cache entry of a call, by its key: everything it may depend on, by value.

    Kernels and launchers depend on an address only through its remainder modulo 16. The types of the values are part of
    the key: 1 equals True, but is not a legal flag.

    Args:
        head, values, tensors: As for `find_call`.
        places: As of `_Alike`.
    """
    given = [x for x in tensors if x is not None]
    device = given[0].device.type
    state = tuple(map(type, values)), torch.is_grad_enabled(), *_process_state(device)
    gradients = [torch.is_grad_enabled() and x.requires_grad for x in given]
    metadata = [(x.shape, x.stride(), x.dtype, x.device) for x in given]
    key = head, values, *state, *places, *metadata, *gradients
    entry = _entries.get(key)
    if entry is None:
        entry = _Entry()
        _keep(_entries, key, entry)
    # A tensor without memory is a placeholder. A lazily negated one does not hold its values.
    held = not any(x.is_neg() or (x.numel() and not x.data_ptr()) for x in given)
    return _Alike(_comparison(given), places, device, state, entry, held, any(gradients))


def _comparison(tensors: list[Tensor]) -> Callable[..., bool]:
    """A function that compares other tensors with these: type, dispatch keys, dtype, device, shape, strides, gradient.

    PyTorch's compiler has this class to guard its graphs. It takes a fourth of the time of reading the metadata
    (docs/facts/host.md, HOST-4). It finds no tensors alike if one is given twice. Such calls, and all calls in a
    version without it, are looked up by their keys.
    """
    if _Guards is None:
        return lambda *_: False
    shapes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    compare: Callable[..., bool] = _Guards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check
    return compare


_Guards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)


def _keep(cache: dict[Any, Any], key: tuple[Any, ...], value: Any) -> None:
    """Store in a cache of at most `CAPACITY` entries."""
    if len(cache) >= CAPACITY:
        cache.clear()
    cache[key] = value


def _process_state(device: str) -> tuple[Any, ...]:
    """State of the process that plans and launches read."""
    around = (
        kernel_configs.table_version(),
        segment_rule.forcing(),
        torch_modes.autocast_dtype(device),
        torch.are_deterministic_algorithms_enabled(),
    )
    return around if device == "cuda" else (*around, triton_support.interpreter_state())


def zero_positions(values: tuple[Any, ...]) -> list[int]:
    """Indices of float zeros in `values`. 0.0 equals -0.0 in a cache key, but results may differ."""
    return [n for n, value in enumerate(values) if type(value) is float and value == 0.0]
