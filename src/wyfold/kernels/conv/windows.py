"""Windows of a filter over a packed row: each token with the values its taps read.

Tokens are processed in blocks that fit the cache, as if all belonged to one sequence. Near a border between sequences
the result is wrong, so the edges of many sequences are processed again side by side, each next to its true neighbours:
its state or zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from wyfold.tile.rows.eager import row_blocks


class Window(NamedTuple):
    """n neighbouring tokens, or m edges of n tokens each, with the values around them.

    Attributes:
        values: [n + reach, D], or [m, n + reach, D] for edges.
        tokens: Slice of the row, or [m * n] indices for edges.
        foreign: Flat positions in the window that another window owns or that a shorter sequence lacks; None if there
            are none. A slice may write there, because edges are written later.
        own: The other positions.
        sequences: Sequences of the edges; None for a slice.
    """

    values: Tensor
    tokens: slice | Tensor
    foreign: Tensor | None
    own: Tensor | None = None
    sequences: slice | None = None

    def read(self, x: Tensor) -> Tensor:
        """x [T, D] at the tokens, shaped [..., n, D]; arbitrary values at foreign positions."""
        if isinstance(self.tokens, slice):
            return x[self.tokens]
        return x.index_select(0, self.tokens).unflatten(0, (self.values.shape[0], -1))

    def write(self, out: Tensor, results: Tensor) -> None:
        """out[tokens] = results [..., n, D], rounded to out's dtype, where the window owns them."""
        results = results.to(out.dtype)
        if isinstance(self.tokens, slice):
            out[self.tokens] = results
        elif self.own is None:
            out.index_copy_(0, self.tokens, results.flatten(0, 1))
        else:
            out.index_copy_(0, self.tokens[self.own], results.flatten(0, 1).index_select(0, self.own))

    def total(self, terms: Tensor) -> Tensor:
        """Sum of terms [..., n, D] over the tokens that the window owns; overwrites terms.

        Foreign terms are set to zero, not multiplied by it, since they may be infinite. The layout is fixed, because
        the order of a sum follows it.
        """
        rows = terms.flatten(0, -2).contiguous()
        return (rows if self.foreign is None else rows.index_fill_(0, self.foreign, 0)).sum(0)


class Edge(NamedTuple):
    """First or last n tokens of some sequences.

    Attributes:
        sequences: [m] their numbers.
        tokens: [m * n] indices of the tokens.
        missing: [m * n] mask of tokens that a shorter sequence lacks; their index is 0.
    """

    sequences: slice
    tokens: Tensor
    missing: Tensor

    def read(self, x: Tensor) -> Tensor:
        """x [T, D] at the tokens, [m, n, D]."""
        rows = x.index_select(0, self.tokens.to(x.device))
        return rows.unflatten(0, (self.sequences.stop - self.sequences.start, -1))


class Windows:
    """Windows over sequences that lie one after another.

    Args:
        cu_seqlens: [N+1] legal boundaries, int64 on the CPU.
        reach: Number of neighbours that a token's filter reads besides the token, W - 1.
        width: D.
        device: Device of the tensors.
    """

    def __init__(self, cu_seqlens: Tensor, reach: int, width: int, device: torch.device):
        self.begins, self.ends = cu_seqlens[:-1], cu_seqlens[1:]
        self.lengths = self.ends - self.begins
        self.reach, self.width, self.device = reach, width, device
        self.sequences = self.lengths.shape[0]
        self.end = int(cu_seqlens[-1])
        self.longest, self.shortest = (int(self.lengths.max()), int(self.lengths.min())) if self.sequences else (0, 0)

    def before(self, x: Tensor, state: Tensor | None, dtype: torch.dtype) -> Iterator[Window]:
        """Windows of x [T, D]: every token after its `reach` predecessors, which start with the state [N, D, S] or
        zeros."""
        if self.longest > self.reach:
            at_edge = torch.zeros(self.end, dtype=torch.bool)
            for edge in self.heads():
                at_edge[edge.tokens[~edge.missing]] = True
            for block in row_blocks(self.end - self.reach, self.width):
                tokens = slice(block.start + self.reach, block.stop + self.reach)
                foreign = at_edge[tokens].nonzero().flatten()
                values = x[block.start : tokens.stop].to(dtype)
                yield Window(values, tokens, foreign.to(self.device) if foreign.shape[0] else None)
        for edge in self.heads():
            inside = edge.read(x).to(dtype)
            yield self._window(torch.cat([self._initial_rows(state, edge.sequences, inside), inside], dim=1), edge)

    def after(self, dy: Tensor, dtype: torch.dtype, rows: int) -> Iterator[Window]:
        """Windows of dy [T, D]: every token before its `reach` successors, which end in zeros; edges have at least
        `rows` tokens."""
        if self.longest > self.reach:
            for block in row_blocks(self.end - self.reach, self.width):
                yield Window(dy[block.start : block.stop + self.reach].to(dtype), block, None)
        for edge in self.tails(rows):
            yield self._window(torch.nn.functional.pad(edge.read(dy).to(dtype), (0, 0, 0, self.reach)), edge)

    def heads(self) -> Iterator[Edge]:
        """The first `reach` tokens of every sequence."""
        offsets = torch.arange(min(self.reach, self.longest))
        for group in self._groups(offsets.shape[0]):
            yield _edge(group, self.begins[group, None] + offsets, offsets >= self.lengths[group, None])

    def tails(self, rows: int) -> Iterator[Edge]:
        """The last `rows` tokens of every sequence, at least `reach`."""
        offsets = torch.arange(-min(max(rows, self.reach), self.longest), 0)
        for group in self._groups(offsets.shape[0]):
            yield _edge(group, self.ends[group, None] + offsets, -offsets > self.lengths[group, None])

    def latest(self, x: Tensor, state: Tensor | None, out: Tensor) -> None:
        """Write the latest S inputs of every sequence to out [N, D, S]; a shorter sequence also uses its state."""
        S = out.shape[2]
        position = self.lengths[:, None] + torch.arange(-S, 0)  # [N, S] positions; negative: in the state
        if self.longest:
            tokens = (position + self.begins[:, None]).clamp(min=0).flatten().to(self.device)
            out.copy_(x.index_select(0, tokens).unflatten(0, position.shape).transpose(1, 2))
        for length in self.lengths.clamp(max=S).unique().tolist():
            same = slice(None) if length == self.longest == self.shortest else (self.lengths == length).to(self.device)
            out[same, :, : S - length] = 0 if state is None else state[same, :, length:].to(out.dtype)

    def _groups(self, rows: int) -> Iterator[slice]:
        yield from row_blocks(self.sequences, (rows + self.reach) * self.width) if rows else ()

    def _initial_rows(self, state: Tensor | None, sequences: slice, like: Tensor) -> Tensor:
        if state is None:
            return like.new_zeros(like.shape[0], self.reach, self.width)
        return state[sequences, :, state.shape[2] - self.reach :].transpose(1, 2).to(like.dtype)

    def _window(self, values: Tensor, edge: Edge) -> Window:
        foreign = own = None
        if bool(edge.missing.any()):
            foreign, own = (mask.nonzero().flatten().to(self.device) for mask in (edge.missing, ~edge.missing))
        return Window(values, edge.tokens.to(self.device), foreign, own, edge.sequences)


def _edge(sequences: slice, tokens: Tensor, missing: Tensor) -> Edge:
    return Edge(sequences, tokens.masked_fill(missing, 0).flatten(), missing.flatten())
