"""Launches of `gradients` in Gluon under a channel gate."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.kernels.gradients.gluon.channel.arguments import Flags, Sizes, Tokens
from wyfold.kernels.gradients.gluon.channel.kernel import wyfold_gradients_channel_gluon
from wyfold.kernels.gradients.gluon.channel.norm import wyfold_gradients_norm_gluon
from wyfold.kernels.gradients.gluon.heads import HeadSizes, head_arguments, wyfold_gradients_heads_gluon
from wyfold.kernels.gradients.gluon.tokens import copy_wanted, output_views
from wyfold.kernels.gradients.triton.arguments import Factors
from wyfold.kernels.gradients.triton.terms import sum_over_chunks
from wyfold.kernels.records import GradientOutputs, TokenBorders
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import Config, LaunchKey, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.decay.triton import FLOOR, Gate
from wyfold.tile.decay.triton.gradient import GateGradient
from wyfold.tile.index.gluon import ELEMENTS, gluon_descriptors
from wyfold.tile.index.triton import Packing, strides
from wyfold.tile.index.triton.descriptors import tile_descriptor, token_descriptor
from wyfold.tile.index.triton.strength import Strength


def gradients(
    q: Tensor,
    k: Tensor,
    g: Tensor,
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
        borders: From `scan_bwd`, and with the l2 norm the norms from `prepare`. With several value heads to a key
            head, S is overwritten.
        grid: The call's chunk grid, of chunks of 64.
        options: As given to `prepare`.
        key: Launch configuration key.
        out: Written, as by the Triton launch.
    """
    (H, K), (HV, V), C, config = q.shape[2:], do.shape[2:], grid.chunk_size, tuned("gradients.gluon", key, q.device)
    read_q, read_k, read_do, read_g = reads = [_readable(x) for x in (q, k, do, g)]
    out_q, out_k, out_g = map(_output_buffer, (out.q, out.k, out.g), (read_q, read_k, read_g))
    if HV > H:  # a program reads its half of S before it stores dq and dk there
        out_q, out_k = (borders.S.view(-1, K)[row:].view(1, -1, 1, K) for row in (0, C))
    work = _workspace(q, HV, grid, options, out)
    blocks = [*reads, out_q, out_k, out_g]
    x_q, x_k, x_do, x_g, x_dq, x_dk, x_dg, x_S, x_dS, x_e, x_X = _descriptors(blocks, borders, C, K // 2)
    launch_kernel(
        wyfold_gradients_channel_gluon,
        grid.chunks * HV * 2,
        x_q=x_q,
        x_k=x_k,
        x_do=x_do,
        x_g=x_g,
        x_dq=x_dq,
        x_dk=x_dk,
        x_dg=x_dg,
        x_S=x_S,
        x_dS=x_dS,
        x_e=x_e,
        x_X=x_X,
        tokens=Tokens(
            h_q=read_q.stride(2),
            h_k=read_k.stride(2),
            h_do=read_do.stride(2),
            h_g=read_g.stride(2),
            X=borders.X,
            norms=borders.norms,
            norm_dots=work.norm_dots,
        ),
        gate=Gate(A_log=A_log, dt_bias=dt_bias, lower_bound=options.lower_bound, clamp=options.clamp or FLOOR),
        strength=Strength(beta=beta, s_beta=strides(beta), most=options.beta_most),
        outputs=output_views(out_q, out_k, out.v, out.beta),
        dgate=GateGradient(g=out_g, s_g=out_g.stride(), A_log=work.A_log, dt_bias=work.dt_bias),
        packing=Packing(cu=grid.cu, first=grid.first, sequence=grid.sequence),
        factors=Factors(options.scale, options.unit, options.unit * float(options.erases)),
        N=grid.sequences,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        SIZES=Sizes(H=H, HV=HV, K=K, V=V, BT=C),
        FLAGS=_flags(grid, options, out),
        **config.options(),
    )
    if HV > H:
        sizes = HeadSizes(H, HV // H, K, C, ROWS=V, COLUMNS=K, NORM=options.qk_l2norm)
        summed = head_arguments((out_q, out_k), (read_q, read_k), out, sizes, grid, config)
        launch_kernel(wyfold_gradients_heads_gluon, grid.chunks * H, **summed)
    elif work.norm_dots is not None:
        _launch_norm(read_q, read_k, out_q, out_k, work.norm_dots, grid, config)
    copy_wanted(*(((out_g,), (out.g,)) if HV > H else ((out_q, out_k, out_g), (out.q, out.k, out.g))))
    sum_over_chunks(work.A_log, out.A_log)
    sum_over_chunks(work.dt_bias, out.dt_bias)


def _flags(grid: ChunkGrid, options: DeltaOptions, out: GradientOutputs) -> Flags:
    """Variant of the kernel. The gradient of beta is the diagonal of J's."""
    return Flags(
        PACKED=grid.cu is not None,
        WHOLE=grid.cu is None and grid.tokens % grid.chunk_size == 0,
        ACTIVATION=options.activation,
        CLAMPED=options.clamp != 0,
        NORM=options.qk_l2norm,
        LOGIT=options.beta_logit,
        ERASES=options.erases or out.beta is not None,
    )


class Workspace(NamedTuple):
    """What a launch sums up by chunks; None where it is not needed.

    Attributes:
        A_log: [chunks, HV, 2] gradient of A_log, by halves of the channels.
        dt_bias: [chunks, HV, K] gradient of dt_bias.
        norm_dots: [chunks * H, 2, 2, C] dot products for the norm's adjoint.
    """

    A_log: Tensor | None
    dt_bias: Tensor | None
    norm_dots: Tensor | None


def _workspace(q: Tensor, HV: int, grid: ChunkGrid, options: DeltaOptions, out: GradientOutputs) -> Workspace:
    """Allocate the workspace of a call."""
    (H, K), C = q.shape[2:], grid.chunk_size
    dA_log = ddt_bias = norm_dots = None
    if options.qk_l2norm and HV == H:
        norm_dots = q.new_empty(grid.chunks * H, 2, 2, C, dtype=torch.float32)
    if out.A_log is not None:
        dA_log = q.new_empty(grid.chunks, HV, 2, dtype=torch.float32)
    if out.dt_bias is not None:
        ddt_bias = q.new_empty(grid.chunks, HV, K, dtype=torch.float32)
    return Workspace(dA_log, ddt_bias, norm_dots)


def _launch_norm(
    q: Tensor, k: Tensor, dq: Tensor, dk: Tensor, norm_dots: Tensor, grid: ChunkGrid, config: Config
) -> None:
    """Apply the norm's adjoint to dq and dk, in place."""
    H, K = q.shape[2:]
    launch_kernel(
        wyfold_gradients_norm_gluon,
        grid.chunks * H,
        p_q=q,
        p_k=k,
        s_q=q.stride(),
        s_k=k.stride(),
        p_dq=dq,
        p_dk=dk,
        s_dq=dq.stride(),
        s_dk=dk.stride(),
        p_norm_dots=norm_dots,
        p_cu=grid.cu,
        p_first=grid.first,
        p_sequence=grid.sequence,
        N=grid.sequences,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        H=H,
        K=K,
        BT=grid.chunk_size,
        PACKED=grid.cu is not None,
        **config.options(),
    )


def _readable(x: Tensor) -> Tensor:
    """x in a layout and dtype that TMA can read; a copy where x has another."""
    x = x if x.dtype in ELEMENTS else x.float()
    return x if _tma_readable(x) else x.clone(memory_format=torch.contiguous_format)


def _tma_readable(x: Tensor) -> bool:
    """Whether TMA can read blocks of tokens of x."""
    return token_descriptor(x, 1, 64) is not None


def _output_buffer(to: Tensor | None, like: Tensor) -> Tensor:
    """Output buffer of a gradient: `to` where TMA can write it, else a temporary."""
    return to if to is not None and to.dtype == like.dtype and _tma_readable(to) else like.new_empty(like.shape)


def _descriptors(tokens: list[Tensor], borders: TokenBorders, C: int, BK: int) -> list[Any]:
    """TMA descriptors in kernel argument order: q, k, do, g, the gradients of q, k and g, then S, dS, e and X."""
    V = borders.e.shape[2]
    found = [token_descriptor(x, C, n) for x, n in zip(tokens, (BK, BK, V, BK, BK, BK, BK), strict=True)]
    found += [tile_descriptor(x, V, BK) for x in (borders.S, borders.dS)] + [
        tile_descriptor(x, C, V) for x in (borders.e, borders.X)
    ]
    return gluon_descriptors(found)
