"""bfloat16 in the repaired interpreter equals PyTorch's, bit for bit where both round once."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language", reason="Triton is not installed")

BF16 = torch.bfloat16
SIZE = 64


@triton.jit
def elementwise(p_x, p_y, p_out, OP: tl.constexpr, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    x, y = tl.load(p_x + o), tl.load(p_y + o)
    if OP == "add":
        out = x + y
    elif OP == "multiply":
        out = x * y
    elif OP == "subtract a constant":
        out = x - 0.3
    elif OP == "compare":
        out = tl.where(x < y, x, -y)
    elif OP == "through float32":
        out = (x.to(tl.float32) * y.to(tl.float32)).to(tl.bfloat16)
    elif OP == "through int":
        out = (x * 8).to(tl.int32).to(tl.bfloat16)
    elif OP == "through half":
        out = x.to(tl.float16).to(tl.bfloat16)
    else:
        out = tl.exp(x.to(tl.float32)).to(tl.bfloat16)
    tl.store(p_out + o, out)


@triton.jit
def fused(p_x, p_y, p_out, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    x, y = tl.load(p_x + o), tl.load(p_y + o)
    tl.store(p_out + o, tl.fma(x, y, x * y * -1.0))


@triton.jit
def product(p_x, p_y, p_out, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    at = o[:, None] * SIZE + o[None, :]
    tl.store(p_out + at, tl.dot(tl.load(p_x + at), tl.load(p_y + at)))


@triton.jit
def reductions(p_x, p_out, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    x = tl.load(p_x + o[:, None] * SIZE + o[None, :])
    tl.store(p_out + o, tl.sum(x, 1).to(tl.bfloat16))
    tl.store(p_out + SIZE + o, tl.max(x, 1))
    tl.store(p_out + 2 * SIZE + o, tl.cumsum(tl.load(p_x + o), 0).to(tl.bfloat16))


PYTORCH = {
    "add": lambda x, y: x + y,
    "multiply": lambda x, y: x * y,
    "subtract a constant": lambda x, y: x - torch.tensor(0.3).bfloat16(),
    "compare": lambda x, y: torch.where(x < y, x, -y),
    "through float32": lambda x, y: (x.float() * y.float()).bfloat16(),
    "through int": lambda x, y: (x * 8).int().bfloat16(),
    "through half": lambda x, y: x.half().bfloat16(),
    "exponential": lambda x, y: x.float().exp().bfloat16(),
}


@pytest.mark.parametrize("op", PYTORCH)
def test_elementwise(op: str, interpreter):
    x, y = torch.randn(SIZE).to(BF16), torch.randn(SIZE).to(BF16)
    out = torch.empty_like(x)
    elementwise[(1,)](x, y, out, OP=op, SIZE=SIZE)
    assert torch.equal(out, PYTORCH[op](x, y))


def test_rounding_is_to_the_nearest_even(interpreter):
    """Ties between neighbours, a carry into the exponent, the largest number, infinities and signed zeros."""
    ties = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 2 - 2.0**-9, 3.4e38, torch.inf, -torch.inf, 0.0, -0.0])
    x, one = ties.repeat(SIZE // 8), torch.ones(SIZE)
    out = torch.empty(SIZE, dtype=BF16)
    elementwise[(1,)](x, one, out, OP="through float32", SIZE=SIZE)
    assert torch.equal(out.view(torch.int16), x.bfloat16().view(torch.int16))


def test_nan_stays_nan(interpreter):
    x = torch.full((SIZE,), torch.nan, dtype=BF16)
    out = torch.zeros(SIZE, dtype=BF16)
    elementwise[(1,)](x, x, out, OP="add", SIZE=SIZE)
    assert out.isnan().all()


def test_a_fused_multiply_add_is_rounded_once(interpreter):
    """x y + z with z = -round(x y) is the rounding error of the product."""
    x, y, out = torch.randn(SIZE), torch.randn(SIZE), torch.empty(SIZE)
    fused[(1,)](x, y, out, SIZE=SIZE)
    assert torch.equal(out.double(), x.double() * y.double() - (x * y).double())
    assert out.abs().max() > 0


def test_a_product_of_tiles(interpreter):
    x, y = torch.randint(-8, 8, (2, SIZE, SIZE)).to(BF16).unbind()  # small integers: every sum is exact in float32
    out = torch.empty(SIZE, SIZE)
    product[(1,)](x, y, out, SIZE=SIZE)
    assert torch.equal(out, x.float() @ y.float())


def test_reductions_and_scans(interpreter):
    x = torch.randint(-8, 8, (SIZE, SIZE)).to(BF16)
    out = torch.empty(3, SIZE, dtype=BF16)
    reductions[(1,)](x, out, SIZE=SIZE)
    wide = x.float()
    assert torch.equal(out, torch.stack([wide.sum(1), wide.amax(1), wide[0].cumsum(0)]).bfloat16())
