"""`segment_fold`: states at the borders of segments against the maps applied one by one, forward and backward."""

import itertools

import pytest
import torch

from wyfold.kernels import table
from wyfold.runtime import chunk_layout
from wyfold.runtime.chunk_layout import Cut, Segments

LENGTHS = (0, 1, 9 * 16, 30, 17 * 16, 64)
HV = 2


def drawn(
    K: int, V: int, dtype: torch.dtype, device: torch.device, most: int = 5
) -> tuple[torch.Tensor, torch.Tensor, Segments]:
    cu = torch.tensor([0, *itertools.accumulate(LENGTHS)], device=device)
    segments = chunk_layout.segment_grid(chunk_layout.chunk_grid(1, sum(LENGTHS) + 40, 16, cu), Cut(1, most, 4), device)
    assert segments.first[-1] - segments.sequences < segments.borders, "some borders are spare"
    S = torch.randn(segments.borders, HV, K, V, dtype=dtype)
    M = torch.randn(segments.borders, HV, K, K, dtype=dtype) / K**0.5
    return S.to(device), M.to(device), segments


def folded(S: torch.Tensor, M: torch.Tensor, segments: Segments, reverse: bool) -> torch.Tensor:
    """Fold in float64; spare borders are unchanged."""
    S, M, r = S.double(), M.double(), 0
    for count in segments.first.diff().tolist():
        for i in range(1, count - 1):
            if reverse:
                r1 = r + count - 2 - i
                S[r1] += torch.einsum("hkj,hkv->hjv", M[r1 + 1], S[r1 + 1])
            else:
                S[r + i] += torch.einsum("hkj,hjv->hkv", M[r + i], S[r + i - 1])
        r += count - 1
    return S


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_eager_fold(reverse: bool, float64_bounds):
    S, M, segments = drawn(8, 16, torch.float64, torch.device("cpu"))
    truth = folded(S.clone(), M, segments, reverse)
    table.kernel_module("segment_fold", "eager").segment_fold(S, M, segments, reverse=reverse)
    float64_bounds.output("S", S, truth)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("K, V", [(8, 24), (64, 16), (40, 8)])
def test_the_kernel(K: int, V: int, reverse: bool, device: torch.device):
    """States V-first and maps transposed, as `segment_summary` writes them; float32 throughout."""
    S, M, segments = drawn(K, V, torch.float32, device)
    truth = folded(S.clone(), M, segments, reverse)
    S, M = S.mT.contiguous().mT, M.mT.contiguous().mT
    table.kernel_module("segment_fold", "triton").segment_fold(S, M, segments, reverse=reverse, dtype=torch.float32)
    assert (S.double() - truth).norm() <= 1e-6 * truth.norm()


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize(
    "other",
    [
        None,
        pytest.param(1, marks=pytest.mark.release_if_interpreted),
        8,
        9,
        pytest.param(10, marks=pytest.mark.release_if_interpreted),
        15,
    ],
    ids=lambda r: f"not {r}",
)
def test_zero_maps(reverse: bool, other: int | None, device: torch.device):
    """All maps of one sequence are zeros, or all but one.

    Then the fold is skipped, or computed completely, also with a non-finite state at any border.
    """
    S, M, segments = drawn(8, 8, torch.float32, device, most=17)
    start = int(segments.first[4]) - 4
    assert int(segments.first[5]) - 5 - start == 16, "borders of the longest sequence"
    zeros = torch.full_like(M[0], -0.0)
    for r in range(start, start + 16):
        if r - start != other:
            M[r] = zeros
    S[start + 5, 0, 2, 3] = -0.0
    fold = table.kernel_module("segment_fold", "triton").segment_fold
    # The fold looks for a non-finite state only where it could be skipped.
    for lost in (None, *(range(16) if other is None else (0, other, 15))):
        given = S.clone()
        if lost is not None:
            given[start + lost, 1, 4, 0] = torch.nan
        truth = folded(given.clone(), M, segments, reverse)
        got = given.clone().mT.contiguous().mT
        fold(got, M.mT.contiguous().mT, segments, reverse=reverse, dtype=torch.float32)
        assert torch.equal(got.isnan(), truth.isnan()), lost
        assert (got.double() - truth).nan_to_num().norm() <= 1e-6 * truth.nan_to_num().norm(), lost
        if lost is None:
            # A negative zero survives only if nothing was added to it.
            assert bool(torch.signbit(got[start + 5, 0, 2, 3])) == (other is None)
