"""The `conv` launches: every packing against separate sequences, and windows that own each token exactly once."""

from collections.abc import Callable

import pytest
import torch

from wyfold.kernels import table
from wyfold.kernels.conv import ConvGradients
from wyfold.kernels.conv.windows import Windows
from wyfold.reference import error, shapes
from wyfold.tile.rows.eager import BLOCK

D = 56


def run(
    backend: str, x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, dy: torch.Tensor, dfinal: torch.Tensor,
    cu_seqlens: torch.Tensor | int,
) -> dict[str, torch.Tensor]:  # fmt: skip
    y, dx, final = torch.empty_like(x), torch.empty_like(x), torch.empty_like(state)
    dweight, dstate = torch.zeros_like(weight.t()), torch.zeros_like(state)
    stage = table.kernel_module("conv", backend)
    stage.conv(x, weight, None, None, state, cu_seqlens, True, y, final)
    out = ConvGradients(dx, dweight, None, dstate)
    stage.conv_bwd(x, weight, None, state, cu_seqlens, True, dy, dfinal, x.dtype, out)
    # Transposed, so that a row of a state is one token over the channels.
    found = {"y": y, "final": final.mT, "dx": dx, "dweight": dweight, "dstate": dstate.mT}
    return {name: t.cpu() for name, t in found.items()}


def drawn(tokens: int, sequences: int, W: int, S: int) -> list[torch.Tensor]:
    shape = [(tokens, D), (D, W), (sequences, D, S), (tokens, D), (sequences, D, S)]
    return [torch.randn(size) for size in shape]


FEW = [name for name, packed in shapes.PACKINGS.items() if packed.tokens <= 12]
CASES = [("4-9", name) for name in shapes.PACKINGS] + [(size, name) for size in ("2-1", "4-3", "8-7") for name in FEW]


@pytest.mark.parametrize(("size", "packing"), CASES)
def test_packed_against_float64_and_against_separate(size: str, packing: str, backend: str, device: torch.device):
    packed, (W, S) = shapes.PACKINGS[packing], map(int, size.split("-"))
    boundaries = torch.tensor(packed.cu_seqlens)
    tensors = drawn(packed.tokens, boundaries.shape[0] - 1, W, S)
    there = [t.to(device) for t in tensors]
    got, yardstick = run(backend, *there, boundaries.to(device)), run("eager", *tensors, boundaries)
    truth = run("eager", *(t.double() for t in tensors), boundaries)
    error.require(*(error.judge(got[name], truth[name], yardstick[name], name=name) for name in truth))
    for name in ("y", "dx"):
        assert torch.equal(got[name][boundaries[-1] :], torch.zeros(packed.tokens - packed.cu_seqlens[-1], D))
    if size != "4-9":
        return  # separation of sequences does not depend on the number of taps
    x, weight, state, dy, dfinal = there
    for n, (start, end) in enumerate(zip(packed.cu_seqlens, packed.cu_seqlens[1:])):
        alone = run(
            backend, x[start:end], weight, state[n : n + 1], dy[start:end], dfinal[n : n + 1],
            torch.tensor([0, end - start], device=device),
        )  # fmt: skip
        for name in ("y", "dx"):
            assert torch.equal(alone[name], got[name][start:end])
        for name in ("final", "dstate"):
            assert torch.equal(alone[name][0], got[name][n])


SEVERAL = (0, 17, 17, 18, 50)
TOKENS = 60


def several(device: torch.device, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Sequences of several lengths and spare rows, for a filter of 4 taps with all optional inputs."""
    shape = {
        "x": (TOKENS, D), "weight": (D, 4), "bias": (D,), "residual": (TOKENS, D), "state": (4, D, 5),
        "dy": (TOKENS, D), "dfinal": (4, D, 5),
    }  # fmt: skip
    return {name: torch.randn(size).to(device, dtype) for name, size in shape.items()}


def run_all(
    backend: str, given: dict[str, torch.Tensor], cu_seqlens: torch.Tensor | int, *, activated: bool = True, **other
) -> dict[str, torch.Tensor]:
    """`run` with a bias and a residual; `other` replaces inputs, possibly by None."""
    t = {**given, **other}
    x, wide = t["x"], torch.promote_types(t["x"].dtype, torch.float32)
    y, dx, final = torch.empty_like(x), torch.empty_like(x), torch.empty_like(given["state"])
    sums = [torch.full(size, 7.0, dtype=wide, device=x.device) for size in ((4, D), (D,))]
    dstate = torch.empty_like(given["state"], dtype=wide)
    stage = table.kernel_module("conv", backend)
    stage.conv(x, t["weight"], t["bias"], t["residual"], t["state"], cu_seqlens, activated, y, final)
    out = ConvGradients(dx, *sums, dstate)
    shared = (x, t["weight"], t["bias"], t["state"], cu_seqlens, activated)
    stage.conv_bwd(*shared, t["dy"], t["dfinal"], wide, out)
    names = ("y", "final", "dx", "dweight", "dbias", "dstate")
    return {name: found.cpu() for name, found in zip(names, (y, final.mT, dx, *sums, dstate.mT))}


ABSENT = {
    "nothing": {},
    "no bias, no residual": {"bias": None, "residual": None},
    "no state": {"state": None},
    "no activation": {"activated": False},
    "only the state's gradient": {"dy": None},
    "only the output's gradient": {"dfinal": None},
}


@pytest.mark.parametrize("absent", ABSENT)
def test_with_bias_and_residual(absent: str, backend: str, device: torch.device):
    given, cu_seqlens, other = several(torch.device("cpu")), torch.tensor(SEVERAL), ABSENT[absent]
    there = {name: t.to(device) for name, t in given.items()}
    got = run_all(backend, there, cu_seqlens.to(device), **other)
    truth = run_all("eager", {name: t.double() for name, t in given.items()}, cu_seqlens, **other)
    yardstick = run_all("eager", given, cu_seqlens, **other)
    error.require(*(error.judge(got[name], truth[name], yardstick[name], name=name) for name in truth))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow(dtype: torch.dtype, backend: str, device: torch.device):
    given, cu_seqlens = several(torch.device("cpu"), dtype), torch.tensor(SEVERAL)
    there = {name: t.to(device) for name, t in given.items()}
    got = run_all(backend, there, cu_seqlens.to(device))
    truth = run_all("eager", {name: t.double() for name, t in given.items()}, cu_seqlens)
    yardstick = run_all("eager", given, cu_seqlens)
    error.require(*(error.judge(got[name], truth[name], yardstick[name], name=name) for name in truth))


def test_any_strides(backend: str, device: torch.device):
    """Strided tensors give the same bits as contiguous ones; boundaries may have either integer type."""
    given, cu_seqlens = several(device), torch.tensor(SEVERAL, device=device)
    apart = {name: t.mT.contiguous().mT if t.ndim > 1 else torch.stack([t, t], 1)[:, 0] for name, t in given.items()}
    apart["x"] = torch.cat([given["x"], given["x"]], 1)[:, :D]
    index = torch.int64 if backend == "eager" else torch.int32
    plain, other = run_all(backend, given, cu_seqlens), run_all(backend, apart, cu_seqlens.to(index))
    for name, found in plain.items():
        assert torch.equal(found, other[name]), name


def test_sums_are_zero_without_tokens(backend: str, device: torch.device):
    t = {name: x[:0] if name in ("x", "dy") else x for name, x in several(device).items()}
    sums = [torch.full(size, 7.0, device=device) for size in ((4, D), (D,))]
    cu_seqlens = torch.zeros(len(SEVERAL), device=device, dtype=torch.int64)
    shared = (t["x"], t["weight"], t["bias"], t["state"], cu_seqlens, True, t["dy"], t["dfinal"])
    stage = table.kernel_module("conv", backend)
    stage.conv_bwd(*shared, torch.float32, ConvGradients(None, *sums, torch.zeros_like(t["state"])))
    assert not any(total.any() for total in sums)


@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "state"])
def test_only_wanted_gradients_are_written(wanted: str, backend: str, device: torch.device):
    t, cu_seqlens = several(device), torch.tensor(SEVERAL, device=device)

    def gradients(*names: str) -> ConvGradients:
        shapes = {"x": t["x"], "weight": t["weight"].t(), "bias": t["bias"], "state": t["state"]}
        out = ConvGradients(*(torch.zeros_like(like) if name in names else None for name, like in shapes.items()))
        shared = (t["x"], t["weight"], t["bias"], t["state"], cu_seqlens, True, t["dy"], t["dfinal"])
        table.kernel_module("conv", backend).conv_bwd(*shared, torch.float32, out)
        return out

    every, one = gradients("x", "weight", "bias", "state"), gradients(wanted)
    assert torch.equal(getattr(one, wanted), getattr(every, wanted))
    assert all(d is None for name, d in one._asdict().items() if name != wanted)


def test_one_length_equals_its_boundaries(device: torch.device):
    t = several(device)
    boundaries = torch.arange(0, TOKENS + 1, 15, device=device)
    packed, one_length = run_all("triton", t, boundaries), run_all("triton", t, 15)
    for name, found in packed.items():
        assert torch.equal(found, one_length[name]), name
    y, shared = torch.empty_like(t["x"]), (t["x"], t["weight"], t["bias"], t["residual"], t["state"], 15, True)
    table.kernel_module("conv", "triton").conv(*shared, y, None)
    assert torch.equal(y.cpu(), packed["y"])


@pytest.mark.parametrize("wrong", [(0, 70, 90, 95, 99), (0, 50, 3, 40, 20), (-7, 20, 10**12, 30, 60), (9, 5, 4, 3, 2)])
def test_illegal_boundaries_stay_in_bounds(wrong: tuple[int, ...], guarded: Callable, device: torch.device):
    """Boundaries on a GPU are not checked. With illegal ones results are meaningless, but every access stays in
    bounds."""
    t = {name: guarded(found) for name, found in several(device).items()}
    y, dx, final, dstate = (guarded(t[name]) for name in ("x", "x", "state", "state"))
    cu_seqlens, stage = torch.tensor(wrong, device=device), table.kernel_module("conv", "triton")
    stage.conv(t["x"], t["weight"], t["bias"], t["residual"], t["state"], cu_seqlens, True, y, final)
    out = ConvGradients(dx, guarded(t["weight"].t()), guarded(t["bias"]), dstate)
    shared = (t["x"], t["weight"], t["bias"], t["state"], cu_seqlens, True, t["dy"], t["dfinal"])
    stage.conv_bwd(*shared, torch.float32, out)
    assert all(found.isfinite().all() for found in (y, final, *out))


@pytest.mark.parametrize(
    "lengths", [(3 * BLOCK // D,), (BLOCK // D, 1, 2, BLOCK // D + 5, 3), (2,) * 5000, (40,) * 400]
)
def test_blocks_own_each_token_once(lengths: tuple[int, ...]):
    """Each token counts once over all windows, and a window's values are those around its tokens."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    T, reach = int(cu_seqlens[-1]), 3
    x = torch.arange(T, dtype=torch.float64)[:, None].expand(T, D) + 1
    windows = Windows(cu_seqlens, reach, D, x.device)
    for side, at_token in ((windows.before(x, None, x.dtype), reach), (windows.after(x, x.dtype, 0), 0)):
        written, total = torch.full_like(x, torch.nan), torch.zeros(D, dtype=torch.float64)
        for window in side:
            token = window.values.narrow(-2, at_token, window.values.shape[-2] - reach)
            window.write(written, token)
            total += window.total(token.clone())
        assert torch.equal(written, x)
        if at_token:
            assert torch.equal(total, x.sum(0))
