"""Option types for argparse, whose errors say what was expected. Parsing imports no torch."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from wyfold.cli import UsageError
from wyfold.runtime.choices import BACKENDS

if TYPE_CHECKING:
    import torch


LARGEST = 2**31 - 1
"""Largest count an option accepts; a larger one is a typing error."""


def whole(least: int, most: int = LARGEST) -> Callable[[str], int]:
    """Type of an option: an integer from `least` to `most`."""

    def read(word: str) -> int:
        try:
            value = int(word)
        except ValueError:  # not a number, or one of thousands of digits
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {_quoted(word)}")
        if value > most:
            raise argparse.ArgumentTypeError(f"must be a whole number of at most {most}, got {_quoted(word)}")
        return value

    return read


seed_number = whole(0, 2**63 - 1)
"""Type of a seed. PyTorch takes 64 bits; one bit is left because commands add small numbers to the seed."""


def at_least(least: float, *, above: bool = False, most: float = math.inf) -> Callable[[str], float]:
    """Type of an option: a finite number >= `least` (> `least` if `above`) and <= `most`."""
    expected = f"must be a number {'above' if above else 'of at least'} {least:g}"
    if most < math.inf:
        expected += f" and at most {most:g}"
    return _reader(expected, lambda value: (value > least if above else value >= least) and value <= most)


def gate_bound(word: str) -> float:
    """Type of KDA's gate bound: a number in [-5, 0), the range that the kernels support."""
    expected = "must be a number of at least -5 and below 0"
    return _reader(expected, lambda value: -5 <= value < 0)(word)


def between(low: float, high: float, *, closed_above: bool = False) -> Callable[[str], float]:
    """Type of an option: a number in (`low`, `high`), or in (`low`, `high`] if `closed_above`."""
    expected = f"must be a number above {low:g} and {'at most' if closed_above else 'below'} {high:g}"
    return _reader(expected, lambda value: low < value < high or (closed_above and value == high))


def device(word: str) -> str:
    """Type of a PyTorch device name. Only the form is checked; `found_device` checks that the device exists."""
    if not re.fullmatch(r"[a-z]\w*(:\d+)?", word, re.ASCII):
        raise argparse.ArgumentTypeError(f"must be a PyTorch device such as cpu, cuda or cuda:1, got {word!r}")
    return word


def found_device(word: str) -> torch.device:
    """Return the torch device of this name, after a test that it exists and computes.

    Raises:
        UsageError: torch cannot allocate and read a tensor there.
    """
    import torch

    try:
        probe = torch.zeros(1, device=word)
        probe.item()  # refuses the meta device, which has no data
    except (RuntimeError, AssertionError, ImportError) as error:  # unknown, absent, or not in this build of torch
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise UsageError(f"argument --device: {word!r} is not a device of this machine: {reason}") from error
    return probe.device


def add_backend(parser: argparse._ActionsContainer) -> None:
    """Add the option --backend."""
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        help='backend of every operator; on CUDA, "eager" is used only on request, even without a kernel '
        "(default: the choice that `wyfold doctor` prints)",
    )


def add_threads(parser: argparse._ActionsContainer) -> None:
    """Add the option --threads, which `use_threads` applies."""
    parser.add_argument(
        "--threads",
        type=whole(1, 1024),
        metavar="N",
        help="CPU threads of PyTorch in each process; 1 is often faster for a small model "
        "(default: PyTorch's choice, usually one for each core)",
    )


def use_threads(count: int | None) -> None:
    """Set the number of PyTorch's CPU threads in this process; None keeps it."""
    import torch

    if count is not None:
        torch.set_num_threads(count)


def _quoted(word: str) -> str:
    """Quote an argument in a message, truncated to 40 characters."""
    return repr(word) if len(word) <= 40 else f"{word[:40]!r}... ({len(word)} characters)"


def _reader(expected: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    def read(word: str) -> float:
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and fits(value)):
            raise argparse.ArgumentTypeError(f"{expected}, got {_quoted(word)}")
        return value

    return read
