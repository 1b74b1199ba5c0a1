"""Token loads, token activation and launch configuration keys, shared by the launches of `recurrent`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import Parameter

from wyfold.runtime.kernel_configs import LaunchKey, dtype_word
from wyfold.tile.activation.triton import sigmoid
from wyfold.tile.decay.triton import gate_kind, load_token_gate, token_decay
from wyfold.tile.index.triton import load_token_number, load_token_row
from wyfold.tile.norm.triton import normalised

CLEARED: tl.constexpr = tl.constexpr(16)
"""Rows of output zeroed per store by a program without a state."""

WIDE = torch.float32


def launch_key(
    stored: torch.dtype, K: int, V: int, g: Tensor | None, *, v_first: bool, alone: bool = False
) -> LaunchKey:
    """Launch configuration key: the states' dtype, widths and layout, and the gate's kind.

    `alone` means that every sequence has one token, and one slot for its state.
    """
    order = "VK" if v_first else "KV"
    return LaunchKey(dtype_word(stored), K, V, order=order, gate=gate_kind(g), alone=alone)


def served_key(pool: Tensor, K: int, V: int, g: Tensor | None, *, v_first: bool, alone: bool) -> LaunchKey:
    """`launch_key` of a call whose states are in the slots of a pool.

    `alone` requires states that begin at multiples of 16 bytes, and strides of slots and heads that are multiples of 16
    elements: the kernels for single tokens copy states in vectors of 16 bytes, and are compiled for these strides.
    """
    # A fake tensor, used for planning, has no address.
    first = pool.data_ptr() if type(pool) in (Tensor, Parameter) else pool.storage_offset() * pool.itemsize
    aligned = first % 16 == 0 and all(step % 16 == 0 for step in pool.stride()[:2])
    return launch_key(pool.dtype, K, V, g, v_first=v_first, alone=alone and aligned)


def launch_key_bwd(K: int, V: int) -> LaunchKey:
    """Launch configuration key of `recurrent_bwd`."""
    return LaunchKey(K=K, V=V, launch="bwd")


class Inputs(NamedTuple):
    """Kernel argument: tokens, each with its strides.

    Attributes:
        q, s_q, k, s_k, v, s_v: [B, T, H, K] and [B, T, HV, V].
        o, s_o: Output, written; None where there is none.
    """

    q: Any
    s_q: Any
    k: Any
    s_k: Any
    v: Any
    s_v: Any
    o: Any = None
    s_o: Any = None
    end: None = None


@triton.jit
def load_token(
    inputs, gate, strength, b, t, i_h, i_hv, column, exists,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Load one token's raw q, k [BK], v [BV], gate and write strength; all loads are issued before any is used.

    Nothing is read unless `exists`.
    """
    b_k = load_token_row(inputs.k, inputs.s_k, b, t, i_h, 0, exists, K, BK)
    b_q = load_token_row(inputs.q, inputs.s_q, b, t, i_h, 0, exists, K, BK)
    b_v = load_token_row(inputs.v, inputs.s_v, b, t, i_hv, column, exists, V, BV)
    x = load_token_gate(gate.g, gate.s_g, b, t, i_hv, exists, GATE, K, BK)
    beta = 1.0
    if strength.beta is not None:
        beta = load_token_number(strength.beta, strength.s_beta, b, t, i_hv, exists)
    return b_q, b_k, b_v, x, beta


@triton.jit
def activate_token(
    b_q, b_k, b_v, x, beta, rate, bias, gate, strength,
    GATE: tl.constexpr, ACTIVATION: tl.constexpr, NORM: tl.constexpr, LOGIT: tl.constexpr,
):  # fmt: skip
    """Apply norm, gate and sigmoid to a raw token: q, k, v, decay of the state and write strength, all float32."""
    b_q, b_k, b_v = b_q.to(tl.float32), b_k.to(tl.float32), b_v.to(tl.float32)
    if NORM:
        b_k, b_q = normalised(b_k), normalised(b_q)
    if LOGIT:
        beta = sigmoid(beta) * strength.most
    decay = token_decay(x, rate, bias, gate.lower_bound, gate.clamp, GATE, ACTIVATION)
    return b_q, b_k, b_v, decay, beta
