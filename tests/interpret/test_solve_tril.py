"""`solve_tril` on its kernel, against the row loop in float64, on every grid and for many kinds of keys.

Inputs are surrounded by NaN, unread entries are NaN, and outputs are initialised with NaN.
"""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from wyfold import reference, solve_tril
from wyfold.reference import error, shapes
from wyfold.reference.inputs import KEYS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PACKINGS = {
    "ragged, spare rows": (0, 17, 17, 82, 83, 147),
    "around the chunk": (0, 63, 127, 192, 193),
    "nobody": (0,),
}


def rows(T: int, C: int, B: int = 1, H: int = 2, dtype: torch.dtype = FP32) -> Tensor:
    """Random entries, also on and above the diagonal, small enough for a well-conditioned inverse."""
    return (torch.randn(B, T, H, C) / C**0.5).to(dtype)


def poisoned(A: Tensor, cu: Tensor | None) -> Tensor:
    """A with NaN wherever `solve_tril` must not read."""
    bounds = [0, A.shape[1]] if cu is None else cu.tolist()
    row = torch.full((A.shape[1],), -1)
    for start, end in itertools.pairwise(bounds):
        row[start:end] = torch.arange(end - start) % A.shape[-1]
    return A.masked_fill(~(torch.arange(A.shape[-1]) < row[:, None])[None, :, None], torch.nan)


def judged(A: Tensor, cu: Tensor | None, got: Tensor, **options) -> None:
    truth = reference.solve_tril(A.double(), cu_seqlens=cu)
    eager = solve_tril(A, cu_seqlens=cu, backend="eager", **options)
    error.require(error.judge(got.cpu(), truth, eager, name="X"))
    assert torch.equal(got.cpu() == 0, eager == 0)  # above the diagonal, past a short chunk, past the last boundary


@pytest.mark.parametrize("C", shapes.CHUNK_SIZES)
@pytest.mark.parametrize("T, H, dtype", [(70, 2, FP32), (1, 5, BF16), (64, 3, FP16), (0, 1, FP32)], ids=str)
def test_dense(C: int, T: int, H: int, dtype: torch.dtype, guarded: Callable, device: torch.device):
    A = rows(T, C, 2, H, dtype)
    got = solve_tril(guarded(poisoned(A, None).to(device)), backend="triton")
    assert got.dtype == FP32
    judged(A, None, got)


@pytest.mark.parametrize("C", shapes.CHUNK_SIZES)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("output_dtype", [FP32, BF16], ids=str)
def test_packed(C: int, packing: str, output_dtype: torch.dtype, guarded: Callable, device: torch.device):
    cu = torch.tensor(PACKINGS[packing])
    A = rows(int(cu[-1]) + 13, C, H=3)
    options = {"output_dtype": output_dtype}
    on_device = guarded(poisoned(A, cu).to(device))
    got = solve_tril(on_device, cu_seqlens=cu.to(device), backend="triton", **options)
    assert got.isfinite().all()
    judged(A, cu, got, **options)
    for start, end in itertools.pairwise(PACKINGS[packing]):
        alone = solve_tril(guarded(A[:, start:end].to(device)), backend="triton", **options)
        assert torch.equal(got[:, start:end], alone)


@pytest.mark.parametrize("C", shapes.CHUNK_SIZES)
@pytest.mark.parametrize("beta", [0.835, 2.0])
@pytest.mark.parametrize("keys", ["positive", "identical", "near-identical", "two clusters"])
def test_correlated_keys_lose_no_more_than_substitution_may(keys: str, beta: float, C: int, device: torch.device):
    """|X - exact| <= C eps |X| |I + L| |X|, elementwise: stable inversion guarantees it, powers of L do not."""
    k = KEYS[keys]((1, C, 3, 32), torch.Generator().manual_seed(C))[0].transpose(0, 1).float()
    L = (beta * k @ k.mT).tril(-1)  # [3, C, C]
    got = solve_tril(L.transpose(0, 1)[None].to(device), backend="triton")[0].transpose(0, 1).cpu()
    eye = torch.eye(C, dtype=torch.float64)
    truth = torch.linalg.solve_triangular(eye + L.double(), eye, upper=False, unitriangular=True)
    allowed = truth.abs() @ (eye + L.double()).abs() @ truth.abs()
    assert ((got.double() - truth).abs() <= C * torch.finfo(FP32).eps * allowed).all()


@pytest.mark.parametrize("C", shapes.CHUNK_SIZES)
def test_a_row_does_not_depend_on_later_rows(C: int, device: torch.device):
    A = rows(C, C)
    X = solve_tril(A.to(device), backend="triton")
    for row in (1, 15, C // 2, C - 1):
        changed = A.clone()
        changed[:, row:] = torch.randn(1, C - row, 2, C)
        assert torch.equal(solve_tril(changed.to(device), backend="triton")[:, :row], X[:, :row])


@pytest.mark.parametrize("C", shapes.CHUNK_SIZES)
def test_what_is_not_finite_stays_in_its_chunk_and_head(C: int, device: torch.device):
    A = rows(2 * C, C, H=4)
    X = solve_tril(A.to(device), backend="triton")
    broken = A.clone()
    broken[0, C - 1, 1, 0] = torch.inf
    got = solve_tril(broken.to(device), backend="triton")
    assert not got[0, C - 1, 1].isfinite().all()
    here = torch.zeros(1, 2 * C, 4, 1, dtype=torch.bool, device=got.device)
    here[0, :C, 1] = True
    assert torch.equal(got.masked_fill(here, 0), X.masked_fill(here, 0))


def test_strided_is_contiguous(device: torch.device):
    A = rows(50, 32, B=2).to(device)
    X = solve_tril(A, backend="triton")
    for strided in (A.transpose(1, 2).contiguous().transpose(1, 2), torch.cat([A, A], -1)[..., 32:]):
        assert torch.equal(solve_tril(strided, backend="triton"), X)


def test_repeats(device: torch.device):
    A = rows(100, 64, H=3).to(device)
    X = solve_tril(A, backend="triton")
    assert all(torch.equal(solve_tril(A, backend="triton"), X) for _ in range(3 if device.type == "cpu" else 100))
