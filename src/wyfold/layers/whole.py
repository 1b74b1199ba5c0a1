"""Whether a layer's call is that of its parameters alone, so that one autograd function may take its place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from wyfold.autograd.mixer import MixerTensors
from wyfold.layers.conv import ShortConvolution
from wyfold.layers.norm import GatedRMSNorm
from wyfold.ops.delta_checks import DeltaFlags
from wyfold.ops.mixer import MixerFlags, whole_mixer
from wyfold.runtime import replay_cache
from wyfold.runtime.layout import SequenceLayout

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = [getattr(modules, f"_global{name}", {}) for name in _HOOKS]
_PLAIN = frozenset((nn.Linear, ShortConvolution, GatedRMSNorm))


def are_plain(*children: nn.Module | None) -> bool:
    """Whether modules compute what their class does: no subclass, no hook, no replaced forward.

    Quantized, adapted and sharded modules are other classes or have hooks.
    """
    for hooks in _GLOBAL_HOOKS:
        if hooks:
            return False
    for child in children:
        if child is None:
            continue
        state: dict[str, Any] = child.__dict__
        if type(child) not in _PLAIN or "forward" in state:
            return False
        for name in _HOOKS:
            if state[name]:
                return False
    return True


def whole_layer(
    layer: Any,
    x: Tensor,
    layout: SequenceLayout | None,
    decay: tuple[Any, Any],
    gate: tuple[Any, Any],
    defined: Any,
) -> Tensor | None:
    """A layer with decays and a gated norm as one autograd function; None if its modules have to run.

    Args:
        layer: A `DeltaMixer`.
        x, layout: As its forward takes them.
        decay, gate: Projections of the decay and of the output gate, of which the first may be absent.
        defined: Class whose operators and methods define the rule, the gate and the norm; a layer with other ones runs
            as modules.
    """
    if (
        torch.compiler.is_compiling()
        or not isinstance(x, Tensor)
        or x.device.type not in replay_cache.DEVICES
        or not torch.is_grad_enabled()
    ):
        return None
    kind: Any = type(layer)
    if layer.updates != 1 or kind.gate_arguments is not defined.gate_arguments or kind.read_out is not defined.read_out:
        return None
    if layer.operators is not defined.operators or "read_out" in layer.__dict__ or "gate_arguments" in layer.__dict__:
        return None
    if layer.conv.backend != layer.backend or layer.norm.backend != layer.backend:
        return None
    linear = layer.qkv, layer.beta, *decay, gate[0], layer.out
    if not are_plain(*linear, gate[1], layer.conv, layer.norm):
        return None
    if any(child is not None and child.bias is not None for child in linear):
        return None
    if layout is not None and not isinstance(layout, SequenceLayout):
        return None
    A_log, dt_bias = layer.decay_parameters()
    tensors = MixerTensors(
        x,
        layer.qkv.weight,
        layer.conv.weight,
        layer.conv.bias,
        layer.beta.weight,
        None if decay[0] is None else decay[0].weight,
        decay[1].weight,
        A_log,
        dt_bias,
        None if gate[0] is None else gate[0].weight,
        gate[1].weight,
        gate[1].bias,
        layer.norm.weight,
        layer.out.weight,
        None,
    )
    return whole_mixer(tensors, _flags(layer), layout)


def _flags(layer: Any) -> MixerFlags:
    chunk, norm = layer.operators[0], layer.norm
    rule = DeltaFlags(
        op=chunk.__name__,
        channel=layer.decay_parameters.dt_bias.ndim == 2,
        recurrent=False,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=layer.allow_neg_eigval,
        backend=layer.backend,
        use_gate_in_kernel=True,
        lower_bound=getattr(layer, "lower_bound", None),
    )
    heads = layer.num_heads, layer.num_v_heads, layer.head_dim, layer.head_v_dim
    settings = layer.conv.activation, norm.activation, norm.eps, norm.round_before_weight
    return MixerFlags(*heads, *settings, rule)
