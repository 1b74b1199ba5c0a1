"""Records between the stages of PaTH attention, and its two sizes.

Tiles are numbered chunk by chunk: `[n, R, C, ..]`, with n chunks and R = sequences x key heads. The query heads of one
key head are stacked along the rows: `[n, R, G C, ..]` with G = HQ / H. A block is `BLOCK_CHUNKS` chunks, and n is a
multiple of that. Rows and chunks of padding hold zeros.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64
"""Tokens of a chunk, C."""
BLOCK_CHUNKS = 2
"""Chunks of a block on the eager backend."""
LOG2E = math.log2(math.e)


class PathTiles(NamedTuple):
    """Tokens of sequences of one length, as tiles.

    Attributes:
        q: [n, R, G C, K].
        k, w: [n, R, C, K].
        v: [n, R, C, V].
        beta: [n, R, C, 1].
        g: [n, R, G, C]; None without a gate.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    beta: Tensor
    g: Tensor | None


class PathChunks(NamedTuple):
    """Factors of every chunk (level 0).

    Attributes:
        A: [n, R, C, C] inverse of I + diag(beta) stril(w w^T).
        N, J: [n, R, C, C] strict lower triangles of w w^T and w k^T.
        P: [n, R, G C, C] lower triangle of q w^T.
        W: [n, R, C, K] A diag(beta) w. The chunk maps a row x, from its end to its start, to x - (x w^T) W.
        E: [n, R, C, C] A diag(beta) J.
        q: [n, R, G C, K] queries at the chunk's start.
        k: [n, R, C, K] keys at the chunk's end.
        Z: [n, R, G C, C] products of queries and keys inside the chunk, lower triangular.
    """

    A: Tensor
    N: Tensor
    J: Tensor
    P: Tensor
    W: Tensor
    E: Tensor
    q: Tensor
    k: Tensor
    Z: Tensor


class PathBlocks(NamedTuple):
    """Keys and maps of every block (level 1).

    Attributes:
        k: [blocks, R, S, K] keys at the block's end, S = BLOCK_CHUNKS C.
        after: [n, R, K, K] map of the chunks of the block that follow each chunk.
        M: [blocks, R, K, K] map of the block: a row x at its end is x M at its start.
        v: [blocks, R, S, V] values of the block's tokens.
    """

    k: Tensor
    after: Tensor
    M: Tensor
    v: Tensor


class PathDecays(NamedTuple):
    """Sums of log gates; every sum is taken directly, never as a difference of two others.

    Attributes:
        inside: [n, R, G, C, C] sum over j < l <= i; zero above the diagonal.
        start: [n, R, G, C] sum from the chunk's first token to each token, both included.
        end: [n, R, G, C] sum over the tokens of the chunk that follow each token.
        total: [n, R, G] sum of the chunk.
        block_end: [blocks, R, G, S] `end` up to the block's end.
        block_total: [blocks, R, G] sum of the block.
    """

    inside: Tensor
    start: Tensor
    end: Tensor
    total: Tensor
    block_end: Tensor
    block_total: Tensor


class PathPast(NamedTuple):
    """Keys of earlier calls, at the start of this call's first token.

    Attributes:
        k: [R, S, K].
        v: [R, S, V].
        end: [R, G, S] sums of log gates that follow each key; minus infinity where a row has no key.
    """

    k: Tensor
    v: Tensor
    end: Tensor


class PathCall(NamedTuple):
    """Sequences of one length, and everything that is computed of them before the softmax.

    The same record holds gradients. Of its `chunks` and `blocks`, only the fields that the softmax reads are then used.

    Attributes:
        x: Tokens.
        chunks, blocks: Factors of the tokens.
        decays: Sums of log gates; None without a gate.
        past: Keys of earlier calls; None if there are none.
        scale: Factor of products of queries and keys.
        gate: Factor of sums of log gates.
    """

    x: PathTiles
    chunks: PathChunks
    blocks: PathBlocks
    decays: PathDecays | None
    past: PathPast | None
    scale: float
    gate: float

    def zeros(self) -> PathCall:
        """Gradients of zero, to be added to."""
        f, x = self.chunks, self.x
        unused = f.A[:0]
        return PathCall(
            PathTiles(x.q[:0], x.k[:0], torch.zeros_like(x.v), torch.zeros_like(x.w), x.beta[:0], None),
            PathChunks(
                unused,
                unused,
                unused,
                unused,
                torch.zeros_like(f.W),
                unused,
                torch.zeros_like(f.q),
                torch.zeros_like(f.k),
                torch.zeros_like(f.Z),
            ),
            PathBlocks(
                torch.zeros_like(self.blocks.k),
                self.blocks.after[:0],
                torch.zeros_like(self.blocks.M),
                torch.zeros_like(self.blocks.v),
            ),
            None if self.decays is None else PathDecays(*map(torch.zeros_like, self.decays)),
            None if self.past is None else PathPast(*map(torch.zeros_like, self.past)),
            self.scale,
            self.gate,
        )


class PathFactors(NamedTuple):
    """Factors of a call on kernels, at their tokens.

    Attributes:
        w: [B, T, H, K] directions, rounded as operands are.
        W: [B, T, H, K] as in `PathChunks`.
        k: [B, T, H, K] keys at the end of their chunk.
        E: [B, T, H, C] as in `PathChunks`.
        blocks: [B, T, H, K] keys at the end of their block; undefined in the last, short block of a sequence.
        M: [slots, H, K, K] map of each block, less the identity. A block of S tokens that begins at token t of a buffer
            row has slot t // S of the row: two blocks begin at least S tokens apart.
        after: [slots, H, S / C, BK, BK] map of the chunks of the block that follow each chunk, less the identity; BK is
            K or more. Without elements where no backward reads it.
    """

    w: Tensor
    W: Tensor
    k: Tensor
    E: Tensor
    blocks: Tensor
    M: Tensor
    after: Tensor


class PathSums(NamedTuple):
    """Sums of log gates of a call on kernels, [B, T, HQ] float32; every sum is taken directly.

    Attributes:
        start: From the first token of a chunk to each token, both included.
        end: Over the tokens of a chunk that follow each token.
        block_start, block_end: The same of a block.
    """

    start: Tensor
    end: Tensor
    block_start: Tensor
    block_end: Tensor


class PathWorkspace(NamedTuple):
    """What a backward on kernels passes from the softmax to the chunks and blocks; gradients are float32.

    Attributes:
        dq: [B, T, HQ, K] of queries at the start of their chunk.
        dk: [B, T, H, K] of keys at the end of their chunk.
        dW, dw: [B, T, H, K] of the factors W and w.
        dv: [B, T, H, V] of values, without what their own chunk reads.
        dblocks: [B, T, H, K] of keys at the end of their block; undefined where no block follows.
        dM: [slots, H, BK, BK] of the maps; BK is K or more.
        delta: [B, T, HQ] <do, o>.
        others: [B, T, HQ] sum of the gradients of a query's logits of keys outside its chunk.
        dend: [B, T, HQ] of sums of log gates to the chunk's end.
        dblock_end: [B, T, HQ] of sums of log gates to the block's end; undefined where no block follows.
        dtotal: [near rows, HQ] at a chunk's first row (`near_row`): of the sums of log gates of each earlier chunk of
            its block.
        dblock_total: [slots, HQ] of the sum of a block's log gates.
    """

    dq: Tensor
    dk: Tensor
    dW: Tensor
    dw: Tensor
    dv: Tensor
    dblocks: Tensor
    dM: Tensor
    delta: Tensor
    others: Tensor
    dend: Tensor
    dblock_end: Tensor
    dtotal: Tensor
    dblock_total: Tensor


class PathSizes(NamedTuple):
    """Kernel argument: sizes known at compile time.

    Attributes:
        H, HQ: Key heads and query heads.
        K, V: Widths of keys and values.
        BT: Tokens of a chunk.
        BK, BV: Tile widths of K and V.
        BLOCK: Chunks of a block.
        TILE: Tokens of a tile of queries, whole chunks of one block.
    """

    H: int
    HQ: int
    K: int
    V: int
    BT: int
    BK: int
    BV: int
    BLOCK: int
    TILE: int = 1


class PathScales(NamedTuple):
    """Kernel argument: factors of products and of sums of log gates.

    Attributes:
        scale, gate: The factors.
        logit_scale, logit_gate: The factors times log2(e), for exponentials that are powers of 2.
    """

    scale: float
    gate: float
    logit_scale: float
    logit_gate: float


def path_scales(scale: float, gate: float) -> PathScales:
    """Factors as a kernel argument. Products with log2(e) are rounded once, since all logits share them."""
    return PathScales(scale, gate, scale * LOG2E, gate * LOG2E)
