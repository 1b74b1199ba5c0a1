"""Facts about this machine, and decorators for functions of tensors, under fla's names (`fla.utils`).

The facts are read from torch and the installed Triton when a program asks for them, and not at import. Unlike fla, a
machine without an accelerator has device "cpu". Nothing here changes a setting or keeps a result.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import inspect
import logging
import platform
import warnings
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

# --- decorators ------------------------------------------------------------------------------------------------------

Function = Callable[..., Any]


def tensor_cache(fn: Function) -> Function:
    """Return fn itself. fla's decorator also keeps the latest results by the identity of the arguments."""
    return fn


def input_guard(fn: Function | None = None, *, no_guard_contiguous: bool | Collection[str] = False) -> Function:
    """Make a function get contiguous tensors, and run on the device of the first of them.

    Args:
        fn: Function to wrap. None: return the decorator.
        no_guard_contiguous: True, or names of parameters whose tensors are passed as they are.
    """
    if fn is None:
        return functools.partial(input_guard, no_guard_contiguous=no_guard_contiguous)
    names = list(inspect.signature(fn).parameters)
    passed = set() if isinstance(no_guard_contiguous, bool) else set(no_guard_contiguous)

    def guarded(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor) or no_guard_contiguous is True or name in passed:
            return x
        return x.contiguous()

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        given = [guarded(name, x) for name, x in zip([*names, *[""] * len(args)], args, strict=False)]
        named = {name: guarded(name, x) for name, x in kwargs.items()}
        first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        with custom_device_ctx(None if first is None else first.device.index):
            return fn(*given, **named)

    return wrapper


def contiguous(fn: Function) -> Function:
    """`input_guard` without options."""
    return input_guard(fn)


def checkpoint(fn: Function) -> Function:
    """Make a function compute its intermediate results again in the backward, as `torch.utils.checkpoint` does."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        from torch.utils.checkpoint import checkpoint as recompute

        return recompute(fn, *args, use_reentrant=False, **kwargs)

    return wrapper


def custom_device_ctx(index: int | None) -> AbstractContextManager[Any]:
    """Context in which the accelerator of this number is the current one; nothing for None, or without one."""
    if index is None or _kind() == "cpu":
        return nullcontext()
    context: AbstractContextManager[Any] = getattr(torch, _torch_device()).device(index)
    return context


def autocast_custom_fwd(fn: Function | None = None, **options: Any) -> Any:
    """`torch.amp.custom_fwd` for this machine's device."""
    return torch.amp.custom_fwd(fn, device_type=_torch_device(), **options)


def autocast_custom_bwd(fn: Function | None = None) -> Any:
    """`torch.amp.custom_bwd` for this machine's device."""
    return torch.amp.custom_bwd(fn, device_type=_torch_device())


# --- the device ------------------------------------------------------------------------------------------------------


class Backend(Enum):
    """Bytes of shared memory that one block can have, by architecture, as `check_shared_mem` compares them."""

    ADA = 101376
    AMPERE = 166912
    HOPPER = 232448
    DEFAULT = 102400

    @classmethod
    def get_shared_memory(cls, arch: str) -> int:
        """Bytes of an architecture; those of DEFAULT for an unknown one."""
        return cls.__members__.get(arch.upper(), cls.DEFAULT).value


def check_shared_mem(arch: str = "none", tensor_idx: int = 0) -> bool:
    """Whether a device has at least the shared memory of an architecture."""
    return max(0, *get_all_max_shared_mem()[tensor_idx : tensor_idx + 1]) >= Backend.get_shared_memory(arch)


def get_all_max_shared_mem() -> list[int]:
    """Bytes of shared memory that one block can have on each device; [-1] without an accelerator."""
    if _kind() == "cpu":
        return [-1]
    return [get_device_smem_optin(index) for index in range(torch.cuda.device_count())]


def get_device_smem_optin(device_index: int = 0) -> int:
    """Bytes of shared memory that one block can have on a CUDA device."""
    properties: Any = torch.cuda.get_device_properties(device_index)
    return int(properties.shared_memory_per_block_optin)


def get_device_capability(device_index: int = 0) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device_index)


def get_multiprocessor_count(tensor_idx: int = 0) -> int:
    """Number of multiprocessors of a device; 1 without an accelerator."""
    return 1 if _kind() == "cpu" else torch.cuda.get_device_properties(tensor_idx).multi_processor_count


def get_available_device() -> str:
    """Triton's name of this machine's accelerator, "cuda" or "hip"; "cpu" without one."""
    return _kind()


def get_device_arch() -> str:
    """Architecture as Triton names it, "90" or "gfx942"; empty without an accelerator."""
    if _kind() == "cpu":
        return ""
    if _kind() == "hip":
        return str(torch.cuda.get_device_properties(0).gcnArchName).partition(":")[0]
    return "".join(map(str, torch.cuda.get_device_capability()))


def map_triton_backend_to_torch_device() -> str:
    """torch's name of this machine's device: "cuda", also on AMD, or "cpu"."""
    return _torch_device()


def _kind() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    return "hip" if torch.version.hip else "cuda"


def _torch_device() -> str:
    return "cpu" if _kind() == "cpu" else "cuda"


# --- versions --------------------------------------------------------------------------------------------------------


def check_environments() -> None:
    """Do nothing; `wyfold doctor` says what this machine can run."""


def check_pytorch_version(version_s: str = "2.4") -> bool:
    """Whether torch is at least of this version."""
    return _release(torch.__version__) >= _release(version_s)


def check_transformers_version(version_s: str) -> bool:
    """Whether transformers is installed, and at least of this version."""
    return _installed("transformers", version_s)


@functools.cache
def find_spec_cached(name: str) -> ModuleSpec | None:
    """Where a module would be imported from; None if it or its package is missing."""
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version, without what follows them: "2.11.0+cu128" -> (2, 11, 0)."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _installed(package: str, least: str) -> bool:
    try:
        return _release(importlib.metadata.version(package)) >= _release(least)
    except importlib.metadata.PackageNotFoundError:
        return False


# --- comparisons -----------------------------------------------------------------------------------------------------


def get_abs_err(x: Tensor, y: Tensor) -> float:
    """Largest absolute difference of two tensors."""
    return float((x.detach() - y.detach()).abs().max())


def get_err_ratio(x: Tensor, y: Tensor) -> float:
    """Root mean square of the difference of two tensors, relative to that of x."""
    difference, base = (x.detach() - y.detach()).square().mean().sqrt(), x.detach().square().mean().sqrt()
    return float(difference) / (float(base) + 1e-8)


def assert_close(
    prefix: str, ref: Tensor, tri: Tensor, ratio: float, warning: bool = False, err_atol: float = 1e-6
) -> None:
    """Assert that two tensors differ by less than `ratio` in root mean square, or nowhere by more than `err_atol`.

    Args:
        prefix: Name for the message.
        ref, tri: Expected and found tensor.
        ratio: Bound of `get_err_ratio`.
        warning: Warn instead.
        err_atol: Absolute difference that always passes.

    Raises:
        AssertionError: They differ by more, or one of them has a NaN.
    """
    largest, error = get_abs_err(ref, tri), get_err_ratio(ref, tri)
    message = f"{prefix}: differs by {largest:.6f}, relative {error:.6f}, bound {ratio}"
    _log.info(message)
    if largest <= err_atol:
        return
    for name, x in (("ref", ref), ("tri", tri)):
        if bool(x.isnan().any()):
            raise AssertionError(f"{prefix}: {name} has a NaN")
    if error < ratio:
        return
    if warning:
        warnings.warn(message, stacklevel=2)
    else:
        raise AssertionError(message)


# --- facts -----------------------------------------------------------------------------------------------------------


def _capability(*majors: int) -> bool:
    return _kind() == "cuda" and torch.cuda.get_device_capability()[0] in majors


FACTS: dict[str, Callable[[], Any]] = {
    "FLA_DISABLE_TENSOR_CACHE": lambda: True,
    "IS_AMD": lambda: _kind() == "hip",
    "IS_AMD_TMA_ARCH": lambda: False,
    "IS_ARM": lambda: platform.machine().lower() in ("aarch64", "arm64"),
    "IS_GATHER_SUPPORTED": lambda: _installed("triton", "3.2.0"),
    "IS_INTEL": lambda: False,
    "IS_INTEL_ALCHEMIST": lambda: False,
    "IS_NPU": lambda: False,
    "IS_NVIDIA": lambda: _kind() == "cuda",
    "IS_NVIDIA_BLACKWELL": lambda: _capability(10, 12),
    "IS_NVIDIA_HOPPER": lambda: _capability(9),
    "IS_NVIDIA_SM100": lambda: _capability(10),
    "IS_NVIDIA_SM120": lambda: _kind() == "cuda" and torch.cuda.get_device_capability() == (12, 0),
    "IS_TF32_SUPPORTED": lambda: _kind() == "cuda" and torch.cuda.get_device_capability() >= (8, 0),
    "IS_TMA_SUPPORTED": lambda: False,
    "TRITON_ABOVE_3_4_0": lambda: _installed("triton", "3.4.0"),
    "TRITON_ABOVE_3_5_1": lambda: _installed("triton", "3.5.1"),
    "TRITON_ABOVE_3_6_0": lambda: _installed("triton", "3.6.0"),
    "TRITON_ABOVE_3_7_1": lambda: _installed("triton", "3.7.1"),
    "TRITON_ABOVE_3_8_0": lambda: _installed("triton", "3.8.0"),
    "device": _torch_device,
    "device_name": _torch_device,
    "device_platform": _kind,
    "device_torch_lib": lambda: getattr(torch, _torch_device()),
}
"""Facts by name, each computed when asked for. Switches of fla's own kernels are off: their kernels do not run here."""

FACTS |= {name.lower(): fact for name, fact in FACTS.items() if name.startswith("IS_")}

__all__ = [  # names of FACTS are strings
    "Backend",
    "assert_close",
    "autocast_custom_bwd",
    "autocast_custom_fwd",
    "check_environments",
    "check_pytorch_version",
    "check_shared_mem",
    "check_transformers_version",
    "checkpoint",
    "contiguous",
    "custom_device_ctx",
    "find_spec_cached",
    "get_abs_err",
    "get_all_max_shared_mem",
    "get_available_device",
    "get_device_arch",
    "get_device_capability",
    "get_device_smem_optin",
    "get_err_ratio",
    "get_multiprocessor_count",
    "input_guard",
    "map_triton_backend_to_torch_device",
    "tensor_cache",
    *FACTS,
]


def __getattr__(name: str) -> Any:
    if name in FACTS:
        return FACTS[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
