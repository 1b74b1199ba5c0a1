"""`conv` in PyTorch: the same taps over every window."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.conv.windows import Windows
from wyfold.tile.activation.eager import silu
from wyfold.tile.rows.eager import widest
from wyfold.tile.taps.eager import taps


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor,
    activated: bool,
    out: Tensor,
    final_state: Tensor | None,
) -> None:
    """Write y to out, and the latest inputs to final_state.

    Args:
        x: [T, D], any float; tokens of all sequences, one after another.
        weight: [D, W], any float.
        bias: [D] or None.
        residual: [T, D] or None. Added after the activation.
        state: [N, D, S], S >= W-1, or None (zeros). The latest inputs, oldest first.
        cu_seqlens: [N+1] legal boundaries, int64 on the CPU.
        activated: Whether act is silu, else the identity.
        out: [T, D]. Zero past the last boundary.
        final_state: [N, D, S], or None if unwanted.
    """
    dtype = widest(x, weight, bias, residual, state)
    w, b = float_taps(weight, bias, dtype)
    windows = Windows(cu_seqlens, weight.shape[1] - 1, weight.shape[0], x.device)
    for window in windows.before(x, state, dtype):
        y = taps(window.values, w)
        if b is not None:
            y += b
        if activated:
            y = silu(y)
        if residual is not None:
            y += window.read(residual)
        window.write(out, y)
    out[windows.end :] = 0
    if final_state is not None:
        windows.latest(x, state, final_state)


def float_taps(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Taps [W, D] and the bias, in the dtype of the arithmetic."""
    return weight.to(dtype).t().contiguous(), None if bias is None else bias.to(dtype)
