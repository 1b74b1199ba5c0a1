"""Readers of options: argparse types whose error says what was expected."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch

from wyfold.stages import table


def whole(least: int) -> Callable[[str], int]:
    """Reader of an integer of at least `least`."""

    def read(word: str) -> int:
        try:
            value = int(word)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {word!r}")
        return value

    return read


def at_least(least: float, *, above: bool = False) -> Callable[[str], float]:
    """Reader of a finite number of at least, or `above`, `least`."""
    expected = f"must be a number {'above' if above else 'of at least'} {least:g}"
    return _reader(expected, lambda value: value > least if above else value >= least)


def between(low: float, high: float, *, closed_above: bool = False) -> Callable[[str], float]:
    """Reader of a number above `low` and below `high`, or up to it."""
    expected = f"must be a number above {low:g} and {'at most' if closed_above else 'below'} {high:g}"
    return _reader(expected, lambda value: low < value < high or (closed_above and value == high))


def device(word: str) -> torch.device:
    """A PyTorch device that this machine has, and that computes."""
    try:
        probe = torch.zeros(1, device=word)
        probe.item()  # "meta" knows shapes, but no numbers
    except (RuntimeError, AssertionError) as error:  # no such device; or this build of torch is without it
        reason = str(error).partition("\n")[0]
        raise argparse.ArgumentTypeError(f"{word!r} is no device of this machine: {reason}") from error
    return probe.device


def add_backend(parser: argparse._ActionsContainer) -> None:
    """The option --backend."""
    parser.add_argument(
        "--backend",
        choices=table.BACKENDS,
        help='of every operator; on CUDA "eager" has to be asked for, also where there is no kernel yet '
        "(default: the table's choice, as `wyfold doctor` prints it)",
    )


def _reader(expected: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    def read(word: str) -> float:
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and fits(value)):
            raise argparse.ArgumentTypeError(f"{expected}, got {word!r}")
        return value

    return read
