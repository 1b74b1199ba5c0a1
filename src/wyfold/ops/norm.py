"""Norms over the last axis: l2norm of queries and keys, gated RMS norm of outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wyfold.kernels import table
from wyfold.kernels.norm import RmsNormGradients, RmsNormOptions
from wyfold.kernels.trial import Trial, sample
from wyfold.runtime import check
from wyfold.runtime.differentiation import apply, once_differentiable
from wyfold.runtime.kernel_configs import LaunchKey
from wyfold.runtime.plan import Plan
from wyfold.runtime.replay_cache import PublicOperator, planned
from wyfold.runtime.torch_ops import call, register
from wyfold.tile.rows.eager import widest


def l2norm(
    x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None, *, backend: str | None = None
) -> Tensor:
    """Normalise rows to unit length, as the delta operators do with `use_qk_l2norm_in_kernel`.

        y = x / sqrt(sum x^2 + eps)

    Differentiable in x. A row's bits do not depend on other rows.

    Args:
        x: [..., K] float32, float16, bfloat16 or float64. A zero row stays zero. A row whose sum of squares overflows
            (length from 1.8e19, float64 1.3e154) becomes zero, as with `torch.nn.functional.normalize`.
        eps: Added to the squared length; > 0, at least the smallest normal number of the arithmetic.
        output_dtype: Any float. None: dtype of x.
        backend: "eager", "triton" or "gluon" demands that backend. None: the best available one.

    Returns:
        y: [..., K], computed in float32 or wider and rounded once.

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: The dtype is wrong, x has no axis, or eps is not above 0 in the arithmetic's type.
        UnsupportedError: No backend, or not the demanded one, serves the device.

    Source:
        L2 normalisation of q and k: Gated DeltaNet, arXiv:2412.06464v3, section 3.4.

    Examples:
        >>> import torch, wyfold
        >>> wyfold.l2norm(torch.tensor([3.0, 4.0])).norm().round().item()
        1.0
    """
    return planned(_L2NORM, (x,), (eps, output_dtype, backend))


def _plan_l2norm(tensors: tuple[Any, ...], values: tuple[Any, ...]) -> str:
    """Check the call and return the backend that will run it."""
    op, (x,), (eps, output_dtype, backend) = "l2norm", tensors, values
    _rows(op, x)
    check.dtype_option(op, "output_dtype", output_dtype)
    check.epsilon(op, eps, widest(x))
    stored = output_dtype or x.dtype

    def trial() -> Trial:
        rows = sample(x, "normal", "T", keep=1)
        grad = check.any_requires_grad([x])
        return Trial(op, "l2norm_fwd", (rows,), (float(eps), stored, "triton"), gradients=grad)

    return _plan(op, x, backend, (x.dtype, stored), trial).backend


def _run_l2norm(backend: str, tensors: tuple[Any, ...], values: tuple[Any, ...]) -> Tensor:
    (x,), (eps, output_dtype, _) = tensors, values
    found: Tensor = apply("l2norm", _L2Norm, x, float(eps), output_dtype or x.dtype, backend)
    return found


_L2NORM = PublicOperator(_plan_l2norm, _run_l2norm)


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "swish",
    eps: float = 1e-6,
    norm_before_gate: bool = True,
    round_before_weight: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Root-mean-square norm of rows, combined with an output gate.

        rms(z) = z / sqrt(mean z^2 + eps)
        y = (rms(x) weight + bias) act(g)           norm_before_gate
        y = rms(x act(g)) weight + bias             otherwise

    Differentiable in every tensor argument. A row's bits do not depend on other rows.

    Args:
        x: [..., V] float32, float16, bfloat16 or float64. The norm of a row is 0 where its sum of squares overflows
            (length from 1.8e19, float64 1.3e154).
        g: [..., V], shape of x, any float. Pre-activation of the output gate; not a decay.
        weight: [V] any float.
        bias: [V] any float. None: 0.
        activation: "swish" or "silu" (the same), g sigmoid(g), or "sigmoid".
        eps: Added to the mean square; > 0, at least the smallest normal number of the arithmetic.
        norm_before_gate: Normalise x before it is gated, or after.
        round_before_weight: Round the normalised row to x's dtype before it is multiplied by the weight, for models
            trained that way. The gradient ignores this rounding.
        backend: "eager", "triton" or "gluon" demands that backend. None: the best available one.

    Returns:
        y: [..., V], dtype of x, computed in float32 or wider.

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: A shape, dtype or device is wrong, the activation is unknown, or eps is not above 0 in the
            arithmetic's type.
        UnsupportedError: No backend, or not the demanded one, serves the device.

    Source:
        Output norm and gate: Gated DeltaNet, arXiv:2412.06464v3, section 3.4 (swish); Kimi Linear, arXiv:2510.26692,
        Eq. (10) (sigmoid).

    Examples:
        >>> import torch, wyfold
        >>> x, g = torch.randn(2, 10, 4, 32), torch.randn(2, 10, 4, 32)
        >>> wyfold.rms_norm_gated(x, g, torch.ones(32), activation="sigmoid").shape
        torch.Size([2, 10, 4, 32])
    """
    values = activation, eps, norm_before_gate, round_before_weight, backend
    return planned(RMS_NORM_GATED, (x, g, weight, bias), values)


def _plan_rms_norm_gated(tensors: tuple[Any, ...], values: tuple[Any, ...]) -> str:
    """Check the call and return the backend that will run it."""
    op, (x, g, weight, bias) = "rms_norm_gated", tensors
    activation, eps, norm_before_gate, round_before_weight, backend = values
    check.flag(op, norm_before_gate=norm_before_gate, round_before_weight=round_before_weight)
    check.choice(op, "activation", activation, ("swish", "silu", "sigmoid"))
    V = _rows(op, x)
    if check.tensor(op, "g", g).shape != x.shape:
        raise ValueError(f"{op}: g must be [..., V] = {list(x.shape)}, the shape of x, got {list(g.shape)}")
    check.tensor(op, "weight", weight)
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and check.tensor(op, name, parameter).shape != (V,):
            raise ValueError(f"{op}: {name} must be [V] = [{V}], got {list(parameter.shape)}")
    check.floating(op, g=g, weight=weight, bias=bias)
    check.same_attribute(op, "device", x=x, g=g, weight=weight, bias=bias)
    check.epsilon(op, eps, widest(x, g, weight, bias))
    options = RmsNormOptions(activation, float(eps), norm_before_gate, round_before_weight)

    def trial() -> Trial:
        rows = [sample(t, "normal", "T", keep=1) for t in (x, g)]
        parameters = [sample(t, "weight", "") for t in (weight, bias)]
        values = *options.scalars(), "triton"
        grad = check.any_requires_grad(tensors)
        return Trial(op, "rms_norm_gated_fwd", (*rows, *parameters), values, gradients=grad)

    return _plan(op, x, backend, table.dtypes(x, g, weight, bias), trial).backend


def _run_rms_norm_gated(backend: str, tensors: tuple[Any, ...], values: tuple[Any, ...]) -> Tensor:
    activation, eps, norm_before_gate, round_before_weight, _ = values
    options = RmsNormOptions(activation, float(eps), norm_before_gate, round_before_weight)
    found: Tensor = apply("rms_norm_gated", _RmsNormGated, *tensors, options, backend)
    return found


RMS_NORM_GATED = PublicOperator(_plan_rms_norm_gated, _run_rms_norm_gated)


def _plan(op: str, x: Tensor, backend: str | None, dtypes: tuple[torch.dtype, ...], trial: Callable[[], Trial]) -> Plan:
    return table.plan(
        op,
        x.device,
        backend,
        forward=("norm",),
        backward=("norm",),
        dtypes=dtypes,
        keys=lambda: [("norm", LaunchKey(launch=launch)) for launch in (op, f"{op}_bwd")],
        trials=lambda: (trial(),),
    )


def _rows(op: str, x: Tensor) -> int:
    """Width of x's rows."""
    check.tensor(op, "x", x)
    check.floating(op, x=x)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x must be [..., V] with at least one column, got {list(x.shape)}")
    return x.shape[-1]


def _flat(x: Tensor | None) -> Any:
    """[..., W] as [n, W]; a view if x is contiguous."""
    return None if x is None else x.reshape(-1, x.shape[-1])


class _L2Norm(torch.autograd.Function):
    """`wyfold::l2norm_fwd`, with `wyfold::l2norm_bwd` as its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, output_dtype: torch.dtype, backend: str) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.backend = eps, backend
        ctx.save_for_backward(x)
        return call(_l2norm_op, x, eps, output_dtype, backend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None, None
        dx = call(_l2norm_bwd_op, *ctx.saved_tensors, dy, ctx.eps, ctx.backend)
        return dx, None, None, None


def _l2norm(x: Tensor, eps: float, output_dtype: torch.dtype, backend: str) -> Tensor:
    y = x.new_empty(x.shape, dtype=output_dtype)
    table.kernel_module("norm", backend).l2norm(_flat(x), eps, _flat(y))
    return y


def _l2norm_bwd(x: Tensor, dy: Tensor, eps: float, backend: str) -> Tensor:
    dx = x.new_empty(x.shape)
    table.kernel_module("norm", backend).l2norm_bwd(_flat(x), eps, _flat(dy), _flat(dx))
    return dx


_l2norm_op = register(
    "l2norm_fwd(Tensor x, float eps, ScalarType output_dtype, str backend) -> Tensor",
    _l2norm,
    lambda x, eps, output_dtype, backend: x.new_empty(x.shape, dtype=output_dtype),
    _L2Norm.apply,
)
_l2norm_bwd_op = register(
    "l2norm_bwd(Tensor x, Tensor dy, float eps, str backend) -> Tensor",
    _l2norm_bwd,
    lambda x, dy, eps, backend: x.new_empty(x.shape),
    of_gradients=True,
)


class _RmsNormGated(torch.autograd.Function):
    """`wyfold::rms_norm_gated_fwd`, with `wyfold::rms_norm_gated_bwd` as its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, g: Tensor, weight: Tensor, bias: Tensor | None, options: RmsNormOptions, backend: str
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.options, ctx.backend = options, backend
        ctx.save_for_backward(x, g, weight, bias)
        return call(_rms_norm_gated_op, x, g, weight, bias, *options.scalars(), backend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 6
        needs = list(ctx.needs_input_grad[:4])
        found = iter(call(_rms_norm_gated_bwd_op, *ctx.saved_tensors, dy, needs, *ctx.options.scalars(), ctx.backend))
        return *(next(found) if need else None for need in needs), None, None


def _rms_norm_gated(x: Tensor, g: Tensor, weight: Tensor, bias: Tensor | None, *scalars: Any) -> Tensor:
    *options, backend = scalars
    y = x.new_empty(x.shape)
    stage = table.kernel_module("norm", backend)
    stage.rms_norm_gated(_flat(x), _flat(g), weight, bias, RmsNormOptions(*options), _flat(y))
    return y


def _rms_norm_gated_bwd(
    x: Tensor, g: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor, needs: list[bool], *scalars: Any
) -> list[Tensor]:
    """Gradients of the tensors that need one, in their order."""
    *options, backend = scalars
    dtype = widest(x, g, weight, bias)
    dx, dg = (t.new_empty(t.shape) if need else None for t, need in zip((x, g), needs))
    dweight, dbias = (
        # A kernel writes once, and so rounds once: it needs no wide buffer.
        t.new_empty(t.shape, dtype=dtype if backend == "eager" else t.dtype) if need and t is not None else None
        for t, need in zip((weight, bias), needs[2:])
    )
    table.kernel_module("norm", backend).rms_norm_gated_bwd(
        _flat(x),
        _flat(g),
        weight,
        bias,
        _flat(dy),
        RmsNormOptions(*options),
        RmsNormGradients(_flat(dx), _flat(dg), dweight, dbias),
    )
    gradients = zip((dx, dg, dweight, dbias), (x, g, weight, bias))
    return [d.to(t.dtype) for d, t in gradients if d is not None and t is not None]


_RMS_NORM_TENSORS = "Tensor x, Tensor g, Tensor weight, Tensor? bias"
_rms_norm_gated_op = register(
    f"rms_norm_gated_fwd({_RMS_NORM_TENSORS}, {RmsNormOptions.SCHEMA}, str backend) -> Tensor",
    _rms_norm_gated,
    lambda x, *_: x.new_empty(x.shape),
    lambda x, g, weight, bias, *scalars: _RmsNormGated.apply(
        x, g, weight, bias, RmsNormOptions(*scalars[:-1]), scalars[-1]
    ),
)
_rms_norm_gated_bwd_op = register(
    f"rms_norm_gated_bwd({_RMS_NORM_TENSORS}, Tensor dy, bool[] needs, {RmsNormOptions.SCHEMA}, str backend)"
    " -> Tensor[]",
    _rms_norm_gated_bwd,
    lambda x, g, weight, bias, dy, needs, *_: [
        t.new_empty(t.shape) for t, need in zip((x, g, weight, bias), needs) if need
    ],
    of_gradients=True,
)
