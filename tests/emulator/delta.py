"""Random arguments for the delta family's scans, chunk by chunk for their formulas.

Factors (E, F, W, ...) are random as well: the kernels must be correct for any factors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from tests.upper_tiles import from_quarters, to_quarters
from torch import Tensor
from torch.nn.functional import normalize

from wyfold.kernels.records import Prepared
from wyfold.runtime.chunk_layout import ChunkGrid, chunk_grid
from wyfold.runtime.options import DeltaOptions, gradient_unit

C = 64
PACKED = [0, 1, 65, 129, 129, 300, 517]


@dataclass
class Call:
    """Arguments of a scan.

    Attributes:
        q, k: [B, T, H, K] bfloat16.
        v, do: [B, T, HV, V] bfloat16.
        prepared: Factors of every chunk.
        S0, dST: [N, HV, K, V] initial states and gradients of the final states; None is zero.
        grid: Chunk grid.
        cu: Boundaries of a packed batch, which may end before T; None: every batch row is a sequence.
        erases: `DeltaOptions.erases`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    prepared: Prepared
    S0: Tensor | None
    dST: Tensor | None
    grid: ChunkGrid
    cu: list[int] | None
    erases: bool

    @property
    def launched(self) -> Prepared:
        """What the scans get of `prepared`: a channel gate's keys and W exist only if writes erase."""
        inverts = self.erases or self.prepared.q is None
        return self.prepared if inverts else self.prepared._replace(k=None, W=None)

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """Batch row, first token and end of every sequence."""
        if self.cu is None:
            return [(i, 0, self.v.shape[1]) for i in range(self.v.shape[0])]
        return [(0, *span) for span in pairwise(self.cu)]

    def spoil(self) -> None:
        """Set tokens behind the last sequence to NaN."""
        if self.cu is not None:
            for x in (self.q, self.k, self.v, self.do):
                x[:, self.cu[-1] :] = torch.nan

    def chunks(self, span: tuple[int, int, int], first: int, head: int) -> list[Chunk]:
        """The chunks of one sequence and value head, in float32.

        Args:
            span: The sequence, one of `spans`.
            first: Number of its first chunk.
            head: Value head.
        """
        row, begin, end = span
        shared = self.v.shape[2] // self.q.shape[2]
        p = self.prepared
        found = []
        for c, t in enumerate(range(begin, end, C)):
            tile, rows = (first + c) * self.v.shape[2] + head, slice(t, min(t + C, end))
            k, q = (
                filled(x[row, rows, head // shared]) if tiles is None else tiles[tile].float()
                for x, tiles in ((self.k, p.k), (self.q, p.q))
            )
            squares = [None if x is None else from_quarters(x[tile]).float() for x in (p.F, p.W, p.FB)]
            E = None if p.E is None else p.E[tile].float()
            v, do = filled(self.v[row, rows, head]).T, filled(self.do[row, rows, head]).T
            found.append(Chunk(tile, rows, q, k, v, do, *p.rows[tile], p.total[tile], E, *squares))
        return found


class Chunk(NamedTuple):
    """One chunk of one value head.

    Attributes:
        tile: Index into the factors.
        tokens: Its tokens in the batch row.
        q, k: [C, K] rows, zero in padding.
        v, do: [V, C], zero in padding.
        in_k, in_q, out, beta: [C], the rows of `Prepared.rows`.
        total: [1] or [K] decay of the state over the chunk.
        E, F, W, FB: Factors, or None.
    """

    tile: int
    tokens: slice
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    in_k: Tensor
    in_q: Tensor
    out: Tensor
    beta: Tensor
    total: Tensor
    E: Any
    F: Any
    W: Any
    FB: Any


def filled(x: Tensor) -> Tensor:
    """Pad rows to C with zeros, [C, width]. float64 stays, other dtypes become float32."""
    return torch.nn.functional.pad(x if x.dtype == torch.float64 else x.float(), (0, 0, 0, C - x.shape[0]))


def draw(
    gate: str,
    folded: bool,
    erases: bool = True,
    *,
    B: int = 1,
    T: int = 200,
    H: int = 1,
    HV: int = 2,
    K: int = 128,
    V: int = 128,
    cu: list[int] | None = None,
    given: bool = True,
) -> Call:
    """Random arguments.

    Args:
        gate: "scalar" or "channel".
        folded: Whether the scans read E instead of W.
        erases: Whether keys read the state.
        B, T, H, HV, K, V: Sizes.
        cu: Boundaries of a packed batch, or None.
        given: Whether there are initial states and gradients of final states.
    """
    r, u, channel = torch.randn, torch.rand, gate == "channel"
    q, k = (normalize(r(B, T, H, K), dim=-1).bfloat16() for _ in range(2))
    v, do = (r(B, T, HV, V).bfloat16() for _ in range(2))
    grid = chunk_grid(B, T, C, None if cu is None else torch.tensor(cu))
    n, sequences = grid.chunks * HV, B if cu is None else len(cu) - 1
    rows = 0.05 + 0.95 * u(n, 4, C)
    if channel:
        rows[:, :3] = 1.0
    rows[:, 0] *= erases

    def square(size: float = 0.1) -> Tensor:
        return to_quarters((torch.eye(C) + size * r(n, C, C).tril(-1).mT).bfloat16())

    def tile() -> Tensor:
        return normalize(r(n, C, K), dim=-1).bfloat16()

    prepared = Prepared(
        rows=rows,
        total=u(n, K if channel else 1),
        q=tile() if channel else None,
        k=tile() if channel else None,
        E=tile() if folded else None,
        F=square(),
        W=square(0.1 if erases or not channel else 0.0),
        FB=None if folded else square(),
    )
    S0, dST = (0.1 * r(sequences, HV, K, V) if given else None for _ in range(2))
    return Call(q, k, v, do, prepared, S0, dST, grid, cu, erases)


def first_chunks(call: Call) -> list[int]:
    """The number of every sequence's first chunk."""
    if call.cu is None:
        return [call.grid.per_sequence * i for i in range(len(call.spans))]
    return [int(i) for i in call.grid.first[: len(call.spans)]]


def heads(call: Call) -> Iterator[tuple[int, int, list[Chunk]]]:
    """Yield sequence, value head and chunks."""
    for n, (span, first) in enumerate(zip(call.spans, first_chunks(call), strict=True)):
        for head in range(call.v.shape[2]):
            yield n, head, call.chunks(span, first, head)


def rounded(x: Tensor) -> Tensor:
    """x rounded to bfloat16, as an MMA reads it."""
    return x.bfloat16().float()


def options(**given: Any) -> DeltaOptions:
    """Options of a plain call, some of them changed."""
    plain: dict[str, Any] = {
        "operator": "chunk_kda",
        "recurrent": False,
        "scale": 1.0,
        "qk_l2norm": False,
        "activation": "given",
        "lower_bound": 0.0,
        "clamp": 0.0,
        "beta_logit": False,
        "beta_most": 1.0,
        "state_v_first": False,
        "state_dtype": torch.float32,
        "final_state": True,
        "chunk_size": C,
        "checkpoint_every": 0,
        "save": True,
        "keep_factors": True,
        "backend": "triton",
    }
    plain["unit"] = gradient_unit(given.get("scale", 1.0), torch.bfloat16)
    return DeltaOptions(**(plain | given))
