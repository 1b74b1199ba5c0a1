"""`rank_carry` and `rank_send` in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from wyfold.kernels.records import StateRows


def carried(told: Tensor, routes: Sequence[int], V: int) -> Tensor:
    """The states at the ends of routes.

    Args:
        told: [world, rows, B, HV, K, V + K] of every rank, a state or its gradient, and beside it the map.
        routes: From `parallel.chains`.
        V: Value columns.

    Returns:
        [routes, B, HV, K, V].
    """
    rows, found = told.flatten(0, 1), told.new_empty(count(routes), *told.shape[2:-1], V)
    for n in range(count(routes)):
        first, *others = routes[routes[n] : routes[n + 1]]
        S = rows[first, ..., :V]
        for row in others:
            S = rows[row, ..., :V] + rows[row, ..., V:] @ S
        found[n] = S
    return found


def count(routes: Sequence[int]) -> int:
    """How many routes there are."""
    return routes[0] - 1


def rank_carry(
    told: Tensor, routes: Tensor, outer: StateRows, borders: StateRows, tails: Tensor | None, *, back: bool
) -> None:
    """Write the states at the ends of routes where they enter.

    Args:
        told: As of `carried`.
        routes: Likewise, on the device.
        outer: Of the sequences, by route and row of B: written.
        borders: Likewise; written forward, and added to on the way back.
        tails: [n, HV, K, V + K] H and M of the tokens behind the last full chunk, on the way back; None: there are
            none.
        back: Whether these are gradients.
    """
    S = carried(told, routes.tolist(), told.shape[-1] - told.shape[-2]).flatten(0, 1)
    outer.states[outer.rows] = S
    if tails is not None:
        S = tails[..., S.shape[-1] :].mT @ S
    borders.states[borders.rows] = borders.states[borders.rows] + S if back else S


def rank_send(borders: StateRows, tails: Tensor | None, out: Tensor) -> None:
    """Write what leaves at borders.

    Args:
        borders: Of [.., HV, K, columns].
        tails: [n, HV, K, V + K] as above; None: there are none.
        out: [at least n, HV, K, at least as many columns], of which the first are written.
    """
    S = borders.states[borders.rows]
    if tails is not None:
        K = S.shape[-2]
        S = tails[..., -K:] @ S
        S[..., : tails.shape[-1] - K] += tails[..., :-K]
    out[: S.shape[0], ..., : S.shape[-1]] = S
