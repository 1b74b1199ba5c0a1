"""Gradients of the tokens, from those of the tiles."""

from __future__ import annotations

from torch import Tensor

from wyfold.kernels.records import GradientOutputs, Inputs, TileGradients
from wyfold.runtime.chunk_layout import ChunkTable
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.activation.eager import sigmoid_bwd
from wyfold.tile.decay.eager import log_gate_tokens_bwd
from wyfold.tile.index.eager import from_chunks, sum_groups, to_chunks
from wyfold.tile.norm.eager import l2norm_bwd


def unload(
    found: TileGradients,
    inputs: Inputs,
    beta: Tensor | None,
    g: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    table: ChunkTable,
    options: DeltaOptions,
    out: GradientOutputs,
) -> None:
    """Apply the adjoints of grouping, norm and activations, and write every token's gradients once.

    Args:
        found, inputs: Gradient and input tiles of the part.
        beta, g, A_log, dt_bias: As given to `load`.
        table: The part's chunk table.
        options: As given to `load`.
        out: Output views of the part's tokens, written; None where a gradient is not requested. The parameters'
            gradients are added to.
    """
    HV = found.v.shape[0] // max(1, table.chunks)
    for token_gradient, dx, y, r in ((out.q, found.q, inputs.q, inputs.rq), (out.k, found.k, inputs.k, inputs.rk)):
        if token_gradient is not None:
            H = token_gradient.shape[2]
            dx = sum_groups(dx, H, HV)
            if r is not None:
                dx = l2norm_bwd(y[:: HV // H], r[:: HV // H], dx)
            from_chunks(dx, table, token_gradient)
    if out.v is not None:
        from_chunks(found.v, table, out.v)
    if out.beta is not None:
        dbeta = found.beta
        if options.beta_logit and beta is not None:
            logits = to_chunks(beta[..., None], table, HV, dbeta.dtype)
            dbeta = sigmoid_bwd(logits, dbeta).mul_(options.beta_most)
        from_chunks(dbeta, table, out.beta[..., None])
    log_gate_tokens_bwd(found.g, g, A_log, dt_bias, table, options, (out.g, out.A_log, out.dt_bias))
