"""Row norms, each in one launch, forward and backward; the last axis is a row.

    l2norm           y = x (sum x^2 + eps)^(-1/2)
    rms_norm_gated   y = (rms(x) weight + bias) act(z)        norm_before_gate
                     y = rms(x act(z)) weight + bias          otherwise,    rms(x) = x (mean x^2 + eps)^(-1/2)

z is the gate before its activation. Sums are float32 or wider and include eps exactly. A result is rounded once. A
row's bits do not depend on the rows around it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class RmsNormOptions:
    """Options of one call of `rms_norm_gated`: the scalars of the registered operators' schema, in this order.

    Attributes:
        activation: "swish" or "silu", both x sigmoid(x), or "sigmoid".
        eps: Added to the mean square.
        norm_before_gate: Normalise first, then gate; else gate first.
        round_before_weight: Round the normalised row to x's dtype before the multiplication by the weight. The gradient
            passes through the rounding unchanged.
    """

    activation: str
    eps: float
    norm_before_gate: bool
    round_before_weight: bool

    SCHEMA = "str activation, float eps, bool norm_before_gate, bool round_before_weight"

    def scalars(self) -> tuple[object, ...]:
        """The fields, in the schema's order."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))


class RmsNormGradients(NamedTuple):
    """Buffers that `rms_norm_gated_bwd` writes; None where a gradient is not wanted.

    Attributes:
        x, z: [n, W], in the inputs' dtypes.
        weight, bias: [W], sums over rows. In the wide dtype if they are added up here, as on eager.
    """

    x: Tensor | None
    z: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
