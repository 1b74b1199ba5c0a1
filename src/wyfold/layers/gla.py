"""Gated linear attention layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wyfold.context_parallel.context import ContextParallel
from wyfold.kernels import table
from wyfold.layers.cache import LayerCache
from wyfold.layers.conv import ShortConvolution
from wyfold.layers.delta_net import grouped_heads, head_widths
from wyfold.layers.layer_call import run_rule, sequences
from wyfold.layers.norm import GatedRMSNorm
from wyfold.ops.gla import chunk_gla, fused_recurrent_gla
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout


class GatedLinearAttention(nn.Module):
    """Gated linear attention layer: a decay per key channel, and writes that are added.

        q, k, v = W_qkv x,   g = logsigmoid(W_decay2 W_decay1 x + b_decay) / 16
        y = W_o (rms_norm(gla(q, k, v, g)) * silu(W_gate x))

    With `short_conv`, q, k, v = silu(conv(W_qkv x)), as in layers of the delta rules. Without it a layer writes the
    value of a token under the key of the same token, so a pair of a key token and a value token takes a layer before.

    Args:
        hidden_size: Width of x.
        num_heads: H, query and key heads.
        num_v_heads: HV, value heads, a multiple of H. None: H.
        head_dim: K, width of a query and key, 1 to 256.
        head_v_dim: V, width of a value, 1 to 512. None: K. The paper's is 2 K.
        short_conv: Length of a short convolution of q, k and v, 2 to 8. None: no convolution, as in the paper.
        decay_rank: Inner width of the projection of the decays.
        decay_normalizer: Divisor of the log decays, 16 in the paper.
        norm_eps: eps of the output norm.
        backend: Backend of every operator in the layer. None: the best available one, which on CUDA is never "eager".

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: A size is not supported by the operator.

    Source:
        GLA, arXiv:2312.06635, section 4.

    Examples:
        >>> import torch
        >>> from wyfold.layers import GatedLinearAttention
        >>> layer = GatedLinearAttention(hidden_size=32, num_heads=2, head_dim=16, head_v_dim=32)
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
        *,
        short_conv: int | None = None,
        decay_rank: int = 16,
        decay_normalizer: float = 16.0,
        norm_eps: float = 1e-6,
        backend: str | None = None,
    ):
        super().__init__()
        name = "GatedLinearAttention"
        self.hidden_size = check.integer(name, "hidden_size", hidden_size, least=1)
        self.num_heads, self.num_v_heads = grouped_heads(name, num_heads, num_v_heads)
        self.head_dim, self.head_v_dim = head_widths(name, head_dim, head_v_dim)
        check.integer(name, "decay_rank", decay_rank, least=1)
        self.decay_normalizer = check.number(name, "decay_normalizer", decay_normalizer)
        if self.decay_normalizer <= 0:
            raise ValueError(f"{name}: decay_normalizer must be above 0, got {decay_normalizer}")
        check.choice(name, "backend", backend, (None, *table.BACKENDS))
        self.backend = backend
        keys, values = self.num_heads * self.head_dim, self.num_v_heads * self.head_v_dim
        self.channels = [keys, keys, values]  # of q, k and v
        self.qkv = nn.Linear(hidden_size, sum(self.channels), bias=False)
        self.conv: ShortConvolution | None = None
        if short_conv is not None:
            check.choice(name, "short_conv", short_conv, range(2, 9))
            self.conv = ShortConvolution(sum(self.channels), short_conv, backend=backend)
        self.decay_down = nn.Linear(hidden_size, decay_rank, bias=False)
        self.decay_up = nn.Linear(decay_rank, self.num_v_heads * self.head_dim)
        self.gate = nn.Linear(hidden_size, values, bias=False)
        eps = check.epsilon(name, norm_eps, name="norm_eps")
        self.norm = GatedRMSNorm(self.head_v_dim, eps=eps, backend=backend)
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
            cache: `LayerCache` with "state" [N, HV, K, V], and with "conv" [N, D, W-1] if there is a convolution; the
                call continues from these and replaces them. An empty cache starts new sequences.
            cp_context: From `wyfold.cp.build_cp_context`, instead of layout and cache. x is this rank's shard of the
                tokens; sequences cross ranks. Each rank gets its partial gradient of every parameter.

        Returns:
            y: [B, T, hidden_size], dtype of x. Exact zeros past the last boundary.

        Raises:
            TypeError: x has another dtype than the parameters outside autocast, or cache is not a `LayerCache`.
            ValueError: x, layout and cache do not fit together.
        """
        holds = {"state": f"N {self.num_v_heads} {self.head_dim} {self.head_v_dim}"}
        if self.conv is not None:
            holds["conv"] = f"N {sum(self.channels)} S"
        sequences("GatedLinearAttention", x, self.hidden_size, self.qkv, layout, cache, holds, cp_context)
        qkv = self.qkv(x)
        if self.conv is not None:
            qkv = self.conv(qkv, layout=layout, cache=cache, cp_context=cp_context)
        q, k, v = qkv.split(self.channels, dim=-1)
        q, k = (rows.unflatten(-1, (self.num_heads, self.head_dim)) for rows in (q, k))
        v = v.unflatten(-1, (self.num_v_heads, self.head_v_dim))
        o = run_rule(
            (chunk_gla, fused_recurrent_gla),
            (q, k, v, self._log_decays(x)),
            layout=layout,
            cache=cache,
            cp_context=cp_context,
            backend=self.backend,
        )
        y: Tensor = self.out(self.norm(o, self.gate(x).view_as(o)).flatten(2))
        return y

    def _log_decays(self, x: Tensor) -> Tensor:
        """[B, T, HV, K] log decays, computed in float32 or wider."""
        raw = self.decay_up(self.decay_down(x)).unflatten(-1, (self.num_v_heads, self.head_dim))
        return F.logsigmoid(raw.to(torch.promote_types(raw.dtype, torch.float32))) / self.decay_normalizer
