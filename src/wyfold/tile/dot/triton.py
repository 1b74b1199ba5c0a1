"""Matrix products of tiles on the device.

`mm` feeds operands that the design rounds to the inputs' dtype: bfloat16 as it is, float16 through TF32 (the same
mantissa, without its overflow), float32 by three TF32 products. `mm_exact` is for the inverse and the factors made from
it, whose operands must not be rounded: float32 by three partial products (docs/numerics.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from wyfold.runtime.launch import interpreting


def operand(dtype: torch.dtype) -> tl.dtype:
    """OP of `mm`: the dtype operands are rounded to."""
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float32


def workspace(dtype: torch.dtype) -> torch.dtype:
    """Dtype of tiles that travel between launches: float16 has no room for what is not normalised."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def precision(dtype: torch.dtype) -> str:
    """PRECISION of `mm`; ignored where the operands are bfloat16."""
    if interpreting():
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "tf32"


def exact(dtype: torch.dtype) -> str:
    """EXACT of `mm_exact`."""
    if interpreting():
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "bf16x3"


@triton.jit
def mm(a, b, acc, OP: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a b, operands rounded to OP."""
    return tl.dot(a.to(OP), b.to(OP), acc, input_precision=PRECISION)


@triton.jit
def mm_exact(a, b, acc, EXACT: tl.constexpr):
    """acc + a b of float32 operands that are not rounded."""
    return tl.dot(a, b, acc, input_precision=EXACT)
