"""TTT-Linear: the state is a linear model that learns, by gradient descent, from the keys and values it reads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wyfold.context_parallel.context import ContextParallel
from wyfold.ops.ttt_arguments import TTTCall, TTTForm, split_numbers
from wyfold.ops.ttt_call import call_ttt
from wyfold.runtime.layout import SequenceLayout, boundaries_of
from wyfold.runtime.replay_cache import replayed


class TTTState(NamedTuple):
    """Where every sequence stands, inside a mini-batch or at its start.

    Attributes:
        state: [N, HV, K, V] matrix the open mini-batch was entered with.
        bias: [N, HV, 1, V] its bias.
        grad: [N, HV, K, V] sum of k n^T over the open mini-batch's tokens; zero where `position` is. Factors
            `eta_col` are in it.
        bias_grad: [N, HV, 1, V] sum of n, likewise.
        position: [N] int32 or int64. Tokens of the open mini-batch, from 0 to chunk_size - 1.
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
    """TTT-Linear over whole sequences, mini-batch by mini-batch.

    Per value head, (S0, c0) being the state that a mini-batch of `chunk_size` tokens was entered with and LN the norm
    of a row to mean 0 and variance 1:

        n_t = gradient of 1/2 |w LN(z) + b - (v_t - k_t)|^2 at z = S0^T k_t + c0, times eta_col_t
        S_t = S0 - eta_t sum_{s<=t} k_s n_s^T        c_t = c0 - eta_t sum_{s<=t} n_s
        h_t = scale S_t^T q_t + c_t                  o_t = h_t + w LN(h_t) + b

    Published layers step along n_s by a number of both tokens, eta_t eta_col_s, and end in o_t = q_t + w LN(h_t) + b,
    which is residual="q".

    The last token's (S_t, c_t) enters the next mini-batch. The last mini-batch of a sequence may be short: the states
    that are returned are those of its last token, so going on from them starts a new mini-batch;
    `fused_recurrent_ttt_linear` goes on inside one.

    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64 on eager. Any strides. Never written.
        k: [B, T, H, K], dtype of q.
        v: [B, T, HV, V], dtype of q; V = K, a multiple of 8 up to 128. HV is a multiple of H: value head j reads query
            and key head `j // (HV // H)`. The inner model learns v - k from k.
        w: [HV, V] any float. Weight of both norms.
        b: [HV, V] any float. Bias of both norms.
        eta: [B, T, HV, 1] or [B, T, HV] any float, or a number. Step size of a token; it rescales the whole sum of its
            mini-batch, it does not weigh the token; `eta_col` does.
        eta_col: As eta. Factor of a token's own gradient, in its mini-batch and beyond. None: 1.
        residual: What the norm of what was read is added to: "o", itself, or "q", the query without `scale`.
        scale: Multiplies the q that reads. None: K ** -0.5; published layers have 1.
        eps: > 0, at least the smallest normal number of the arithmetic; added to the variances.
        chunk_size: 16, 32 or 64. Tokens of a mini-batch, counted from each sequence's first: part of the model, not a
            tile.
        initial_state: [N, HV, K, V] (with state_v_first [N, HV, V, K]) float32, float16, bfloat16. None: zeros.
        initial_state_bias: [N, HV, 1, V], as initial_state. None: zeros. Each may be given without the other.
        output_final_state: Return the states after every sequence's last token.
        state_v_first: Matrix states are V-first, in and out.
        state_dtype: Storage of returned states. None: float32 (float64 inputs: float64).
        cu_seqlens: [N+1] int32 or int64 boundaries of packed sequences, or a `SequenceLayout`; B is 1. An empty
            sequence returns its initial state bit for bit; rows past the last boundary are never read, their o is zero.
        cp_context: From `wyfold.cp.build_cp_context`, in the place of cu_seqlens: the tensors are this rank's share of
            a buffer that the ranks of a group hold together; a rank's edge must not lie inside a mini-batch. Initial
            states are those of the sequences that begin here (`starts`), final states those of the ones that end here
            (`ends`); of w and b each rank gets its own share of the gradient. States go from rank to rank: memory is
            split, the time of one sequence is not.
        disable_recompute: On eager, keep for the backward the state of every mini-batch, which it would run the forward
            again for: memory for time, same bits. Kernels keep the states of every fourth mini-batch of 16 and two
            tensors like v either way, since walking again would need as much memory at its most.
        batch_invariant: A sequence's bits never depend on its neighbours, flag or not; here it changes nothing.
        backend: None: the table's choice. "eager", "triton", "gluon": a demand.

    Returns:
        o: [B, T, HV, V], dtype of v.
        final_state: [N, HV, K, V] (with state_v_first [N, HV, V, K]), or None unless asked for.
        final_state_bias: [N, HV, 1, V], or None unless asked for.

    Differentiable in every tensor, once; gradients have their argument's dtype and are rounded once.

    Raises:
        TypeError: an argument of the wrong Python type.
        ValueError: shape, dtype, device or range; `cu_seqlens` with B > 1.
        UnsupportedError: the demanded backend cannot.
        RuntimeError: a gradient of a gradient was asked for.

    Source:
        Learning to (learn at test time), arXiv:2407.04620: TTT-Linear, inner mini-batches and their dual form.

    Examples:
        >>> import torch, wyfold
        >>> q, k, v = (torch.randn(1, 100, 2, 16) for _ in range(3))
        >>> w, b = torch.ones(2, 16), torch.zeros(2, 16)
        >>> o, S, c = wyfold.chunk_ttt_linear(q, k, v, w, b, 0.1, output_final_state=True)
        >>> o.shape, S.shape, c.shape
        (torch.Size([1, 100, 2, 16]), torch.Size([1, 2, 16, 16]), torch.Size([1, 2, 1, 16]))
    """
    op = "chunk_ttt_linear"
    states, final, keep = (initial_state, initial_state_bias), output_final_state, disable_recompute
    form = TTTForm(residual, scale, eps, chunk_size, state_v_first, state_dtype, final, keep, batch_invariant)

    def run() -> tuple[Tensor, Tensor | None, Tensor | None]:
        result = call_ttt(TTTCall(op, q, k, v, w, b, eta, eta_col, states, cu_seqlens, cp_context, form, backend))
        return (result.o, result.state, result.bias) if final else (result.o, None, None)

    if cp_context is not None:
        return run()
    numbers, steps = split_numbers(eta, eta_col)
    cu, tokens_of_layout = boundaries_of(cu_seqlens)
    values = op, *numbers, tokens_of_layout, *form, backend
    return replayed((q, k, v, w, b, *steps, *states, cu), values, run)


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
    """TTT-Linear from any token to any other: the form for decoding.

    The recurrence of `chunk_ttt_linear`, with the mini-batch that the last token falls into left open: calls that hand
    the `TTTState` on go on from any token. They have the bits of one call where they are cut between mini-batches;
    inside of one, sums are taken in another order and last bits differ. Sequences may stand at different positions.

    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64 on eager.
        k: [B, T, H, K], dtype of q.
        v: [B, T, HV, V], dtype of q; V = K.
        w: [HV, V] any float.
        b: [HV, V] any float.
        eta: [B, T, HV, 1] or [B, T, HV] any float, or a number.
        eta_col, residual, scale, eps, chunk_size, cu_seqlens, backend: As in `chunk_ttt_linear`.
        state: Where the sequences stand; None: at their start, with zero states. A constant to the backward: no
            gradient reaches it.
        output_final_state: Return where the sequences stand afterwards, differentiable in this call's arguments.

    Returns:
        o: [B, T, HV, V], dtype of v.
        final_state: `TTTState` with float32 states (float64 inputs: float64), or None unless asked for. An empty
            sequence's are the given ones bit for bit.

    Raises:
        TypeError: an argument of the wrong Python type; state is no TTTState.
        ValueError: shape, dtype, device or range; a position outside its mini-batch.
        UnsupportedError: the demanded backend cannot.

    Source:
        Learning to (learn at test time), arXiv:2407.04620.

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
    form = TTTForm(residual, scale, eps, chunk_size, False, None, output_final_state, False, False)
    states = () if state is None else state
    result = call_ttt(TTTCall(op, q, k, v, w, b, eta, eta_col, states, cu_seqlens, None, form, backend, recurrent=True))
    return result.o, TTTState(*result[1:]) if output_final_state else None
