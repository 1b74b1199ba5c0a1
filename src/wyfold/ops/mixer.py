"""A layer of the delta family as one autograd function, where its modules would compute the same."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.autograd.conv import ConvTensors
from wyfold.autograd.delta_records import DeltaTensors
from wyfold.autograd.mixer import Mixer, MixerOptions, MixerTensors
from wyfold.kernels.norm import RmsNormOptions
from wyfold.ops.conv import CONV
from wyfold.ops.delta_checks import DeltaFlags
from wyfold.ops.delta_plan import known_short, make_plan
from wyfold.ops.norm import RMS_NORM_GATED
from wyfold.runtime import check, torch_modes
from wyfold.runtime.layout import SequenceLayout
from wyfold.runtime.replay_cache import find_call


class MixerFlags(NamedTuple):
    """Arguments of a layer's call that are no tensors.

    Attributes:
        H, HV, K, V: Heads and their widths.
        conv_activation: Of the convolution.
        norm_activation, eps, round_before_weight: Of the gated norm.
        rule: Of the rule.
    """

    H: int
    HV: int
    K: int
    V: int
    conv_activation: str | None
    norm_activation: str
    eps: float
    round_before_weight: bool
    rule: DeltaFlags

    def values(self) -> tuple[Any, ...]:
        """All fields as the values of a cache key."""
        return (*self[:-1], *self.rule)

    @classmethod
    def of_values(cls, values: tuple[Any, ...]) -> MixerFlags:
        """The inverse of `values`."""
        H, HV, K, V, conv_activation, norm_activation, eps, rounds, *rule = values
        return cls(H, HV, K, V, conv_activation, norm_activation, eps, rounds, DeltaFlags(*rule))


def whole_mixer(tensors: MixerTensors, flags: MixerFlags, layout: SequenceLayout | None) -> Tensor | None:
    """Run a layer as one autograd function; None if its modules have to run.

    That is so where no argument requires a gradient, under autocast, a compiler, a profiler or any other mode, for
    tensors of other classes, in mixed dtypes, and for widths that kernels do not have.

    Args:
        tensors: Input and parameters, without boundaries.
        flags: Of the call.
        layout: Boundaries of a packed input, or None.
    """
    if layout is not None:
        rule = flags.rule._replace(tokens=layout.tokens)
        if known_short(rule.op, tensors.x, None, layout, None):
            rule = rule._replace(max_splits=1)
        tensors, flags = tensors._replace(cu_seqlens=layout.cu_seqlens), flags._replace(rule=rule)
    known = find_call("mixer_fwd", tensors, flags.values())
    if known is None or not known.serves_function():
        return None
    options = known.plan_by(_make_plan)
    if not isinstance(options, MixerOptions):
        return None
    # Without the Python part of `apply`, as in `runtime.differentiation`.
    y: Tensor = super(torch.autograd.Function, Mixer).apply(known, options, *tensors)
    return y


def _make_plan(tensors: Any, values: tuple[Any, ...]) -> MixerOptions | str:
    """The options of a call, or why its modules have to run."""
    t, flags = MixerTensors(*tensors), MixerFlags.of_values(values)
    projections = t.read, t.strength, t.decay_down, t.decay, t.gate_down, t.gate, t.gate_bias, t.out
    if torch_modes.autocast_dtype(t.x.device.type) is not None or t.x.ndim != 3 or not t.x.numel():
        return "autocast, or no tokens"
    if t.x.dtype not in check.FLOATS or any(w is not None and w.dtype != t.x.dtype for w in projections):
        return "mixed dtypes"
    if t.x.shape[2] != t.read.shape[1] or (t.cu_seqlens is not None and t.x.shape[0] != 1):
        return "shapes that the layer refuses"
    try:
        return _planned(t, flags)
    except (TypeError, ValueError, check.UnsupportedError) as error:
        return str(error)


def _planned(t: MixerTensors, flags: MixerFlags) -> MixerOptions | str:
    H, HV, K, V = flags[:4]
    tokens, make = t.x.shape[:2], t.x.new_empty
    mixed = make(*tokens, t.conv.shape[0]).requires_grad_()
    q, k, v = mixed.split_with_sizes((H * K, H * K, HV * V), -1)
    heads = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))
    g, beta = make(*tokens, HV, *t.dt_bias.shape[1:]).requires_grad_(), make(*tokens, HV).requires_grad_()
    rule = make_plan(DeltaTensors(*heads, g, beta, None, t.A_log, t.dt_bias, t.cu_seqlens, None), flags.rule)
    conv = ConvTensors(mixed, t.conv, t.conv_bias, None, None, t.cu_seqlens)
    backend = flags.rule.backend
    convolved = CONV.make_plan(conv, (flags.rule.tokens, False, flags.conv_activation, backend))
    o = make(*tokens, HV, V).requires_grad_()
    norm = flags.norm_activation, flags.eps, True, flags.round_before_weight
    normed = RMS_NORM_GATED.make_plan((o, o, t.norm, None), (*norm, backend))
    if {rule.backend, convolved, normed} != {"triton"}:
        return "another backend than kernels"
    if K % 8 or V % 8 or V > 256 or rule.head_width or not rule.save:
        return "widths that kernels do not have"
    return MixerOptions((H, HV, K, V), flags.conv_activation is not None, rule, RmsNormOptions(*norm))
