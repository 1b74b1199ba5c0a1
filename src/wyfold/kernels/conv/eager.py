"""`conv` in PyTorch: the same taps over every window."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.conv import ConvGradients
from wyfold.kernels.conv.windows import Windows
from wyfold.tile.activation.eager import silu, silu_bwd
from wyfold.tile.rows.eager import widest
from wyfold.tile.taps.eager import tap_products, taps


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
    w, b = _filter(weight, bias, dtype)
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
    w, b = _filter(weight, bias, dtype)
    windows = Windows(cu_seqlens, weight.shape[1] - 1, weight.shape[0], x.device)
    through = activated and dy is not None
    dp = x.new_zeros((), dtype=dtype).expand(x.shape) if dy is None else dy
    if through:
        dp = dp.new_empty(x.shape, dtype=dtype)
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


def _filter(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Taps [W, D] and the bias, in the dtype of the arithmetic."""
    return weight.to(dtype).t().contiguous(), None if bias is None else bias.to(dtype)


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
