"""Gated DeltaNet-2 layer: the delta rule with a decay and an erase gate per key channel, and a write gate."""

from __future__ import annotations

from torch import Tensor, nn

from wyfold.context_parallel.context import ContextParallel
from wyfold.kernels import table
from wyfold.layers.cache import LayerCache
from wyfold.layers.conv import ShortConvolution
from wyfold.layers.delta_net import grouped_heads, head_widths
from wyfold.layers.gated_delta_net import DecayParameters
from wyfold.layers.layer_call import run_rule, sequences
from wyfold.layers.norm import GatedRMSNorm
from wyfold.ops.gates import fused_beta_sigmoid
from wyfold.ops.gdn2 import chunk_gdn2, fused_recurrent_gdn2
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout


class GatedDeltaNet2(nn.Module):
    """Gated DeltaNet-2 layer: each token erases per key channel and writes per value channel.

        q, k, v = silu(conv(W_qkv x)),   b = sigmoid(W_erase x),   w = sigmoid(W_write x)
        g = -exp(A_log) softplus(W_decay2 W_decay1 x + dt_bias)
        y = W_o (rms_norm(gdn2(q/|q|, k/|k|, v, g, b, w)) * sigmoid(W_gate2 W_gate1 x + b_gate))

    Args:
        hidden_size: Width of x.
        num_heads: H, query and key heads.
        num_v_heads: HV, value heads, a multiple of H. None: H.
        head_dim: K, width of a query and key, 1 to 256.
        head_v_dim: V, width of a value, 1 to 512. None: K.
        conv_size: Length of the short convolution, 2 to 8.
        allow_neg_eigval: b in [0, 2] instead of [0, 1] (arXiv:2411.12537).
        norm_eps: eps of the output norm.
        backend: Backend of every operator in the layer. None: the best available one, which on CUDA is never "eager".

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: A size is not supported by the operator.

    Source:
        Gated DeltaNet-2, arXiv:2605.22791, Eqs. (9) and (10).

    Examples:
        >>> import torch
        >>> from wyfold.layers import GatedDeltaNet2
        >>> layer = GatedDeltaNet2(hidden_size=32, num_heads=2, head_dim=16)
        >>> layer(torch.randn(1, 5, 32)).shape
        torch.Size([1, 5, 32])
    """

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
        norm_eps: float = 1e-6,
        backend: str | None = None,
    ):
        super().__init__()
        name = "GatedDeltaNet2"
        self.hidden_size = check.integer(name, "hidden_size", hidden_size, least=1)
        self.num_heads, self.num_v_heads = grouped_heads(name, num_heads, num_v_heads)
        self.head_dim, self.head_v_dim = head_widths(name, head_dim, head_v_dim)
        check.flag(name, allow_neg_eigval=allow_neg_eigval)
        check.choice(name, "backend", backend, (None, *table.BACKENDS))
        self.allow_neg_eigval, self.backend = allow_neg_eigval, backend
        keys, values = self.num_heads * self.head_dim, self.num_v_heads * self.head_v_dim
        erased = self.num_v_heads * self.head_dim
        self.channels = [keys, keys, values]  # of q, k and v
        self.qkv = nn.Linear(hidden_size, sum(self.channels), bias=False)
        self.conv = ShortConvolution(sum(self.channels), conv_size, backend=backend)
        self.erase = nn.Linear(hidden_size, erased, bias=False)
        self.write = nn.Linear(hidden_size, values, bias=False)
        self.decay_down = nn.Linear(hidden_size, self.head_dim, bias=False)
        self.decay_up = nn.Linear(self.head_dim, erased, bias=False)
        self.decay_parameters = DecayParameters(self.num_v_heads, self.head_dim)
        self.gate_down = nn.Linear(hidden_size, self.head_v_dim, bias=False)
        self.gate_up = nn.Linear(self.head_v_dim, values)
        eps = check.epsilon(name, norm_eps, name="norm_eps")
        self.norm = GatedRMSNorm(self.head_v_dim, eps=eps, activation="sigmoid", backend=backend)
        self.out = nn.Linear(values, hidden_size, bias=False)

    def forward(
        self,
        x: Tensor,
        *,
        layout: SequenceLayout | None = None,
        cache: LayerCache | None = None,
        cp_context: ContextParallel | None = None,
    ) -> Tensor:
        """Mix each sequence over time.

        Args:
            x: [B, T, hidden_size].
            layout: Boundaries of packed sequences, for which B is 1. No information crosses a boundary.
            cache: `LayerCache` with "conv" [N, D, W-1] and "state" [N, HV, K, V]; the call continues from these and
                replaces them. An empty cache starts new sequences.
            cp_context: From `wyfold.cp.build_cp_context`, instead of layout and cache. x is this rank's shard of the
                tokens; sequences cross ranks. Each rank gets its partial gradient of every parameter.

        Returns:
            y: [B, T, hidden_size], dtype of x. Exact zeros past the last boundary.

        Raises:
            TypeError: x has another dtype than the parameters outside autocast, or cache is not a `LayerCache`.
            ValueError: x, layout and cache do not fit together.
        """
        D, HV, K, V = sum(self.channels), self.num_v_heads, self.head_dim, self.head_v_dim
        holds = {"conv": f"N {D} S", "state": f"N {HV} {K} {V}"}
        sequences("GatedDeltaNet2", x, self.hidden_size, self.qkv, layout, cache, holds, cp_context)
        qkv = self.conv(self.qkv(x), layout=layout, cache=cache, cp_context=cp_context)
        q, k, v = qkv.split(self.channels, dim=-1)
        q, k = (rows.unflatten(-1, (self.num_heads, self.head_dim)) for rows in (q, k))
        A_log, dt_bias = self.decay_parameters()
        erase, write = self._of_heads(self.erase(x)), self._of_heads(self.write(x))
        rows = (
            q,
            k,
            v.unflatten(-1, (self.num_v_heads, self.head_v_dim)),
            self._of_heads(self.decay_up(self.decay_down(x))),
            fused_beta_sigmoid(erase, 2.0 if self.allow_neg_eigval else 1.0, backend=self.backend),
            fused_beta_sigmoid(write, backend=self.backend),
        )
        o = run_rule(
            (chunk_gdn2, fused_recurrent_gdn2),
            rows,
            layout=layout,
            cache=cache,
            cp_context=cp_context,
            backend=self.backend,
            options={
                "use_qk_l2norm_in_kernel": True,
                "use_gate_in_kernel": True,
                "A_log": A_log,
                "dt_bias": dt_bias,
            },
        )
        y: Tensor = self.out(self.norm(o, self.gate_up(self.gate_down(x)).view_as(o)).flatten(2))
        return y

    def _of_heads(self, x: Tensor) -> Tensor:
        """[B, T, HV W] -> [B, T, HV, W]."""
        return x.unflatten(-1, (self.num_v_heads, -1))
