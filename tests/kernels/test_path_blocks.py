"""Chunks and blocks of PaTH attention: against products of reflections, and adjoints against autograd."""

import pytest
import torch
from torch import Tensor

from wyfold.kernels.path_blocks.eager import (
    chunks,
    path_blocks,
    path_blocks_bwd,
    path_cache,
    path_cache_bwd,
    path_chunks,
    path_chunks_bwd,
    path_decays,
    path_decays_bwd,
)
from wyfold.kernels.path_records import BLOCK_CHUNKS, PathCall, PathDecays, PathPast, PathTiles

N, R, G, C, K, V = 2 * BLOCK_CHUNKS, 2, 3, 16, 8, 4


def normal(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


@pytest.fixture
def tiles() -> PathTiles:
    w = torch.nn.functional.normalize(normal(N, R, C, K), dim=-1)
    beta = 2 * torch.rand(N, R, C, 1, dtype=torch.float64)
    return PathTiles(normal(N, R, G * C, K), normal(N, R, C, K), normal(N, R, C, V), w, beta, None)


def made(x: PathTiles, past: PathPast | None = None) -> PathCall:
    chunks = path_chunks(x)
    return PathCall(x, chunks, path_blocks(x, chunks), None, past, 1.0, 1.0)


def reflections(x: PathTiles, r: int) -> list[Tensor]:
    """H of every token of row r, in the order of the tokens."""
    w, beta = x.w[:, r].flatten(0, 1), x.beta[:, r].flatten()
    return [torch.eye(K, dtype=w.dtype) - b * torch.outer(row, row) for row, b in zip(w, beta, strict=True)]


def product(maps: list[Tensor]) -> Tensor:
    """Map of a row at the end of tokens to their start: the last reflection first."""
    found = torch.eye(K, dtype=torch.float64)
    for H in reversed(maps):
        found = found @ H
    return found


def test_chunks_are_products_of_reflections(tiles: PathTiles, float64_bounds):
    f = path_chunks(tiles)
    for chunk, r in ((0, 1), (N - 1, 0)):
        H = reflections(tiles, r)[chunk * C : (chunk + 1) * C]
        q, k = tiles.q[chunk, r].unflatten(0, (G, C)), tiles.k[chunk, r]
        moved = torch.stack([q[:, i] @ product(H[: i + 1]) for i in range(C)], 1)
        float64_bounds.output("q", f.q[chunk, r].unflatten(0, (G, C)), moved)
        float64_bounds.output("k", f.k[chunk, r], torch.stack([product(H[j + 1 :]) @ k[j] for j in range(C)]))
        Z = torch.stack(
            [torch.stack([q[:, i] @ product(H[j + 1 : i + 1]) @ k[j] for j in range(C)], -1) for i in range(C)], 1
        )
        float64_bounds.output("Z", f.Z[chunk, r].unflatten(0, (G, C)), Z.tril())
        whole = torch.eye(K, dtype=torch.float64) - tiles.w[chunk, r].mT @ f.W[chunk, r]
        float64_bounds.output("map", whole, product(H))


def test_blocks_are_products_of_reflections(tiles: PathTiles, float64_bounds):
    call = made(tiles)
    S = BLOCK_CHUNKS * C
    for block in range(N // BLOCK_CHUNKS):
        H = reflections(tiles, 1)[block * S : (block + 1) * S]
        k = tiles.k[:, 1].flatten(0, 1)[block * S : (block + 1) * S]
        float64_bounds.output("M", call.blocks.M[block, 1], product(H))
        float64_bounds.output("k", call.blocks.k[block, 1], torch.stack([product(H[j + 1 :]) @ k[j] for j in range(S)]))
    assert torch.equal(call.blocks.v[0, 1], tiles.v[:BLOCK_CHUNKS, 1].flatten(0, 1))


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in tensors]


def test_adjoints_of_chunks_and_blocks(tiles: PathTiles, float64_bounds, monkeypatch: pytest.MonkeyPatch):
    # Autograd cannot pass the substitution, which works in place.
    monkeypatch.setattr(chunks, "inverse", lambda L: torch.linalg.inv(L + torch.eye(C, dtype=L.dtype)))
    q, k, v, w, beta = inputs = leaves(*tiles[:5])
    past = PathPast(*leaves(normal(R, 5, K)), normal(R, 5, V), normal(R, G, 5))
    call = made(PathTiles(q, k, v, w, beta, None), past)
    cache, earlier = path_cache(call)
    outputs = [call.chunks.q, call.chunks.k, call.chunks.Z, call.chunks.W, call.blocks.k, call.blocks.M, call.blocks.v]
    outputs += [cache, earlier]
    fed = [torch.randn_like(x) for x in outputs]
    truth = torch.autograd.grad(outputs, [*inputs, past.k], fed)
    with torch.no_grad():
        d = call.zeros()
        d.chunks.q.add_(fed[0]), d.chunks.k.add_(fed[1]), d.chunks.Z.add_(fed[2]), d.chunks.W.add_(fed[3])
        d.blocks.k.add_(fed[4]), d.blocks.M.add_(fed[5]), d.blocks.v.add_(fed[6])
        path_cache_bwd(call, fed[7], fed[8], d)
        path_blocks_bwd(call, d)
        found = path_chunks_bwd(call, d)
    for name, x, got in zip("q k v w beta past".split(), truth, (*found[:5], d.past.k), strict=True):
        float64_bounds.gradient(name, got, x)


@pytest.mark.parametrize("hidden", [False, True])
def test_sums_of_gates(hidden: bool, float64_bounds):
    g = -torch.rand(N, R, G, C, dtype=torch.float64)
    if hidden:
        g[:, 0, :, 3::5] = -torch.inf
    (g,) = leaves(g)
    d = path_decays(g)
    rows = g.movedim(0, -2).flatten(-2)  # [R, G, tokens]
    S, at = BLOCK_CHUNKS * C, slice(C, 2 * C)  # the second chunk ends the first block
    inside = [
        [rows[..., C + j + 1 : C + i + 1].sum(-1) if j < i else torch.zeros(R, G) for j in range(C)] for i in range(C)
    ]
    expected = {
        "inside": torch.stack([torch.stack(row, -1) for row in inside], -2).double(),
        "start": torch.stack([rows[..., C : C + i + 1].sum(-1) for i in range(C)], -1),
        "end": torch.stack([rows[..., C + j + 1 : 2 * C].sum(-1) for j in range(C)], -1),
        "total": rows[..., at].sum(-1),
        "block_end": torch.stack([rows[..., j + 1 : S].sum(-1) for j in range(S)], -1),
        "block_total": rows[..., :S].sum(-1),
    }
    got = PathDecays(d.inside[1], d.start[1], d.end[1], d.total[1], d.block_end[0], d.block_total[0])
    for name, x in expected.items():
        mine = getattr(got, name)
        assert torch.equal(mine.isinf(), x.isinf()), name
        float64_bounds.output(name, mine.exp().detach(), x.exp().detach())
    fed = PathDecays(*(torch.randn_like(x) for x in d))
    fed = PathDecays(fed.inside.tril(-1), *fed[1:])
    (truth,) = torch.autograd.grad(d, g, fed)
    float64_bounds.gradient("g", path_decays_bwd(fed), truth)
