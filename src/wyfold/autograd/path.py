"""PaTH attention: one autograd function over two registered operators.

Kernels take a whole call (`path_kernels`). The eager backend computes sequences of one length together: a dense batch
at once, a packed one sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from wyfold.autograd import path_kernels
from wyfold.autograd.path_records import (
    DIFFERENTIABLE,
    OPERATOR,
    OPTIONS_SCHEMA,
    TENSORS,
    TENSORS_SCHEMA,
    PathOptions,
    PathTensors,
    empty_gradients,
    empty_results,
)
from wyfold.kernels import table
from wyfold.kernels.path_records import BLOCK_CHUNKS, CHUNK, PathCall, PathPast, PathTiles
from wyfold.runtime.chunk_layout import ChunkTable, dense_table
from wyfold.runtime.differentiation import once_differentiable
from wyfold.runtime.layout import legal_boundaries
from wyfold.runtime.torch_ops import call, register
from wyfold.tile.index.eager import from_chunks, to_chunks
from wyfold.tile.rows.eager import widest


class Path(torch.autograd.Function):
    """`wyfold::path_fwd`, with `wyfold::path_bwd` as its gradient."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        tensors, options = arguments[:-1], arguments[-1]
        o, keys, lse, rest = call(_forward_op, *tensors, *options)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(lse, rest)
        ctx.options = options
        ctx.save_for_backward(*tensors, o, lse, rest)
        return o, keys, lse, rest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dkeys: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        none = (None,) * (TENSORS + 1)
        if do is None and dkeys is None:
            return none
        needs = list(ctx.needs_input_grad[:DIFFERENTIABLE])
        found = iter(call(_backward_op, *ctx.saved_tensors, do, dkeys, needs, *ctx.options))
        return *(next(found) if need else None for need in needs), *none[DIFFERENTIABLE:]


class _Sequences:
    """Sequences of one length, of a call on the eager backend.

    Attributes:
        tensors, options: The call.
        rows, tokens: Slices of its [B, T, ..] tensors.
        table: Chunks of these tokens.
        dtype: Dtype of the arithmetic.
        queries: Rows of each chunk that hold queries.
    """

    def __init__(self, tensors: PathTensors, options: PathOptions, rows: slice, tokens: slice):
        self.tensors, self.options, self.rows, self.tokens = tensors, options, rows, tokens
        T = tokens.stop - tokens.start
        self.table: ChunkTable = dense_table(rows.stop - rows.start, T, CHUNK)
        self.dtype = widest(*tensors[:DIFFERENTIABLE])
        self.skipped = tensors.k.shape[1] - tensors.q.shape[1]
        starts = range(0, T, CHUNK)
        self.queries = [slice(max(0, self.skipped - at), CHUNK) for at in starts]
        if tensors.past_k is not None:  # a token of decoding is one row, not a chunk of rows
            self.queries = [
                slice(part.start, min(CHUNK, T - at)) for part, at in zip(self.queries, starts, strict=True)
            ]

    def block(self, x: Tensor) -> Tensor:
        """These tokens of x [B, T, ..]."""
        return x[self.rows, self.tokens]

    def tiles(self, x: Tensor) -> Tensor:
        """[n, sequences x heads, C, W] tiles of x [B, T, heads, W], with whole blocks."""
        if x.shape[1] < self.tensors.k.shape[1]:  # queries of the last tokens
            x = torch.cat([x.new_zeros(x.shape[0], self.skipped, *x.shape[2:]), x], dim=1)
        found = to_chunks(self.block(x), self.table, x.shape[2], self.dtype)
        found = found.view(len(self.table.columns), -1, *found.shape[1:])
        return torch.cat([found, found.new_zeros(-found.shape[0] % BLOCK_CHUNKS, *found.shape[1:])])

    def stacked(self, x: Tensor) -> Tensor:
        """`tiles` of a tensor of query heads, [n, R, G, C, W]."""
        return self.tiles(x).unflatten(1, (-1, x.shape[2] // self.tensors.k.shape[2]))

    def unload(self, tiles: Tensor, x: Tensor) -> None:
        """Write tiles [n, R x .., C, W] to these tokens of x [B, T, heads, W]."""
        tiles = tiles[: len(self.table.columns)].reshape(-1, *tiles.shape[-2:])
        if x.shape[1] < self.tensors.k.shape[1]:
            whole = x.new_empty(x.shape[0], self.tensors.k.shape[1], *x.shape[2:])
            from_chunks(tiles, self.table, self.block(whole))
            x.copy_(whole[:, self.skipped :])
        else:
            from_chunks(tiles, self.table, self.block(x))

    def call(self) -> PathCall:
        """Tokens and factors."""
        t, stage = self.tensors, table.kernel_module("path_blocks", self.options.backend)
        g = None if t.g is None else self.stacked(t.g[..., None]).squeeze(-1)
        k, v, w, beta = map(self.tiles, (t.k, t.v, t.w, t.beta[..., None]))
        x = PathTiles(self.stacked(t.q).flatten(2, 3), k, v, w, beta, g)
        chunks = stage.path_chunks(x)
        decays = None if g is None else stage.path_decays(g)
        return PathCall(
            x, chunks, stage.path_blocks(x, chunks), decays, self.past(), self.options.scale, self.options.gate
        )

    def past(self) -> PathPast | None:
        """Keys of earlier calls."""
        t = self.tensors
        if t.past_k is None or t.past_v is None or t.past_counts is None or t.past_k.shape[1] == 0:
            return None
        (N, S, H, _), HQ = t.past_k.shape, t.q.shape[2]
        missing = _missing_keys(S, t.past_counts)
        rows = [x.masked_fill(missing[..., None, None], 0) for x in (t.past_k, t.past_v)]
        k, v = (x.to(self.dtype).transpose(1, 2).flatten(0, 1) for x in rows)
        end = k.new_zeros(N, S, HQ)
        if t.past_g is not None:
            end[:, :-1] = t.past_g[:, 1:].to(self.dtype).flip(1).cumsum(1).flip(1)
        end.masked_fill_(missing[..., None], -torch.inf)
        return PathPast(k, v, end.transpose(1, 2).reshape(N * H, HQ // H, S))


def _missing_keys(S: int, counts: Tensor) -> Tensor:
    """[N, S], True where a sequence has no key: before its last counts[n] of S."""
    return torch.arange(S, device=counts.device) < S - counts[:, None]


def _sequences(tensors: PathTensors, options: PathOptions) -> Iterator[_Sequences]:
    B, T = tensors.k.shape[:2]
    if tensors.cu_seqlens is None:
        if B and T:
            yield _Sequences(tensors, options, slice(0, B), slice(0, T))
        return
    for start, stop in pairwise(legal_boundaries(OPERATOR, tensors.cu_seqlens, T).tolist()):
        if start < stop:
            yield _Sequences(tensors, options, slice(0, 1), slice(start, stop))


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    t, options = PathTensors(*arguments[:TENSORS]), PathOptions(*arguments[TENSORS:])
    o, keys, lse, rest = empty_results(t, options)
    if options.backend != "eager":
        path_kernels.forward(t, options, o, keys, lse, rest)
        return o, keys, lse, rest
    if options.use_cache and t.past_k is not None and t.k.shape[1] == 0:
        keys.copy_(t.past_k)  # no token changes them
    softmax: Any = table.kernel_module("path_attention", options.backend)
    blocks: Any = table.kernel_module("path_blocks", options.backend)
    for part in _sequences(t, options):
        made = part.call()
        n, R, G = made.x.k.shape[0], made.x.k.shape[1], t.q.shape[2] // t.k.shape[2]
        out = made.x.v.new_zeros(n, R, G, CHUNK, t.v.shape[3])
        sums = out.new_zeros(n, R, G, CHUNK)
        softmax.path_attention(made, part.queries, out, sums)
        part.unload(out, o)
        part.unload(sums[..., None], lse[..., None])
        if options.use_cache:
            found, past = blocks.path_cache(made)
            part.unload(found, keys[:, keys.shape[1] - t.k.shape[1] :])
            if past is not None:
                keys[:, : past.shape[1]] = past.unflatten(0, (keys.shape[0], -1)).transpose(1, 2)
    return o, keys, lse, rest


def _backward(*arguments: Any) -> list[Tensor]:
    t, options = PathTensors(*arguments[:TENSORS]), PathOptions(*arguments[TENSORS + 6 :])
    o, lse, rest, do, dcache, needs = arguments[TENSORS : TENSORS + 6]
    dq, dk, dv, dw, dbeta, dg, *dpast = found = empty_gradients(t)
    if options.backend != "eager":
        if do is not None:
            path_kernels.backward(t, options, o, lse, rest, do, found)
        return [dx for dx, need in zip(found, needs, strict=True) if need]
    if t.past_k is not None and t.k.shape[1] == 0 and dcache is not None:
        dpast[0].copy_(dcache)
    softmax: Any = table.kernel_module("path_attention", options.backend)
    blocks: Any = table.kernel_module("path_blocks", options.backend)
    for part in _sequences(t, options):
        made = part.call()
        d = made.zeros()
        if options.use_cache and dcache is not None:
            S = dcache.shape[1] - t.k.shape[1]
            past = None if made.past is None else dcache[:, :S].transpose(1, 2).flatten(0, 1).to(part.dtype)
            blocks.path_cache_bwd(made, part.tiles(dcache[:, S:]), past, d)
        if do is not None:
            rows = part.stacked(lse[..., None]).squeeze(-1), part.stacked(do)
            softmax.path_attention_bwd(made, part.queries, *rows, d)
        blocks.path_blocks_bwd(made, d)
        x = blocks.path_chunks_bwd(made, d)
        for tiles, gradient in zip((x.q, x.k, x.v, x.w), (dq, dk, dv, dw), strict=True):
            part.unload(tiles, gradient)
        part.unload(x.beta, dbeta[..., None])
        if x.g is not None:
            part.unload(x.g[..., None], dg[..., None])
        if d.past is not None:
            _unload_past(d.past, t, *dpast)
    return [dx for dx, need in zip(found, needs, strict=True) if need]


def _unload_past(d: PathPast, t: PathTensors, dk: Tensor, dv: Tensor, dg: Tensor) -> None:
    if t.past_counts is None:
        return
    missing = _missing_keys(dk.shape[1], t.past_counts)[..., None, None]
    for x, gradient in ((d.k, dk), (d.v, dv)):
        gradient.copy_(x.unflatten(0, (gradient.shape[0], -1)).transpose(1, 2).masked_fill(missing, 0))
    if t.past_g is not None:
        dg[:, 1:] = d.end.reshape(dg.shape[0], dg.shape[2], -1).transpose(1, 2)[:, :-1].cumsum(1)


_forward_op = register(
    f"path_fwd({TENSORS_SCHEMA}, {OPTIONS_SCHEMA}) -> (Tensor o, Tensor keys, Tensor lse, Tensor rest)",
    _forward,
    lambda *arguments: tuple(empty_results(PathTensors(*arguments[:TENSORS]), PathOptions(*arguments[TENSORS:]))),
    lambda *arguments: Path.apply(*arguments[:TENSORS], PathOptions(*arguments[TENSORS:])),
)
_backward_op = register(
    f"path_bwd({TENSORS_SCHEMA}, Tensor o, Tensor lse, Tensor rest, Tensor? do, Tensor? dkeys, bool[] needs, "
    f"{OPTIONS_SCHEMA}) -> Tensor[]",
    _backward,
    lambda *arguments: [
        x.new_empty(x.shape) for x, need in zip(arguments[:DIFFERENTIABLE], arguments[TENSORS + 5], strict=True) if need
    ],
    of_gradients=True,
)
