"""(I + L)^-1: exact in float64, within the bound of triangular inversion in float32; ignores the upper triangle."""

import pytest
import torch
from torch import Tensor

from wyfold.reference.inputs import KEYS
from wyfold.tile.inverse.eager import inverse

SIZES = (16, 32, 64)


def grams(keys: str, beta: float, C: int, dtype: torch.dtype) -> Tensor:
    """beta K K^T below the diagonal, for unit keys of one of the reference's families.   [3, C, C]"""
    k = KEYS[keys]((3, C, 1, 32), torch.Generator().manual_seed(C))[:, :, 0]
    return (beta * k @ k.mT).tril(-1).to(dtype)


@pytest.mark.parametrize("C", SIZES)
@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_is_the_inverse(C: int, beta: float, float64_bounds):
    L = grams("normal", beta, C, torch.float64)
    A = inverse(L)
    float64_bounds.output("A (I + L)", A + A @ L, torch.eye(C, dtype=torch.float64).expand_as(A).clone())
    assert torch.equal(A.triu(1), torch.zeros_like(A))
    assert torch.equal(A.diagonal(dim1=1, dim2=2), torch.ones(3, C, dtype=torch.float64))


@pytest.mark.parametrize("C", SIZES)
@pytest.mark.parametrize("beta", [0.835, 1.0, 2.0])
@pytest.mark.parametrize("keys", ["normal", "positive", "identical", "near-identical", "two clusters"])
def test_correlated_keys_lose_no_more_than_substitution_may(keys: str, beta: float, C: int):
    """|A - exact| <= C eps |A| |I + L| |A|, elementwise: stable inversion guarantees it, powers of L do not."""
    L = grams(keys, beta, C, torch.float32)
    eye = torch.eye(C, dtype=torch.float64)
    truth = torch.linalg.solve_triangular(eye + L.double(), eye, upper=False, unitriangular=True)
    allowed = truth.abs() @ (eye + L.double()).abs() @ truth.abs()
    assert ((inverse(L).double() - truth).abs() <= C * torch.finfo(torch.float32).eps * allowed).all()


@pytest.mark.parametrize("C", SIZES)
def test_reads_only_below_the_diagonal(C: int):
    L = grams("normal", 1.0, C, torch.float32)
    garbage = torch.full_like(L, torch.nan).triu()
    assert torch.equal(inverse(torch.where(garbage.isnan(), garbage, L)), inverse(L))


@pytest.mark.parametrize("C", SIZES)
def test_a_row_does_not_depend_on_later_rows(C: int):
    L = grams("normal", 1.0, C, torch.float32)
    A = inverse(L)
    for row in (1, 7, 15, C // 2, C - 1):
        changed = L.clone()
        changed[:, row:] = torch.randn(3, C - row, C)
        assert torch.equal(inverse(changed)[:, :row], A[:, :row])


@pytest.mark.parametrize("C", SIZES)
def test_a_tile_does_not_depend_on_the_others(C: int, threads: int):
    L = torch.randn(37, C, C).tril(-1) / C
    A = inverse(L)
    for tiles in (slice(0, 1), slice(5, 7), slice(36, 37)):
        assert torch.equal(inverse(L[tiles].clone()), A[tiles])
