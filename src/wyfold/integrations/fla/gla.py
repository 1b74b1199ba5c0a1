"""Gated linear attention under fla's names: the recurrences, with fla's argument order and keywords, and the layer.

The operator that a function calls documents formula, arguments, results and errors; docstrings here list differences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wyfold.integrations.fla.gated_norms import FusedRMSNormGated
from wyfold.integrations.fla.low_rank import refuse_reverse
from wyfold.integrations.fla.mixer import Mixer, check_sizes, whole
from wyfold.integrations.fla.modules import RMSNorm
from wyfold.integrations.fla.recurrences import Result, v_first
from wyfold.ops import gla
from wyfold.runtime.check import UnsupportedError


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> Result:
    """`wyfold.chunk_gla`; unlike fla's, keys may have fewer heads than values, and be at most 256 wide."""
    o, state = gla.chunk_gla(
        q,
        k,
        v,
        g,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=v_first("chunk_gla", state_v_first, transpose_state_layout),
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
    )[:2]
    return o, state


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> Result:
    """`wyfold.fused_recurrent_gla`; `reverse` raises UnsupportedError."""
    refuse_reverse("fused_recurrent_gla", reverse)
    o, state = gla.fused_recurrent_gla(
        q,
        k,
        v,
        gk,
        gv,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=v_first("fused_recurrent_gla", state_v_first, transpose_state_layout),
        cu_seqlens=cu_seqlens,
    )[:2]
    return o, state


class GatedLinearAttention(Mixer):
    """Gated linear attention; fla's layer of that name.

    Args:
        mode: "chunk" or "fused_recurrent", the form used in inference; short inputs and training choose by themselves.
        hidden_size: Width of input and output.
        expand_k, expand_v: Widths of all keys and of all values, in units of hidden_size. K, the width of a head's
            keys, is 1 to 256, and V of its values 1 to 512.
        num_heads: Query heads.
        num_kv_heads: Heads of keys, values and decays, which groups of query heads share. None: num_heads.
        feature_map: None; others raise UnsupportedError.
        use_short_conv: Convolve q, k and v over time.
        conv_size, conv_bias: Filter length, and whether the convolutions have a bias.
        use_output_gate: Gate the output.
        gate_fn: "swish"; others raise UnsupportedError.
        elementwise_affine: Use a weight in the output norm.
        norm_eps: eps of the output norm.
        gate_logit_normalizer: Divisor of the log decays.
        gate_low_rank_dim: Inner width of the projection of the decays.
        clamp_min: Lower bound of the log decays, or None.
        fuse_norm: Name the norm of a gated output `g_norm_swish_gate`; otherwise `g_norm`.
        layer_idx: Number of the layer in a cache.

    Source:
        arXiv:2312.06635.
    """

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        feature_map: str | None = None,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        use_output_gate: bool = True,
        gate_fn: str = "swish",
        elementwise_affine: bool = True,
        norm_eps: float = 1e-5,
        gate_logit_normalizer: int = 16,
        gate_low_rank_dim: int = 16,
        clamp_min: float | None = None,
        fuse_norm: bool = True,
        layer_idx: int | None = None,
    ):
        super().__init__()
        counts = {
            "hidden_size": hidden_size,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "gate_low_rank_dim": gate_low_rank_dim,
        }
        numbers = {
            "expand_k": expand_k,
            "expand_v": expand_v,
            "norm_eps": norm_eps,
            "gate_logit_normalizer": gate_logit_normalizer,
        }
        check_sizes("GatedLinearAttention", counts, numbers)
        name = "GatedLinearAttention"
        for option, value, ours in (("feature_map", feature_map, None), ("gate_fn", gate_fn, "swish")):
            if value != ours:
                raise UnsupportedError(
                    f"{name}: {option}={value!r} is not offered", {"wyfold": f"it has {ours!r} only"}
                )
        self.mode, self.hidden_size, self.expand_k, self.expand_v = mode, hidden_size, expand_k, expand_v
        self.num_heads = self.num_v_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % self.num_kv_heads:
            raise ValueError(f"{name}: num_heads must be a multiple of num_kv_heads = {num_kv_heads}, got {num_heads}")
        self.use_short_conv, self.conv_size, self.conv_bias = use_short_conv, conv_size, conv_bias
        self.use_output_gate, self.clamp_min, self.layer_idx = use_output_gate, clamp_min, layer_idx
        self.gate_logit_normalizer = gate_logit_normalizer
        self.key_dim = whole(name, "hidden_size * expand_k", hidden_size * expand_k)
        self.value_dim = whole(name, "hidden_size * expand_v", hidden_size * expand_v)
        self.head_k_dim = whole(name, "width of keys / num_heads", self.key_dim / num_heads)
        self.head_v_dim = whole(name, "width of values / num_heads", self.value_dim / num_heads)
        self._check_sizes("hidden_size * expand_k / num_heads", "hidden_size * expand_v / num_heads")
        shared = self.num_kv_heads * self.head_k_dim
        self._add_projections("silu", conv_size, conv_bias, (self.key_dim, shared, self.num_kv_heads * self.head_v_dim))
        if use_output_gate:
            self.g_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
        inner = nn.Linear(hidden_size, gate_low_rank_dim, bias=False)
        self.gk_proj = nn.Sequential(inner, nn.Linear(gate_low_rank_dim, shared))
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)
        if use_output_gate and fuse_norm:
            self.g_norm_swish_gate = FusedRMSNormGated(self.head_v_dim, elementwise_affine, norm_eps)
        else:
            self.g_norm = RMSNorm(self.head_v_dim, elementwise_affine, eps=norm_eps, dtype=torch.float32)

    def _convolved(
        self, x: Tensor, last: dict[str, Any] | None, keep: bool, cu_seqlens: Tensor | None
    ) -> tuple[list[Tensor], tuple[Tensor | None, ...] | None]:
        if self.use_short_conv:
            return super()._convolved(x, last, keep, cu_seqlens)
        return [module(x) for module in self._three("proj")], None

    def _recurrence(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, recurrent: bool, options: dict[str, Any]
    ) -> Result:
        raw = self.gk_proj(x).unflatten(-1, (-1, self.head_k_dim))
        g = F.logsigmoid(raw.to(torch.promote_types(raw.dtype, torch.float32))) / self.gate_logit_normalizer
        if self.clamp_min is not None:
            g = g.clamp(min=self.clamp_min)
        if self.num_kv_heads < self.num_heads:
            k, v, g = (rows.repeat_interleave(self.num_heads // self.num_kv_heads, 2) for rows in (k, v, g))
        rule = fused_recurrent_gla if recurrent else chunk_gla
        return rule(q, k, v, g, state_v_first=True, **options)

    def _output(self, x: Tensor, o: Tensor) -> Tensor:
        gate = self.g_proj(x).unflatten(-1, (-1, self.head_v_dim)) if self.use_output_gate else None
        if gate is not None and hasattr(self, "g_norm_swish_gate"):
            o = self.g_norm_swish_gate(o, gate)
        else:
            o = self.g_norm(o) if gate is None else self.g_norm(o) * F.silu(gate)
        y: Tensor = self.o_proj(o.flatten(-2))
        return y
