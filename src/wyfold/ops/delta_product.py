"""(Gated) DeltaProduct: several updates of the delta rule for each token.

A token with n keys is n tokens of a delta rule, of which the first decays the state and the last reads it. The others
have a gate of 0 and a query of zeros, and their outputs are dropped.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wyfold.autograd.delta_records import DeltaTensors
from wyfold.context_parallel.build_context import repeated
from wyfold.context_parallel.context import ContextParallel
from wyfold.ops.delta_call import DELTA, delta_arguments, run_across_ranks
from wyfold.ops.delta_checks import DeltaFlags, check_boundaries
from wyfold.ops.rank_agreement import check_shard, ranked_call
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout, boundaries_of, legal_boundaries
from wyfold.runtime.replay_cache import planned

Result = tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]


def chunk_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    num_householder: int = 1,
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
    chunk_size: int | None = None,
    max_splits: int | None = None,
    disable_recompute: bool = False,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: ContextParallel | None = None,
    backend: str | None = None,
) -> Result:
    """Gated DeltaProduct over whole sequences, computed chunk by chunk.

        S <- exp(g_t) S
        S <- S + beta_tj k_tj (v_tj - S^T k_tj)^T,   for j = 1 ... n
        o_t = scale S^T q_t

    Per value head, from S = initial_state or zeros: the product of n generalized Householder matrices in place of the
    one of `chunk_gated_delta_rule`, whose kernels compute it at n times the tokens, with the same bitwise guarantees.

    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64.
        k: [B, TN, H, K], dtype of q, with TN = T num_householder: the keys of token t are rows t n to t n + n - 1.
            Rows of unit length, or `use_qk_l2norm_in_kernel`; beta |k|^2 <= 2 keeps the state bounded.
        v: [B, TN, HV, V], dtype of q; value head j reads key head j // (HV // H).
        g: [B, T, HV] any float, or [B, T, HV, K] for one decay per key channel. Natural log of the decay per token,
            before its first update, <= 0; None: no decay (DeltaProduct without a gate).
        beta: [B, TN, HV] any float. Write strength; None: 1.
        num_householder: n, the updates of a token, at least 1: with 1 it is the gated delta rule.

    Arguments not listed here are those of `chunk_gated_delta_rule`. Boundaries, `checkpoint_every` and `cp_context`
    count tokens; `chunk_size` counts updates, and `checkpoint_every` times n must be a multiple of it. A rank passes
    the updates of its tokens. Before a call with a context is compiled, one must have run with it.

    Returns:
        o: [B, T, HV, V], dtype of v.
        final_state: [N, HV, K, V] in `state_dtype`, or None without `output_final_state`.
        states: Only with `return_intermediate_states`; as `chunk_gated_delta_rule` returns them.

    Differentiable once in every tensor argument, through o and the final state.

    Raises:
        TypeError: An argument has the wrong Python type, or a keyword is unknown.
        ValueError: A shape, dtype, device, range or combination of options is wrong; the message names the argument.
        UnsupportedError: The backend cannot serve the call; `.reasons` explains why for each backend.

    Source:
        DeltaProduct, arXiv:2502.10297, section 3.

    Examples:
        >>> import torch, wyfold
        >>> q, g = torch.randn(1, 100, 2, 64), -torch.rand(1, 100, 2)
        >>> k, v = (torch.randn(1, 200, 2, 64) for _ in range(2))  # two updates for each token
        >>> beta = 2 * torch.rand(1, 200, 2)
        >>> o, state = wyfold.chunk_gated_delta_product(
        ...     q, k, v, g, beta, num_householder=2, use_qk_l2norm_in_kernel=True, output_final_state=True
        ... )
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 64, 64]))
    """
    op = "chunk_gated_delta_product"

    def made() -> tuple[_Updates, tuple[DeltaTensors, DeltaFlags]]:
        updates = _as_updates(op, q, k, v, g, beta, num_householder, cu_seqlens, cu_seqlens_cpu)
        flags = DeltaFlags(
            op=op,
            channel=updates.channel,
            recurrent=False,
            scale=scale,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            state_v_first=state_v_first,
            state_dtype=state_dtype,
            return_intermediate_states=return_intermediate_states,
            checkpoint_every=updates.every(op, return_intermediate_states, checkpoint_every),
            batch_invariant=batch_invariant,
            backend=backend,
            chunk_size=chunk_size,
            disable_recompute=disable_recompute,
            max_splits=max_splits,
            updates=updates.n,
        )
        given = updates.q, k, v, updates.g, beta, initial_state, None, None
        return updates, delta_arguments(flags, given, updates.cu_seqlens, updates.on_cpu)

    if cp_context is None:
        updates, arguments = made()
        return updates.read(planned(DELTA, *arguments))
    with ranked_call(op, cp_context, q) as ranked:
        check_shard(op, cp_context, "q", check.tensor(op, "q", q), cu_seqlens)
        updates, arguments = made()
    ranked.assert_same(None)  # the call on the updates compares
    return updates.read(run_across_ranks(*arguments, repeated(cp_context, updates.n)))


def fused_recurrent_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    num_householder: int = 1,
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
    backend: str | None = None,
) -> Result:
    """Gated DeltaProduct, computed update by update: the form for decoding.

        S <- exp(g_t) S
        S <- S + beta_tj k_tj (v_tj - S^T k_tj)^T,   for j = 1 ... n
        o_t = scale S^T q_t

    Same function as `chunk_gated_delta_product`, evaluated as the recurrence is written; last bits may differ. The
    backward keeps a state every 64 updates and recomputes those between.

    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64.
        k: [B, TN, H, K], dtype of q, with TN = T num_householder: the keys of token t are rows t n to t n + n - 1.
        v: [B, TN, HV, V], dtype of q.
        g: [B, T, HV] any float, or [B, T, HV, K] for one decay per key channel. Natural log of the decay per token,
            <= 0; None: no decay.
        beta: [B, TN, HV] any float. Write strength; None: 1.
        num_householder: n, the updates of a token, at least 1: with 1 it is the gated delta rule.

    Arguments not listed here are those of `chunk_gated_delta_rule`. Boundaries and `checkpoint_every` count tokens.

    Returns:
        o: [B, T, HV, V], dtype of v.
        final_state: [N, HV, K, V] in `state_dtype`, or None without `output_final_state`.
        states: Only with `return_intermediate_states`; as `chunk_gated_delta_rule` returns them.

    Differentiable once in every tensor argument, through o and the final state.

    Raises:
        TypeError: An argument has the wrong Python type, or a keyword is unknown.
        ValueError: A shape, dtype, device, range or combination of options is wrong; the message names the argument.
        UnsupportedError: The backend cannot serve the call; `.reasons` explains why for each backend.

    Source:
        DeltaProduct, arXiv:2502.10297, section 3.

    Examples:
        >>> import torch, wyfold
        >>> q, state = torch.randn(2, 1, 2, 64), torch.zeros(2, 2, 64, 64)
        >>> k, v = (torch.randn(2, 3, 2, 64) for _ in range(2))  # one token with three updates
        >>> o, state = wyfold.fused_recurrent_gated_delta_product(
        ...     q, k, v, num_householder=3, use_qk_l2norm_in_kernel=True, initial_state=state, output_final_state=True
        ... )
        >>> o.shape, state.shape
        (torch.Size([2, 1, 2, 64]), torch.Size([2, 2, 64, 64]))
    """
    op = "fused_recurrent_gated_delta_product"
    updates = _as_updates(op, q, k, v, g, beta, num_householder, cu_seqlens, None)
    flags = DeltaFlags(
        op=op,
        channel=updates.channel,
        recurrent=True,
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        state_dtype=state_dtype,
        return_intermediate_states=return_intermediate_states,
        checkpoint_every=updates.every(op, return_intermediate_states, checkpoint_every),
        batch_invariant=batch_invariant,
        backend=backend,
    )
    given = updates.q, k, v, updates.g, beta, initial_state, None, None
    return updates.read(planned(DELTA, *delta_arguments(flags, given, updates.cu_seqlens)))


class _Updates(NamedTuple):
    """A call with one row for each update instead of each token.

    Attributes:
        n: Updates of a token.
        q: [B, T n, H, K] queries in the last row of each token, else zeros.
        g: [B, T n, HV] or [B, T n, HV, K] gates in the first row of each token, else zeros; None without a gate.
        cu_seqlens, on_cpu: Boundaries in updates, and their copy on the CPU; None for a dense batch.
    """

    n: int
    q: Tensor
    g: Tensor | None
    cu_seqlens: Tensor | SequenceLayout | None
    on_cpu: Tensor | None

    @property
    def channel(self) -> bool:
        """Whether there is one decay per key channel."""
        return isinstance(self.g, Tensor) and self.g.ndim == 4

    def every(self, op: str, wanted: bool, every: int | None) -> int | None:
        """Updates between intermediate states, from tokens between them."""
        check.flag(op, return_intermediate_states=wanted)
        if not wanted:
            return every
        return self.n * (64 if every is None else check.integer(op, "checkpoint_every", every, least=1))

    def read(self, found: Result) -> Result:
        """The results of the updates, with one output for each token."""
        o, *states = found
        last = o.unflatten(1, (o.shape[1] // self.n, self.n)).select(2, self.n - 1)
        return (last, *states)


def _as_updates(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    num_householder: int,
    cu_seqlens: Tensor | SequenceLayout | None,
    on_cpu: Tensor | None,
) -> _Updates:
    """Check shapes and boundaries, which count tokens, and spread q and g over the updates."""
    n = check.integer(op, "num_householder", num_householder, least=1)
    channel = isinstance(g, Tensor) and g.ndim == 4
    sizes = check.shapes(op, q=(q, "B T H K"))
    sizes = check.shapes(
        op,
        optional=("g", "beta"),
        known={**sizes, "TN": n * sizes["T"]},
        k=(k, "B TN H K"),
        v=(v, "B TN HV V"),
        g=(g, "B T HV K" if channel else "B T HV"),
        beta=(beta, "B TN HV"),
    )
    cu, tokens = boundaries_of(cu_seqlens)
    check_boundaries(op, q, cu, tokens, on_cpu)
    if cu is not None and check.readable(cu):
        legal_boundaries(op, cu, sizes["T"])
    if n == 1:
        return _Updates(n, q, g, cu_seqlens, on_cpu)
    return _Updates(
        n,
        spread_updates(q, n, last=True),
        None if g is None else spread_updates(g, n, last=False),
        None if cu is None else n * cu,
        None if on_cpu is None else n * on_cpu,
    )


def spread_updates(x: Tensor, n: int, *, last: bool) -> Tensor:
    """Put each row of x [B, T, ...] into the last or the first of n rows, and zeros into the others."""
    before = n - 1 if last else 0
    around = [0, 0] * (x.ndim - 2) + [before, n - 1 - before]
    return torch.nn.functional.pad(x.unsqueeze(2), around).flatten(1, 2)
