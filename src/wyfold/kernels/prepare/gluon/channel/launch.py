"""Launch of `prepare` in Gluon with a channel gate."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wyfold.kernels.prepare.gluon.channel.arguments import BK, Flags, Sizes, Tokens
from wyfold.kernels.prepare.gluon.channel.kernel import wyfold_prepare_channel_gluon
from wyfold.kernels.prepare.triton import empty, launch_key
from wyfold.kernels.records import Prepared
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import Config, processors, tile_width, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.decay.triton import FLOOR, Gate, gate_kind
from wyfold.tile.index.gluon import ELEMENTS, gluon_descriptors
from wyfold.tile.index.triton import Packing, strides, with_strides
from wyfold.tile.index.triton.descriptors import (
    TmaDescriptor,
    all_or_none,
    require_descriptors,
    tile_descriptor,
    token_descriptor,
    upper_descriptor,
)
from wyfold.tile.index.triton.strength import Strength

RESIDENT = {True: 2, False: 3}
"""Programs resident on a multiprocessor, by whether writes erase."""


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
    """Compute E and F of every chunk, and W where a backward follows; takes the arguments of the Triton launch.

    Channel gate, bfloat16, K = 128, chunks of 64.
    """
    (K, HV, V), C = (q.shape[3], *o.shape[2:]), grid.chunk_size
    how = {"folded": folded, "norm": options.qk_l2norm, "erases": options.erases}
    found = empty(q, g, grid.chunks * HV, C, **how, backward=backward, forward=forward)
    gate = Gate(g, strides(g), A_log, dt_bias, options.lower_bound, options.clamp or FLOOR)
    strength = with_strides(Strength, beta=beta, most=options.beta_most, erases=float(options.erases))
    key = launch_key(q.dtype, K, V, C, gate_kind(g), folded, erases=options.erases)
    config = tuned("prepare.gluon", key, q.device)
    programs, arguments = channel_launch(
        q, k, None, gate, strength, found, config, grid, options, o, rows=False, clear=clear, zero=clear and backward
    )
    launch_kernel(wyfold_prepare_channel_gluon, programs, **arguments)
    return found


def channel_launch(
    q: Tensor,
    k: Tensor,
    b: Tensor | None,
    gate: Gate,
    strength: Strength,
    found: Prepared,
    config: Config,
    grid: ChunkGrid,
    options: DeltaOptions,
    o: Tensor,
    *,
    rows: bool,
    clear: bool,
    zero: bool,
) -> tuple[int, dict[str, Any]]:
    """Number of programs and arguments of a launch of the kernel.

    Args:
        b: [B, T, HB, K] erase gate of the low-rank rule "keys", or None for 1.
        found: Tensors that are written.
        config: Launch configuration.
        rows: Whether the rule is "keys", whose erasing rows are -(b k). strength.erases is then -1.
        clear: Whether tokens of o past a packed batch's last boundary get zeros.
        zero: Zero the factors of a packed batch first: a registered operator must not return uninitialised memory.
    """
    (H, K), (HV, V), C = q.shape[2:], o.shape[2:], grid.chunk_size
    g, tiles = gate.g, grid.chunks * HV
    written = found if found.W is not None else found._replace(W=found.F)
    factors = require_descriptors("prepare", all_or_none(written[2:7], _tile_descriptors(written, C)))
    if zero and grid.cu is not None:
        for x in found:
            if x is not None:
                x.zero_()
    read = all_or_none((q, k, g), [token_descriptor(q, C, K), token_descriptor(k, C, K), _gate_descriptor(g, C)])
    full = grid.cu is None and grid.tokens % C == 0
    tokens = gluon_descriptors(read[:2], 2 * BK.value) + gluon_descriptors(read[2:]) if read else (q, k, g)
    x_q, x_k, x_g = tokens
    x_qd, x_kd, x_E, x_F, x_W = gluon_descriptors(factors, 2 * BK.value)
    programs = min(tiles, RESIDENT[options.erases] * processors(q.device)) if full and read is not None else tiles
    return programs, dict(
        x_q=x_q,
        x_k=x_k,
        x_g=x_g,
        x_qd=x_qd,
        x_kd=x_kd,
        x_E=x_E,
        x_F=x_F,
        x_W=x_W,
        tokens=with_strides(
            Tokens, s_q=q.stride(), s_k=k.stride(), b=b, o=o, rows=found.rows, total=found.total, norms=found.norms
        ),
        gate=gate._replace(g=None),
        strength=strength,
        packing=Packing(cu=grid.cu, first=grid.first, sequence=grid.sequence),
        N=grid.sequences,
        tiles=tiles,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        clear=int(clear),
        with_w=int(found.W is not None),
        SIZES=Sizes(H=H, HV=HV, HB=HV if b is None else b.shape[2], K=K, V=V, BT=C, BV=tile_width(V)),
        FLAGS=Flags(
            PACKED=grid.cu is not None,
            FULL=full,
            USE_TMA=read is not None,
            ACTIVATION=options.activation,
            NORM=options.qk_l2norm,
            LOGIT=options.beta_logit,
            ROWS=rows,
            ERASES=options.erases,
        ),
        **config.options(),
    )


def _tile_descriptors(found: Prepared, C: int) -> list[TmaDescriptor | None]:
    """TMA descriptors of decayed q and k, E, F and W. Without k, E is stored in slices of the channels."""
    widths = (BK.value, BK.value, BK.value if found.k is None else found.total.shape[1])
    tiles = [None if x is None else tile_descriptor(x, C, width) for x, width in zip(found[2:5], widths, strict=True)]
    return [*tiles, *(None if x is None else upper_descriptor(x) for x in found[5:7])]


def _gate_descriptor(x: Tensor | None, C: int) -> TmaDescriptor | None:
    """TMA descriptor of all channels of a gate; None where its layout or dtype does not allow one."""
    return None if x is None or x.dtype not in ELEMENTS else token_descriptor(x, C, x.shape[3])
