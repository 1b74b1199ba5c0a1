"""Gated DeltaNet: the delta rule with one decay per head, and the parameters of decays."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from wyfold.layers.delta_net import DeltaMixer
from wyfold.layers.norm import GatedRMSNorm
from wyfold.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule


class DecayParameters(nn.Module):
    """What turns a projected x into a log decay: g = -exp(A_log) softplus(raw + dt_bias).

    They are few and their rounding reaches every token, so they belong in float32. A module of their own, with a
    forward, is what lets FSDP2's mixed precision leave them there: shard it before the block it is in. They have the
    attribute `_no_weight_decay = True`, by which optimizers of the field leave them out of weight decay. A wrapper that
    replaces parameters (FSDP2 does) drops it: sort parameters into groups before.

    Args:
        num_v_heads: HV.
        channels: K for a decay per key channel; None for one per head.
        bounded: Whether the gate is lower_bound * sigmoid(exp(A_log) (raw + dt_bias)). Its rate multiplies inside the
            sigmoid, so it starts at 1: the spread of rates that suits the softplus would saturate it.
    """

    def __init__(self, num_v_heads: int, channels: int | None = None, *, bounded: bool = False):
        super().__init__()
        self.bounded = bounded
        self.A_log = nn.Parameter(torch.empty(num_v_heads))
        self.dt_bias = nn.Parameter(torch.empty((num_v_heads,) if channels is None else (num_v_heads, channels)))
        self._mark()
        self.reset_parameters()

    def _mark(self) -> None:
        """Mark the parameters as those that the field's optimizers exempt from weight decay."""
        for parameter in (self.A_log, self.dt_bias):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]

    def _apply(self, fn: Any, recurse: bool = True) -> DecayParameters:
        super()._apply(fn, recurse)
        self._mark()  # `to_empty` makes parameters of their own
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # of a copy or a pickle, whose parameters carry no attributes
        self._mark()

    def _load_from_state_dict(self, *given: Any, **named: Any) -> None:
        super()._load_from_state_dict(*given, **named)
        self._mark()  # `assign=True` takes the parameters it is given

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Rates exp(A_log) uniform in [1, 16]; softplus(dt_bias) log-uniform in [0.001, 0.1], as in Mamba-2."""
        if self.bounded:
            self.A_log.zero_()
        else:
            self.A_log.uniform_(1, 16).log_()
        step = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus

    def forward(self) -> tuple[Tensor, Tensor]:
        """A_log [HV] and dt_bias [HV] or [HV, K]."""
        # FSDP frees what it gathered as soon as this returns: FSDP2 has changed the class then, and FSDP1 has put views
        # into its flat parameter in the place of the parameters.
        if hasattr(type(self), "unshard") or not isinstance(self.A_log, nn.Parameter):
            return self.A_log.clone(), self.dt_bias.clone()
        return self.A_log, self.dt_bias


class GatedDeltaNet(DeltaMixer):
    """The layer of Gated DeltaNet: the delta rule after a decay of the whole state, chosen by each token.

        q, k, v = silu(conv(W_qkv x)),   beta = sigmoid(W_beta x),   g = -exp(A_log) softplus(W_decay x + dt_bias)
        y = W_o (rms_norm(gated_delta_rule(q/|q|, k/|k|, v, g, beta)) * silu(W_gate x))

    Args:
        hidden_size, num_heads, num_v_heads, head_dim, head_v_dim, conv_size, allow_neg_eigval: See `DeltaMixer`.
        norm_eps: eps of the output norm.
        backend: See `DeltaMixer`.

    Source:
        arXiv:2412.06464.
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
        self.norm = GatedRMSNorm(self.head_v_dim, eps=norm_eps, backend=backend)

    @classmethod
    def from_hf(cls, layer: Any, *, backend: str | None = None) -> GatedDeltaNet:
        """A copy of a transformers layer of the Qwen family, its projections fused (Qwen3-Next) or split (Qwen3.5).

        Args:
            layer: A Qwen3NextGatedDeltaNet, or a layer with the parameters of Qwen3_5GatedDeltaNet.
            backend: Of every operator in the copy.

        Raises:
            ValueError: a layer of another kind.
        """
        source = {name: tensor.detach().clone() for name, tensor in layer.state_dict().items()}
        if not ({"in_proj_qkvz.weight", "in_proj_ba.weight"} <= source.keys() or "in_proj_qkv.weight" in source):
            raise ValueError(f"GatedDeltaNet.from_hf: layer must have Qwen's projections, got {type(layer).__name__}")
        H, HV, K, V = layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
        if "in_proj_qkvz.weight" in source:
            # Rows of one key head and its group of value heads stand together: q, k, v..., z... and b..., a...
            q, k, v, z = _grouped_rows(source.pop("in_proj_qkvz.weight"), H, [K, K, HV // H * V, HV // H * V])
            b, a = _grouped_rows(source.pop("in_proj_ba.weight"), H, [HV // H, HV // H])
            qkv = torch.cat([q, k, v])
        else:
            qkv, z, b, a = (source.pop(f"in_proj_{part}.weight") for part in ("qkv", "z", "b", "a"))
        with torch.device("meta"):
            eps = layer.layer_norm_epsilon
            ours = cls(layer.hidden_size, H, HV, K, V, layer.conv_kernel_size, norm_eps=eps, backend=backend)
        ours.norm.round_before_weight = True
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


def _grouped_rows(weight: Tensor, groups: int, sizes: list[int]) -> list[Tensor]:
    """Parts of a matrix whose rows repeat, group after group, in pieces of the given sizes."""
    return [part.flatten(0, 1) for part in weight.unflatten(0, (groups, -1)).split(sizes, dim=1)]
