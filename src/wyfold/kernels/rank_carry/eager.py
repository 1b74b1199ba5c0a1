"""`rank_carry` and `rank_send` in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from wyfold.kernels.records import StateRows


def route_states(gathered: Tensor, routes: Sequence[int], V: int) -> Tensor:
    """States at the ends of routes.

    Args:
        gathered: [world, rows, B, HV, K, V + K] send buffers of all ranks: a state or its gradient, followed by the
            map.
        routes: Routes from `context_parallel.routes`.
        V: Value columns.

    Returns:
        [routes, B, HV, K, V].
    """
    rows, found = gathered.flatten(0, 1), gathered.new_empty(route_count(routes), *gathered.shape[2:-1], V)
    for n in range(route_count(routes)):
        first, *others = routes[routes[n] : routes[n + 1]]
        S = rows[first, ..., :V]
        for row in others:
            S = rows[row, ..., :V] + rows[row, ..., V:] @ S
        found[n] = S
    return found


def route_count(routes: Sequence[int]) -> int:
    """Number of routes."""
    return routes[0] - 1


def rank_carry(
    gathered: Tensor, routes: Tensor, outer: StateRows, borders: StateRows, tails: Tensor | None, *, reverse: bool
) -> None:
    """Write the state at the end of each route to where it enters.

    Args:
        gathered: As in `route_states`.
        routes: As in `route_states`, but on the device.
        outer: States of the sequences, by route and row of B; written.
        borders: Border states, by route and row of B. Written forward, added to backward.
        tails: Backward, [n, HV, K, V + K] H and M of the tokens after the last full chunk. None if there are none.
        reverse: The states are gradients.
    """
    S = route_states(gathered, routes.tolist(), gathered.shape[-1] - gathered.shape[-2]).flatten(0, 1)
    outer.states[outer.rows] = S
    if tails is not None:
        S = tails[..., S.shape[-1] :].mT @ S
    borders.states[borders.rows] = borders.states[borders.rows] + S if reverse else S


def rank_send(borders: StateRows, tails: Tensor | None, out: Tensor) -> None:
    """Pack the states that leave at borders.

    Args:
        borders: Border states [.., HV, K, columns].
        tails: [n, HV, K, V + K] as in `rank_carry`, or None.
        out: [>= n, HV, K, >= columns]; the leading entries are written.
    """
    S = borders.states[borders.rows]
    if tails is not None:
        K = S.shape[-2]
        S = tails[..., -K:] @ S
        S[..., : tails.shape[-1] - K] += tails[..., :-K]
    out[: S.shape[0], ..., : S.shape[-1]] = S
