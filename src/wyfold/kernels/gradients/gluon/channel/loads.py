"""Shared memory of a value head, and the TMA loads to it."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from wyfold.tile.index.gluon import tma_load


class HeadTiles(NamedTuple):
    """Tiles of a value head.

    Attributes:
        do, e, X: [BT, V]. X is e where it is not read: only dv needs it if writes erase nothing.
        S, dS: [V, BK].
    """

    do: Any
    e: Any
    X: Any
    S: Any
    dS: Any


@gluon.jit
def allocate_head(x_do, x_e, x_X, x_S, x_dS, ERASES: gl.constexpr, SIZES: gl.constexpr):
    """Allocate the tiles of a value head."""
    V: gl.constexpr = SIZES.V
    BT: gl.constexpr = SIZES.BT
    BK: gl.constexpr = SIZES.K // 2
    t_do = gl.allocate_shared_memory(x_do.dtype, [BT, V], x_do.layout)
    t_e = gl.allocate_shared_memory(x_e.dtype, [BT, V], x_e.layout)
    t_X = t_e
    if ERASES:
        t_X = gl.allocate_shared_memory(x_X.dtype, [BT, V], x_X.layout)
    t_S = gl.allocate_shared_memory(x_S.dtype, [V, BK], x_S.layout)
    t_dS = gl.allocate_shared_memory(x_dS.dtype, [V, BK], x_dS.layout)
    return HeadTiles(t_do, t_e, t_X, t_S, t_dS)


@gluon.jit
def load_head(
    x_q, x_k, x_do, x_g, x_S, x_dS, x_e, x_X, tokens, head, t_q, t_k, t_g, bars, coords, i_tile, column,
    ERASES: gl.constexpr, SIZES: gl.constexpr,
):  # fmt: skip
    """Issue all loads of a value head."""
    V: gl.constexpr = SIZES.V
    BT: gl.constexpr = SIZES.BT
    GR: gl.constexpr = SIZES.HV // SIZES.H
    i_h = coords.h // GR  # key head
    tile, values_ready, states_ready, tokens_ready = (i_tile.to(gl.int32), bars.index(0), bars.index(1), bars.index(2))
    column_q, column_k = ((i_h * tokens.h_q).to(gl.int32) + column, (i_h * tokens.h_k).to(gl.int32) + column)
    column_g, column_do = ((coords.h * tokens.h_g).to(gl.int32) + column, (coords.h * tokens.h_do).to(gl.int32))
    if ERASES:
        mbarrier.expect(values_ready, x_X.block_type.nbytes + x_e.block_type.nbytes + x_do.block_type.nbytes)
        tma_load(x_X, [tile * BT, 0], values_ready, head.X)
    else:
        mbarrier.expect(values_ready, x_e.block_type.nbytes + x_do.block_type.nbytes)
    tma_load(x_e, [tile * BT, 0], values_ready, head.e)
    tma_load(x_do, [coords.token, column_do], values_ready, head.do)
    mbarrier.expect(states_ready, x_S.block_type.nbytes + x_dS.block_type.nbytes)
    tma_load(x_S, [tile * V, column], states_ready, head.S)
    tma_load(x_dS, [tile * V, column], states_ready, head.dS)
    mbarrier.expect(tokens_ready, x_g.block_type.nbytes + x_q.block_type.nbytes + x_k.block_type.nbytes)
    tma_load(x_g, [coords.token, column_g], tokens_ready, t_g)
    tma_load(x_q, [coords.token, column_q], tokens_ready, t_q)
    tma_load(x_k, [coords.token, column_k], tokens_ready, t_k)
