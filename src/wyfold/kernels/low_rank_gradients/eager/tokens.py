"""Gradients of the tokens, from those of the tiles."""

from __future__ import annotations

from torch import Tensor

from wyfold.kernels.records import GradientOutputs, LowRankGradients, LowRankInputs
from wyfold.runtime.chunk_layout import ChunkTable
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.columns.eager import Columns, columns_bwd
from wyfold.tile.decay.eager import log_gate_tokens_bwd
from wyfold.tile.index.eager import from_chunks, sum_groups
from wyfold.tile.norm.eager import l2norm_bwd


def unload(
    found: LowRankGradients,
    inputs: LowRankInputs,
    g: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    table: ChunkTable,
    options: DeltaOptions,
    out: GradientOutputs,
) -> None:
    """Apply the adjoints of the rule, of norm, grouping and activations, and write every token's gradients once.

    Args:
        found, inputs: Gradient and input tiles of the part.
        g, A_log, dt_bias, table, options: As given to `load`.
        out: Output views of the part's tokens, written; None where a gradient is not requested. The parameters'
            gradients are added to.
    """
    HV, tokens = found.v.shape[0] // max(1, table.chunks), inputs.tokens
    d = columns_bwd(options.rule, tokens, Columns(found.a, found.b, found.k, found.v))
    rows = (
        (out.q, found.q, inputs.q, inputs.rq),
        (out.k, d.k, tokens.k, inputs.rk),
        (out.a, d.a, tokens.a, inputs.ra),
        (out.v, d.v, None, None),
        (out.b, d.b, None, None),
        (out.w, d.w, None, None),
        (None if out.beta is None else out.beta[..., None], d.beta, None, None),
    )
    for token_gradient, dx, y, r in rows:
        if token_gradient is not None and dx is not None:
            H = token_gradient.shape[2]
            dx = sum_groups(dx, H, HV)
            if y is not None and r is not None:
                dx = l2norm_bwd(y[:: HV // H], r[:: HV // H], dx)
            from_chunks(dx, table, token_gradient)
    log_gate_tokens_bwd(found.g, g, A_log, dt_bias, table, options, (out.g, out.A_log, out.dt_bias))
