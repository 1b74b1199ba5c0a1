"""Records of one call of a layer as one autograd function."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from wyfold.kernels.norm import RmsNormOptions
from wyfold.runtime.options import DeltaOptions


class MixerTensors(NamedTuple):
    """Input and parameters of one call of a layer. Weights are [outputs, inputs], as of `torch.nn.Linear`.

    Attributes:
        x: [B, T, hidden].
        read: Weight of the projection that the convolution reads, with the channels of q, k and v.
        conv, conv_bias: [D, W], and [D] or None.
        strength: Weight of the write strength's projection.
        decay_down, decay: Weights of the decay's projection; the first is None, unless it has two.
        A_log, dt_bias: Parameters of the decay.
        gate_down, gate, gate_bias: Those of the output gate.
        norm: [V] weight of the gated norm.
        out: Weight of the output projection.
        cu_seqlens: Boundaries of a packed input, or None.
    """

    x: Tensor
    read: Tensor
    conv: Tensor
    conv_bias: Tensor | None
    strength: Tensor
    decay_down: Tensor | None
    decay: Tensor
    A_log: Tensor
    dt_bias: Tensor
    gate_down: Tensor | None
    gate: Tensor
    gate_bias: Tensor | None
    norm: Tensor
    out: Tensor
    cu_seqlens: Tensor | None


class MixerOptions(NamedTuple):
    """Options of one call of a layer.

    Attributes:
        heads: H, HV, K and V.
        activated: Whether the convolution has an activation.
        rule, norm: Options of the rule and of the norm.
    """

    heads: tuple[int, int, int, int]
    activated: bool
    rule: DeltaOptions
    norm: RmsNormOptions

    def values(self) -> tuple[Any, ...]:
        """All fields as the values of a cache key."""
        return self.heads + (self.activated,) + tuple(self.rule) + self.norm.scalars()


class Saved(NamedTuple):
    """Tensors that the forward keeps besides its arguments, before those of the rule. Rows are tokens.

    Attributes:
        read: Input of the convolution.
        mixed: Its output, the channels of q, k and v.
        strength: Write strength, before its activation.
        decay_low, decay: Results of the decay's projections.
        gate_low, gate: Results of the output gate's.
        o: [B, T, HV, V] output of the rule.
    """

    read: Tensor
    mixed: Tensor
    strength: Tensor
    decay_low: Tensor | None
    decay: Tensor
    gate_low: Tensor | None
    gate: Tensor
    o: Tensor
