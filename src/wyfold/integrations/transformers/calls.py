"""Replacements for the models' functions: their calling conventions, with Wyfold's operators.

A call runs on Wyfold, or the operator refuses it before any work. With `on_unsupported="stock"`, a refused call runs
the replaced function and is counted under the reason. Packed calls are excepted, because that function would mix the
documents.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from wyfold.integrations.transformers.families import Family
from wyfold.integrations.transformers.report import SERVED, Report
from wyfold.ops.conv import causal_conv1d
from wyfold.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from wyfold.ops.kda import chunk_kda, fused_recurrent_kda
from wyfold.ops.norm import rms_norm_gated

Function = Callable[..., Any]


class Boundaries(threading.local):
    """Boundaries of the forward running on this thread.

    Attributes:
        current: [N+1] boundaries of packed documents, or None.
    """

    current: Tensor | None = None


@dataclass
class Calls:
    """Factory of the replacements for one model type.

    Attributes:
        family: Model type.
        reports: Reports that count calls, one for each patch that shares the replacements.
        fall_back: A refused call runs the stock function.
        on_layers: Layers pass no keywords on, as up to 5.14; boundaries then come from `boundaries`.
        boundaries: Boundaries of the running forward.
    """

    family: Family
    reports: list[Report]
    fall_back: bool
    on_layers: bool
    boundaries: Boundaries = field(default_factory=Boundaries)

    def replacing(self, purpose: str, stock: Function | None) -> Function:
        """Replacement for "chunk", "recurrent", "conv" or "conv_update"."""
        makers = {"conv": self._conv, "conv_update": self._conv_update}
        maker = makers.get(purpose)
        return maker(stock) if maker else self._rule(purpose, stock)

    def by(self, purpose: str) -> str:
        """Name of the operator that runs the call."""
        return f"wyfold.{causal_conv1d.__name__ if 'conv' in purpose else self._operator(purpose).__name__}"

    def _operator(self, purpose: str) -> Function:
        chunk, recurrent = (
            (chunk_kda, fused_recurrent_kda)
            if self.family.channel
            else (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule)
        )
        return chunk if purpose == "chunk" else recurrent

    def _serve(self, name: str, ours: Callable[[], Any], stock: Callable[[], Any] | None, packed: bool) -> Any:
        """Run `ours`; run `stock` if ours refuses and fallback is allowed, or if no patch is active any more."""
        if not self.reports and stock is not None:
            return stock()
        try:
            result = ours()
        except ValueError as refusal:  # operators check before any work, so the call can be repeated
            if not self.fall_back or stock is None or packed:
                raise
            self._count(name, str(refusal))
            return stock()
        self._count(name, SERVED)
        return result

    def _count(self, name: str, outcome: str) -> None:
        # In compiled code, a changing counter would cause recompilation at every call.
        if not torch.compiler.is_compiling():
            for report in self.reports:
                report.calls[self.family.name, name, outcome] += 1

    def _rule(self, purpose: str, stock: Function | None) -> Function:
        operator = self._operator(purpose)

        def rule(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            *,
            g: Tensor,
            beta: Tensor,
            initial_state: Tensor | None = None,
            output_final_state: bool = False,
            use_qk_l2norm_in_kernel: bool = False,
            **model_kwargs: Any,
        ) -> tuple[Tensor, Tensor | None]:
            cu = self._packed(model_kwargs)
            tensors = query, key, value, g, beta
            if cu is not None and (initial_state is not None or output_final_state):
                raise ValueError(
                    f"patch: {self.family.name} must be called with use_cache=False for packed documents, got a cache"
                )

            def ours() -> tuple[Tensor, Tensor | None]:
                laid = tensors if cu is None else tuple(x.flatten(0, 1)[None] for x in tensors)
                o, state = operator(
                    *laid,
                    initial_state=initial_state,
                    output_final_state=output_final_state,
                    use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                    cu_seqlens=cu,
                )
                return o if cu is None else o.view(value.shape), state

            def theirs() -> Any:
                return stock(  # type: ignore[misc]  # called only if stock is not None
                    query,
                    key,
                    value,
                    g=g,
                    beta=beta,
                    initial_state=initial_state,
                    output_final_state=output_final_state,
                    use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                    **model_kwargs,
                )

            return self._serve(purpose, ours, theirs if stock else None, cu is not None)

        return rule

    def _conv(self, stock: Function | None) -> Function:
        def conv(
            x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **model_kwargs: Any
        ) -> Tensor:
            cu = self._packed(model_kwargs)

            def ours() -> Tensor:
                B, D, L = x.shape
                rows = x.transpose(1, 2)
                laid = rows if cu is None else rows.reshape(1, B * L, D)
                y, _ = causal_conv1d(laid, weight, bias, activation=activation, cu_seqlens=cu)
                return y.reshape(B, L, D).transpose(1, 2)

            def theirs() -> Any:
                return stock(x, weight, bias, activation=activation, **model_kwargs)  # type: ignore[misc]

            return self._serve("conv", ours, theirs if stock else None, cu is not None)

        return conv

    def _conv_update(self, stock: Function | None) -> Function:
        def conv_update(
            x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
        ) -> Tensor:
            def ours() -> Tensor:
                y, latest = causal_conv1d(
                    x.transpose(1, 2),
                    weight,
                    bias,
                    initial_state=conv_state,
                    output_final_state=True,
                    activation=activation,
                )
                # The model continues from the cache's storage, so update it in place.
                conv_state.copy_(latest)  # type: ignore[arg-type]  # requested, so not None
                return y.transpose(1, 2)

            def theirs() -> Any:
                return stock(x, conv_state, weight, bias, activation)  # type: ignore[misc]

            return self._serve("conv_update", ours, theirs if stock else None, False)

        return conv_update

    def norm(self, stock: Function) -> Function:
        """`forward` of the gated norm's class."""

        def forward(module: nn.Module, hidden_states: Tensor, gate: Tensor) -> Tensor:
            def ours() -> Tensor:
                return rms_norm_gated(
                    hidden_states,
                    gate,
                    module.weight,  # type: ignore[arg-type]  # a parameter
                    activation=getattr(module, "activation", "silu"),  # up to 5.14 the class had no choice
                    eps=module.variance_epsilon,  # type: ignore[arg-type]  # a number
                    round_before_weight=self.family.rounds,
                )

            return self._serve("norm", ours, lambda: stock(module, hidden_states, gate), False)

        return forward

    def _packed(self, model_kwargs: dict[str, Any]) -> Tensor | None:
        """Boundaries of a call, under any of their names; None without packed documents."""
        for name in ("cu_seqlens", "cu_seq_lens_q"):
            if model_kwargs.get(name) is not None:
                return model_kwargs[name]
        boundaries = self.boundaries.current
        if boundaries is not None and self.on_layers:
            return boundaries
        if boundaries is not None:
            raise ValueError(
                f"patch: {self.family.name} must hand cu_seq_lens_q on to its layers for packed documents, got a layer "
                "called without it; this version or a wrapper drops it, so documents must come in separate rows"
            )
        if model_kwargs.get("seq_idx") is not None:
            raise ValueError(
                f"patch: {self.family.name} must be patched with packing=True to take seq_idx, got packing=False"
            )
        return None
