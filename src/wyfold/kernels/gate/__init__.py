"""Log gates and write strengths from a layer's projections, elementwise, each in one launch, forward and backward.

    gate            u = x + dt_bias;   -exp(A_log) softplus(u)                    "softplus"
                                       lower_bound sigmoid(exp(A_log) u)          "bounded"
    beta_sigmoid    scale sigmoid(x)

The results are not clamped: an infinite x gives -inf, which the delta operators read as a full reset.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class GateGradients(NamedTuple):
    """Buffers that `gate_bwd` writes; None where a gradient is not wanted.

    Attributes:
        x: Shape of x.
        A_log: [HV], a sum over tokens.
        dt_bias: [HV, 1 or K], a sum over tokens.
    """

    x: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
