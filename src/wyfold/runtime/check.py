"""Checks of arguments. An error names the operator and the argument, what was expected, and what was passed.

Every check reads metadata only, so it works on meta and fake tensors, traces under `torch.compile(fullgraph=True)` and
never waits for a device. Checks of contents are opt-in (`checked`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from wyfold.runtime.unsupported import UnsupportedError as UnsupportedError

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INDICES = (torch.int32, torch.int64)
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


_checked_depth = 0


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Context in which operators also check contents.

    These are the boundaries of packed documents, the sign of log decays, the triangle that `solve_tril` reads, and that
    no two sequences of a serving call write to one slot. Each such check costs a device synchronisation. The
    context applies to all threads of the process.

    Examples:
        >>> import torch, wyfold
        >>> with wyfold.checked():
        ...     A = wyfold.solve_tril(torch.zeros(1, 16, 1, 16))
    """
    global _checked_depth
    _checked_depth += 1
    try:
        yield
    finally:
        _checked_depth -= 1


def checking_contents() -> bool:
    """Whether a `checked` context is open."""
    return _checked_depth > 0


def readable(x: Tensor) -> bool:
    """Whether the contents of x may be read: x is a real tensor on the CPU, or any real tensor inside `checked`.

    During the capture of a CUDA graph no GPU tensor may be read, because waiting for it would end the capture.
    """
    if torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter):
        return False
    if x.device.type == "cpu":
        return True
    if not checking_contents() or x.device.type == "meta":
        return False
    return not (x.device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def tensor(op: str, name: str, x: object) -> Tensor:
    """Return x if it is a strided tensor on this rank; raise if it is sparse, nested or a DTensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(x).__name__}")
    if x.layout != torch.strided:
        raise ValueError(f"{op}: {name} must be strided, got a tensor of layout {str(x.layout).removeprefix('torch.')}")
    if x.is_nested:
        raise ValueError(
            f"{op}: {name} must be one block of numbers, got a nested tensor; pad it, or put the sequences one after "
            "another in one row, with cu_seqlens where the operator takes it"
        )
    if not torch.compiler.is_compiling() and type(x).__name__ == "DTensor":
        raise ValueError(
            f"{op}: {name} must be what this rank holds, got a DTensor; pass its to_local(), or divide a whole decoder "
            "by wyfold.integrations.dtensor.parallelize"
        )
    return x


def flag(op: str, **flags: object) -> None:
    """Raise unless every given flag is True or False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{op}: {name} must be True or False, got {_given(value)}")


def _given(value: object) -> str:
    """A value in a message; of a tensor its type, because numbers on a GPU would be waited for."""
    return type(value).__name__ if isinstance(value, Tensor) else repr(value)


def number(op: str, name: str, value: object) -> float:
    """Return a finite real number as a float, or raise."""
    if isinstance(value, bool) or not isinstance(value, int | float | torch.SymInt | torch.SymFloat):
        raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")
    # A comparison, because `isfinite` does not work on a compiler's symbol for a number that changes.
    if isinstance(value, float) and not -math.inf < value < math.inf:
        raise ValueError(f"{op}: {name} must be finite, got {value}")
    try:
        return float(value)
    except OverflowError:  # an int larger than any float
        raise ValueError(f"{op}: {name} must be finite, got an int that no float64 can hold") from None


def epsilon(op: str, value: object, dtype: torch.dtype = torch.float64, *, name: str = "eps") -> float:
    """Return the eps of a norm; raise unless it is above 0, also in dtype: the norm of a zero row must be finite."""
    least, eps = torch.finfo(dtype).smallest_normal, number(op, name, value)
    if eps <= 0:
        raise ValueError(f"{op}: {name} must be above 0, got {value}")
    if eps < least:
        raise ValueError(
            f"{op}: {name} must be at least {least:.8g}, the smallest normal {_dtype_name(dtype)}, got {value}; "
            "a smaller one is lost in the arithmetic, and a zero row becomes NaN"
        )
    return eps


def integer(op: str, name: str, value: object, *, least: int, most: int = 2**63 - 1) -> int:
    """Return an int from `least` to `most`, by default the largest that a tensor can hold; raise for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{op}: {name} must be an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{op}: {name} must be at least {least}, got {value}")
    if value > most:
        raise ValueError(f"{op}: {name} must be at most {most}, got {value}")
    return value  # type: ignore[return-value]  # a SymInt is an int to its user


def choice(op: str, name: str, value: object, options: Sequence[object]) -> None:
    """Raise unless value is one of options. Types must agree too: True is not 1."""
    if not any(value is option or (type(value) is type(option) and value == option) for option in options):
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(repr, options))}, got {_given(value)}")


def shapes(
    op: str,
    *,
    optional: Collection[str] = (),
    known: Mapping[str, int] | None = None,
    **arguments: tuple[Tensor | None, str],
) -> dict[str, int]:
    """Check shapes against patterns of letters, and return the size of each letter. Equal letters have equal sizes.

    Args:
        op: Name of the operator, for the message.
        optional: Names of arguments that may be None, and then bind no letter.
        known: Sizes of letters that are bound already.
        arguments: name -> (tensor or None, pattern such as "B T H K"). A number in a pattern is a size.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: a wrong rank, or a size other than the one that an earlier argument bound to the letter.
    """
    sizes = dict(known or {})
    for name, (x, letters) in arguments.items():
        if x is None and name in optional:
            continue
        expected = letters.split()
        got = tensor(op, name, x).shape
        found = dict(sizes)
        agrees = len(got) == len(expected)
        if agrees:
            for letter, size in zip(expected, got, strict=True):
                bound = int(letter) if letter.isdigit() else found.setdefault(letter, size)
                agrees = agrees and size == bound
        if not agrees:
            raise ValueError(f"{op}: {name} must {_form(expected, sizes, len(got))}, got {list(got)}")
        sizes = found
    return sizes


def _form(expected: Sequence[str], sizes: Mapping[str, int], rank: int) -> str:
    """Text of an expected shape, with the sizes that are bound. If the rank is wrong, the text begins with the rank."""
    letters = ", ".join(expected)
    wanted = ", ".join(letter if letter.isdigit() else str(sizes.get(letter, letter)) for letter in expected)
    form = f"[{letters}]" if wanted == letters else f"[{letters}] = [{wanted}]"
    if rank == len(expected):
        return f"be {form}"
    return f"have {len(expected)} dimension{'s' * (len(expected) != 1)}, {form}"


def floating(op: str, dtypes: Sequence[torch.dtype] = FLOATS, **arguments: Tensor | None) -> None:
    """Raise unless every given tensor has one of the dtypes."""
    for name, x in arguments.items():
        if x is not None and tensor(op, name, x).dtype not in dtypes:
            raise ValueError(f"{op}: {name} must be {_dtype_names(dtypes)}, got {_dtype_name(x.dtype)}")


def state_dtypes(x: Tensor) -> tuple[torch.dtype, ...]:
    """Dtypes of states that inputs with the dtype of x may have, the default first."""
    return (torch.float64, *STATE_DTYPES) if x.dtype == torch.float64 else STATE_DTYPES


def dtype_option(op: str, name: str, dtype: object, dtypes: Sequence[torch.dtype] = FLOATS) -> None:
    """Raise unless a dtype option is None or one of the dtypes."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"{op}: {name} must be a torch.dtype or None, got {type(dtype).__name__}")
    if dtype is not None and dtype not in dtypes:
        raise ValueError(f"{op}: {name} must be {_dtype_names(dtypes)}, got {_dtype_name(dtype)}")


def same_attribute(op: str, what: str, **arguments: Tensor | None) -> None:
    """Raise unless all given tensors have the device or dtype (`what`) of the first of them."""
    first_name, first = next((name, x) for name, x in arguments.items() if x is not None)
    for name, x in arguments.items():
        if x is not None and getattr(x, what) != getattr(first, what):
            got, wanted = (str(getattr(t, what)).removeprefix("torch.") for t in (x, first))
            raise ValueError(f"{op}: {name} must have the {what} of {first_name}, {wanted}, got {got}")


def output_dtype(op: str, out: Tensor | None, **values: Tensor) -> None:
    """Raise unless `out` has the dtype of the input it is computed from, or is float32 for a 16-bit input."""
    (name, v), *_ = values.items()
    if out is None or out.dtype == v.dtype or (out.dtype == torch.float32 and v.itemsize == 2):
        return
    wanted = str(v.dtype).removeprefix("torch.")
    if v.itemsize == 2:
        wanted = f"{wanted}, or float32"
    raise ValueError(f"{op}: out must have the dtype of {name}, {wanted}, got {str(out.dtype).removeprefix('torch.')}")


def no_overlap(op: str, **arguments: Tensor | None) -> None:
    """Raise if two elements of a tensor may share memory, judged by sizes and strides. For tensors that are written."""
    for name, x in arguments.items():
        if x is None or 0 in x.shape:
            continue
        steps = x.stride()
        for i, step in enumerate(steps):
            within = [j for j, other in enumerate(steps) if other < step or (other == step and j < i)]
            if x.shape[i] > 1 and step <= sum((x.shape[j] - 1) * steps[j] for j in within):
                raise ValueError(f"{op}: {name} must hold no two numbers in one place, got strides {steps}")


def head_groups(op: str, H: int, HV: int, *, keys: str = "q and k", values: str = "v") -> None:
    """Raise unless the value heads divide into equal groups, one group per query/key head.

    Args:
        op: Name of the operator, for the message.
        H, HV: Numbers of query/key heads and of value heads.
        keys, values: Names of the arguments that have them, for the message.
    """
    if H < 1 or HV < H or HV % H != 0:
        raise ValueError(f"{op}: {values} must have a multiple of the {H} heads of {keys}, got {HV} value heads")


def rows(
    op: str,
    name: str,
    given: Tensor | None,
    shape: Sequence[int],
    *,
    dtypes: Sequence[torch.dtype] = INDICES,
    form: str = "",
    **tokens: Tensor,
) -> None:
    """Raise unless an optional tensor of integers or flags, one for each sequence or slot, is as expected.

    Args:
        op, name: Names of operator and argument, for the message.
        given: The tensor; None is no error.
        shape, dtypes: Its shape, and the dtypes that it may have.
        form: Letters of the shape, for the message.
        tokens: Name of an argument -> that argument, which is on the expected device.
    """
    if given is None:
        return
    if list(tensor(op, name, given).shape) != list(shape) or given.dtype not in dtypes:
        wanted = f"{form} = {list(shape)}" if form else str(list(shape))
        got = f"{list(given.shape)} {_dtype_name(given.dtype)}"
        raise ValueError(f"{op}: {name} must be {wanted} {_dtype_names(dtypes)}, got {got}")
    same_attribute(op, "device", **tokens, **{name: given})


def distinct_slots(op: str, slots: Tensor | None, count: int, pad: int) -> None:
    """Inside `checked`, raise unless the live slots, those above `pad` and below `count`, are distinct."""
    if slots is None or not (checking_contents() and readable(slots)):
        return
    live = slots[(slots > pad) & (slots < count)]
    if live.unique().numel() != live.numel():
        raise ValueError(f"{op}: state_indices must hold distinct slots, got {slots.tolist()}")


def log_gates(op: str, g: Tensor, cu_seqlens: Tensor | None, *, least: float = -math.inf, name: str = "g") -> None:
    """Inside `checked`, raise unless the log decays up to the last boundary lie between `least` and 0."""
    if not (checking_contents() and readable(g)):
        return
    g = g if cu_seqlens is None else g[:, : int(cu_seqlens[-1])]
    if not bool((g <= 0).all()):
        raise ValueError(f"{op}: {name} must be <= 0, a log decay per token, got a largest value of {float(g.max())}")
    if bool((g < least).any()):
        raise ValueError(
            f"{op}: {name} must be at least {least} with safe_gate=True, got a least value of {float(g.min())}"
        )


def width(op: str, letter: str, name: str, size: int, *, most: int = 256) -> None:
    """Raise unless a head width is one that kernels support: a multiple of 8 from 8 to `most`."""
    if size % 8 != 0 or not 8 <= size <= most:
        raise ValueError(f"{op}: {name} must have width {letter} a multiple of 8 from 8 to {most}, got {size}")


def any_width(op: str, letter: str, name: str, size: int, *, most: int) -> None:
    """Raise unless a head width is one that the operator pads or splits for its kernels: from 1 to `most`."""
    if not 1 <= size <= most:
        raise ValueError(f"{op}: {name} must have width {letter} from 1 to {most}, got {size}")


def any_requires_grad(given: Iterable[Tensor | None]) -> bool:
    """Whether gradients are enabled and one of the tensors requires one."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)


def no_gradients(op: str, tensors: Mapping[str, object]) -> None:
    """Raise if a tensor requires a gradient, for an operator without a backward."""
    for name, x in tensors.items():
        if isinstance(x, Tensor) and any_requires_grad([x]):
            raise ValueError(
                f"{op}: {name} must not require a gradient, got one that does; the operator has no backward, "
                "so call it under torch.no_grad()"
            )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_names(dtypes: Sequence[torch.dtype]) -> str:
    *head, last = map(_dtype_name, dtypes)
    return f"{', '.join(head)} or {last}" if head else last
