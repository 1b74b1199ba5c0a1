"""Launch of `gradients` in Gluon without a gate or with a scalar gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wyfold.kernels.gradients.gluon.heads import HeadSizes, head_arguments, wyfold_gradients_heads_gluon
from wyfold.kernels.gradients.gluon.scalar.arguments import Flags, Heads, Sizes
from wyfold.kernels.gradients.gluon.scalar.kernel import wyfold_gradients_gluon
from wyfold.kernels.gradients.gluon.tokens import copy_wanted, output_views
from wyfold.kernels.gradients.gluon.wide import wyfold_gradients_wide_gluon
from wyfold.kernels.gradients.gluon.wide.arguments import BW
from wyfold.kernels.gradients.triton.arguments import Factors
from wyfold.kernels.gradients.triton.terms import sum_over_chunks
from wyfold.kernels.records import GradientOutputs, TokenBorders
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import LaunchKey, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.decay.triton import gate_argument
from wyfold.tile.decay.triton.gradient import GateGradient
from wyfold.tile.index.gluon import gluon_descriptors
from wyfold.tile.index.triton import Packing, strides
from wyfold.tile.index.triton.descriptors import tile_descriptor, token_descriptor
from wyfold.tile.index.triton.strength import Strength

HEAD = 128
"""Widths of the kernel that keeps all tiles of a value head in shared memory."""


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
    """Gradients of every token and parameter. Takes the arguments of the Triton launch.

    Args:
        q, k, g, beta, A_log, dt_bias: As given to the operator, with the sizes and dtypes that `key` implies.
        do: [B, T, HV, V] gradient of the output.
        borders: From `scan_bwd`. With several value heads to a key head, e and X are overwritten.
        grid: The call's chunk grid, of chunks of 64.
        options: As given to `prepare`.
        key: Launch configuration key.
        out: Written, as by the Triton launch.
    """
    (H, K), (HV, V), C = q.shape[2:], do.shape[2:], grid.chunk_size
    config = tuned("gradients.gluon", key, q.device)
    read_q, read_k, read_do = (_readable(x) for x in (q, k, do))
    wanted = [(out.q, read_q), (out.k, read_k), (out.v, read_do)]
    if HV > H:  # a program reads its tiles of e and X before it stores dq and dk there
        wanted = [(x.view(1, -1, 1, V)[..., :K], x) for x in (borders.e, borders.X)] + wanted[2:]
    out_q, out_k, out_v = (
        like.new_empty(like.shape) if to is None or not _tma_readable(to) else to for to, like in wanted
    )
    dA_log, ddt_bias = (
        None if x is None else q.new_empty(grid.chunks, HV, dtype=torch.float32) for x in (out.A_log, out.dt_bias)
    )
    wide = (K, V) != (HEAD, HEAD)
    block = (BW, BW) if wide else (K // 2, V)
    x_q, x_k, x_do, x_dq, x_dk, x_dv, x_S, x_dS, x_e, x_X = _descriptors(
        (read_q, read_k, read_do, out_q, out_k, out_v), borders, C, *block
    )
    launch_kernel(
        wyfold_gradients_wide_gluon if wide else wyfold_gradients_gluon,
        grid.chunks * HV,
        x_q=x_q,
        x_k=x_k,
        x_do=x_do,
        x_dq=x_dq,
        x_dk=x_dk,
        x_dv=x_dv,
        x_S=x_S,
        x_dS=x_dS,
        x_e=x_e,
        x_X=x_X,
        heads=Heads(h_q=read_q.stride(2), h_k=read_k.stride(2), h_do=read_do.stride(2)),
        gate=gate_argument(g, A_log, dt_bias, options),
        strength=Strength(beta=beta, s_beta=strides(beta), most=options.beta_most),
        outputs=output_views(out_q, out_k, out_v, out.beta),
        dgate=GateGradient(g=out.g, s_g=strides(out.g), A_log=dA_log, dt_bias=ddt_bias),
        packing=Packing(cu=grid.cu, first=grid.first, sequence=grid.sequence),
        factors=Factors(options.scale, options.unit, options.unit * float(options.erases)),
        N=grid.sequences,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        SIZES=Sizes(H=H, HV=HV, K=K, V=V, BT=C),
        FLAGS=Flags(
            PACKED=grid.cu is not None,
            WHOLE=grid.cu is None and grid.tokens % C == 0,
            SCALAR=g is not None,
            ACTIVATION=options.activation,
            CLAMPED=options.clamp != 0,
            NORM=options.qk_l2norm,
            LOGIT=options.beta_logit,
        ),
        **({"STAGES": config.stages} if wide else {}),
        **config.options(),
    )
    copy_wanted((out_q, out_k, out_v), [requested for requested, _ in wanted])
    if HV > H:
        sizes = HeadSizes(H, HV // H, K, C, ROWS=C, COLUMNS=V, NORM=False)
        summed = head_arguments((out_q, out_k), None, out, sizes, grid, config)
        launch_kernel(wyfold_gradients_heads_gluon, grid.chunks * H, **summed)
    sum_over_chunks(dA_log, out.A_log)
    sum_over_chunks(ddt_bias, out.dt_bias)


def _readable(x: Tensor) -> Tensor:
    """x, or a copy where TMA cannot read its layout."""
    return x if _tma_readable(x) else x.clone(memory_format=torch.contiguous_format)


def _tma_readable(x: Tensor) -> bool:
    """Whether TMA can read blocks of tokens of x."""
    return token_descriptor(x, 1, 64) is not None


def _descriptors(tokens: tuple[Tensor, ...], borders: TokenBorders, C: int, BK: int, BV: int) -> list[Any]:
    """TMA descriptors in kernel argument order: q, k, do, dq, dk, dv, then S, dS, e and X.

    BK, BV: Channels of keys and of values in a block.
    """
    found = [token_descriptor(x, C, n) for x, n in zip(tokens, (BK, BK, BV) * 2, strict=True)]
    found += [tile_descriptor(x, BV, BK) for x in (borders.S, borders.dS)] + [
        tile_descriptor(x, C, BV) for x in (borders.e, borders.X)
    ]
    return gluon_descriptors(found)
