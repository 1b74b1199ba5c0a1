"""RWKV-7 under fla's names, with fla's argument order and keywords.

The operator that a function calls documents formula, arguments, results and errors; docstrings here list differences.
`safe_gate` and `lower_bound` are checked and otherwise ignored, as those of DPLR (`low_rank`).
"""

from __future__ import annotations

from torch import Tensor

from wyfold.integrations.fla.low_rank import check_assumptions, refuse_reverse
from wyfold.integrations.fla.ranks import wyfold_context
from wyfold.integrations.fla.recurrences import Result
from wyfold.ops import rwkv7


def chunk_rwkv7(
    r: Tensor,
    w: Tensor | None,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: object = None,
    lower_bound: float | None = None,
) -> Result:
    """`wyfold.chunk_rwkv7`."""
    check_assumptions("chunk_rwkv7", safe_gate, lower_bound)
    context = wyfold_context("chunk_rwkv7", cp_context, initial_state, output_final_state)
    o, state = rwkv7.chunk_rwkv7(
        r,
        w,
        k,
        v,
        a,
        b,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=None if context else cu_seqlens,
        cu_seqlens_cpu=None if context else cu_seqlens_cpu,
        chunk_size=chunk_size,
        disable_recompute=disable_recompute,
        cp_context=context,
    )[:2]
    return o, state


def fused_recurrent_rwkv7(
    r: Tensor,
    w: Tensor | None,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """`wyfold.fused_recurrent_rwkv7`, with a backward; as in fla, the default scale is K ** -0.5, not 1."""
    o, state = rwkv7.fused_recurrent_rwkv7(
        r,
        w,
        k,
        v,
        a,
        b,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )[:2]
    return o, state


def fused_mul_recurrent_rwkv7(
    r: Tensor,
    w: Tensor | None,
    k: Tensor,
    v: Tensor,
    kk: Tensor,
    a: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """`wyfold.fused_mul_recurrent_rwkv7`, with a backward; `reverse=True` raises UnsupportedError."""
    refuse_reverse("fused_mul_recurrent_rwkv7", reverse)
    o, state = rwkv7.fused_mul_recurrent_rwkv7(
        r,
        w,
        k,
        v,
        kk,
        a,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )[:2]
    return o, state
