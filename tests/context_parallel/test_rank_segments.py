"""Segments of a rank's pieces: their tokens, the borders between them, and the states along a chain."""

import itertools
import random

import pytest
import torch

from wyfold.context_parallel.partition import owned_ranges, partition_sequences
from wyfold.context_parallel.rank_segments import RankSegments, segment_tables
from wyfold.context_parallel.routes import backward_routes, forward_routes
from wyfold.kernels.rank_carry.eager import route_states
from wyfold.runtime.chunk_layout import Cut, chunk_grid

C = 4


def packing(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(draw.choice([0, 1, 2, C, 3 * C + 1, 40, tokens]))
    return [0, *(min(tokens - seed % 3, end) for end in itertools.accumulate(lengths))]


def by_piece(pieces, batch: int) -> list[int]:
    return [piece.length for _ in range(batch) for piece in pieces]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("length", [Cut(0, 1, 0), Cut(1, 3, 4), Cut(2, 16, 4)])
@pytest.mark.parametrize("world, batch", [(1, 1), (2, 1), (3, 1), (3, 2)])
def test_segments_of_every_rank(layout: str, length: Cut, world: int, batch: int):
    for seed, tokens in itertools.product(range(5), (6, 50, 131)):
        bounds = packing(seed, tokens) if batch == 1 else [0, tokens]
        partition = partition_sequences(bounds, tokens, owned_ranges(layout, tokens, world))
        for rank, pieces in enumerate(partition.pieces):
            numbers, counts, segments = segment_tables(partition, rank, batch, C, length)
            found = RankSegments.of(torch.tensor(numbers, dtype=torch.int64), counts)
            assert all(x.storage_offset() % 2 == 0 for x in found[3:]), "16 bytes"
            T, first, lengths = partition.tokens(rank), found.first.tolist(), found.cu.diff().tolist()
            assert found.pieces == batch * len(pieces) and segments == len(lengths) == first[-1]
            chunks = 0
            for n, (row, piece) in enumerate(itertools.product(range(batch), pieces)):
                own = range(first[n], first[n + 1])
                assert set(found.piece[own.start : own.stop].tolist()) <= {n}
                assert int(found.cu[own.start]) == row * T + piece.offset
                assert sum(lengths[own.start : own.stop]) == piece.length
                # All segments but a piece's last have full chunks, aligned to the piece's chunk grid.
                assert all(lengths[i] % C == 0 for i in own[:-1])
                done = [0, *itertools.accumulate(lengths[own.start : own.stop])]
                assert found.chunk[own.start : own.stop].tolist() == [chunks + at // C for at in done[:-1]]
                chunks += -(-piece.length // C)
                inside = own[(not piece.first) : len(own) - (not piece.last)]
                full = (piece.length if piece.last else piece.length // C * C) + C - 1
                assert len(inside) == max(length.segments(full // C), int(piece.first)) or full // C == 0
                if not piece.first:
                    assert lengths[own.start] == 0
                if not piece.last:
                    assert lengths[own.stop - 1] == piece.length % C
            assert found.chunks == chunks
            whole = chunk_grid(1, batch * T, C, torch.tensor([0, *itertools.accumulate(by_piece(pieces, batch))]))
            grid = found.grid(C, batch * T)
            assert torch.equal(grid.cu, whole.cu) and torch.equal(grid.first, whole.first)
            assert torch.equal(grid.sequence, whole.sequence[: grid.chunks])
            assert grid.chunks == chunks + -(-(batch * T - found.tokens) // C)
            goes_on = [i for i in range(segments - 1) if found.piece[i] == found.piece[i + 1]]
            assert found.leading.tolist() == goes_on
            divided = [n for n in range(found.pieces) if first[n + 1] - first[n] > 1]
            assert found.divided.tolist() == divided
            every = list(itertools.product(pieces, range(batch)))
            incoming_piece = [row * len(pieces) + p.number for p, row in every if not p.first]
            outgoing_piece = [row * len(pieces) + p.number for p, row in every if not p.last]
            assert found.incoming_piece.tolist() == incoming_piece and found.outgoing_piece.tolist() == outgoing_piece
            assert found.incoming_border.tolist() == [first[n] - n for n in incoming_piece]
            assert found.outgoing_border.tolist() == [first[n + 1] - 2 - n for n in outgoing_piece]
            assert found.through == [(p.incoming, p.outgoing) for p in pieces if not (p.first or p.last)]
            assert found.forward_routes.tolist() == forward_routes(partition, rank)
            assert found.backward_routes.tolist() == backward_routes(partition, rank)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_states_along_chains(layout: str, world: int):
    """Carried states equal those of the pieces' affine maps applied one after another, in both directions."""
    B, HV, K, V = 2, 3, 4, 5
    for seed in range(4):
        partition = partition_sequences(packing(seed, 97), 97, owned_ranges(layout, 97, world))
        draw = torch.Generator().manual_seed(seed)
        M, H, c = (
            {
                p: torch.randn(B, HV, K, n, dtype=torch.float64, generator=draw)
                for chain in partition.chains
                for p in chain
            }
            for n in (K, V, V)
        )
        there = torch.zeros(world, partition.most_outgoing, B, HV, K, V + K, dtype=torch.float64)
        back = torch.zeros(world, partition.most_incoming, B, HV, K, V + K, dtype=torch.float64)
        for p in M:
            if not p.last:
                there[p.rank, p.outgoing] = torch.cat([H[p], torch.zeros_like(M[p]) if p.first else M[p]], -1)
            if not p.first:
                back[p.rank, p.incoming] = torch.cat([c[p], torch.zeros_like(M[p]) if p.last else M[p].mT], -1)
        entering, leaving = {}, {}
        for chain in partition.chains:
            S = dS = torch.zeros(B, HV, K, V, dtype=torch.float64)
            for p in chain:
                entering[p], S = S, (H[p] if p.first else H[p] + M[p] @ S)
            for p in reversed(chain):
                leaving[p], dS = dS, (c[p] if p.last else c[p] + M[p].mT @ dS)
        for rank, pieces in enumerate(partition.pieces):
            incoming_piece = [entering[p] for p in pieces if not p.first]
            outgoing_piece = [leaving[p] for p in pieces if not p.last]
            for gathered, routes, expected in (
                (there, forward_routes, incoming_piece),
                (back, backward_routes, outgoing_piece),
            ):
                found = route_states(gathered, routes(partition, rank), V)
                assert found.shape[0] == len(expected)
                assert all(map(torch.equal, found, expected))
