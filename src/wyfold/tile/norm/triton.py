"""Row norms and their adjoints on the device: the last axis is a row."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def reciprocal_norm(b_x, eps: tl.constexpr = 1e-6):
    """(sum x^2 + eps)^(-1/2) of each row.   [BT, BK] -> [BT] float32"""
    b_x = b_x.to(tl.float32)
    return tl.rsqrt(tl.sum(b_x * b_x, axis=1) + eps)


@triton.jit
def l2norm_bwd(b_y, b_r, b_dy):
    """dx = r (dy - y <y, dy>) of rows y = x r, exact with eps included.   [BT, BK] float32"""
    return b_r[:, None] * (b_dy - b_y * tl.sum(b_y * b_dy, axis=1)[:, None])
