"""Launch of `prepare` in Gluon without a gate or with a scalar gate."""

from __future__ import annotations

from torch import Tensor

from wyfold.kernels.prepare.gluon.scalar.arguments import RowFactors, Sizes, Tokens
from wyfold.kernels.prepare.gluon.scalar.kernel import wyfold_prepare_gluon
from wyfold.kernels.prepare.triton import empty, launch_key
from wyfold.kernels.records import Prepared
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import tile_width, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.decay.triton import gate_argument, gate_flags, gate_kind
from wyfold.tile.index.gluon import gluon_descriptors
from wyfold.tile.index.triton import Packing, with_strides
from wyfold.tile.index.triton.descriptors import all_or_none, require_descriptors, token_descriptor, upper_descriptor
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
    """Compute the factors of every chunk; takes the arguments of the Triton launch.

    No gate or a scalar gate, bfloat16, K of 64, 128 or 256, chunks of 64, unfolded.
    """
    (H, K), (HV, V), C = q.shape[2:], o.shape[2:], grid.chunk_size
    gate, tiles = gate_kind(g), grid.chunks * HV
    how = {"folded": folded, "norm": options.qk_l2norm, "backward": backward, "forward": forward}
    found = empty(q, g, tiles, C, **how)
    factors = require_descriptors(
        "prepare", all_or_none(found[5:8], [None if x is None else upper_descriptor(x) for x in found[5:8]])
    )
    if clear and backward and grid.cu is not None:
        # As in the Triton launch: a registered operator must not return uninitialised memory.
        for x in found:
            if x is not None:
                x.zero_()
    key = launch_key(q.dtype, K, V, C, gate, folded, erases=options.erases)._replace(norm=options.qk_l2norm)
    config = tuned("prepare.gluon", key, q.device)
    rows = all_or_none((q, k), [token_descriptor(x, C, K) for x in (q, k)])
    x_q, x_k = gluon_descriptors(rows or (q, k))
    x_F, x_W, x_FB = gluon_descriptors(factors)
    launch_kernel(
        wyfold_prepare_gluon,
        tiles,
        x_q=x_q,
        x_k=x_k,
        x_F=x_F,
        x_W=x_W,
        x_FB=x_FB,
        tokens=with_strides(Tokens, s_q=q.stride(), s_k=k.stride(), o=o),
        gate=gate_argument(g, A_log, dt_bias, options),
        strength=with_strides(Strength, beta=beta, most=options.beta_most, erases=float(options.erases)),
        factors=RowFactors(rows=found.rows, rows_bwd=found.rows_bwd, total=found.total),
        packing=Packing(cu=grid.cu, first=grid.first, sequence=grid.sequence),
        N=grid.sequences,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        clear=int(clear),
        SIZES=Sizes(H=H, HV=HV, K=K, V=V, BT=C, BV=tile_width(V)),
        PACKED=grid.cu is not None,
        FULL=grid.cu is None and grid.tokens % C == 0,
        USE_TMA=rows is not None,
        GATE=gate,
        SCALAR=gate_flags(g)["SCALAR"],
        ACTIVATION=options.activation,
        NORM=options.qk_l2norm,
        LOGIT=options.beta_logit,
        **config.options(),
    )
    return found
