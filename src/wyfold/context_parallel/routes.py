"""Routes of states along the pieces of a sequence, as rows of the all-gathered buffers.

    S of the next piece = M S + H        dS of the piece before = M^T dS + c

The gathered buffer has one row [H | M], or [c | M^T], for every piece. Where the sequence begins (in the backward,
where it ends), H (c) already includes the caller's state, and M is not read. The host knows which rows lead to a state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from wyfold.context_parallel.partition import Partition, Piece


def forward_routes(partition: Partition, rank: int) -> list[int]:
    """Routes of the states that enter a rank's pieces, in the order of `Piece.incoming`.

    Returns:
        One list with the offset of every route in it, the end of the last route, and then the routes. A route lists the
        rows of the gathered buffers that lead to one state: rank * `most_outgoing` + row of that rank's send buffer.
    """
    return _routes(partition.chains, rank, partition.most_outgoing, lambda piece: (piece.outgoing, piece.incoming))


def backward_routes(partition: Partition, rank: int) -> list[int]:
    """Routes of the gradients of a rank's leaving states, in the order of `Piece.outgoing`, as `forward_routes`."""
    chains = (reversed(chain) for chain in partition.chains)
    return _routes(chains, rank, partition.most_incoming, lambda piece: (piece.incoming, piece.outgoing))


def _routes(
    chains: Iterable[Iterable[Piece]], rank: int, send_rows: int, indices: Callable[[Piece], tuple[int, int]]
) -> list[int]:
    """Build the routes of a rank along all chains.

    Args:
        chains: Chains of pieces, in the direction of the states.
        rank: The rank whose pieces the routes end in.
        send_rows: Rows of each rank's send buffer.
        indices: Maps a piece to its row in its rank's send buffer, and to its index among the pieces that receive.
    """
    found: dict[int, list[int]] = {}
    for chain in chains:
        before: list[int] = []
        for piece in chain:
            row, place = indices(piece)
            if piece.rank == rank and before:
                found[place] = list(before)
            before.append(piece.rank * send_rows + row)
    routes = [found[place] for place in sorted(found)]
    starts = [len(routes) + 1]
    for route in routes:
        starts.append(starts[-1] + len(route))
    return [*starts, *(row for route in routes for row in route)]
