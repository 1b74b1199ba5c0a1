"""Replacements for the models' functions: their parameters, with Wyfold's operators.

A call runs on Wyfold, or the operator refuses it before any work. With `on_unsupported="stock"`, a refused call runs
the replaced function and is counted under the reason. Packed calls are excepted, because that function would mix the
documents.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from wyfold.integrations.transformers import operators
from wyfold.integrations.transformers.families import Family
from wyfold.integrations.transformers.report import SERVED, Report
from wyfold.ops.conv import causal_conv1d
from wyfold.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from wyfold.ops.kda import chunk_kda, fused_recurrent_kda

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
        boundaries: Boundaries of the running forward, which every layer must pass on.
    """

    family: Family
    reports: list[Report]
    fall_back: bool
    boundaries: Boundaries = field(default_factory=Boundaries)

    def replacing(self, purpose: str, stock: Function) -> Function:
        """Replacement for "chunk", "recurrent", "conv", "conv_update" or "norm" (`forward` of the norm's class)."""
        makers = {
            "chunk": self._chunk,
            "recurrent": self._recurrent,
            "conv": self._conv,
            "conv_update": self._conv_update,
            "norm": self._norm,
        }
        # `updated`: with the package `kernels` installed, stock is a module, whose attributes are not a function's.
        return functools.wraps(stock, updated=())(makers[purpose](stock))

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

    def _serve(self, name: str, ours: Callable[[], Any], stock: Callable[[], Any], packed: bool) -> Any:
        """Run `ours`; run `stock` if ours refuses and fallback is allowed, or if no patch is active any more."""
        if not self.reports:
            return stock()
        try:
            result = ours()
        except ValueError as refusal:  # operators check before any work, so the call can be repeated
            if not self.fall_back or packed:
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

    def _chunk(self, stock: Function) -> Function:
        def chunk(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            g: Tensor,
            beta: Tensor,
            chunk_size: int = 64,  # splits the stock code's work, without changing what it computes
            initial_state: Tensor | None = None,
            output_final_state: bool = False,
            use_qk_l2norm_in_kernel: bool = False,
            **kwargs: Any,
        ) -> tuple[Tensor, Tensor | None]:
            tensors = query, key, value, g, beta
            options = initial_state, output_final_state, use_qk_l2norm_in_kernel
            return self._rule(
                "chunk", lambda: stock(*tensors, chunk_size, *options, **kwargs), tensors, options, kwargs
            )

        return chunk

    def _recurrent(self, stock: Function) -> Function:
        def recurrent(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            g: Tensor,
            beta: Tensor,
            initial_state: Tensor | None = None,
            output_final_state: bool = False,
            use_qk_l2norm_in_kernel: bool = False,
            **kwargs: Any,
        ) -> tuple[Tensor, Tensor | None]:
            tensors = query, key, value, g, beta
            options = initial_state, output_final_state, use_qk_l2norm_in_kernel
            return self._rule("recurrent", lambda: stock(*tensors, *options, **kwargs), tensors, options, kwargs)

        return recurrent

    def _rule(
        self,
        purpose: str,
        stock: Callable[[], Any],
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        options: tuple[Tensor | None, bool, bool],
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        cu, op = self._packed(kwargs), f"patch: {self.family.name}"
        operator = self._operator(purpose)
        return self._serve(
            purpose, lambda: operators.delta_rule(op, operator, tensors, *options, cu), stock, cu is not None
        )

    def _conv(self, stock: Function) -> Function:
        def conv(
            hidden_states: Tensor,
            weight: Tensor,
            bias: Tensor | None = None,
            activation: str | None = None,
            **kwargs: Any,
        ) -> Tensor:
            cu = self._packed(kwargs)
            return self._serve(
                "conv",
                lambda: operators.conv(hidden_states, weight, bias, activation, cu),
                lambda: stock(hidden_states, weight, bias, activation, **kwargs),
                cu is not None,
            )

        return conv

    def _conv_update(self, stock: Function) -> Function:
        def conv_update(
            hidden_states: Tensor,
            conv_state: Tensor,
            weight: Tensor,
            bias: Tensor | None = None,
            activation: str | None = None,
        ) -> Tensor:
            given = hidden_states, conv_state, weight, bias, activation
            return self._serve("conv_update", lambda: operators.conv_update(*given), lambda: stock(*given), False)

        return conv_update

    def _norm(self, stock: Function) -> Function:
        serve, rounds = self._serve, self.family.rounds

        def forward(self: nn.Module, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
            return serve(
                "norm",
                lambda: operators.gated_norm(self, hidden_states, gate, rounds),
                lambda: stock(self, hidden_states, gate),
                False,
            )

        return forward

    def _packed(self, kwargs: dict[str, Any]) -> Tensor | None:
        """Boundaries of a call; None without packed documents.

        Raises:
            ValueError: A layer dropped the boundaries of the running forward, or got `seq_idx` alone.
        """
        boundaries = operators.given_boundaries(kwargs)
        if boundaries is not None:
            return boundaries
        if self.boundaries.current is not None:
            raise ValueError(
                f"patch: {self.family.name} must hand cu_seq_lens_q on to its layers for packed documents, got a layer "
                "called without it; this version or a wrapper drops it, so documents must come in separate rows"
            )
        if kwargs.get("seq_idx") is not None:
            raise ValueError(
                f"patch: {self.family.name} must be patched with packing=True to take seq_idx, got packing=False"
            )
        return None
