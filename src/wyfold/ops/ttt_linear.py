"""TTT-Linear: the state is a linear model, trained by gradient descent on the keys and values of the sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wyfold.context_parallel.context import ContextParallel
from wyfold.ops.ttt_call import TTT_LINEAR, TTTFlags, run_across_ranks, ttt_arguments
from wyfold.runtime.layout import SequenceLayout
from wyfold.runtime.replay_cache import planned


class TTTState(NamedTuple):
    """Resume point of every sequence, inside a mini-batch or at the start of one.

    Attributes:
        state: [N, HV, K, V] matrix at the start of the open mini-batch.
        bias: [N, HV, 1, V] bias at the start of the open mini-batch.
        grad: [N, HV, K, V] sum of k n^T over the open mini-batch's tokens, factors `eta_col` included; zero where
            `position` is zero.
        bias_grad: [N, HV, 1, V] sum of n over the same tokens, factors included.
        position: [N] int32 or int64. Tokens already in the open mini-batch, from 0 to chunk_size - 1.
    """

    state: Tensor
    bias: Tensor
    grad: Tensor
    bias_grad: Tensor
    position: Tensor


def chunk_ttt_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    eta: Tensor | float,
    *,
    eta_col: Tensor | float | None = None,
    residual: str = "o",
    scale: float | None = None,
    eps: float = 1e-6,
    chunk_size: int = 16,
    initial_state: Tensor | None = None,
    initial_state_bias: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    state_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | SequenceLayout | None = None,
    cp_context: ContextParallel | None = None,
    disable_recompute: bool = False,
    batch_invariant: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """TTT-Linear over whole sequences, computed mini-batch by mini-batch.

    Per value head, with (S0, c0) the state at the start of a mini-batch of `chunk_size` tokens, and LN the
    normalisation of a row to mean 0 and variance 1:

        n_t = gradient of 1/2 |w LN(z) + b - (v_t - k_t)|^2 at z = S0^T k_t + c0, times eta_col_t
        S_t = S0 - eta_t sum_{s<=t} k_s n_s^T        c_t = c0 - eta_t sum_{s<=t} n_s
        h_t = scale S_t^T q_t + c_t                  o_t = h_t + w LN(h_t) + b

    Published layers use the step eta_t eta_col_s along n_s, and the output o_t = q_t + w LN(h_t) + b, which is
    residual="q".

    The last token's (S_t, c_t) starts the next mini-batch. The last mini-batch of a sequence may be short: the
    returned states are those after its last token, so a call that continues from them starts a new mini-batch.
    `fused_recurrent_ttt_linear` continues inside one.

    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64 on eager. Any strides. Never written. Kernels first copy
            q, k or v if its rows do not begin at multiples of 16 elements; `explain` reports it.
        k: [B, T, H, K], dtype of q.
        v: [B, T, HV, V], dtype of q; V = K, from 1 to 128. HV is a multiple of H; value head j reads query
            and key head `j // (HV // H)`. The inner model learns v - k from k.
        w: [HV, V] any float. Weight of both norms.
        b: [HV, V] any float. Bias of both norms.
        eta: [B, T, HV, 1] or [B, T, HV] any float, or a number. Step size at a token. It scales the whole sum of the
            mini-batch, not the token's own gradient; `eta_col` does that.
        eta_col: As eta. Factor of a token's own gradient, in its mini-batch and beyond. None: 1.
        residual: Summand next to the norm of h: "o" adds h itself, "q" the query without `scale`.
        scale: Factor of q in h. None: K ** -0.5; published layers use 1.
        eps: Added to the variances; > 0, at least the smallest normal number of the arithmetic.
        chunk_size: 16, 32 or 64. Tokens of a mini-batch, counted from each sequence's first. Part of the model, not a
            tile size.
        initial_state: [N, HV, K, V] (with state_v_first [N, HV, V, K]) float32, float16, bfloat16. None: zeros.
        initial_state_bias: [N, HV, 1, V], as initial_state. None: zeros. Each may be given without the other.
        output_final_state: Return the states after every sequence's last token.
        state_v_first: Matrix states are V-first, in and out.
        state_dtype: Storage of returned states. None: float32 (float64 inputs: float64).
        cu_seqlens: [N+1] int32 or int64 boundaries of packed sequences, or a `SequenceLayout`; B is 1. An empty
            sequence returns its initial state bit for bit. Rows past the last boundary are never read; their o is zero.
        cp_context: From `wyfold.cp.build_cp_context`, instead of cu_seqlens. The tensors are this rank's shard of a
            buffer split over a process group, cut between mini-batches. Initial states are given for the sequences
            that begin on this rank (`starts`); final states are returned for those that end on it (`ends`). Each rank
            gets its partial gradient of w and b. States pass from rank to rank: this splits the memory of one
            sequence, not its time.
        disable_recompute: On eager, keep the state of every mini-batch for the backward instead of repeating the
            forward: more memory, less time, same bits. Kernels ignore it: they keep the state of every fourth
            mini-batch of 16 and two tensors like v, as recomputation would need the same peak memory.
        batch_invariant: No effect: a sequence's bits never depend on its neighbours.
        backend: "eager", "triton" or "gluon" demands that backend. None: the best available one.

    Returns:
        o: [B, T, HV, V], dtype of v.
        final_state: [N, HV, K, V] (with state_v_first [N, HV, V, K]), or None without `output_final_state`.
        final_state_bias: [N, HV, 1, V], or None without `output_final_state`.

    Differentiable once in every tensor argument. A gradient has its argument's dtype and is rounded once.

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: A shape, dtype, device or range is wrong, or `cu_seqlens` comes with B > 1.
        UnsupportedError: No backend, or not the demanded one, can serve the call; `.reasons` explains why.
        RuntimeError: A gradient of a gradient is requested.

    Source:
        Learning to (learn at test time), arXiv:2407.04620, sections 2.4 to 2.7: mini-batch TTT, dual form, TTT-Linear.

    Examples:
        >>> import torch, wyfold
        >>> q, k, v = (torch.randn(1, 100, 2, 16) for _ in range(3))
        >>> w, b = torch.ones(2, 16), torch.zeros(2, 16)
        >>> o, S, c = wyfold.chunk_ttt_linear(q, k, v, w, b, 0.1, output_final_state=True)
        >>> o.shape, S.shape, c.shape
        (torch.Size([1, 100, 2, 16]), torch.Size([1, 2, 16, 16]), torch.Size([1, 2, 1, 16]))
    """
    flags = TTTFlags(
        "chunk_ttt_linear", False, residual, scale, eps, chunk_size, state_v_first, state_dtype, output_final_state,
        disable_recompute, batch_invariant, backend,
    )  # fmt: skip
    states = initial_state, initial_state_bias, None, None, None
    tensors, flags = ttt_arguments(flags, (q, k, v, w, b), eta, eta_col, states, cu_seqlens)
    if cp_context is None:
        o, state, bias, *_ = planned(TTT_LINEAR, tensors, flags)
        return o, state, bias
    result = run_across_ranks(tensors, flags, cp_context)
    return (result.o, result.state, result.bias) if output_final_state else (result.o, None, None)


fused_chunk_ttt_linear = chunk_ttt_linear


def fused_recurrent_ttt_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    eta: Tensor | float,
    *,
    eta_col: Tensor | float | None = None,
    residual: str = "o",
    scale: float | None = None,
    eps: float = 1e-6,
    chunk_size: int = 16,
    state: TTTState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | SequenceLayout | None = None,
    backend: str | None = None,
) -> tuple[Tensor, TTTState | None]:
    """TTT-Linear, resumable after any token: the form for decoding.

        n_t = gradient of 1/2 |w LN(z) + b - (v_t - k_t)|^2 at z = S0^T k_t + c0, times eta_col_t
        S_t = S0 - eta_t sum_{s<=t} k_s n_s^T        c_t = c0 - eta_t sum_{s<=t} n_s
        h_t = scale S_t^T q_t + c_t                  o_t = h_t + w LN(h_t) + b

    The recurrence of `chunk_ttt_linear`. The returned `TTTState` keeps the last mini-batch open, so the next call
    continues at any token. Calls split between mini-batches are bit-identical to one call. Split inside a mini-batch,
    sums are taken in another order and last bits differ. Sequences may be at different positions.

    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64 on eager.
        k: [B, T, H, K], dtype of q.
        v: [B, T, HV, V], dtype of q; V = K.
        w: [HV, V] any float. Weight of both norms.
        b: [HV, V] any float. Bias of both norms.
        eta: [B, T, HV, 1] or [B, T, HV] any float, or a number. Step size at a token.
        eta_col, residual, scale, eps, chunk_size, cu_seqlens, backend: As in `chunk_ttt_linear`.
        state: Resume point of the sequences. None: their start, with zero states. The backward treats it as a constant.
        output_final_state: Return the resume point after the last token, differentiable in this call's arguments.

    Returns:
        o: [B, T, HV, V], dtype of v.
        final_state: `TTTState` with float32 states (float64 inputs: float64), or None without `output_final_state`. An
            empty sequence's entries are the given ones bit for bit.

    Raises:
        TypeError: An argument has the wrong Python type, or state is not a TTTState.
        ValueError: A shape, dtype, device or range is wrong, or a position lies outside its mini-batch.
        UnsupportedError: No backend, or not the demanded one, can serve the call; `.reasons` explains why.

    Source:
        Learning to (learn at test time), arXiv:2407.04620, sections 2.4 to 2.7: mini-batch TTT, TTT-Linear.

    Examples:
        >>> import torch, wyfold
        >>> q, k, v = (torch.randn(1, 20, 2, 16) for _ in range(3))
        >>> w, b, state = torch.ones(2, 16), torch.zeros(2, 16), None
        >>> for t in range(20):
        ...     token = (x[:, t : t + 1] for x in (q, k, v))
        ...     o, state = wyfold.fused_recurrent_ttt_linear(*token, w, b, 0.1, state=state, output_final_state=True)
        >>> state.position.tolist()
        [4]
    """
    op = "fused_recurrent_ttt_linear"
    if state is not None and not isinstance(state, TTTState):
        raise TypeError(f"{op}: state must be a TTTState or None, got {type(state).__name__}")
    flags = TTTFlags(
        op, True, residual, scale, eps, chunk_size, False, None, output_final_state, False, False, backend
    )  # fmt: skip
    states = (None,) * 5 if state is None else state
    o, *final = planned(TTT_LINEAR, *ttt_arguments(flags, (q, k, v, w, b), eta, eta_col, states, cu_seqlens))
    return o, TTTState(*final) if output_final_state else None
