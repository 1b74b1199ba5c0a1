"""Stores of the factors F and W."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from wyfold.tile.index.gluon import barrier, quarters, tma_store_upper


@gluon.jit
def store_factors(x_F, x_W, x_FB, F, numbers, out, pid, LC: gl.constexpr):
    """Store W from the second tile of `out`, and F in the forms that are wanted through the first one.

    Args:
        F: F diag(beta).
        out: [2, BT, BT] shared memory.
    """
    quarter_tiles = quarters(out, x_W, 2)
    if x_FB is not None:
        _store_scaled(x_FB, F, numbers.beta_mask, out.index(0), quarter_tiles, pid, LC)
    else:
        _store_scaled(x_F, F, numbers.inverse_beta, out.index(0), quarter_tiles, pid, LC)
    tma_store_upper(x_W, pid, quarter_tiles, 1)
    tma.store_wait(pendings=0)
    if x_F is not None and x_FB is not None:
        barrier()
        _store_scaled(x_F, F, numbers.inverse_beta, out.index(0), quarter_tiles, pid, LC)
        tma.store_wait(pendings=0)


@gluon.jit
def _store_scaled(x_out, x, row_scale, buffer, quarter_tiles, pid, LC: gl.constexpr):
    """Scale a tile's rows and store it by TMA through a shared memory buffer."""
    buffer.store((x * row_scale.load(gl.SliceLayout(1, LC))[:, None]).to(gl.bfloat16))
    fence_async_shared()
    barrier()
    tma_store_upper(x_out, pid, quarter_tiles, 0)
