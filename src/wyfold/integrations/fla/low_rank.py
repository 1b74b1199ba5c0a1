"""DPLR, IPLR, GDN-2 and Comba under fla's names, with fla's argument order and keywords.

The operator that a function calls documents formula, arguments, results and errors; docstrings here list differences.
`safe_gate` and `lower_bound` of DPLR and RWKV-7 are assumptions that license a faster path in fla. Wyfold computes any
log decay without them, so they are checked and otherwise ignored: nothing is clamped.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wyfold.integrations.fla.chunk_states import with_chunk_states
from wyfold.integrations.fla.ranks import wyfold_context
from wyfold.integrations.fla.recurrences import Result, v_first
from wyfold.ops import comba, dplr, gdn2
from wyfold.runtime import check
from wyfold.runtime.check import UnsupportedError


def chunk_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor | None,
    scale: float | None = None,
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
    """`wyfold.chunk_dplr_delta_rule`; float32 is no warning."""
    op = "chunk_dplr_delta_rule"
    check_assumptions(op, safe_gate, lower_bound)
    context = wyfold_context(op, cp_context, initial_state, output_final_state)
    o, state = dplr.chunk_dplr_delta_rule(
        q,
        k,
        v,
        a,
        b,
        gk,
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


def fused_recurrent_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """`wyfold.fused_recurrent_dplr_delta_rule`, with a backward; `reverse=True` raises UnsupportedError."""
    refuse_reverse("fused_recurrent_dplr_delta_rule", reverse)
    o, state = dplr.fused_recurrent_dplr_delta_rule(
        q,
        k,
        v,
        a,
        b,
        gk,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )[:2]
    return o, state


def chunk_iplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
) -> Result:
    """`wyfold.chunk_iplr_delta_rule`, with a backward."""
    o, state = dplr.chunk_iplr_delta_rule(
        q,
        k,
        v,
        a,
        b,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_size=chunk_size,
    )[:2]
    return o, state


def fused_recurrent_iplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """`wyfold.fused_recurrent_iplr_delta_rule`."""
    o, state = dplr.fused_recurrent_iplr_delta_rule(
        q,
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


def chunk_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    b: Tensor | None,
    w: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cp_context: object = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int | None = None,
    transpose_state_layout: bool | None = None,
) -> gdn2.Result:
    """`wyfold.chunk_gdn2`; `safe_gate` also clamps precomputed gates at the bound.

    With `return_intermediate_states` a third result has the states that enter each chunk, as of `chunk_kda`.
    """
    check.flag("chunk_gdn2", return_intermediate_states=return_intermediate_states)
    if chunk_size is not None and check.integer("chunk_gdn2", "chunk_size", chunk_size, least=1) != 64:
        raise ValueError(
            f"chunk_gdn2: `chunk_size` must be 64 for GDN-2 under fla's name, got {chunk_size!r}; wyfold.chunk_gdn2 "
            "takes others"
        )
    context = wyfold_context("chunk_gdn2", cp_context, initial_state, output_final_state)
    every = 64 if return_intermediate_states else None
    found: Any = gdn2.chunk_gdn2(
        q,
        k,
        v,
        g,
        b,
        w,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        state_v_first=v_first("chunk_gdn2", state_v_first, transpose_state_layout),
        cu_seqlens=None if context else cu_seqlens,
        cu_seqlens_cpu=None if context else cu_seqlens_cpu,
        cp_context=context,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        chunk_size=chunk_size,
        disable_recompute=disable_recompute,
        return_intermediate_states=return_intermediate_states,
        checkpoint_every=every,
    )
    return with_chunk_states(found, initial_state, cu_seqlens, cu_seqlens_cpu, k, every) if every else found[:2]


def fused_recurrent_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    b: Tensor | None,
    w: Tensor | None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> Result:
    """`wyfold.fused_recurrent_gdn2`, with a backward. A_log and dt_bias need `use_gate_in_kernel`."""
    o, state = gdn2.fused_recurrent_gdn2(
        q,
        k,
        v,
        g,
        b,
        w,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        state_v_first=v_first("fused_recurrent_gdn2", state_v_first, transpose_state_layout),
        cu_seqlens=cu_seqlens,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
    )[:2]
    return o, state


def chunk_comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    g: Tensor | None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> Result:
    """`wyfold.chunk_comba`."""
    o, state = comba.chunk_comba(
        q,
        k,
        v,
        p,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
    )[:2]
    return o, state


def fused_recurrent_comba(
    q: Tensor,
    k: Tensor,
    p: Tensor | None,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """`wyfold.fused_recurrent_comba`, with a backward; as in fla, p comes before v."""
    o, state = comba.fused_recurrent_comba(
        q,
        k,
        v,
        p,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )[:2]
    return o, state


def check_assumptions(op: str, safe_gate: bool, lower_bound: float | None) -> None:
    """Check what fla takes as an assumption."""
    check.flag(op, safe_gate=safe_gate)
    if lower_bound is not None and check.number(op, "lower_bound", lower_bound) >= 0:
        raise ValueError(f"{op}: lower_bound must be below 0, got {lower_bound}")


def refuse_reverse(op: str, reverse: bool) -> None:
    """Refuse a call that runs backward in time."""
    check.flag(op, reverse=reverse)
    if reverse:
        raise UnsupportedError(
            f"{op}: reverse=True is not offered",
            {"wyfold": "no operator runs backward in time; flip dense tensors, x.flip(1), and the output"},
        )
