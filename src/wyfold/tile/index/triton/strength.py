"""Write strength of tokens: from its tensor or its logits, and the adjoint."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from wyfold.tile.activation.triton import sigmoid, sigmoid_bwd
from wyfold.tile.index.triton import load_token_scalars


class Strength(NamedTuple):
    """Kernel argument: write strength of every token.

    Attributes:
        beta, s_beta: [B, T, HV] strength or its logit, and its strides; None for strength 1.
        most: Strength at which a logit saturates.
        erases: 1.0, or 0.0 for writes that erase nothing; None in kernels that do not ask.
    """

    beta: Any
    s_beta: Any
    most: Any
    erases: Any = None
    end: None = None


@triton.jit
def load_strength(strength, at, h, LOGIT: tl.constexpr, BT: tl.constexpr):
    """Load beta of every row, zero in padding; 1 where the caller gave none.   [BT]"""
    o_r = tl.arange(0, BT)
    if strength.beta is None:
        return tl.where(o_r < at.rows, 1.0, 0.0)
    else:  # without it the compiler also compiles the code after the return
        b_beta = load_token_scalars(strength.beta, strength.s_beta, at, h, BT)
        if LOGIT:
            b_beta = tl.where(o_r < at.rows, sigmoid(b_beta) * strength.most, 0.0)
        return b_beta


@triton.jit
def strength_bwd(strength, at, h, b_dbeta, BT: tl.constexpr):
    """Gradient of the logits that `load_strength` read, from that of beta.   [BT]

    Computed from the logits: 1 - beta / most would cancel where they are large.
    """
    b_beta = load_token_scalars(strength.beta, strength.s_beta, at, h, BT)
    return sigmoid_bwd(b_beta, b_dbeta) * strength.most
