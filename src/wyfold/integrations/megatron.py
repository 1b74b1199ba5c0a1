"""GDN and KDA layers for Megatron-LM: packed, deterministic, and without fla.

`GatedDeltaNet` and `KimiDeltaAttention` are subclasses of Megatron's `GatedDeltaNet`. Projections, norm, tensor and
context parallelism, recomputation and checkpoints are Megatron's. The convolution, the gate and the rule are Wyfold's.
Megatron is imported when one of these names is first used.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.integrations.fla import causal_conv1d
from wyfold.ops.gated_delta_rule import chunk_gated_delta_rule
from wyfold.ops.kda import chunk_kda

__all__ = ["gated_delta_net_spec", "kda_spec", "replace_gated_delta_net"]

COMMON = "megatron.core.ssm.gated_delta_net.common"
LAYER = "megatron.core.ssm.gated_delta_net.gdn"
SPECS = "megatron.core.models.gpt.experimental_attention_variant_module_specs"


def gated_delta_net_spec(config: Any, backend: Any = None) -> Any:
    """Module spec of a GDN layer, in place of Megatron's `get_gated_delta_net_module_spec`.

    Args:
        config: TransformerConfig with the `linear_*` sizes.
        backend: BackendSpecProvider. None: Megatron's choice.

    Returns:
        ModuleSpec, to be the `self_attention` of a layer.
    """
    return _spec("GatedDeltaNet", config, backend, {})


def kda_spec(config: Any, backend: Any = None, *, lower_bound: float | None = None) -> Any:
    """Module spec of a KDA layer.

    Args:
        config: TransformerConfig with the `linear_*` sizes.
        backend: BackendSpecProvider. None: Megatron's choice.
        lower_bound: Bound of the bounded gate, below 0. None: the softplus gate.

    Returns:
        ModuleSpec, to be the `self_attention` of a layer.
    """
    return _spec("KimiDeltaAttention", config, backend, {} if lower_bound is None else {"lower_bound": lower_bound})


def _spec(name: str, config: Any, backend: Any, params: dict[str, Any]) -> Any:
    spec = importlib.import_module(SPECS).get_gated_delta_net_module_spec(config=config, backend=backend)
    return dataclasses.replace(spec, module=_layer_class(name), params={**spec.params, **params})


def replace_gated_delta_net(spec: Any, name: str = "GatedDeltaNet", **params: Any) -> Any:
    """Return a copy of a spec of layers, or of a whole block, in which every GDN layer of Megatron is one of Wyfold's.

    Args:
        spec: ModuleSpec or block submodules, such as Megatron's functions return for `--spec` or for hybrid models.
        name: "GatedDeltaNet" or "KimiDeltaAttention".
        params: Keyword arguments of the layer, such as `lower_bound`.

    Raises:
        ValueError: The spec has no GDN layer of Megatron, or name is another one.
    """
    stock = importlib.import_module(LAYER).GatedDeltaNet
    ours, count = _layer_class(name), 0

    def copied(node: Any) -> Any:
        nonlocal count
        if isinstance(node, list | tuple):
            return type(node)(copied(child) for child in node)
        if not dataclasses.is_dataclass(node) or isinstance(node, type):
            return node
        changes = {field.name: copied(getattr(node, field.name)) for field in dataclasses.fields(node) if field.init}
        if changes.get("module") is stock:
            count += 1
            changes.update(module=ours, params={**changes["params"], **params})
        return dataclasses.replace(node, **changes)

    replaced = copied(spec)
    if not count:
        raise ValueError(f"replace_gated_delta_net: spec must have a GatedDeltaNet of Megatron's, got {spec!r}")
    return replaced


class RawGate(NamedTuple):
    """Gate of a call before it is computed: [B, T, HV] or [B, T, HV, K], A_log [HV], dt_bias [HV] or [HV * K]."""

    raw: Tensor
    A_log: Tensor
    dt_bias: Tensor


class _GatedDeltaNet:
    """Gated DeltaNet layer of Megatron-LM, with Megatron's parameters, names and checkpoints, on Wyfold's operators.

    Takes packed sequences also with `deterministic_mode`, because the operators are deterministic. Q and k of fewer
    heads than v are not expanded.

    Args:
        As Megatron's `GatedDeltaNet`.

    Source:
        Gated DeltaNet, arXiv:2412.06464v3, Eq. (10) and section 3.4.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        common = importlib.import_module(COMMON)
        # Megatron's constructor refuses to run without fla, which this layer does not use.
        _with_globals(common._GDNBase.__init__, HAVE_FLA=True)(self, config, *args, **kwargs)
        # Megatron's forward refuses packed sequences in this mode, and takes another convolution.
        self.config = copy.copy(config)
        self.config.deterministic_mode = False

    def _setup_variant_attrs(self: Any) -> None:
        importlib.import_module(LAYER).GatedDeltaNet._setup_variant_attrs(self)
        self.gated_delta_rule = functools.partial(_gated_delta_rule, normalise=self.use_qk_l2norm)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Megatron's forward, with Wyfold's convolution."""
        layer = importlib.import_module(LAYER).GatedDeltaNet
        out: tuple[Tensor, Tensor | None] = _with_globals(layer.forward, causal_conv1d=causal_conv1d)(
            self, *args, **kwargs
        )
        return out

    def _prepare_input_for_gated_delta_rule(
        self: Any, qkv: Tensor, gate: Tensor, batch: int, seq_len: int, *gate_feats: Tensor
    ) -> tuple[Tensor, ...]:
        """Split q, k and v into heads. The operators normalise q and k, and read them by groups."""
        sizes = self.qk_dim_local_tp, self.qk_dim_local_tp, self.v_dim_local_tp
        widths = self.key_head_dim, self.key_head_dim, self.value_head_dim
        parts = qkv.split([size // self.cp_size for size in sizes], -1)
        return *(part.unflatten(-1, (-1, width)) for part, width in zip(parts, widths)), gate, *gate_feats

    def _compute_g_and_beta(
        self: Any, A_log_local_cp: Tensor, dt_bias_local_cp: Tensor, alpha: Tensor, beta: Tensor
    ) -> tuple[RawGate, Tensor]:
        """Pass the gate and the write strength on as they are: the operators compute both."""
        return RawGate(alpha, A_log_local_cp, dt_bias_local_cp), beta


class _KimiDeltaAttention(_GatedDeltaNet):
    """Kimi Delta Attention layer for Megatron-LM: one decay per key channel, and a sigmoid output gate.

    A subclass of Megatron's `GatedDeltaNet`: the same sizes, projections, parallelism and checkpoints. The section
    "alpha" of `in_proj` has HV * K rows, and so has `dt_bias`. So the projections of the decay and of the output gate
    have full rank; those of `wyfold.layers.KimiDeltaAttention` are products of two matrices.

    Args:
        lower_bound: Bound of the bounded gate, below 0. None: the softplus gate.
        Others as Megatron's `GatedDeltaNet`.

    Source:
        Kimi Linear, arXiv:2510.26692, Eqs. (1) and (10).
    """

    def __init__(self, config: Any, *args: Any, lower_bound: float | None = None, **kwargs: Any):
        self.lower_bound = lower_bound
        super().__init__(config, *args, **kwargs)

    def _setup_variant_attrs(self: Any) -> None:
        super()._setup_variant_attrs()
        channels = self.num_v_heads_local_tp * self.key_head_dim
        self.in_proj_extra_dim = self.num_value_heads * (1 + self.key_head_dim)  # beta and alpha
        self.in_proj_split_sections = (*self.in_proj_split_sections[:-1], channels)
        self.feat_dim_split = (*self.feat_dim_split[:-1], channels // self.cp_size)
        self.dt_bias_dim = channels
        self.gated_delta_rule = functools.partial(
            _gated_delta_rule, normalise=self.use_qk_l2norm, lower_bound=self.lower_bound
        )

    def _prepare_input_for_gated_delta_rule(
        self: Any, qkv: Tensor, gate: Tensor, batch: int, seq_len: int, *gate_feats: Tensor
    ) -> tuple[Tensor, ...]:
        *others, alpha = super()._prepare_input_for_gated_delta_rule(qkv, gate, batch, seq_len, *gate_feats)
        return *others, alpha.unflatten(-1, (-1, self.key_head_dim))

    def _apply_gated_norm(self: Any, x: Tensor, gate: Tensor) -> Tensor:
        y = self.out_norm(x.reshape(-1, x.shape[-1]))
        return (y * torch.sigmoid(gate.reshape(-1, gate.shape[-1]).float())).to(x.dtype)


def _gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, *, g: RawGate, beta: Tensor, normalise: bool, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Megatron's GatedDeltaRuleInterface, for q and k before their norm, and a gate before its computation."""
    options["use_qk_l2norm_in_kernel"] = normalise  # Megatron passes False, because its own layer has normalised them
    rule: Any = chunk_gated_delta_rule if g.raw.ndim == 3 else chunk_kda
    o, state = rule(
        q, k, v, g.raw, beta, use_gate_in_kernel=True, A_log=g.A_log, dt_bias=g.dt_bias,
        use_beta_sigmoid_in_kernel=True, **options,
    )  # fmt: skip
    return o, state


def _with_globals(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """A copy of a function that finds other objects under some of its global names. The module keeps its own."""
    code: Any = function
    copied = types.FunctionType(
        code.__code__, {**code.__globals__, **names}, code.__name__, code.__defaults__, code.__closure__
    )
    copied.__kwdefaults__ = code.__kwdefaults__
    return copied


@functools.cache
def _layer_class(name: str) -> Any:
    rules = {"GatedDeltaNet": _GatedDeltaNet, "KimiDeltaAttention": _KimiDeltaAttention}
    if name not in rules:
        raise ValueError(f"name must be one of {', '.join(rules)}, got {name!r}")
    base = importlib.import_module(LAYER).GatedDeltaNet
    members = {"__module__": __name__, "__doc__": rules[name].__doc__}
    return type(name, (rules[name], base), members)


def __getattr__(name: str) -> Any:
    """Create the layer classes on first use, because their base class is Megatron's."""
    if name not in ("GatedDeltaNet", "KimiDeltaAttention"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return globals().setdefault(name, _layer_class(name))
