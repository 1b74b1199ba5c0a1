"""Gated DeltaNet layer: the delta rule with one decay per head; and the parameters of decays."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from wyfold.layers import from_hf
from wyfold.layers.delta_net import DeltaMixer
from wyfold.layers.norm import GatedRMSNorm
from wyfold.layers.whole import whole_layer
from wyfold.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout


class DecayParameters(nn.Module):
    """Parameters A_log and dt_bias of a log decay, g = -exp(A_log) softplus(raw + dt_bias).

    There are few of them and their rounding affects every token, so they should stay in float32. They are a separate
    module with a forward, so that FSDP2's mixed precision can exempt them: shard this module before its block. They
    carry the attribute `_no_weight_decay = True`, which common optimizers read. A wrapper that replaces parameters
    (FSDP2 does) drops it; build the optimizer's parameter groups before.

    Args:
        num_v_heads: HV.
        channels: K for a decay per key channel; None for one per head.
        bounded: The gate is lower_bound * sigmoid(exp(A_log) (raw + dt_bias)). Its rate is a factor inside the sigmoid
            and starts at 1: the spread of rates used for the softplus would saturate it.

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: A number is below 1.
    """

    def __init__(self, num_v_heads: int, channels: int | None = None, *, bounded: bool = False):
        super().__init__()
        check.integer("DecayParameters", "num_v_heads", num_v_heads, least=1)
        if channels is not None:
            check.integer("DecayParameters", "channels", channels, least=1)
        check.flag("DecayParameters", bounded=bounded)
        self.bounded = bounded
        self.A_log = nn.Parameter(torch.empty(num_v_heads))
        self.dt_bias = nn.Parameter(torch.empty((num_v_heads,) if channels is None else (num_v_heads, channels)))
        self._mark()
        self.reset_parameters()

    def _mark(self) -> None:
        """Mark the parameters as exempt from weight decay, for optimizers that read the attribute."""
        for parameter in (self.A_log, self.dt_bias):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]

    def _apply(self, fn: Any, recurse: bool = True) -> DecayParameters:
        super()._apply(fn, recurse)
        self._mark()  # `to_empty` creates new parameters
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # copies and pickles of parameters drop attributes
        self._mark()

    def _load_from_state_dict(self, *given: Any, **named: Any) -> None:
        super()._load_from_state_dict(*given, **named)
        self._mark()  # `assign=True` replaces the parameters

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw rates exp(A_log) uniformly in [1, 16] and softplus(dt_bias) log-uniformly in [0.001, 0.1] (Mamba-2)."""
        if self.bounded:
            self.A_log.zero_()
        else:
            self.A_log.uniform_(1, 16).log_()
        step = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return A_log [HV] and dt_bias [HV] or [HV, K]."""
        # FSDP frees gathered parameters as soon as this returns, so copy them. FSDP2 is recognised by the changed
        # class, FSDP1 by views into its flat parameter in place of the parameters.
        if hasattr(type(self), "unshard") or not isinstance(self.A_log, nn.Parameter):
            return self.A_log.clone(), self.dt_bias.clone()
        return self.A_log, self.dt_bias


class GatedDeltaNet(DeltaMixer):
    """Gated DeltaNet layer: each token decays its head's whole state before the delta rule.

        q, k, v = silu(conv(W_qkv x)),   beta = sigmoid(W_beta x),   g = -exp(A_log) softplus(W_decay x + dt_bias)
        y = W_o (rms_norm(gated_delta_rule(q/|q|, k/|k|, v, g, beta)) * silu(W_gate x))

    Args:
        hidden_size: Width of x.
        num_heads: H, query and key heads.
        num_v_heads: HV, value heads, a multiple of H. None: H.
        head_dim: K, width of a query and key, 1 to 256.
        head_v_dim: V, width of a value, 1 to 512. None: K.
        conv_size: Length of the short convolution, 2 to 8.
        allow_neg_eigval: beta in [0, 2] instead of [0, 1] (arXiv:2411.12537).
        norm_eps: eps of the output norm.
        backend: Backend of every operator in the layer. None: the best available one, which on CUDA is never "eager".

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: A size is not supported by the operator.

    Source:
        Gated DeltaNet, arXiv:2412.06464v3: Eq. (10); projections, norm and gate in section 3.4.

    Examples:
        >>> import torch
        >>> from wyfold.layers import GatedDeltaNet
        >>> layer = GatedDeltaNet(hidden_size=32, num_heads=2, head_dim=16)
        >>> layer(torch.randn(1, 5, 32)).shape
        torch.Size([1, 5, 32])
    """

    operators = (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule)

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
        sizes = (hidden_size, num_heads, num_v_heads, head_dim, head_v_dim, conv_size)
        super().__init__(*sizes, allow_neg_eigval, backend)
        self.decay = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.decay_parameters = DecayParameters(self.num_v_heads)
        self.gate = nn.Linear(hidden_size, self.value_size, bias=False)
        eps = check.epsilon("GatedDeltaNet", norm_eps, name="norm_eps")
        self.norm = GatedRMSNorm(self.head_v_dim, eps=eps, backend=backend)

    @classmethod
    def from_hf(cls, layer: Any, *, backend: str | None = None) -> GatedDeltaNet:
        """Copy a transformers layer of the Qwen family, with fused (Qwen3-Next) or split (Qwen3.5) projections.

        Args:
            layer: A Qwen3NextGatedDeltaNet, or a layer with the parameters of Qwen3_5GatedDeltaNet, such as that of
                Lara Mini.
            backend: Backend of every operator in the copy.

        Raises:
            ValueError: The layer has other parameters or activations.
        """
        op = "GatedDeltaNet.from_hf"
        names = layer.state_dict().keys()
        if not ({"in_proj_qkvz.weight", "in_proj_ba.weight"} <= names or "in_proj_qkv.weight" in names):
            raise ValueError(f"{op}: layer must have Qwen's projections, got {type(layer).__name__}")
        parts = ("qkvz", "ba") if "in_proj_qkvz.weight" in names else ("qkv", "z", "b", "a")
        others = ("conv1d.weight", "A_log", "dt_bias", "norm.weight", "out_proj.weight")
        source = from_hf.parameters(op, layer, [*(f"in_proj_{part}.weight" for part in parts), *others])
        from_hf.require_silu(op, layer)
        norm = from_hf.norm_settings(op, layer.norm)
        H, HV, K, V = layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
        if "in_proj_qkvz.weight" in source:
            # Rows are grouped by key head, each with its value heads: q, k, v..., z... and b..., a...
            q, k, v, z = _grouped_rows(source.pop("in_proj_qkvz.weight"), H, [K, K, HV // H * V, HV // H * V])
            b, a = _grouped_rows(source.pop("in_proj_ba.weight"), H, [HV // H, HV // H])
            qkv = torch.cat([q, k, v])
        else:
            qkv, z, b, a = (source.pop(f"in_proj_{part}.weight") for part in ("qkv", "z", "b", "a"))
        with torch.device("meta"):
            sizes = (layer.hidden_size, H, HV, K, V, layer.conv_kernel_size)
            ours = cls(*sizes, norm_eps=norm["eps"], backend=backend)
        ours.norm.activation, ours.norm.round_before_weight = norm["activation"], from_hf.rounds(layer.norm)
        weights = {
            "qkv.weight": qkv,
            "conv.weight": source["conv1d.weight"].squeeze(1),
            "beta.weight": b,
            "decay.weight": a,
            "decay_parameters.A_log": source["A_log"],
            "decay_parameters.dt_bias": source["dt_bias"],
            "gate.weight": z,
            "norm.weight": source["norm.weight"],
            "out.weight": source["out_proj.weight"],
        }
        ours.load_state_dict(weights, assign=True)
        return ours

    def gate_arguments(self, x: Tensor) -> dict[str, Any]:
        A_log, dt_bias = self.decay_parameters()
        return {"g": self.decay(x), "use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias}

    def read_out(self, o: Tensor, x: Tensor) -> Tensor:
        return self.norm(o, self.gate(x).view_as(o))

    def _as_one_function(self, x: Tensor, layout: SequenceLayout | None) -> Tensor | None:
        return whole_layer(self, x, layout, (None, self.decay), (None, self.gate), GatedDeltaNet)


def _grouped_rows(weight: Tensor, groups: int, sizes: list[int]) -> list[Tensor]:
    """Split a matrix whose rows are `groups` groups of parts with the given sizes; return each part of all groups."""
    return [part.flatten(0, 1) for part in weight.unflatten(0, (groups, -1)).split(sizes, dim=1)]
