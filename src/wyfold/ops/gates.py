"""Gate activations: log decays and write strengths from a layer's projections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wyfold.kernels import table
from wyfold.kernels.gate import GateGradients
from wyfold.kernels.trial import Trial, sample
from wyfold.runtime import check
from wyfold.runtime.differentiation import apply, once_differentiable
from wyfold.runtime.kernel_configs import LaunchKey
from wyfold.runtime.plan import Plan
from wyfold.runtime.replay_cache import PublicOperator, planned
from wyfold.runtime.torch_ops import call, register
from wyfold.tile.rows.eager import widest


def fused_gdn_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Log decay per value head, as `chunk_gated_delta_rule` computes it with `use_gate_in_kernel`.

        g' = -exp(A_log) softplus(g + dt_bias)

    Differentiable in every tensor argument. Not floored: an infinite g gives -inf, a full reset to the delta operators.

    Args:
        g: [..., HV] float32, float16, bfloat16 or float64. Pre-activation, any sign.
        A_log: HV elements in any shape, any float. Natural log of the rate. None: rate 1.
        dt_bias: [HV] any float. None: 0.
        output_dtype: Any float. None: float32, float64 if an input is float64.
        backend: "eager", "triton" or "gluon" demands that backend. None: the best available one.

    Returns:
        g': [..., HV] natural log of the decay per token, <= 0.

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: A shape, dtype or device is wrong.
        UnsupportedError: No backend, or not the demanded one, serves the device.

    Examples:
        >>> import torch, wyfold
        >>> g = wyfold.fused_gdn_gate(torch.zeros(1, 10, 4), A_log=torch.zeros(4))
        >>> round(g[0, 0, 0].item(), 4)
        -0.6931

    Source:
        Log of alpha_t in Eq. (10) of Gated DeltaNet, arXiv:2412.06464v3, with Mamba2's parameters.
    """
    return planned(_GATE, (g, A_log, dt_bias), ("fused_gdn_gate", None, output_dtype, backend))


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Log decay per key channel, as `chunk_kda` computes it with `use_gate_in_kernel`.

        g' = -exp(A_log) softplus(g + dt_bias)                      without a bound
        g' = lower_bound sigmoid(exp(A_log) (g + dt_bias))          with one

    Differentiable in every tensor argument. Not floored: without a bound an infinite g gives -inf, a full reset to the
    delta operators.

    Args:
        g: [..., HV, K] float32, float16, bfloat16 or float64. Pre-activation, any sign.
        A_log: HV elements in any shape, any float. Natural log of the rate, one for all channels of a head. None:
            rate 1.
        dt_bias: [HV, K] or [HV * K] any float. None: 0.
        lower_bound: < 0. Strongest decay per token, natural log. None: unbounded.
        output_dtype: Any float. None: float32, float64 if an input is float64.
        backend: "eager", "triton" or "gluon" demands that backend. None: the best available one.

    Returns:
        g': [..., HV, K] natural log of the decay per token, <= 0.

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: A shape, dtype or device is wrong, or lower_bound >= 0.
        UnsupportedError: No backend, or not the demanded one, serves the device.

    Examples:
        >>> import torch, wyfold
        >>> g = wyfold.fused_kda_gate(torch.zeros(1, 10, 4, 32), A_log=torch.zeros(4), lower_bound=-5.0)
        >>> g[0, 0, 0, 0].item()
        -2.5

    Source:
        Log of alpha_t in Eq. (1) of Kimi Linear, arXiv:2510.26692; parameters in section 4.
    """
    return planned(_GATE, (g, A_log, dt_bias), ("fused_kda_gate", lower_bound, output_dtype, backend))


def fused_beta_sigmoid(x: Tensor, scale: float = 1.0, *, backend: str | None = None) -> Tensor:
    """Write strength beta from its logit.

        beta = scale sigmoid(x)

    Differentiable in x.

    Args:
        x: [...] float32, float16, bfloat16 or float64; any shape.
        scale: 1, or 2 to allow negative eigenvalues.
        backend: "eager", "triton" or "gluon" demands that backend. None: the best available one.

    Returns:
        beta: [...], shape of x, float32; float64 for a float64 x.

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: The dtype is wrong, or scale is not finite.
        UnsupportedError: No backend, or not the demanded one, serves the device.

    Source:
        beta_t in Eq. (10) of Gated DeltaNet, arXiv:2412.06464v3; the factor 2: arXiv:2411.12537.

    Examples:
        >>> import torch, wyfold
        >>> wyfold.fused_beta_sigmoid(torch.zeros(1, 10, 4), scale=2.0)[0, 0, 0].item()
        1.0
    """
    return planned(_BETA_SIGMOID, (x,), (scale, backend))


def _plan_beta_sigmoid(tensors: tuple[Any, ...], values: tuple[Any, ...]) -> str:
    """Check the call and return the backend that will run it."""
    op, (x,), (scale, backend) = "fused_beta_sigmoid", tensors, values
    check.floating(op, x=check.tensor(op, "x", x))
    check.number(op, "scale", scale)

    def trial() -> Trial:
        logits, grad = sample(x, "normal", "T", keep=0), check.any_requires_grad([x])
        return Trial(op, "beta_sigmoid_fwd", (logits,), (float(scale), "triton"), gradients=grad)

    return _plan(op, "beta_sigmoid", x, backend, (x.dtype,), trial).backend


def _run_beta_sigmoid(backend: str, tensors: tuple[Any, ...], values: tuple[Any, ...]) -> Tensor:
    found: Tensor = apply("fused_beta_sigmoid", _BetaSigmoid, tensors[0], float(values[0]), backend)
    return found


_BETA_SIGMOID = PublicOperator(_plan_beta_sigmoid, _run_beta_sigmoid)


def _plan(
    op: str,
    launch: str,
    x: Tensor,
    backend: str | None,
    dtypes: tuple[torch.dtype, ...],
    trial: Callable[[], Trial],
) -> Plan:
    return table.plan(
        op,
        x.device,
        backend,
        forward=("gate",),
        backward=("gate",),
        dtypes=dtypes,
        keys=lambda: [("gate", LaunchKey(launch=name)) for name in (launch, f"{launch}_bwd")],
        trials=lambda: (trial(),),
    )


def _check_parameters(op: str, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, channels: torch.Size) -> None:
    """Check A_log and dt_bias against channels, [HV] or [HV, K]."""
    if A_log is not None and check.tensor(op, "A_log", A_log).numel() != channels[0]:
        raise ValueError(f"{op}: A_log must have HV = {channels[0]} elements, got {list(A_log.shape)}")
    if dt_bias is not None and check.tensor(op, "dt_bias", dt_bias).shape not in (channels, (channels.numel(),)):
        wanted = "[HV]" if len(channels) == 1 else f"[HV, K] or [HV * K] = {list(channels)} or"
        raise ValueError(f"{op}: dt_bias must be {wanted} = [{channels.numel()}], got {list(dt_bias.shape)}")
    check.floating(op, A_log=A_log, dt_bias=dt_bias)
    check.same_attribute(op, "device", g=g, A_log=A_log, dt_bias=dt_bias)


def _plan_gate(tensors: tuple[Any, ...], values: tuple[Any, ...]) -> tuple[torch.dtype, str]:
    """Check a call of either gate operator; return the dtype of the result and the backend that will run it."""
    (g, A_log, dt_bias), (op, lower_bound, output_dtype, backend) = tensors, values
    check.floating(op, g=check.tensor(op, "g", g))
    channels = 2 if op == "fused_kda_gate" else 1
    if g.ndim < channels:
        raise ValueError(f"{op}: g must be {'[..., HV, K]' if channels == 2 else '[..., HV]'}, got {list(g.shape)}")
    _check_parameters(op, g, A_log, dt_bias, g.shape[-channels:])
    if lower_bound is not None and check.number(op, "lower_bound", lower_bound) >= 0:
        raise ValueError(f"{op}: lower_bound must be below 0, got {lower_bound}")
    check.dtype_option(op, "output_dtype", output_dtype)
    stored = output_dtype or widest(*tensors)

    def trial() -> Trial:
        samples = (
            sample(g if channels == 2 else g[..., None], "normal", "T", keep=2),
            sample(A_log, "A_log", ""),
            sample(dt_bias, "dt_bias", ""),
        )
        values = *_activation(lower_bound), stored, "triton"
        return Trial(op, "gate_fwd", samples, values, gradients=check.any_requires_grad(tensors))

    return stored, _plan(op, "gate", g, backend, (*table.dtypes(*tensors), stored), trial).backend


def _run_gate(plan: tuple[torch.dtype, str], tensors: tuple[Any, ...], values: tuple[Any, ...]) -> Tensor:
    (g, A_log, dt_bias), (op, lower_bound, *_) = tensors, values
    scalar = op == "fused_gdn_gate"
    y: Tensor = apply(
        op, _Gate, g.unsqueeze(-1) if scalar else g, A_log, dt_bias, *_activation(lower_bound), *plan
    )  # fmt: skip
    return y.squeeze(-1) if scalar else y


_GATE = PublicOperator(_plan_gate, _run_gate)


def _activation(lower_bound: float | None) -> tuple[str, float]:
    return ("softplus", 0.0) if lower_bound is None else ("bounded", float(lower_bound))


class _Gate(torch.autograd.Function):
    """`wyfold::gate_fwd`, with `wyfold::gate_bwd` as its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        g: Tensor,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        activation: str,
        lower_bound: float,
        output_dtype: torch.dtype,
        backend: str,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.options = (activation, lower_bound, backend)
        ctx.save_for_backward(g, A_log, dt_bias)
        return call(_gate_op, g, A_log, dt_bias, activation, lower_bound, output_dtype, backend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 7
        needs = list(ctx.needs_input_grad[:3])
        found = iter(call(_gate_bwd_op, *ctx.saved_tensors, dy, needs, *ctx.options))
        return *(next(found) if need else None for need in needs), None, None, None, None


def _gate_run(
    g: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    activation: str,
    lower_bound: float,
    output_dtype: torch.dtype,
    backend: str,
) -> Tensor:
    y = g.new_empty(g.shape, dtype=output_dtype)
    inputs = (_tokens(g), _flat(A_log), _flat(dt_bias))
    table.kernel_module("gate", backend).gate(*inputs, activation, lower_bound, _tokens(y))
    return y


def _gate_bwd(
    g: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    dy: Tensor,
    needs: list[bool],
    activation: str,
    lower_bound: float,
    backend: str,
) -> list[Tensor]:
    """Gradients of the tensors that need one, in their order."""
    dtype = widest(g, A_log, dt_bias)
    dg = g.new_empty(g.shape) if needs[0] else None
    dA_log, ddt_bias = (
        x.new_empty(x.shape, dtype=dtype) if need and x is not None else None
        for x, need in zip((A_log, dt_bias), needs[1:])
    )
    out = GateGradients(
        None if dg is None else _tokens(dg),
        _flat(dA_log),
        None if ddt_bias is None else ddt_bias.view(g.shape[-2:]),
    )
    inputs = (_tokens(g), _flat(A_log), _flat(dt_bias))
    table.kernel_module("gate", backend).gate_bwd(*inputs, activation, lower_bound, _tokens(dy), out)
    gradients = zip((dg, dA_log, ddt_bias), (g, A_log, dt_bias))
    return [d.to(x.dtype) for d, x in gradients if d is not None and x is not None]


def _tokens(x: Tensor) -> Tensor:
    """[..., HV, W] as [n, HV, W]."""
    return x.reshape(x.shape[:-2].numel(), *x.shape[-2:])


def _flat(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.reshape(-1)


_GATE_TENSORS = "Tensor g, Tensor? A_log, Tensor? dt_bias"
_gate_op = register(
    f"gate_fwd({_GATE_TENSORS}, str activation, float lower_bound, ScalarType output_dtype, str backend) -> Tensor",
    _gate_run,
    lambda g, A_log, dt_bias, activation, lower_bound, output_dtype, backend: g.new_empty(g.shape, dtype=output_dtype),
    _Gate.apply,
)
_gate_bwd_op = register(
    f"gate_bwd({_GATE_TENSORS}, Tensor dy, bool[] needs, str activation, float lower_bound, str backend) -> Tensor[]",
    _gate_bwd,
    lambda g, A_log, dt_bias, dy, needs, *_: [
        x.new_empty(x.shape) for x, need in zip((g, A_log, dt_bias), needs) if need
    ],
    of_gradients=True,
)


class _BetaSigmoid(torch.autograd.Function):
    """`wyfold::beta_sigmoid_fwd`, with `wyfold::beta_sigmoid_bwd` as its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, backend: str) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.scale, ctx.backend = scale, backend
        ctx.save_for_backward(x)
        return call(_beta_op, x, scale, backend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None
        dx = call(_beta_bwd_op, *ctx.saved_tensors, dy, ctx.scale, ctx.backend)
        return dx, None, None


def _beta(x: Tensor, scale: float, backend: str) -> Tensor:
    y = x.new_empty(x.shape, dtype=widest(x))
    table.kernel_module("gate", backend).beta_sigmoid(x.reshape(-1, 1), scale, y.view(-1, 1))
    return y


def _beta_bwd(x: Tensor, dy: Tensor, scale: float, backend: str) -> Tensor:
    dx = x.new_empty(x.shape)
    table.kernel_module("gate", backend).beta_sigmoid_bwd(x.reshape(-1, 1), scale, dy.reshape(-1, 1), dx.view(-1, 1))
    return dx


_beta_op = register(
    "beta_sigmoid_fwd(Tensor x, float scale, str backend) -> Tensor",
    _beta,
    lambda x, scale, backend: x.new_empty(x.shape, dtype=widest(x)),
    _BetaSigmoid.apply,
)
_beta_bwd_op = register(
    "beta_sigmoid_bwd(Tensor x, Tensor dy, float scale, str backend) -> Tensor",
    _beta_bwd,
    lambda x, dy, scale, backend: x.new_empty(x.shape),
    of_gradients=True,
)
