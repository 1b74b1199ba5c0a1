"""Softmax attention for hybrid models.

All paths attend to the same keys: those of the query's sequence at distances 0 to window - 1. Each is the cheapest for
its case: causal attention, blocks of one window, a mask over cached keys, or a loop over packed sequences.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from wyfold.context_parallel.context import ContextParallel
from wyfold.context_parallel.preceding import with_preceding_rows
from wyfold.layers.cache import LayerCache
from wyfold.layers.layer_call import sequences
from wyfold.layers.rotary import rotate
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout
from wyfold.runtime.torch_modes import autocast_dtype


class SoftmaxAttention(nn.Module):
    """Causal softmax attention with rotary positions and an optional window.

        q, k, v = W_qkv x,   q, k = rotary embeddings at their positions
        y[t] = W_o sum_s softmax_s(q[t] k[s] / sqrt(D)) v[s],   t - window < s <= t, same sequence

    Args:
        hidden_size: Width of x.
        num_heads: H, query heads.
        num_kv_heads: Key and value heads, a divisor of H (value heads of a delta rule are a multiple of H). None: H.
        head_dim: D, even.
        window: Number of keys a query attends to, its own included. None: all of them. Bounds the cache's size.
        rope_base: Longest wavelength of the rotation is about 2 pi rope_base tokens.

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: A size is out of range, or num_kv_heads does not divide num_heads.

    Source:
        Rotary positions: RoFormer, arXiv:2104.09864.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int = 128,
        *,
        window: int | None = None,
        rope_base: float = 10_000.0,
    ):
        super().__init__()
        name = "SoftmaxAttention"
        self.hidden_size = check.integer(name, "hidden_size", hidden_size, least=1)
        self.num_heads = check.integer(name, "num_heads", num_heads, least=1)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.num_kv_heads = check.integer(name, "num_kv_heads", num_kv_heads, least=1)
        if num_heads % self.num_kv_heads != 0:
            raise ValueError(f"{name}: num_kv_heads must divide num_heads = {num_heads}, got {num_kv_heads}")
        self.head_dim = check.integer(name, "head_dim", head_dim, least=2)
        if head_dim % 2 != 0:
            raise ValueError(f"{name}: head_dim must be even, since channels rotate in pairs, got {head_dim}")
        self.window = None if window is None else check.integer(name, "window", window, least=1)
        self.rope_base = check.number(name, "rope_base", rope_base)
        if self.rope_base <= 0:
            raise ValueError(f"{name}: rope_base must be > 0, got {rope_base}")
        self.qkv = nn.Linear(hidden_size, (num_heads + 2 * self.num_kv_heads) * head_dim, bias=False)
        self.out = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

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
            cache: `LayerCache` with "keys" and "values" [N, S, H, D], S <= window, and their "positions" [N, S], -1
                where there is no key; the call continues from these and replaces them. An empty cache starts new
                sequences.
            cp_context: From `wyfold.cp.build_cp_context`, instead of layout and cache. x is this rank's shard of the
                tokens. Ranks send the keys and values that precede other ranks' tokens: with a window only its last
                ones, otherwise all.

        Returns:
            y: [B, T, hidden_size], dtype of x. Exact zeros past the last boundary.

        Raises:
            TypeError: x has another dtype than the parameters outside autocast, or cache is not a `LayerCache`.
            ValueError: x, layout and cache do not fit together.
        """
        if self.window is not None and torch.jit.is_tracing():
            raise ValueError(
                "SoftmaxAttention: window must be None under torch.jit.trace, which would fix the keys that are seen "
                f"to those of the traced length, got {self.window}; use torch.export"
            )
        row = f"N S {self.num_kv_heads} {self.head_dim}"
        holds = {"keys": row, "values": row, "positions": "N S"}
        sequences(
            "SoftmaxAttention", x, self.hidden_size, self.qkv, layout, cache, holds, cp_context, self._alike_on_ranks
        )
        past = (
            Keys(cache["keys"], cache["values"], cache["positions"]) if cache is not None and "keys" in cache else None
        )
        past = past if past is not None and past.keys.shape[1] > 0 else None
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        positions = _positions(x, layout, past) if cp_context is None else cp_context.position_ids(x.device)
        qk, v = qkv.split([self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=2)
        q, k = rotate(qk, positions, self.rope_base).split([self.num_heads, self.num_kv_heads], dim=2)
        if past is not None:
            _check_precision(past, q)
        fresh = Keys(k, v, positions.expand(x.shape[:2]))
        kept: Keys | None = None
        if cp_context is not None:
            o = _attend_across(q, fresh, cp_context, self.window)
        elif layout is None:
            o, kept = _attend(q, fresh, past, self.window)
        elif cache is None and not check.readable(layout.cu_seqlens):
            o, kept = _attend_masked(q, fresh, layout, self.window), None
        else:
            o, rows = _attend_each(q, fresh, past, layout, self.window)
            kept = None if cache is None else _stack(rows)
        if cache is not None and kept is not None:
            cache["keys"], cache["values"], cache["positions"] = kept
        return self.out(o.flatten(2))

    def _alike_on_ranks(self, x: Tensor) -> dict[str, object]:
        """Properties that must be equal on all ranks: sizes of the gathered buffers, and the layer's settings."""
        settings = ("num_heads", "num_kv_heads", "head_dim", "window", "rope_base")
        return {
            "B": x.shape[0],
            **{name: getattr(self, name) for name in settings},
            "dtype of keys": autocast_dtype(x.device.type) or x.dtype,
            "requires_grad": torch.is_grad_enabled() and any(t.requires_grad for t in (x, *self.qkv.parameters())),
        }

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, window={self.window}"


class Keys(NamedTuple):
    """Keys, values and positions.

    Attributes:
        keys, values: [N, S, H, D].
        positions: [N, S] int64, -1 where there is no key.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor

    def row(self, n: int, start: int = 0, stop: int | None = None) -> Keys:
        """Row n, from `start` to `stop` along S."""
        return Keys(*(x[n : n + 1, start:stop] for x in self))

    def last(self, count: int | None) -> Keys:
        """The last `count` entries along S, or all; copied if some are dropped, so that those are freed."""
        drop = 0 if count is None else max(0, self.keys.shape[1] - count)
        return Keys(*(x[:, drop:].clone() for x in self)) if drop else self

    def then(self, other: Keys) -> Keys:
        return Keys(*(torch.cat(pair, dim=1) for pair in zip(self, other, strict=True)))


def _check_precision(past: Keys, q: Tensor) -> None:
    """Raise unless PyTorch's attention reads the cached rows beside queries of q's dtype, or autocast rounds them."""
    exact = q.dtype if autocast_dtype(q.device.type) is None else torch.promote_types(q.dtype, torch.float32)
    for name, rows in (("keys", past.keys), ("values", past.values)):
        if torch.promote_types(rows.dtype, exact) != exact:
            expected, got = (str(dtype).removeprefix("torch.") for dtype in (exact, rows.dtype))
            raise ValueError(
                f"SoftmaxAttention: cache[{name!r}] must be {expected} or narrower, as the queries are, got {got}; "
                "cast a cache by its to(dtype=...)"
            )


def _positions(x: Tensor, layout: SequenceLayout | None, past: Keys | None) -> Tensor:
    """[1 or B, T] position of each token in its sequence, counted from the first token ever cached."""
    if layout is None:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        return positions if past is None else positions + past.positions[:, -1:] + 1
    if past is None:
        return layout.positions[None]
    return (layout.positions + past.positions[layout.sequence_ids, -1] + 1)[None]


def _softmax_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """PyTorch's attention on [B, T, H, D] tensors; without a mask causal, the last query seeing the last key."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = bool(k.shape[1] != q.shape[1])  # a tensor while torch.jit traces
    T, S = q.shape[2], k.shape[2]
    if mask is None and S != T:
        # On a GPU PyTorch has kernels that need no mask of T rows and S columns, for as many key heads as query heads.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        causal: Any
        if torch.compiler.is_compiling():  # which cannot trace the object that selects those kernels
            causal = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
        else:
            from torch.nn.attention.bias import causal_lower_right  # imports PyTorch's compiler, for seconds

            causal = causal_lower_right(T, S)
        o = scaled_dot_product_attention(q, k, v, attn_mask=causal)
    else:
        o = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    return o.transpose(1, 2)


def _attend(q: Tensor, fresh: Keys, past: Keys | None, window: int | None) -> tuple[Tensor, Keys]:
    """Attention where each row is a sequence; returns the output and the keys to cache."""
    if past is None:
        return _attend_after(q, fresh.keys, fresh.values, window), fresh.last(window)
    seen = past.last(None if window is None else window - 1).then(fresh)
    mask = _visible(fresh.positions[:, :, None], seen.positions[:, None, :], window) & (seen.positions >= 0)[:, None, :]
    return _softmax_attention(q, seen.keys, seen.values, mask[:, None]), seen.last(window)


def _visible(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Mask of the keys a query attends to, from their positions in one sequence."""
    return key <= query if window is None else (key <= query) & (key > query - window)


def _attend_blocks(q: Tensor, k: Tensor, v: Tensor, window: int, head: Tensor) -> Tensor:
    """Windowed attention of T tokens in blocks of `window` queries: time and memory grow with T * window.

    A block attends to itself and the block before it, so all but the first share one mask.

    Args:
        q, k, v: [B, T, H, D].
        window: Number of keys a query attends to.
        head: [B, min(T, window), H, D] output of the first block.
    """
    B, T, H, D = q.shape
    if T <= window:
        return head
    short = -T % window
    queries = pad(q[:, window:], (0, 0, 0, 0, 0, short)).reshape(-1, window, H, D)
    # Padding keys come after every actual query, so the causal mask hides them.
    k, v = (pad(x, (0, 0, 0, 0, 0, short)).unfold(1, 2 * window, window).movedim(-1, 2).flatten(0, 1) for x in (k, v))
    token = torch.arange(2 * window, device=q.device)
    mask = _visible(token[window:, None], token, window)
    tail = _softmax_attention(queries, k, v, mask)
    return torch.cat([head, tail.reshape(B, T - window + short, H, D)[:, : T - window]], dim=1)


def _attend_masked(q: Tensor, fresh: Keys, layout: SequenceLayout, window: int | None) -> Tensor:
    """Attention of a packed buffer with one [T, T] mask, for boundaries that cannot be read on the host."""
    ids, positions = layout.sequence_ids, fresh.positions[0]
    mask = (ids[:, None] == ids) & _visible(positions[:, None], positions, window)
    # Rows past the last boundary may hold infinities, and zero times infinity would be NaN in other rows.
    real = (ids >= 0)[:, None, None]
    q, k, v = (torch.where(real, x, 0) for x in (q, fresh.keys, fresh.values))
    return torch.where(real, _softmax_attention(q, k, v, mask), 0)


def _attend_across(q: Tensor, fresh: Keys, context: ContextParallel, window: int | None) -> Tensor:
    """Attention of this rank's queries, piece by piece, to the keys that precede them on this and other ranks."""
    rows = torch.stack([fresh.keys, fresh.values]).movedim(2, 0)
    rows, before = with_preceding_rows(rows, context, None if window is None else window - 1)
    sizes = [n + piece.length for n, piece in zip(before, context.pieces, strict=True)]
    outputs = []
    for piece, seen in zip(context.pieces, rows.movedim(0, 2).split(sizes, dim=2), strict=True):
        if piece.length:
            keys, values = seen
            outputs.append(_attend_after(q[:, piece.offset : piece.offset + piece.length], keys, values, window))
    # Rows past the last boundary are zeros. The empty sum makes every rank take part in the backward of the rows.
    rest = q.new_zeros(q.shape[0], q.shape[1] - sum(o.shape[1] for o in outputs), *q.shape[2:]) + rows[:0].sum()
    return torch.cat([*outputs, rest], dim=1)


def _attend_after(q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """Attention of T queries to S >= T keys that end at the last query: fewer than `window` of them come before."""
    T, S = q.shape[1], keys.shape[1]
    if window is None or S <= window:
        return _softmax_attention(q, keys, values, None)
    first = min(T, window)
    token = torch.arange(S - T + first, device=q.device)
    mask = None if S == T else _visible(token[S - T :, None], token, window)
    head = _softmax_attention(q[:, :first], keys[:, : S - T + first], values[:, : S - T + first], mask)
    return _attend_blocks(q, keys[:, S - T :], values[:, S - T :], window, head)


def _attend_each(
    q: Tensor, fresh: Keys, past: Keys | None, layout: SequenceLayout, window: int | None
) -> tuple[Tensor, list[Keys]]:
    """Attention of a packed buffer in a loop over its sequences, without computing masked pairs across sequences."""
    borders = layout.cu_seqlens.tolist()
    outputs, kept = [], []
    for n, (start, stop) in enumerate(pairwise(borders)):
        before = None if past is None else past.row(n)
        if start == stop:
            kept.append(fresh.row(0, 0, 0) if before is None else before)
            continue
        o, keys = _attend(q[:, start:stop], fresh.row(0, start, stop), before, window)
        outputs.append(o)
        kept.append(keys)
    outputs.append(q.new_zeros(1, q.shape[1] - borders[-1], *q.shape[2:]))
    return torch.cat(outputs, dim=1), kept


def _stack(rows: list[Keys]) -> Keys:
    """Stack one row per sequence, padded in front with position -1."""
    S = max(row.keys.shape[1] for row in rows)
    short = [S - row.keys.shape[1] for row in rows]
    keys, values = (
        torch.cat([pad(x, (0, 0, 0, 0, less, 0)) for x, less in zip(tensors, short, strict=True)])
        for tensors in ([row.keys for row in rows], [row.values for row in rows])
    )
    positions = torch.cat([pad(row.positions, (less, 0), value=-1) for row, less in zip(rows, short, strict=True)])
    return Keys(keys, values, positions)
