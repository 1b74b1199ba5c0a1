"""Register layouts of a consumer, and loads and stores of states."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

IN_REGISTERS = gl.constexpr(128)
"""Most channels of a state whose rounded copy, as a left operand, fits into registers beside it."""


class Layouts(NamedTuple):
    """Register layouts of a consumer with tiles of value rows.

    Attributes:
        state, chunk: Accumulators [BW, K] and [BW, BT].
        state_left, chunk_left: Left operands, which rounded accumulators are without an exchange.
        row: A number per token of an accumulator `chunk`.
    """

    state: Any
    chunk: Any
    state_left: Any
    chunk_left: Any
    row: Any


@gluon.constexpr_function
def layouts(K, BT, warps):
    """The layouts of a consumer of `warps` warps, for K channels and chunks of BT tokens."""
    state = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, K, 16])
    chunk = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, BT, 16])
    state_left, chunk_left = gl.DotOperandLayout(0, state, 2), gl.DotOperandLayout(0, chunk, 2)
    return Layouts(state, chunk, state_left, chunk_left, gl.SliceLayout(0, chunk))


@gluon.jit
def load_state(p, strides, n, there, p_border, s_border, border, exists, hv, row, SIZES: gl.constexpr):
    """Load BW value rows of a state [N, HV, K, V], from `row` on, as float32.   [BW, K]

    It is the sequence's own if `there` is true or None, else that of the border if the segment exists. A state that is
    None is zeros.
    """
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    K: gl.constexpr = SIZES.K
    L: gl.constexpr = layouts(SIZES.K, SIZES.BT, gl.num_warps()).state
    o_v, o_k = row + gl.arange(0, BW, layout=gl.SliceLayout(1, L)), gl.arange(0, K, layout=gl.SliceLayout(0, L))
    S = gl.zeros([BW, K], gl.float32, L)
    if there is None:
        if p is not None:
            S = gl.load(p + _offsets(strides, n, hv, o_v, o_k)).to(gl.float32)
    elif there:
        if p is not None:
            S = gl.load(p + _offsets(strides, n, hv, o_v, o_k)).to(gl.float32)
    elif p_border is not None:
        if exists:
            S = gl.load(p_border + _offsets(s_border, border, hv, o_v, o_k))
    return S


@gluon.jit
def store_state(p, strides, n, wanted, hv, row, S, SIZES: gl.constexpr):
    """Store BW value rows of a state, from `row` on, rounded to its dtype, if `wanted` is true or None."""
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    K: gl.constexpr = SIZES.K
    L: gl.constexpr = layouts(SIZES.K, SIZES.BT, gl.num_warps()).state
    if p is not None:
        o_v, o_k = row + gl.arange(0, BW, layout=gl.SliceLayout(1, L)), gl.arange(0, K, layout=gl.SliceLayout(0, L))
        offsets = _offsets(strides, n, hv, o_v, o_k)
        if wanted is None:
            gl.store(p + offsets, S.to(p.dtype.element_ty))
        elif wanted:
            gl.store(p + offsets, S.to(p.dtype.element_ty))


@gluon.jit
def _offsets(strides, n, hv, o_v, o_k):
    """Offsets of value rows o_v of a state in [N, HV, K, V].   [BW, K]

    Sums are taken from the left, which saves additions of 64 bits beside `tile.state.gluon.state_offsets`.
    """
    first = n * strides[0] + hv * strides[1]
    return first + o_v.to(gl.int64)[:, None] * strides[3] + o_k.to(gl.int64)[None, :] * strides[2]
