"""RWKV-7's layer under fla's name: the parameters and the computation of `wyfold.layers.RWKV7TimeMix`."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from wyfold.integrations.fla.mixer import check_sizes, whole
from wyfold.integrations.fla.padding import (
    entering,
    index_first_axis,
    repad_hidden_states,
    update_layer_cache,
)
from wyfold.layers.cache import LayerCache
from wyfold.layers.rwkv7 import RWKV7TimeMix
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout

_NAME = "RWKV7Attention"


class Mixed(NamedTuple):
    """Results of a call, in fla's order.

    Attributes:
        y: [B, T, hidden_size].
        attentions: None, where fla's attention layers return attention weights.
        past_key_values: As given.
        v_first: [B, T, value_dim], for the next layers.
    """

    y: Tensor
    attentions: None
    past_key_values: Any
    v_first: Tensor


class RWKV7Attention(RWKV7TimeMix):
    """RWKV-7's time mixing; fla's layer of that name.

    It differs from fla's in padding: fla's state decays and erases at padding after a row's tokens, this one skips it.

    Args:
        mode: "chunk" or "fused_recurrent"; as in fla, the number of tokens decides in either mode.
        hidden_size: Width of input and output, and of all keys.
        head_dim: K. None: hidden_size / num_heads.
        num_heads: Used if head_dim is None.
        decay_low_rank_dim, gate_low_rank_dim, a_low_rank_dim, v_low_rank_dim: Inner widths of the low-rank projections.
        elementwise_affine: True. The initial values of fla's layer fail without it.
        norm_eps: eps of the group norm, divided by K.
        layer_idx: Number of the layer, also in a cache; it must be given. Layer 0 has no value residual.
        fuse_norm: Add 1e-6, not 1e-12, to the squared length of removal keys.
        value_dim: Width of all values. None: hidden_size.
        num_hidden_layers: Number of layers of the model, on which initial values depend. None: layer_idx + 1.
        ignored: Accepted and ignored, as in fla.

    Raises:
        ValueError: An argument is wrong or missing.

    Source:
        arXiv:2503.14456.
    """

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        head_dim: int | None = 64,
        num_heads: int | None = None,
        decay_low_rank_dim: int | None = None,
        gate_low_rank_dim: int | None = None,
        a_low_rank_dim: int | None = None,
        v_low_rank_dim: int | None = None,
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
        fuse_norm: bool = False,
        value_dim: int | None = None,
        num_hidden_layers: int | None = None,
        **ignored: object,
    ):
        check.choice(_NAME, "mode", mode, ("chunk", "fused_recurrent"))
        counts = {
            "hidden_size": hidden_size,
            "value_dim": value_dim,
            "decay_low_rank_dim": decay_low_rank_dim,
            "gate_low_rank_dim": gate_low_rank_dim,
            "a_low_rank_dim": a_low_rank_dim,
            "v_low_rank_dim": v_low_rank_dim,
            "num_hidden_layers": num_hidden_layers,
        }
        check_sizes(_NAME, counts, {"norm_eps": norm_eps})
        if layer_idx is None:
            raise ValueError(f"{_NAME}: layer_idx must be given, because layer 0 has no value residual, got None")
        if not elementwise_affine:
            raise ValueError(f"{_NAME}: elementwise_affine must be True, got {elementwise_affine!r}")
        if head_dim is None and num_heads is None:
            raise ValueError(f"{_NAME}: head_dim or num_heads must be given, got None for both")
        if head_dim is None:
            heads = check.integer(_NAME, "num_heads", num_heads, least=1)
            head_dim = whole(_NAME, "hidden_size / num_heads", hidden_size / heads)
        else:
            check.integer(_NAME, "head_dim", head_dim, least=1)
            heads = whole(_NAME, "hidden_size / head_dim", hidden_size / head_dim)
        values = hidden_size if value_dim is None else value_dim
        super().__init__(
            hidden_size,
            heads,
            head_dim,
            whole(_NAME, "value_dim / num_heads", values / heads),
            decay_rank=decay_low_rank_dim,
            rate_rank=a_low_rank_dim,
            value_rank=v_low_rank_dim,
            gate_rank=gate_low_rank_dim,
            norm_eps=norm_eps,
            layer_idx=layer_idx,
            num_layers=num_hidden_layers,
        )
        self.mode, self.fuse_norm, self.num_hidden_layers = mode, fuse_norm, num_hidden_layers
        self.key_dim, self.value_dim = hidden_size, values
        self.key_norm_eps = 1e-6 if fuse_norm else 1e-12

    def forward(  # type: ignore[override]  # fla's arguments and results
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        v_first: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        **ignored: object,
    ) -> Mixed:
        """Mix tokens over time.

        Args:
            hidden_states: [B, T, hidden_size]; packed B = 1.
            attention_mask: [B, S], S >= T, zero at padding; its last T columns are for these tokens.
            past_key_values: Cache of `fla.models.utils`, or another object of its interface; this layer's entry is
                read and replaced.
            use_cache: Store the states after these tokens in the cache.
            output_attentions: Accepted and ignored: there are none.
            v_first: [B, T, value_dim], values of layer 0; not read in layer 0.
            cu_seqlens: [N+1] boundaries of packed sequences; the mask is then not read.
            ignored: Keywords of the whole model, which fla's callers pass to all layers.

        Returns:
            y, attentions, past_key_values and v_first of `Mixed`, as a tuple of four.

        Raises:
            ValueError: A shape, dtype or device is wrong, or v_first is missing.
        """
        given = hidden_states, attention_mask, past_key_values, cu_seqlens
        reader = self.r_proj
        x, indices, cu_seqlens, last = entering(self, *given, width=self.hidden_size, reader=reader)
        B, T, _ = hidden_states.shape
        first = None if self.layer_idx == 0 else v_first
        if first is not None and indices is not None:
            first = index_first_axis(first.flatten(0, 1), indices)[None]
        cache = None
        if past_key_values is not None:
            held = {} if last is None else {"conv": last["conv_state"][..., None], "state": last["recurrent_state"]}
            cache = LayerCache(held)
        layout = None if cu_seqlens is None else SequenceLayout(cu_seqlens, x.shape[1])
        y, value = super().forward(x, layout=layout, cache=cache, first_value=first, return_value=True)
        states: dict[str, Tensor | None] = {"recurrent_state": None, "conv_state": None}
        if cache is not None and use_cache:
            states = {"recurrent_state": cache["state"], "conv_state": cache["conv"][..., 0]}
        update_layer_cache(self, past_key_values, **states, offset=T)
        y, value = (repad_hidden_states(rows, indices, B, T) for rows in (y, value))
        return Mixed(y, None, past_key_values, value if first is None or v_first is None else v_first)
