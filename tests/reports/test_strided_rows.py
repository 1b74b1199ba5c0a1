"""`l2norm` of every second row of a tensor wrote its result to wrong places.

Kernels measure row strides in units of a common divisor of all tensors' strides, which was computed without the output.
Rows of 7 elements with stride 14 gave a divisor of 2, and the output's stride of 7 is no multiple of it. Here row
operators are tested with strided inputs.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import wyfold
from wyfold.reference.error import judge, require

ODD = 7  # elements per row


def every_second(x: Tensor) -> Tensor:
    """The values of x [n, ...] as every second row of a larger tensor."""
    return torch.stack([x, torch.full_like(x, torch.nan)], 1).flatten(0, 1)[::2]


OPERATORS: dict[str, tuple[Callable[..., Tensor], dict[str, tuple[int, ...]]]] = {
    "l2norm": (lambda x, **o: wyfold.l2norm(x, **o), {"x": (6, ODD)}),
    "rms_norm_gated": (
        lambda x, g, **o: wyfold.rms_norm_gated(x, g, torch.ones_like(x[0]), **o),
        {"x": (6, ODD), "g": (6, ODD)},
    ),
    "fused_gdn_gate": (lambda g, **o: wyfold.fused_gdn_gate(g, **o), {"g": (6, ODD)}),
    "fused_kda_gate": (lambda g, **o: wyfold.fused_kda_gate(g, **o), {"g": (6, 3, ODD)}),
    "fused_beta_sigmoid": (lambda x, **o: wyfold.fused_beta_sigmoid(x, **o), {"x": (6, ODD)}),
    "causal_conv1d": (
        lambda x, **o: wyfold.causal_conv1d(x, torch.ones(ODD, 4, device=x.device, dtype=x.dtype), **o)[0],
        {"x": (6, 5, ODD)},
    ),
}


@pytest.mark.parametrize("apart", ["inputs", "gradient", "both"])
@pytest.mark.parametrize("name", OPERATORS)
def test_strided_rows(name: str, apart: str, device: torch.device):
    operator, shapes = OPERATORS[name]
    torch.manual_seed(0)
    given = {argument: torch.randn(shape, device=device) for argument, shape in shapes.items()}
    dy = torch.randn_like(operator(**given, backend="eager"))

    def results(dtype: torch.dtype, backend: str, strided: bool) -> dict[str, Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in given.values()]
        laid = [every_second(x) if strided and apart != "gradient" else x for x in leaves]
        y = operator(**dict(zip(given, laid, strict=True)), backend=backend)
        incoming = every_second(dy.to(dtype)) if strided and apart != "inputs" else dy.to(dtype)
        gradients = torch.autograd.grad(y, leaves, incoming)
        return {"y": y.detach().cpu(), **{f"d{n}": x.cpu() for n, x in zip(given, gradients, strict=True)}}

    truth, yardstick = (results(dtype, "eager", False) for dtype in (torch.float64, torch.float32))
    got = results(torch.float32, "triton", True)
    require(*(judge(got[name], truth[name], yardstick[name], name=name) for name in truth))
