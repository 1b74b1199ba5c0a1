"""A small call of a registered operator, described by constants, for the self-check of its kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.runtime import kernel_configs
from wyfold.runtime.torch_ops import constant_to_compilers

TOKENS = 150
"""Tokens of a sequence of a trial: two full chunks of 64 and a part of one."""
STATES = 8
"""Least number of states of a trial. The error of a single one varies by chance (docs/numerics.md)."""


class Sample(NamedTuple):
    """Description of one drawn tensor.

    Attributes:
        kind: Distribution, a name in `_draw`.
        dtype: Dtype of the call's tensor.
        lead: Leading dimensions, as letters of `Trial.sizes`: "BT", "N".
        rest: Extents of the other dimensions.
    """

    kind: str
    dtype: torch.dtype
    lead: str
    rest: tuple[int, ...]


class Trial(NamedTuple):
    """A small call of a registered operator. Holds constants only, so that a compiler can trace its construction.

    Attributes:
        name: Public name of the operator, for messages.
        operator: Name of the registered operator.
        samples: Its tensors, which come first among its arguments; None for an absent one.
        values: Its other arguments, with the backend "triton".
        results: Names of its results. Results without elements and those after the named ones are not compared.
        sequences: N. With `packed` they are of different lengths and B is 1; otherwise B is N.
        tokens: T of a dense batch, and the longest length of a packed one.
        packed: Whether there are boundaries.
        gradients: Whether gradients are compared.
        rounding: Where 16-bit kernels round. "once": the results only. "chunks": as `reference.rounded`. "inputs":
            operands of products; half an ulp on the inputs shows the effect.
        written: Number of slots that a row writes, of a call on a pool.
        rows: Rows of the letter R.
        draw: Number of the draw of its tensors.
    """

    name: str
    operator: str
    samples: tuple[Sample | None, ...]
    values: tuple[Any, ...]
    results: tuple[str, ...] = ("y",)
    sequences: int = 1
    tokens: int = TOKENS
    packed: bool = False
    gradients: bool = True
    rounding: str = "once"
    written: int = 1
    rows: int = 0
    draw: int = 0

    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        if not self.packed:
            return [self.tokens] * self.sequences
        some = (self.tokens, self.tokens // 2 + 1, 0, 1, self.tokens - 1)
        return [min(some[n % len(some)], self.tokens) for n in range(self.sequences)]

    def sizes(self) -> dict[str, int]:
        """Extents by letter: batch, tokens, sequences, boundaries, slots, slots of a row, further rows."""
        tokens = sum(self.lengths()) if self.packed else self.tokens
        slots = 2 * self.sequences * self.written + 3
        return {
            "B": 1 if self.packed else self.sequences,
            "T": tokens,
            "N": self.sequences,
            "E": self.sequences + 1,
            "S": slots,
            "C": self.written,
            "R": self.rows,
        }

    def __str__(self) -> str:
        first = next(sample for sample in self.samples if sample is not None)
        words = [str(first.dtype).removeprefix("torch."), *([" x ".join(map(str, first.rest))] if first.rest else [])]
        words += ["packed"] * self.packed + ["with gradients" if self.gradients else "without gradients"]
        return f"{self.name} ({', '.join(words)})"


def sample(x: Tensor | None, kind: str, lead: str, keep: int | None = None) -> Sample | None:
    """Sample for a tensor of the call.

    Args:
        x: The tensor, or None.
        kind, lead: As of `Sample`.
        keep: Number of last dimensions that are kept. None: all but `len(lead)`.
    """
    if x is None:
        return None
    first = len(lead) if keep is None else x.ndim - keep
    return Sample(kind, x.dtype, lead, tuple(x.shape[first:]))


def boundary_sample(cu: Tensor | None) -> Sample | None:
    """Sample for boundaries of packed sequences."""
    return None if cu is None else Sample("boundaries", cu.dtype, "E", ())


def with_sequences(trial: Trial, sequences: int, v: Tensor) -> tuple[Trial, ...]:
    """The trial of scans, with enough states and the occupancy hints of the call's sequences.

    Hints change where programs of 128 value rows fill a quarter (backward) and a half (forward) of the multiprocessors
    (`with_occupancy_hint`). So any number of sequences has one of three trials. To a compiler the number may be
    symbolic, and all three are made.

    Args:
        trial: The trial.
        sequences: N of the call.
        v: [B, T, HV, V].
    """
    heads, V = v.shape[2:]
    programs, processors = heads * -(-V // 128), _processors(v.device)
    quarter, half = processors // (4 * programs), processors // (2 * programs)
    few = min(-(-STATES // heads), max(1, quarter))
    if torch.compiler.is_compiling():
        return tuple([trial._replace(sequences=n) for n in (few, max(1, half), half + 1)])
    return (trial._replace(sequences=few if sequences <= quarter else half if sequences <= half else half + 1),)


@constant_to_compilers
def _processors(device: torch.device) -> int:
    return kernel_configs.processors(device)
