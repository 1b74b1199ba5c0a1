"""The part of fla's layers that does not depend on their recurrence."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wyfold.integrations.fla.gated_norms import FusedRMSNormGated
from wyfold.integrations.fla.modules import RMSNorm, ShortConvolution
from wyfold.integrations.fla.padding import entering, repad_hidden_states, update_layer_cache
from wyfold.integrations.fla.recurrences import Result
from wyfold.ops.delta_widths import WIDEST_KEY, WIDEST_VALUE
from wyfold.runtime import check

_SHORT = 64  # tokens up to which the token-by-token form is chosen in inference, as in fla

Forwarded = tuple[Tensor, None, Any]


class Mixer(nn.Module):
    """What the layers share: projections and convolutions of q, k and v, cache, padding, and the output.

    A layer adds `_recurrence`, and modules of fla's names: `o_norm`, `o_proj` and, for a gated output, `g_proj`.
    """

    # Set by the layers, with fla's names.
    mode: str
    hidden_size: int
    num_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    key_dim: int
    value_dim: int
    use_short_conv: bool
    o_norm: nn.Module

    def _low_rank(self, width: int, bias: bool) -> nn.Sequential:
        """A projection through V channels."""
        inner = nn.Linear(self.hidden_size, self.head_v_dim, bias=False)
        return nn.Sequential(inner, nn.Linear(self.head_v_dim, width, bias=bias))

    def _check_sizes(self, keys: str, values: str) -> None:
        """Check mode, heads, and the widths K and V, which are made of the arguments named by `keys` and `values`."""
        name = type(self).__name__
        check.choice(name, "mode", self.mode, ("chunk", "fused_recurrent"))
        check.head_groups(name, self.num_heads, self.num_v_heads, keys="num_heads", values="num_v_heads")
        widths = ("K", keys, self.head_k_dim, WIDEST_KEY), ("V", values, self.head_v_dim, WIDEST_VALUE)
        for letter, product, width, most in widths:
            if not 1 <= width <= most:
                raise ValueError(
                    f"{name}: {product}, the width {letter} of a head, must be from 1 to {most}, got {width}; change "
                    "it in a new model, and run checkpoints of this width on fla"
                )

    def _add_projections(
        self, activation: str | None, conv_size: int, conv_bias: bool, widths: tuple[int, int, int] | None = None
    ) -> None:
        """Add the projections and convolutions of q, k and v.

        Args:
            activation: That of q and k after the convolutions.
            conv_size, conv_bias: Of the convolutions.
            widths: Channels of q, k and v; None for key_dim, key_dim and value_dim.
        """
        for name, width in zip("qkv", widths or (self.key_dim, self.key_dim, self.value_dim), strict=True):
            self.add_module(f"{name}_proj", nn.Linear(self.hidden_size, width, bias=False))
            if self.use_short_conv:
                act = "silu" if name == "v" else activation
                self.add_module(f"{name}_conv1d", ShortConvolution(width, conv_size, conv_bias, activation=act))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        *,
        cu_seqlens: Tensor | None = None,
        **ignored: object,
    ) -> Forwarded:
        """Mix tokens over time.

        Args:
            hidden_states: [B, T, hidden_size]; packed B = 1.
            attention_mask: [B, S], S >= T, zero at padding; its last T columns are for these tokens.
            past_key_values: Cache of `fla.models.utils`, or another object of its interface; this layer's entry is
                read and replaced.
            use_cache: Store the states after these tokens in the cache.
            output_attentions: Accepted and ignored: there are none.
            cu_seqlens: [N+1] boundaries of packed sequences; the mask is then not read.
            ignored: Keywords of the whole model, which fla's callers pass to all layers.

        Returns:
            y: [B, T, hidden_size].
            None, where fla's attention layers return attention weights.
            past_key_values, as given.

        Raises:
            TypeError: An argument has the wrong type, or a cache is given by transformers' new name, cache.
            ValueError: A shape, dtype or device is wrong, or the mode has no training.
        """
        name = type(self).__name__
        if ignored.get("cache") is not None:
            raise TypeError(f"{name}: the cache must be given as past_key_values, got cache")
        given = hidden_states, attention_mask, past_key_values, cu_seqlens
        reader = self.get_submodule("q_proj")
        x, indices, cu_seqlens, last = entering(self, *given, width=self.hidden_size, reader=reader)
        B, T, _ = hidden_states.shape
        recurrent = not torch.is_grad_enabled() and (T <= _SHORT or self.mode == "fused_recurrent")
        (q, k, v), conv_state = self._convolved(x, last, bool(use_cache), cu_seqlens)
        q, k = (rows.unflatten(-1, (-1, self.head_k_dim)) for rows in (q, k))
        v = v.unflatten(-1, (-1, self.head_v_dim))
        state = None if last is None else last["recurrent_state"]
        options = {"initial_state": state, "output_final_state": bool(use_cache), "cu_seqlens": cu_seqlens}
        o, state = self._recurrence(x, q, k, v, recurrent, options)
        update_layer_cache(self, past_key_values, recurrent_state=state, conv_state=conv_state, offset=T)
        y = self._output(x, o)
        return repad_hidden_states(y, indices, B, T), None, past_key_values

    def _convolved(
        self, x: Tensor, last: dict[str, Any] | None, keep: bool, cu_seqlens: Tensor | None
    ) -> tuple[list[Tensor], tuple[Tensor | None, ...] | None]:
        """q, k and v [B, T, width] after convolution or activation, and the convolutions' states."""
        projected = [module(x) for module in self._three("proj")]
        if not self.use_short_conv:
            return [*map(self._activated, projected[:2]), F.silu(projected[2])], None
        caches = (None, None, None) if last is None else last["conv_state"]
        found = [
            conv(rows, cache=cache, output_final_state=keep, cu_seqlens=cu_seqlens)
            for conv, rows, cache in zip(self._three("conv1d"), projected, caches, strict=True)
        ]
        return [rows for rows, _ in found], tuple(state for _, state in found)

    def _three(self, what: str) -> Iterator[nn.Module]:
        return (self.get_submodule(f"{name}_{what}") for name in "qkv")

    def _activated(self, rows: Tensor) -> Tensor:
        return F.silu(rows)

    def _recurrence(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, recurrent: bool, options: dict[str, Any]
    ) -> Result:
        raise NotImplementedError

    def _output(self, x: Tensor, o: Tensor) -> Tensor:
        """Normalise, gate and project the recurrence's output [B, T, HV, V]."""
        gate = getattr(self, "g_proj", None)
        o = self.o_norm(o) if gate is None else self.o_norm(o, gate(x).unflatten(-1, (-1, self.head_v_dim)))
        y: Tensor = self.get_submodule("o_proj")(o.flatten(-2))
        return y


def check_sizes(layer: str, counts: Mapping[str, object], numbers: Mapping[str, object]) -> None:
    """Check arguments of a layer, by their names, before sizes are computed from them; a count may be None."""
    for argument, value in counts.items():
        if value is not None:
            check.integer(layer, argument, value, least=1)
    for argument, value in numbers.items():
        check.number(layer, argument, value)


def whole(layer: str, what: str, value: float) -> int:
    """Round a size that must be a whole number."""
    if not math.isclose(value, round(value)):
        raise ValueError(f"{layer}: {what} must be a whole number, got {value}")
    return round(value)


def output_norm(width: int, eps: float, activation: str | None) -> nn.Module:
    """The norm of the output, gated if there is an activation."""
    if activation is None:
        return RMSNorm(width, eps=eps, dtype=torch.float32)
    return FusedRMSNormGated(width, eps=eps, activation=activation)


def undecayed(values: Tensor) -> nn.Parameter:
    """A float32 parameter that fla's optimizers exempt from weight decay by this attribute."""
    parameter = nn.Parameter(values.float())
    parameter._no_weight_decay = True  # type: ignore[attr-defined]
    return parameter


def step_bias(like: Tensor) -> Tensor:
    """Biases whose softplus is spread evenly in log over 0.001 to 0.1."""
    step = torch.empty_like(like).uniform_(math.log(0.001), math.log(0.1)).exp().clamp(min=1e-4)
    return step + (-(-step).expm1()).log()
