"""Loads and stores of token rows and per-token numbers by pointer, and of full chunks by TMA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.tile.index.gluon import tma_store
from wyfold.tile.index.triton import strides


class Outputs(NamedTuple):
    """Kernel argument: gradients that are written, each with its strides.

    Attributes:
        dq, s_dq, dk, s_dk, dv, s_dv: Gradients of the tokens, for chunks that are not full.
        dbeta, s_dbeta: Gradient of the write strength, or None.
    """

    dq: Any
    s_dq: Any
    dk: Any
    s_dk: Any
    dv: Any
    s_dv: Any
    dbeta: Any
    s_dbeta: Any
    end: None = None


def output_views(dq: Tensor, dk: Tensor, dv: Tensor | None, dbeta: Tensor | None) -> Outputs:
    """The gradients of the tokens as a kernel argument."""
    return Outputs(
        dq=dq, s_dq=strides(dq), dk=dk, s_dk=strides(dk), dv=dv, s_dv=strides(dv), dbeta=dbeta, s_dbeta=strides(dbeta),
    )  # fmt: skip


def copy_wanted(found: Sequence[Tensor], wanted: Sequence[Tensor | None]) -> None:
    """Copy each gradient that was written to a temporary to where it is wanted."""
    for x, to in zip(found, wanted, strict=True):
        if to is not None and to is not x:
            to.copy_(x)


class Coords(NamedTuple):
    """Coordinates of a program's chunk.

    Attributes:
        b: Row of the batch.
        t: First token in that row.
        token: First token over all rows of the batch.
        h: Head.
        rows: Number of tokens in the chunk.
    """

    b: Any
    t: Any
    token: Any
    h: Any
    rows: Any


@gluon.jit
def store_token_tile(
    x_out, p_out, s_out, coords, column, tile, WHOLE: gl.constexpr, BT: gl.constexpr, BW: gl.constexpr
):
    """Store a shared memory tile to its tokens: by TMA if the chunk is full, else by pointer with a mask."""
    first = (coords.h * s_out[2]).to(gl.int32) + column
    if WHOLE:
        tma_store(x_out, [coords.token, first], tile)
    else:
        if coords.rows == BT:
            tma_store(x_out, [coords.token, first], tile)
        else:
            L: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // BW, BW // 8], [gl.num_warps(), 1], [1, 0])
            store_rows(p_out, s_out, coords, column, tile.load(L), L, BT, BW)


@gluon.jit
def store_rows(p, s, coords, column, x, L: gl.constexpr, BT: gl.constexpr, BW: gl.constexpr):
    """Store the rows of existing tokens by pointer."""
    o_t = gl.arange(0, BT, layout=gl.SliceLayout(1, L))
    o_w = column + gl.arange(0, BW, layout=gl.SliceLayout(0, L))
    first = coords.b * s[0] + coords.t * s[1] + coords.h * s[2]
    offsets = o_t.to(gl.int64)[:, None] * s[1] + o_w.to(gl.int64)[None, :] * s[3]
    gl.store(p + first + offsets, x.to(p.dtype.element_ty), mask=(o_t < coords.rows)[:, None] & (o_w >= 0)[None, :])


@gluon.jit
def load_rows(p, s, coords, column, L: gl.constexpr, BT: gl.constexpr, BW: gl.constexpr):
    """Load rows by pointer as float32; zero past the last token.   [BT, BW]"""
    o_t = gl.arange(0, BT, layout=gl.SliceLayout(1, L))
    o_w = column + gl.arange(0, BW, layout=gl.SliceLayout(0, L))
    first = coords.b * s[0] + coords.t * s[1] + coords.h * s[2]
    offsets = o_t.to(gl.int64)[:, None] * s[1] + o_w.to(gl.int64)[None, :] * s[3]
    return gl.load(p + first + offsets, mask=(o_t < coords.rows)[:, None] & (o_w >= 0)[None, :], other=0.0).to(
        gl.float32
    )


@gluon.jit
def load_scalars(p, s, coords, o):
    """Load one number per token; zero past the last token.   [BT] float32"""
    offsets = coords.b * s[0] + (coords.t + o) * s[1] + coords.h * s[2]
    return gl.load(p + offsets, mask=o < coords.rows, other=0.0).to(gl.float32)


@gluon.jit
def store_scalars(p, s, coords, o, x):
    """Store one number per token where p is not None."""
    if p is not None:
        gl.store(p + coords.b * s[0] + (coords.t + o) * s[1] + coords.h * s[2], x, mask=o < coords.rows)


@gluon.jit
def exp2(x):
    """2^x; results below the smallest normal number become 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
