"""The delta rules and GLA, token by token: the definition other implementations must match.

One loop computes all of them. For each token and value head:

    S <- exp(g_t) S                          decay      (no g: DeltaNet; per head: GDN; per key channel: KDA)
    e  = v_t - S^T k_t                       error of the state's value for this key      (GLA: e = v_t)
    S <- S + beta_t k_t e^T                  correction; DeltaProduct repeats both lines for each of its keys
    o_t = scale S^T q_t                      readout

Plain PyTorch without in-place operations, so autograd computes the reference gradients; runs in float64.
"""

import torch
from torch import Tensor

from wyfold.reference.gates import beta_sigmoid, floored, gdn_gate, kda_gate, raise_to
from wyfold.reference.norm import l2norm
from wyfold.reference.sequences import sequence_count, share_heads, spans, used_rows, working_dtype, zero_rows

# Default bound of `safe_gate`.
SAFE_BOUND = -5.0
CHECKPOINT_EVERY = 64

Result = tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    state_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    return_intermediate_states: bool = False,
    checkpoint_every: int | None = None,
) -> Result:
    """DeltaNet: the recurrence without a gate. Arguments and results as in `kda`.

    Source:
        DeltaNet, arXiv:2406.06484, section 2.2.
    """
    return recurrence(
        q, k, v, None, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        qk_l2norm=use_qk_l2norm_in_kernel, beta_logits=use_beta_sigmoid_in_kernel, neg_eigval=allow_neg_eigval,
        v_first=state_v_first, state_dtype=state_dtype, cu_seqlens=cu_seqlens,
        intermediate=return_intermediate_states, every=checkpoint_every,
    )  # fmt: skip


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
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
    state_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    return_intermediate_states: bool = False,
    checkpoint_every: int | None = None,
) -> Result:
    """Gated DeltaNet: one decay per value head, g [B, T, HV]. Other arguments and results as in `kda`.

    Source:
        Gated DeltaNet, arXiv:2412.06464v3, Eq. (10).
    """
    if use_gate_in_kernel and g is not None:
        g = gdn_gate(_owned(g, cu_seqlens), A_log, dt_bias)
    return recurrence(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        qk_l2norm=use_qk_l2norm_in_kernel, beta_logits=use_beta_sigmoid_in_kernel, neg_eigval=allow_neg_eigval,
        v_first=state_v_first, state_dtype=state_dtype, cu_seqlens=cu_seqlens,
        intermediate=return_intermediate_states, every=checkpoint_every,
    )  # fmt: skip


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    state_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    return_intermediate_states: bool = False,
    checkpoint_every: int | None = None,
) -> Result:
    """Kimi Delta Attention: one decay per key channel.

    Computed in the widest dtype of the arguments, at least float32, and rounded once on return.

    Args:
        q: [B, T, H, K], any float.
        k: [B, T, H, K]. Unit rows, or any rows with `use_qk_l2norm_in_kernel`.
        v: [B, T, HV, V], HV a multiple of H; value head j reads query and key head `j // (HV // H)`.
        g: [B, T, HV, K] or None. Natural log of the decay per token, <= 0; -inf resets. With `use_gate_in_kernel` the
            pre-activation of `kda_gate`. None: no decay.
        beta: [B, T, HV] or None. Write strength in [0, 1], or [0, 2]; with `use_beta_sigmoid_in_kernel` its logit.
            None: 1.
        scale: Factor of q. None: K ** -0.5.
        initial_state: [N, HV, K, V], or [N, HV, V, K] with `state_v_first`. None: zeros.
        output_final_state: Return the state after each sequence's last token.
        use_qk_l2norm_in_kernel: Apply `l2norm` to q and k first.
        use_gate_in_kernel, A_log, dt_bias: Apply `kda_gate` first, with `lower_bound`.
        safe_gate: Clamp log decays from below at `lower_bound` (None: -5); clamped entries have gradient zero.
        lower_bound: Negative bound of the gate, natural log.
        use_beta_sigmoid_in_kernel, allow_neg_eigval: beta = sigmoid(beta), and twice that.
        state_v_first: Layout of states, in and out.
        state_dtype: Dtype of returned states. None: the working dtype.
        cu_seqlens: [N+1] boundaries of sequences packed into one row, or a layout with that attribute.
        return_intermediate_states: Also return the states after every `checkpoint_every` tokens.
        checkpoint_every: Tokens between those states, counted from each sequence's first. None: 64.

    Returns:
        o: [B, T, HV, V], dtype of v. Rows past the last boundary are zero and were never read.
        final_state: Shape of initial_state, or None without `output_final_state`. An empty sequence returns its initial
            state.
        states: [B, T//n, HV, K, V], or packed [T//n, HV, K, V], in the order of sequences and zero after the last;
            without gradient.

    Source:
        Kimi Linear, arXiv:2510.26692, Eq. (1).
    """
    if g is not None:
        if use_gate_in_kernel:
            g = kda_gate(_owned(g, cu_seqlens), A_log, dt_bias, lower_bound)
        if safe_gate:
            g = raise_to(g, SAFE_BOUND if lower_bound is None else lower_bound)
    return recurrence(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        qk_l2norm=use_qk_l2norm_in_kernel, beta_logits=use_beta_sigmoid_in_kernel, neg_eigval=allow_neg_eigval,
        v_first=state_v_first, state_dtype=state_dtype, cu_seqlens=cu_seqlens,
        intermediate=return_intermediate_states, every=checkpoint_every,
    )  # fmt: skip


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    *,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    qk_l2norm: bool,
    beta_logits: bool,
    neg_eigval: bool,
    v_first: bool,
    state_dtype: torch.dtype | None,
    cu_seqlens: Tensor | None,
    intermediate: bool,
    every: int | None,
    erases: bool = True,
    updates: int = 1,
    gv: Tensor | None = None,
) -> Result:
    """All rules of this file. g is None, [B, T, HV] or [B, T, HV, K].

    Args:
        erases: A write first erases what its key reads (the delta rule). False: GLA.
        updates: Keys of a token; k, v and beta have `updates` rows for each row of q and g.
        gv: [B, T, HV, V] log decay per value channel, or None.
    """
    (batch, tokens, _, K), (value_heads, V) = q.shape, v.shape[2:]
    dtype = v.dtype
    work = working_dtype(q, k, v, g, beta, initial_state, gv)
    pieces = spans(cu_seqlens, batch, tokens)
    used = used_rows(pieces)
    every = CHECKPOINT_EVERY if every is None else every
    scale = K**-0.5 if scale is None else scale

    # Only rows that belong to a sequence are touched from here on.
    q, k, v = q[:, :used].to(work), k[:, : used * updates].to(work), v[:, : used * updates].to(work)
    if qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    q, k = share_heads(q, value_heads), share_heads(k, value_heads)
    decay = None if g is None else floored(g[:, :used].to(work)).exp()
    if decay is not None and decay.ndim == 3:
        decay = decay.unsqueeze(-1)  # the same for all channels
    value_decay = None if gv is None else floored(gv[:, :used].to(work)).exp().unsqueeze(-2)
    strength = v.new_ones(v.shape[:3]) if beta is None else beta[:, : used * updates].to(work)
    if beta_logits:
        strength = beta_sigmoid(strength, 2.0 if neg_eigval else 1.0)
    if initial_state is None:
        S0 = v.new_zeros(sequence_count(pieces), value_heads, K, V)
    else:
        S0 = (initial_state.mT if v_first else initial_state).to(work)

    outputs, final, kept = [v[:, :0]], [S0[:0]], []
    for rows, states in pieces:
        S = S0[states]  # [n, HV, K, V]
        for t in range(rows.start, rows.stop):
            if decay is not None:
                S = decay[:, t, :, :, None] * S
            if value_decay is not None:
                S = S * value_decay[:, t]
            for j in range(t * updates, (t + 1) * updates):
                e = v[:, j] - torch.einsum("nhkv,nhk->nhv", S, k[:, j]) if erases else v[:, j]
                S = S + torch.einsum("nh,nhk,nhv->nhkv", strength[:, j], k[:, j], e)
            outputs.append(scale * torch.einsum("nhkv,nhk->nhv", S, q[:, t]).unsqueeze(1))
            if intermediate and (t + 1 - rows.start) % every == 0:
                kept.append(S.detach())
        final.append(S)

    def as_state(x: Tensor) -> Tensor:
        return (x.mT if v_first else x).to(state_dtype or work)

    o = zero_rows(torch.cat(outputs, dim=1), tokens).to(dtype)
    final_state = as_state(torch.cat(final)) if output_final_state else None
    if not intermediate:
        return o, final_state
    if cu_seqlens is None:
        states_out = torch.stack(kept, dim=1) if kept else S0.new_zeros(batch, 0, value_heads, K, V)
    else:
        states_out = zero_rows(torch.cat([S0[:0].detach(), *kept])[None], tokens // every)[0]
    return o, final_state, as_state(states_out)


def _owned(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The rows of x [B, T, ...] that belong to a sequence."""
    return x[:, : used_rows(spans(cu_seqlens, x.shape[0], x.shape[1]))]
