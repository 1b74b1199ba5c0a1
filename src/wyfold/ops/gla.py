"""Gated linear attention: a decayed sum of outer products, with a gate per key channel, per head, or none.

The kernels are those of the delta rules, with `DeltaOptions.erases` off. Columns of the state do not depend on each
other, so a decay per value channel is computed with a value head for each channel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wyfold.context_parallel.context import ContextParallel
from wyfold.ops.delta_call import DELTA, delta_arguments, run_across_ranks
from wyfold.ops.delta_checks import DeltaFlags, check_boundaries
from wyfold.ops.delta_widths import WIDEST_VALUE
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout, boundaries_of
from wyfold.runtime.replay_cache import planned

Result = tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
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
    """Gated linear attention over whole sequences, computed chunk by chunk.

        S <- diag(exp(g_t)) S + k_t v_t^T
        o_t = scale S^T q_t

    Per value head, from S = initial_state or zeros. With one decay per head it is simple GLA, of which Mamba-2 and
    Lightning attention are cases, and without a gate linear attention. The bitwise guarantees are those of
    `chunk_gated_delta_rule`. Keys need no unit length.

    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64.
        k: [B, T, H, K], dtype of q.
        v: [B, T, HV, V], dtype of q; value head j reads key head j // (HV // H). V is at most 512.
        g: [B, T, HV, K] any float, or [B, T, HV] for one decay per head. Natural log of the decay per token, <= 0; -inf
            resets; computed in float32. None: no decay. The sign is checked inside `wyfold.checked()` only.

    Arguments not listed here are those of `chunk_gated_delta_rule`.

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
        GLA, arXiv:2312.06635, section 4.

    Examples:
        >>> import torch, wyfold
        >>> q, k, v = (torch.randn(1, 100, 2, 64) for _ in range(3))
        >>> g = torch.nn.functional.logsigmoid(torch.randn(1, 100, 2, 64)) / 16
        >>> o, state = wyfold.chunk_gla(q, k, v, g, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 64, 64]))
    """
    op = "chunk_gla"
    columns = _columns(op, q, k, v, g, None, initial_state, state_v_first)
    flags = DeltaFlags(
        op=op,
        channel=columns.channel,
        recurrent=False,
        scale=scale,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        state_dtype=state_dtype,
        return_intermediate_states=return_intermediate_states,
        checkpoint_every=checkpoint_every,
        batch_invariant=batch_invariant,
        backend=backend,
        erases=False,
        chunk_size=chunk_size,
        disable_recompute=disable_recompute,
        max_splits=max_splits,
    )
    given = q, k, columns.v, columns.g, None, columns.states, None, None
    tensors, flags = delta_arguments(flags, given, cu_seqlens, cu_seqlens_cpu)
    return columns.joined(
        planned(DELTA, tensors, flags) if cp_context is None else run_across_ranks(tensors, flags, cp_context)
    )


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gv: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    state_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | SequenceLayout | None = None,
    return_intermediate_states: bool = False,
    checkpoint_every: int | None = None,
    batch_invariant: bool = False,
    backend: str | None = None,
) -> Result:
    """Gated linear attention, computed token by token: the form for decoding.

        S <- diag(exp(g_t)) S diag(exp(gv_t)) + k_t v_t^T
        o_t = scale S^T q_t

    Same function as `chunk_gla`, evaluated as the recurrence is written; last bits may differ. The backward keeps a
    state every 64 tokens and recomputes those between. With gv, every value channel is computed as a head of 8 columns,
    at 8 times the work.

    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64.
        k: [B, T, H, K], dtype of q.
        v: [B, T, HV, V], dtype of q. V is at most 512.
        g: [B, T, HV, K] any float, or [B, T, HV] for one decay per head. Natural log of the decay per token, <= 0;
            None: no decay.
        gv: [B, T, HV, V] any float. Natural log of the decay per token and value channel, <= 0. None: no decay.

    Arguments not listed here are those of `chunk_gated_delta_rule`.

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
        GLA, arXiv:2312.06635, section 4.

    Examples:
        >>> import torch, wyfold
        >>> q, k, v = (torch.randn(2, 1, 2, 64) for _ in range(3))
        >>> g, state = -torch.rand(2, 1, 2, 64), torch.zeros(2, 2, 64, 64)
        >>> o, state = wyfold.fused_recurrent_gla(q, k, v, g, initial_state=state, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([2, 1, 2, 64]), torch.Size([2, 2, 64, 64]))
    """
    op = "fused_recurrent_gla"
    columns = _columns(op, q, k, v, g, gv, initial_state, state_v_first, cu_seqlens)
    flags = DeltaFlags(
        op=op,
        channel=columns.channel,
        recurrent=True,
        scale=scale,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        state_dtype=state_dtype,
        return_intermediate_states=return_intermediate_states,
        checkpoint_every=checkpoint_every,
        batch_invariant=batch_invariant,
        backend=backend,
        erases=False,
    )
    given = q, k, columns.v, columns.g, None, columns.states, None, None
    return columns.joined(planned(DELTA, *delta_arguments(flags, given, cu_seqlens)))


class _Columns(NamedTuple):
    """A call whose value heads may be parts of the caller's.

    Attributes:
        v, g, states: Arguments of the call; HV is `parts` times the caller's.
        parts: Heads that one of the caller's value heads is divided into: one for each channel, or 1.
        v_first: Whether states are [V, K].
    """

    v: Tensor
    g: Tensor | None
    states: Tensor | None
    parts: int
    v_first: bool

    @property
    def channel(self) -> bool:
        """Whether g is one decay per key channel; the checks of a call then expect this shape."""
        return isinstance(self.g, Tensor) and self.g.ndim != 3

    def joined(self, found: Result) -> Result:
        """The results, with the parts of each value head side by side."""
        if self.parts == 1:
            return found
        o, *states = found
        joined = [None if x is None else _join_states(x, self.parts, self.v_first) for x in states]
        return (_join(o, self.parts), *joined)  # type: ignore[return-value]


def _columns(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    gv: Tensor | None,
    states: Tensor | None,
    v_first: bool,
    cu_seqlens: Tensor | SequenceLayout | None = None,
) -> _Columns:
    """Divide value heads that have a decay per channel into one for each channel; check what that needs.

    Other calls are checked as a whole later, where an error on one rank is raised on all.
    """
    if gv is None:
        return _Columns(v, g, states, 1, v_first)
    sizes = check.shapes(
        op,
        optional=("g", "gv"),
        q=(q, "B T H K"),
        k=(k, "B T H K"),
        v=(v, "B T HV V"),
        g=(g, "B T HV" if isinstance(g, Tensor) and g.ndim == 3 else "B T HV K"),
        gv=(gv, "B T HV V"),
    )
    check.head_groups(op, sizes["H"], sizes["HV"])  # HV V may be a multiple of H where HV is not
    check.any_width(op, "V", "v", sizes["V"], most=WIDEST_VALUE)
    check.floating(op, v=v, g=g, gv=gv)
    check.same_attribute(op, "device", q=q, g=g, gv=gv)
    check.flag(op, state_v_first=v_first)
    cu, tokens = boundaries_of(cu_seqlens)
    N = check_boundaries(op, q, cu, tokens)
    for name, gate in (("g", g), ("gv", gv)):  # the call itself sees their sum alone
        if gate is not None:
            check.log_gates(op, gate, cu, name=name)
    if states is not None:
        order = "N HV V K" if v_first else "N HV K V"
        check.shapes(op, known={**sizes, "N": N}, initial_state=(states, order))
    parts = sizes["V"]
    return _Columns(
        _split(v, parts),
        _gate_of_parts(g, gv),
        None if states is None else _split_states(states, parts, v_first),
        parts,
        v_first,
    )


def _gate_of_parts(g: Tensor | None, gv: Tensor) -> Tensor:
    """Gate of the parts [B, T, HV V] or [B, T, HV V, K], in float32 or wider."""
    gv = gv.to(torch.promote_types(gv.dtype, torch.float32))
    if g is None:
        return gv.flatten(2, 3)
    total = g[..., None] + gv if g.ndim == 3 else g[..., None, :] + gv[..., None]
    return total.flatten(2, 3)


def _split(x: Tensor, parts: int) -> Tensor:
    """[.., HV, V] -> [.., HV parts, V / parts]."""
    return x.unflatten(-1, (parts, -1)).flatten(-3, -2)


def _join(x: Tensor, parts: int) -> Tensor:
    """The inverse of `_split`."""
    return x.unflatten(-2, (-1, parts)).flatten(-2)


def _split_states(x: Tensor, parts: int, v_first: bool) -> Tensor:
    """`_split` of states [.., HV, K, V], or [.., HV, V, K]."""
    columns = x.movedim(-2 if v_first else -1, -1).movedim(-2, 0)  # [K, .., HV, V]
    return _split(columns, parts).movedim(0, -1 if v_first else -2)


def _join_states(x: Tensor, parts: int, v_first: bool) -> Tensor:
    """The inverse of `_split_states`."""
    columns = x.movedim(-1, 0) if v_first else x.movedim(-2, 0)
    return _join(columns, parts).movedim(0, -1 if v_first else -2)
