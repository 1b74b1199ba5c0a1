"""(I + L)^-T on the device, merged by blocks and by whole tiles: as exact as its products, blind above the diagonal."""

import pytest
import torch
from tests.tile.test_inverse import grams
from torch import Tensor

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language", reason="Triton is not installed")
pytest.importorskip("wyfold.tile.inverse.triton", reason="Triton is not installed")

from wyfold.tile.dot.triton import exact  # noqa: E402
from wyfold.tile.inverse.triton import inverse_transposed, inverse_transposed_whole  # noqa: E402

FORMS = [(C, whole) for C in (16, 32, 64) for whole in (False, True)]
# Error per term of a product of split operands, in addition to that of a float32 sum.
LEFT_OUT = {"ieee": 2.0**-24, "bf16x3": 2.0**-16, "tf32x3": 2.0**-21}


@triton.jit
def inverted(p_L, p_out, BT: tl.constexpr, WHOLE: tl.constexpr, EXACT: tl.constexpr):
    o = tl.arange(0, BT)
    at = tl.program_id(0) * BT * BT + o[:, None] * BT + o[None, :]
    b_LT = tl.trans(tl.load(p_L + at))
    b_LT = tl.where(o[:, None] < o[None, :], b_LT, 0.0)
    if WHOLE:
        tl.store(p_out + at, inverse_transposed_whole(tl.load(p_L + at), b_LT, BT, EXACT, 4))
    else:
        tl.store(p_out + at, inverse_transposed(tl.load(p_L + at), b_LT, BT, EXACT, 4))


def inverse(L: Tensor, whole: bool, device: torch.device) -> Tensor:
    """The inverse from the device, transposed back."""
    out = torch.empty_like(L, device=device)
    kind = exact(torch.bfloat16 if whole else torch.float32)
    inverted[(L.shape[0],)](L.to(device), out, BT=L.shape[-1], WHOLE=whole, EXACT=kind, num_warps=4)
    return out.mT.cpu()


@pytest.mark.parametrize(("C", "whole"), FORMS)
@pytest.mark.parametrize("beta", [0.835, 2.0])
@pytest.mark.parametrize("keys", ["normal", "identical"])
def test_correlated_keys_lose_no_more_than_substitution_may(keys, beta, C, whole, device):
    """|A - exact| <= C eps |A| |I + L| |A|, elementwise, with the eps of the products."""
    L = grams(keys, beta, C, torch.float32)
    eye = torch.eye(C, dtype=torch.float64)
    truth = torch.linalg.solve_triangular(eye + L.double(), eye, upper=False, unitriangular=True)
    allowed = truth.abs() @ (eye + L.double()).abs() @ truth.abs()
    eps = LEFT_OUT[exact(torch.bfloat16 if whole else torch.float32)]
    assert ((inverse(L, whole, device).double() - truth).abs() <= C * eps * allowed).all()


@pytest.mark.parametrize(("C", "whole"), FORMS)
def test_reads_only_below_the_diagonal(C, whole, device):
    L = grams("normal", 1.0, C, torch.float32)
    garbage = torch.full_like(L, torch.nan).triu()
    assert torch.equal(inverse(torch.where(garbage.isnan(), garbage, L), whole, device), inverse(L, whole, device))


@pytest.mark.parametrize(("C", "whole"), FORMS)
def test_a_row_does_not_depend_on_later_rows(C, whole, device):
    L = grams("normal", 1.0, C, torch.float32)
    A = inverse(L, whole, device)
    assert torch.equal(A.triu(1), torch.zeros_like(A))
    for row in (1, C // 2, C - 1):
        changed = L.clone()
        changed[:, row:] = torch.randn(3, C - row, C)
        assert torch.equal(inverse(changed, whole, device)[:, :row], A[:, :row])
