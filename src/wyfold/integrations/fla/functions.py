"""fla's autograd functions: `apply` with fla's order of arguments, computed by the operators of the same names.

An operator's own gradient is another autograd function, which runs inside. What is registered for these classes with a
library that watches autograd functions therefore has no effect on calls of the operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wyfold.integrations.fla.pieces import causal_conv1d
from wyfold.integrations.fla.recurrences import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from wyfold.runtime.differentiation import once_differentiable


class _Function(torch.autograd.Function):
    """Run an operator on detached arguments, and keep its graph for the backward.

    Attributes:
        operator: The operator.
        names: Its arguments in the order of `apply`.
        needless: Names of `apply` that the operator does not need.
    """

    operator: Callable[..., tuple[Tensor, Tensor | None]]
    names: tuple[str, ...]
    needless: tuple[str, ...] = ()

    @classmethod
    def run(cls, ctx: Any, given: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
        if len(given) > len(cls.names):
            raise TypeError(f"{cls.__name__}.apply: at most {len(cls.names)} arguments are taken, got {len(given)}")
        needed = [*ctx.needs_input_grad, *[False] * len(given)]
        own = [
            x.detach().requires_grad_(need) if isinstance(x, Tensor) and x.is_floating_point() else x
            for x, need in zip(given, needed, strict=False)
        ]
        named = {name: x for name, x in zip(cls.names, own, strict=False) if name not in cls.needless}
        with torch.enable_grad():
            outputs = cls.operator(**named)
        ctx.set_materialize_grads(False)
        ctx.own, ctx.outputs = own, outputs
        return tuple(None if x is None else x.detach() for x in outputs)  # type: ignore[return-value]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        reached = [
            (out, dout)
            for out, dout in zip(ctx.outputs, gradients, strict=True)
            if out is not None and dout is not None and out.requires_grad
        ]
        wanted = [x for x in ctx.own if isinstance(x, Tensor) and x.requires_grad]
        found: list[Tensor | None] = [None] * len(wanted)
        if reached and wanted:
            outputs, douts = zip(*reached, strict=True)
            found = list(torch.autograd.grad(outputs, wanted, douts, allow_unused=True))
        rest = iter(found)
        return tuple(next(rest) if isinstance(x, Tensor) and x.requires_grad else None for x in ctx.own)


class ChunkGatedDeltaRuleFunction(_Function):
    """`chunk_gated_delta_rule` as an autograd function; fla's class of that name."""

    operator = staticmethod(chunk_gated_delta_rule)
    names = (
        *("q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "state_v_first"),
        *("cu_seqlens", "cu_seqlens_cpu", "chunk_indices", "use_qk_l2norm_in_kernel", "use_gate_in_kernel"),
        *("A_log", "dt_bias", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "cp_context", "chunk_size"),
    )

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        return ChunkGatedDeltaRuleFunction.run(ctx, arguments)


class FusedRecurrentFunction(_Function):
    """`fused_recurrent_gated_delta_rule` as an autograd function, with a gradient; fla's class of that name has none.

    A_log means that the gate is computed inside.
    """

    names = (
        *("q", "k", "v", "g", "gk", "gv", "beta", "A_log", "dt_bias", "scale", "initial_state"),
        *("output_final_state", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"),
        *("state_v_first", "cu_seqlens"),
    )

    @staticmethod
    def operator(**arguments: Any) -> tuple[Tensor, Tensor | None]:
        inside = arguments.get("A_log") is not None
        return fused_recurrent_gated_delta_rule(**arguments, use_gate_in_kernel=inside)

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        return FusedRecurrentFunction.run(ctx, arguments)


class CausalConv1dFunction(_Function):
    """`causal_conv1d` as an autograd function; fla's class of that name."""

    operator = staticmethod(causal_conv1d)
    names = (
        *("x", "weight", "bias", "residual", "initial_state", "output_final_state", "activation", "cu_seqlens"),
        *("cu_seqlens_cpu", "chunk_indices", "chunk_size"),
    )
    needless = ("chunk_size",)

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        return CausalConv1dFunction.run(ctx, arguments)
