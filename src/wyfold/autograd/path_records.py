"""Records of one call of PaTH attention, and allocation of its results and gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wyfold.tile.rows.eager import widest

OPERATOR = "parallel_path_attn"


class PathTensors(NamedTuple):
    """Tensors of one call, as the public operator documents them; past_* are the fields of its `past`."""

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    beta: Tensor
    g: Tensor | None
    past_k: Tensor | None
    past_v: Tensor | None
    past_g: Tensor | None
    past_counts: Tensor | None
    cu_seqlens: Tensor | None


class PathOptions(NamedTuple):
    """Scalars of one call.

    Attributes:
        scale: Factor of products of queries and keys.
        gate: Factor of the gates.
        use_cache: Whether to return keys.
        backend: Backend of the plan.
        differentiated: Whether kernels keep what a backward needs; False for the eager form, which keeps nothing.
    """

    scale: float
    gate: float
    use_cache: bool
    backend: str
    differentiated: bool = False


TENSORS, DIFFERENTIABLE = len(PathTensors._fields), 9
TENSORS_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor w, Tensor beta, Tensor? g, Tensor? past_k, Tensor? past_v, Tensor? past_g, "
    "Tensor? past_counts, Tensor? cu_seqlens"
)
OPTIONS_SCHEMA = "float scale, float gate, bool use_cache, str backend, bool differentiated"


class PathResults(NamedTuple):
    """Results of one call.

    Attributes:
        o: [B, T, HQ, V] outputs.
        keys: Keys after the last token of each sequence; no elements without `use_cache`.
        lse: [B, T, HQ] logarithms of the sums of exponentials; of kernels, to base 2.
        rest: What the rounding of o leaves, like o. Kernels write it in 16 bits for a backward; otherwise it has no
            elements.
    """

    o: Tensor
    keys: Tensor
    lse: Tensor
    rest: Tensor


def empty_results(t: PathTensors, options: PathOptions) -> PathResults:
    """Results of a call; zeros, from metadata alone."""
    (B, T, HQ, _), (*_, H, K) = t.q.shape, t.k.shape
    past = 0 if t.past_k is None else t.past_k.shape[1]
    keys = t.k.new_zeros(B, past + t.k.shape[1], H, K) if options.use_cache else t.k.new_zeros(0)
    o = t.v.new_zeros(B, T, HQ, t.v.shape[3])
    kept = options.differentiated and o.dtype.itemsize == 2
    return PathResults(
        o,
        keys,
        t.q.new_zeros(B, T, HQ, dtype=widest(*t[:DIFFERENTIABLE])),
        torch.zeros_like(o) if kept else o.new_zeros(0),
    )


def empty_gradients(t: PathTensors) -> tuple[Tensor, ...]:
    """Gradient of every differentiable tensor; zeros, without elements for None."""
    return tuple([t.q.new_zeros(0) if x is None else x.new_zeros(x.shape) for x in t[:DIFFERENTIABLE]])
