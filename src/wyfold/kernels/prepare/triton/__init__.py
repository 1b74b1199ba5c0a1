"""`prepare` in Triton: one program per chunk and value head."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.prepare.triton.arguments import Flags, Sizes, Tokens
from wyfold.kernels.prepare.triton.kernel import wyfold_prepare_triton
from wyfold.kernels.records import Prepared
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import LaunchKey, dtype_word, tile_width, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.decay.triton import gate_argument, gate_flags, gate_kind
from wyfold.tile.dot.triton import NARROWEST, contracts, exact, operand, precision, workspace
from wyfold.tile.index.triton import Packing, with_strides
from wyfold.tile.index.triton.descriptors import all_or_none, has_tma, token_descriptor
from wyfold.tile.index.triton.strength import Strength


def prepare(
    q: Tensor,
    k: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    grid: ChunkGrid,
    options: DeltaOptions,
    o: Tensor,
    *,
    folded: bool,
    backward: bool,
    forward: bool = True,
    clear: bool = True,
) -> Prepared:
    """Compute the factors of every chunk from the caller's tensors.

    Args:
        q, k: [B, T, H, K], any strides.
        g: [B, T, HV] or [B, T, HV, K] gate of the call; None without a gate.
        beta: [B, T, HV] write strength of the call; None for 1.
        A_log, dt_bias: Gate parameters or None.
        grid: The call's chunk grid.
        options: Uses `qk_l2norm`, `activation`, `lower_bound`, `clamp`, `beta_logit`, `beta_most`, `chunk_size`,
            `erases`.
        o: [B, T, HV, V] output of the call; only tokens past a packed batch's last boundary are written, with zeros.
        folded: Whether the scans read E instead of W.
        backward: Whether `scan_bwd` and `summary_bwd` will read these.
        forward: Whether `scan` and `segment_summary` will.
        clear: Whether o is written at all; if not, any tensor of its shape may be passed.
    """
    (H, K), (HV, V), C = q.shape[2:], o.shape[2:], grid.chunk_size
    gate, channel = gate_kind(g), gate_flags(g)["CHANNEL"]
    tiles, whole = grid.chunks * HV, tile_width(K)
    how = {"folded": folded, "norm": options.qk_l2norm, "erases": options.erases}
    found = empty(q, g, tiles, C, **how, backward=backward, forward=forward)
    if clear and backward and grid.cu is not None:
        # The forward saves these tensors, and a registered operator must not return uninitialised memory. Not every
        # tile of a packed batch is written.
        for x in found:
            if x is not None:
                x.zero_()
    config = tuned("prepare.triton", launch_key(q.dtype, K, V, C, gate, folded, erases=options.erases), q.device)
    # With a channel gate, one warp per sub-chunk.
    warps = C // 16 if channel else config.warps
    BK = BE = whole
    if channel:
        BK, BE = min(whole, config.blocks["BK"]), min(max(whole, NARROWEST), config.blocks["BE"])
    written = found if found.W is not None else found._replace(W=found.F)
    rows = None
    # No TMA with a channel gate, which loads sub-chunks, and none for partial chunks. Row norms are reduced in the
    # layout of the load, which differs between TMA and pointer loads, and so would the bits.
    plain = not channel and not options.qk_l2norm and grid.cu is None and grid.tokens % C == 0
    if plain and has_tma(q.device):
        rows = all_or_none((q, k), [token_descriptor(x, C, whole) for x in (q, k)])
    x_q, x_k = rows or (q, k)
    launch_kernel(
        wyfold_prepare_triton,
        tiles,
        x_q=x_q,
        x_k=x_k,
        tokens=with_strides(Tokens, s_q=q.stride(), s_k=k.stride(), o=o),
        gate=gate_argument(g, A_log, dt_bias, options),
        strength=with_strides(Strength, beta=beta, most=options.beta_most, erases=float(options.erases)),
        factors=written,
        packing=Packing(cu=grid.cu, first=grid.first, sequence=grid.sequence),
        N=grid.sequences,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        clear=int(clear),
        # A runtime argument, so that both directions of the folded form share one compiled kernel.
        with_w=int(found.W is not None),
        SIZES=Sizes(H=H, HV=HV, K=K, V=V, BT=C, BK=BK, BE=BE, BV=tile_width(V), WARPS=warps, STAGES=config.stages),
        FLAGS=Flags(
            PACKED=grid.cu is not None,
            USE_TMA=rows is not None,
            GATE=gate,
            CHANNEL=channel,
            ACTIVATION=options.activation,
            NORM=options.qk_l2norm,
            LOGIT=options.beta_logit,
            WHOLE=config.blocks["BM"] >= C,
            OP=operand(q.dtype),
            PRECISION=precision(q.dtype),
            EXACT=exact(q.dtype),
        ),
        **{**config.options(contract=contracts(q.dtype)), "num_warps": warps},
    )
    return found


def empty(
    q: Tensor,
    g: Tensor | None,
    tiles: int,
    chunk_size: int,
    *,
    folded: bool,
    norm: bool,
    erases: bool = True,
    backward: bool,
    forward: bool = True,
) -> Prepared:
    """Allocate the factors of `tiles` tiles without writing them; sizes depend on metadata alone."""
    C, K, channel = chunk_size, q.shape[-1], gate_kind(g) == "channel"
    stored, both = workspace(q.dtype), forward and backward and not folded
    inverts = erases or not channel
    upper = tiles, 3, C // 2, C // 2
    normed = (q.dtype, K, C) == (torch.bfloat16, 128, 64)  # the calls of the Gluon `gradients`, which reads the norms
    return Prepared(
        rows=q.new_empty(tiles, 4, C, dtype=torch.float32),
        total=q.new_empty(tiles, K if channel else 1, dtype=torch.float32),
        q=q.new_empty(tiles, C, K, dtype=stored) if channel else None,
        k=q.new_empty(tiles, C, K, dtype=stored) if channel and erases else None,
        E=q.new_empty(tiles, C, K, dtype=stored) if folded else None,
        F=q.new_empty(upper, dtype=stored) if backward or folded else None,
        W=q.new_empty(upper, dtype=stored) if (backward and inverts) or not folded else None,
        FB=q.new_empty(upper, dtype=stored) if forward and not folded else None,
        rows_bwd=q.new_empty(tiles, 4, C, dtype=torch.float32) if both else None,
        norms=q.new_empty(tiles, 2, C, dtype=torch.float32) if channel and norm and normed else None,
    )


def reads_folded(g: Tensor | None) -> bool:
    """Whether a call's scans read E, which saves a product per chunk, or W, which saves memory traffic."""
    return gate_kind(g) == "channel"


def launch_key(
    dtype: torch.dtype, K: int, V: int, chunk_size: int, gate: str, folded: bool, *, erases: bool = True
) -> LaunchKey:
    """Launch configuration key."""
    form = "EF" if folded else "WF"
    return LaunchKey(dtype_word(dtype), K, V, C=chunk_size, gate=gate, form=form, additive=not erases)
