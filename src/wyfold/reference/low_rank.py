"""Rules whose transition is diagonal plus low rank, token by token: the definition other implementations must match.

One loop computes all. For each token and value head, with R = S, or R = exp(g_t) S if a reads after the decay:

    r = R^T a_t                              what the erasing row reads
    S <- exp(g_t) S                          decay
    S <- S + b_t r^T + k_t v_t^T             erase along b, write along k
    o_t = scale S^T q_t                      readout

Plain PyTorch without in-place operations, so autograd computes the reference gradients; runs in float64.
"""

from typing import Any

import torch
from torch import Tensor

from wyfold.reference.delta import CHECKPOINT_EVERY, SAFE_BOUND
from wyfold.reference.gates import floored, kda_gate, raise_to
from wyfold.reference.norm import l2norm
from wyfold.reference.sequences import sequence_count, share_heads, spans, used_rows, working_dtype, zero_rows

Result = tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]


def dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    **options: Any,
) -> Result:
    """DPLR: a reads the state before the token's decay. Shapes and options as in `chunk_dplr_delta_rule`.

    Source:
        RWKV-7, arXiv:2503.14456.
    """
    tokens, dtype = v.shape[1], v.dtype
    q, k, v, a, b, gk = _tokens(cu_seqlens, q, k, v, a, b, gk)
    gk = _clamped(gk, safe_gate, lower_bound)
    return _recurrence(q, k, v, gk, a, b, before=True, tokens=tokens, dtype=dtype, cu_seqlens=cu_seqlens, **options)


def iplr_delta_rule(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **options: Any) -> Result:
    """IPLR: DPLR without a decay."""
    return dplr_delta_rule(q, k, v, a, b, **options)


def rwkv7(r: Tensor, w: Tensor | None, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **options: Any) -> Result:
    """RWKV-7: DPLR with q = r, gk = w and scale 1."""
    return dplr_delta_rule(r, k, v, a, b, w, **{"scale": 1.0, **options})


def mul_rwkv7(r: Tensor, w: Tensor | None, k: Tensor, v: Tensor, kk: Tensor, a: Tensor, **options: Any) -> Result:
    """RWKV-7 from removal key and learning rate: its a is -kk, its b is kk * a."""
    kk, a = _tokens(options.get("cu_seqlens"), kk, a)
    return rwkv7(r, w, k, v, -kk, kk * a, **options)


def gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    b: Tensor | None = None,
    w: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    **options: Any,
) -> Result:
    """GDN-2: an erase gate b on key channels and a write gate w on value channels. Options as in `chunk_gdn2`.

    Source:
        Gated DeltaNet-2, arXiv:2605.22791, Eqs. (9) and (10).
    """
    tokens, dtype = v.shape[1], v.dtype
    q, k, v, g, b, w = _tokens(cu_seqlens, q, k, v, g, b, w)
    if use_gate_in_kernel and g is not None:
        g = kda_gate(g, A_log, dt_bias, lower_bound)
    g = _clamped(g, safe_gate, lower_bound)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    k = share_heads(k, v.shape[2])
    erasing, value = -(k if b is None else b * k), v if w is None else w * v
    return _recurrence(
        q, k, value, g, erasing, k, before=False, tokens=tokens, dtype=dtype, cu_seqlens=cu_seqlens, **options
    )


def comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None = None,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> Result:
    """Comba: the state is read along p before its decay, and written along k. Options as in `chunk_comba`.

    Source:
        Comba, arXiv:2506.02475.
    """
    tokens, dtype = v.shape[1], v.dtype
    q, k, v, p, g, beta = _tokens(cu_seqlens, q, k, v, k if p is None else p, g, beta)
    if use_qk_l2norm_in_kernel:
        q, k, p = l2norm(q), l2norm(k), l2norm(p)
    k = share_heads(k, v.shape[2])
    if beta is not None:
        k = beta[..., None] * k
    return _recurrence(q, k, v, g, -p, k, before=True, tokens=tokens, dtype=dtype, cu_seqlens=cu_seqlens, **options)


def _tokens(cu_seqlens: Tensor | None, *tensors: Tensor | None) -> list[Any]:
    """The rows that belong to a sequence, in the widest dtype. Other rows are not touched: they may hold NaN."""
    first = next(x for x in tensors if x is not None)
    used = used_rows(spans(cu_seqlens, first.shape[0], first.shape[1]))
    work = working_dtype(*tensors)
    return [None if x is None else x[:, :used].to(work) for x in tensors]


def _clamped(g: Tensor | None, safe_gate: bool, lower_bound: float | None) -> Tensor | None:
    if g is None or not safe_gate:
        return g
    return raise_to(g, SAFE_BOUND if lower_bound is None else lower_bound)


def _recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    a: Tensor,
    b: Tensor,
    *,
    before: bool,
    tokens: int,
    dtype: torch.dtype,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    state_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    return_intermediate_states: bool = False,
    checkpoint_every: int | None = None,
) -> Result:
    """The loop, on the tokens of all sequences. q, k, a and b have H or HV heads; g is None, [.., HV] or [.., HV, K].

    Args:
        before: a reads before the decay.
        tokens, dtype: Of the output.
    """
    batch, _, value_heads, V = v.shape
    K = q.shape[-1]
    work = working_dtype(q, k, v, g, a, b, initial_state)
    pieces = spans(cu_seqlens, batch, v.shape[1])
    every = CHECKPOINT_EVERY if checkpoint_every is None else checkpoint_every
    scale = K**-0.5 if scale is None else scale
    q, k, a, b = (share_heads(x.to(work), value_heads) for x in (q, k, a, b))
    v = v.to(work)
    decay = v.new_ones(*v.shape[:3], 1) if g is None else floored(g.to(work)).exp()
    if decay.ndim == 3:
        decay = decay.unsqueeze(-1)  # the same for all channels
    if initial_state is None:
        S0 = v.new_zeros(sequence_count(pieces), value_heads, K, V)
    else:
        S0 = (initial_state.mT if state_v_first else initial_state).to(work)

    outputs, final, kept = [v[:, :0]], [S0[:0]], []
    for rows, states in pieces:
        S = S0[states]  # [n, HV, K, V]
        for t in range(rows.start, rows.stop):
            decayed = decay[:, t, :, :, None] * S
            read = torch.einsum("nhkv,nhk->nhv", S if before else decayed, a[:, t])
            S = decayed + b[:, t, :, :, None] * read[:, :, None] + k[:, t, :, :, None] * v[:, t, :, None]
            outputs.append(scale * torch.einsum("nhkv,nhk->nhv", S, q[:, t]).unsqueeze(1))
            if return_intermediate_states and (t + 1 - rows.start) % every == 0:
                kept.append(S.detach())
        final.append(S)

    def as_state(x: Tensor) -> Tensor:
        return (x.mT if state_v_first else x).to(state_dtype or work)

    o = zero_rows(torch.cat(outputs, dim=1), tokens).to(dtype)
    final_state = as_state(torch.cat(final)) if output_final_state else None
    if not return_intermediate_states:
        return o, final_state
    if cu_seqlens is None:
        states_out = torch.stack(kept, dim=1) if kept else S0.new_zeros(batch, 0, value_heads, K, V)
    else:
        states_out = zero_rows(torch.cat([S0[:0].detach(), *kept])[None], tokens // every)[0]
    return o, final_state, as_state(states_out)
