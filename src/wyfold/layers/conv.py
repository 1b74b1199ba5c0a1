"""Short causal convolution, applied to q, k and v before a recurrence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wyfold.context_parallel.context import ContextParallel
from wyfold.kernels import table
from wyfold.layers.cache import LayerCache, require_cache
from wyfold.layers.pools import LayerPool
from wyfold.ops.conv import causal_conv1d
from wyfold.ops.serving_conv import conv1d_prefill, conv1d_update
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout


class ShortConvolution(nn.Module):
    """Depthwise causal convolution over time, followed by an activation.

        y[t] = act(sum_{i < W} weight[:, i] x[t - W + 1 + i] + bias)

    Args:
        channels: D.
        conv_size: W, length of the filter, 2 to 8.
        bias: Add a learned bias.
        activation: None, "silu" or "swish" (the same as "silu").
        backend: Backend of the operator. None: the best available one, which on CUDA is never "eager".

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: A size, the activation or the backend is not supported.

    Source:
        Gated DeltaNet, arXiv:2412.06464v3, section 3.4.
    """

    def __init__(
        self,
        channels: int,
        conv_size: int = 4,
        *,
        bias: bool = False,
        activation: str | None = "silu",
        backend: str | None = None,
    ):
        super().__init__()
        check.integer("ShortConvolution", "channels", channels, least=1)
        check.choice("ShortConvolution", "conv_size", conv_size, range(2, 9))
        check.flag("ShortConvolution", bias=bias)
        check.choice("ShortConvolution", "activation", activation, (None, "silu", "swish"))
        check.choice("ShortConvolution", "backend", backend, (None, *table.BACKENDS))
        self.channels, self.conv_size = channels, conv_size
        self.activation, self.backend = activation, backend
        self.weight = nn.Parameter(torch.empty(channels, conv_size))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight uniformly within 1 / sqrt(W), as torch.nn.Conv1d for one input channel; zero the bias."""
        bound = self.conv_size**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        x: Tensor,
        *,
        layout: SequenceLayout | None = None,
        cache: LayerCache | LayerPool | None = None,
        cp_context: ContextParallel | None = None,
    ) -> Tensor:
        """Convolve x.

        Args:
            x: [B, T, D].
            layout: Boundaries of packed sequences; the filter never crosses one.
            cache: `LayerCache` with "conv" [N, D, W-1], the latest inputs, which the call replaces. Or a `LayerPool`,
                whose `conv` the call updates in place, without a gradient.
            cp_context: Instead of layout: x is this rank's shard of the tokens.

        Returns:
            y: [B, T, D], dtype of x. Exact zeros past the last boundary.

        Raises:
            TypeError: cache is neither a `LayerCache` nor a `LayerPool`.
        """
        if isinstance(cache, LayerPool):
            return self._serve(x, layout, cache)
        if cache is not None:
            cache = require_cache("ShortConvolution", cache)
        y, latest = causal_conv1d(
            x,
            self.weight,
            self.bias,
            initial_state=None if cache is None else cache.get("conv"),
            output_final_state=cache is not None,
            activation=self.activation,
            cu_seqlens=layout,
            cp_context=cp_context,
            backend=self.backend,
        )
        if cache is not None and latest is not None:
            cache["conv"] = latest
        return y

    def _serve(self, x: Tensor, layout: SequenceLayout | None, pool: LayerPool) -> Tensor:
        """`forward` with inputs in pool slots, for one token of each sequence or prompts of any lengths."""
        where: dict[str, Any] = {"state_indices": pool.slots, "has_initial_state": pool.given, "backend": self.backend}
        if layout is None and x.shape[1] == 1:
            return conv1d_update(x, pool.conv, self.weight, self.bias, activation=self.activation, **where)
        return conv1d_prefill(
            x, pool.conv, self.weight, self.bias, activation=self.activation, cu_seqlens=layout, **where
        )

    def extra_repr(self) -> str:
        return (
            f"{self.channels}, conv_size={self.conv_size}, bias={self.bias is not None}, activation={self.activation!r}"
        )
