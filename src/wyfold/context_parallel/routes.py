"""Routes of states along the pieces of a sequence, through what every rank tells of its own.

    S of the next piece = M S + H        dS of the piece before = M^T dS + c

with a row of what ranks told, [H | M] or [c | M^T], for every piece. Where the sequence begins, or ends, on the way
back, its rank knows the state that goes in, and M is not asked for. Which rows lead to a state is known on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from wyfold.context_parallel.partition import Partition, Piece


def forward_routes(partition: Partition, rank: int) -> list[int]:
    """Routes of the states that enter a rank's pieces, in the order of `Piece.entering`.

    Returns:
        Where each route begins in this very list, and where the last one ends; then the routes: numbers of rows, of
        which each rank told as many as there is send_rows for.
    """
    return _routes(partition.chains, rank, partition.most_leaving, lambda piece: (piece.leaving, piece.entering))


def backward_routes(partition: Partition, rank: int) -> list[int]:
    """Routes of the gradients of the states that leave a rank's pieces, in the order of `Piece.leaving`; likewise."""
    chains = (reversed(chain) for chain in partition.chains)
    return _routes(chains, rank, partition.most_entering, lambda piece: (piece.entering, piece.leaving))


def _routes(
    chains: Iterable[Iterable[Piece]], rank: int, send_rows: int, numbers: Callable[[Piece], tuple[int, int]]
) -> list[int]:
    """`numbers`: of a piece, its row among those its rank tells, and its place among those that state comes to."""
    found: dict[int, list[int]] = {}
    for chain in chains:
        before: list[int] = []
        for piece in chain:
            row, place = numbers(piece)
            if piece.rank == rank and before:
                found[place] = list(before)
            before.append(piece.rank * send_rows + row)
    routes = [found[place] for place in sorted(found)]
    starts = [len(routes) + 1]
    for route in routes:
        starts.append(starts[-1] + len(route))
    return [*starts, *(row for route in routes for row in route)]
