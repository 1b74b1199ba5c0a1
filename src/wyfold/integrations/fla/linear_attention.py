"""Linear attention with one decay per head, or none, under fla's names: simple GLA, Lightning attention, retention.

All are `wyfold.chunk_gla` and `wyfold.fused_recurrent_gla` with a gate per head; docstrings here list differences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wyfold.integrations.fla.low_rank import refuse_reverse
from wyfold.integrations.fla.recurrences import Result, v_first
from wyfold.ops import gla
from wyfold.runtime import check
from wyfold.runtime.check import UnsupportedError

LEAST = 1e-10
"""Added to the sums that outputs of linear attention are divided by."""

States = Tensor | tuple[Tensor, Tensor | None]
"""States of linear attention: [N, H, K, V], and with `normalize` also the sum of keys [N, 1, H, K]."""


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> Result:
    """`wyfold.chunk_gla` with one log decay per head: `g` [B, T, H], or `g_gamma` [H] for every token."""
    o, state = gla.chunk_gla(
        q,
        k,
        v,
        _gate("chunk_simple_gla", q, g, g_gamma),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=v_first("chunk_simple_gla", state_v_first, transpose_state_layout),
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
    )[:2]
    return o, state


def fused_chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """`chunk_simple_gla`."""
    return chunk_simple_gla(q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> Result:
    """`wyfold.fused_recurrent_gla` with the gate of `chunk_simple_gla`; `reverse` raises UnsupportedError."""
    op = "fused_recurrent_simple_gla"
    refuse_reverse(op, reverse)
    o, state = gla.fused_recurrent_gla(
        q,
        k,
        v,
        _gate(op, q, g, g_gamma),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=v_first(op, state_v_first, transpose_state_layout),
        cu_seqlens=cu_seqlens,
    )[:2]
    return o, state


def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """Lightning attention: head h of H in layer `layer_idx` decays by exp(-8 h / H (1 - layer_idx / num_layers))."""
    decays = _lightning_decays("chunk_lightning_attn", q, layer_idx, num_layers)
    return chunk_simple_gla(q, k, v, None, decays, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_recurrent_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """`chunk_lightning_attn`, token by token; `reverse` raises UnsupportedError."""
    op = "fused_recurrent_lightning_attn"
    refuse_reverse(op, reverse)
    decays = _lightning_decays(op, q, layer_idx, num_layers)
    return fused_recurrent_simple_gla(
        q, k, v, None, decays, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens
    )


def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """Retention: head h decays by 1 - 2^(-5 - h)."""
    decays = _retention_decays("chunk_retention", q)
    return chunk_simple_gla(q, k, v, None, decays, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


fused_chunk_retention = chunk_retention


def fused_recurrent_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """`chunk_retention`, token by token; `reverse` raises UnsupportedError."""
    op = "fused_recurrent_retention"
    refuse_reverse(op, reverse)
    return fused_recurrent_simple_gla(
        q,
        k,
        v,
        None,
        _retention_decays(op, q),
        scale,
        initial_state,
        output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: States | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, States | None]:
    """Linear attention, without a decay: o_t = scale q_t^T sum_s k_s v_s^T.

    With `normalize` o_t is divided by scale q_t^T sum_s k_s + 1e-10, and a state is a pair: [N, H, K, V] and the sum of
    keys [N, 1, H, K]. Without `output_final_state` the first of the pair is None.
    """
    return _linear_attention(
        gla.chunk_gla, "chunk_linear_attn", q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens
    )


fused_chunk_linear_attn = chunk_linear_attn


def fused_recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: States | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, States | None]:
    """`chunk_linear_attn`, token by token and by default without `normalize`; `reverse` raises UnsupportedError."""
    op = "fused_recurrent_linear_attn"
    refuse_reverse(op, reverse)
    return _linear_attention(
        gla.fused_recurrent_gla, op, q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens
    )


def parallel_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, None]:
    """`chunk_simple_gla` without states. The second result is None: `output_attentions` raises UnsupportedError."""
    _refuse_scores("parallel_simple_gla", output_attentions)
    return chunk_simple_gla(q, k, v, g, scale=scale, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu)[0], None


def parallel_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None]:
    """`chunk_retention` without states. The second result is None: `output_attentions` raises UnsupportedError."""
    _refuse_scores("parallel_retention", output_attentions)
    return chunk_retention(q, k, v, scale, cu_seqlens=cu_seqlens)[0], None


def _refuse_scores(op: str, output_attentions: bool) -> None:
    check.flag(op, output_attentions=output_attentions)
    if output_attentions:
        raise UnsupportedError(
            f"{op}: output_attentions=True is not offered", {"wyfold": "it never forms the scores of all pairs"}
        )


def _gate(op: str, q: Tensor, g: Tensor | None, g_gamma: Tensor | None) -> Tensor | None:
    """[B, T, H] log decays; None without a decay."""
    if g is not None and g_gamma is not None:
        raise ValueError(f"{op}: g_gamma must come without g, got both")
    if g is not None:
        B, T, H, _ = check.shapes(op, q=(q, "B T H K")).values()
        check.shapes(op, known={"B": B, "T": T}, g=(g, "B T HV"))
        return g
    if g_gamma is None:
        return None
    B, T, H, _ = check.shapes(op, q=(q, "B T H K")).values()
    check.shapes(op, known={"H": H}, g_gamma=(g_gamma, "H"))
    return g_gamma.expand(B, T, H)


def _lightning_decays(op: str, q: Tensor, layer_idx: int, num_layers: int) -> Tensor:
    layers = check.integer(op, "num_layers", num_layers, least=1)
    # Beyond the last layer the decays would be growth.
    part = 1 - check.integer(op, "layer_idx", layer_idx, least=0, most=layers) / layers
    H = check.shapes(op, q=(q, "B T H K"))["H"]
    return -8 / max(1, H) * part * torch.arange(H, dtype=torch.float32, device=q.device)


def _retention_decays(op: str, q: Tensor) -> Tensor:
    H = check.shapes(op, q=(q, "B T H K"))["H"]
    return torch.log1p(-(2.0 ** (-5 - torch.arange(H, dtype=torch.float32, device=q.device))))


def _linear_attention(
    rule: Callable[..., Any],
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    initial_state: States | None,
    output_final_state: bool,
    normalize: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, States | None]:
    check.flag(op, normalize=normalize)
    if isinstance(initial_state, tuple) and len(initial_state) != 2:
        raise ValueError(f"{op}: initial_state must be a tensor or a pair, got a tuple of {len(initial_state)}")
    sums, keys = initial_state if isinstance(initial_state, tuple) else (initial_state, None)
    if keys is not None and not normalize:
        raise ValueError(f"{op}: initial_state must be a tensor without normalize, got a pair")
    options = {"scale": scale, "cu_seqlens": cu_seqlens}
    o, state = rule(q, k, v, initial_state=sums, output_final_state=output_final_state, **options)
    if not normalize:
        return o, state
    if keys is not None:
        check.shapes(op, optional=(), known=None, **{"initial_state[1]": (keys, "N 1 H K")})
        keys = keys.squeeze(1)[..., None]
    # The divisor is the output for values of one, and its state the sum of the keys.
    divisor, keys = rule(q, k, torch.ones_like(v[..., :1]), initial_state=keys, output_final_state=True, **options)
    return o / (divisor + LEAST), (state, keys.squeeze(-1)[:, None])
