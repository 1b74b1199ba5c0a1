"""Convolution, norms, gates and triangular steps under fla's names."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wyfold.integrations.fla.ranks import wyfold_context
from wyfold.integrations.fla.recurrences import Result
from wyfold.ops import conv, gates, norm, solve
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout, boundaries_of, packed_boundaries


def solve_tril(
    A: Tensor,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float32,
) -> Tensor:
    """`wyfold.solve_tril`; output_dtype=None keeps the dtype of A, as in fla."""
    kept = check.tensor("solve_tril", "A", A).dtype if output_dtype is None else output_dtype
    return solve.solve_tril(A, cu_seqlens=cu_seqlens, output_dtype=kept)


def chunk_scaled_dot_kkt_fwd(
    k: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    output_dtype: torch.dtype = torch.float32,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """`wyfold.chunk_scaled_dot_kkt`.

    Args:
        g: [B, T, HV]. As in fla: base-2 logs, cumulative within chunks. Wyfold's own operator takes a natural log per
            token.
    """
    op = "chunk_scaled_dot_kkt_fwd"
    if beta is None:
        raise ValueError(f"{op}: beta must be given, got None")
    decay = None
    if g is not None:
        check.integer(op, "chunk_size", chunk_size, least=1)
        check.shapes(op, k=(k, "B T H K"), beta=(beta, "B T HV"), g=(g, "B T HV"))
        check.floating(op, g=g)
        decay = per_token(g, cu_seqlens, chunk_size)
    return solve.chunk_scaled_dot_kkt(
        k, beta, decay, chunk_size=chunk_size, cu_seqlens=cu_seqlens, output_dtype=output_dtype
    )


def per_token(summed: Tensor, cu_seqlens: Tensor | None, chunk_size: int) -> Tensor:
    """Natural-log decays per token [B, T, HV], from base-2 logs that are cumulative within chunks."""
    T = summed.shape[1]
    token = torch.arange(T, device=summed.device)
    position = token if cu_seqlens is None else SequenceLayout(cu_seqlens, T).positions
    before = torch.cat([torch.zeros_like(summed[:, :1]), summed[:, :-1]], 1)
    first = (position % chunk_size == 0)[None, :, None]
    return torch.where(first, summed, summed - before) * math.log(2)


def fused_gdn_gate(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, output_dtype: torch.dtype = torch.float32
) -> Tensor:
    """`wyfold.fused_gdn_gate`."""
    return gates.fused_gdn_gate(g, A_log, dt_bias, output_dtype)


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`wyfold.fused_kda_gate`."""
    return gates.fused_kda_gate(g, A_log, dt_bias, lower_bound, output_dtype)


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """`wyfold.l2norm`."""
    return norm.l2norm(x, eps, output_dtype)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object = None,
) -> Result:
    """`wyfold.causal_conv1d`, with states of W columns, [N, D, W].

    Args:
        backend: fla's kernel choice; accepted and ignored.
    """
    op, output_final_state = "causal_conv1d", False if output_final_state is None else output_final_state
    check.flag(op, output_final_state=output_final_state)
    context = wyfold_context(op, cp_context, initial_state, output_final_state)
    if initial_state is None and output_final_state:
        sizes = check.shapes(op, x=(x, "B T D"), weight=(weight, "D W"))
        cu, tokens = boundaries_of(cu_seqlens)
        N = sizes["B"] if cu is None else packed_boundaries(op, x, cu, tokens).shape[0] - 1
        initial_state = x.new_zeros(N, sizes["D"], sizes["W"])
    return conv.causal_conv1d(
        x,
        weight,
        bias,
        residual=residual,
        initial_state=initial_state,
        output_final_state=output_final_state,
        activation=activation,
        cu_seqlens=None if context else cu_seqlens,
        cp_context=context,
    )


@torch.no_grad()
def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`causal_conv1d` of one token of each sequence, without a gradient, which moves the cache on in place.

    Args:
        x: [N, D], [1, N, D] or [N, 1, D].
        cache: [N, D, W] latest inputs, written.
        residual: Shape of x. Added after the activation.
        weight: [D, W]; must be given.
        bias: [D].

    Returns:
        y: Shape of x.
        cache: The given tensor.

    Raises:
        TypeError: An argument has the wrong Python type, or weight is None.
        ValueError: A shape, dtype or device is wrong.
    """
    op = "causal_conv1d_update"
    weight = check.tensor(op, "weight", weight)
    sizes = check.shapes(op, weight=(weight, "D W"), cache=(cache, "N D W"))
    rows = [sizes["N"], 1, sizes["D"]]
    if list(x.shape) not in ([rows[0], rows[2]], [1, rows[0], rows[2]], rows):
        raise ValueError(f"{op}: x must be [N, D], [1, N, D] or [N, 1, D] with N, 1, D of {rows}, got {list(x.shape)}")
    added = None if residual is None else residual.reshape(rows)
    y, latest = causal_conv1d(x.reshape(rows), weight, bias, added, cache, True, activation)
    if latest is not None:
        cache.copy_(latest)
    return y.reshape(x.shape), cache
