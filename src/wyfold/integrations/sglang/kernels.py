"""SGLang's calls of GDN and KDA kernels on Wyfold's serving operators.

Pools are [slots, HV, V, K]. A negative slot is padding. Padding rows may also share slot 0, which no request has; what
they write there has no meaning. Parameters are those of SGLang's `LinearAttnKernelBase`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wyfold import serving
from wyfold.runtime.unsupported import UnsupportedError

SNAPSHOT_EVERY = 64
"""Tokens of a chunk of SGLang, at whose borders it keeps states for its prefix cache."""


def packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    ssm_states: Tensor,
    cache_indices: Tensor,
    num_v_heads: int,
    head_v_dim: int,
    lower_bound: float | None = None,
    **kwargs: Any,
) -> Tensor:
    """Run one token per row from the output of the convolution.

    Args:
        mixed_qkv: [N, 2 H K + HV V].
        a: Pre-activations of the gate, N * HV elements (GDN) or N * HV * K (KDA).
        b: Logits of the write strength, N * HV elements.
        A_log: HV elements. dt_bias: HV (GDN) or HV * K (KDA).
        ssm_states: [slots, HV, V, K] pool, updated in place.
        cache_indices: [N] slots.
        lower_bound: Bound of KDA's bounded gate. None: the softplus gate.
        kwargs: ReplaySSM's buffers, which must be None.

    Returns:
        o: [1, N, HV, V].
    """
    _refuse_given("packed_decode", kwargs)
    N, (HV, V, K) = len(mixed_qkv), ssm_states.shape[-3:]
    H = (mixed_qkv.shape[1] - HV * V) // (2 * K)
    o = serving.decode_packed(
        mixed_qkv, a.reshape(N, -1), b.reshape(N, HV), A_log.reshape(-1), dt_bias.reshape(-1), ssm_states,
        cache_indices[:N], heads=(H, HV), dims=(K, V), state_v_first=True, scale=scale, lower_bound=lower_bound,
    )  # fmt: skip
    return o[None]


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    lower_bound: float | None = None,
    **kwargs: Any,
) -> Tensor:
    """Run one token per row.

    Args:
        q, k: [1, N, H, K]. v: [1, N, HV, V].
        query_start_loc: [N+1] boundaries: one token per row.

    Other arguments are those of `packed_decode`.

    Returns:
        o: [1, N, HV, V].
    """
    N = v.shape[1]
    if len(query_start_loc) != N + 1:
        rows = len(query_start_loc) - 1
        raise UnsupportedError(f"decode: v must have one token per row, got {N} tokens of {rows} rows", {})
    return serving.decode(
        q, k, v, _gate(a, v, ssm_states), b.reshape(v.shape[:3]), ssm_states, cache_indices[:N], state_v_first=True,
        use_gate_in_kernel=True, A_log=A_log.reshape(-1), dt_bias=dt_bias.reshape(-1), lower_bound=lower_bound,
        use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip


def target_verify(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    intermediate_states_buffer: Tensor,
    intermediate_state_indices: Tensor,
    cache_steps: int,
    retrieve_parent_token: Tensor | None,
    lower_bound: float | None = None,
    **kwargs: Any,
) -> Tensor:
    """Run drafted tokens. The pool is not written; the state after each token goes to a buffer.

    The states that rows start from are first copied to the buffer's first column, which the state after the first token
    then replaces.

    Args:
        q, k: [1, T, H, K]. v: [1, T, HV, V].
        query_start_loc: [N+1] boundaries of the rows' tokens, at most `cache_steps` each.
        intermediate_states_buffer: [rows, steps, HV, V, K], dtype of the pool.
        intermediate_state_indices: [N] rows of the buffer; more are legal.
        retrieve_parent_token: Must be None: a tree of drafts is refused.
        kwargs: ReplaySSM's buffers and fused acceptance, which must be None.

    Other arguments are those of `packed_decode`.

    Returns:
        o: [1, T, HV, V].
    """
    _refuse_given("target_verify", {"retrieve_parent_token": retrieve_parent_token, **kwargs}, but=("stable_rows",))
    buffer, N = intermediate_states_buffer, len(query_start_loc) - 1
    if buffer.dtype != ssm_states.dtype:
        raise UnsupportedError(
            f"target_verify: intermediate_states_buffer must have the pool's dtype {ssm_states.dtype}, got "
            f"{buffer.dtype}",
            {},
        )
    steps, rows = buffer.stride(0) // buffer.stride(1), intermediate_state_indices[:N].long()
    # One slot per row and step. The buffer may be the first steps of a longer one.
    slots = (len(buffer) - 1) * steps + buffer.shape[1]
    pool = buffer.as_strided((slots, *buffer.shape[2:]), buffer.stride()[1:])
    columns = rows[:, None] * steps + torch.arange(cache_steps, device=rows.device)
    pool[columns[:, 0]] = ssm_states[cache_indices[:N].clamp(min=0).long()]
    return serving.verify(
        q, k, v, _gate(a, v, ssm_states), b.reshape(v.shape[:3]), pool, columns, state_v_first=True,
        cu_seqlens=query_start_loc, use_gate_in_kernel=True, A_log=A_log.reshape(-1), dt_bias=dt_bias.reshape(-1),
        lower_bound=lower_bound, use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip


def extend_gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    inplace_update: bool = True,
    **kwargs: Any,
) -> tuple[Tensor, None, None]:
    """Run prompts, or parts of them, of GDN.

    Args:
        q, k: [1, T, H, K] before their norm. v: [1, T, HV, V].
        g: [1, T, HV] natural log of the decay. beta: [1, T, HV] write strength.
        ssm_states: [slots, HV, V, K] pool, updated in place.
        cache_indices: [N] slots. Distinct, unless `inplace_update` is False.
        query_start_loc: [N+1] boundaries.
        inplace_update: Write the states after the last tokens.
        kwargs: `track_state` and `track_chunk_idx`: see `_snapshots`. Others have no meaning here.

    Returns:
        o: [1, T, HV, V].
        None, None: Instead of the final states, which are in the pool, and of the states of all chunks.
    """
    o = serving.prefill(
        q, k, v, g, beta, ssm_states, cache_indices, state_v_first=True, cu_seqlens=query_start_loc,
        output_state_indices=None if inplace_update else torch.full_like(cache_indices, -1),
        use_qk_l2norm_in_kernel=True, **_snapshots(v, ssm_states, cache_indices, query_start_loc, kwargs),
    )  # fmt: skip
    return o, None, None


def extend_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    beta_is_raw: bool = False,
    return_intermediate_states: bool = False,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, None]:
    """Run prompts, or parts of them, of KDA.

    Args:
        g: [1, T, HV, K] pre-activation of the gate; natural log of the decay if A_log is None.
        beta: [1, T, HV] write strength, or its logit if `beta_is_raw`.
        return_intermediate_states: Return a pair. The states of chunks that SGLang needs are those of `track_state`.

    Other arguments are those of `extend_gdn`.

    Returns:
        o: [1, T, HV, V], or (o, None).
    """
    wanted = kwargs.get("track_ssm_h_src")
    if return_intermediate_states and kwargs.get("track_state") is None and wanted is not None and len(wanted):
        raise UnsupportedError("extend: needs track_state to return states of chunks, got None", {})
    o = serving.prefill(
        q, k, v, g, beta, ssm_states, cache_indices, state_v_first=True, cu_seqlens=query_start_loc,
        use_gate_in_kernel=A_log is not None, A_log=None if A_log is None else A_log.reshape(-1),
        dt_bias=None if A_log is None or dt_bias is None else dt_bias.reshape(-1),
        lower_bound=None if A_log is None else lower_bound, use_beta_sigmoid_in_kernel=beta_is_raw,
        use_qk_l2norm_in_kernel=True, **_snapshots(v, ssm_states, cache_indices, query_start_loc, kwargs),
    )  # fmt: skip
    return (o, None) if return_intermediate_states else o


def _snapshots(v: Tensor, pool: Tensor, slots: Tensor, cu_seqlens: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `prefill` that write `track_state[n]`: the state before chunk `track_chunk_idx[n]` of sequence n.

    Nothing waits for the device. Rows whose chunk is negative have no meaning afterwards.
    """
    track_state, chunk = kwargs.get("track_state"), kwargs.get("track_chunk_idx")
    if track_state is None or chunk is None:
        return {}
    N, T = len(cu_seqlens) - 1, v.shape[1]
    track_state[:N] = pool[slots[:N].clamp(min=0).long()].to(track_state.dtype)  # of chunk 0: the state it starts from
    complete = cu_seqlens.diff() // SNAPSHOT_EVERY
    row = complete.cumsum(0) - complete + chunk[:N] - 1
    last = T // SNAPSHOT_EVERY
    row = torch.where(chunk[:N] > 0, row, last).long()
    indices = torch.full((last + 1,), -1, dtype=torch.int64, device=row.device)
    indices[row] = torch.arange(N, device=row.device)
    return {
        "checkpoint_every": SNAPSHOT_EVERY,
        "checkpoint_pool": track_state,
        "checkpoint_indices": indices[:last],
    }


def copy_chunk_states(h: Tensor, cu_seqlens: Tensor, track_state: Tensor, chunk: Tensor) -> None:
    """Copy `track_state[n]`, the state before chunk `chunk[n]` of sequence n, from the states before all chunks.

    Args:
        h: [1, chunks, HV, V, K] as SGLang's own kernel returns them.
        chunk: [N] chunk of each sequence; rows whose chunk is negative have no meaning afterwards.
    """
    N = len(cu_seqlens) - 1
    chunks = (cu_seqlens.diff() + SNAPSHOT_EVERY - 1) // SNAPSHOT_EVERY
    row = chunks.cumsum(0) - chunks + chunk[:N].clamp(min=0)
    track_state[:N] = h[0, row.clamp(max=h.shape[1] - 1).long()].to(track_state.dtype)


def _gate(a: Tensor, v: Tensor, pool: Tensor) -> Tensor:
    """Pre-activations of the gate as [1, T, HV] (GDN) or [1, T, HV, K] (KDA)."""
    per_head = a.numel() == v.shape[1] * v.shape[2]
    return a.reshape(v.shape[:3]) if per_head else a.reshape(*v.shape[:3], pool.shape[-1])


def _refuse_given(op: str, options: dict[str, Any], but: tuple[str, ...] = ()) -> None:
    given = [name for name, value in options.items() if value is not None and value is not False and name not in but]
    if given:
        raise UnsupportedError(f"{op}: must be None: {', '.join(given)}", {})
