"""Pre-norm residual block of the decoder: a mixer and an MLP."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from wyfold.context_parallel.context import ContextParallel
from wyfold.layers.cache import LayerCache
from wyfold.layers.pools import LayerPool
from wyfold.models.config import DecoderConfig
from wyfold.runtime.differentiation import exporting
from wyfold.runtime.layout import SequenceLayout

KEPT_RESULTS = frozenset(
    {"wyfold.delta_fwd", "wyfold.ttt_fwd", "wyfold.path_fwd"}
    | {f"aten._scaled_dot_product_{kind}" for kind in ("flash_attention", "efficient_attention", "cudnn_attention")}
    | {"aten._scaled_dot_product_flash_attention_for_cpu"}
)

VALUE_RESIDUAL = frozenset({"rwkv7"})
"""Mixers that blend in the values of the first one of their kind."""

_HOOKED = {"respect_saved_tensors_hooks": True}
HOOKED = _HOOKED if inspect.signature(checkpoint).parameters.keys() >= _HOOKED.keys() else {}
"""Option of `checkpoint`: hooks such as `save_on_cpu` see the kept results, too. torch has it from 2.14 on."""


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    recomputed: str | None = None  # set by `Decoder.recompute`

    def __init__(self, config: DecoderConfig, number: int, name: str, backend: str | None):
        super().__init__()
        self.has_value_residual = name in VALUE_RESIDUAL
        self.mixer_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mixer = config.mixer(name, backend=backend, number=number)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.mlp_size or -(-config.hidden_size // 6) * 16)

    def forward(
        self,
        x: Tensor,
        layout: SequenceLayout | None,
        cache: LayerCache | LayerPool | None,
        cp_context: ContextParallel | None = None,
        first_value: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Mix tokens and channels.

        Args:
            x: [B, T, hidden_size].
            layout, cache, cp_context: As of the mixer.
            first_value: Values of the first mixer with a value residual; None up to its own block. Mixers without a
                value residual do not use it.

        Returns:
            x: [B, T, hidden_size].
            first_value: Only from the first mixer with a value residual; for all later such blocks. They do not return
                it, because a sharding wrapper makes a view of what a block passes through, and warns of it.
        """
        if (
            self.recomputed is None
            or cache is not None
            or not torch.is_grad_enabled()
            or exporting()  # an exported program has no checkpoints; its results are the same
        ):
            return self._mixed(x, layout, cache, cp_context, first_value)
        # Checkpoint inside the block's forward, so that a sharding wrapper gathers parameters for the recomputation.
        selective: dict[str, Any] = {}
        if self.recomputed == "selective":  # omitted otherwise: compilers cannot trace the eager context function
            selective = {"context_fn": partial(create_selective_checkpoint_contexts, _kept), **HOOKED}
        mixed: Tensor | tuple[Tensor, Tensor] = checkpoint(
            self._mixed, x, layout, None, cp_context, first_value, use_reentrant=False, **selective
        )
        return mixed

    def _mixed(
        self,
        x: Tensor,
        layout: SequenceLayout | None,
        cache: LayerCache | LayerPool | None,
        cp_context: ContextParallel | None,
        first_value: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        where: dict[str, Any] = {"layout": layout, "cache": cache, "cp_context": cp_context}
        first = self.has_value_residual and first_value is None
        if self.has_value_residual:
            where |= {"first_value": first_value, "return_value": first}
        mixed: Any = self.mixer(self.mixer_norm(x), **where)
        y, value = mixed if first else (mixed, None)
        x = x + y
        x = x + self.mlp(self.mlp_norm(x))
        return x if value is None else (x, value)


def _kept(context: Any, operator: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    """Policy of selective checkpointing: keep the results of the recurrence or attention, recompute the rest."""
    kept = str(operator).rpartition(".")[0] in KEPT_RESULTS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class SwiGLU(nn.Module):
    """MLP W_o (silu(W_a x) * W_b x), with W_a and W_b in one matrix."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.up = nn.Linear(width, 2 * inner, bias=False)
        self.out = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.out(F.silu(gate) * value)
