"""`gradients` in Triton: one program per chunk and key head, which loops over the head's value heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from wyfold.kernels.gradients.triton.arguments import Factors, Flags, Outputs, Scratch, Sizes, Tokens
from wyfold.kernels.gradients.triton.kernel import wyfold_gradients_triton
from wyfold.kernels.records import GradientOutputs, TokenBorders
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import LaunchKey, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.runtime.triton_support import interpreting
from wyfold.tile.decay.triton import FLOOR, NEAR, Gate, gate_flags, gate_width
from wyfold.tile.decay.triton.gradient import (
    GateGradient,
)
from wyfold.tile.decay.triton.gradient import (
    interval_sum as interval_sum,
)
from wyfold.tile.decay.triton.gradient import (
    log_gate_bwd as log_gate_bwd,
)
from wyfold.tile.decay.triton.gradient import (
    state_gate_gradient as state_gate_gradient,
)
from wyfold.tile.decay.triton.gradient import (
    store_gate_gradient as store_gate_gradient,
)
from wyfold.tile.dot.triton import NARROWEST, contracts, exact, operand, precision, workspace
from wyfold.tile.index.triton import (
    Packing,
    strides,
)
from wyfold.tile.index.triton import (
    TokenRows as TokenRows,
)
from wyfold.tile.index.triton import (
    chunk_span as chunk_span,
)
from wyfold.tile.index.triton import (
    load_tile as load_tile,
)
from wyfold.tile.index.triton import (
    load_tokens as load_tokens,
)
from wyfold.tile.index.triton import (
    store_tile as store_tile,
)
from wyfold.tile.index.triton import (
    store_token_scalars as store_token_scalars,
)
from wyfold.tile.index.triton import (
    store_tokens as store_tokens,
)
from wyfold.tile.index.triton.descriptors import all_or_none, has_tma, tile_descriptor, token_descriptor
from wyfold.tile.index.triton.strength import Strength
from wyfold.tile.index.triton.sub_chunks import (
    load_sub_chunks as load_sub_chunks,
)
from wyfold.tile.index.triton.sub_chunks import (
    load_tile_sub_chunks as load_tile_sub_chunks,
)
from wyfold.tile.index.triton.sub_chunks import (
    store_sub_chunks as store_sub_chunks,
)
from wyfold.tile.index.triton.sub_chunks import (
    store_token_sub_chunks as store_token_sub_chunks,
)


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
    dA_log = ddt_bias = pairs = near = accumulators = None
    if out.A_log is not None:
        dA_log = q.new_empty(grid.chunks, HV, -(-gates // BK), dtype=torch.float32)
    if out.dt_bias is not None:
        ddt_bias = q.new_empty(grid.chunks, HV, gates, dtype=torch.float32)
    if flags["CHANNEL"]:
        pairs = q.new_empty(grid.chunks * HV, 3, C, C, dtype=workspace(q.dtype))
        near = q.new_empty(grid.chunks * HV, C, NEAR, 2, dtype=torch.float32)
    if HV > H or options.qk_l2norm:
        accumulators = q.new_empty(2, grid.chunks * H, C, K, dtype=torch.float32)
    use_tma = has_tma(q.device)
    border_descriptors = _descriptors(borders, C, BK, BV) if use_tma else None
    qk_descriptors = do_descriptors = out_descriptors = None
    if use_tma and not flags["CHANNEL"] and grid.cu is None and grid.tokens % C == 0:
        do_descriptors = _token_descriptors((do,), C, BV)
        if accumulators is None:
            out_descriptors = _token_descriptors((out.q, out.k, out.v), C, BK, BK, BV)
        if g is None and not options.qk_l2norm:
            # Row sums of q and k are reduced in the layout of the load. It differs between TMA and pointer loads, and
            # so would the bits.
            qk_descriptors = _token_descriptors((q, k), C, BK, BK)
    (x_do,), (x_q, x_k) = do_descriptors or (do,), qk_descriptors or (q, k)
    x_dq, x_dk, x_dv = out_descriptors or (out.q, out.k, out.v)
    x_S, x_dS, x_e, x_X = border_descriptors or borders
    launch_kernel(
        wyfold_gradients_triton,
        grid.chunks * H,
        x_q=x_q,
        x_k=x_k,
        x_do=x_do,
        x_S=x_S,
        x_dS=x_dS,
        x_e=x_e,
        x_X=x_X,
        x_dq=x_dq,
        x_dk=x_dk,
        x_dv=x_dv,
        tokens=Tokens(s_q=q.stride(), s_k=k.stride(), s_do=do.stride(), S=borders.S, dS=borders.dS),
        gate=Gate(
            g=g,
            s_g=strides(g),
            A_log=A_log,
            dt_bias=dt_bias,
            lower_bound=options.lower_bound,
            clamp=options.clamp or FLOOR,
        ),
        strength=Strength(beta=beta, s_beta=strides(beta), most=options.beta_most),
        outputs=Outputs(
            s_dq=strides(out.q), s_dk=strides(out.k), s_dv=strides(out.v), dbeta=out.beta, s_dbeta=strides(out.beta)
        ),
        dgate=GateGradient(g=out.g, s_g=strides(out.g), A_log=dA_log, dt_bias=ddt_bias),
        scratch=Scratch(
            pairs=pairs,
            near=near,
            dq=None if accumulators is None else accumulators[0],
            dk=None if accumulators is None else accumulators[1],
        ),
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
            USE_TMA_TILES=border_descriptors is not None,
            USE_TMA=qk_descriptors is not None,
            USE_TMA_DO=do_descriptors is not None,
            TMA_STORES=out_descriptors is not None,
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
    if out.A_log is not None and dA_log is not None:
        out.A_log.copy_(dA_log.sum((0, 2)).view_as(out.A_log))
    if out.dt_bias is not None and ddt_bias is not None:
        out.dt_bias.copy_(ddt_bias.sum(0).view_as(out.dt_bias))


def gradients_key(key: LaunchKey, q: Tensor, v: Tensor) -> LaunchKey:
    """Launch configuration key: the call's key, and the number of value heads per key head."""
    return key._replace(group=v.shape[2] // q.shape[2])


def _token_descriptors(given: tuple[Tensor | None, ...], C: int, *columns: int) -> Sequence[Any] | None:
    """TMA descriptors of full chunks of tokens; None if one of the tensors has none. Partial chunks have none."""
    return all_or_none(
        given, [None if x is None else token_descriptor(x, C, n) for x, n in zip(given, columns, strict=True)]
    )


def _descriptors(borders: TokenBorders, C: int, BK: int, BV: int) -> Sequence[Any] | None:
    """TMA descriptors of the borders; None if one of the tensors has none."""
    states, rows = [(x, BV, BK) for x in (borders.S, borders.dS)], [(x, C, BV) for x in (borders.e, borders.X)]
    return all_or_none(borders, [tile_descriptor(*descriptor) for descriptor in states + rows])
