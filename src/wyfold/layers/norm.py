"""The norm at the exit of a recurrence."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wyfold.ops.norm import rms_norm_gated
from wyfold.runtime import check


class GatedRMSNorm(nn.Module):
    """Root-mean-square norm of the last dimension, times an activated gate.

        y = x * rsqrt(mean x^2 + eps) * weight * act(g)

    Args:
        width: Size of the last dimension, D.
        eps: Added to the mean square.
        activation: "swish" (Gated DeltaNet), "silu" (the same) or "sigmoid" (Kimi Delta Attention).
    """

    def __init__(self, width: int, *, eps: float = 1e-6, activation: str = "swish"):
        super().__init__()
        check.integer("GatedRMSNorm", "width", width, least=1)
        check.choice("GatedRMSNorm", "activation", activation, ("swish", "silu", "sigmoid"))
        self.eps = check.number("GatedRMSNorm", "eps", eps)
        self.activation = activation
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        """Normed and gated x.

        Args:
            x: [..., D].
            g: [..., D], shape of x. The gate before its activation.

        Returns:
            y: [..., D], dtype of x.
        """
        return rms_norm_gated(x, g, self.weight, activation=self.activation, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, activation={self.activation!r}"
