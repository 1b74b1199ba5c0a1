"""Plain references of the rules under fla's names (`fla.ops.*.naive`): loops over tokens in float32, for tests.

They are differentiable by PyTorch's own gradients, and slow. Where fla's reference goes chunk by chunk, the result is
the same up to rounding, and `chunk_size` is accepted and not needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.integrations.fla.recurrences import Result
from wyfold.ops import gates, ttt_linear
from wyfold.runtime import check


def naive_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> Result:
    """Gated delta rule; q and k [B, T, H, K], v [B, T, HV, V], beta and g [B, T, HV]. The output is float32."""
    return _loop(q, k, v, g[..., None], beta, scale, initial_state, output_final_state)


def naive_chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> Result:
    """As `naive_recurrent_gated_delta_rule`, with g before beta."""
    return _loop(q, k, v, g[..., None], beta, scale, initial_state, output_final_state)


def naive_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> Result:
    """Kimi Delta Attention: the gated delta rule with g [B, T, HV, K]. The output has the dtype of v."""
    o, state = _loop(q, k, v, g, beta, scale, initial_state, output_final_state)
    return o.to(v.dtype), state


def naive_chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
) -> Result:
    """As `naive_recurrent_kda`."""
    return naive_recurrent_kda(q, k, v, g, beta, scale, initial_state, output_final_state)


def delta_rule_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
) -> Result:
    """Delta rule, heads before tokens: q and k [B, H, T, K], v [B, H, T, V], beta [B, H, T] or, per channel, as v.

    The output has the dtype of q.
    """
    q, k, v, beta = (x.transpose(1, 2) for x in (q, k, v, beta))
    o, state = _loop(q, k, v, None, beta, None, initial_state, output_final_state)
    return o.transpose(1, 2).to(q.dtype), state


def delta_rule_chunkwise(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, chunk_size: int = 32) -> Result:
    """As `delta_rule_recurrence`, with beta [B, H, T] and the final state."""
    return delta_rule_recurrence(q, k, v, beta)


def chunk_ttt_linear_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    eta: Tensor | float,
    scale: float | None = None,
    eps: float = 1e-6,
    mini_batch_size: int = 16,
    initial_state: Tensor | None = None,
    initial_state_bias: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """TTT-Linear by the eager `wyfold.chunk_ttt_linear`, in float32. A state without rows is that of every row."""
    q, k, v, w, b = (x.float() for x in (q, k, v, w, b))
    initial_state, initial_state_bias = (
        x.expand(len(q), *x.shape) if x is not None and x.ndim == 3 else x for x in (initial_state, initial_state_bias)
    )
    eta = eta.float() if isinstance(eta, Tensor) else eta
    return ttt_linear.chunk_ttt_linear(
        q,
        k,
        v,
        w,
        b,
        eta,
        scale=scale,
        eps=eps,
        chunk_size=mini_batch_size,
        initial_state=initial_state,
        initial_state_bias=initial_state_bias,
        output_final_state=output_final_state,
        backend="eager",
    )


def naive_gdn_gate(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, output_dtype: torch.dtype = torch.float32
) -> Tensor:
    """`wyfold.fused_gdn_gate` by its eager backend."""
    return gates.fused_gdn_gate(g, A_log, dt_bias, output_dtype, backend="eager")


def naive_kda_gate(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, output_dtype: torch.dtype = torch.float32
) -> Tensor:
    """`wyfold.fused_kda_gate` by its eager backend."""
    return gates.fused_kda_gate(g, A_log, dt_bias, None, output_dtype, backend="eager")


def naive_kda_lowerbound_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float = -5.0,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`wyfold.fused_kda_gate`, with a lower bound, by its eager backend."""
    return gates.fused_kda_gate(g, A_log, dt_bias, lower_bound, output_dtype, backend="eager")


def _loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
) -> Result:
    """The delta rule token by token, with log decays g [B, T, HV, K or 1], in float32.

    S decays by exp(g); then S += k (beta (v - k^T S))^T, and o = scale q^T S.
    """
    check.shapes("naive", q=(q, "B T H K"), k=(k, "B T H K"), v=(v, "B T HV V"))
    check.head_groups("naive", q.shape[2], v.shape[2])
    q, k = (x.float().repeat_interleave(v.shape[2] // q.shape[2], 2) for x in (q, k))
    q, v, beta = q * (q.shape[-1] ** -0.5 if scale is None else scale), v.float(), beta.float()
    beta = beta if beta.dim() == v.dim() else beta[..., None]
    B, T, HV, V = v.shape
    state = v.new_zeros(B, HV, k.shape[-1], V) if initial_state is None else initial_state.float()
    outputs = []
    for t in range(T):
        if g is not None:
            state = state * g[:, t, :, :, None].float().exp()
        error = beta[:, t] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + k[:, t, :, :, None] * error[:, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    o = torch.stack(outputs, 1) if T else v.new_zeros(B, 0, HV, V)
    return o, state if output_final_state else None
