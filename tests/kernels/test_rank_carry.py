"""`rank_carry` and `rank_send`: states across ranks against the maps applied one by one, forward and backward."""

import pytest
import torch

from wyfold.context_parallel.partition import owned_ranges, partition_sequences
from wyfold.context_parallel.routes import backward_routes, forward_routes
from wyfold.kernels import table
from wyfold.kernels.records import StateRows

HV = 2
WIDTHS = [(8, 24), (64, 16), (40, 8)]


def normal(*size: int) -> torch.Tensor:
    return torch.randn(size, dtype=torch.float64)


def maps(*size: int) -> torch.Tensor:
    """Random maps [.., K, K] that do not enlarge states."""
    return normal(*size) / size[-1] ** 0.5


def some(count: int, of: int) -> torch.Tensor:
    return torch.randperm(of)[:count]


def run(backend: str, name: str, device: torch.device, *given: object, **flags: object) -> list[torch.Tensor]:
    """Call a launch; return its tensor arguments afterwards, in float64."""
    dtype = torch.float64 if backend == "eager" else torch.float32

    def there(x: torch.Tensor) -> torch.Tensor:
        return x.to(device, dtype) if x.is_floating_point() else x.to(device)

    moved = []
    for x in given:
        if isinstance(x, StateRows):  # V-first in memory, like borders
            x = StateRows(there(x.states).mT.contiguous().mT, there(x.rows))
        moved.append(there(x) if isinstance(x, torch.Tensor) else x)
    if backend != "eager":
        flags["dtype"] = torch.float32
    getattr(table.kernel_module("rank_carry", backend), name)(*moved, **flags)
    return [(x.states if isinstance(x, StateRows) else x).double().cpu() for x in moved if x is not None]


def close(found: torch.Tensor, truth: torch.Tensor, backend: str) -> bool:
    return bool((found - truth).norm() <= (1e-12 if backend == "eager" else 1e-6) * truth.norm())


@pytest.mark.parametrize("tailed", [False, True])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("K, V", WIDTHS)
def test_rank_carry(K: int, V: int, reverse: bool, tailed: bool, backend: str, device: torch.device):
    """Every rank of a zigzag partition with B rows. The map of a sequence's first piece must not be read."""
    B, world, tokens = 2, 3, 60
    partition = partition_sequences([0, 7, 25, tokens], tokens, owned_ranges("zigzag", tokens, world))
    rows = partition.most_incoming if reverse else partition.most_outgoing
    H, M = normal(world, rows, B, HV, K, V), maps(world, rows, B, HV, K, K)
    reached = 0
    for chain in partition.chains:
        piece = chain[-1] if reverse else chain[0]
        M[piece.rank, piece.incoming if reverse else piece.outgoing] = torch.nan
    for rank, pieces in enumerate(partition.pieces):
        wanted = [piece for piece in pieces if not (piece.last if reverse else piece.first)]
        n = len(wanted) * B
        routes = torch.tensor((backward_routes if reverse else forward_routes)(partition, rank))
        outer, borders = (StateRows(normal(9, HV, K, V), some(n, 9)) for _ in range(2))
        tails = torch.cat([normal(n, HV, K, V), maps(n, HV, K, K)], -1) if tailed else None
        truth = outer.states.clone(), borders.states.clone()
        for i, piece in enumerate(wanted):
            (chain,) = (c for c in partition.chains if piece in c)
            before = list(reversed(chain)) if reverse else list(chain)
            first, *others = before[: before.index(piece)]
            for b in range(B):
                place = first.incoming if reverse else first.outgoing
                S = H[first.rank, place, b]
                for other in others:
                    place = other.incoming if reverse else other.outgoing
                    S = H[other.rank, place, b] + M[other.rank, place, b] @ S
                truth[0][outer.rows[i * B + b]] = S
                if tails is not None:
                    S = tails[i * B + b, ..., V:].mT @ S
                row = borders.rows[i * B + b]
                truth[1][row] = truth[1][row] + S if reverse else S
                reached += 1
        gathered = torch.cat([H, M], -1)
        found = run(backend, "rank_carry", device, gathered, routes, outer, borders, tails, reverse=reverse)
        got_outer, got_borders = found[2:4]
        assert close(got_outer, truth[0], backend) and close(got_borders, truth[1], backend)
    assert reached >= 8


@pytest.mark.parametrize("tailed", [False, True])
@pytest.mark.parametrize("beside", [False, True], ids=["state", "state and map"])
@pytest.mark.parametrize("K, V", WIDTHS)
def test_rank_send(K: int, V: int, beside: bool, tailed: bool, backend: str, device: torch.device):
    columns, n = V + K * beside, 3
    borders = StateRows(normal(5, HV, K, columns), some(n, 5))
    tails = torch.cat([normal(n, HV, K, V), maps(n, HV, K, K)], -1) if tailed else None
    out = normal(n + 2, HV, K, V + K)
    truth = out.clone()
    S = borders.states[borders.rows]
    if tails is not None:
        S = tails[..., V:] @ S + torch.nn.functional.pad(tails[..., :V], (0, columns - V))
    truth[:n, ..., :columns] = S
    got = run(backend, "rank_send", device, borders, tails, out)[-1]
    assert close(got, truth, backend)
    untouched = torch.ones_like(truth, dtype=torch.bool)
    untouched[:n, ..., :columns] = False
    given = out if backend == "eager" else out.float().double()
    assert torch.equal(got[untouched], given[untouched])
