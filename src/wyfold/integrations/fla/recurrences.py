"""Delta rules under fla's names, with fla's argument order and keywords.

The operator that a function calls documents formula, arguments, results and errors; docstrings here list differences.
Arguments that only affect fla's implementation are accepted and ignored. Arguments that Wyfold cannot honour raise
UnsupportedError, and unknown keywords raise TypeError.
"""

from __future__ import annotations

import warnings

from torch import Tensor

from wyfold.integrations.fla.ranks import wyfold_context
from wyfold.ops import delta_product, delta_rule, gated_delta_rule, kda
from wyfold.runtime import check
from wyfold.runtime.check import UnsupportedError

Result = tuple[Tensor, Tensor | None]


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
) -> Result:
    """`wyfold.chunk_delta_rule`; unlike fla's, it accepts float32."""
    o, state = delta_rule.chunk_delta_rule(
        q,
        k,
        v,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_size=chunk_size,
    )[:2]
    return o, state


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """`wyfold.fused_recurrent_delta_rule`; unlike in fla, beta cannot be a vector over value channels."""
    o, state = delta_rule.fused_recurrent_delta_rule(
        q,
        k,
        v,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )[:2]
    return o, state


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int | None = None,
    transpose_state_layout: bool | None = None,
) -> Result:
    """`wyfold.chunk_gated_delta_rule`; A_log and dt_bias without `use_gate_in_kernel` raise ValueError."""
    context = wyfold_context("chunk_gated_delta_rule", cp_context, initial_state, output_final_state)
    o, state = gated_delta_rule.chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=v_first("chunk_gated_delta_rule", state_v_first, transpose_state_layout),
        cu_seqlens=None if context else cu_seqlens,
        cu_seqlens_cpu=None if context else cu_seqlens_cpu,
        cp_context=context,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        chunk_size=chunk_size,
    )[:2]
    return o, state


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> Result:
    """`wyfold.fused_recurrent_gated_delta_rule`; with gk, a decay per key channel, `wyfold.fused_recurrent_kda`.

    gv raises UnsupportedError.
    """
    op = "fused_recurrent_gated_delta_rule"
    if gv is not None:
        raise UnsupportedError(f"{op}: gv is not offered", {"wyfold": "a decay per value channel has no chunk form"})
    if gk is not None and use_gate_in_kernel:
        raise ValueError(f"{op}: gk must come with use_gate_in_kernel=False, got use_gate_in_kernel=True")
    state_v_first = v_first(op, state_v_first, transpose_state_layout)
    if gk is not None:
        _check_decays(op, k, v, g, gk)
        o, state = kda.fused_recurrent_kda(
            q,
            k,
            v,
            gk if g is None else gk + g[..., None],
            beta,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            state_v_first=state_v_first,
            cu_seqlens=cu_seqlens,
            A_log=A_log,
            dt_bias=dt_bias,
        )[:2]
        return o, state
    o, state = gated_delta_rule.fused_recurrent_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
    )[:2]
    return o, state


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: object = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int | None = None,
    chunk_indices: Tensor | None = None,
    transpose_state_layout: bool | None = None,
) -> Result:
    """`wyfold.chunk_kda`; `safe_gate` also clamps precomputed gates at the bound.

    Intermediate states raise UnsupportedError: fla returns those entering each chunk, Wyfold those after every n
    tokens.
    """
    context = wyfold_context("chunk_kda", cp_context, initial_state, output_final_state)
    if return_intermediate_states:
        raise UnsupportedError(
            "chunk_kda: return_intermediate_states is not offered under fla's name",
            {"wyfold": "wyfold.chunk_kda returns states after every n tokens, fla those that enter each chunk"},
        )
    o, state = kda.chunk_kda(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=v_first("chunk_kda", state_v_first, transpose_state_layout),
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
    )[:2]
    return o, state


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> Result:
    """`wyfold.fused_recurrent_kda`, with a backward. A_log and dt_bias need `use_gate_in_kernel`."""
    o, state = kda.fused_recurrent_kda(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=v_first("fused_recurrent_kda", state_v_first, transpose_state_layout),
        cu_seqlens=cu_seqlens,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
    )[:2]
    return o, state


def chunk_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: object = None,
) -> Result:
    """`wyfold.chunk_gated_delta_product`; unlike fla's, it accepts float32 and gates per key channel.

    cp_context raises UnsupportedError.
    """
    if cp_context is not None:
        raise UnsupportedError(
            "chunk_gated_delta_product: cp_context is not offered",
            {"wyfold": "a context counts tokens, and has no boundaries of updates"},
        )
    o, state = delta_product.chunk_gated_delta_product(
        q,
        k,
        v,
        g,
        beta,
        num_householder,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
    )[:2]
    return o, state


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule


def _check_decays(op: str, k: Tensor, v: Tensor, g: Tensor | None, gk: Tensor) -> None:
    """Check that decays per head and per key channel can be added."""
    check.shapes(op, optional=("g",), k=(k, "B T H K"), v=(v, "B T HV V"), g=(g, "B T HV"), gk=(gk, "B T HV K"))
    check.floating(op, g=g, gk=gk)
    check.same_attribute(op, "device", k=k, g=g, gk=gk)


def v_first(op: str, state_v_first: bool, transpose_state_layout: bool | None) -> bool:
    """State layout, given under its new or its old name."""
    if transpose_state_layout is None:
        return state_v_first
    if state_v_first:
        raise ValueError(f"{op}: state_v_first must come without its old name transpose_state_layout, got both")
    warnings.warn("transpose_state_layout is called state_v_first now", DeprecationWarning, stacklevel=3)
    return transpose_state_layout
