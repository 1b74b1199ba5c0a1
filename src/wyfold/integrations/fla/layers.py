"""The delta rules' layers as fla has them: their arguments, parameters and state_dicts.

A layer projects its input to queries, keys and values, convolves each over time, runs the recurrence, and projects the
normalised, possibly gated, output back. The modules are those that fla's checkpoints name, so that they load in either
library; `wyfold.layers` has the same mixers with fewer, fused projections.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wyfold.integrations.fla.gdn2_layer import GatedDeltaNet2 as GatedDeltaNet2
from wyfold.integrations.fla.gla import GatedLinearAttention as GatedLinearAttention
from wyfold.integrations.fla.mixer import Mixer, check_sizes, output_norm, step_bias, undecayed, whole
from wyfold.integrations.fla.path_layer import PaTHAttention as PaTHAttention
from wyfold.integrations.fla.recurrences import (
    Result,
    chunk_delta_rule,
    chunk_gated_delta_product,
    chunk_gated_delta_rule,
    chunk_kda,
    fused_recurrent_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
)
from wyfold.integrations.fla.rwkv7_layer import RWKV7Attention as RWKV7Attention
from wyfold.ops.delta_product import fused_recurrent_gated_delta_product
from wyfold.runtime import check

NAMES = (
    "DeltaNet", "GatedDeltaNet", "GatedDeltaNet2", "GatedDeltaProduct", "GatedLinearAttention", "KimiDeltaAttention",
    "PaTHAttention", "RWKV7Attention",
)  # fmt: skip
"""Names of all layers."""


class DeltaNet(Mixer):
    """DeltaNet; fla's layer of that name.

    Args:
        mode: "chunk" or "fused_recurrent", the form used in inference; short inputs and training choose by themselves.
        d_model: The same as hidden_size, and takes precedence.
        hidden_size: Width of input and output.
        expand_k, expand_v: Widths of all keys and of all values, in units of hidden_size. Those of one head
            are K from 1 to 256 and V from 1 to 512.
        num_heads: H.
        use_beta: Learn how strongly each token is written; otherwise 1.
        use_gate: Gate the output.
        use_short_conv: Convolve q, k and v over time.
        conv_size, conv_bias: Filter length, and whether the convolutions have a bias.
        allow_neg_eigval: Double beta.
        layer_idx: Number of the layer in a cache.
        qk_activation: Activation of q and k: "silu", "relu", "elu" (plus 1) or "identity".
        qk_norm: Normalise q and k to length 1 ("l2") or to a sum of magnitudes of 1 ("sum").
        norm_eps: eps of the output norm.

    Source:
        arXiv:2406.06484.
    """

    def __init__(
        self,
        mode: str = "chunk",
        d_model: int | None = None,
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 4,
        use_beta: bool = True,
        use_gate: bool = False,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        allow_neg_eigval: bool = False,
        layer_idx: int | None = None,
        qk_activation: str = "silu",
        qk_norm: str = "l2",
        norm_eps: float = 1e-5,
    ):
        super().__init__()
        counts = {"d_model": d_model, "hidden_size": hidden_size, "num_heads": num_heads}
        check_sizes("DeltaNet", counts, {"expand_k": expand_k, "expand_v": expand_v, "norm_eps": norm_eps})
        check.choice("DeltaNet", "qk_activation", qk_activation, ("silu", "relu", "elu", "identity"))
        check.choice("DeltaNet", "qk_norm", qk_norm, ("l2", "sum"))
        self.mode, self.qk_activation, self.qk_norm = mode, qk_activation, qk_norm
        self.hidden_size = hidden_size if d_model is None else d_model
        self.expand_k, self.expand_v, self.num_heads, self.num_v_heads = expand_k, expand_v, num_heads, num_heads
        self.use_beta, self.use_gate, self.allow_neg_eigval = use_beta, use_gate, allow_neg_eigval
        self.use_short_conv, self.conv_size, self.conv_bias = use_short_conv, conv_size, conv_bias
        self.layer_idx = layer_idx
        self.key_dim = whole("DeltaNet", "hidden_size * expand_k", self.hidden_size * expand_k)
        self.value_dim = whole("DeltaNet", "hidden_size * expand_v", self.hidden_size * expand_v)
        self.head_k_dim = whole("DeltaNet", "width of keys / num_heads", self.key_dim / num_heads)
        self.head_v_dim = whole("DeltaNet", "width of values / num_heads", self.value_dim / num_heads)
        self._check_sizes("hidden_size * expand_k / num_heads", "hidden_size * expand_v / num_heads")
        self._add_projections("silu" if qk_activation == "silu" else None, conv_size, conv_bias)
        if use_beta:
            self.b_proj = nn.Linear(self.hidden_size, num_heads, bias=False)
        if use_gate:
            self.g_proj = nn.Linear(self.hidden_size, self.value_dim, bias=False)
        self.o_norm = output_norm(self.head_v_dim, norm_eps, "swish" if use_gate else None)
        self.o_proj = nn.Linear(self.value_dim, self.hidden_size, bias=False)

    def _activated(self, rows: Tensor) -> Tensor:
        return F.silu(rows) if self.qk_activation == "silu" else rows

    def _recurrence(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, recurrent: bool, options: dict[str, Any]
    ) -> Result:
        if self.qk_activation in ("relu", "elu"):
            q, k = (rows.relu() if self.qk_activation == "relu" else F.elu(rows) + 1 for rows in (q, k))
        if self.qk_norm == "sum":
            q, k = (F.normalize(rows, p=1, dim=-1, eps=1e-6).to(v.dtype) for rows in (q, k))  # autocast widens it
        beta = self.b_proj(x).sigmoid() if self.use_beta else torch.ones_like(q[..., 0])
        rule = fused_recurrent_delta_rule if recurrent else chunk_delta_rule
        beta = 2 * beta if self.allow_neg_eigval else beta
        return rule(q, k, v, beta, use_qk_l2norm_in_kernel=self.qk_norm == "l2", **options)


class GatedDeltaNet(Mixer):
    """Gated DeltaNet; fla's layer of that name.

    Args:
        hidden_size: Width of input and output.
        expand_v: V in units of K. V is at most 512.
        head_dim: K, 1 to 256.
        num_heads: H.
        num_v_heads: HV, a multiple of H. None: H.
        mode: "chunk" or "fused_recurrent", the form used in inference; short inputs and training choose by themselves.
        use_gate: Gate the output.
        use_short_conv: Convolve q, k and v over time.
        allow_neg_eigval: Double beta.
        conv_size, conv_bias: Filter length, and whether the convolutions have a bias.
        layer_idx: Number of the layer in a cache.
        norm_eps: eps of the output norm.
        output_gate_activation: "swish", "silu" (the same) or "sigmoid".

    Source:
        arXiv:2412.06464.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        output_gate_activation: str = "swish",
    ):
        super().__init__()
        counts = {"hidden_size": hidden_size, "num_heads": num_heads, "num_v_heads": num_v_heads, "head_dim": head_dim}
        check_sizes("GatedDeltaNet", counts, {"expand_v": expand_v, "norm_eps": norm_eps})
        check.choice("GatedDeltaNet", "output_gate_activation", output_gate_activation, ("swish", "silu", "sigmoid"))
        self.mode, self.hidden_size, self.expand_v, self.head_dim = mode, hidden_size, expand_v, head_dim
        self.num_heads, self.num_v_heads = num_heads, num_heads if num_v_heads is None else num_v_heads
        self.use_gate, self.allow_neg_eigval, self.layer_idx = use_gate, allow_neg_eigval, layer_idx
        self.use_short_conv, self.conv_size, self.conv_bias = use_short_conv, conv_size, conv_bias
        self.head_k_dim = head_dim
        self.head_v_dim = whole("GatedDeltaNet", "head_dim * expand_v", head_dim * expand_v)
        self.key_dim, self.value_dim = num_heads * self.head_k_dim, self.num_v_heads * self.head_v_dim
        self._check_sizes("head_dim", "head_dim * expand_v")
        self._add_projections("silu", conv_size, conv_bias)
        self.a_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.A_log = undecayed(torch.empty(self.num_v_heads))
        self.dt_bias = undecayed(torch.empty(self.num_v_heads))
        if use_gate:
            self.g_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
        self.o_norm = output_norm(self.head_v_dim, norm_eps, output_gate_activation if use_gate else None)
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters of the decay: A from (0, 16), and steps of 0.001 to 0.1."""
        with torch.no_grad():
            self.A_log.copy_(torch.empty_like(self.A_log).uniform_(0, 16).log())
            self.dt_bias.copy_(step_bias(self.dt_bias))

    def _recurrence(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, recurrent: bool, options: dict[str, Any]
    ) -> Result:
        rule = fused_recurrent_gated_delta_rule if recurrent else chunk_gated_delta_rule
        return rule(
            q,
            k,
            v,
            g=self.a_proj(x),
            beta=self.b_proj(x),
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=self.allow_neg_eigval,
            state_v_first=True,
            use_gate_in_kernel=True,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            **options,
        )


class GatedDeltaProduct(Mixer):
    """Gated DeltaProduct; fla's layer of that name.

    Args:
        hidden_size: Width of input and output.
        expand_v: V in units of K. V is at most 512.
        head_dim: K, 1 to 256.
        num_heads: H.
        num_v_heads: HV, a multiple of H. None: H.
        mode: "chunk" or "fused_recurrent", the form used in inference; short inputs and training choose by themselves.
        use_output_gate: Gate the output.
        use_short_conv: Convolve q, k and v over time.
        conv_size, conv_bias: Filter length, and whether the convolutions have a bias.
        layer_idx: Number of the layer in a cache.
        norm_eps: eps of the output norm.
        use_forget_gate: Decay the state; otherwise it keeps everything.
        allow_neg_eigval: Double beta.
        num_householder: Updates of a token.

    Source:
        arXiv:2502.10297.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_output_gate: bool = True,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        use_forget_gate: bool = True,
        allow_neg_eigval: bool = True,
        num_householder: int = 2,
    ):
        super().__init__()
        counts = {"hidden_size": hidden_size, "num_heads": num_heads, "num_v_heads": num_v_heads, "head_dim": head_dim}
        check_sizes("GatedDeltaProduct", counts, {"expand_v": expand_v, "norm_eps": norm_eps})
        check.integer("GatedDeltaProduct", "num_householder", num_householder, least=1)
        self.mode, self.hidden_size, self.expand_v, self.head_dim = mode, hidden_size, expand_v, head_dim
        self.num_heads, self.num_v_heads = num_heads, num_heads if num_v_heads is None else num_v_heads
        self.use_output_gate, self.use_forget_gate, self.layer_idx = use_output_gate, use_forget_gate, layer_idx
        self.allow_neg_eigval, self.num_householder = allow_neg_eigval, num_householder
        self.use_short_conv, self.conv_size, self.conv_bias = use_short_conv, conv_size, conv_bias
        self.head_k_dim = head_dim
        self.head_v_dim = whole("GatedDeltaProduct", "head_dim * expand_v", head_dim * expand_v)
        self.key_dim, self.value_dim = num_heads * self.head_k_dim, self.num_v_heads * self.head_v_dim
        self._check_sizes("head_dim", "head_dim * expand_v")
        n = num_householder
        self._add_projections("silu", conv_size, conv_bias, (self.key_dim, n * self.key_dim, n * self.value_dim))
        self.b_proj = nn.Linear(hidden_size, n * self.num_v_heads, bias=False)
        if use_forget_gate:
            self.a_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
            self.A_log = undecayed(torch.empty(self.num_v_heads))
            self.dt_bias = undecayed(torch.empty(self.num_v_heads))
        if use_output_gate:
            self.g_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
        self.o_norm = output_norm(self.head_v_dim, norm_eps, "swish" if use_output_gate else None)
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters of the decay: A from (0, 16), and steps of 0.001 to 0.1."""
        if self.use_forget_gate:
            with torch.no_grad():
                self.A_log.copy_(torch.empty_like(self.A_log).uniform_(0, 16).log())
                self.dt_bias.copy_(step_bias(self.dt_bias))

    def _recurrence(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, recurrent: bool, options: dict[str, Any]
    ) -> Result:
        n = self.num_householder
        k, v = (rows.unflatten(2, (n, -1)).flatten(1, 2) for rows in (k, v))
        beta = self.b_proj(x).sigmoid().unflatten(-1, (n, -1)).flatten(1, 2)
        beta = 2 * beta if self.allow_neg_eigval else beta
        g = None
        if self.use_forget_gate:
            g = -self.A_log.float().exp() * F.softplus(self.a_proj(x).float() + self.dt_bias)
        rule: Any = fused_recurrent_gated_delta_product if recurrent else chunk_gated_delta_product
        found: Result = rule(q, k, v, g, beta, n, use_qk_l2norm_in_kernel=True, **options)
        return found


class KimiDeltaAttention(Mixer):
    """Kimi Delta Attention; fla's layer of that name.

    Args:
        hidden_size: Width of input and output.
        expand_v: V in units of K. V is at most 512.
        head_dim: K, 1 to 256.
        num_heads: H.
        num_v_heads: HV, a multiple of H. None: H.
        mode: "chunk" or "fused_recurrent", the form used in inference; short inputs and training choose by themselves.
        use_short_conv: Convolve q, k and v over time.
        allow_neg_eigval: Double beta.
        safe_gate: The gates are bounded by `lower_bound`, which must be given.
        lower_bound: Lower bound of the log decays.
        conv_size, conv_bias: Filter length, and whether the convolutions have a bias.
        layer_idx: Number of the layer in a cache.
        norm_eps: eps of the output norm.

    Source:
        arXiv:2510.26692.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
    ):
        super().__init__()
        counts = {"hidden_size": hidden_size, "num_heads": num_heads, "num_v_heads": num_v_heads, "head_dim": head_dim}
        check_sizes("KimiDeltaAttention", counts, {"expand_v": expand_v, "norm_eps": norm_eps})
        if safe_gate and lower_bound is None:
            raise ValueError("KimiDeltaAttention: lower_bound must be given with safe_gate=True, got None")
        self.mode, self.hidden_size, self.expand_v, self.head_dim = mode, hidden_size, expand_v, head_dim
        self.num_heads, self.num_v_heads = num_heads, num_heads if num_v_heads is None else num_v_heads
        self.allow_neg_eigval, self.layer_idx = allow_neg_eigval, layer_idx
        self.safe_gate, self.lower_bound = safe_gate, lower_bound
        self.use_short_conv, self.conv_size, self.conv_bias = use_short_conv, conv_size, conv_bias
        self.head_k_dim = head_dim
        self.head_v_dim = whole("KimiDeltaAttention", "head_dim * expand_v", head_dim * expand_v)
        self.key_dim, self.value_dim = num_heads * self.head_k_dim, self.num_v_heads * self.head_v_dim
        self.gate_dim = self.num_v_heads * self.head_k_dim
        self._check_sizes("head_dim", "head_dim * expand_v")
        self._add_projections("silu", conv_size, conv_bias)
        self.f_proj = self._low_rank(self.gate_dim, bias=False)
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.A_log = undecayed(torch.empty(self.num_v_heads))
        self.dt_bias = undecayed(torch.empty(self.gate_dim))
        self.g_proj = self._low_rank(self.value_dim, bias=True)
        self.o_norm = output_norm(self.head_v_dim, norm_eps, "sigmoid")
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters of the decay: A from (1, 16), or 1 with `safe_gate`, and steps of 0.001 to 0.1."""
        with torch.no_grad():
            drawn = torch.empty_like(self.A_log).uniform_(1, 16)
            self.A_log.copy_(torch.zeros_like(drawn) if self.safe_gate else drawn.log())
            self.dt_bias.copy_(step_bias(self.dt_bias))

    def _recurrence(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, recurrent: bool, options: dict[str, Any]
    ) -> Result:
        if not recurrent:
            options = {**options, "safe_gate": self.safe_gate}
        rule: Any = fused_recurrent_kda if recurrent else chunk_kda
        found: Result = rule(
            q,
            k,
            v,
            g=self.f_proj(x).unflatten(-1, (-1, self.head_k_dim)),
            beta=self.b_proj(x),
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=self.allow_neg_eigval,
            state_v_first=True,
            use_gate_in_kernel=True,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            lower_bound=self.lower_bound,
            **options,
        )
        return found
