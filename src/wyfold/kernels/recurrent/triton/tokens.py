"""What the launches have in common: how a token is read and seen, and what decides how they are compiled."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import Parameter

from wyfold.runtime.kernel_configs import dtype_word
from wyfold.tile.activation.triton import sigmoid
from wyfold.tile.decay.triton import gate_kind, load_token_gate, token_decay
from wyfold.tile.index.triton import load_token_number, load_token_row
from wyfold.tile.norm.triton import normalised

CLEARED: tl.constexpr = tl.constexpr(16)
"""Rows of output that a program without a state zeroes at a time."""

WIDE = torch.float32


def launch_key(stored: torch.dtype, K: int, V: int, g: Tensor | None, *, v_first: bool, alone: bool = False) -> str:
    """What a launch configuration depends on: how states are stored, their widths, the gate's kind.

    alone: every sequence has one token, and one slot for its state.
    """
    order = "VK" if v_first else "KV"
    return f"{dtype_word(stored)} K{K} V{V} {order} {gate_kind(g)}{' alone' * alone}"


def served_key(pool: Tensor, K: int, V: int, g: Tensor | None, *, v_first: bool, alone: bool) -> str:
    """`launch_key` of a call whose states lie in the slots of a pool.

    Where they do not begin at multiples of 16 bytes, or slots and heads are no multiples of 16 numbers apart, which is
    what a compiler is told, no token is alone: other launches than this one copy states by as much.
    """
    # A fake tensor, of which a plan is asked, has no address.
    first = pool.data_ptr() if type(pool) in (Tensor, Parameter) else pool.storage_offset() * pool.itemsize
    reached = first % 16 == 0 and all(step % 16 == 0 for step in pool.stride()[:2])
    return launch_key(pool.dtype, K, V, g, v_first=v_first, alone=alone and reached)


def launch_key_bwd(K: int, V: int) -> str:
    """The same of the walk back."""
    return f"K{K} V{V} bwd"


@triton.jit
def load_token(
    p_q,
    s_q,
    p_k,
    s_k,
    p_v,
    s_v,
    p_g,
    s_g,
    p_beta,
    s_beta,
    b,
    t,
    i_h,
    i_hv,
    column,
    here,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GATE: tl.constexpr,
):
    """One token as it lies in memory, all of it asked for before anything waits: q, k [BK], v [BV], gate, strength.

    Unless it is here, nothing is read.
    """
    b_k = load_token_row(p_k, s_k, b, t, i_h, 0, here, K, BK)
    b_q = load_token_row(p_q, s_q, b, t, i_h, 0, here, K, BK)
    b_v = load_token_row(p_v, s_v, b, t, i_hv, column, here, V, BV)
    x = load_token_gate(p_g, s_g, b, t, i_hv, here, GATE, K, BK)
    beta = 1.0
    if p_beta is not None:
        beta = load_token_number(p_beta, s_beta, b, t, i_hv, here)
    return b_q, b_k, b_v, x, beta


@triton.jit
def seen(
    b_q,
    b_k,
    b_v,
    x,
    beta,
    rate,
    bias,
    lower_bound,
    clamp,
    beta_most,
    GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NORM: tl.constexpr,
    LOGIT: tl.constexpr,
):
    """A token as the recurrence sees it: q and k normalised, v, decay of the state, write strength; float32."""
    b_q, b_k, b_v = b_q.to(tl.float32), b_k.to(tl.float32), b_v.to(tl.float32)
    if NORM:
        b_k, b_q = normalised(b_k), normalised(b_q)
    if LOGIT:
        beta = sigmoid(beta) * beta_most
    return b_q, b_k, b_v, token_decay(x, rate, bias, lower_bound, clamp, GATE, ACTIVATION), beta
