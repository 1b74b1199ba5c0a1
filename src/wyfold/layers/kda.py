"""Kimi Delta Attention layer: the delta rule with a decay per key channel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wyfold.layers import from_hf
from wyfold.layers.delta_net import DeltaMixer
from wyfold.layers.gated_delta_net import DecayParameters
from wyfold.layers.norm import GatedRMSNorm
from wyfold.layers.whole import whole_layer
from wyfold.ops.kda import chunk_kda, fused_recurrent_kda
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout


class KimiDeltaAttention(DeltaMixer):
    """Kimi Delta Attention, the layer of Kimi Linear: a decay per key channel, and low-rank gate projections.

        q, k, v = silu(conv(W_qkv x)),   beta = sigmoid(W_beta x),   a = W_decay2 W_decay1 x
        g = -exp(A_log) softplus(a + dt_bias)                      generic
        g = lower_bound * sigmoid(exp(A_log) (a + dt_bias))        bounded
        y = W_o (rms_norm(kda(q/|q|, k/|k|, v, g, beta)) * sigmoid(W_gate2 W_gate1 x + b_gate))

    Args:
        hidden_size: Width of x.
        num_heads: H, query and key heads.
        num_v_heads: HV, value heads, a multiple of H. None: H.
        head_dim: K, width of a query and key, 1 to 256.
        head_v_dim: V, width of a value, 1 to 512. None: K.
        conv_size: Length of the short convolution, 2 to 8.
        allow_neg_eigval: beta in [0, 2] instead of [0, 1] (arXiv:2411.12537).
        lower_bound: None: the generic gate. Below 0: the bounded one; in [-5, 0) it takes the operator's fast path.
        norm_eps: eps of the output norm.
        backend: Backend of every operator in the layer. None: the best available one, which on CUDA is never "eager".

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: A size is not supported by the operator, or lower_bound >= 0.

    Source:
        Kimi Linear, arXiv:2510.26692: Eq. (1); projections and gates in section 4, output gate in Eq. (10).

    Examples:
        >>> import torch
        >>> from wyfold.layers import KimiDeltaAttention
        >>> layer = KimiDeltaAttention(hidden_size=32, num_heads=2, head_dim=16)
        >>> layer(torch.randn(1, 5, 32)).shape
        torch.Size([1, 5, 32])
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
        eps = check.epsilon("KimiDeltaAttention", norm_eps, name="norm_eps")
        self.norm = GatedRMSNorm(self.head_v_dim, eps=eps, activation="sigmoid", backend=backend)

    @classmethod
    def from_hf(cls, layer: Any, *, backend: str | None = None) -> KimiDeltaAttention:
        """Copy a transformers layer with the parameter names of KimiLinearDeltaAttention, such as GLM-5 Next's.

        Args:
            layer: The layer to copy.
            backend: Backend of every operator in the copy.

        Raises:
            ValueError: The layer has other parameters, activations or settings of its gate.
        """
        op, names = "KimiDeltaAttention.from_hf", layer.state_dict().keys()
        if "forget_gate.A_log" not in names:
            raise ValueError(f"{op}: layer must have Kimi's gates, got {type(layer).__name__}")
        gate = ("f_a_proj.weight", "f_b_proj.weight", "A_log", "dt_bias")
        parts = ("q", "k", "v", "b", "g_a", "g_b", "o")
        needed = (*(f"{part}_proj.weight" for part in parts), *(f"forget_gate.{part}" for part in gate))
        needed = (*needed, "conv1d.weight", "o_norm.weight")
        source = from_hf.parameters(op, layer, needed, optional=("g_b_proj.bias",))
        from_hf.require_silu(op, layer)
        from_hf.refuse_settings(op, layer.forget_gate, ("head_dim", "num_heads", "qkv_dim", "safe_gate_lower_bound"))
        norm = from_hf.norm_settings(op, layer.o_norm)
        H, K = layer.num_heads, layer.head_dim
        bound = getattr(layer.forget_gate, "safe_gate_lower_bound", None)  # absent where gates are unbounded
        with torch.device("meta"):
            sizes = (layer.hidden_size, H, H, K, K, layer.conv_kernel_size)
            ours = cls(*sizes, lower_bound=bound, norm_eps=norm["eps"], backend=backend)
        ours.norm.activation = norm["activation"]
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

    def _as_one_function(self, x: Tensor, layout: SequenceLayout | None) -> Tensor | None:
        decay, gate = (self.decay_down, self.decay_up), (self.gate_down, self.gate_up)
        return whole_layer(self, x, layout, decay, gate, KimiDeltaAttention)
