"""Gated RMS norm, applied to the output of a recurrence."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wyfold.kernels import table
from wyfold.ops.norm import rms_norm_gated
from wyfold.runtime import check


class GatedRMSNorm(nn.Module):
    """Root-mean-square norm of the last dimension, times an activated gate.

        y = x * rsqrt(mean x^2 + eps) * weight * act(g)

    Args:
        width: Size of the last dimension, D.
        eps: Added to the mean square.
        activation: "swish" (Gated DeltaNet), "silu" (the same) or "sigmoid" (Kimi Delta Attention).
        round_before_weight: Round the normalised row to x's dtype before the weight, as in the training of Qwen's
            checkpoints.
        backend: Backend of the operator. None: the best available one, which on CUDA is never "eager".

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: width < 1, eps not above 0, an unknown activation, or an unknown backend.

    Source:
        Gated DeltaNet, arXiv:2412.06464v3, section 3.4; Kimi Linear, arXiv:2510.26692, Eq. (10).
    """

    def __init__(
        self,
        width: int,
        *,
        eps: float = 1e-6,
        activation: str = "swish",
        round_before_weight: bool = False,
        backend: str | None = None,
    ):
        super().__init__()
        check.integer("GatedRMSNorm", "width", width, least=1)
        check.choice("GatedRMSNorm", "activation", activation, ("swish", "silu", "sigmoid"))
        self.eps = check.epsilon("GatedRMSNorm", eps)
        check.flag("GatedRMSNorm", round_before_weight=round_before_weight)
        check.choice("GatedRMSNorm", "backend", backend, (None, *table.BACKENDS))
        self.activation, self.round_before_weight, self.backend = activation, round_before_weight, backend
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to ones."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        """Normalise and gate x.

        Args:
            x: [..., D].
            g: [..., D], shape of x. Pre-activation of the gate.

        Returns:
            y: [..., D], dtype of x.
        """
        return rms_norm_gated(
            x,
            g,
            self.weight,
            activation=self.activation,
            eps=self.eps,
            round_before_weight=self.round_before_weight,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, activation={self.activation!r}"
