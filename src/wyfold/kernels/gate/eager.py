"""Gates in PyTorch, in blocks of tokens that fit the cache."""

from __future__ import annotations

import math

from torch import Tensor

from wyfold.kernels.gate import GateGradients
from wyfold.tile.activation.eager import sigmoid, sigmoid_bwd
from wyfold.tile.decay.eager import log_gate, log_gate_bwd
from wyfold.tile.rows.eager import contiguous_rows, row_blocks, widest

NO_FLOOR = -math.inf


def gate(
    x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, activation: str, lower_bound: float, out: Tensor
) -> None:
    """Write the natural-log decay per token to out.

    Args:
        x: [n, HV, 1 or K], any float. Pre-activation.
        A_log: [HV] or None (rate 1).
        dt_bias: [HV * (1 or K)] or None (0).
        activation: "softplus" or "bounded".
        lower_bound: Lower bound of the "bounded" activation.
        out: Shape of x.
    """
    dtype = widest(x, A_log, dt_bias)
    for tokens in row_blocks(x.shape[0], x[:1].numel()):
        tile = x[tokens].to(dtype).unsqueeze(2)
        out[tokens] = log_gate(tile, A_log, dt_bias, activation, lower_bound, NO_FLOOR).squeeze(2)


def gate_bwd(
    x: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    activation: str,
    lower_bound: float,
    dg: Tensor,
    out: GateGradients,
) -> None:
    """Gradients of `gate`; arguments as in `gate`, and dg like x."""
    dtype = widest(x, A_log, dt_bias)
    for total in (out.A_log, out.dt_bias):
        if total is not None:
            total.zero_()
    for tokens in row_blocks(x.shape[0], x[:1].numel()):
        # A fixed layout, because the order of the parameters' sums follows it.
        tile, d = (contiguous_rows(t[tokens], dtype).unsqueeze(2) for t in (x, dg))
        dx, dA_log, ddt_bias = log_gate_bwd(tile, d, A_log, dt_bias, activation, lower_bound, NO_FLOOR)
        if out.x is not None:
            out.x[tokens] = dx.squeeze(2)
        for total, part in ((out.A_log, dA_log), (out.dt_bias, ddt_bias)):
            if total is not None and part is not None:
                total += part


def beta_sigmoid(x: Tensor, scale: float, out: Tensor) -> None:
    """Write scale * sigmoid(x) to out; both [n, W]."""
    for rows in row_blocks(*x.shape):
        out[rows] = sigmoid(x[rows].to(widest(x))).mul_(scale)


def beta_sigmoid_bwd(x: Tensor, scale: float, dbeta: Tensor, dx: Tensor) -> None:
    """Write the gradient of `beta_sigmoid` to dx; all [n, W]."""
    for rows in row_blocks(*x.shape):
        dx[rows] = sigmoid_bwd(x[rows].to(widest(x)), dbeta[rows].to(widest(x))).mul_(scale)
