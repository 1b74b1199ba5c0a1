"""`rms_norm_gated` in PyTorch, in blocks of rows that fit the cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wyfold.kernels.norm import RmsNormGradients, RmsNormOptions
from wyfold.tile.activation.eager import sigmoid, sigmoid_bwd, silu, silu_bwd
from wyfold.tile.norm import eager as norm
from wyfold.tile.rows.eager import contiguous_rows, row_blocks, widest

ACTIVATIONS = {"swish": (silu, silu_bwd), "silu": (silu, silu_bwd), "sigmoid": (sigmoid, sigmoid_bwd)}


def rms_norm_gated(
    x: Tensor, z: Tensor, weight: Tensor, bias: Tensor | None, options: RmsNormOptions, out: Tensor
) -> None:
    """Write the normalised and gated rows to out.

    Args:
        x, z: [n, W], any float.
        weight, bias: [W], any float; bias may be None.
        options: Options of the call.
        out: [n, W], dtype of x.
    """
    dtype = widest(x, z, weight, bias)
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    for rows in row_blocks(*x.shape):
        y = _forward(contiguous_rows(x[rows], dtype), contiguous_rows(z[rows], dtype), weight, bias, options, x.dtype)
        out[rows] = y.affine * y.gate if options.norm_before_gate else y.affine


def rms_norm_gated_bwd(
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dy: Tensor,
    options: RmsNormOptions,
    out: RmsNormGradients,
) -> None:
    """Gradients of `rms_norm_gated`; arguments as in `rms_norm_gated`, and dy [n, W]."""
    dtype = widest(x, z, weight, bias)
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    activation_bwd = ACTIVATIONS[options.activation][1]
    for total in (out.weight, out.bias):
        if total is not None:
            total.zero_()
    for rows in row_blocks(*x.shape):
        x_rows, z_rows, d = (contiguous_rows(t[rows], dtype) for t in (x, z, dy))
        y = _forward(x_rows, z_rows, weight, bias, options, x.dtype)
        d_affine = d * y.gate if options.norm_before_gate else d
        d_normed = norm.rms_norm_bwd(y.normed, y.r, d_affine * weight)
        if out.weight is not None:
            out.weight.add_((d_affine * y.rounded).sum(0))
        if out.bias is not None:
            out.bias.add_(d_affine.sum(0))
        if out.x is not None:
            out.x[rows] = d_normed if options.norm_before_gate else d_normed * y.gate
        if out.z is not None:
            out.z[rows] = activation_bwd(z_rows, d * y.affine if options.norm_before_gate else d_normed * x_rows)


class _NormRows(NamedTuple):
    """Intermediate results of a block of rows.

    Attributes:
        gate: act(z).
        normed: Normalised row.
        r: Reciprocal root mean square.
        rounded: Normalised row as the weight multiplies it.
        affine: `rounded` times weight, plus bias.
    """

    gate: Tensor
    normed: Tensor
    r: Tensor
    rounded: Tensor
    affine: Tensor


def _forward(
    x: Tensor, z: Tensor, weight: Tensor, bias: Tensor | None, options: RmsNormOptions, storage: torch.dtype
) -> _NormRows:
    gate = ACTIVATIONS[options.activation][0](z)
    normed, r = norm.rms_norm(x if options.norm_before_gate else x * gate, options.eps)
    rounded = normed.to(storage).to(x.dtype) if options.round_before_weight else normed
    affine = rounded * weight
    return _NormRows(gate, normed, r, rounded, affine if bias is None else affine.add_(bias))
