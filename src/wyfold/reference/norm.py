"""Norms over the last axis: l2norm of queries and keys, gated RMS norm of outputs."""

import torch
import torch.nn.functional as F
from torch import Tensor

from wyfold.reference.gates import sigmoid
from wyfold.reference.sequences import working_dtype


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """Normalise rows to unit length, `x / sqrt(sum x^2 + eps)`.

    Args:
        x: [..., K], any float. A zero row stays zero.
        eps: Added to the squared length.
        output_dtype: Dtype of the result. None: dtype of x.

    Returns:
        Shape of x, computed in float32 or wider and rounded once.
    """
    wide = x.to(working_dtype(x))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(output_dtype or x.dtype)


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "swish",
    eps: float = 1e-6,
    norm_before_gate: bool = True,
    round_before_weight: bool = False,
) -> Tensor:
    """Root-mean-square norm of rows, combined with an output gate.

        rms(z) = z / sqrt(mean z^2 + eps)
        y = (rms(x) weight + bias) act(g)           norm_before_gate
        y = rms(x act(g)) weight + bias             otherwise

    Args:
        x: [..., V], any float.
        g: [..., V], any float. Pre-activation of the output gate; not a decay.
        weight: [V].
        bias: [V] or None.
        activation: "swish" or "silu": g sigmoid(g); "sigmoid": sigmoid(g).
        eps: Added to the mean square.
        norm_before_gate: Normalise x before it is gated, or after.
        round_before_weight: Round the normalised row to x's dtype before it is multiplied by the weight.

    Returns:
        y: [..., V], dtype of x.
    """
    work = working_dtype(x, g, weight, bias)
    gate = sigmoid(g.to(work)) if activation == "sigmoid" else F.silu(g.to(work))
    z = x.to(work) if norm_before_gate else x.to(work) * gate
    z = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)
    if round_before_weight:
        z = z.to(x.dtype).to(work)
    y = z * weight.to(work)
    if bias is not None:
        y = y + bias.to(work)
    return (y * gate if norm_before_gate else y).to(x.dtype)
