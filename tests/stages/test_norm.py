"""The `norm` launches: each row of the table against the eager one in float64, rounding once, in any block."""

import pytest
import torch

from wyfold.reference import error
from wyfold.stages import table
from wyfold.stages.norm import RmsNormGradients, RmsNormOptions
from wyfold.tile.rows.eager import BLOCK

ROWS = (1, 7, 300)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPTIONS = [RmsNormOptions(act, 1e-6, before, False) for act in ("swish", "sigmoid") for before in (True, False)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_l2norm(rows: int, dtype: torch.dtype, backend: str):
    x, dy = torch.randn(rows, 40).to(dtype), torch.randn(rows, 40).to(dtype)

    def run(name: str, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, dx = torch.empty_like(x), torch.empty_like(x)
        stage = table.launches("norm", name)
        stage.l2norm(x, 1e-6, y)
        stage.l2norm_bwd(x, 1e-6, dy, dx)
        return y, dx

    results = zip(("y", "dx"), run(backend, x, dy), run("eager", x.double(), dy.double()), run("eager", x, dy))
    error.require(*(error.judge(got, truth, yard, name=name) for name, got, truth, yard in results))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: f"{o.activation}-{'norm' if o.norm_before_gate else 'gate'}")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_rms_norm_gated(rows: int, dtype: torch.dtype, options: RmsNormOptions, backend: str):
    x, z, dy = (torch.randn(rows, 40).to(dtype) for _ in range(3))
    weight, bias = torch.randn(40), torch.randn(40)

    def run(name: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
        x, z, weight, bias, dy = tensors
        y, dx, dz = (torch.empty_like(x) for _ in range(3))
        dweight, dbias = torch.zeros_like(weight), torch.zeros_like(bias)
        stage = table.launches("norm", name)
        stage.rms_norm_gated(x, z, weight, bias, options, y)
        stage.rms_norm_gated_bwd(x, z, weight, bias, dy, options, RmsNormGradients(dx, dz, dweight, dbias))
        return [y, dx, dz, dweight, dbias]

    tensors = (x, z, weight, bias, dy)
    names = ("y", "dx", "dz", "dweight", "dbias")
    results = zip(names, run(backend, *tensors), run("eager", *(t.double() for t in tensors)), run("eager", *tensors))
    error.require(*(error.judge(got, truth, yard, name=name) for name, got, truth, yard in results))


def test_a_row_does_not_depend_on_its_block(backend: str, threads: int):
    width = 96
    rows = 2 * (BLOCK // width) + 3
    x, z = torch.randn(rows, width), torch.randn(rows, width)
    weight, options = torch.randn(width), OPTIONS[0]
    stage = table.launches("norm", backend)
    whole = torch.empty_like(x)
    stage.rms_norm_gated(x, z, weight, None, options, whole)
    for block in (slice(0, 1), slice(1, 5), slice(rows - 1, rows), slice(1000, 2000)):
        alone = torch.empty_like(x[block])
        stage.rms_norm_gated(x[block], z[block], weight, None, options, alone)
        assert torch.equal(alone, whole[block])
