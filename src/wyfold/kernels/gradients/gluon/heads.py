"""Sums of dq and dk over the value heads of a key head."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.kernels.gradients.gluon.tokens import Coords, load_rows, store_rows
from wyfold.kernels.records import GradientOutputs
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import Config
from wyfold.tile.index.triton import Packing, chunk_span, strides

UNROLLED = gl.constexpr(8)
"""Value heads of a group whose loads are unrolled. 128 of them compiled for minutes and spilled registers."""


class HeadRows(NamedTuple):
    """Kernel argument: raw rows of q and k for the norm's adjoint, or None without a norm."""

    q: Any
    s_q: Any
    k: Any
    s_k: Any


class HeadSizes(NamedTuple):
    """Constexprs.

    Attributes:
        H, GR: Key heads, and value heads of each.
        K, BT: Sizes of a tile.
        ROWS, COLUMNS: Rows of memory from the tile of one value head to that of the next, and numbers of a row.
        NORM: Whether the sums are gradients of normalised rows, divided by the rows' lengths.
    """

    H: int
    GR: int
    K: int
    BT: int
    ROWS: int
    COLUMNS: int
    NORM: bool


def head_arguments(
    tiles: tuple[Tensor, Tensor],
    rows: tuple[Tensor, Tensor] | None,
    out: GradientOutputs,
    sizes: HeadSizes,
    grid: ChunkGrid,
    config: Config,
) -> dict[str, Any]:
    """Arguments of the kernel, which sums the gradients of q and k over the value heads of each key head.

    Args:
        tiles: Those of q and k through each value head, each at the start of `sizes.ROWS` rows.
        rows: q and k, for the norm's adjoint.
        out: Receives the gradients of q and k that are not None.
        sizes: Of the kernel.
        grid, config: Of the call's kernel before.
    """
    q, k = rows if sizes.NORM and rows is not None else (None, None)
    return {
        "p_q": tiles[0],
        "p_k": tiles[1],
        "p_dq": out.q,
        "p_dk": out.k,
        "s_dq": strides(out.q),
        "s_dk": strides(out.k),
        "rows": HeadRows(q, strides(q), k, strides(k)),
        "packing": Packing(cu=grid.cu, first=grid.first, sequence=grid.sequence),
        "N": grid.sequences,
        "T": grid.tokens,
        "per_sequence": grid.per_sequence,
        "SIZES": sizes,
        "PACKED": grid.cu is not None,
        **config.options(),
    }


@gluon.jit(do_not_specialize=["N", "T", "per_sequence"])
def wyfold_gradients_heads_gluon(
    p_q,
    p_k,
    p_dq,
    p_dk,
    s_dq,
    s_dk,
    rows,
    packing,
    N,
    T,
    per_sequence,
    SIZES: gl.constexpr,
    PACKED: gl.constexpr,
):
    """One program sums the gradients of a chunk of one key head, in the order of its value heads.

    Args:
        p_q, p_k: Gradients through each value head, [BT, K] every SIZES.ROWS rows of SIZES.COLUMNS.
        p_dq, p_dk: Sums, at the tokens; None if they are not wanted.
        rows: A `HeadRows`.
    """
    H: gl.constexpr = SIZES.H
    pid = gl.program_id(0).to(gl.int64)
    i_c, i_h = pid // H, pid % H
    i_n, _, b, t, count = chunk_span(i_c, packing, T, per_sequence, PACKED, SIZES.BT)
    # Chunks of no sequence have tokens, whose gradients are zero, and no rows that are read.
    there = count
    if PACKED:
        there = gl.where(i_n < N, count, 0)
    at, read_at = Coords(b, t, 0, i_h, count), Coords(b, t, 0, i_h, there)
    if p_dq is not None:
        _store_sum(p_q, p_dq, s_dq, rows.q, rows.s_q, at, read_at, pid, SIZES)
    if p_dk is not None:
        _store_sum(p_k, p_dk, s_dk, rows.k, rows.s_k, at, read_at, pid, SIZES)


@gluon.jit
def _store_sum(p_tiles, p, s, p_x, s_x, at, read_at, pid, SIZES: gl.constexpr):
    """Store the sum of the value heads' tiles; zeros where no sequence has the chunk."""
    K: gl.constexpr = SIZES.K
    BT: gl.constexpr = SIZES.BT
    GR: gl.constexpr = SIZES.GR
    TILE: gl.constexpr = SIZES.ROWS * SIZES.COLUMNS
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // K, K // 8], [gl.num_warps(), 1], [1, 0])
    o_t, o_w = gl.arange(0, BT, layout=gl.SliceLayout(1, L)), gl.arange(0, K, layout=gl.SliceLayout(0, L))
    offsets = o_t[:, None] * SIZES.COLUMNS + o_w[None, :]
    mask = (o_t < read_at.rows)[:, None] & (o_w >= 0)[None, :]
    total = gl.zeros([BT, K], gl.float32, L)
    p_first = p_tiles + pid * GR * TILE + offsets
    if GR <= UNROLLED:
        for r in gl.static_range(GR):
            total += gl.load(p_first + r * TILE, mask, 0.0).to(gl.float32)
    else:
        for r in range(GR):
            total += gl.load(p_first + r * TILE, mask, 0.0).to(gl.float32)
    if SIZES.NORM:
        x = load_rows(p_x, s_x, read_at, 0, L, BT, K)
        square = gl.sum(gl.fma(x, x, 0.0), axis=1) + 1e-6
        total = gl.fma(x, -(gl.sum(gl.fma(x, total, 0.0), axis=1) / square)[:, None], total)
    store_rows(p, s, at, 0, total, L, BT, K)
