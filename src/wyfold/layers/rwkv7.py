"""RWKV-7's time mixing layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wyfold.context_parallel.context import ContextParallel
from wyfold.kernels import table
from wyfold.layers.cache import LayerCache
from wyfold.layers.delta_net import head_widths
from wyfold.layers.layer_call import run_rule, sequences
from wyfold.ops.conv import causal_conv1d
from wyfold.ops.norm import l2norm
from wyfold.ops.rwkv7 import chunk_rwkv7, fused_recurrent_rwkv7
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout

NAME = "RWKV7TimeMix"
LOWEST = -math.exp(-0.5)
"""Log decay at which the decays are bounded from below."""


class RWKV7TimeMix(nn.Module):
    """RWKV-7's time mixing, as published: each token decays, erases along one vector, and writes along another.

        x_c = x_t + mu_c (x_(t-1) - x_t)                             for each c of r, w, k, v, a, g
        r, k, v = W_r x_r, W_k x_k, W_v x_v,   v <- lerp(v, v of the first layer, sigmoid(low rank of x_v))
        w = -exp(-1/2) sigmoid(low rank of x_w),   a = sigmoid(low rank of x_a),   g = low rank of x_g
        kk = k k_k / |k k_k|,   k <- k (1 + (a - 1) k_a)
        y = W_o ((group_norm(rwkv7(r, w, k, v, -kk, kk a)) + (r . r_k k) v) g)

    Parameters have the names and shapes of fla's `RWKV7Attention`, so checkpoints of that layer load, and fla loads
    those of this one. A model's first layer has no value residual. Later ones need `first_value`, the values of the
    first; `Decoder` passes them on.

    Args:
        hidden_size: Width of x.
        num_heads: H. In published models, H K is hidden_size.
        head_dim: K, width of a receptance and key, 1 to 256.
        head_v_dim: V, width of a value, 1 to 512. None: K.
        decay_rank, rate_rank, value_rank, gate_rank: Inner widths of the low-rank projections. None: RWKV-7's, which
            grow with the square root of hidden_size.
        allow_neg_eigval: Rates a in [0, 1 + exp(w)] instead of [0, 1]. Eigenvalues of a transition are then in [-1, 1],
            and reach -1, as the exchange of two things needs (arXiv:2411.12537). As published they are above
            exp(-exp(-1/2)) - 1 = -0.46.
        norm_eps: eps of the group norm, divided by K.
        layer_idx: Number of the layer among those of its kind. 0 is the first one.
        num_layers: Number of such layers in the model, on which initial values depend. None: layer_idx + 1.
        backend: Backend of every operator in the layer. None: the best available one, which on CUDA is never "eager".

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: A size is not supported by the operator, or layer_idx is no layer of num_layers.

    Source:
        RWKV-7, arXiv:2503.14456, section 4 and Appendix E.

    Examples:
        >>> import torch
        >>> from wyfold.layers import RWKV7TimeMix
        >>> first, second = (RWKV7TimeMix(32, 2, head_dim=16, layer_idx=i, num_layers=2) for i in range(2))
        >>> x = torch.randn(1, 5, 32)
        >>> y, value = first(x, return_value=True)
        >>> second(x + y, first_value=value).shape
        torch.Size([1, 5, 32])
    """

    key_norm_eps = 1e-12  # added to the squared length of removal keys

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int = 64,
        head_v_dim: int | None = None,
        *,
        decay_rank: int | None = None,
        rate_rank: int | None = None,
        value_rank: int | None = None,
        gate_rank: int | None = None,
        allow_neg_eigval: bool = False,
        norm_eps: float = 1e-5,
        layer_idx: int = 0,
        num_layers: int | None = None,
        backend: str | None = None,
    ):
        super().__init__()
        self.hidden_size = check.integer(NAME, "hidden_size", hidden_size, least=1)
        self.num_heads = check.integer(NAME, "num_heads", num_heads, least=1)
        self.head_dim, self.head_v_dim = head_widths(NAME, head_dim, head_v_dim)
        self.layer_idx = check.integer(NAME, "layer_idx", layer_idx, least=0)
        layers = layer_idx + 1 if num_layers is None else check.integer(NAME, "num_layers", num_layers, least=1)
        if layer_idx >= layers:
            raise ValueError(f"{NAME}: layer_idx must be below num_layers = {layers}, got {layer_idx}")
        check.flag(NAME, allow_neg_eigval=allow_neg_eigval)
        check.choice(NAME, "backend", backend, (None, *table.BACKENDS))
        self.num_layers, self.allow_neg_eigval, self.backend = layers, allow_neg_eigval, backend
        keys, values = num_heads * self.head_dim, num_heads * self.head_v_dim
        growth = self.head_dim / 64
        ranks = {
            "decay_rank": (decay_rank, 2.5 * growth),
            "rate_rank": (rate_rank, 2.5 * growth),
            "value_rank": (value_rank, 1.7 * growth),
            "gate_rank": (gate_rank, 5.0),
        }
        sizes = [_rank(name, given, factor * hidden_size**0.5) for name, (given, factor) in ranks.items()]
        for name in ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g"):
            self.register_parameter(name, nn.Parameter(torch.empty(1, 1, hidden_size)))
        self.k_k = nn.Parameter(torch.empty(keys))
        self.k_a = nn.Parameter(torch.empty(keys))
        self.r_k = nn.Parameter(torch.empty(num_heads, self.head_dim))
        self.r_proj = nn.Linear(hidden_size, keys, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        self.o_proj = nn.Linear(values, hidden_size, bias=False)
        depth = layer_idx / max(1, layers - 1)
        decay_bias, rate_bias = partial(_decay_bias, self.head_dim, depth), partial(_rate_bias, self.head_dim)
        self.w_lora = LowRank(hidden_size, sizes[0], keys, nn.Tanh(), decay_bias)
        self.a_lora = LowRank(hidden_size, sizes[1], keys, nn.Identity(), rate_bias)
        self.v_lora = None
        if layer_idx > 0:
            self.v_lora = LowRank(hidden_size, sizes[2], values, nn.Identity(), _value_bias)
        self.g_lora = LowRank(hidden_size, sizes[3], values, nn.Sigmoid(), None)
        eps = self.head_dim * check.epsilon(NAME, norm_eps, name="norm_eps")
        self.g_norm = HeadNorm(num_heads, values, eps, ((layer_idx + 1) / layers) ** 0.7)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the factors of the token shift and of the keys to RWKV-7's initial values."""
        shallow = 1 - self.layer_idx / self.num_layers
        powers = {"x_r": 0.2, "x_w": 0.9, "x_k": 0.7, "x_v": 0.7, "x_a": 0.9, "x_g": 0.2}
        for name, power in powers.items():
            factor = self.get_parameter(name)
            factor.copy_(1 - (_channels(factor) / self.hidden_size) ** (power * shallow))
        self.k_k.copy_(0.71 - 0.1 * _ramp(_channels(self.k_k)))
        self.k_a.fill_(1.02)
        self.r_k.fill_(-0.04)

    def forward(
        self,
        x: Tensor,
        *,
        layout: SequenceLayout | None = None,
        cache: LayerCache | None = None,
        cp_context: ContextParallel | None = None,
        first_value: Tensor | None = None,
        return_value: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Mix each sequence over time.

        Args:
            x: [B, T, hidden_size].
            layout: Boundaries of packed sequences, for which B is 1. No information crosses a boundary.
            cache: `LayerCache` with "conv" [N, hidden_size, 1], the last token's x, and "state" [N, H, K, V]; the call
                continues from these and replaces them. An empty cache starts new sequences.
            cp_context: From `wyfold.cp.build_cp_context`, instead of layout and cache. x is this rank's shard of the
                tokens; sequences cross ranks. Each rank gets its partial gradient of every parameter.
            first_value: [B, T, H V], values of the model's first layer at these tokens; None in that layer.
            return_value: Return `first_value` for the next layers as well.

        Returns:
            y: [B, T, hidden_size], dtype of x. Exact zeros past the last boundary.
            first_value: [B, T, H V]; only with `return_value`.

        Raises:
            TypeError: x has another dtype than the parameters outside autocast, or cache is not a `LayerCache`.
            ValueError: x, layout, cache and first_value do not fit together.
        """
        holds = {"conv": f"N {self.hidden_size} S", "state": f"N {self.num_heads} {self.head_dim} {self.head_v_dim}"}
        sequences(NAME, x, self.hidden_size, self.r_proj, layout, cache, holds, cp_context)
        check.flag(NAME, return_value=return_value)
        self._check_first_value(x, first_value)
        rows = self._rows(x, first_value, self._shifted(x, layout, cache, cp_context))
        o = run_rule(
            (chunk_rwkv7, fused_recurrent_rwkv7),
            rows[:6],
            layout=layout,
            cache=cache,
            cp_context=cp_context,
            backend=self.backend,
        )
        y = self._read_out(o, rows, layout if cp_context is None else cp_context.layout)
        return (y, rows.first_value) if return_value else y

    def _check_first_value(self, x: Tensor, first_value: Tensor | None) -> None:
        """Require the values of the first layer in all layers but the first."""
        if (first_value is None) != (self.layer_idx == 0):
            wanted = "None in the first layer" if self.layer_idx == 0 else "the values of the first layer"
            got = "None" if first_value is None else "a tensor"
            raise ValueError(f"{NAME}: first_value must be {wanted}, got {got} in layer {self.layer_idx}")
        if first_value is not None:
            known = {"B": x.shape[0], "T": x.shape[1]}
            width = self.num_heads * self.head_v_dim
            check.shapes(NAME, known=known, first_value=(first_value, f"B T {width}"))
            check.floating(NAME, first_value=first_value)
            check.same_attribute(NAME, "device", x=x, first_value=first_value)

    def _shifted(
        self, x: Tensor, layout: SequenceLayout | None, cache: LayerCache | None, cp_context: ContextParallel | None
    ) -> Tensor:
        """x_(t-1) - x_t [B, T, hidden_size], with zeros before a sequence: a convolution by the taps 1 and -1.

        Over ranks the filter has the length of the context, with zeros in front.
        """
        taps = torch.linspace(1, -1, 2, dtype=x.dtype, device=x.device).repeat(self.hidden_size, 1)
        if cp_context is not None and cp_context.conv1d_kernel_size is not None:
            taps = F.pad(taps, (cp_context.conv1d_kernel_size - 2, 0))
        difference, latest = causal_conv1d(
            x,
            taps,
            initial_state=None if cache is None else cache.get("conv"),
            output_final_state=cache is not None,
            cu_seqlens=layout,
            cp_context=cp_context,
            backend=self.backend,
        )
        if cache is not None and latest is not None:
            cache["conv"] = latest
        return difference

    def _rows(self, x: Tensor, first_value: Tensor | None, difference: Tensor) -> _TokenRows:
        x_r, x_w, x_k, x_v, x_a, x_g = (torch.addcmul(x, difference, self.get_parameter(f"x_{of}")) for of in "rwkvag")
        r, k, v = self.r_proj(x_r), self.k_proj(x_k), self.v_proj(x_v)
        if self.v_lora is not None:
            v = torch.lerp(v, cast(Tensor, first_value).to(v.dtype), self.v_lora(x_v).sigmoid().to(v.dtype))
        decay = self.w_lora(x_w)
        w = LOWEST * decay.to(torch.promote_types(decay.dtype, torch.float32)).sigmoid()
        rate = self.a_lora(x_a).sigmoid()
        erased = rate * (1 + w.exp()).to(rate.dtype) if self.allow_neg_eigval else rate
        removed = l2norm(self._heads(k * self.k_k), self.key_norm_eps, backend=self.backend)
        written = k * (1 + (rate - 1) * self.k_a)
        rows = self._heads(written), self._heads(v), -removed, removed * self._heads(erased)
        alike = [x.to(r.dtype) for x in rows]
        first_value = v if first_value is None else first_value
        return _TokenRows(*(self._heads(r), self._heads(w), *alike, self.g_lora(x_g), first_value))

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, H W] -> [B, T, H, W]."""
        return x.unflatten(-1, (self.num_heads, -1))

    def _read_out(self, o: Tensor, rows: _TokenRows, layout: SequenceLayout | None) -> Tensor:
        """Normalise each head, add the current token's own write, gate and project."""
        own = (rows.r * rows.k * self.r_k).sum(-1, keepdim=True) * rows.v
        y = (self.g_norm(o) + own.flatten(2)) * rows.gate
        if layout is not None:  # the norm's bias and the own write are not zero there
            past = torch.arange(o.shape[1], device=o.device) >= layout.cu_seqlens[-1]
            y = y.masked_fill(past[:, None], 0)
        return cast(Tensor, self.o_proj(y))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, layer {self.layer_idx} of {self.num_layers}"


class _TokenRows(NamedTuple):
    """What the layer makes of its tokens; the first six are the operator's arguments.

    Attributes:
        r, k, a, b: [B, T, H, K].
        w: [B, T, H, K] log decays, float32 or wider.
        v: [B, T, H, V].
        gate: [B, T, H V].
        first_value: [B, T, H V] values of the model's first layer.
    """

    r: Tensor
    w: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    gate: Tensor
    first_value: Tensor


class LowRank(nn.Module):
    """Projection through `rank` channels, with an activation between the two matrices.

    Args:
        inputs, rank, outputs: Widths.
        activation: Module between the matrices.
        bias: Initial bias of each output, from an empty tensor of that shape. None: no bias.
    """

    def __init__(
        self, inputs: int, rank: int, outputs: int, activation: nn.Module, bias: Callable[[Tensor], Tensor] | None
    ):
        super().__init__()
        self.lora = nn.Sequential(Matrix(inputs, rank, 0.0), activation, Matrix(rank, outputs, 0.1, bias))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.lora(x))


class Matrix(nn.Module):
    """Linear map with its own initial values, which no model's initialisation of `nn.Linear` replaces.

    Args:
        inputs, outputs: Widths.
        gain: Norm of each column at the start, on average; 0 for a matrix of zeros.
        bias: Initial bias of each output, from an empty tensor of that shape. None: no bias.
    """

    def __init__(self, inputs: int, outputs: int, gain: float, bias: Callable[[Tensor], Tensor] | None = None):
        super().__init__()
        self.gain, self.initial_bias = gain, bias
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = None if bias is None else nn.Parameter(torch.empty(outputs))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the matrix, and set the bias to its initial values."""
        self.weight.normal_(std=self.gain * self.weight.shape[0] ** -0.5)
        if self.bias is not None and self.initial_bias is not None:
            self.bias.copy_(self.initial_bias(self.bias))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class HeadNorm(nn.GroupNorm):
    """Layer norm of each head, with a weight and a bias for each channel.

    Args:
        heads: H.
        channels: H V.
        eps: Added to the variance.
        initial_weight: The weight at the start.
    """

    def __init__(self, heads: int, channels: int, eps: float, initial_weight: float):
        self.initial_weight = initial_weight
        super().__init__(heads, channels, eps=eps)

    def reset_parameters(self) -> None:
        """Set the weight to `initial_weight`, and the bias to zeros."""
        nn.init.constant_(self.weight, self.initial_weight)
        nn.init.zeros_(self.bias)

    def forward(self, o: Tensor) -> Tensor:
        """[B, T, H, V] -> [B, T, H V]."""
        rows = o.flatten(2)
        return super().forward(rows.flatten(0, 1)).view_as(rows)


# --- RWKV-7's initial values, which depend on the number of a channel -------------------------------------------------


def _rank(name: str, given: int | None, wanted: float) -> int:
    """The inner width of a low-rank projection: as given, or the multiple of 32 next to `wanted`."""
    return max(32, round(wanted / 32) * 32) if given is None else check.integer(NAME, name, given, least=1)


def _channels(like: Tensor) -> Tensor:
    """0, 1, .. along the last dimension; also for a sharded tensor, for which there is no `arange`."""
    return torch.ones_like(like, dtype=torch.float64).cumsum(-1) - 1


def _ramp(channels: Tensor) -> Tensor:
    """From -0.5 to 0.5."""
    return channels / max(1, channels.shape[-1] - 1) - 0.5


def _zigzag(channels: Tensor, head_dim: int) -> Tensor:
    """From -1 to 1 in each head, quadratically."""
    middle = (head_dim - 1) / 2
    offset = (channels % head_dim - middle) / max(middle, 0.5)
    return offset * offset.abs()


def _decay_bias(head_dim: int, depth: float, like: Tensor) -> Tensor:
    channels = _channels(like)
    along = (_ramp(channels) + 0.5) ** (1 + depth**0.3)
    return -5.5 + 6 * along + 2.5 * _zigzag(channels, head_dim)


def _rate_bias(head_dim: int, like: Tensor) -> Tensor:
    channels = _channels(like)
    return -0.19 + 0.3 * _zigzag(channels, head_dim) + 0.4 * _ramp(channels)


def _value_bias(like: Tensor) -> Tensor:
    return 0.73 - 0.4 * _ramp(_channels(like))
