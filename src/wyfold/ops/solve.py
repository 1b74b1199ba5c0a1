"""The triangular steps of the chunkwise form: the key Gram matrix of a chunk, and the inverse of I plus it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wyfold.autograd import workspace
from wyfold.autograd.row_alignment import aligned, alignment_copies
from wyfold.autograd.workspace import WorkspacePart
from wyfold.kernels import table
from wyfold.kernels.trial import Trial, boundary_sample, sample
from wyfold.ops.delta_widths import WIDEST_KEY
from wyfold.runtime import check
from wyfold.runtime.chunk_layout import CHUNK_SIZES, ChunkGrid
from wyfold.runtime.differentiation import refuse_transforms
from wyfold.runtime.kernel_configs import LaunchKey
from wyfold.runtime.layout import SequenceLayout, boundaries_of, legal_boundaries, packed_boundaries
from wyfold.runtime.plan import Plan, explaining
from wyfold.runtime.replay_cache import PublicOperator, planned
from wyfold.runtime.torch_ops import call, register
from wyfold.tile.rows.eager import widest


def solve_tril(
    A: Tensor,
    *,
    cu_seqlens: Tensor | SequenceLayout | None = None,
    output_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """Inverse of I plus a strictly lower triangular matrix, for every chunk of every sequence.

        X[r, :] = I[r, :] - sum_{s<r} A[r, s] X[s, :]

    Only entries strictly below the diagonal of a chunk's actual rows are read. Other entries, NaN included, change no
    bit; inside `checked` they must be zero. Row r depends only on rows up to r of its chunk, so a non-finite entry
    never leaves its chunk. No gradient.

    Args:
        A: [B, T, H, C] float32, float16, bfloat16 or float64; C = 16, 32 or 64. A token holds its row of the chunk's
            matrix. Chunks start at each sequence's first token; the last one may be short.
        cu_seqlens: [N+1] int32 or int64 boundaries of sequences packed into B = 1, or a `SequenceLayout`.
        output_dtype: Any float. None: float32, or float64 for a float64 A. The arithmetic is always that wide.
        backend: "eager", "triton" or "gluon" demands that backend. None: the best available one.

    Returns:
        X: [B, T, H, C] unit lower triangular; exact zeros past a short chunk's last column and past the last boundary.

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: A shape, dtype or device is wrong, A requires a gradient, or (inside `checked`) A is not strictly
            lower triangular.
        UnsupportedError: No backend, or not the demanded one, serves the device.

    Source:
        UT transform without its factor diag(beta): DeltaNet, arXiv:2406.06484, Eq. (10).

    Examples:
        DeltaNet from its parts: one head, two chunks of 16 tokens, with the state carried between them.

        >>> import torch, wyfold
        >>> q, k, v = (torch.nn.functional.normalize(torch.randn(1, 32, 1, 8), dim=-1) for _ in range(3))
        >>> beta = torch.rand(1, 32, 1)
        >>> A = wyfold.solve_tril(wyfold.chunk_scaled_dot_kkt(k, beta, chunk_size=16))
        >>> S, outputs = torch.zeros(8, 8), []
        >>> for chunk in (slice(0, 16), slice(16, 32)):
        ...     A_c, q_c, k_c, v_c = (x[0, chunk, 0] for x in (A, q, k, v))
        ...     u = A_c @ (beta[0, chunk] * v_c)  # values to write into a zero state
        ...     w = A_c @ (beta[0, chunk] * k_c)  # correction per unit of the entering state
        ...     written = u - w @ S
        ...     outputs.append(q_c @ S + (q_c @ k_c.T).tril() @ written)
        ...     S = S + k_c.T @ written
        >>> truth, state = wyfold.chunk_delta_rule(q, k, v, beta, scale=1.0, output_final_state=True)
        >>> bool((torch.cat(outputs) - truth[0, :, 0]).abs().max() < 1e-5), bool((S - state[0, 0]).abs().max() < 1e-5)
        (True, True)
    """
    cu, tokens = boundaries_of(cu_seqlens)
    return planned(_SOLVE_TRIL, (A, cu), (tokens, output_dtype, backend))


def _plan_solve_tril(tensors: tuple[Any, ...], values: tuple[Any, ...]) -> tuple[torch.dtype, str]:
    """Check the call; return the dtype of the result and the backend that will run it."""
    op, (A, cu), (tokens, output_dtype, backend) = "solve_tril", tensors, values
    check.shapes(op, A=(A, "B T H C"))
    check.no_gradients(op, {"A": A})
    check.floating(op, A=A)
    if A.shape[2] < 1 or A.shape[3] not in CHUNK_SIZES:
        raise ValueError(f"{op}: A must be [B, T, H, C] with H >= 1 and C = 16, 32 or 64, got {list(A.shape)}")
    check.dtype_option(op, "output_dtype", output_dtype)
    if cu is not None:
        packed_boundaries(op, A, cu, tokens)
    if check.checking_contents() and check.readable(A):
        _check_triangle(op, A, cu)
    H, C = A.shape[2:]
    stored = output_dtype or widest(A)
    per_part = lambda: _chunks_per_part(C, H, C, widest(A))

    def trial() -> Trial:
        samples = sample(A, "triangle", "BT"), None
        return Trial(op, "solve_tril", samples, (stored, "triton"), ("X",), gradients=False)

    dtypes = A.dtype, stored
    plan = _plan(op, A, cu, C, per_part, backend, dtypes, lambda it: it.launch_key(A.dtype, C), trial)
    return stored, plan.backend


def _run_solve_tril(plan: tuple[torch.dtype, str], tensors: tuple[Any, ...], values: tuple[Any, ...]) -> Tensor:
    refuse_transforms("solve_tril", tensors[0])
    found: Tensor = _Constant.apply(_solve_tril_op, *tensors, *plan)
    return found


_SOLVE_TRIL = PublicOperator(_plan_solve_tril, _run_solve_tril)


def chunk_scaled_dot_kkt(
    k: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    chunk_size: int = 64,
    cu_seqlens: Tensor | SequenceLayout | None = None,
    output_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """Decayed Gram matrix of the keys of every chunk, times the write strength: the input of `solve_tril`.

        L[r, s] = beta_r sum_d k[r, d] k[s, d] exp(g[s+1, d] + ... + g[r, d])     s < r, else 0

    No gradient.

    Args:
        k: [B, T, H, K] float32, float16, bfloat16 or float64; K from 1 to 256.
        beta: [B, T, HV] any float. Write strength, not a logit. HV is a multiple of H; value head j reads key head
            j // (HV // H).
        g: [B, T, HV] or [B, T, HV, K] any float. Natural log of the decay per token, not cumulative, <= 0; -inf resets.
            None: no decay. The sign is checked inside `wyfold.checked()` only. With a gate per channel, kernels first
            copy k and g if K is not a multiple of 16 or rows are not aligned to 16 bytes; `explain` reports it.
        chunk_size: C, 16, 32 or 64. Chunks start at each sequence's first token.
        cu_seqlens: [N+1] int32 or int64 boundaries of sequences packed into B = 1, or a `SequenceLayout`.
        output_dtype: Any float. None: float32, or float64 if an input is float64.
        backend: "eager", "triton" or "gluon" demands that backend. None: the best available one.

    Returns:
        L: [B, T, HV, chunk_size]; a token holds its row of the chunk's matrix. Exact zeros from the diagonal on, and
            past the last boundary.

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: A shape, dtype or device is wrong, an input requires a gradient, or (inside `checked`) g is
            positive.
        UnsupportedError: No backend, or not the demanded one, serves the device.

    Source:
        DeltaNet, arXiv:2406.06484, Eq. (10); with decay Gated DeltaNet, arXiv:2412.06464v3, section 3.3, and Kimi
        Linear, arXiv:2510.26692, Eq. (6).

    Examples:
        >>> import torch, wyfold
        >>> k, beta = torch.randn(1, 100, 2, 32), torch.rand(1, 100, 4)
        >>> wyfold.chunk_scaled_dot_kkt(k, beta, chunk_size=16).shape
        torch.Size([1, 100, 4, 16])
    """
    cu, tokens = boundaries_of(cu_seqlens)
    return planned(_KKT, (k, beta, g, cu), (tokens, chunk_size, output_dtype, backend))


def _plan_kkt(tensors: tuple[Any, ...], values: tuple[Any, ...]) -> tuple[torch.dtype, str]:
    """Check the call; return the dtype of the result and the backend that will run it."""
    op, (k, beta, g, cu), (tokens, chunk_size, output_dtype, backend) = "chunk_scaled_dot_kkt", tensors, values
    channel = isinstance(g, Tensor) and g.ndim == 4
    gate = (g, "B T HV K" if channel else "B T HV")
    sizes = check.shapes(op, optional=("g",), k=(k, "B T H K"), beta=(beta, "B T HV"), g=gate)
    check.no_gradients(op, {"k": k, "beta": beta, "g": g})
    H, HV = sizes["H"], sizes["HV"]
    check.head_groups(op, H, HV, keys="k", values="beta")
    check.any_width(op, "K", "k", sizes["K"], most=WIDEST_KEY)
    check.floating(op, k=k, beta=beta, g=g)
    check.same_attribute(op, "device", k=k, beta=beta, g=g)
    check.choice(op, "chunk_size", chunk_size, CHUNK_SIZES)
    check.dtype_option(op, "output_dtype", output_dtype)
    if cu is not None:
        packed_boundaries(op, k, cu, tokens)
    if g is not None:
        check.log_gates(op, g, cu)
    per_part = lambda: _chunks_per_part(chunk_size, HV, max(sizes["K"], chunk_size), widest(k, beta, g))
    stored = output_dtype or widest(k, beta, g)

    def key(it: Any) -> LaunchKey:
        found: LaunchKey = it.launch_key(k.dtype, sizes["K"], chunk_size, it.gate_kind(g))
        return found

    def trial() -> Trial:
        samples = (
            sample(k, "unit", "BT"),
            sample(beta, "strength", "BT"),
            sample(g, "decay", "BT"),
            boundary_sample(cu),
        )
        values = chunk_size, stored, "triton"
        return Trial(op, op, samples, values, ("L",), sequences=4, packed=cu is not None, gradients=False)

    copies = alignment_copies(k=k, g=g) if channel and explaining() else ()
    dtypes = *table.dtypes(k, beta, g), stored
    plan = _plan(op, k, cu, chunk_size, per_part, backend, dtypes, key, trial, copies)
    return stored, plan.backend


def _run_kkt(plan: tuple[torch.dtype, str], tensors: tuple[Any, ...], values: tuple[Any, ...]) -> Tensor:
    refuse_transforms("chunk_scaled_dot_kkt", *tensors[:3])
    found: Tensor = _Constant.apply(_kkt_op, *tensors, values[1], *plan)
    return found


_KKT = PublicOperator(_plan_kkt, _run_kkt)


class _Constant(torch.autograd.Function):
    """Wrapper that refuses forward-mode gradients and `vmap` for an operator without a gradient.

    Called directly, the operator would treat tangents as if it were linear, and `vmap` would run it row by row. A
    function with neither `jvp` nor `setup_context` refuses both.
    """

    @staticmethod
    def forward(ctx: Any, operator: Callable[..., Tensor], *arguments: Any) -> Tensor:
        found: Tensor = call(operator, *arguments)
        return found


def _check_triangle(op: str, A: Tensor, cu: Tensor | None) -> None:
    C = A.shape[-1]
    tokens = torch.arange(A.shape[1], device=A.device)
    position = tokens if cu is None else SequenceLayout(cu, A.shape[1]).positions
    above = torch.arange(C, device=A.device) >= (position % C)[:, None]  # [T, C]
    stray = ((A != 0) & (above & (position >= 0)[:, None])[:, None]).nonzero()
    if stray.shape[0]:
        b, t, h, s = stray[0].tolist()
        where = f"row {int(position[t]) % C}, column {s} of a chunk (token {t}, head {h})"
        raise ValueError(f"{op}: A must be strictly lower triangular, got {float(A[b, t, h, s])} in {where}")


def _plan(
    op: str,
    x: Tensor,
    cu: Tensor | None,
    chunk_size: int,
    per_part: Callable[[], int],
    backend: str | None,
    dtypes: tuple[torch.dtype, ...],
    key: Callable[[Any], LaunchKey],
    trial: Callable[[], Trial],
    copies: tuple[str, ...] = (),
) -> Plan:
    """Plan of one of the two operators.

    Args:
        per_part: Returns the most chunks of an eager part.
        key: Maps the kernel's module to the launch key.
        trial: Returns a small call with the same kernels.
        copies: Names of the arguments that kernels copy first.
    """
    N = None if cu is None else cu.shape[0] - 1
    stage = "solve_tril" if op == "solve_tril" else "kkt"
    return table.plan(
        op,
        x.device,
        backend,
        forward=(stage,),
        grids=() if cu is None else ("chunk_grid",),
        dtypes=dtypes,
        chunk_size=chunk_size,
        parts=lambda: workspace.part_count(x.shape[0], x.shape[1], N, chunk_size, per_part()),
        kernel_copies=copies,
        keys=lambda: [(stage, key(table.kernel_module(stage, "triton")))],
        trials=lambda: (trial(),),
        unrun=stage == "kkt" and int(x.shape[3]) % 8 != 0,
    )


def _grid(op: str, x: Tensor, cu: Tensor | None, chunk_size: int, backend: str) -> ChunkGrid:
    """Chunks of the whole call, for kernels that compute token positions; no device synchronisation."""
    B, T = x.shape[:2]
    if cu is not None and check.readable(cu):
        legal_boundaries(op, cu, T)
    grid: ChunkGrid = table.kernel_module("chunk_grid", backend).chunk_grid(B, T, chunk_size, cu)
    return grid


def _chunks_per_part(chunk_size: int, heads: int, width: int, dtype: torch.dtype) -> int:
    """Maximal number of chunks of a part, whose memory here is one [heads, chunk_size, width] tile per chunk."""
    return workspace.chunks_per_part(chunk_size * heads * width * dtype.itemsize)


def _parts(op: str, x: Tensor, cu: Tensor | None, chunk_size: int, per_part: int) -> list[WorkspacePart]:
    B, T = x.shape[:2]
    return workspace.parts(B, T, None if cu is None else legal_boundaries(op, cu, T), chunk_size, per_part)


def _solve_tril(A: Tensor, cu: Tensor | None, output_dtype: torch.dtype, backend: str) -> Tensor:
    H, C = A.shape[2:]
    if backend != "eager":
        X = A.new_empty(A.shape, dtype=output_dtype)
        table.kernel_module("solve_tril", backend).solve_tril(A, _grid("solve_tril", A, cu, C, backend), X)
        return X
    X = A.new_zeros(A.shape, dtype=output_dtype)
    for part in _parts("solve_tril", A, cu, C, _chunks_per_part(C, H, C, widest(A))):
        table.kernel_module("solve_tril", backend).solve_tril(part.block(A), part.table, part.block(X))
    return X


_solve_tril_op = register(
    "solve_tril(Tensor A, Tensor? cu_seqlens, ScalarType output_dtype, str backend) -> Tensor",
    _solve_tril,
    lambda A, cu, output_dtype, backend: A.new_zeros(A.shape, dtype=output_dtype),
)


def _kkt(
    k: Tensor,
    beta: Tensor,
    g: Tensor | None,
    cu: Tensor | None,
    chunk_size: int,
    output_dtype: torch.dtype,
    backend: str,
) -> Tensor:
    if backend != "eager":
        L = k.new_empty(*beta.shape, chunk_size, dtype=output_dtype)
        if g is not None and g.ndim == 4:
            k, g = aligned(k), aligned(g)
        table.kernel_module("kkt", backend).kkt(
            k, beta, g, _grid("chunk_scaled_dot_kkt", k, cu, chunk_size, backend), L
        )
        return L
    L = k.new_zeros(*beta.shape, chunk_size, dtype=output_dtype)
    dtype = widest(k, beta, g)
    beta = beta.unsqueeze(-1)
    if g is not None and g.ndim == 3:
        g = g.unsqueeze(-1)
    per_part = _chunks_per_part(chunk_size, beta.shape[2], max(k.shape[-1], chunk_size), dtype)
    for part in _parts("chunk_scaled_dot_kkt", k, cu, chunk_size, per_part):
        inputs = (None if x is None else part.block(x) for x in (k, beta, g))
        table.kernel_module("kkt", backend).kkt(*inputs, part.table, dtype, part.block(L))
    return L


_kkt_op = register(
    "chunk_scaled_dot_kkt(Tensor k, Tensor beta, Tensor? g, Tensor? cu_seqlens, int chunk_size, "
    "ScalarType output_dtype, str backend) -> Tensor",
    _kkt,
    lambda k, beta, g, cu, chunk_size, output_dtype, backend: k.new_zeros(*beta.shape, chunk_size, dtype=output_dtype),
)
