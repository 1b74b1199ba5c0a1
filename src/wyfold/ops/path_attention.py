"""PaTH attention: softmax attention whose positions are products of data-dependent reflections."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.autograd.path import Path
from wyfold.autograd.path_records import OPERATOR, PathOptions, PathTensors
from wyfold.kernels import table
from wyfold.kernels.path_records import CHUNK
from wyfold.kernels.trial import Sample, Trial, boundary_sample, sample
from wyfold.runtime import check
from wyfold.runtime.differentiation import apply
from wyfold.runtime.kernel_configs import LaunchKey, dtype_word
from wyfold.runtime.layout import SequenceLayout, boundaries_of, packed_boundaries
from wyfold.runtime.plan import Plan
from wyfold.runtime.replay_cache import PublicOperator, planned
from wyfold.runtime.torch_ops import in_autocast_dtype

WIDEST = 128


class PathKeys(NamedTuple):
    """Keys and values of earlier calls, for the continuation of every sequence.

    Attributes:
        keys: [N, S, H, K] keys as `use_cache` returns them: after the last token of the earlier calls.
        values: [N, S, H, V] values of the same tokens.
        gates: [N, S, HQ] log decays of the same tokens; None without a gate.
        counts: [N] int32 or int64, from 0 to S. Sequence n has the last counts[n] of the S keys. Rows before these
            are never read. The range is checked where counts may be read: on the CPU, and inside `wyfold.checked()`.
    """

    keys: Tensor
    values: Tensor
    gates: Tensor | None
    counts: Tensor


def parallel_path_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    gate_scaled: bool = True,
    cu_seqlens: Tensor | SequenceLayout | None = None,
    use_cache: bool = False,
    past: PathKeys | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """PaTH attention over whole sequences: causal softmax attention between which reflections are multiplied.

        H_t = I - beta_t w_t w_t^T        x_ij = q_i^T H_i H_{i-1} ... H_{j+1} k_j
        o_i = sum_{j <= i} softmax_j(scale x_ij + s (g_{j+1} + ... + g_i)) v_j        s = scale, or 1

    Memory grows linearly with the tokens.

    Args:
        q: [B, T, HQ, K] float32, float16, bfloat16 or float64. Any strides. Never written. HQ is a multiple of H; query
            head j reads head `j // (HQ // H)` of the other tensors. With `past`, q may hold only the last tokens of T.
        k: [B, T, H, K], dtype of q; K a multiple of 8 from 8 to 128.
        v: [B, T, H, V], dtype of q; V a multiple of 8 from 8 to 128.
        w: [B, T, H, K] any float. Directions of the reflections, rows of length 1 (`l2norm`).
        beta: [B, T, H] any float. Strengths of the reflections in [0, 2], not logits.
        g: [B, T, HQ] any float. Natural log of the forget gate per token, <= 0; minus infinity hides all earlier
            tokens. None: no gate. The sign is checked inside `wyfold.checked()` only.
        scale: Factor of products of queries and keys, > 0. None: K ** -0.5.
        gate_scaled: Whether `scale` multiplies the gate as well, as in fla. False: the gate as the paper has it.
        cu_seqlens: [N+1] int32 or int64 boundaries of packed sequences, or a `SequenceLayout`; B is 1. Rows past the
            last boundary are never read; their o is zero.
        use_cache: Return the keys for later calls.
        past: Keys of earlier calls, which the sequences continue. N is B; not with cu_seqlens.
        backend: "eager", "triton" or "gluon" demands that backend. None: the best available one. Kernels pass no
            gradients through keys: on a GPU, a call with gradients and with `past` or `use_cache` needs "eager".

    Returns:
        o: [B, T, HQ, V], dtype of v, a row for each query.
        k_cache: Keys after the last token of their sequence, [B, T, H, K], dtype of k. With `past` [B, S + T, H, K],
            the earlier keys first. None without `use_cache`.

    Differentiable once in every tensor argument, also through the keys. A gradient has its argument's dtype and is
    rounded once.

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: A shape, dtype, device or range is wrong.
        UnsupportedError: No backend, or not the demanded one, serves the call; `.reasons` explains why.
        RuntimeError: A gradient of a gradient is requested.

    Source:
        PaTH Attention, arXiv:2505.16381, Eq. (1) to (3). The gate: Forgetting Transformer, arXiv:2503.02130, section 3.

    Examples:
        A prompt of 90 tokens, then one more token.

        >>> import torch, wyfold
        >>> q, k, v = (torch.randn(1, 91, 2, 16) for _ in range(3))
        >>> w, beta = wyfold.l2norm(torch.randn(1, 91, 2, 16)), 2 * torch.rand(1, 91, 2)
        >>> tokens = q, k, v, w, beta
        >>> o, keys = wyfold.parallel_path_attn(*(x[:, :90] for x in tokens), use_cache=True)
        >>> past = wyfold.PathKeys(keys, v[:, :90], None, torch.tensor([90]))
        >>> last, _ = wyfold.parallel_path_attn(*(x[:, 90:] for x in tokens), past=past)
        >>> whole, _ = wyfold.parallel_path_attn(*tokens)
        >>> bool((torch.cat([o, last], 1) - whole).abs().max() < 1e-5)
        True
    """
    op = "parallel_path_attn"
    if past is not None and not isinstance(past, PathKeys):
        raise TypeError(f"{op}: past must be a PathKeys or None, got {type(past).__name__}")
    cu, tokens = boundaries_of(cu_seqlens)
    keys, values, gates, counts = (None,) * 4 if past is None else past
    tensors = PathTensors(q, k, v, w, beta, g, keys, values, gates, counts, cu)
    return planned(_PATH, tensors, (past is not None, tokens, scale, gate_scaled, use_cache, backend))


def _make_plan(t: PathTensors, values: tuple[Any, ...]) -> PathOptions:
    """Check the call and return its options."""
    op, (continued, tokens, scale, gate_scaled, use_cache, backend) = OPERATOR, values
    check.flag(op, gate_scaled=gate_scaled, use_cache=use_cache)
    K = _check_tokens(op, t, tokens, continued=continued)
    factor = K**-0.5 if scale is None else check.number(op, "scale", scale)
    if factor <= 0:
        raise ValueError(f"{op}: scale must be above 0, got {scale}")
    rows = in_autocast_dtype(*t[:3])
    check.same_attribute(op, "dtype", **dict(zip("qkv", rows, strict=True)))
    options = PathOptions(factor, factor if gate_scaled else 1.0, use_cache, "triton", check.any_requires_grad(t))
    chosen = _plan(_with_rows(t, *rows), options, backend).backend
    # The eager form keeps nothing for a backward, so its options do not depend on whether gradients are enabled.
    return options._replace(backend=chosen, differentiated=options.differentiated and chosen != "eager")


def _run(options: PathOptions, t: PathTensors, _: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
    if t.past_k is not None and t.past_counts is not None:
        _check_counts(t.past_counts, t.past_k.shape[1])
    o, keys, _lse, _rest = apply(OPERATOR, Path, *in_autocast_dtype(*t[:3]), *t[3:], options)
    return o, keys if options.use_cache else None


def _with_rows(t: PathTensors, q: Tensor, k: Tensor, v: Tensor) -> PathTensors:
    return t._replace(q=q, k=k, v=v)


def _plan(t: PathTensors, options: PathOptions, backend: str | None) -> Plan:
    """Launches and their backend. No kernel passes gradients through keys of earlier or for later calls."""
    differentiated = check.any_requires_grad(t)

    def keys() -> list[tuple[str, LaunchKey]]:
        (K, V), dtype = (t.k.shape[3], t.v.shape[3]), t.q.dtype
        blocks, softmax = (table.kernel_module(stage, "triton") for stage in stages)
        how = {"backward": differentiated, "far": t.q.shape[1] > blocks.BLOCK * CHUNK}
        return [
            *[("path_blocks", blocks.launch_key(dtype, K, name)) for name in blocks.launches(**how)],
            *[("path_attention", softmax.launch_key(dtype, K, V, name)) for name in softmax.launches(**how)],
        ]

    stages = "path_blocks", "path_attention"
    through_keys = ("path_cache_bwd",) * (differentiated and (options.use_cache or t.past_k is not None))
    return table.plan(
        OPERATOR,
        t.q.device,
        backend,
        forward=stages,
        backward=(*stages, *through_keys),
        dtypes=table.dtypes(t.q, t.k, t.v),
        chunk_size=CHUNK,
        keys=keys,
        sizes=()
        if t.q.dtype == torch.float64
        else (("path_attention", f"{dtype_word(t.q.dtype)} K{int(t.k.shape[3])}"),),
        trials=lambda: (_trial(t, options),),
    )


def _trial(t: PathTensors, options: PathOptions) -> Trial:
    """A small call with the kernels of this one: of several blocks, with keys of earlier calls if this one has any."""
    past = (
        (None,) * 4
        if t.past_k is None
        else (
            Sample("normal", t.k.dtype, "N", (CHUNK + 6, *t.k.shape[2:])),
            Sample("normal", t.v.dtype, "N", (CHUNK + 6, *t.v.shape[2:])),
            None if t.past_g is None else Sample("decay", t.past_g.dtype, "N", (CHUNK + 6, t.q.shape[2])),
            Sample("position", torch.int64, "N", ()),
        )
    )
    return Trial(
        OPERATOR,
        "path_fwd",
        (
            sample(t.q, "normal", "BT"),
            sample(t.k, "normal", "BT"),
            sample(t.v, "normal", "BT"),
            sample(t.w, "unit", "BT"),
            sample(t.beta, "reflection" if options.use_cache else "strength", "BT"),
            sample(t.g, "decay", "BT"),
            *past,
            boundary_sample(t.cu_seqlens),
        ),
        tuple(options),
        ("o", "keys"),
        sequences=2,
        tokens=1100,
        packed=t.cu_seqlens is not None,
        gradients=check.any_requires_grad(t),
        rounding="inputs",
    )


_PATH = PublicOperator(_make_plan, _run)


def _check_tokens(op: str, t: PathTensors, tokens: int | None, *, continued: bool) -> int:
    """Check shapes, dtypes and devices; return the width of the keys.

    Args:
        op: Operator's name, for messages.
        t: Tensors of the call.
        tokens: Second result of `boundaries_of`.
        continued: Whether there are keys of earlier calls.
    """
    sizes = check.shapes(
        op,
        optional=("g",),
        q=(t.q, "B Q HQ K" if continued else "B T HQ K"),
        k=(t.k, "B T H K"),
        v=(t.v, "B T H V"),
        w=(t.w, "B T H K"),
        beta=(t.beta, "B T H"),
        g=(t.g, "B T HQ"),
    )
    if sizes.get("Q", 0) > sizes["T"]:
        raise ValueError(f"{op}: q must have at most the T = {sizes['T']} tokens of k, got {sizes['Q']}")
    check.head_groups(op, sizes["H"], sizes["HQ"], keys="k, v, w and beta", values="q")
    for letter, names in (("K", "q, k and w"), ("V", "v")):
        check.width(op, letter, names, sizes[letter], most=WIDEST)
    check.floating(op, q=t.q, k=t.k, v=t.v, w=t.w, beta=t.beta, g=t.g)
    check.same_attribute(op, "device", q=t.q, k=t.k, v=t.v, w=t.w, beta=t.beta, g=t.g)
    if t.cu_seqlens is not None:
        packed_boundaries(op, t.k, t.cu_seqlens, tokens)
    if t.g is not None:
        check.log_gates(op, t.g, t.cu_seqlens)
    if continued:
        _check_past(op, t, {**sizes, "N": sizes["B"]})
    return int(sizes["K"])  # a tensor while torch.jit traces


def _check_past(op: str, t: PathTensors, sizes: dict[str, int]) -> None:
    if t.cu_seqlens is not None:
        raise ValueError(f"{op}: past must come without cu_seqlens, got both; call each sequence by itself")
    if (t.past_g is None) != (t.g is None):
        given = "None" if t.past_g is None else "a tensor"
        raise ValueError(f"{op}: past.gates must be given if g is, and only then, got {given}")
    named: dict[str, tuple[Tensor | None, str]] = {
        "past.keys": (t.past_k, "N S H K"),
        "past.values": (t.past_v, "N S H V"),
        "past.gates": (t.past_g, "N S HQ"),
        "past.counts": (t.past_counts, "N"),
    }
    check.shapes(op, optional=("past.gates",), known=sizes, **named)
    tensors = {name: x for name, (x, _) in named.items()}
    check.same_attribute(op, "device", k=t.k, **tensors)
    counts = {"past.counts": tensors.pop("past.counts")}
    check.floating(op, check.INDICES, **counts)
    check.floating(op, check.FLOATS, **tensors)


def _check_counts(counts: Tensor, S: int) -> None:
    if check.readable(counts) and bool(((counts < 0) | (counts > S)).any()):
        raise ValueError(f"{OPERATOR}: past.counts must be from 0 to S = {S}, got {counts.tolist()}")
