"""Elementwise pieces of an RWKV-7 block under fla's names, in plain PyTorch.

Wyfold has no kernels for them. Each computes in float32 (float64 for float64 inputs), also in its backward, and rounds
its results to the dtype of its first argument. A name that ends in `_ref` or `_torch`, or begins with `torch_`, is
fla's reference; here it is the same function.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.runtime import check


def fused_addcmul_rwkv7(
    hidden_states: Tensor,
    delta: Tensor,
    xr: Tensor,
    xw: Tensor,
    xk: Tensor,
    xv: Tensor,
    xa: Tensor,
    xg: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Six mixes of tokens with the tokens before them: hidden_states + delta x, for each x.

    Args:
        hidden_states, delta: [B, T, D], and the difference to the token before.
        xr, xw, xk, xv, xa: [1, 1, D] or [D].
        xg: As these, or None, whose mix is None.
    """
    h, d = _wide(hidden_states), _wide(delta)
    weights = (xr, xw, xk, xv, xa, xg)
    return tuple(None if x is None else torch.addcmul(h, d, _wide(x)).to(hidden_states.dtype) for x in weights)


def fused_k_rwkv7(
    k: Tensor, a: Tensor, ka: Tensor, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None
) -> Tensor:
    """Keys scaled by a mix of 1 and the rates: k (1 + (a - 1) ka).

    Args:
        k, a: [B, T, D].
        ka: [D] or [1, 1, D].
        cu_seqlens, cu_seqlens_cpu: Accepted and not needed: tokens do not depend on each other.
    """
    return (_wide(k) * (1 + (_wide(a) - 1) * _wide(ka))).to(k.dtype)


def k_update_ref(k: Tensor, a: Tensor, ka: Tensor) -> Tensor:
    """`fused_k_rwkv7`."""
    return fused_k_rwkv7(k, a, ka)


def gate_output_correction(o: Tensor, r: Tensor, k: Tensor, r_k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Add the token's value times a number, and multiply by the output gate: (o + (r . (k r_k)) v) g.

    Args:
        o, g: [B, T, H D].
        r, k, v: [B, T, H, D].
        r_k: [H, D].
    """
    own = (_wide(r) * _wide(k) * _wide(r_k)).sum(-1, keepdim=True) * _wide(v)
    return ((_wide(o) + own.reshape(o.shape)) * _wide(g)).to(o.dtype)


gate_output_correction_ref = gate_output_correction
torch_addcmul_rwkv7 = fused_addcmul_rwkv7


def channel_mixing_rwkv7(
    x: Tensor, x_prev: Tensor, x_k: Tensor, key_weight: Tensor, value_weight: Tensor, inplace: bool = True
) -> tuple[Tensor, Tensor]:
    """The network of a block: relu(mix K)^2 V, where mix is x + (the token before - x) x_k.

    Args:
        x: [B, T, D].
        x_prev: [B, D] or [B, 1, D], the token before the first.
        x_k: [1, 1, D].
        key_weight, value_weight: K [D, F] and V [F, D].
        inplace: Accepted and not needed: no argument is written.

    Returns:
        y: [B, T, D].
        last: [T, D], x of the last row of the batch, as fla returns it.
    """
    check.shapes("channel_mixing_rwkv7", x=(x, "B T D"))
    wide = _wide(x)  # once, so that the gradients of its uses are added in float32
    before = torch.cat([_wide(x_prev).reshape(x.shape[0], 1, x.shape[2]), wide[:, :-1]], 1)
    mix = torch.addcmul(wide, before - wide, _wide(x_k)).to(x.dtype)
    hidden = _wide(mix @ key_weight).relu().square().to(x.dtype)
    return hidden @ value_weight, x[-1]


def channel_mixing_rwkv7_torch(
    x: Tensor, x_prev: Tensor, x_k: Tensor, key_weight: Tensor, value_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """`channel_mixing_rwkv7`."""
    return channel_mixing_rwkv7(x, x_prev, x_k, key_weight, value_weight)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
