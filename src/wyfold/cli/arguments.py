"""Readers of options: argparse types whose error says what was expected. None of them imports torch."""

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
"""Counts above it are slips of the finger: nothing that is counted here can be so many."""


def whole(least: int, most: int = LARGEST) -> Callable[[str], int]:
    """Reader of an integer from `least` to `most`."""

    def read(word: str) -> int:
        try:
            value = int(word)
        except ValueError:  # no number, or one of thousands of digits
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {_quoted(word)}")
        if value > most:
            raise argparse.ArgumentTypeError(f"must be a whole number of at most {most}, got {_quoted(word)}")
        return value

    return read


seed_number = whole(0, 2**63 - 1)
"""Reader of a seed. PyTorch takes 64 bits; commands that draw several things add small numbers to it."""


def at_least(least: float, *, above: bool = False, most: float = math.inf) -> Callable[[str], float]:
    """Reader of a finite number of at least, or `above`, `least`, and at most `most`."""
    expected = f"must be a number {'above' if above else 'of at least'} {least:g}"
    if most < math.inf:
        expected += f" and at most {most:g}"
    return _reader(expected, lambda value: (value > least if above else value >= least) and value <= most)


def gate_bound(word: str) -> float:
    """Reader of the bound of KDA's gate, the range that the operator has kernels for."""
    expected = "must be a number of at least -5 and below 0"
    return _reader(expected, lambda value: -5 <= value < 0)(word)


def between(low: float, high: float, *, closed_above: bool = False) -> Callable[[str], float]:
    """Reader of a number above `low` and below `high`, or up to it."""
    expected = f"must be a number above {low:g} and {'at most' if closed_above else 'below'} {high:g}"
    return _reader(expected, lambda value: low < value < high or (closed_above and value == high))


def device(word: str) -> str:
    """Reader of a PyTorch device's name; `found_device` asks torch whether this machine has it."""
    if not re.fullmatch(r"[a-z]\w*(:\d+)?", word, re.ASCII):
        raise argparse.ArgumentTypeError(f"must be a PyTorch device such as cpu, cuda or cuda:1, got {word!r}")
    return word


def found_device(word: str) -> torch.device:
    """The device of that name, which this machine has and which computes.

    Raises:
        UsageError: torch cannot allocate and read a tensor there.
    """
    import torch

    try:
        probe = torch.zeros(1, device=word)
        probe.item()  # "meta" knows shapes, but no numbers
    except (RuntimeError, AssertionError, ImportError) as error:  # unknown, absent, or not in this build of torch
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise UsageError(f"argument --device: {word!r} is no device of this machine: {reason}") from error
    return probe.device


def add_backend(parser: argparse._ActionsContainer) -> None:
    """The option --backend."""
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        help='of every operator; on CUDA "eager" has to be asked for, also where there is no kernel yet '
        "(default: the table's choice, as `wyfold doctor` prints it)",
    )


def _quoted(word: str) -> str:
    """A word of the command line as a message quotes it, not at full length where that is a page."""
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
