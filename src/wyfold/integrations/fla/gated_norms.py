"""Norms with a gate under fla's names.

`rms_norm_gated` without a residual runs `wyfold.rms_norm_gated`. Wyfold has no kernel for the others: they are plain
PyTorch, which computes in float32 (float64 for float64 inputs) and rounds each result once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wyfold.ops import norm
from wyfold.runtime import check

Normed = Tensor | tuple[Tensor, Tensor]
"""Result; with `prenorm` a pair of the result and the normalised sum."""


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Normed:
    """`wyfold.rms_norm_gated`; in plain PyTorch with a residual, with `prenorm` or with eps=0.

    Args:
        residual: [..., D]. Added to x, in float32, before the norm.
        prenorm: Return the sum too.
        residual_in_fp32: Dtype of the returned sum where there is no residual whose dtype it could have.
        eps: Added to the mean square. With 0, a row of zeros is NaN, as in fla.
    """
    check.flag("rms_norm_gated", prenorm=prenorm)
    if residual is not None or prenorm or check.number("rms_norm_gated", "eps", eps) == 0:
        return _normalised_then_gated(
            "rms_norm_gated", x, g, weight, bias, activation, residual, prenorm, residual_in_fp32, eps
        )
    weight = torch.ones(x.shape[-1], dtype=torch.float32, device=x.device) if weight is None else weight
    return norm.rms_norm_gated(x, g, weight, bias, activation=activation, eps=eps)


def layer_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Normed:
    """Layer norm of x [..., D], times an activated gate, in plain PyTorch. Arguments are those of `rms_norm_gated`."""
    return _normalised_then_gated(
        "layer_norm_gated", x, g, weight, bias, activation, residual, prenorm, residual_in_fp32, eps
    )


def rms_norm_swish_gate_linear(
    x: Tensor,
    g: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Normed:
    """`rms_norm_gated` with swish, then a linear map with `linear_weight` [out, D]."""
    normed = rms_norm_gated(x, g, norm_weight, norm_bias, "swish", residual, prenorm, residual_in_fp32, eps)
    return _projected(normed, linear_weight, linear_bias)


def layer_norm_swish_gate_linear(
    x: Tensor,
    g: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Normed:
    """`layer_norm_gated` with swish, then a linear map with `linear_weight` [out, D]."""
    normed = layer_norm_gated(x, g, norm_weight, norm_bias, "swish", residual, prenorm, residual_in_fp32, eps)
    return _projected(normed, linear_weight, linear_bias)


def layernorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> Tensor:
    """Norm of groups of channels, before or after a gate silu(z), in plain PyTorch.

    Args:
        x: [..., D].
        weight, bias: [D].
        z: [..., D], or None for no gate.
        group_size: Channels of a group, a divisor of D. None: D.
        norm_before_gate: Normalise x and then multiply by the gate; otherwise normalise x silu(z).
        is_rms_norm: Root-mean-square norm instead of the layer norm.

    Raises:
        ValueError: A shape is wrong, or eps is negative.
    """
    check.floating("layernorm_fn", x=x, weight=weight, bias=bias, z=z)
    sizes = check.shapes("layernorm_fn", optional=("bias",), weight=(weight, "D"), bias=(bias, "D"))
    D = sizes["D"]
    group = D if group_size is None else check.integer("layernorm_fn", "group_size", group_size, least=1)
    if x.shape[-1:] != (D,) or (z is not None and z.shape != x.shape) or D % group:
        raise ValueError(
            f"layernorm_fn: x and z must be [..., {D}], a multiple of group_size = {group}, as weight is, got "
            f"{list(x.shape)} and {None if z is None else list(z.shape)}"
        )
    wide = torch.promote_types(x.dtype, torch.float32)
    gate = None if z is None else F.silu(z.to(wide))
    y = x.to(wide)
    if gate is not None and not norm_before_gate:
        y = y * gate
    y = _normalised("layernorm_fn", y.unflatten(-1, (D // group, group)), eps, centred=not is_rms_norm).flatten(-2)
    y = y * weight.to(wide)
    if bias is not None:
        y = y + bias.to(wide)
    if gate is not None and norm_before_gate:
        y = y * gate
    return y.to(x.dtype)


def rmsnorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """`layernorm_fn` with the root-mean-square norm."""
    return layernorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate, True)


class NormParameters(nn.Module):
    """Parameters of a norm of the last dimension: `weight` and `bias` [hidden_size], or None."""

    hidden_size: int
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def _add_parameters(
        self, weight: bool, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        for name, used in (("weight", weight), ("bias", bias)):
            parameter = nn.Parameter(torch.empty(self.hidden_size, device=device, dtype=dtype)) if used else None
            self.register_parameter(name, parameter)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class _GatedNorm(NormParameters):
    """Parameters of a norm with a gate, `weight` and `bias` [hidden_size] or None, and its options."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool,
        bias: bool,
        eps: float,
        activation: str,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ):
        super().__init__()
        check.choice(type(self).__name__, "activation", activation, ("swish", "silu", "sigmoid"))
        self.hidden_size, self.elementwise_affine = hidden_size, elementwise_affine
        self.eps, self.activation = eps, activation
        self._add_parameters(elementwise_affine, elementwise_affine and bias, device, dtype)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, activation={self.activation!r}"


class FusedRMSNormGated(_GatedNorm):
    """Root-mean-square norm of the last dimension, times an activated gate; fla's module of that name.

    Args:
        hidden_size: Size of the last dimension.
        elementwise_affine: Use a weight.
        eps: Added to the mean square.
        activation: "swish", "silu" (the same) or "sigmoid".
        device, dtype: Device and dtype of the parameter, `weight` [hidden_size].
    """

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(hidden_size, elementwise_affine, False, eps, activation, device, dtype)

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Normed:
        """Normalise and gate x [..., D] with `rms_norm_gated`."""
        return rms_norm_gated(x, g, self.weight, None, self.activation, residual, prenorm, residual_in_fp32, self.eps)


class FusedLayerNormGated(_GatedNorm):
    """Layer norm of the last dimension, times an activated gate, in plain PyTorch; fla's module of that name.

    Args:
        hidden_size: Size of the last dimension.
        elementwise_affine: Use a weight.
        bias: Add a bias; ignored without a weight.
        activation: "swish", "silu" (the same) or "sigmoid".
        eps: Added to the variance.
        device, dtype: Device and dtype of the parameters, `weight` and `bias` [hidden_size].
    """

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        activation: str = "swish",
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(hidden_size, elementwise_affine, bias, eps, activation, device, dtype)

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Normed:
        """Normalise and gate x [..., D] with `layer_norm_gated`."""
        return layer_norm_gated(
            x, g, self.weight, self.bias, self.activation, residual, prenorm, residual_in_fp32, self.eps
        )


class FusedRMSNormSwishGateLinear(_GatedNorm):
    """Root-mean-square norm with a swish gate, and a linear map of its result; fla's module of that name.

    Args:
        hidden_size: Size of the last dimension.
        elementwise_affine: Use a weight.
        eps: Added to the mean square.
        device, dtype: Device and dtype of the parameter, `weight` [hidden_size].
    """

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(hidden_size, elementwise_affine, False, eps, "swish", device, dtype)

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Normed:
        """Normalise and gate x [..., D] and multiply it by `weight` [out, D], the caller's."""
        return rms_norm_swish_gate_linear(
            x, g, self.weight, None, weight, bias, residual, prenorm, residual_in_fp32, self.eps
        )


class FusedLayerNormSwishGateLinear(FusedRMSNormSwishGateLinear):
    """`FusedRMSNormSwishGateLinear` with the layer norm, in plain PyTorch; fla's module of that name."""

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Normed:
        """Normalise and gate x [..., D] and multiply it by `weight` [out, D], the caller's."""
        return layer_norm_swish_gate_linear(
            x, g, self.weight, None, weight, bias, residual, prenorm, residual_in_fp32, self.eps
        )


def _normalised_then_gated(
    op: str,
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    prenorm: bool,
    residual_in_fp32: bool,
    eps: float,
) -> Normed:
    """The norm that `op` names of x + residual, times the gate, in PyTorch."""
    check.choice(op, "activation", activation, ("swish", "silu", "sigmoid"))
    check.flag(op, prenorm=prenorm, residual_in_fp32=residual_in_fp32)
    given: dict[str, Any] = {"x": x, "g": g, "residual": residual, "weight": weight, "bias": bias}
    check.floating(op, **given)
    check.same_attribute(op, "device", **given)
    of_rows = {"D": x.shape[-1] if x.ndim else 1}
    check.shapes(op, optional=("weight", "bias"), known=of_rows, weight=(weight, "D"), bias=(bias, "D"))
    if g.shape != x.shape or (residual is not None and residual.shape != x.shape):
        others = [None if other is None else list(other.shape) for other in (g, residual)]
        raise ValueError(f"{op}: g and residual must be {list(x.shape)} as x, got {others[0]} and {others[1]}")
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.to(wide) if residual is None else x.to(wide) + residual.to(wide)
    y = _normalised(op, total, eps, centred=op == "layer_norm_gated")
    if weight is not None:
        y = y * weight.to(wide)
    if bias is not None:
        y = y + bias.to(wide)
    gate = g.to(wide)
    y = (y * (gate.sigmoid() if activation == "sigmoid" else F.silu(gate))).to(x.dtype)
    if not prenorm:
        return y
    kept = residual.dtype if residual is not None else torch.float32 if residual_in_fp32 else x.dtype
    return y, total.to(kept)


def _normalised(op: str, x: Tensor, eps: float, *, centred: bool) -> Tensor:
    """x divided by its root mean square over the last dimension, after its mean is subtracted if `centred`."""
    if check.number(op, "eps", eps) < 0:
        raise ValueError(f"{op}: eps must be at least 0, got {eps}")
    if centred:
        x = x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _projected(normed: Normed, weight: Tensor, bias: Tensor | None) -> Normed:
    """A linear map of a norm's result, in the dtype of that result."""
    y, *total = normed if isinstance(normed, tuple) else (normed,)
    y = F.linear(y, weight.to(y.dtype), None if bias is None else bias.to(y.dtype))
    return (y, total[0]) if total else y
