"""Launch of `low_rank_prepare`, and the memory of its results."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.low_rank_prepare.triton.arguments import Flags, Sizes
from wyfold.kernels.low_rank_prepare.triton.kernel import wyfold_low_rank_prepare_triton
from wyfold.kernels.low_rank_prepare.triton.token_gate import wyfold_low_rank_prepare_token_gate_triton
from wyfold.kernels.records import LowRankPrepared
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import LaunchKey, dtype_word, tile_width, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.columns.eager import ONE_COLUMN
from wyfold.tile.columns.triton import RuleRows
from wyfold.tile.decay.triton import Gate, gate_kind
from wyfold.tile.dot.triton import contracts, exact, operand, precision, right_operand, workspace
from wyfold.tile.index.triton import Packing
from wyfold.tile.index.triton.strength import Strength


def prepare(
    rows: RuleRows,
    gate: Gate,
    strength: Strength,
    grid: ChunkGrid,
    options: DeltaOptions,
    key: LaunchKey,
    o: Tensor,
    *,
    backward: bool,
    clear: bool,
) -> LowRankPrepared:
    """Compute the factors of every chunk from the caller's tensors.

    Args:
        rows, gate, strength: Kernel arguments of the call, from `call_arguments`.
        grid: The call's chunk grid.
        options: Uses `qk_l2norm`, `activation`, `chunk_size`, `rule`.
        key: From `prepare_key`.
        o: [B, T, HV, V] output of the call; only tokens past a packed batch's last boundary are written, with zeros.
        backward: Whether `low_rank_scan_bwd` will read these.
        clear: Whether o is written at all; if not, any tensor of its shape may be passed.
    """
    (H, K), (HV, V), C = rows.q.shape[2:], o.shape[2:], grid.chunk_size
    tiles, whole = grid.chunks * HV, tile_width(K)
    found = allocate(rows.q, options, grid, tiles, backward=backward, clear=clear)
    kind = gate_kind(gate.g)
    config = tuned("low_rank_prepare.triton", key, rows.q.device)
    BK, BE = min(whole, config.blocks["BK"]), right_operand(whole, config.blocks["BE"], rows.q.dtype)
    launch_kernel(
        wyfold_low_rank_prepare_triton if kind == "channel" else wyfold_low_rank_prepare_token_gate_triton,
        tiles,
        tokens=rows,
        gate=gate,
        strength=strength,
        # A runtime argument selects what is stored, so that both directions share one compiled kernel.
        factors=found if backward else found._replace(A=found.F, R=found.P),
        packing=Packing(cu=grid.cu, first=grid.first, sequence=grid.sequence),
        o=o,
        s_o=o.stride(),
        N=grid.sequences,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        clear=int(clear),
        backward=int(backward),
        SIZES=Sizes(
            H=H, HV=HV, HB=HV if rows.b is None else rows.b.shape[2], K=K, V=V, BT=C, BK=BK, BE=BE, BV=tile_width(V),
            WARPS=config.warps, STAGES=config.stages,
        ),
        FLAGS=Flags(
            PACKED=grid.cu is not None,
            RULE=options.rule,
            ACTIVATION=options.activation,
            NORM=options.qk_l2norm,
            GATE=kind,
            OP=operand(rows.q.dtype),
            PRECISION=precision(rows.q.dtype),
            EXACT=exact(rows.q.dtype),
        ),
        **config.options(contract=contracts(rows.q.dtype)),
    )  # fmt: skip
    return found


def allocate(
    q: Tensor, options: DeltaOptions, grid: ChunkGrid, tiles: int, *, backward: bool, clear: bool
) -> LowRankPrepared:
    """Allocate the factors that a launch writes; the arguments are its.

    Those that a registered operator returns must not be uninitialised memory, and not every tile of a packed batch is
    written. So they are zeroed.
    """
    found = empty(q, options.rule, tiles, grid.chunk_size, backward=backward)
    if clear and backward and grid.cu is not None:
        for x in found:
            if x is not None:
                x.zero_()
    return found


def empty(q: Tensor, rule: str, tiles: int, chunk_size: int, *, backward: bool) -> LowRankPrepared:
    """Allocate the factors of `tiles` tiles without writing them; sizes depend on metadata alone."""
    C, K, stored, two = chunk_size, q.shape[-1], workspace(q.dtype), rule not in ONE_COLUMN
    rows, upper = (tiles, C, K), (tiles, 3, C // 2, C // 2)
    return LowRankPrepared(
        rows=q.new_empty(rows, dtype=stored),
        q=q.new_empty(rows, dtype=stored),
        E=q.new_empty(rows, dtype=stored),
        K=q.new_empty(rows, dtype=stored) if two else None,
        total=q.new_empty(tiles, K, dtype=torch.float32),
        F=q.new_empty(upper, dtype=stored),
        P=q.new_empty(upper, dtype=stored) if two else None,
        A=q.new_empty(upper, dtype=stored) if backward else None,
        R=q.new_empty(upper, dtype=stored) if backward and two else None,
    )


def launch_key(dtype: torch.dtype, K: int, V: int, chunk_size: int) -> LaunchKey:
    """Launch configuration key."""
    return LaunchKey(dtype_word(dtype), K, V, C=chunk_size)
