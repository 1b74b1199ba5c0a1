"""Log gates and write strengths from what a layer projects, elementwise, each in one launch, forward and backward.

    gate            u = x + dt_bias;   -exp(A_log) softplus(u)                    "softplus"
                                       lower_bound sigmoid(exp(A_log) u)          "bounded"
    beta_sigmoid    scale sigmoid(x)

Nothing is floored here: an infinite x gives -inf, which the delta operators read as a full reset.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class GateGradients(NamedTuple):
    """Where `gate_bwd` writes: x like x, A_log [HV] and dt_bias [HV, 1 or K] added to; None: not wanted."""

    x: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
