"""`scan_bwd` in Triton: two halves of one grid; each program holds a state, or its gradient, in registers.

forward half:  store S, then as `scan` without output; store e = W R, whose sum starts from the rounding error of R if
               e does not enter the state
reverse half:  store dS (of the state leaving the chunk), then
               X^T  = s do^T F + dS^T E^T                    folded
               X^T  = s do^T F + ((dS^T k^T) out beta) W / beta    else: A = diag(beta) W / diag(beta)
               dS^T <- total dS^T + s (do^T in) q - (beta X^T in) k

dS and X are in units of `DeltaOptions.unit`, relative to which s, otherwise the scale, is 1. W has a unit diagonal, so
a product with it starts from the rounding error of its operand, which the diagonal passes through unchanged.

Descriptors and the partial last chunk are as in `scan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from wyfold.kernels.records import Prepared, TokenBorders
from wyfold.kernels.scan.triton.arguments import Flags, Sizes
from wyfold.kernels.scan_bwd.triton.arguments import States, Tokens, segment_tables
from wyfold.kernels.scan_bwd.triton.kernel import wyfold_scan_bwd_triton
from wyfold.runtime.chunk_layout import ChunkGrid, Segments
from wyfold.runtime.kernel_configs import LaunchKey, tile_width, tuned, with_occupancy_hint
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.dot.triton import contracts, operand, precision, workspace
from wyfold.tile.index.triton import Packing, with_strides
from wyfold.tile.index.triton.descriptors import (
    all_or_none,
    has_tma,
    tile_descriptor,
    token_descriptor,
    vector_descriptor,
)

Half = Literal["forward", "reverse", "both"]


def scan_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prepared: Prepared,
    initial_state: Tensor | None,
    do: Tensor,
    dST: Tensor | None,
    grid: ChunkGrid,
    options: DeltaOptions,
    key: LaunchKey,
    dS0: Tensor | None,
    borders: TokenBorders,
    segments: Segments | None = None,
    entering: Tensor | None = None,
    leaving: Tensor | None = None,
    half: Half = "both",
) -> None:
    """States and their gradients at the borders of every chunk.

    Args:
        q, k: [B, T, H, K] tokens, any strides.
        v, do: [B, T, HV, V].
        prepared: From `prepare`, including W.
        initial_state: [N, HV, K, V] view of any strides and float dtype, or None (zeros).
        dST: [N, HV, K, V] view, gradient of the final state, or None (zeros).
        grid: Chunk grid of the call, or of its segments.
        options: Uses `scale`.
        key: Key of the launch configuration.
        dS0: [N, HV, K, V] view, written, or None.
        borders: From `token_borders`, written.
        segments: Layout of the segments, whose sequences are those of the states; None if no sequence is cut.
        entering, leaving: [borders, HV, K, V] views, states at the segments' borders and their gradients.
        half: Half to run: "forward" reads no gradient of a state, "reverse" no state.
    """
    (H, K), (HV, V), C = q.shape[2:], v.shape[2:], grid.chunk_size
    halves, going_back = programs(half, grid.sequences)
    config = tuned("scan_bwd.triton", scan_bwd_key(key, grid.sequences, v), q.device)
    BK, BV = tile_width(K), min(config.blocks["BV"], tile_width(V))
    channel = prepared.q is not None
    inputs = (
        prepared.q if channel else q,
        prepared.k if channel else k,
        v,
        do,
        *prepared[:2],
        *prepared[4:7],
        *borders[:4],
    )
    descriptors = _descriptors(inputs, C, BK, BV) if has_tma(q.device) else None
    x_q, x_k, x_v, x_do, x_rows, x_total, x_E, p_F, p_W, x_S, x_dS, x_e, x_X = descriptors or inputs
    launch_kernel(
        wyfold_scan_bwd_triton,
        halves * grid.sequences * HV * -(-V // BV),
        x_q=x_q,
        x_k=x_k,
        x_v=x_v,
        x_do=x_do,
        x_rows=x_rows,
        x_total=x_total,
        x_E=x_E,
        x_S=x_S,
        x_dS=x_dS,
        x_e=x_e,
        x_X=x_X,
        tokens=Tokens(
            s_q=None if channel else q.stride(),
            s_k=None if channel else k.stride(),
            s_v=v.stride(),
            s_do=do.stride(),
            F=p_F,
            W=p_W,
        ),
        states=with_strides(States, S0=initial_state, dST=dST, dS0=dS0),
        segments=segment_tables(segments, entering, leaving),
        packing=Packing(cu=grid.cu, first=grid.first),
        N=grid.sequences if segments is None else segments.sequences,
        going_back=going_back,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        unit=options.unit,
        scale=options.scale / options.unit,
        SIZES=Sizes(H=H, HV=HV, K=K, V=V, BT=C, BK=BK, BV=BV, STAGES=config.stages),
        FLAGS=Flags(
            PACKED=grid.cu is not None,
            CHANNEL=channel,
            FOLDED=prepared.E is not None,
            USE_TMA=descriptors is not None,
            OP=operand(q.dtype),
            PRECISION=precision(q.dtype),
        ),
        **config.options(contract=contracts(q.dtype)),
    )


def token_borders(q: Tensor, v: Tensor, grid: ChunkGrid) -> TokenBorders:
    """Uninitialised border tensors, which `scan_bwd` writes."""
    return TokenBorders.of(*border_pairs(q, v, grid))


def border_pairs(q: Tensor, v: Tensor, grid: ChunkGrid) -> tuple[Tensor, Tensor]:
    """The memory of the border tensors, for `TokenBorders.of`."""
    K, V, tiles = q.shape[3], v.shape[3], grid.chunks * v.shape[2]
    states = v.new_empty(2, tiles, V, K, dtype=workspace(q.dtype))
    tokens = v.new_empty(2, tiles, grid.chunk_size, V, dtype=workspace(q.dtype))
    return states, tokens


def programs(half: Half, sequences: int) -> tuple[int, int]:
    """Size of a launch.

    Returns:
        Number of programs per sequence, head and tile of value rows, and how many sequences the reverse half runs.
    """
    return (2 if half == "both" else 1), (0 if half == "forward" else sequences)


def scan_bwd_key(key: LaunchKey, sequences: int, v: Tensor) -> LaunchKey:
    """Key of the launch configuration: the call's key, and whether programs of 128 value rows leave the GPU half
    empty."""
    HV, V = v.shape[2:]
    return with_occupancy_hint(key, 2 * sequences * HV * -(-V // 128), v.device)


def _descriptors(given: tuple[Any, ...], C: int, BK: int, BV: int) -> Sequence[Any] | None:
    """The arguments as descriptors, or None if one of them cannot have one."""
    q, k, v, do, rows, total, E, F, W, S, dS, e, X = given
    channel = q.ndim == 3
    found = (
        tile_descriptor(q, C, BK) if channel else token_descriptor(q, C, BK),
        None if k is None else tile_descriptor(k, C, BK) if channel else token_descriptor(k, C, BK),
        token_descriptor(v, C, BV),
        token_descriptor(do, C, BV),
        tile_descriptor(rows, 4, C),
        vector_descriptor(total, BK) if channel else total,
        None if E is None else tile_descriptor(E, C, BK),
        # Triangular tiles are stored in quarters and loaded through pointers.
        F,
        W,
        tile_descriptor(S, BV, BK),
        tile_descriptor(dS, BV, BK),
        tile_descriptor(e, C, BV),
        tile_descriptor(X, C, BV),
    )
    return all_or_none(given, found)
