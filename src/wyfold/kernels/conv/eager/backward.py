"""`conv_bwd` in PyTorch: the same taps, in reverse, over every window."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.conv import ConvGradients
from wyfold.kernels.conv.eager.forward import float_taps
from wyfold.kernels.conv.windows import Windows
from wyfold.tile.activation.eager import silu_bwd
from wyfold.tile.taps.eager import tap_products, taps


def conv_bwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor,
    activated: bool,
    dy: Tensor | None,
    dfinal: Tensor | None,
    dtype: torch.dtype,
    out: ConvGradients,
) -> None:
    """Gradients of `conv`.

    Args:
        x, weight, bias, state, cu_seqlens, activated: As in `conv`.
        dy: [T, D] or None (zeros).
        dfinal: [N, D, S] or None (zeros).
        dtype: Dtype of the arithmetic.
        out: Wanted gradients.
    """
    w, b = float_taps(weight, bias, dtype)
    windows = Windows(cu_seqlens, weight.shape[1] - 1, weight.shape[0], x.device)
    through = activated and dy is not None
    dp = x.new_zeros((), dtype=dtype).expand(x.shape) if dy is None else dy
    if through:
        dp = dp.new_empty(x.shape, dtype=dtype)
    for total in (out.weight, out.bias):
        if total is not None:
            total.zero_()
    if dy is not None and (through or out.weight is not None or out.bias is not None):
        for window in windows.before(x, state, dtype):
            d = window.read(dy).to(dtype)
            if through:
                p = taps(window.values, w)
                d = silu_bwd(p if b is None else p.add_(b), d)
                window.write(dp, d)
            if out.weight is not None:
                out.weight.add_(torch.stack([window.total(terms) for terms in tap_products(window.values, d)]))
            if out.bias is not None:
                out.bias.add_(window.total(d.clone()))
    if out.x is not None:
        _inputs_bwd(windows, dp, dfinal, w, out.x)
    if out.state is not None:
        _state_bwd(windows, dp, dfinal, w, out.state)


def _inputs_bwd(windows: Windows, dp: Tensor, dfinal: Tensor | None, w: Tensor, dx: Tensor) -> None:
    """Compute dx: through every tap, and through the final state."""
    for window in windows.after(dp, w.dtype, 0 if dfinal is None else dfinal.shape[2]):
        d = taps(window.values, w.flip(0))
        if dfinal is not None and window.sequences is not None:
            d += dfinal[window.sequences, :, dfinal.shape[2] - d.shape[1] :].transpose(1, 2)
        window.write(dx, d)
    dx[windows.end :] = 0


def _state_bwd(windows: Windows, dp: Tensor, dfinal: Tensor | None, w: Tensor, dstate: Tensor) -> None:
    """Gradient of the initial state: through the taps of the first tokens, and where it is still in the final state."""
    reach, S = windows.reach, dstate.shape[2]
    dstate.zero_()
    for edge in windows.heads():
        d = edge.read(dp).to(w.dtype)
        d = d.masked_fill(edge.missing.to(d.device).view(*d.shape[:2], 1), 0)
        around = torch.nn.functional.pad(d, (0, 0, reach, reach - d.shape[1]))
        dstate[edge.sequences, :, S - reach :] = taps(around, w.flip(0)).transpose(1, 2)
    if dfinal is not None:
        source = torch.arange(S) - windows.lengths[:, None]  # initial entry c is final entry c - length
        moved = dfinal.gather(2, source.clamp(min=0).to(dfinal.device)[:, None].expand(dfinal.shape)).to(w.dtype)
        dstate += moved.masked_fill_((source < 0).to(dfinal.device)[:, None], 0)
