"""PaTH attention layer: softmax attention with data-dependent reflections in place of rotary positions."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad

from wyfold.context_parallel.context import ContextParallel
from wyfold.kernels import table
from wyfold.kernels.path_records import CHUNK
from wyfold.layers.cache import LayerCache
from wyfold.layers.conv import ShortConvolution
from wyfold.layers.layer_call import sequences
from wyfold.ops.norm import l2norm
from wyfold.ops.path_attention import PathKeys, parallel_path_attn
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout

RANK = 32  # of the projection of w, as published
NAME = "PaTHAttention"


class PaTHAttention(nn.Module):
    """PaTH attention as published, with an optional forget gate (PaTH-FoX).

        q, k, v = W_q x, W_k x, W_v x,   w = conv(W_2 W_1 x) / |.|,   beta = 2 sigmoid(W_b x + b_b)
        g = logsigmoid(W_g x + b_g)                                    with `use_forget_gate`
        y = W_o parallel_path_attn(q, k, v, w, beta, g)

    Parameters have the names of fla's layer, so its checkpoints load. Decoding keeps every key. The cached keys are
    brought forward, and rounded, once in 64 tokens.

    Args:
        hidden_size: Width of x.
        num_heads: HQ, query heads.
        num_kv_heads: H, heads of keys, values and reflections, a divisor of HQ. None: HQ.
        head_dim: Width of queries, keys and values: a multiple of 8 from 8 to 128. None: hidden_size / HQ.
        conv_size: Length of the short convolution of w, 2 to 8.
        use_forget_gate: Add a forget gate for each query head.
        use_qk_norm: Normalise each query and key to a root mean square of 1, times a weight that all heads share.
        use_low_rank_w: Project w through 32 channels.
        use_w_shortconv: Convolve w over time.
        conv_bias: Whether the convolution has a bias.
        gate_scaled: Whether the softmax scale multiplies the gate as well: True for fla's checkpoints.
        backend: Backend of every operator in the layer. None: the best available one, which on CUDA is never "eager".

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: A size or option is not supported by the operator.

    Source:
        PaTH Attention, arXiv:2505.16381, sections 2 and 3; forget gate: Forgetting Transformer, arXiv:2503.02130.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        conv_size: int = 3,
        *,
        use_forget_gate: bool = False,
        use_qk_norm: bool = False,
        use_low_rank_w: bool = True,
        use_w_shortconv: bool = True,
        conv_bias: bool = False,
        gate_scaled: bool = True,
        backend: str | None = None,
    ):
        super().__init__()
        flags = {
            "use_forget_gate": use_forget_gate,
            "use_qk_norm": use_qk_norm,
            "use_low_rank_w": use_low_rank_w,
            "use_w_shortconv": use_w_shortconv,
            "conv_bias": conv_bias,
            "gate_scaled": gate_scaled,
        }
        check.flag(NAME, **flags)
        self.hidden_size = check.integer(NAME, "hidden_size", hidden_size, least=1)
        self.num_heads = check.integer(NAME, "num_heads", num_heads, least=1)
        self.num_kv_heads = check.integer(
            NAME, "num_kv_heads", num_heads if num_kv_heads is None else num_kv_heads, least=1
        )
        if num_heads % self.num_kv_heads != 0:
            raise ValueError(f"{NAME}: num_kv_heads must divide num_heads = {num_heads}, got {num_kv_heads}")
        if head_dim is None and hidden_size % num_heads != 0:
            raise ValueError(
                f"{NAME}: num_heads must divide hidden_size = {hidden_size} if head_dim is None, got {num_heads}"
            )
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        check.width(NAME, "K", "head_dim", check.integer(NAME, "head_dim", self.head_dim, least=1), most=128)
        check.choice(NAME, "backend", backend, (None, *table.BACKENDS))
        self.gate_scaled, self.backend = gate_scaled, backend
        rows, keys = num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, rows, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, keys, bias=False)
        self.w_proj: nn.Module = nn.Linear(hidden_size, keys, bias=False)
        if use_low_rank_w:
            self.w_proj = nn.Sequential(nn.Linear(hidden_size, RANK, bias=False), nn.Linear(RANK, keys, bias=False))
        self.maybe_q_norm = nn.RMSNorm(self.head_dim, eps=1e-5) if use_qk_norm else nn.Identity()
        self.maybe_k_norm = nn.RMSNorm(self.head_dim, eps=1e-5) if use_qk_norm else nn.Identity()
        self.w_conv1d = ShortConvolution(keys, conv_size, bias=conv_bias, backend=backend) if use_w_shortconv else None
        self.bt_proj = nn.Linear(hidden_size, self.num_kv_heads)
        self.g_proj = nn.Linear(hidden_size, num_heads) if use_forget_gate else None
        self.o_proj = nn.Linear(rows, hidden_size, bias=False)

    def forward(
        self,
        x: Tensor,
        *,
        layout: SequenceLayout | None = None,
        cache: LayerCache | None = None,
        cp_context: ContextParallel | None = None,
    ) -> Tensor:
        """Mix each sequence over time.

        Args:
            x: [B, T, hidden_size].
            layout: Boundaries of packed sequences, for which B is 1. No information crosses a boundary.
            cache: `LayerCache` with "keys" and "values" [N, S, H, D] and their "counts" [N]; "w" [N, P, H, D] and
                "beta" [N, P, H] of the last P tokens, past which keys are not yet brought; "gates" [N, S, HQ] with a
                forget gate; and "conv" with a convolution. The call continues from these and replaces them. An empty
                cache starts new sequences.
            cp_context: None. Sequences of this layer are not divided over ranks.

        Returns:
            y: [B, T, hidden_size], dtype of x. Exact zeros past the last boundary.

        Raises:
            TypeError: x has another dtype than the parameters outside autocast, or cache is not a `LayerCache`.
            ValueError: x, layout and cache do not fit together, or a context is given.
        """
        row = f"{self.num_kv_heads} {self.head_dim}"
        holds = {"keys": f"N S {row}", "values": f"N S {row}", "counts": "N"}
        holds |= {"w": f"N P {row}", "beta": f"N P {self.num_kv_heads}"}
        if self.g_proj is not None:
            holds["gates"] = f"N S {self.num_heads}"
        if self.w_conv1d is not None:
            holds["conv"] = f"N {self.num_kv_heads * self.head_dim} columns"
        N = sequences(NAME, x, self.hidden_size, self.q_proj, layout, cache, holds, cp_context)
        if cp_context is not None:
            raise ValueError(f"{NAME}: cp_context must be None, got one; no sequence of this layer is divided by ranks")
        held = None if cache is None or len(cache) == 0 else _Held.of(cache)
        rows = self._rows(x, layout, cache)
        if cache is None:
            o, _ = self._attend(rows, layout)
            return cast(Tensor, self.o_proj(o.flatten(2)))
        held = _empty(rows, N) if held is None else held
        if layout is None:
            o, held = self._continue(rows, held, flush=held.w.shape[1] + x.shape[1] >= CHUNK)
        else:
            o, held = self._continue_each(rows, held, layout)
        cache.update({name: tensor for name, tensor in held._asdict().items() if tensor is not None})
        return cast(Tensor, self.o_proj(o.flatten(2)))

    def _rows(self, x: Tensor, layout: SequenceLayout | None, cache: LayerCache | None) -> _TokenRows:
        w = self.w_proj(x)
        if self.w_conv1d is not None:
            w = self.w_conv1d(w, layout=layout, cache=cache)
        parts = self.q_proj(x), self.k_proj(x), self.v_proj(x), w
        q, k, v, w = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        q, k = _normed(self.maybe_q_norm, q), _normed(self.maybe_k_norm, k)
        wide = torch.promote_types(x.dtype, torch.float32)
        w = l2norm(w, output_dtype=wide, backend=self.backend)
        beta = 2 * torch.sigmoid(self.bt_proj(x).to(wide))
        return _TokenRows(q, k, v, w, beta, None if self.g_proj is None else logsigmoid(self.g_proj(x).to(wide)))

    def _attend(self, rows: _TokenRows, layout: SequenceLayout | None = None, **options: Any) -> tuple[Tensor, Any]:
        return parallel_path_attn(
            *rows, gate_scaled=self.gate_scaled, cu_seqlens=layout, backend=self.backend, **options
        )

    def _continue(self, rows: _TokenRows, held: _Held, *, flush: bool) -> tuple[Tensor, _Held]:
        """Attend to the cached keys and to these tokens.

        Args:
            rows: Tokens of N sequences.
            held: The cache.
            flush: Bring all keys forward past the last token.
        """
        open_tokens = held.w.shape[1]
        S = held.keys.shape[1] - open_tokens
        gates = None
        if held.gates is not None and rows.g is not None:
            gates = torch.cat([held.gates, rows.g.to(held.gates.dtype)], dim=1)
        values = torch.cat([held.values, rows.v], dim=1)
        w, beta = torch.cat([held.w, rows.w], dim=1), torch.cat([held.beta, rows.beta], dim=1)
        k = torch.cat([held.keys[:, S:], rows.k], dim=1)
        tokens = _TokenRows(rows.q, k, values[:, S:], w, beta, None if gates is None else gates[:, S:])
        past = PathKeys(
            held.keys[:, :S], values[:, :S], None if gates is None else gates[:, :S], held.counts - open_tokens
        )
        o, keys = self._attend(tokens, past=past, use_cache=flush)
        if not flush:
            keys = torch.cat([held.keys[:, :S], k], dim=1)
        kept = (w[:, :0], beta[:, :0]) if flush else (w, beta)
        return o, _Held(keys, values, held.counts + rows.k.shape[1], *kept, gates)

    def _continue_each(self, rows: _TokenRows, held: _Held, layout: SequenceLayout) -> tuple[Tensor, _Held]:
        """`_continue` for packed sequences, one by one; all keys are brought forward."""
        borders = layout.cu_seqlens.tolist()
        found = [
            self._continue(rows.between(start, stop), held.row(n), flush=True)
            for n, (start, stop) in enumerate(pairwise(borders))
        ]
        rest = rows.q.new_zeros(1, rows.q.shape[1] - borders[-1], *rows.q.shape[2:])
        o = torch.cat([*(o for o, _ in found), rest.to(found[0][0] if found else rest)], dim=1)
        return o, _stack([kept for _, kept in found]) if found else held

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load the parameters; fla stores the filters of the convolution as [D, 1, W]."""
        name = f"{prefix}w_conv1d.weight"
        if name in state_dict and state_dict[name].ndim == 3:
            state_dict[name] = state_dict[name].squeeze(1)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"


def _normed(norm: nn.Module, rows: Tensor) -> Tensor:
    """Rows through a norm, in the dtype of its weight: under autocast PyTorch warns of two dtypes."""
    weight = getattr(norm, "weight", None)
    return cast(Tensor, norm(rows if weight is None else rows.to(weight.dtype)))


class _TokenRows(NamedTuple):
    """Token inputs of the operator, in its order.

    Attributes:
        q: [B, T, HQ, D].
        k, v, w: [B, T, H, D].
        beta: [B, T, H].
        g: [B, T, HQ]; None without a forget gate.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    beta: Tensor
    g: Tensor | None

    def between(self, start: int, stop: int) -> _TokenRows:
        """Tokens start to stop - 1."""
        return _TokenRows(*(None if x is None else x[:, start:stop] for x in self))  # type: ignore[arg-type]


class _Held(NamedTuple):
    """Contents of a cache, as `PaTHAttention.forward` documents them."""

    keys: Tensor
    values: Tensor
    counts: Tensor
    w: Tensor
    beta: Tensor
    gates: Tensor | None

    @classmethod
    def of(cls, cache: LayerCache) -> _Held:
        """The contents of a cache that is not empty."""
        keys, values, counts, w, beta = (cache[name] for name in cls._fields[:5])
        return cls(keys, values, counts, w, beta, cache.get("gates"))

    def row(self, n: int) -> _Held:
        """Sequence n, without its padding."""
        count = int(self.counts[n])
        padded = (self.keys, self.values, self.gates)
        keys, values, gates = (None if x is None else x[n : n + 1, x.shape[1] - count :] for x in padded)
        counts, w, beta = (x[n : n + 1] for x in (self.counts, self.w, self.beta))
        return _Held(cast(Tensor, keys), cast(Tensor, values), counts, w, beta, gates)


def _empty(rows: _TokenRows, N: int) -> _Held:
    keys, values, w, beta, gates = (
        None if x is None else x.new_zeros(N, 0, *x.shape[2:]) for x in (rows.k, rows.v, rows.w, rows.beta, rows.g)
    )
    counts = torch.zeros(N, dtype=torch.int64, device=rows.k.device)
    return _Held(cast(Tensor, keys), cast(Tensor, values), counts, cast(Tensor, w), cast(Tensor, beta), gates)


def _stack(rows: list[_Held]) -> _Held:
    """One row for each sequence, padded in front."""
    S = max(row.keys.shape[1] for row in rows)

    def stacked(tensors: list[Tensor]) -> Tensor:
        return torch.cat([pad(x, (0, 0) * (x.ndim - 2) + (S - x.shape[1], 0)) for x in tensors])

    return _Held(
        stacked([row.keys for row in rows]),
        stacked([row.values for row in rows]),
        torch.cat([row.counts for row in rows]),
        torch.cat([row.w for row in rows]),
        torch.cat([row.beta for row in rows]),
        None if rows[0].gates is None else stacked([cast(Tensor, row.gates) for row in rows]),
    )
