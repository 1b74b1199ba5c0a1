"""State on its way along the pieces of a sequence, from what every rank tells of its own.

A rank walks each chain that it has a piece of from its first piece on, or back from its last:

    S of the next piece = M S + H        dS of the piece before = M^T dS + c

with one row of what ranks told for each piece. Which rows, is known on the host: a chain is a run of steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from wyfold.parallel.shares import Piece, Shares


class Step(NamedTuple):
    """One piece of a chain, in the order in which state goes through it.

    Attributes:
        rank, row: Where it is told of.
        wanted: Place of the state that enters it among those that are wanted, -1 if it is another rank's.
        begins: Whether state goes in here as the rank that has it knows it, so that its map is not asked for.
    """

    rank: int
    row: int
    wanted: int
    begins: int


def arriving(shares: Shares, rank: int) -> list[int]:
    """Steps to the states that enter a rank's pieces, in the order of `Piece.entering`, as one list of numbers."""

    def step(piece: Piece) -> Step:
        return Step(piece.rank, piece.leaving, piece.entering if piece.rank == rank else -1, int(piece.first))

    return _flat(map(step, chain) for chain in shares.chains)


def returning(shares: Shares, rank: int) -> list[int]:
    """Steps to the gradients of the states that leave a rank's pieces, in the order of `Piece.leaving`."""

    def step(piece: Piece) -> Step:
        return Step(piece.rank, piece.entering, piece.leaving if piece.rank == rank else -1, int(piece.last))

    return _flat(map(step, reversed(chain)) for chain in shares.chains)


def _flat(chains: Iterable[Iterable[Step]]) -> list[int]:
    """Of each chain what leads to a wanted state."""
    found: list[int] = []
    for chain in chains:
        steps = list(chain)
        while steps and steps[-1].wanted < 0:
            steps.pop()
        found += [number for step in steps for number in step]
    return found


def carried(told: Tensor, steps: Sequence[int], V: int) -> Tensor:
    """The wanted states.

    Args:
        told: [world, rows, B, HV, K, V + K] of every rank, a state or its gradient, and beside it the map.
        steps: From `arriving` or `returning`.
        V: Value columns.

    Returns:
        [wanted, B, HV, K, V].
    """
    size = len(Step._fields)
    chains = [Step(*steps[start : start + size]) for start in range(0, len(steps), size)]
    found = told.new_empty(sum(step.wanted >= 0 for step in chains), *told.shape[2:-1], V)
    S = found
    for step in chains:
        if step.wanted >= 0:
            found[step.wanted] = S
        if step.row < 0:
            continue  # where the sequence ends nothing goes on
        H = told[step.rank, step.row, ..., :V]
        S = H if step.begins else H + told[step.rank, step.row, ..., V:] @ S
    return found
