"""Delta rules under fla's names, with fla's argument order and keywords.

The operator that a function calls documents formula, arguments, results and errors; docstrings here list differences.
Arguments that only affect fla's implementation are accepted and ignored. Arguments that Wyfold cannot honour raise
UnsupportedError, and unknown keywords raise TypeError.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

from wyfold.integrations.fla.chunk_states import with_chunk_states
from wyfold.integrations.fla.ranks import wyfold_context
from wyfold.ops import delta_product, delta_rule, gated_delta_rule, kda
from wyfold.ops.value_channels import split_value_channels
from wyfold.runtime import check

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
    """`wyfold.fused_recurrent_delta_rule`; unlike in fla, beta cannot be a vector over value channels.

    q, k and v may have different dtypes: the widest computes, and o has the dtype of q.
    """
    (q, k, v), dtype = _in_one_dtype(q, k, v, result=q)
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
    return o if dtype is None else o.to(dtype), state


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

    q, k and v may have different dtypes: the widest computes, and o has the dtype of v. With gv, a decay per value
    channel, every value channel is computed as a head of 8 columns, at 8 times the work.
    """
    op = "fused_recurrent_gated_delta_rule"
    check.flag(op, use_gate_in_kernel=use_gate_in_kernel)
    for name, given in (("gk", gk), ("gv", gv)):
        if given is not None and use_gate_in_kernel:
            raise ValueError(f"{op}: {name} must come with use_gate_in_kernel=False, got use_gate_in_kernel=True")
    state_v_first = v_first(op, state_v_first, transpose_state_layout)
    (q, k, v), dtype = _in_one_dtype(q, k, v, result=v)
    if gk is not None or gv is not None:
        _check_decays(op, k, v, g, gk, gv, beta)
    gate = g if gk is None else gk if g is None else gk + g[..., None]
    parts = split_value_channels(op, q, k, v, gate, gv, initial_state, state_v_first, cu_seqlens)
    inside = {} if gk is not None else {"use_gate_in_kernel": use_gate_in_kernel}
    rule: Any = gated_delta_rule.fused_recurrent_gated_delta_rule if gk is None else kda.fused_recurrent_kda
    found = rule(
        q,
        k,
        parts.v,
        parts.g,
        parts.repeated(beta),
        scale=scale,
        initial_state=parts.states,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        A_log=A_log,
        dt_bias=dt_bias,
        **inside,
    )
    o, state = parts.joined(found)[:2]
    return o if dtype is None else o.to(dtype), state


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
) -> kda.Result:
    """`wyfold.chunk_kda`; `safe_gate` also clamps precomputed gates at the bound.

    With `return_intermediate_states` a third result has the states that enter each chunk of `chunk_size` tokens, 64 by
    default: [B, chunks, HV, K, V] in the dtype of k, without a gradient. Packed sequences follow each other in it, and
    their boundaries are read on the CPU.
    """
    context = wyfold_context("chunk_kda", cp_context, initial_state, output_final_state)
    check.flag("chunk_kda", return_intermediate_states=return_intermediate_states)
    if chunk_size is not None and check.integer("chunk_kda", "chunk_size", chunk_size, least=1) not in (32, 64):
        raise ValueError(
            f"chunk_kda: `chunk_size` must be either 32 or 64 under fla's name, got {chunk_size!r}; wyfold.chunk_kda "
            "also has 16"
        )
    states_first = v_first("chunk_kda", state_v_first, transpose_state_layout)
    every = (chunk_size or 64) if return_intermediate_states else None
    found: Any = kda.chunk_kda(
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
        state_v_first=states_first,
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
    """`wyfold.fused_recurrent_kda`, with a backward. A_log and dt_bias need `use_gate_in_kernel`.

    q, k and v may have different dtypes: the widest computes, and o has the dtype of v.
    """
    (q, k, v), dtype = _in_one_dtype(q, k, v, result=v)
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
    return o if dtype is None else o.to(dtype), state


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
    *,
    chunk_indices: Tensor | None = None,
    chunk_indices_dp: Tensor | None = None,
) -> Result:
    """`wyfold.chunk_gated_delta_product`; unlike fla's, it accepts float32 and gates per key channel.

    The indices of chunks, which versions of fla after 0.6.0 take, are not needed.
    """
    context = wyfold_context("chunk_gated_delta_product", cp_context, initial_state, output_final_state)
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
        cu_seqlens=None if context is not None else cu_seqlens,
        cu_seqlens_cpu=None if context is not None else cu_seqlens_cpu,
        cp_context=context,
    )[:2]
    return o, state


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule


def _check_decays(
    op: str, k: Tensor, v: Tensor, g: Tensor | None, gk: Tensor | None, gv: Tensor | None, beta: Tensor | None
) -> None:
    """Check that decays per head, per key channel and per value channel can be added, and beta repeated."""
    decays: dict[str, Any] = {"g": (g, "B T HV"), "gk": (gk, "B T HV K"), "gv": (gv, "B T HV V")}
    optional = (*decays, "beta")
    check.shapes(op, optional=optional, k=(k, "B T H K"), v=(v, "B T HV V"), **decays, beta=(beta, "B T HV"))
    check.floating(op, g=g, gk=gk, gv=gv, beta=beta)
    check.same_attribute(op, "device", k=k, g=g, gk=gk, gv=gv, beta=beta)


def _in_one_dtype(*rows: Tensor, result: Tensor) -> tuple[tuple[Tensor, ...], torch.dtype | None]:
    """Rows in the widest of their dtypes, and the dtype of the output; None if theirs are equal, or to be refused."""
    if not all(isinstance(x, Tensor) and x.dtype in check.FLOATS for x in rows) or len({x.dtype for x in rows}) == 1:
        return rows, None
    widest = functools.reduce(torch.promote_types, [x.dtype for x in rows])
    return tuple([x.to(widest) for x in rows]), result.dtype


def v_first(op: str, state_v_first: bool, transpose_state_layout: bool | None) -> bool:
    """State layout, given under its new or its old name."""
    if transpose_state_layout is None:
        return state_v_first
    check.flag(op, state_v_first=state_v_first, transpose_state_layout=transpose_state_layout)
    if state_v_first:
        raise ValueError(f"{op}: state_v_first must come without its old name transpose_state_layout, got both")
    warnings.warn("transpose_state_layout is called state_v_first now", DeprecationWarning, stacklevel=3)
    return transpose_state_layout
