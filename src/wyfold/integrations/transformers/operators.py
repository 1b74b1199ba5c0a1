"""Wyfold's operators in the calling conventions of transformers' functions.

Tensors of a convolution are [B, D, T] instead of [B, T, D]. Boundaries of packed documents are over the flattened
batch, while Wyfold's operators take them with a batch of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from wyfold.ops.conv import causal_conv1d
from wyfold.ops.norm import rms_norm_gated

BOUNDARIES = ("cu_seqlens", "cu_seq_lens_q")
"""Names under which layers pass boundaries on: to the rule, and to the convolution."""


def given_boundaries(keywords: dict[str, Any]) -> Tensor | None:
    """[N+1] boundaries among a call's keywords, or None."""
    return next((keywords[name] for name in BOUNDARIES if keywords.get(name) is not None), None)


def delta_rule(
    op: str,
    operator: Callable[..., Any],
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Run a delta rule.

    Args:
        op: Name for messages.
        operator: One of Wyfold's.
        tensors: q and k [B, T, H, K], v [B, T, HV, V], g [B, T, HV] or [B, T, HV, K], beta [B, T, HV].
        initial_state: [B, HV, K, V], or None for zeros.
        output_final_state: Return the final state.
        use_qk_l2norm_in_kernel: Normalize q and k.
        cu_seqlens: [N+1] boundaries over the flattened batch, or None.

    Returns:
        o [B, T, HV, V], and the final state [B, HV, K, V] or None.

    Raises:
        ValueError: There are boundaries and a state, or the operator refuses the call.
    """
    if cu_seqlens is not None and (initial_state is not None or output_final_state):
        raise ValueError(f"{op} must be called with use_cache=False for packed documents, got a cache")
    laid = tensors if cu_seqlens is None else tuple(x.flatten(0, 1)[None] for x in tensors)
    o, state = operator(
        *laid,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )[:2]
    return o if cu_seqlens is None else o.view(tensors[2].shape), state


def conv(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, cu_seqlens: Tensor | None) -> Tensor:
    """Convolve x [B, D, T] along T with weight [D, W]."""
    B, D, T = x.shape
    rows = x.transpose(1, 2)
    laid = rows if cu_seqlens is None else rows.reshape(1, B * T, D)
    y, _ = causal_conv1d(laid, weight, bias, activation=activation, cu_seqlens=cu_seqlens)
    return y.reshape(B, T, D).transpose(1, 2)


def conv_update(x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Convolve x [B, D, T] after the columns in conv_state [B, D, W], which is updated in place."""
    y, latest = causal_conv1d(
        x.transpose(1, 2), weight, bias, initial_state=conv_state, output_final_state=True, activation=activation
    )
    # The model continues from the cache's storage, so update it in place.
    conv_state.copy_(latest)  # type: ignore[arg-type]  # requested, so not None
    return y.transpose(1, 2)


def gated_norm(module: nn.Module, x: Tensor, gate: Tensor | None, round_before_weight: bool) -> Tensor:
    """Apply a gated norm of transformers to x, by the weight, epsilon and activation of the module."""
    return rms_norm_gated(
        x,
        gate,  # type: ignore[arg-type]  # refused if None
        module.weight,  # type: ignore[arg-type]  # a parameter
        activation=module.activation,  # type: ignore[arg-type]  # a name
        eps=module.variance_epsilon,  # type: ignore[arg-type]  # a number
        round_before_weight=round_before_weight,
    )
