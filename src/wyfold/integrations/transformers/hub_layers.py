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


class _Layer(nn.Module):
    """The two flags of a layer."""

    has_backward = True
    can_torch_compile = True


def _chunk_layer(operator: Callable[..., Any]) -> type[nn.Module]:
    """Layer of an operator's chunk form, for the function of the operator's name; chunk_size is ignored."""

    class Layer(_Layer):
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
            return _rule(operator, (query, key, value, g, beta), options, kwargs)

    return Layer


def _recurrent_layer(operator: Callable[..., Any]) -> type[nn.Module]:
    """Layer of an operator's recurrent form, for the function of the operator's name."""

    class Layer(_Layer):
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
            return _rule(operator, (query, key, value, g, beta), options, kwargs)

    return Layer


chunk_gated_delta_rule = _chunk_layer(gated_delta_rule.chunk_gated_delta_rule)
recurrent_gated_delta_rule = _recurrent_layer(gated_delta_rule.fused_recurrent_gated_delta_rule)
chunk_kimi_delta_attention = _chunk_layer(kda.chunk_kda)
recurrent_kimi_delta_attention = _recurrent_layer(kda.fused_recurrent_kda)


class causal_conv1d_fn(_Layer):
    """`wyfold.causal_conv1d` for the function `causal_conv1d_fn`, over a sequence."""

    def forward(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        return operators.conv(hidden_states, weight, bias, activation, _boundaries("causal_conv1d_fn", kwargs))


class causal_conv1d_update(_Layer):
    """`wyfold.causal_conv1d` for the function `causal_conv1d_update`, over the tokens of a decoding step."""

    def forward(
        self,
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        return operators.conv_update(hidden_states, conv_state, weight, bias, activation)


class FusedRMSNormGated(_Layer):
    """`wyfold.rms_norm_gated` for modules `RMSNormGated`; as in fla, nothing is rounded before the weight."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return operators.gated_norm(self, hidden_states, gate, round_before_weight=False)
