"""Softmax of PaTH attention: against one softmax over all logits, and its adjoint against autograd."""

import pytest
import torch
from torch import Tensor

from wyfold.kernels.path_attention.eager import path_attention, path_attention_bwd
from wyfold.kernels.path_records import (
    BLOCK_CHUNKS,
    PathBlocks,
    PathCall,
    PathChunks,
    PathDecays,
    PathPast,
    PathTiles,
)

N, R, G, C, K, V = 3 * BLOCK_CHUNKS, 2, 3, 4, 8, 5
BLOCKS, S, PAST = N // BLOCK_CHUNKS, BLOCK_CHUNKS * C, 6
READ = ("x.v", "x.w", "chunks.W", "chunks.q", "chunks.k", "chunks.Z", "blocks.k", "blocks.M", "blocks.v")


def normal(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


def drawn(gate: bool, past: bool) -> PathCall:
    """A call whose factors are random: the softmax does not depend on how they were computed."""
    unread = normal(0)
    decays = None
    if gate:
        decays = PathDecays(
            -normal(N, R, G, C, C).abs().tril(-1),
            *(
                -normal(*size).abs()
                for size in ((N, R, G, C), (N, R, G, C), (N, R, G), (BLOCKS, R, G, S), (BLOCKS, R, G))
            ),
        )
    return PathCall(
        PathTiles(unread, normal(N, R, C, K), normal(N, R, C, V), normal(N, R, C, K) / 3, unread, None),
        PathChunks(
            unread,
            unread,
            unread,
            unread,
            normal(N, R, C, K) / 3,
            unread,
            normal(N, R, G * C, K),
            normal(N, R, C, K),
            normal(N, R, G * C, C),
        ),
        PathBlocks(normal(BLOCKS, R, S, K), unread, normal(BLOCKS, R, K, K) / 3, normal(BLOCKS, R, S, V)),
        decays,
        PathPast(normal(R, PAST, K), normal(R, PAST, V), -normal(R, G, PAST).abs()) if past else None,
        0.7,
        0.9,
    )


def plain(call: PathCall, i: int) -> tuple[Tensor, Tensor]:
    """Output [R, G, C, V] and logarithm of the sum of a chunk of queries, from all of its logits at once."""
    x, later = call.chunks.q[i], torch.ones(C, C).triu(1).bool()
    Z = 0.7 * call.chunks.Z[i].unflatten(1, (G, C))
    Z = Z if call.decays is None else Z + 0.9 * call.decays.inside[i]
    logits, values = [Z.masked_fill(later, -torch.inf)], [call.x.v[i]]
    passed = 0 if call.decays is None else call.decays.start[i][..., None]

    def meet(keys: Tensor, v: Tensor, end: Tensor | None) -> None:
        product = 0.7 * (x @ keys.mT).unflatten(1, (G, C))
        logits.append(product if end is None else product + 0.9 * (passed + end[:, :, None]))
        values.append(v)

    block, d = i // BLOCK_CHUNKS, call.decays
    for c in reversed(range(block * BLOCK_CHUNKS, i)):
        meet(call.chunks.k[c], call.x.v[c], None if d is None else d.end[c])
        x = x - (x @ call.x.w[c].mT) @ call.chunks.W[c]
        passed = passed if d is None else passed + d.total[c][..., None, None]
    for b in reversed(range(block)):
        meet(call.blocks.k[b], call.blocks.v[b], None if d is None else d.block_end[b])
        x = x @ call.blocks.M[b]
        passed = passed if d is None else passed + d.block_total[b][..., None, None]
    if call.past is not None:
        meet(call.past.k, call.past.v, call.past.end)
    row = torch.cat(logits, -1)
    return row.softmax(-1) @ torch.cat(values, 1)[:, None], row.logsumexp(-1)


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("gate", [False, True])
def test_one_softmax_over_all_keys_and_its_adjoint(gate: bool, past: bool, float64_bounds):
    call = drawn(gate, past)
    rows = [slice(0, 0), slice(2, C), *[slice(0, C)] * (N - 3), slice(0, 1)]  # queries of some tokens alone
    o, lse = torch.zeros(N, R, G, C, V, dtype=torch.float64), torch.zeros(N, R, G, C, dtype=torch.float64)
    parts = {
        f"{where}.{name}": x
        for where in ("x", "chunks", "blocks", "decays", "past")
        if (record := getattr(call, where))
        for name, x in record._asdict().items()
        if x is not None
    }
    read = {
        name: x.requires_grad_() for name, x in parts.items() if name in READ or name.startswith(("decays", "past"))
    }
    path_attention(call, rows, o, lse)
    fed, outputs = torch.randn_like(o), []
    for i, part in enumerate(rows):
        out, total = plain(call, i)
        outputs.append((out[:, :, part] * fed[i, :, :, part]).sum())
        float64_bounds.output(f"o of chunk {i}", o[i, :, :, part].detach(), out[:, :, part].detach())
        float64_bounds.output(f"lse of chunk {i}", lse[i, :, :, part].detach(), total[:, :, part].detach())
    truth = torch.autograd.grad(torch.stack(outputs).sum(), list(read.values()), allow_unused=True)
    with torch.no_grad():
        d = call.zeros()
        path_attention_bwd(call, rows, lse, fed, d)
    for (name, x), dx in zip(read.items(), truth, strict=True):
        where, field = name.split(".")
        float64_bounds.gradient(name, getattr(getattr(d, where), field), torch.zeros_like(x) if dx is None else dx)
