"""Layers of the kernel repository, under the names of the hub's `kernels-community/fla`.

The package `kernels` puts a layer's `forward` in place of a function's or a module's. It requires the parameters of
what is replaced, no constructor, and no attributes besides the two flags.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from wyfold.integrations.transformers import operators
from wyfold.ops import gated_delta_rule, kda

Result = tuple[Tensor, Tensor | None]


def _boundaries(op: str, kwargs: dict[str, Any]) -> Tensor | None:
    """[N+1] boundaries of packed documents, or None; `seq_idx` alone does not reach the rule."""
    boundaries = operators.given_boundaries(kwargs)
    if boundaries is None and kwargs.get("seq_idx") is not None:
        raise ValueError(f"{op}: boundaries must be given as cu_seq_lens_q, got seq_idx alone")
    return boundaries


def _rule(
    operator: Callable[..., Any],
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    options: tuple[Tensor | None, bool, bool],
    kwargs: dict[str, Any],
) -> Result:
    """Run an operator on q, k, v, g and beta, under its own name in messages."""
    op = operator.__name__
    return operators.delta_rule(op, operator, tensors, *options, _boundaries(op, kwargs))


class chunk_gated_delta_rule(nn.Module):
    """`wyfold.chunk_gated_delta_rule` for the function `chunk_gated_delta_rule`; chunk_size is ignored."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Result:
        options = initial_state, output_final_state, use_qk_l2norm_in_kernel
        return _rule(gated_delta_rule.chunk_gated_delta_rule, (query, key, value, g, beta), options, kwargs)


class recurrent_gated_delta_rule(nn.Module):
    """`wyfold.fused_recurrent_gated_delta_rule` for the function `fused_recurrent_gated_delta_rule`."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Result:
        options = initial_state, output_final_state, use_qk_l2norm_in_kernel
        return _rule(gated_delta_rule.fused_recurrent_gated_delta_rule, (query, key, value, g, beta), options, kwargs)


class chunk_kimi_delta_attention(nn.Module):
    """`wyfold.chunk_kda` for the function `chunk_kda`; chunk_size is ignored."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Result:
        options = initial_state, output_final_state, use_qk_l2norm_in_kernel
        return _rule(kda.chunk_kda, (query, key, value, g, beta), options, kwargs)


class recurrent_kimi_delta_attention(nn.Module):
    """`wyfold.fused_recurrent_kda` for the function `fused_recurrent_kda`."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Result:
        options = initial_state, output_final_state, use_qk_l2norm_in_kernel
        return _rule(kda.fused_recurrent_kda, (query, key, value, g, beta), options, kwargs)


class causal_conv1d_fn(nn.Module):
    """`wyfold.causal_conv1d` for the function `causal_conv1d_fn`, over a sequence."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        return operators.conv(hidden_states, weight, bias, activation, _boundaries("causal_conv1d_fn", kwargs))


class causal_conv1d_update(nn.Module):
    """`wyfold.causal_conv1d` for the function `causal_conv1d_update`, over the tokens of a decoding step."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        return operators.conv_update(hidden_states, conv_state, weight, bias, activation)


class FusedRMSNormGated(nn.Module):
    """`wyfold.rms_norm_gated` for modules `RMSNormGated`; as in fla, nothing is rounded before the weight."""

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return operators.gated_norm(self, hidden_states, gate, round_before_weight=False)
