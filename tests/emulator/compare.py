"""Comparison of an emulated kernel's results with the expected ones."""

from __future__ import annotations

import torch
from tests.emulator.machine import Machine
from torch import Tensor

from wyfold.reference.error import floor, rms

ROUNDINGS_DIFFER = torch.finfo(torch.bfloat16).eps / 32
"""Relative RMS against formulas with the kernel's own roundings: sums in another order change a few roundings."""

BFLOAT16 = torch.finfo(torch.bfloat16).eps
"""Relative RMS against float64, for kernels whose operands and results are bfloat16."""

FLOAT32_OPERATIONS = 32 * torch.finfo(torch.float32).eps
"""Relative error of a few dozen float32 operations."""


def require_close(machine: Machine, bound: float = ROUNDINGS_DIFFER, **pairs: tuple[Tensor, Tensor]) -> None:
    """Fail unless every result is within `bound` of the expected tensor, in relative RMS. NaN fails.

    Args:
        machine: The machine that ran the kernel.
        bound: Largest relative RMS error.
        pairs: Result and expected tensor, by name.
    """
    assert machine.launches, "no kernel was launched"
    errors = {name: rms(got, want) for name, (got, want) in pairs.items()}
    assert all(error <= bound for error in errors.values()), (
        f"{errors}, allowed {bound:.1e}; products whose operands changed while in flight: {machine.changed}"
    )


def require_as_rounded(machine: Machine, **pairs: tuple[Tensor, Tensor]) -> None:
    """Fail unless every result is as close to the float64 truth as the truth rounded to the result's dtype."""
    for name, (got, want) in pairs.items():
        require_close(machine, 1.25 * floor(want, got.dtype) + FLOAT32_OPERATIONS, **{name: (got, want)})
