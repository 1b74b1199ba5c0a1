"""Gated DeltaNet-2's layer under fla's name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wyfold.integrations.fla.low_rank import chunk_gdn2, fused_recurrent_gdn2
from wyfold.integrations.fla.mixer import Mixer, check_sizes, output_norm, step_bias, undecayed, whole
from wyfold.integrations.fla.recurrences import Result


class GatedDeltaNet2(Mixer):
    """Gated DeltaNet-2; fla's layer of that name.

    Args:
        hidden_size: Width of input and output.
        expand_v: V in units of K. V is at most 512.
        head_dim: K, 1 to 256.
        num_heads: H, heads of queries, keys, decays and erase gates.
        num_v_heads: HV, a multiple of H. None: H.
        mode: "chunk" or "fused_recurrent", the form used in inference; short inputs and training choose by themselves.
        use_short_conv: Convolve q, k and v over time.
        allow_neg_eigval: Double the erase gate.
        conv_size, conv_bias: Filter length, and whether the convolutions have a bias.
        layer_idx: Number of the layer in a cache.
        norm_eps: eps of the output norm.
        ignored: Accepted and ignored, as in fla.

    Source:
        arXiv:2605.22791.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1.0,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        **ignored: object,
    ):
        super().__init__()
        counts = {"hidden_size": hidden_size, "num_heads": num_heads, "num_v_heads": num_v_heads, "head_dim": head_dim}
        check_sizes("GatedDeltaNet2", counts, {"expand_v": expand_v, "norm_eps": norm_eps})
        self.mode, self.hidden_size, self.expand_v, self.head_dim = mode, hidden_size, expand_v, head_dim
        self.num_heads, self.num_v_heads = num_heads, num_heads if num_v_heads is None else num_v_heads
        self.use_short_conv, self.conv_size, self.conv_bias = use_short_conv, conv_size, conv_bias
        self.allow_neg_eigval, self.layer_idx = allow_neg_eigval, layer_idx
        self.head_k_dim = head_dim
        self.head_v_dim = whole("GatedDeltaNet2", "head_dim * expand_v", head_dim * expand_v)
        self.key_dim, self.value_dim = num_heads * self.head_k_dim, self.num_v_heads * self.head_v_dim
        self._check_sizes("head_dim", "head_dim * expand_v")
        self._add_projections("silu", conv_size, conv_bias)
        self.f_proj = self._low_rank(self.key_dim, bias=False)
        self.b_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.w_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
        self.A_log = undecayed(torch.empty(num_heads))
        self.dt_bias = undecayed(torch.empty(self.key_dim))
        self.g_proj = self._low_rank(self.value_dim, bias=True)
        self.o_norm = output_norm(self.head_v_dim, norm_eps, "sigmoid")
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters of the decay: A from (1, 16), and steps of 0.001 to 0.1."""
        with torch.no_grad():
            self.A_log.copy_(torch.empty_like(self.A_log).uniform_(1, 16).log())
            self.dt_bias.copy_(step_bias(self.dt_bias))

    def _recurrence(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, recurrent: bool, options: dict[str, Any]
    ) -> Result:
        steps = F.softplus(self.f_proj(x).float() + self.dt_bias).unflatten(-1, (-1, self.head_k_dim))
        g = -self.A_log.float().exp()[:, None] * steps
        b = self.b_proj(x).sigmoid().unflatten(-1, (-1, self.head_k_dim))
        b = 2 * b if self.allow_neg_eigval else b
        w = self.w_proj(x).sigmoid().unflatten(-1, (-1, self.head_v_dim))
        if self.num_v_heads > self.num_heads:
            g, b = (rows.repeat_interleave(self.num_v_heads // self.num_heads, 2) for rows in (g, b))
        rule: Any = fused_recurrent_gdn2 if recurrent else chunk_gdn2
        o, state = rule(q, k, v, g, b, w, use_qk_l2norm_in_kernel=True, **options)[:2]
        return o, state
