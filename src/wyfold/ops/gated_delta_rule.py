"""GDN: the delta rule with one decay per token and value head."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.context_parallel.context import ContextParallel
from wyfold.ops.delta_arguments import ChunkFlags, Flags, GateFlags
from wyfold.ops.delta_call import call_delta
from wyfold.runtime.layout import SequenceLayout

Result = tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]


def chunk_gated_delta_rule(
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
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    state_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | SequenceLayout | None = None,
    return_intermediate_states: bool = False,
    checkpoint_every: int | None = None,
    batch_invariant: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int | None = None,
    max_splits: int | None = None,
    disable_recompute: bool = False,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: ContextParallel | None = None,
    backend: str | None = None,
) -> Result:
    """Gated delta rule over whole sequences, chunk by chunk.

    Token by token, from S = initial_state or zeros, per value head:

        S <- exp(g_t) S
        S <- S + beta_t k_t (v_t - S^T k_t)^T
        o_t = scale S^T q_t

    The past never depends on the future, a packed batch gives the bits of its sequences run alone, and a call split
    at a multiple of `chunk_size` tokens, the state handed on, gives the bits of one call, but where a GPU scans a long
    sequence in segments (`max_splits`).

    Tokens come before heads, [B, T, H, ..]; there is no `head_first`. Head-first tensors [B, H, T, ..] are passed as
    `x.transpose(1, 2)`, a view: nothing is copied, and the bits are those of contiguous tensors.

    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64. K a multiple of 8 from 8 to 256. Any strides:
            kernels copy q, k and v first where their rows cannot be read as they lie (`explain` names them), and the
            gradient of o as well, which may be expanded. Never written.
        k: [B, T, H, K], dtype of q. Rows of unit length, or `use_qk_l2norm_in_kernel`; beta |k|^2 <= 2 keeps the
            state bounded.
        v: [B, T, HV, V], dtype of q. V a multiple of 8 from 8 to 256; value head j reads key head j // (HV // H).
        g: [B, T, HV] any float. Natural log of the decay per token, <= 0; -inf forgets all before. None: no decay.
        beta: [B, T, HV] any float. Write strength in [0, 1], or [0, 2] with negative eigenvalues. None: 1.
        scale: Multiplies q, not the state. Default K ** -0.5.
        initial_state: [N, HV, K, V] float32, bfloat16 or float16; N = B, or the number of packed sequences. None:
            zeros.
        output_final_state: Whether to return the states after the last tokens.
        use_qk_l2norm_in_kernel: Rows of q and k become x (sum x^2 + 1e-6)^(-1/2). Their length must stay below 1.8e19,
            in float64 1.3e154: beyond, the sum of squares overflows, and a row counts as 0 or is NaN, by the backend.
        use_beta_sigmoid_in_kernel: beta arrives as a logit; its sigmoid is used.
        allow_neg_eigval: With the sigmoid: twice it, in [0, 2].
        state_v_first: States are [N, HV, V, K], in and out.
        state_dtype: Storage of returned states: float32 (default), bfloat16 or float16.
        cu_seqlens: [N+1] int32 or int64 boundaries of sequences packed into B = 1, or a `SequenceLayout`. Empty
            sequences are legal; rows past the last boundary are never read and their outputs and gradients are zero.
        return_intermediate_states: Return, third, states after every `checkpoint_every` tokens of each sequence. No
            gradient.
        checkpoint_every: Tokens between them, default 64; a multiple of `chunk_size`.
        batch_invariant: Forbid segments. A sequence's bits never depend on its neighbours, flag or not.
        use_gate_in_kernel: g arrives before its activation, g = -exp(A_log) softplus(g + dt_bias).
        A_log: [HV] any float. Log rate of the activation. None: rate 1. Its shape may be any of HV elements.
        dt_bias: [HV] any float. Bias of the activation. None: 0.
        chunk_size: 16, 32 or 64; None is 16 on the CPU, 32 there if K V >= 128^2; elsewhere 64, and 32 for KDA but on
            sm_90 in bfloat16 with K = V = 128 and HV = H. Another size changes last bits, nothing else.
        max_splits: Most segments that a sequence is cut into on a GPU, to be scanned side by side; 1: none. None: as
            many as pay, by its own length, heads, widths and the card alone; `explain` says how many.
        disable_recompute: Keep the chunks' factors for the backward: memory for time, same bits.
        cu_seqlens_cpu: [N+1] the same boundaries on the CPU, where known: saves a wait on a GPU. Changes no bit.
        cp_context: From `wyfold.cp.build_cp_context`, in the place of cu_seqlens: the tensors are this rank's share of
            a buffer that the ranks of a group hold together. Initial states are those of the sequences that begin
            here (`starts`), final states those of the ones that end here (`ends`); of a parameter each rank gets its
            own share of the gradient, whose sum over ranks is the gradient. One all-gather in each direction.
        backend: None for the table's choice; "eager", "triton" or "gluon" as a demand.

    Returns:
        o: [B, T, HV, V], dtype of v.
        final_state: [N, HV, K, V] in `state_dtype`, or None. An empty sequence returns its initial state bit for bit.
        states: Only with `return_intermediate_states`: [B, T // n, HV, K, V] after n, 2n, ... tokens; packed [T // n,
            HV, K, V], sequence i's first row at `SequenceLayout.checkpoint_offsets(n)[i]`, unused rows 0.

    Differentiable, once, in every tensor above, the final state included. A gradient has its argument's dtype.

    Raises:
        TypeError: An argument has the wrong Python type, or a keyword is unknown.
        ValueError: A shape, dtype, device, range or combination of options is wrong; the message names the argument.
        UnsupportedError: The backend cannot serve the call; `.reasons` says why.

    Source:
        Gated DeltaNet, arXiv:2412.06464, the gated delta rule and its chunkwise form.

    Examples:
        >>> import torch, wyfold
        >>> q, k, v = (torch.randn(1, 100, 2, 64) for _ in range(3))
        >>> g, beta = -torch.rand(1, 100, 2), torch.rand(1, 100, 2)
        >>> o, state = wyfold.chunk_gated_delta_rule(
        ...     q, k, v, g, beta, use_qk_l2norm_in_kernel=True, output_final_state=True
        ... )
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 64, 64]))

        From head-first tensors, and back to them:

        >>> arguments = [q, k, v, g, beta]
        >>> head_first = [x.transpose(1, 2).contiguous() for x in arguments]
        >>> again, _ = wyfold.chunk_gated_delta_rule(
        ...     *(x.transpose(1, 2) for x in head_first), use_qk_l2norm_in_kernel=True
        ... )
        >>> torch.equal(again, o), again.transpose(1, 2).shape
        (True, torch.Size([1, 2, 100, 64]))
    """
    return call_delta(
        "chunk_gated_delta_rule",
        q,
        k,
        v,
        g,
        beta,
        GateFlags(False, use_gate_in_kernel, A_log, dt_bias),
        ChunkFlags(chunk_size, disable_recompute, cu_seqlens_cpu, cp_context, max_splits),
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        flags=Flags(
            scale=scale,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            state_v_first=state_v_first,
            state_dtype=state_dtype,
            return_intermediate_states=return_intermediate_states,
            checkpoint_every=checkpoint_every,
            batch_invariant=batch_invariant,
            backend=backend,
        ),
    )


def fused_recurrent_gated_delta_rule(
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
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    state_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | SequenceLayout | None = None,
    return_intermediate_states: bool = False,
    checkpoint_every: int | None = None,
    batch_invariant: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    backend: str | None = None,
) -> Result:
    """Gated delta rule, token by token.

        S <- exp(g_t) S
        S <- S + beta_t k_t (v_t - S^T k_t)^T
        o_t = scale S^T q_t


    Means the same as the chunk form, with the arithmetic of the recurrence itself: the form for decoding. Its
    backward starts from states every 64 tokens and rebuilds the others.

    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64.
        k: [B, T, H, K], dtype of q.
        v: [B, T, HV, V], dtype of q.
        g: [B, T, HV] any float. Natural log of the decay per token, <= 0; None: no decay.
        beta: [B, T, HV] any float. Write strength; None: 1.

    All other arguments, results and errors: `chunk_gated_delta_rule`.

    Source:
        Gated DeltaNet, arXiv:2412.06464.
    """
    return call_delta(
        "fused_recurrent_gated_delta_rule",
        q,
        k,
        v,
        g,
        beta,
        GateFlags(False, use_gate_in_kernel, A_log, dt_bias),
        None,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        flags=Flags(
            scale=scale,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            state_v_first=state_v_first,
            state_dtype=state_dtype,
            return_intermediate_states=return_intermediate_states,
            checkpoint_every=checkpoint_every,
            batch_invariant=batch_invariant,
            backend=backend,
        ),
    )


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule
