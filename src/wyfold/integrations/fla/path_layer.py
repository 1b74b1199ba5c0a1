"""PaTH attention's layer under fla's name: the parameters and the computation of `wyfold.layers.PaTHAttention`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from wyfold.integrations.fla.padding import (
    entering,
    repad_hidden_states,
    update_layer_cache,
)
from wyfold.layers import path_attention
from wyfold.layers.cache import LayerCache
from wyfold.runtime.layout import SequenceLayout

_NAME = "PaTHAttention"


class PaTHAttention(path_attention.PaTHAttention):
    """PaTH attention; fla's layer of that name.

    It differs from fla's in its cache: keys are brought forward, and rounded, once in 64 tokens, not at every token. A
    mask is also read in training, and a cache is also filled without a mask.

    Args:
        hidden_size: Width of input and output.
        num_heads: Query heads, each hidden_size / num_heads wide.
        num_kv_heads: Heads of keys, values and reflections. None: num_heads.
        use_forget_gate: Add a forget gate for each query head.
        use_qk_norm: Normalise each query and key.
        layer_idx: Number of the layer in a cache.
        use_low_rank_w: Project w through 32 channels.
        use_w_shortconv: Convolve w over time.
        conv_size, conv_bias: Filter length, and whether the convolution has a bias.

    Raises:
        ValueError: An argument is wrong.

    Source:
        arXiv:2505.16381.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        num_heads: int = 32,
        num_kv_heads: int | None = None,
        use_forget_gate: bool = False,
        use_qk_norm: bool = False,
        layer_idx: int | None = None,
        use_low_rank_w: bool = True,
        use_w_shortconv: bool = True,
        conv_size: int = 3,
        conv_bias: bool = False,
    ):
        super().__init__(
            hidden_size,
            num_heads,
            num_kv_heads,
            conv_size=conv_size,
            use_forget_gate=use_forget_gate,
            use_qk_norm=use_qk_norm,
            use_low_rank_w=use_low_rank_w,
            use_w_shortconv=use_w_shortconv,
            conv_bias=conv_bias,
        )
        self.layer_idx = layer_idx
        self.register_state_dict_post_hook(_with_flas_filters)

    def forward(  # type: ignore[override]  # fla's arguments and results
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        output_attentions: bool | None = False,
        use_cache: bool | None = False,
        *,
        cu_seqlens: Tensor | None = None,
        **ignored: object,
    ) -> tuple[Tensor, None, Any]:
        """Mix tokens over time.

        Args:
            hidden_states: [B, T, hidden_size]; packed B = 1.
            attention_mask: [B, S], S >= T, zero at padding; its last T columns are for these tokens.
            past_key_values: Cache of `fla.models.utils`, or another object of its interface; this layer's entry is
                read and replaced.
            output_attentions: Accepted and ignored: there are none.
            use_cache: Store keys and values of these tokens in the cache.
            cu_seqlens: [N+1] boundaries of packed sequences; the mask is then not read.
            ignored: Keywords of the whole model, which fla's callers pass to all layers.

        Returns:
            y: [B, T, hidden_size].
            None, where fla's attention layers return attention weights.
            past_key_values, as given.

        Raises:
            ValueError: A shape, dtype or device is wrong.
        """
        given = hidden_states, attention_mask, past_key_values, cu_seqlens
        reader = self.q_proj
        x, indices, cu_seqlens, last = entering(self, *given, width=self.hidden_size, reader=reader)
        B, T, _ = hidden_states.shape
        cache = None
        if past_key_values is not None:
            conv = {} if last is None or last["conv_state"] is None else {"conv": last["conv_state"]}
            cache = LayerCache({} if last is None else {**last["attn_state"], **conv})
        layout = None if cu_seqlens is None else SequenceLayout(cu_seqlens, x.shape[1])
        y = super().forward(x, layout=layout, cache=cache)
        if cache is not None and use_cache:
            held = {name: kept for name, kept in cache.items() if name != "conv"}
            update_layer_cache(self, past_key_values, attn_state=held, conv_state=cache.get("conv"), offset=T)
        return repad_hidden_states(y, indices, B, T), None, past_key_values


def _with_flas_filters(layer: nn.Module, state_dict: dict[str, Tensor], prefix: str, _: object) -> None:
    """Give the filters of the convolution fla's shape [D, 1, W]. Both shapes load."""
    name = f"{prefix}w_conv1d.weight"
    if name in state_dict and state_dict[name].ndim == 2:
        state_dict[name] = state_dict[name].unsqueeze(1)
