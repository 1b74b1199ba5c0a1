"""`gradients` in Triton: one program per chunk and key head, which loops over the head's value heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from wyfold.kernels.gradients.triton.arguments import Factors, Flags, Outputs, Scratch, Sizes, Tokens
from wyfold.kernels.gradients.triton.kernel import wyfold_gradients_triton
from wyfold.kernels.gradients.triton.terms import sum_over_chunks
from wyfold.kernels.records import GradientOutputs, TokenBorders
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import LaunchKey, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.runtime.triton_support import interpreting
from wyfold.tile.decay.triton import NEAR, gate_argument, gate_flags, gate_width
from wyfold.tile.decay.triton.gradient import gate_gradient_argument
from wyfold.tile.dot.triton import NARROWEST, contracts, exact, operand, precision, workspace
from wyfold.tile.index.triton import Packing, strides, with_strides
from wyfold.tile.index.triton.descriptors import all_or_none, has_tma, tile_descriptor, token_descriptor
from wyfold.tile.index.triton.strength import Strength


def gradients(
    q: Tensor,
    k: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    do: Tensor,
    borders: TokenBorders,
    grid: ChunkGrid,
    options: DeltaOptions,
    key: LaunchKey,
    out: GradientOutputs,
) -> None:
    """Gradients of every token and parameter.

    Args:
        q, k, g, beta, A_log, dt_bias: As given to the operator.
        do: [B, T, HV, V] gradient of the output, any strides.
        borders: From `scan_bwd`.
        grid: The call's chunk grid.
        options: As given to `prepare`.
        key: Launch configuration key.
        out: Receives the gradients; tokens past a packed batch's last boundary get zeros. None where a gradient is not
            requested.
    """
    (H, K), (HV, V), C = q.shape[2:], do.shape[2:], grid.chunk_size
    flags, gates = gate_flags(g), gate_width(g)
    config = tuned("gradients.triton", key, q.device)
    BK = min(config.blocks["BK"], max(NARROWEST, triton.next_power_of_2(K)))
    BV = min(config.blocks["BV"], max(NARROWEST, triton.next_power_of_2(V)))
    dgate = gate_gradient_argument(out.g, out.A_log, out.dt_bias, (grid.chunks, HV, -(-gates // BK)), gates)
    scratch = _scratch(q, grid, HV, channel=flags["CHANNEL"], summed=HV > H or options.qk_l2norm)
    tma = _TmaBlocks()
    if has_tma(q.device):
        whole = not flags["CHANNEL"] and grid.cu is None and grid.tokens % C == 0
        plain = g is None and not options.qk_l2norm
        tma = _tma_blocks(q, k, do, borders, out, (C, BK, BV), whole=whole, plain=plain, direct=scratch.dq is None)
    launch_kernel(
        wyfold_gradients_triton,
        grid.chunks * H,
        *(tma.qk or (q, k)),  # x_q, x_k
        *(tma.do or (do,)),  # x_do
        *(tma.borders or borders[:4]),  # x_S, x_dS, x_e, x_X
        *(tma.out or (out.q, out.k, out.v)),  # x_dq, x_dk, x_dv
        tokens=Tokens(s_q=q.stride(), s_k=k.stride(), s_do=do.stride(), S=borders.S, dS=borders.dS),
        gate=gate_argument(g, A_log, dt_bias, options),
        strength=with_strides(Strength, beta=beta, most=options.beta_most),
        outputs=with_strides(Outputs, s_dq=strides(out.q), s_dk=strides(out.k), s_dv=strides(out.v), dbeta=out.beta),
        dgate=dgate,
        scratch=scratch,
        packing=Packing(cu=grid.cu, first=grid.first, sequence=grid.sequence),
        factors=Factors(options.scale, options.unit, options.unit * float(options.erases)),
        N=grid.sequences,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        SIZES=Sizes(H=H, HV=HV, K=K, V=V, BT=C, BK=BK, BV=BV),
        FLAGS=Flags(
            PACKED=grid.cu is not None,
            ACTIVATION=options.activation,
            CLAMPED=options.clamp != 0,
            NORM=options.qk_l2norm,
            LOGIT=options.beta_logit,
            USE_TMA_TILES=tma.borders is not None,
            USE_TMA=tma.qk is not None,
            USE_TMA_DO=tma.do is not None,
            TMA_STORES=tma.out is not None,
            # Measured to help under a channel gate; not measured separately without a gate (docs/facts/hopper.md,
            # H200-6).
            PREFETCH=g is not None and not interpreting(),
            OP=operand(q.dtype),
            PRECISION=precision(q.dtype),
            EXACT=exact(q.dtype),
            **flags,
        ),
        # With a channel gate, one warp per sub-chunk.
        **{**config.options(contract=contracts(q.dtype)), "num_warps": C // NEAR if flags["CHANNEL"] else config.warps},
    )
    sum_over_chunks(dgate.A_log, out.A_log)
    sum_over_chunks(dgate.dt_bias, out.dt_bias)


def _scratch(q: Tensor, grid: ChunkGrid, HV: int, *, channel: bool, summed: bool) -> Scratch:
    """Workspace of the programs.

    Args:
        q: [B, T, H, K].
        grid: The call's chunk grid.
        HV: Value heads.
        channel: Whether the gate is per channel.
        summed: Whether dq and dk are summed, or changed, before they are stored to their tokens.
    """
    C, (H, K) = grid.chunk_size, q.shape[2:]
    pairs = near = dq = dk = None
    if channel:
        pairs = q.new_empty(grid.chunks * HV, 3, C, C, dtype=workspace(q.dtype))
        near = q.new_empty(grid.chunks * HV, C, NEAR, 2, dtype=torch.float32)
    if summed:
        dq, dk = q.new_empty(2, grid.chunks * H, C, K, dtype=torch.float32)
    return Scratch(pairs, near, dq, dk)


def gradients_key(key: LaunchKey, q: Tensor, v: Tensor) -> LaunchKey:
    """Launch configuration key: the call's key, and the number of value heads per key head."""
    return key._replace(group=v.shape[2] // q.shape[2])


class _TmaBlocks(NamedTuple):
    """TMA descriptors of a launch; None where a group of tensors has none.

    Attributes:
        borders: S, dS, e and X.
        qk, do: Tokens that are read.
        out: Gradients of q, k and v.
    """

    borders: Sequence[Any] | None = None
    qk: Sequence[Any] | None = None
    do: Sequence[Any] | None = None
    out: Sequence[Any] | None = None


def _tma_blocks(
    q: Tensor,
    k: Tensor,
    do: Tensor,
    borders: TokenBorders,
    out: GradientOutputs,
    sizes: tuple[int, int, int],
    *,
    whole: bool,
    plain: bool,
    direct: bool,
) -> _TmaBlocks:
    """The descriptors that a launch can use.

    Args:
        q, k, do, borders, out: As given to `gradients`.
        sizes: C, BK, BV.
        whole: Whether all chunks are full, and the gate is not per channel.
        plain: Whether no row sum is made of q and k. Row sums are reduced in the layout of the load, which differs
            between TMA and pointer loads, and so would the bits.
        direct: Whether gradients are stored to their tokens, without a sum in scratch memory.
    """
    C, BK, BV = sizes
    found = _TmaBlocks(_descriptors(borders, C, BK, BV))
    if not whole:
        return found
    return found._replace(
        qk=_token_descriptors((q, k), C, BK, BK) if plain else None,
        do=_token_descriptors((do,), C, BV),
        out=_token_descriptors((out.q, out.k, out.v), C, BK, BK, BV) if direct else None,
    )


def _token_descriptors(given: tuple[Tensor | None, ...], C: int, *columns: int) -> Sequence[Any] | None:
    """TMA descriptors of full chunks of tokens; None if one of the tensors has none. Partial chunks have none."""
    return all_or_none(
        given, [None if x is None else token_descriptor(x, C, n) for x, n in zip(given, columns, strict=True)]
    )


def _descriptors(borders: TokenBorders, C: int, BK: int, BV: int) -> Sequence[Any] | None:
    """TMA descriptors of the borders; None if one of the tensors has none."""
    states, rows = [(x, BV, BK) for x in (borders.S, borders.dS)], [(x, C, BV) for x in (borders.e, borders.X)]
    return all_or_none(borders[:4], [tile_descriptor(*descriptor) for descriptor in states + rows])
