"""Launch of `low_rank_gradients`, and what is done to its results.

Each program writes the gradients of one value head. With a norm or grouped heads these are float32, and PyTorch sums
heads and applies the norm's adjoint.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wyfold.kernels.low_rank_gradients.triton.arguments import Flags, Outputs, Sizes
from wyfold.kernels.low_rank_gradients.triton.kernel import wyfold_low_rank_gradients_triton
from wyfold.kernels.low_rank_gradients.triton.token_gate import wyfold_low_rank_gradients_token_gate_triton
from wyfold.kernels.records import GradientOutputs, TokenBorders
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import LaunchKey, tile_width, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.columns.triton import RuleRows, Values
from wyfold.tile.decay.triton import NEAR, Gate, gate_kind
from wyfold.tile.decay.triton.gradient import channel_gradient, gate_gradient_argument, sum_channels, sum_terms
from wyfold.tile.dot.triton import contracts, exact, operand, precision, right_operand
from wyfold.tile.index.triton import Packing, strides
from wyfold.tile.index.triton.strength import Strength
from wyfold.tile.norm.eager import l2norm, l2norm_bwd


def gradients(
    rows: RuleRows,
    gate: Gate,
    strength: Strength,
    tokens: Any,
    do: Tensor,
    borders: TokenBorders,
    grid: ChunkGrid,
    options: DeltaOptions,
    key: LaunchKey,
    out: GradientOutputs,
) -> None:
    """Gradients of every token and parameter, but those of values, which `low_rank_scan_bwd` writes.

    Args:
        rows, gate, strength: As given to `low_rank_prepare`.
        tokens: The tensors of the call, `DeltaTensors`.
        do: [B, T, HV, V] gradient of the output, any strides.
        borders: From `low_rank_scan_bwd`.
        grid: The call's chunk grid.
        options: As given to `low_rank_prepare`.
        key: Launch configuration key.
        out: Receives the gradients; tokens past a packed batch's last boundary get zeros. None where a gradient is not
            requested.
    """
    q, (B, T, HV, V), K, C = rows.q, do.shape, rows.q.shape[3], grid.chunk_size
    kind = gate_kind(gate.g)
    if kind != "channel":
        key = key._replace(gate=kind)
    config = tuned("low_rank_gradients.triton", key, q.device)
    BK, BV = (right_operand(tile_width(W), config.blocks[name], q.dtype) for name, W in (("BK", K), ("BV", V)))
    slices = -(-K // BK)
    outputs = _outputs(out, torch.Size((B, T, HV, K)), slices, norm=options.qk_l2norm)
    shared = {
        "tokens": rows,
        "values": Values(v=tokens.v, s_v=tokens.v.stride(), w=tokens.w, s_w=strides(tokens.w)),
        "do": do,
        "s_do": do.stride(),
        "borders": borders,
        "gate": gate,
        "strength": strength,
        "outputs": outputs,
        "packing": Packing(cu=grid.cu, first=grid.first, sequence=grid.sequence),
        "scale": options.scale,
        "unit": options.unit,
        "N": grid.sequences,
        "T": T,
        "per_sequence": grid.per_sequence,
        "SIZES": Sizes(H=q.shape[2], HV=HV, HB=HV if rows.b is None else rows.b.shape[2], K=K, V=V, BT=C, BK=BK, BV=BV),
        "FLAGS": Flags(
            PACKED=grid.cu is not None,
            RULE=options.rule,
            ACTIVATION=options.activation,
            CLAMPED=options.clamp != 0,
            NORM=options.qk_l2norm,
            GATE=kind,
            OP=operand(q.dtype),
            PRECISION=precision(q.dtype),
            EXACT=exact(q.dtype),
        ),
    }
    programs, launch = grid.chunks * HV * slices, {**config.options(contract=contracts(q.dtype))}
    if kind == "channel":
        dx, terms = channel_gradient(out.g, q), (grid.chunks, HV, slices)
        dgate = gate_gradient_argument(dx, out.A_log, out.dt_bias, terms, gates=K)
        launch["num_warps"] = _warps(C, q.dtype)
        launch_kernel(wyfold_low_rank_gradients_triton, programs, dgate=dgate, **shared, **launch)
        sum_channels(dgate.g, out.g)
        sum_terms(dgate, out.A_log, out.dt_bias)
    else:
        dg = None if out.g is None else out.g.new_empty(slices, B, T, HV, dtype=torch.float32)
        launch_kernel(
            wyfold_low_rank_gradients_token_gate_triton, programs, dg=dg, s_dg=strides(dg), **shared, **launch
        )
        if dg is not None and out.g is not None:
            out.g.copy_(dg.sum(0))
    _unload(outputs, tokens, grid, out, norm=options.qk_l2norm)


def _warps(chunk_size: int, dtype: torch.dtype) -> int:
    """Warps of the kernel of a channel gate: one per sub-chunk, but at most two in float32.

    Four warps in float32 would use Hopper's warp-group products with 32 columns, which gave wrong dq and da and read
    outside of memory (docs/facts/hopper.md, H200-4).
    """
    warps = chunk_size // NEAR.value
    return min(warps, 2) if dtype == torch.float32 else warps


def _outputs(out: GradientOutputs, shape: torch.Size, slices: int, *, norm: bool) -> Outputs:
    """What programs write: the gradients of `out`, and float32 memory for those that `_unload` makes.

    Args:
        out: As given to `gradients`.
        shape: B, T, HV, K.
        slices: Slices of K.
        norm: Whether q, k and a are normalised.
    """

    def written(dx: Tensor | None, *, normalised: bool) -> Tensor | None:
        if dx is None or (dx.shape[2] == shape[2] and not normalised):
            return dx
        return dx.new_empty(shape, dtype=torch.float32)

    dq, dk, da = (written(dx, normalised=norm) for dx in (out.q, out.k, out.a))
    db = written(out.b, normalised=False)
    dbeta = None if out.beta is None else out.beta.new_empty(slices, *shape[:3], dtype=torch.float32)
    return Outputs(
        q=dq,
        s_q=strides(dq),
        k=dk,
        s_k=strides(dk),
        a=da,
        s_a=strides(da),
        b=db,
        s_b=strides(db),
        beta=dbeta,
        s_beta=None if dbeta is None else dbeta.stride()[1:],
        s_slice=None if dbeta is None else dbeta.stride(0),
    )


def _unload(outputs: Outputs, tokens: Any, grid: ChunkGrid, out: GradientOutputs, *, norm: bool) -> None:
    """Write the tokens' gradients that programs left in float32: beta's by slice, others by value head.

    Args:
        outputs: From `_outputs`, written by the kernel.
        tokens, grid, out: As given to `gradients`.
        norm: Whether q, k and a are normalised.
    """
    if out.beta is not None:
        out.beta.copy_(outputs.beta.sum(0))
    for name, normalised in (("q", norm), ("k", norm), ("a", norm), ("b", False)):
        found, dx = getattr(outputs, name), getattr(out, name)
        if found is not dx:
            _unload_rows(found, getattr(tokens, name) if normalised else None, grid, dx)


def _unload_rows(found: Tensor, given: Tensor | None, grid: ChunkGrid, out: Tensor) -> None:
    """Apply the adjoints of norm and grouped heads, and write a token's gradient.

    Args:
        found: [B, T, HV, K] gradient for every value head.
        given: [B, T, H, K] rows as the caller gave them, which were normalised; None if they were not.
        grid: The call's chunk grid.
        out: [B, T, H, K] written.
    """
    found = found.unflatten(2, (out.shape[2], -1)).sum(3)
    if given is not None:
        y, r = l2norm(given.to(found.dtype))
        found = l2norm_bwd(y, r, found)
        if grid.cu is not None:  # tokens past the last boundary may hold anything
            used = torch.arange(found.shape[1], device=found.device) < grid.cu[grid.sequences]
            found = torch.where(used[:, None, None], found, 0.0)
    out.copy_(found)
