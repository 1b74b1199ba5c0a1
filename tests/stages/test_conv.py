"""The `conv` launches: every packing against one sequence at a time, and windows that own each token exactly once."""

import pytest
import torch

from wyfold.reference import error, shapes
from wyfold.stages import table
from wyfold.stages.conv import ConvGradients
from wyfold.stages.conv.windows import Windows
from wyfold.tile.rows.eager import BLOCK

D = 6


def run(
    backend: str, x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, dy: torch.Tensor, dfinal: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> dict[str, torch.Tensor]:  # fmt: skip
    y, dx, final = torch.empty_like(x), torch.empty_like(x), torch.empty_like(state)
    dweight, dstate = torch.zeros_like(weight.t()), torch.zeros_like(state)
    stage = table.launches("conv", backend)
    stage.conv(x, weight, None, None, state, cu_seqlens, True, y, final)
    out = ConvGradients(dx, dweight, None, dstate)
    stage.conv_bwd(x, weight, None, state, cu_seqlens, True, dy, dfinal, x.dtype, out)
    return {"y": y, "final": final, "dx": dx, "dweight": dweight, "dstate": dstate}


def drawn(tokens: int, sequences: int, W: int, S: int) -> list[torch.Tensor]:
    shape = [(tokens, D), (D, W), (sequences, D, S), (tokens, D), (sequences, D, S)]
    return [torch.randn(size) for size in shape]


@pytest.mark.parametrize("packing", shapes.PACKINGS)
@pytest.mark.parametrize(("W", "S"), [(2, 1), (4, 3), (4, 9), (8, 7)])
def test_packed_against_float64_and_against_separate(packing: str, W: int, S: int, backend: str):
    packed = shapes.PACKINGS[packing]
    boundaries = torch.tensor(packed.cu_seqlens)
    tensors = drawn(packed.tokens, boundaries.shape[0] - 1, W, S)
    got, yardstick = (run(name, *tensors, boundaries) for name in (backend, "eager"))
    truth = run("eager", *(t.double() for t in tensors), boundaries)
    error.require(*(error.judge(got[name], truth[name], yardstick[name], name=name) for name in truth))
    x, weight, state, dy, dfinal = tensors
    for n, (start, end) in enumerate(zip(packed.cu_seqlens, packed.cu_seqlens[1:])):
        alone = run(
            backend, x[start:end], weight, state[n : n + 1], dy[start:end], dfinal[n : n + 1],
            torch.tensor([0, end - start]),
        )  # fmt: skip
        for name in ("y", "dx"):
            assert torch.equal(alone[name], got[name][start:end])
        for name in ("final", "dstate"):
            assert torch.equal(alone[name][0], got[name][n])
    for name in ("y", "dx"):
        assert torch.equal(got[name][boundaries[-1] :], torch.zeros(packed.tokens - packed.cu_seqlens[-1], D))


@pytest.mark.parametrize(
    "lengths", [(3 * BLOCK // D,), (BLOCK // D, 1, 2, BLOCK // D + 5, 3), (2,) * 5000, (40,) * 400]
)
def test_blocks_own_each_token_once(lengths: tuple[int, ...]):
    """Every token counted once over all windows, and every window's values are what stands around its tokens."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    T, reach = int(cu_seqlens[-1]), 3
    x = torch.arange(T, dtype=torch.float64)[:, None].expand(T, D) + 1
    windows = Windows(cu_seqlens, reach, D, x.device)
    for walk, at_token in ((windows.before(x, None, x.dtype), reach), (windows.after(x, x.dtype, 0), 0)):
        written, total = torch.full_like(x, torch.nan), torch.zeros(D, dtype=torch.float64)
        for window in walk:
            token = window.values.narrow(-2, at_token, window.values.shape[-2] - reach)
            window.write(written, token)
            total += window.total(token.clone())
        assert torch.equal(written, x)
        if at_token:
            assert torch.equal(total, x.sum(0))
