"""Modules under fla's names, with its parameter names and shapes, so that checkpoints load in either library."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wyfold.integrations.fla.gated_norms import NormParameters
from wyfold.integrations.fla.pieces import causal_conv1d, l2norm
from wyfold.integrations.fla.recurrences import Result
from wyfold.runtime import check
from wyfold.runtime.check import UnsupportedError


class ShortConvolution(nn.Conv1d):
    """Depthwise causal convolution over time, followed by an activation; fla's module of that name.

    Args:
        hidden_size: D.
        kernel_size: W, length of the filter, 2 to 8.
        bias: Add a learned bias.
        activation: None, "silu" or "swish" (the same as "silu").
        backend: fla's kernel choice; accepted and ignored.
        device, dtype: Device and dtype of the parameters, `weight` [D, 1, W] and `bias` [D].
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

    def forward(  # type: ignore[override]  # has a cache, unlike nn.Conv1d
        self,
        x: Tensor,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        chunk_indices: Tensor | None = None,
    ) -> Result:
        """Convolve x; return the result and the latest inputs.

        Args:
            x: [B, T, D]; packed B = 1.
            residual: [B, T, D]. Added after the activation.
            mask: [B, T], zero for padding; not with cu_seqlens. x itself is not written.
            cache: [N, D, W] latest inputs. As in fla, written in place only if every sequence has one token and
                gradients are disabled.
            output_final_state: Return the latest inputs.
            cu_seqlens: [N+1] boundaries of packed sequences.
            chunk_indices: Accepted and ignored.

        Returns:
            y: [B, T, D].
            latest: [N, D, W], or None without `output_final_state`.

        Raises:
            TypeError: An argument has the wrong Python type.
            ValueError: A shape, dtype or device is wrong, or mask comes with cu_seqlens.
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
            # The operator's checks name weight and initial_state; raise in the names of this module's arguments.
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

    def step(
        self,
        x: Tensor,
        residual: Tensor | None,
        cache: Tensor | None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> Result:
        """`forward` of one token of each sequence. Without a cache, the tokens before it are zeros.

        Raises:
            ValueError: As `forward`, or a sequence has not one token.
        """
        if not self._one_token_each(x, cu_seqlens):
            raise ValueError(f"ShortConvolution.step: x must have one token of each sequence, got {list(x.shape)}")
        return self.forward(x, residual, cache=cache, output_final_state=output_final_state, cu_seqlens=cu_seqlens)

    @staticmethod
    def _one_token_each(x: Tensor, cu_seqlens: Tensor | None) -> bool:
        """Whether every sequence has one token; boundaries are read only if their number allows it."""
        check.shapes("ShortConvolution", x=(x, "B T D"))
        B, T = x.shape[:2]
        if cu_seqlens is None:
            return T == 1
        return B * T == cu_seqlens.shape[0] - 1 and bool((cu_seqlens.diff() == 1).all())

    @property
    def state_size(self) -> int:
        return self.hidden_size * self.kernel_size[0]


class L2Norm(nn.Module):
    """Normalise rows to unit length with `wyfold.l2norm`; fla's module of that name.

    Args:
        eps: Added to the squared length.
        output_dtype: Dtype of the result. None: dtype of x.
    """

    def __init__(self, eps: float = 1e-6, output_dtype: torch.dtype | None = None):
        super().__init__()
        self.eps, self.output_dtype = eps, output_dtype

    def forward(self, x: Tensor) -> Tensor:
        return l2norm(x, self.eps, self.output_dtype)


class RMSNorm(NormParameters):
    """Root-mean-square norm of the last dimension, computed in float32; fla's module of that name.

        y = x / sqrt(mean x^2 + eps) * weight + bias

    Args:
        hidden_size: Size of the last dimension.
        elementwise_affine: Use a weight.
        bias: Add a bias; ignored without a weight.
        eps: Added to the mean square.
        device, dtype: Device and dtype of the parameters, `weight` and `bias` [hidden_size].
    """

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.hidden_size, self.elementwise_affine, self.eps = hidden_size, elementwise_affine, eps
        self._add_parameters(elementwise_affine, elementwise_affine and bias, device, dtype)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise x [..., D], or x + residual.

        Args:
            residual: [..., D]. Added to x, in float32, before the norm.
            prenorm: Return the sum too.
            residual_in_fp32: Dtype of the returned sum where there is no residual whose dtype it could have.

        Returns:
            y: Dtype of x; with `prenorm` a pair of y and the sum.

        Raises:
            TypeError: An argument has the wrong Python type.
            ValueError: A shape, dtype or device is wrong.
        """
        check.floating("RMSNorm", x=x, residual=residual)
        check.same_attribute("RMSNorm", "device", x=x, residual=residual, weight=self.weight)
        check.flag("RMSNorm", prenorm=prenorm, residual_in_fp32=residual_in_fp32)
        if x.shape[-1:] != (self.hidden_size,):
            raise ValueError(f"RMSNorm: x must be [..., D], D = {self.hidden_size}, got {list(x.shape)}")
        if residual is not None and residual.shape != x.shape:
            raise ValueError(f"RMSNorm: residual must be {list(x.shape)} as x, got {list(residual.shape)}")
        total = x.float() if residual is None else x.float() + residual.float()
        y = F.rms_norm(total, (self.hidden_size,), None, self.eps)
        if self.weight is not None:
            y = y * self.weight.float()
        if self.bias is not None:
            y = y + self.bias.float()
        if not prenorm:
            return y.to(x.dtype)
        kept = residual.dtype if residual is not None else torch.float32 if residual_in_fp32 else x.dtype
        return y.to(x.dtype), total.to(kept)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}"


class GatedMLP(nn.Module):
    """SwiGLU network of one hidden layer; fla's module of that name.

        y = down_proj(silu(gate_proj(x)) * up_proj(x))

    Args:
        hidden_size: D.
        hidden_ratio: Parameters in units of D^2, from which the width follows; None is 4.
        intermediate_size: Width of the hidden layer. None: 2/3 D hidden_ratio, up to the next multiple of 256.
        hidden_act: "swish"; fla's "powlu" raises UnsupportedError.
        fuse_swiglu: fla's choice of kernels; accepted and ignored.
        powglu_power: Accepted and ignored; "powlu" alone has it.
    """

    def __init__(
        self,
        hidden_size: int,
        hidden_ratio: int | None = None,
        intermediate_size: int | None = None,
        hidden_act: str = "swish",
        fuse_swiglu: bool = True,
        powglu_power: float = 3.0,
    ):
        super().__init__()
        if hidden_act != "swish":
            raise UnsupportedError(f"GatedMLP: hidden_act={hidden_act!r} is not offered", {"wyfold": '"swish" is'})
        ratio = 4 if hidden_ratio is None else hidden_ratio
        if intermediate_size is None:
            intermediate_size = -(-int(hidden_size * ratio * 2 / 3) // 256) * 256
        self.hidden_size, self.hidden_ratio, self.intermediate_size = hidden_size, ratio, intermediate_size
        self.hidden_act, self.fuse_swiglu = hidden_act, fuse_swiglu
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor, **ignored: object) -> Tensor:
        """x [..., D] -> [..., D]; fla's callers pass keywords of the whole model, which are ignored."""
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y
