"""The short convolution in front of a recurrence."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wyfold.layers.cache import LayerCache
from wyfold.ops.conv import causal_conv1d
from wyfold.parallel.context import ContextParallel
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout
from wyfold.stages import table


class ShortConvolution(nn.Module):
    """Causal convolution over time, one filter per channel, and an activation.

        y[t] = act(sum_{i < W} weight[:, i] x[t - W + 1 + i] + bias)

    Args:
        channels: D.
        conv_size: W, the filter's length, 2 to 8.
        bias: Whether to add one.
        activation: None, "silu" or "swish".
        backend: Of the operator. None for the table's choice; on CUDA "eager" has to be asked for.
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
        check.choice("ShortConvolution", "activation", activation, (None, "silu", "swish"))
        check.choice("ShortConvolution", "backend", backend, (None, *table.BACKENDS))
        self.activation, self.backend = activation, backend
        self.weight = nn.Parameter(torch.empty(channels, conv_size))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(W), as torch.nn.Conv1d does for one input channel; no bias at first."""
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        x: Tensor,
        *,
        layout: SequenceLayout | None = None,
        cache: LayerCache | None = None,
        cp_context: ContextParallel | None = None,
    ) -> Tensor:
        """Convolved x.

        Args:
            x: [B, T, D].
            layout: Boundaries of packed sequences; the filter never reaches over one.
            cache: Holds "conv" [N, D, W-1], the latest inputs; replaced.
            cp_context: In the place of layout: x is this rank's share of the tokens.

        Returns:
            y: [B, T, D], dtype of x. Exact zeros past the last boundary.
        """
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

    def extra_repr(self) -> str:
        channels, conv_size = self.weight.shape
        return f"{channels}, conv_size={conv_size}, bias={self.bias is not None}, activation={self.activation!r}"
