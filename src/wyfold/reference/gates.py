"""Gate activations: log decays and write strengths from a layer's projections."""

import torch
import torch.nn.functional as F
from torch import Tensor

from wyfold.reference.sequences import working_dtype

# exp(FLOOR) is exactly zero, so a floored gate resets like -inf, but stays finite: it can be added, subtracted and
# multiplied by a zero gradient.
FLOOR = {torch.float32: -104.0, torch.float64: -746.0}

# Replaces an infinite pre-activation, whose zero gradient would otherwise be multiplied by infinity.
LARGEST = 1e30


def gdn_gate(
    g: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, output_dtype: torch.dtype | None = None
) -> Tensor:
    """Log decay per value head from its pre-activation.

        g' = -exp(A_log) softplus(g + dt_bias)

    Args:
        g: [..., HV], any float. Pre-activation, any sign.
        A_log: HV elements in any shape. Natural log of the rate. None: rate 1.
        dt_bias: [HV]. None: 0.
        output_dtype: None: float32, or float64 if an input is float64.

    Returns:
        g': [..., HV], natural log of the decay per token, <= 0.

    Source:
        Log of alpha_t in Eq. (10) of Gated DeltaNet, arXiv:2412.06464v3, with the decay of Mamba2, arXiv:2405.21060.
    """
    work = working_dtype(g, A_log, dt_bias)
    bias = None if dt_bias is None else dt_bias.reshape(-1)
    rate = None if A_log is None else A_log.reshape(-1)
    return _softplus_gate(g.to(work), rate, bias).to(output_dtype or work)


def kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Log decay per key channel from its pre-activation.

        g' = -exp(A_log) softplus(g + dt_bias)                      without a bound
        g' = lower_bound sigmoid(exp(A_log) (g + dt_bias))          with one

    Args:
        g: [..., HV, K], any float. Pre-activation, any sign.
        A_log: HV elements in any shape. Natural log of the rate of all channels of a head. None: rate 1.
        dt_bias: [HV, K] or [HV*K]. None: 0.
        lower_bound: Negative; strongest decay per token, natural log. None: unbounded.
        output_dtype: None: float32, or float64 if an input is float64.

    Returns:
        g': [..., HV, K], natural log of the decay per token, <= 0.

    Source:
        Log of alpha_t in Eq. (1) of Kimi Linear, arXiv:2510.26692; parameters in section 4.
    """
    work = working_dtype(g, A_log, dt_bias)
    bias = None if dt_bias is None else dt_bias.reshape(g.shape[-2:])
    rate = None if A_log is None else A_log.reshape(-1, 1)
    if lower_bound is None:
        return _softplus_gate(g.to(work), rate, bias).to(output_dtype or work)
    return _bounded_gate(g.to(work), rate, bias, lower_bound).to(output_dtype or work)


def beta_sigmoid(x: Tensor, scale: float = 1.0) -> Tensor:
    """Write strength from its logit, `scale * sigmoid(x)`.

    Args:
        x: Any shape, any float.
        scale: 1, or 2 to allow negative eigenvalues.

    Returns:
        Shape of x, float32; float64 for a float64 x.
    """
    return scale * sigmoid(x.to(working_dtype(x)))


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), with a gradient as accurate as the value.

    The gradient of `torch.sigmoid`, s (1 - s), cancels for large x: in float64 it is 0 from x = 37 on.
    """
    positive = x >= 0
    e = torch.exp(torch.where(positive, -x, x))
    return torch.where(positive, 1.0, e) / (1.0 + e)


def raise_to(g: Tensor, bound: float) -> Tensor:
    """Clamp g from below at the bound; clamped values have gradient zero, values equal to the bound gradient one."""
    return g.clamp(min=bound)


def floored(g: Tensor) -> Tensor:
    """Clamp g from below where exp is zero: -inf becomes a reset whose gradient is exactly zero."""
    return raise_to(g, FLOOR[g.dtype])


def _softplus_gate(g: Tensor, A_log: Tensor | None, bias: Tensor | None) -> Tensor:
    # torch's softplus is linear from 20 on, where log1p(exp(-20)) is still 2e-9; this form is exact everywhere.
    softplus = -F.logsigmoid(-_shifted(g, bias))
    return -softplus if A_log is None else -A_log.to(g.dtype).exp() * softplus


def _bounded_gate(g: Tensor, A_log: Tensor | None, bias: Tensor | None, lower_bound: float) -> Tensor:
    u = _shifted(g, bias)
    return lower_bound * sigmoid(u if A_log is None else A_log.to(g.dtype).exp() * u)


def _shifted(g: Tensor, bias: Tensor | None) -> Tensor:
    u = g if bias is None else g + bias.to(g.dtype)
    return u.clamp(-LARGEST, LARGEST)
