"""Modules under fla's names: the same parameters under the same keys, so that checkpoints load either way."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wyfold.integrations.fla.pieces import causal_conv1d, l2norm, rms_norm_gated
from wyfold.integrations.fla.recurrences import Result
from wyfold.runtime import check


class ShortConvolution(nn.Conv1d):
    """Causal convolution over time, one filter per channel, and an activation.

    Args:
        hidden_size: D.
        kernel_size: W, the filter's length, 2 to 8.
        bias: Whether to add one.
        activation: None, "silu" or "swish".
        backend: Whose kernel fla would take; Wyfold has its own choice.
        device, dtype: Of the parameters, `weight` [D, 1, W] and `bias` [D].
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = "silu",
        backend: str | None = "triton",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        check.choice("ShortConvolution", "activation", activation, (None, "silu", "swish"))
        check.choice("ShortConvolution", "kernel_size", kernel_size, range(2, 9))
        super().__init__(
            hidden_size,
            hidden_size,
            kernel_size,
            padding=kernel_size - 1,
            groups=hidden_size,
            bias=bias,
            device=device,
            dtype=dtype,
        )
        self.hidden_size, self.activation, self.backend = hidden_size, activation, backend

    def forward(  # type: ignore[override]  # a convolution with a memory has more to say than one without
        self,
        x: Tensor,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        chunk_indices: Tensor | None = None,
    ) -> Result:
        """Convolved x, and the latest inputs.

        Args:
            x: [B, T, D]; packed B = 1.
            residual: [B, T, D]. Added after the activation.
            mask: [B, T], zero where a token is padding; not with cu_seqlens. x itself is not written.
            cache: [N, D, W] the latest inputs. As in fla it is written in place where every sequence has one token
                and no gradient is kept, and nowhere else.
            output_final_state: Whether to return the latest inputs.
            cu_seqlens: [N+1] boundaries of packed sequences.
            chunk_indices: Not needed.

        Returns:
            y: [B, T, D]; and [N, D, W] or None.
        """
        if mask is not None:
            if cu_seqlens is not None:
                raise ValueError("ShortConvolution: mask must come without cu_seqlens, got both")
            check.shapes("ShortConvolution", x=(x, "B T D"), mask=(mask, "B T"))
            x = x * mask.unsqueeze(-1)
        steps = cache is not None and not torch.is_grad_enabled() and self._one_token_each(x, cu_seqlens)
        try:
            y, latest = causal_conv1d(
                x,
                self.weight.squeeze(1),
                self.bias,
                residual,
                cache,
                output_final_state or steps,
                self.activation,
                cu_seqlens=cu_seqlens,
            )
        except ValueError:
            # Its checks name a weight and an initial state, which the caller did not give.
            sizes = {"D": self.hidden_size, "W": self.kernel_size[0]}
            check.shapes("ShortConvolution", known=sizes, x=(x, "B T D"))
            sizes["N"] = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
            check.shapes("ShortConvolution", known=sizes, optional=("cache",), cache=(cache, "N D W"))
            check.floating("ShortConvolution", x=x, cache=cache)
            check.same_attribute("ShortConvolution", "device", x=x, cache=cache)
            raise
        if steps and cache is not None and latest is not None:
            latest = cache.copy_(latest)
        return y, latest if output_final_state else None

    @staticmethod
    def _one_token_each(x: Tensor, cu_seqlens: Tensor | None) -> bool:
        """Whether this is a step of decoding; boundaries are read where their number says it may be."""
        B, T = x.shape[:2]
        if cu_seqlens is None:
            return T == 1
        return B * T == cu_seqlens.shape[0] - 1 and bool((cu_seqlens.diff() == 1).all())

    @property
    def state_size(self) -> int:
        return self.hidden_size * self.kernel_size[0]


class FusedRMSNormGated(nn.Module):
    """Root-mean-square norm of the last dimension, times an activated gate.

    Args:
        hidden_size: Size of the last dimension.
        elementwise_affine: Whether there is a weight.
        eps: Added to the mean square.
        activation: "swish", "silu" or "sigmoid".
        device, dtype: Of the parameter, `weight` [hidden_size].
    """

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check.choice("FusedRMSNormGated", "activation", activation, ("swish", "silu", "sigmoid"))
        self.hidden_size, self.elementwise_affine = hidden_size, elementwise_affine
        self.eps, self.activation = eps, activation
        self.weight: nn.Parameter | None
        weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype)) if elementwise_affine else None
        self.register_parameter("weight", weight)
        self.register_parameter("bias", None)

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor:
        """[..., D] normed x under the gate g, as `wyfold.rms_norm_gated`; a residual is refused."""
        return rms_norm_gated(x, g, self.weight, None, self.activation, residual, prenorm, residual_in_fp32, self.eps)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, activation={self.activation!r}"


class L2Norm(nn.Module):
    """Rows at unit length, as `wyfold.l2norm`.

    Args:
        eps: Added to the squared length.
        output_dtype: Of the result; None: x's.
    """

    def __init__(self, eps: float = 1e-6, output_dtype: torch.dtype | None = None):
        super().__init__()
        self.eps, self.output_dtype = eps, output_dtype

    def forward(self, x: Tensor) -> Tensor:
        return l2norm(x, self.eps, self.output_dtype)
