"""torch.library registration, and guards around registered operators: autocast, TF32, the current device.

Every forward and every backward is registered in the same way: definition, implementation, fake implementation. A
registered operator has no gradient itself; a `torch.autograd.Function` calls forward and backward
(`runtime/differentiation.py`). This takes a third of the host time of `register_autograd`, and a compiler sees one
opaque node with known shapes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterable
from operator import itemgetter
from types import NoneType
from typing import Any, ClassVar

import torch
from torch import Tensor

from wyfold.runtime import replay_cache, torch_modes
from wyfold.runtime.torch_modes import autocast_dtype

_library = torch.library.Library("wyfold", "DEF")

# The first exponential of a process must not be a parallel one. The CPU's vector library initialises itself without a
# lock, and sometimes half of the first result then has half the digits (docs/facts/cpu.md, CPU-4).
for _dtype in (torch.float32, torch.float64):
    for _function in (torch.exp, torch.log1p):
        _function(torch.zeros(1, dtype=_dtype))


def register(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    gradient: Callable[..., Any] | None = None,
    *,
    of_gradients: bool = False,
    lengths: tuple[str, ...] = (),
) -> Callable[..., Any]:
    """Define torch.ops.wyfold.<name> for every device and return it.

    Its first argument is a tensor. `run` depends on the arguments alone.

    Args:
        schema: "name(Tensor x, ...) -> (Tensor y, ...)". Outputs never alias inputs.
        run: The implementation. Runs without autograd.
        fake: Computes shapes and dtypes of the outputs from the inputs' metadata.
        gradient: The same operator through an `autograd.Function`, with the same arguments and results. It is called
            when an argument of the registered operator requires a gradient, as in an exported program. None: such a
            call is refused.
        of_gradients: Whether the operator computes gradients. If so, a batch of incoming gradients
            (`is_grads_batched=True`) is processed one member after another.
        lengths: Names of integer arguments that are counts, as of tokens: only whether they are zero selects a kernel.
    """
    name = schema.partition("(")[0]
    implementation, run = run, _isolated(run)
    _library.define(schema)
    # PyTorch's default Autograd kernel would warn in every backward that no gradient is registered.
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    _library.impl(name, _with_gradient(name, run, gradient), "CompositeExplicitAutograd")
    torch.library.register_fake(f"wyfold::{name}", fake, lib=_library)
    operator: Callable[..., Any] = getattr(torch.ops.wyfold, name).default
    if of_gradients:
        torch.library.register_vmap(f"wyfold::{name}", functools.partial(_vmap_by_loop, operator), lib=_library)
    _registered[operator] = _Registered(operator, implementation, lengths)
    return operator


class _Registered:
    """A registered operator, and how its arguments become the two tuples of a cache key.

    Attributes:
        name: As in the schema.
        run: The implementation.
        leading: Number of tensors if they are the first arguments, else 0.
    """

    def __init__(self, operator: Any, run: Callable[..., Any], lengths: tuple[str, ...]):
        self.name, self.run = operator._schema.name.partition("::")[2], run
        kinds = [_argument_kind(argument, lengths) for argument in operator._schema.arguments]
        self._tensors, self._values = (_picker(kinds, kind) for kind in ("tensor", "value"))
        tensors = sum("tensor" in kind for kind in kinds)
        self.leading = tensors if {*kinds[:tensors]} == {"tensor"} else 0
        places = {kind: [n for n, other in enumerate(kinds) if other == kind] for kind in kinds}
        self._tensor_lists, self._lists = places.get("tensors", []), places.get("values", [])
        self._lengths = places.get("length", []), places.get("lengths", [])

    def split(self, arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """All tensors of a call, and all its other arguments, with lists flattened."""
        tensors, values = self._tensors(arguments), self._values(arguments)
        for place in self._tensor_lists:
            tensors += tuple(arguments[place])
            values += (len(arguments[place]),)
        for place in self._lists:
            values += (tuple(arguments[place]),)
        single, many = self._lengths
        if single or many:
            values += (replay_cache.Lengths([arguments[n] for n in single]),)
            values += tuple([replay_cache.Lengths(arguments[n]) for n in many])
        return tensors, values


def _argument_kind(argument: Any, lengths: tuple[str, ...]) -> str:
    """How an argument of a schema enters a cache key."""
    kind = str(argument.type)
    if argument.name in lengths:
        return "lengths" if kind.startswith("List") else "length"
    if "Tensor" in kind:
        return "tensors" if kind.startswith("List") else "tensor"
    return "values" if kind.startswith("List") else "value"


def _picker(kinds: list[str], kind: str) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that picks the arguments of one kind."""
    places = [n for n, other in enumerate(kinds) if other == kind]
    if places and places == [*range(places[0], places[-1] + 1)]:
        return itemgetter(slice(places[0], places[-1] + 1))
    return itemgetter(*places) if len(places) > 1 else lambda arguments: tuple([arguments[n] for n in places])


_registered: dict[Callable[..., Any], _Registered] = {}
"""Registered operator -> what `call` needs to know."""


def _vmap_by_loop(operator: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
    """Vmap rule: the operator's results for every member of a batch, stacked, and their batch dimension."""
    size = info.batch_size

    def member(n: int, x: Any, dim: Any) -> Any:
        if isinstance(x, list | tuple):
            dims = dim if isinstance(dim, list | tuple) else [dim] * len(x)
            return [member(n, y, d) for y, d in zip(x, dims, strict=True)]
        if dim is None or not isinstance(x, Tensor):
            return x
        return x.select(dim, n) if size else x.new_zeros(x.shape[:dim] + x.shape[dim + 1 :])

    # The shapes of an empty batch's results are those of a member's, so one member of zeros is computed and dropped.
    found = [
        operator(*(member(n, x, dim) for x, dim in zip(arguments, in_dims, strict=True))) for n in range(max(1, size))
    ]
    if isinstance(found[0], Tensor):
        return torch.stack(found)[:size], 0
    stacked = [torch.stack(members)[:size] for members in zip(*found, strict=True)]
    return stacked, [0] * len(stacked)


def call(operator: Callable[..., Any], *arguments: Any) -> Any:
    """Call a registered operator, or replay an earlier call of it with the same metadata (`runtime/replay_cache.py`).

    PyTorch's dispatcher is skipped where it would only pass the arguments through. It takes 8 to 25 microseconds for
    the thirty arguments of a call of the delta family.
    """
    registered = None if torch.compiler.is_compiling() else _registered.get(operator)
    if registered is None:
        return operator(*arguments)
    known = None
    if arguments[0].device.type in replay_cache.DEVICES and not (torch_modes.bypassing() or torch.is_grad_enabled()):
        if registered.leading:
            known = replay_cache.call_around(arguments, registered.leading)
        if known is None:
            known = replay_cache.find_call(registered.name, *registered.split(arguments))
        if known is not None and known.can_replay():
            return known.replay()
    if not can_skip_dispatch(*arguments):
        return operator(*arguments)
    if known is not None:
        if known.is_first():
            known.precompile(lambda: _isolated(registered.run)(*arguments))
        elif known.is_second():
            return known.record(lambda: _isolated(registered.run)(*arguments))
    with _Isolation(arguments):
        return registered.run(*arguments)


def can_skip_dispatch(*arguments: Any) -> bool:
    """Whether dispatch of a registered operator with these arguments would only call its implementation.

    That is so if autograd is off, no mode, tracer or profiler is active, and the memory of every tensor holds its
    values.
    """
    alone = torch_modes.bypassing() or (not torch.is_grad_enabled() and torch_modes.in_plain_eager())
    return alone and _holds_plain_tensors(arguments)


def _holds_plain_tensors(arguments: Iterable[Any]) -> bool:
    """Whether all arguments are of known types, and the memory of every tensor among them holds its values."""
    for x in arguments:
        kind = type(x)
        if kind is Tensor or kind is torch.nn.Parameter:
            if x.is_meta or x.is_neg() or x._is_zerotensor() or torch._is_functional_tensor(x):
                return False
        elif kind is list:
            if not _holds_plain_tensors(x):
                return False
        elif kind not in _VALUES:
            return False
    return True


_VALUES = frozenset((NoneType, bool, int, float, str, torch.dtype))


def _with_gradient(name: str, run: Callable[..., Any], gradient: Callable[..., Any] | None) -> Callable[..., Any]:
    """`run`, replaced by `gradient` in calls where autograd is on and an argument requires a gradient."""

    @functools.wraps(run)
    def differentiated(*arguments: Any) -> Any:
        if torch_modes.bypassing() or not torch.is_grad_enabled() or not _requires_gradient(arguments):
            return run(*arguments)
        if gradient is None:
            raise RuntimeError(
                f"wyfold::{name} has no gradient, and one of its arguments requires one; call it under torch.no_grad()"
            )
        return gradient(*arguments)

    return differentiated


def _requires_gradient(arguments: Iterable[Any]) -> bool:
    return any(
        x.requires_grad if isinstance(x, Tensor) else isinstance(x, list) and _requires_gradient(x) for x in arguments
    )


def _isolated(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` inside `_Isolation`."""

    @functools.wraps(run)
    def undisturbed(*arguments: Any) -> Any:
        with _Isolation(arguments):
            return run(*arguments)

    return undisturbed


class _Isolation(contextlib.ExitStack):
    """Context on the tensors' device, without autocast, and with float32 matrix products in full precision."""

    def __init__(self, arguments: tuple[Any, ...]):
        super().__init__()
        self._place = next(x.device for x in arguments if isinstance(x, Tensor))

    def __enter__(self) -> _Isolation:
        place = self._place
        self.enter_context(_ieee_matmuls(place.type))
        self.enter_context(_on(place))
        if autocast_dtype(place.type) is not None:
            self.enter_context(torch.autocast(place.type, enabled=False))
        return self


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Context in which the device of a tensor is the current one, on which kernels are launched."""
    return _on(x.device)


def _on(place: torch.device) -> contextlib.AbstractContextManager[object]:
    if place.type == "cuda" and place.index != torch.cuda.current_device():
        return torch.cuda.device(place)
    return contextlib.nullcontext()


class _ieee_matmuls:
    """Context in which float32 matrix products on a device are not rounded to TF32 or bfloat16.

    The setting is global to the process. Every entry reads it, because another thread may have changed it since an
    earlier entry. The last exit restores it, unless another thread changed it meanwhile.
    """

    _lock = threading.Lock()
    _inside: ClassVar[dict[str, int]] = {}
    _before: ClassVar[dict[str, str]] = {}
    _this_thread = threading.local()

    def __init__(self, device: str):
        self.device = device
        self.products = {"cpu": torch.backends.mkldnn, "cuda": torch.backends.cuda}.get(device)

    def __enter__(self) -> None:
        if self.products is None:
            return
        with self._lock:
            allowed = self.products.matmul.fp32_precision
            if allowed not in ("none", "ieee"):
                self._before[self.device] = allowed
                self.products.matmul.fp32_precision = "ieee"
            self._count(1)

    def __exit__(self, *_: object) -> None:
        if self.products is None:
            return
        with self._lock:
            if self._count(-1) == 0:
                self._restore(self.device, self.products)

    def _count(self, step: int) -> int:
        """Count an entry (1) or exit (-1) for this thread and for all; returns the number inside over all threads."""
        setattr(self._this_thread, self.device, getattr(self._this_thread, self.device, 0) + step)
        self._inside[self.device] = self._inside.get(self.device, 0) + step
        return self._inside[self.device]

    @classmethod
    def _restore(cls, device: str, products: Any) -> None:
        before = cls._before.pop(device, None)
        if before is not None and products.matmul.fp32_precision == "ieee":
            products.matmul.fp32_precision = before

    @classmethod
    def forget_other_threads(cls) -> None:
        """In the child of a fork, drop the entries of other threads: they do not exist there and never exit."""
        cls._lock.release()
        for device, products in (("cpu", torch.backends.mkldnn), ("cuda", torch.backends.cuda)):
            cls._inside[device] = getattr(cls._this_thread, device, 0)
            if cls._inside[device] == 0:
                cls._restore(device, products)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_ieee_matmuls._lock.acquire,
        after_in_parent=_ieee_matmuls._lock.release,
        after_in_child=_ieee_matmuls.forget_other_threads,
    )


def in_autocast_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, cast as an active autocast casts a layer's inputs. Float64 keeps its dtype, as in autocast."""
    dtype = autocast_dtype(tensors[0].device.type)
    if dtype is None:
        return tensors
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def constant_to_compilers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark `function` so that `torch.compile` calls it once and keeps the result, instead of tracing its body.

    PyTorch's decorator (`torch.compiler.assume_constant_result`) sets the same mark, but imports the compiler.
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function
