"""GDN and KDA layers for torchtitan, as overrides of its configuration.

    --override.imports wyfold.integrations.torchtitan.gated_delta_net
    --override.imports 'wyfold.integrations.torchtitan.kimi_delta_attention={"lower_bound": -5.0}'

Each replaces the configuration of `GatedDeltaNet` in torchtitan's Qwen3.5. Its sharding and its initialisation stay.
torchtitan imports this module by these names, after itself; it is imported here only then.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from wyfold.ops.conv import causal_conv1d
from wyfold.ops.gated_delta_rule import chunk_gated_delta_rule
from wyfold.ops.kda import chunk_kda

MODEL = "torchtitan.models.qwen3_5.model"


def gated_delta_net(config: Any) -> Any:
    """Override: torchtitan's `GatedDeltaNet` with Wyfold's convolution and rule, and the same parameters.

    Args:
        config: GatedDeltaNet.Config of torchtitan.

    Returns:
        Its replacement.
    """
    classes = _classes()
    kernel = classes.derive(config.kernel, classes.kernel.Config)
    return classes.derive(config, classes.gated_delta_net.Config, kernel=kernel)


def kimi_delta_attention(config: Any, lower_bound: float | None = None) -> Any:
    """Override: Kimi Delta Attention in place of `GatedDeltaNet`, with one decay per key channel.

    `in_proj_a` has HV * K outputs, `dt_bias` is [HV, K], and the output gate is a sigmoid. The projections of the decay
    and of the output gate have full rank; those of `wyfold.layers.KimiDeltaAttention` are products of two matrices.

    Args:
        config: GatedDeltaNet.Config of torchtitan.
        lower_bound: Bound of the bounded gate, below 0. None: the softplus gate.

    Returns:
        Its replacement.

    Raises:
        ValueError: lower_bound is not below 0.
    """
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"kimi_delta_attention: lower_bound must be below 0, got {lower_bound}")
    classes = _classes()
    heads = config.in_proj_v.out_features // config.value_head_dim
    return classes.derive(
        config,
        classes.kimi_delta_attention.Config,
        in_proj_a=dataclasses.replace(config.in_proj_a, out_features=heads * config.key_head_dim),
        kernel=classes.derive(config.kernel, classes.kernel.Config),
        norm=classes.derive(config.norm, classes.norm.Config),
        lower_bound=lower_bound,
    )


class _Kernel:
    """The rule on local tensors: GDN for a decay [B, T, HV], KDA for [B, T, HV, K]."""

    def forward(
        self,
        xq_BLNK: Tensor,
        xk_BLNK: Tensor,
        xv_BLNV: Tensor,
        g_BLN: Tensor,
        beta_BLN: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
    ) -> Tensor:
        rule: Any = chunk_gated_delta_rule if g_BLN.ndim == 3 else chunk_kda
        o: Tensor = rule(
            xq_BLNK, xk_BLNK, xv_BLNV, g_BLN, beta_BLN, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_cpu,
        )[0]  # fmt: skip
        return o


class _Norm:
    """Gated RMSNorm with a sigmoid, as Kimi Linear's."""

    weight: Tensor
    eps: float

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y = nn.functional.rms_norm(x.float(), x.shape[-1:], None, self.eps) * self.weight.float()
        return (y * torch.sigmoid(gate.float())).to(x.dtype)


class _GatedDeltaNet:
    """torchtitan's `GatedDeltaNet`, with Wyfold's convolution on local tensors."""

    def _causal_conv(
        self: Any, x_BLD: Tensor, conv: Any, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None
    ) -> Tensor:
        def convolve(x: Tensor, weight: Tensor) -> Tensor:
            return causal_conv1d(x, weight.squeeze(1), activation="silu", cu_seqlens=cu_seqlens)[0]

        if isinstance(x_BLD, DTensor):
            out: Tensor = self._local_map_conv(x_BLD, conv, convolve)
            return out
        return convolve(x_BLD, conv.weight)


class _KimiDeltaAttention(_GatedDeltaNet):
    """Kimi Delta Attention with the submodules of torchtitan's `GatedDeltaNet`."""

    def __init__(self: Any, config: Any):
        super().__init__(config)  # type: ignore[call-arg]
        self.lower_bound = config.lower_bound
        self.dt_bias = nn.Parameter(torch.empty(self.A_log.shape[0], self.key_head_dim))

    def forward(self: Any, x_BLD: Tensor, attention_masks: Any = None) -> Tensor:
        model = importlib.import_module(MODEL)
        B, L, _ = x_BLD.shape
        boundaries: tuple[Tensor, Tensor] | tuple[()] = ()
        if attention_masks is not None:
            if attention_masks.cu_seq_q_host is None:
                raise ValueError("KimiDeltaAttention: attention_masks must have cu_seq_q_host, got None")
            host = torch.tensor(attention_masks.cu_seq_q_host, dtype=attention_masks.cu_seq_q.dtype, device="cpu")
            boundaries = attention_masks.cu_seq_q, host

        def heads(projected: Tensor, width: int) -> Tensor:
            out: Tensor = model.local_head_split(projected, width, dp_shard_dim=1)
            return out

        q, k, v = (
            self._causal_conv(model._fold_bl_dim(projection(x_BLD), B, L), conv, *boundaries)
            for projection, conv in (
                (self.in_proj_q, self.conv_q), (self.in_proj_k, self.conv_k), (self.in_proj_v, self.conv_v),
            )
        )  # fmt: skip
        z, a, b = (model._fold_bl_dim(p(x_BLD), B, L) for p in (self.in_proj_z, self.in_proj_a, self.in_proj_b))
        raw = heads(a, self.key_head_dim).float() + self.dt_bias.float()
        rate = self.A_log.float().exp()[:, None]
        if self.lower_bound is None:
            g = -rate * nn.functional.softplus(raw)
        else:
            g = self.lower_bound * torch.sigmoid(rate * raw)
        names = dict(zip(("cu_seqlens", "cu_seqlens_cpu"), boundaries))
        K, V = self.key_head_dim, self.value_head_dim
        o = self.kernel(heads(q, K), heads(k, K), heads(v, V), g, torch.sigmoid(b), **names)
        out: Tensor = self.out_proj(model._unflatten_to_bld(self.norm(o, heads(z, V)), B, L))
        return out


class _Classes:
    """torchtitan's classes with the methods above, and its `derive`."""

    def __init__(self) -> None:
        model = importlib.import_module(MODEL)
        self.derive = importlib.import_module("torchtitan.config").derive
        self.kernel = _configurable("GatedDeltaKernel", _Kernel, model.GatedDeltaKernel)
        self.norm = _configurable("RMSNormSigmoidGated", _Norm, model.RMSNormGated)
        self.gated_delta_net = _configurable("GatedDeltaNet", _GatedDeltaNet, model.GatedDeltaNet)
        self.kimi_delta_attention = _configurable(
            "KimiDeltaAttention", _KimiDeltaAttention, model.GatedDeltaNet, lower_bound=None
        )


def _configurable(name: str, methods: type, base: Any, **fields: Any) -> Any:
    """A subclass of one of torchtitan's modules with its own `Config`, which has more fields, given with defaults."""
    extra = [(key, Any, dataclasses.field(default=default)) for key, default in fields.items()]
    config = dataclasses.make_dataclass("Config", extra, bases=(base.Config,), kw_only=True, slots=True)
    members = {"__module__": __name__, "__doc__": methods.__doc__, "Config": config}
    return type(name, (methods, base), members)


@functools.cache
def _classes() -> _Classes:
    return _Classes()


def _register() -> None:
    override = importlib.import_module("torchtitan.config").override
    target = importlib.import_module(MODEL).GatedDeltaNet.Config
    for factory in (gated_delta_net, kimi_delta_attention):
        override(target=target, exact=True, description=f"Wyfold: {factory.__name__}")(factory)


# torchtitan looks for the overrides that importing this module registers. Elsewhere there is nothing to register.
if "torchtitan.config" in sys.modules:
    _register()
