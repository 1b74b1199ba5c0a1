"""Kimi Delta Attention: the delta rule with a decay per key channel."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from wyfold.layers.delta_net import DeltaMixer
from wyfold.layers.gated_delta_net import DecayParameters
from wyfold.layers.norm import GatedRMSNorm
from wyfold.ops.kda import chunk_kda, fused_recurrent_kda
from wyfold.runtime import check


class KimiDeltaAttention(DeltaMixer):
    """The layer of Kimi Linear: each key channel forgets at its own pace; gates of low rank.

        q, k, v = silu(conv(W_qkv x)),   beta = sigmoid(W_beta x),   a = W_decay2 W_decay1 x
        g = -exp(A_log) softplus(a + dt_bias)                      generic
        g = lower_bound * sigmoid(exp(A_log) (a + dt_bias))        bounded
        y = W_o (rms_norm(kda(q/|q|, k/|k|, v, g, beta)) * sigmoid(W_gate2 W_gate1 x + b_gate))

    Args:
        hidden_size, num_heads, num_v_heads, head_dim, head_v_dim, conv_size, allow_neg_eigval: See `DeltaMixer`.
        lower_bound: None for the generic gate; below 0 for the bounded one, in [-5, 0) for the operator's fast path.
        norm_eps: eps of the output norm.

    Source:
        arXiv:2510.26692.
    """

    operators = (chunk_kda, fused_recurrent_kda)

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_v_heads: int | None = None,
        head_dim: int = 128,
        head_v_dim: int | None = None,
        conv_size: int = 4,
        *,
        allow_neg_eigval: bool = False,
        lower_bound: float | None = None,
        norm_eps: float = 1e-6,
    ):
        super().__init__(hidden_size, num_heads, num_v_heads, head_dim, head_v_dim, conv_size, allow_neg_eigval)
        if lower_bound is not None and check.number("KimiDeltaAttention", "lower_bound", lower_bound) >= 0:
            raise ValueError(f"KimiDeltaAttention: lower_bound must be below 0, got {lower_bound}")
        self.lower_bound = lower_bound
        self.decay_down = nn.Linear(hidden_size, self.head_dim, bias=False)
        self.decay_up = nn.Linear(self.head_dim, self.num_v_heads * self.head_dim, bias=False)
        self.decay_parameters = DecayParameters(self.num_v_heads, self.head_dim, bounded=lower_bound is not None)
        self.gate_down = nn.Linear(hidden_size, self.head_v_dim, bias=False)
        self.gate_up = nn.Linear(self.head_v_dim, self.value_size)
        self.norm = GatedRMSNorm(self.head_v_dim, eps=norm_eps, activation="sigmoid")

    def gate_arguments(self, x: Tensor) -> dict[str, Any]:
        A_log, dt_bias = self.decay_parameters()
        return {
            "g": self.decay_up(self.decay_down(x)).unflatten(-1, (self.num_v_heads, self.head_dim)),
            "use_gate_in_kernel": True,
            "A_log": A_log,
            "dt_bias": dt_bias,
            "lower_bound": self.lower_bound,
        }

    def read_out(self, o: Tensor, x: Tensor) -> Tensor:
        return self.norm(o, self.gate_up(self.gate_down(x)).view_as(o))
