"""`update` in Triton: one program per sequence and block of channels, serial over the sequence's tokens."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.records import Slots
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import LaunchKey, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.tile.activation.triton import silu
from wyfold.tile.index.triton import strides
from wyfold.tile.taps.triton import load_row, load_taps, taps


def update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pool: Tensor,
    slots: Slots,
    grid: ChunkGrid,
    activated: bool,
    y: Tensor,
) -> None:
    """Convolve every sequence's tokens after the inputs in its slot, and update the slot for the next tokens.

    Args:
        x: [B, T, D], float32 or narrower, any strides.
        weight: [D, W], float32 or narrower, any strides.
        bias: [D] or None.
        pool: [slots, D, S], any strides, updated in place, rounding once.
        slots: Uses `source`, `given`, `pad` and `accepted`. The inputs before the first token begin at entry
            accepted[n] - 1 of the slot, clamped to valid entries.
        grid: The call's boundaries.
        activated: Whether silu is applied to y.
        y: [B, T, D] written; zero for skipped sequences and past the last boundary.
    """
    D, W = weight.shape
    config = tuned("conv_pool.triton", LaunchKey(W=W), x.device)
    BD = min(config.blocks["BD"], max(32, triton.next_power_of_2(D)))
    launch_kernel(
        wyfold_conv_pool_triton,
        (grid.sequences + (grid.cu is not None)) * triton.cdiv(D, BD),
        p_x=x,
        s_x=x.stride(),
        p_w=weight,
        s_w=weight.stride(),
        p_bias=None if bias is None else bias.contiguous(),
        p_pool=pool,
        s_pool=pool.stride(),
        p_source=slots.source,
        s_source=strides(slots.source),
        p_given=slots.given,
        p_accepted=slots.accepted,
        p_y=y,
        s_y=y.stride(),
        p_cu=grid.cu,
        N=grid.sequences,
        T=grid.tokens,
        slots=pool.shape[0],
        S=pool.shape[2],
        pad=slots.pad,
        ACTIVATED=activated,
        D=D,
        W=W,
        BD=BD,
        # Roundings are explicit, so a token gets the same bits as in `conv` over the whole sequence.
        **config.options(contract=False),
    )


@triton.jit(do_not_specialize=["N", "T", "slots", "S", "pad"])
def wyfold_conv_pool_triton(
    p_x,
    s_x,
    p_w,
    s_w,
    p_bias,
    p_pool,
    s_pool,
    p_source,
    s_source,
    p_given,
    p_accepted,
    p_y,
    s_y,
    p_cu,
    N,
    T,
    slots,
    S,
    pad,
    ACTIVATED: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    BD: tl.constexpr,
):
    """One program owns BD channels of one sequence and of its slot."""
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    pid = tl.program_id(0).to(tl.int64)
    o_d, i_n = pid % BLOCKS * BD + tl.arange(0, BD), pid // BLOCKS
    m_d = o_d < D
    b, t, length = i_n, i_n * 0, i_n * 0 + T
    live = i_n < N
    if p_cu is not None:
        # The tokens past the last boundary are one more sequence.
        b, t = i_n * 0, tl.load(p_cu + i_n)
        length = tl.load(p_cu + i_n + 1) - t
    slot = i_n
    if p_source is not None:
        slot = tl.load(p_source + i_n * s_source[0], mask=live, other=pad).to(tl.int64)
    live = live & (slot > pad) & (slot < slots)
    p_row = p_y + b * s_y[0] + t * s_y[1] + o_d * s_y[2]
    if not live:
        for i in range(length):
            tl.store(p_row + i * s_y[1], tl.zeros((BD,), p_y.dtype.element_ty), mask=m_d)
        return

    has_state = m_d
    if p_given is not None:
        has_state = has_state & (tl.load(p_given + i_n) != 0)
    begin = i_n * 0
    if p_accepted is not None:
        begin = tl.minimum(tl.maximum(tl.load(p_accepted + i_n).to(tl.int64) - 1, 0), S - (W - 1))
    p_slot = p_pool + slot * s_pool[0] + o_d * s_pool[1]
    window: tl.tuple = ()
    for i in tl.static_range(W - 1):
        window = window + (load_row(p_slot, (begin + i) * s_pool[2], has_state),)
    w, b_bias = load_taps(p_w, s_w, p_bias, o_d, m_d, W)
    tl.debug_barrier()  # a thread may overwrite an entry that another thread still reads
    if length > 0:
        for i in tl.static_range(W - 2):
            tl.store(p_slot + i * s_pool[2], window[i + 1].to(p_pool.dtype.element_ty), mask=m_d)
    for i in range(length):
        b_x = load_row(p_x + b * s_x[0] + (t + i) * s_x[1], o_d * s_x[2], m_d)
        tl.store(p_slot + (W - 2 + i) * s_pool[2], b_x.to(p_pool.dtype.element_ty), mask=m_d & (W - 2 + i < S))
        full = window + (b_x,)
        b_y = taps(full, w, W)
        if p_bias is not None:
            b_y += b_bias
        if ACTIVATED:
            b_y = silu(b_y)
        tl.store(p_row + i * s_y[1], b_y.to(p_y.dtype.element_ty), mask=m_d)
        window = full[1:]
