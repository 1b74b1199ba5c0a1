"""TTT-Linear under fla's names, with fla's argument order and keywords."""

from __future__ import annotations

from torch import Tensor

from wyfold.ops import ttt_linear


def chunk_ttt_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    eta: Tensor | float,
    scale: float | None = None,
    eps: float = 1e-6,
    chunk_size: int = 16,
    initial_state: Tensor | None = None,
    initial_state_bias: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`wyfold.chunk_ttt_linear`; packed sequences have a backward, and padding is never read."""
    return ttt_linear.chunk_ttt_linear(
        q,
        k,
        v,
        w,
        b,
        eta,
        scale=scale,
        eps=eps,
        chunk_size=chunk_size,
        initial_state=initial_state,
        initial_state_bias=initial_state_bias,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )


fused_chunk_ttt_linear = chunk_ttt_linear
