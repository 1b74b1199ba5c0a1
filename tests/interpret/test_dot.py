"""Products of tiles that are split into 16-bit or TF32 parts lose only what the parts leave out.

The interpreter multiplies parts exactly, so what TF32 truncates from a remainder is visible on a GPU alone.
"""

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language", reason="Triton is not installed")

dot = pytest.importorskip("wyfold.tile.dot.triton", reason="Triton is not installed")
mm, mm_exact, self_products, self_sum = dot.mm, dot.mm_exact, dot.self_products, dot.self_sum

SIZE = 32
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Relative to the sum of |a b|: the product of the two remainders, their truncation, and 32 additions in float32.
LEFT_OUT = {"bf16x3": 3 * 2.0**-17, "tf32x3": 3 * 2.0**-22, "bf16x6": 3 * 2.0**-24}
ADDED = SIZE * 2.0**-24


@triton.jit
def product(p_a, p_b, p_out, EXACT: tl.constexpr, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    at = o[:, None] * SIZE + o[None, :]
    tl.store(p_out + at, mm_exact(tl.load(p_a + at), tl.load(p_b + at), None, EXACT))


@triton.jit
def product_and_sum(p_a, p_b, p_acc, p_out, PRECISION: tl.constexpr, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    at = o[:, None] * SIZE + o[None, :]
    found = mm(tl.load(p_a + at), tl.load(p_b + at), None, tl.float32, PRECISION)
    tl.store(p_out + at, found)
    acc = tl.load(p_acc + at)
    tl.store(p_acc + at, mm(tl.load(p_a + at), tl.load(p_b + at), acc, tl.float32, PRECISION) - (acc + found))


@triton.jit
def gram(p_a, p_out, PRECISION: tl.constexpr, HALF: tl.constexpr):
    """Product of two slices of columns."""
    o, o_column = tl.arange(0, 2 * HALF), tl.arange(0, HALF)
    acc, rest = tl.zeros((2 * HALF, 2 * HALF), tl.float32), tl.zeros((2 * HALF, 2 * HALF), tl.float32)
    for column in range(0, 2 * HALF, HALF):
        a = tl.load(p_a + o[:, None] * (2 * HALF) + column + o_column[None, :])
        acc, rest = self_products(a, acc, rest, tl.float32, PRECISION)
    tl.store(p_out + o[:, None] * (2 * HALF) + o[None, :], self_sum(acc, rest, tl.float32, PRECISION))


def within(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, left_out: float) -> bool:
    a, b = a.double().cpu(), b.double().cpu()
    return bool(((got.double().cpu() - a @ b).abs() <= (left_out + ADDED) * (a.abs() @ b.abs())).all())


@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, FP32), (FP32, BF16), (FP32, FP16)], ids=str)
@pytest.mark.parametrize("EXACT", LEFT_OUT)
def test_operands_are_not_rounded(EXACT: str, dtypes: tuple[torch.dtype, torch.dtype], device: torch.device):
    a, b = (torch.randn(SIZE, SIZE).mul(scale).to(dtype).to(device) for scale, dtype in zip((1e3, 1.0), dtypes))
    out = torch.empty(SIZE, SIZE, device=device)
    product[(1,)](a, b, out, EXACT=EXACT, SIZE=SIZE)
    assert within(out, a, b, LEFT_OUT[EXACT])


@pytest.mark.parametrize("at", [(0, 0), (3, 5)], ids=["finite", "NaN"])
def test_sums_of_products_are_added_to_the_accumulator_once(at: tuple[int, int], device: torch.device):
    """The matrix unit truncates what it adds to its sum. The accumulator is added by a rounded addition instead."""
    a, b, acc = (torch.randn(SIZE, SIZE, device=device) for _ in range(3))
    a[at] = torch.nan if any(at) else 1e3
    out = torch.empty(SIZE, SIZE, device=device)
    product_and_sum[(1,)](a, b, acc, out, PRECISION="bf16x6", SIZE=SIZE)
    finite = torch.arange(SIZE) != (at[0] if any(at) else -1)
    assert within(out[finite], a[finite], b, LEFT_OUT["bf16x6"])
    assert out[~finite].isnan().all() and not acc[finite].any()


@pytest.mark.parametrize("EXACT", LEFT_OUT)
def test_nan_stays_nan(EXACT: str, device: torch.device):
    """For any NaN bits: on a GPU arithmetic gives all ones, and a carry would turn those into zero."""
    a, b = torch.ones(SIZE, SIZE, device=device), torch.ones(SIZE, SIZE, device=device)
    out = torch.empty(SIZE, SIZE, device=device)
    for bits in (0x7FFFFFFF, 0x7FC00000):
        a[3, 5] = torch.tensor(bits, dtype=torch.int32).view(FP32)
        product[(1,)](a, b, out, EXACT=EXACT, SIZE=SIZE)
        assert out[3].isnan().all() and not out[4:].isnan().any()
        product[(1,)](b, a, out, EXACT=EXACT, SIZE=SIZE)
        assert out[:, 5].isnan().all() and not out[:, 6:].isnan().any()


@pytest.mark.parametrize("PRECISION", ["tf32x3", "ieee"])
def test_gram_of_rows(PRECISION: str, device: torch.device):
    a = torch.randn(SIZE, SIZE, device=device)
    out = torch.empty(SIZE, SIZE, device=device)
    gram[(1,)](a, out, PRECISION=PRECISION, HALF=SIZE // 2)
    assert within(out, a, a.mT, LEFT_OUT["tf32x3"])
