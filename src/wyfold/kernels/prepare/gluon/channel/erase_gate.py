"""Erase gate of the key channels, by which the low-rank rule "keys" multiplies its erasing rows."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.kernels.prepare.gluon.channel.arguments import BK


@gluon.jit
def load_erase_gate(tokens, at, h, c, FULL: gl.constexpr, BT: gl.constexpr, K: gl.constexpr):
    """Load slice c of the channels of head h, zeros past the last slice; zeros where there is no gate.   [BT, BK]"""
    LB: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    if tokens.b is None:
        return gl.zeros([BT, BK], gl.bfloat16, LB)
    else:
        o_s = gl.arange(0, BT, layout=gl.SliceLayout(1, LB))
        o_k = c * BK + gl.arange(0, BK, layout=gl.SliceLayout(0, LB))
        first = tokens.b + (at.b * tokens.s_b[0] + at.t * tokens.s_b[1] + h * tokens.s_b[2])
        offsets = o_s.to(gl.int64)[:, None] * tokens.s_b[1] + o_k.to(gl.int64)[None, :] * tokens.s_b[3]
        inside = o_s < BT
        if not FULL:
            inside = o_s < at.rows
        return gl.load(first + offsets, mask=inside[:, None] & (o_k < K)[None, :], other=0.0)


@gluon.jit
def erasing_rows(b_k, tokens, erase, ROWS: gl.constexpr):
    """The rows that erase: keys, or with ROWS -(b k)."""
    if not ROWS:
        return b_k
    elif tokens.b is None:
        return -b_k
    else:
        return -(b_k * erase.to(gl.float32))
