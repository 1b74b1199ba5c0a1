"""The `norm` launches: each implementation against eager in float64, rounding once, in any block."""

import pytest
import torch

from wyfold.kernels import table
from wyfold.kernels.norm import RmsNormGradients, RmsNormOptions
from wyfold.reference import error
from wyfold.tile.rows.eager import BLOCK

ROWS = (50, 300)  # enough for two error measures to agree
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPTIONS = [RmsNormOptions(act, 1e-6, before, False) for act in ("swish", "sigmoid") for before in (True, False)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_l2norm(rows: int, dtype: torch.dtype, backend: str, device: torch.device):
    x, dy = torch.randn(rows, 40).to(dtype), torch.randn(rows, 40).to(dtype)

    def run(name: str, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, dx = torch.empty_like(x), torch.empty_like(x)
        stage = table.kernel_module("norm", name)
        stage.l2norm(x, 1e-6, y)
        stage.l2norm_bwd(x, 1e-6, dy, dx)
        return y.cpu(), dx.cpu()

    got = run(backend, x.to(device), dy.to(device))
    results = zip(("y", "dx"), got, run("eager", x.double(), dy.double()), run("eager", x, dy))
    error.require(*(error.judge(got, truth, yard, name=name) for name, got, truth, yard in results))


def run_rms_norm(name: str, options: RmsNormOptions, *tensors: torch.Tensor) -> list[torch.Tensor]:
    x, z, weight, bias, dy = tensors
    y, dx, dz = (torch.empty_like(x) for _ in range(3))
    dweight, dbias = torch.full_like(weight, 7.0), None if bias is None else torch.full_like(bias, 7.0)
    stage = table.kernel_module("norm", name)
    stage.rms_norm_gated(x, z, weight, bias, options, y)
    stage.rms_norm_gated_bwd(x, z, weight, bias, dy, options, RmsNormGradients(dx, dz, dweight, dbias))
    return [t.cpu() for t in (y, dx, dz, dweight, dbias) if t is not None]


def judged(names: tuple[str, ...], backend: str, device: torch.device, options: RmsNormOptions, *tensors: torch.Tensor):
    got = run_rms_norm(backend, options, *(t.to(device) for t in tensors))
    truth, yardstick = (run_rms_norm("eager", options, *given) for given in ((t.double() for t in tensors), tensors))
    results = zip(names, got, truth, yardstick, strict=True)
    error.require(*(error.judge(got, truth, yard, name=name) for name, got, truth, yard in results))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: f"{o.activation}-{'norm' if o.norm_before_gate else 'gate'}")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_rms_norm_gated(rows: int, dtype: torch.dtype, options: RmsNormOptions, backend: str, device: torch.device):
    x, z, dy = (torch.randn(rows, 40).to(dtype) for _ in range(3))
    weight, bias = torch.randn(40), torch.randn(40)
    judged(("y", "dx", "dz", "dweight", "dbias"), backend, device, options, x, z, weight, bias, dy)


@pytest.mark.parametrize("width", [8, 111, 4100, 20_000])
def test_any_width(width: int, backend: str, device: torch.device):
    x, z, dy = (torch.randn(max(4, 4000 // width), width) for _ in range(3))
    weight, bias = torch.randn(width), torch.randn(width)
    judged(("y", "dx", "dz", "dweight", "dbias"), backend, device, OPTIONS[0], x, z, weight, bias, dy)


def test_a_row_of_one_number(backend: str, device: torch.device):
    x, ones = torch.tensor([[3.0], [0.0]], device=device), torch.ones(2, 1, device=device)
    y, dx = torch.empty_like(x), torch.empty_like(x)
    stage = table.kernel_module("norm", backend)
    stage.l2norm(x, 7.0, y)
    stage.l2norm_bwd(x, 7.0, ones, dx)
    assert torch.equal(y.cpu(), torch.tensor([[0.75], [0.0]]))
    assert dx[0].item() == 0.25 * (1 - 0.75 * 0.75)


def test_any_strides(backend: str, device: torch.device):
    """Strided rows give the same bits as contiguous ones, and numbers between elements are untouched."""
    x, z, dy = (torch.randn(9, 24, device=device) for _ in range(3))
    weight, stage = torch.randn(24, device=device), table.kernel_module("norm", backend)

    def run(*rows: torch.Tensor, out: torch.Tensor, dx: torch.Tensor, dz: torch.Tensor) -> list[torch.Tensor]:
        dweight = torch.zeros(24, device=device)
        stage.rms_norm_gated(*rows[:2], weight, None, OPTIONS[0], out)
        stage.rms_norm_gated_bwd(
            *rows[:2], weight, None, rows[2], OPTIONS[0], RmsNormGradients(dx, dz, dweight, None)
        )  # fmt: skip
        return [out, dx, dz, dweight]

    plain = run(x, z, dy, out=torch.empty_like(x), dx=torch.empty_like(x), dz=torch.empty_like(x))
    apart = (
        torch.stack([x, x], 2)[:, :, 0],
        torch.cat([z, z], 1)[:, :24],
        dy.t().contiguous().t(),
    )
    room = torch.full((9, 25), torch.nan, device=device)
    turned = [torch.full((24, 9), torch.nan, device=device).t() for _ in range(2)]
    spread = run(*apart, out=room[:, 1:], dx=turned[0], dz=turned[1])
    for one, other in zip(plain, spread, strict=True):
        assert torch.equal(one, other)
    assert room[:, 0].isnan().all()


@pytest.mark.parametrize("wanted", ["x", "z", "weight", "bias"])
def test_only_wanted_gradients_are_written(wanted: str, backend: str, device: torch.device):
    x, z, dy = (torch.randn(9, 24, device=device) for _ in range(3))
    weight, bias = torch.randn(24, device=device), torch.randn(24, device=device)
    shapes = {"x": x, "z": x, "weight": weight, "bias": bias}
    every = RmsNormGradients(*(torch.zeros_like(t) for t in shapes.values()))
    one = RmsNormGradients(*(torch.zeros_like(t) if name == wanted else None for name, t in shapes.items()))
    for out in (every, one):
        table.kernel_module("norm", backend).rms_norm_gated_bwd(x, z, weight, bias, dy, OPTIONS[0], out)
    assert torch.equal(getattr(one, wanted), getattr(every, wanted))


def test_sums_are_written_and_zero_without_rows(backend: str, device: torch.device):
    x, weight = torch.randn(0, 24, device=device), torch.randn(24, device=device)
    dweight, dbias = torch.full((24,), 2.0, device=device), torch.full((24,), 3.0, device=device)
    out = RmsNormGradients(torch.empty_like(x), None, dweight, dbias)
    stage = table.kernel_module("norm", backend)
    stage.l2norm(x, 1e-6, torch.empty_like(x))
    stage.l2norm_bwd(x, 1e-6, x, torch.empty_like(x))
    stage.rms_norm_gated(x, x, weight, weight, OPTIONS[0], torch.empty_like(x))
    stage.rms_norm_gated_bwd(x, x, weight, weight, x, OPTIONS[0], out)
    assert not dweight.any() and not dbias.any()
    x, dy = torch.zeros(3, 24, device=device), torch.ones(3, 24, device=device)
    stage.rms_norm_gated_bwd(x, x + 40, weight, weight, dy, OPTIONS[1], RmsNormGradients(None, None, dweight, dbias))
    assert torch.equal(dbias, torch.full_like(dbias, 3.0))


def test_a_normed_row_is_rounded_before_the_weight(backend: str, device: torch.device):
    x, z = (torch.randn(9, 24).bfloat16().to(device) for _ in range(2))
    weight, z = torch.ones(24, device=device), torch.full_like(z, 40.0)
    rounded, whole = torch.empty(9, 24, device=device), torch.empty(9, 24, device=device)
    for out, choice in ((rounded, True), (whole, False)):
        options = RmsNormOptions("sigmoid", 1e-6, True, choice)
        table.kernel_module("norm", backend).rms_norm_gated(x, z, weight, None, options, out)
    assert torch.equal(rounded, whole.bfloat16().float())
    assert not torch.equal(rounded, whole)


def test_a_row_does_not_depend_on_its_block(backend: str, device: torch.device, threads: int):
    width = 96
    rows = 2 * (BLOCK // width if backend == "eager" else 100) + 3
    x, z = torch.randn(rows, width, device=device), torch.randn(rows, width, device=device)
    weight, options = torch.randn(width, device=device), OPTIONS[0]
    stage = table.kernel_module("norm", backend)

    def run(rows: slice) -> tuple[torch.Tensor, ...]:
        y, dx, dz = (torch.empty_like(x[rows]) for _ in range(3))
        stage.rms_norm_gated(x[rows], z[rows], weight, None, options, y)
        gradients = RmsNormGradients(dx, dz, None, None)
        stage.rms_norm_gated_bwd(x[rows], z[rows], weight, None, x[rows], options, gradients)
        return y, dx, dz

    whole = run(slice(None))
    for block in (slice(0, 1), slice(1, 5), slice(rows - 1, rows), slice(100, 200)):
        for one, all_rows in zip(run(block), whole, strict=True):
            assert torch.equal(one, all_rows[block])
