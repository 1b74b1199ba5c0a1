"""Norms, gates and the short convolution as operators on kernels: values, gradients, and no synchronisation."""

from collections.abc import Callable

import pytest
import torch

import wyfold
from wyfold.reference import error


def rows(x: torch.Tensor, **options) -> torch.Tensor:
    return wyfold.l2norm(x, **options)


def gated_rows(x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **options) -> torch.Tensor:
    return wyfold.rms_norm_gated(x, g, weight, bias, activation="sigmoid", **options)


def scalar_gate(g: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, **options) -> torch.Tensor:
    return wyfold.fused_gdn_gate(g, A_log, dt_bias, **options)


def channel_gate(g: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, **options) -> torch.Tensor:
    return wyfold.fused_kda_gate(g, A_log, dt_bias, -5.0, **options)


def beta(x: torch.Tensor, **options) -> torch.Tensor:
    return wyfold.fused_beta_sigmoid(x, 2.0, **options)


def convolved(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, **options
) -> torch.Tensor:
    return wyfold.causal_conv1d(x, weight, bias, residual=residual, activation="silu", **options)[0]


def convolved_and_left(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, initial_state: torch.Tensor, **options
) -> torch.Tensor:
    """Packed, with an empty sequence and padding rows; returns the final state too."""
    layout = wyfold.SequenceLayout((torch.arange(4, device=x.device) * 7).clamp(max=20), x.shape[1])
    y, state = wyfold.causal_conv1d(
        x, weight, residual=residual, initial_state=initial_state, cu_seqlens=layout, output_final_state=True, **options
    )
    return torch.cat([y.flatten(), state.flatten().to(y.dtype)]).unflatten(0, (-1, 8))


CASES: dict[str, tuple[Callable[..., torch.Tensor], dict[str, tuple[int, ...]]]] = {
    "l2norm": (rows, {"x": (2, 30, 3, 24)}),
    "rms_norm_gated": (gated_rows, {"x": (2, 30, 24), "g": (2, 30, 24), "weight": (24,), "bias": (24,)}),
    "fused_gdn_gate": (scalar_gate, {"g": (2, 30, 24), "A_log": (24,), "dt_bias": (24,)}),
    "fused_kda_gate": (channel_gate, {"g": (1, 30, 24, 8), "A_log": (24,), "dt_bias": (24, 8)}),
    "fused_beta_sigmoid": (beta, {"x": (2, 30, 5)}),
    "causal_conv1d": (convolved, {"x": (2, 15, 40), "weight": (40, 4), "bias": (40,), "residual": (2, 15, 40)}),
    "causal_conv1d, packed": (
        convolved_and_left,
        {"x": (1, 24, 40), "weight": (40, 3), "residual": (1, 24, 40), "initial_state": (3, 40, 4)},
    ),
}


def results(
    op: Callable[..., torch.Tensor], given: dict[str, torch.Tensor], dy: torch.Tensor, backend: str
) -> dict[str, torch.Tensor]:
    """The result and every gradient, on the CPU."""
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    y = op(**leaves, backend=backend)
    gradients = torch.autograd.grad(y, list(leaves.values()), dy.to(y.dtype))
    return {"y": y.detach(), **{f"d{name}": dx for name, dx in zip(leaves, gradients, strict=True)}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients(name: str, dtype: torch.dtype, device: torch.device):
    op, shapes = CASES[name]
    given = {argument: torch.randn(shape).to(dtype) for argument, shape in shapes.items()}
    dy = torch.randn(op(**given, backend="eager").shape).to(dtype)
    got = results(op, {argument: x.to(device) for argument, x in given.items()}, dy.to(device), "triton")
    truth = results(op, {argument: x.double() for argument, x in given.items()}, dy.double(), "eager")
    yardstick = results(op, given, dy, "eager")
    assert all(got[part].dtype == yardstick[part].dtype for part in got)
    error.require(*(error.judge(got[part].cpu(), truth[part], yardstick[part], name=part) for part in truth))


@pytest.mark.parametrize("name", CASES)
def test_the_host_never_waits(name: str, device: torch.device):
    if device.type != "cuda":
        pytest.skip("there is no CUDA device in this process")
    op, shapes = CASES[name]
    given = {argument: torch.randn(shape, device=device) for argument, shape in shapes.items()}
    dy = torch.randn_like(op(**given))
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(op, given, dy, "triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
