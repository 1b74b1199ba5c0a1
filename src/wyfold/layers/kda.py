"""Kimi Delta Attention: the delta rule with a decay per key channel."""

from __future__ import annotations

from typing import Any

import torch
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
        backend: See `DeltaMixer`.

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
        backend: str | None = None,
    ):
        sizes = (hidden_size, num_heads, num_v_heads, head_dim, head_v_dim, conv_size)
        super().__init__(*sizes, allow_neg_eigval, backend)
        if lower_bound is not None and check.number("KimiDeltaAttention", "lower_bound", lower_bound) >= 0:
            raise ValueError(f"KimiDeltaAttention: lower_bound must be below 0, got {lower_bound}")
        self.lower_bound = lower_bound
        self.decay_down = nn.Linear(hidden_size, self.head_dim, bias=False)
        self.decay_up = nn.Linear(self.head_dim, self.num_v_heads * self.head_dim, bias=False)
        self.decay_parameters = DecayParameters(self.num_v_heads, self.head_dim, bounded=lower_bound is not None)
        self.gate_down = nn.Linear(hidden_size, self.head_v_dim, bias=False)
        self.gate_up = nn.Linear(self.head_v_dim, self.value_size)
        self.norm = GatedRMSNorm(self.head_v_dim, eps=norm_eps, activation="sigmoid", backend=backend)

    @classmethod
    def from_hf(cls, layer: Any, *, backend: str | None = None) -> KimiDeltaAttention:
        """A copy of a transformers layer that names its parameters as KimiLinearDeltaAttention does; GLM-5 Next's too.

        Args:
            layer: The layer to copy.
            backend: Of every operator in the copy.

        Raises:
            ValueError: a layer of another kind.
        """
        source = {name: tensor.detach().clone() for name, tensor in layer.state_dict().items()}
        if "forget_gate.A_log" not in source:
            raise ValueError(f"KimiDeltaAttention.from_hf: layer must have Kimi's gates, got {type(layer).__name__}")
        H, K = layer.num_heads, layer.head_dim
        bound = getattr(layer.forget_gate, "safe_gate_lower_bound", None)
        with torch.device("meta"):
            sizes = (layer.hidden_size, H, H, K, K, layer.conv_kernel_size)
            ours = cls(*sizes, lower_bound=bound, norm_eps=layer.layer_norm_epsilon, backend=backend)
        weights = {
            "qkv.weight": torch.cat([source[f"{part}_proj.weight"] for part in "qkv"]),
            "conv.weight": source["conv1d.weight"].squeeze(1),
            "beta.weight": source["b_proj.weight"],
            "decay_down.weight": source["forget_gate.f_a_proj.weight"],
            "decay_up.weight": source["forget_gate.f_b_proj.weight"],
            "decay_parameters.A_log": source["forget_gate.A_log"].reshape(H),  # stored as [1, 1, H, 1]
            "decay_parameters.dt_bias": source["forget_gate.dt_bias"].reshape(H, K),
            "gate_down.weight": source["g_a_proj.weight"],
            "gate_up.weight": source["g_b_proj.weight"],
            "gate_up.bias": source.get("g_b_proj.bias", torch.zeros_like(source["g_b_proj.weight"][:, 0])),
            "norm.weight": source["o_norm.weight"],
            "out.weight": source["o_proj.weight"],
        }
        ours.load_state_dict(weights, assign=True)
        return ours

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
