"""Values in registers, and pointers to global memory.

A `Value` is immutable: `x += y` in a kernel rebinds the name, and another partition keeps the old value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from tests.emulator.fault import Fault
from torch import Tensor


class Value:
    """A tensor in registers.

    Attributes:
        t: The elements. Scalars have no dimensions.
        layout: Gluon layout if it is known: from a load, and kept by elementwise operations. Else None.
    """

    __slots__ = ("layout", "t")

    def __init__(self, t: Tensor, layout: Any = None):
        self.t, self.layout = t, layout

    @staticmethod
    def of(x: Any) -> Value:
        """x as a value. Python integers become int32 if they fit, else int64; floats become float32."""
        if isinstance(x, Value):
            return x
        if isinstance(x, bool):
            return Value(torch.tensor(x))
        if isinstance(x, int):
            return Value(torch.tensor(x, dtype=torch.int32 if -(2**31) <= x < 2**31 else torch.int64))
        if isinstance(x, float):
            return Value(torch.tensor(x, dtype=torch.float32))
        raise Fault(f"a {type(x).__name__} is not a value in registers: a product before its wait, or an unread tile")

    dtype = property(lambda self: self.t.dtype)
    shape = property(lambda self: list(self.t.shape))
    type = property(lambda self: SimpleNamespace(layout=self.layout))

    def __repr__(self) -> str:
        return f"Value({self.t})"

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Value:
        return Value(self.t.view(dtype) if bitcast else self.t.to(dtype), self.layout)

    def reshape(self, *shape: Any) -> Value:
        return Value(self.t.reshape(*shape))

    def permute(self, *order: Any) -> Value:
        return Value(self.t.permute(*order))

    def __getitem__(self, at: Any) -> Value:
        return Value(self.t[at])

    def __bool__(self) -> bool:
        return bool(self.t)

    def __int__(self) -> int:
        return int(self.t)

    __index__ = __int__

    def __neg__(self) -> Value:
        return Value(-self.t, self.layout)

    def __hash__(self) -> int:
        raise TypeError("a value in registers is not a constant")


def matched(x: Any, y: Any) -> tuple[Any, Any]:
    """Operands with one dtype, by Triton's rules: Python numbers take the other's dtype, two values are promoted."""
    if isinstance(x, Value) and isinstance(y, Value):
        a, b = x.t, y.t
        if a.dtype != b.dtype:
            dtype = torch.promote_types(a.dtype, b.dtype)
            a, b = a.to(dtype), b.to(dtype)
        return a, b
    if isinstance(x, Value):
        return x.t, _number(y, x.t)
    if isinstance(y, Value):
        return _number(x, y.t), y.t
    return Value.of(x).t, Value.of(y).t


def _number(x: Any, like: Tensor) -> Tensor:
    if not isinstance(x, int | float):
        return Value.of(x).t
    if isinstance(x, float) and not like.dtype.is_floating_point:
        return torch.tensor(x, dtype=torch.float32)
    if isinstance(x, int) and not isinstance(x, bool) and like.dtype == torch.bool:
        return torch.tensor(x, dtype=torch.int32)
    if isinstance(x, int) and like.dtype == torch.int32 and not -(2**31) <= x < 2**31:
        return torch.tensor(x, dtype=torch.int64)
    return torch.tensor(x, dtype=like.dtype)


def elementwise(function: Callable[[Tensor, Tensor], Tensor], x: Any, y: Any) -> Value:
    """Apply a function of two operands. The result has the layout of an operand of the same shape."""
    result = function(*matched(x, y))
    for operand in (x, y):
        if isinstance(operand, Value) and operand.layout is not None and operand.t.shape == result.shape:
            return Value(result, operand.layout)
    return Value(result)


def _quotient(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b, rounding_mode="trunc")


def _over(a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.dtype.is_floating_point else a.float() / b.float()


def _defined(name: str, function: Callable[[Tensor, Tensor], Tensor], reflected: bool) -> None:
    def forward(self: Value, other: Any) -> Any:
        return NotImplemented if isinstance(other, Pointer) else elementwise(function, self, other)

    def backward(self: Value, other: Any) -> Value:
        return elementwise(function, other, self)

    setattr(Value, f"__{name}__", forward)
    if reflected:
        setattr(Value, f"__r{name}__", backward)


for _name in ("add", "sub", "mul", "and_", "or_", "xor", "lshift", "rshift"):
    _defined(_name.rstrip("_"), getattr(operator, _name), reflected=True)
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _defined(_name, getattr(operator, _name), reflected=False)
_defined("mod", torch.fmod, reflected=True)
_defined("floordiv", _quotient, reflected=True)
_defined("truediv", _over, reflected=True)


class Pointer:
    """A pointer, or a tensor of pointers, to global memory.

    Attributes:
        base: The tensor that the launch was given.
        offset: Elements from the beginning of the tensor's storage.
    """

    def __init__(self, base: Tensor, offset: Any = None):
        self.base, self.offset = base, base.storage_offset() if offset is None else offset
        self.dtype = SimpleNamespace(element_ty=base.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.base, self.offset + more)

    __radd__ = __add__

    def load(self, mask: Any = None, other: Any = 0) -> Value:
        memory, at, here = self._place(mask)
        if here is None:
            return Value(memory[at])
        found = memory[torch.where(here, at, 0)]
        return Value(torch.where(here, found, Value.of(other).t.to(found.dtype)))

    def store(self, x: Any, mask: Any = None) -> None:
        memory, at, here = self._place(mask)
        x = Value.of(x).t.to(memory.dtype)
        if here is None:
            memory[at] = x.expand(at.shape)
        else:
            memory[at[here]] = x.expand(at.shape)[here]

    def _place(self, mask: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """The tensor's whole storage, the indices into it, and the mask."""
        storage = self.base.untyped_storage().nbytes() // self.base.itemsize
        memory = torch.as_strided(self.base, (storage,), (1,), 0)
        at = Value.of(self.offset).t.long()
        here = None if mask is None else Value.of(mask).t
        if here is not None:
            at, here = torch.broadcast_tensors(at, here)
        reached = at if here is None else at[here]
        if bool(((reached < 0) | (reached >= storage)).any()):
            raise Fault(f"an address outside of its tensor's memory of {storage} elements")
        return memory, at, here
