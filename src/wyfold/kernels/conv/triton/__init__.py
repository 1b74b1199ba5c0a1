"""`conv` in Triton: a program processes a span of tokens serially, for a block of channels.

The last W - 1 inputs stay in registers, so each is loaded once. At the beginning of a sequence they are replaced by its
state, or by zeros. Backward proceeds in the same direction and covers W - 1 more tokens: gradients of the last W - 1
inputs stay in registers until the last tap has contributed. Separate programs, last in the same launch, read and write
the states of sequences.

Boundaries are read on the device and clamped there, so no contents cause an access outside a tensor.

Gradients of the taps and the bias are summed over a few tokens, then over a span, then over spans, always in one order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from wyfold.kernels.conv import ConvGradients
from wyfold.kernels.conv.triton.arguments import Gradients, Inputs, Outputs
from wyfold.kernels.conv.triton.kernels import wyfold_conv_bwd_triton, wyfold_conv_triton
from wyfold.runtime.kernel_configs import LaunchKey, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.tile.index.triton import with_strides


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | int,
    activated: bool,
    out: Tensor,
    final_state: Tensor | None,
) -> None:
    """Write y to out, and the latest inputs to final_state.

    Args:
        x: [T, D], float32 or narrower, any strides; tokens of all sequences, one after another.
        weight: [D, W], float32 or narrower, any strides.
        bias: [D] or None.
        residual: [T, D] or None. Added after the activation.
        state: [N, D, S], S >= W-1, or None (zeros). The latest inputs, oldest first.
        cu_seqlens: [N+1] boundaries, int32 or int64 on x's device, or the one length of all sequences.
        activated: Whether act is silu, else the identity.
        out: [T, D]. Zero past the last boundary.
        final_state: [N, D, S], or None if unwanted.
    """
    D, W = weight.shape
    spans = _spans("conv", x, W, 0)
    N = _sequences(cu_seqlens, state, final_state)
    programs = spans.programs + (0 if final_state is None else N)
    if programs * D == 0:
        return
    launch_kernel(
        wyfold_conv_triton,
        programs * spans.blocks,
        inputs=with_strides(
            Inputs,
            x=x,
            w=weight,
            bias=_vector(bias),
            state=state,
            s_state=_strides(state, 3),
            residual=residual,
            s_residual=_strides(residual, 2),
        ),
        outputs=with_strides(Outputs, y=out, final=final_state, s_final=_strides(final_state, 3)),
        p_cu=_boundaries(cu_seqlens),
        T=x.shape[0],
        N=N,
        length=_length(cu_seqlens),
        S=0 if state is None else state.shape[2],
        S_final=0 if final_state is None else final_state.shape[2],
        spans=spans.programs,
        groups=spans.groups,
        ACTIVATED=activated,
        D=D,
        W=W,
        **spans.launch(),
    )


def conv_bwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | int,
    activated: bool,
    dy: Tensor | None,
    dfinal: Tensor | None,
    dtype: torch.dtype,
    out: ConvGradients,
) -> None:
    """Gradients of `conv`.

    Args:
        x, weight, bias, state, cu_seqlens, activated: As in `conv`.
        dy: [T, D] or None (zeros).
        dfinal: [N, D, S] or None (zeros).
        dtype: Dtype of the arithmetic, float32.
        out: Wanted gradients.
    """
    D, W = weight.shape
    spans = _spans("conv_bwd", x, W, W - 1)
    N = _sequences(cu_seqlens, state, dfinal, out.state)
    sums = [total for total in (out.weight, out.bias) if total is not None]
    token_programs = spans.programs if sums or out.x is not None else 0
    programs = token_programs + (0 if out.state is None else N)
    if token_programs == 0:
        for total in sums:
            total.zero_()
    if programs * D == 0:
        return
    partial = x.new_empty(token_programs, W + 1, D, dtype=dtype) if sums and token_programs else None
    launch_kernel(
        wyfold_conv_bwd_triton,
        programs * spans.blocks,
        inputs=with_strides(Inputs, x=x, w=weight, bias=_vector(bias), state=state, s_state=_strides(state, 3)),
        gradients=Gradients(
            dy=dy,
            s_dy=_strides(dy, 2),
            dfinal=dfinal,
            s_dfinal=_strides(dfinal, 3),
            dx=out.x,
            s_dx=_strides(out.x, 2),
            dstate=out.state,
            s_dstate=_strides(out.state, 3),
            partial=partial,
        ),
        p_cu=_boundaries(cu_seqlens),
        T=x.shape[0],
        N=N,
        length=_length(cu_seqlens),
        S=0 if state is None else state.shape[2],
        S_final=0 if dfinal is None else dfinal.shape[2],
        S_dstate=0 if out.state is None else out.state.shape[2],
        spans=token_programs,
        groups=spans.groups,
        ACTIVATED=activated,
        D=D,
        W=W,
        **spans.launch(),
    )
    if partial is not None:
        total = partial.sum(0)
        if out.weight is not None:
            out.weight.copy_(total[:W])
        if out.bias is not None:
            out.bias.copy_(total[W])


class _Spans(NamedTuple):
    """Partition of a launch into programs.

    Attributes:
        programs: Number of spans.
        groups: Groups of BT tokens per span.
        blocks: Number of blocks of BD channels.
        BD: Channels per block.
        BT: Tokens per group.
        options: Launch options of the kernel.
    """

    programs: int
    groups: int
    blocks: int
    BD: int
    BT: int
    options: dict[str, Any]

    def launch(self) -> dict[str, Any]:
        return {"BD": self.BD, "BT": self.BT, **self.options}


def _spans(launch: str, x: Tensor, W: int, overlap: int) -> _Spans:
    """Spans of x, chosen by shapes alone: as long as possible while the GPU still gets enough programs.

    `overlap`: tokens of the next span that each span also processes.
    """
    T, D = x.shape
    config = tuned("conv.triton", LaunchKey(W=W, launch=launch), x.device)
    BT, BD = config.blocks["BT"], min(config.blocks["BD"], max(32, triton.next_power_of_2(D)))
    blocks = triton.cdiv(D, BD)
    span = min(max(T * blocks // config.blocks["PROGRAMS"], config.blocks["SHORTEST"]), config.blocks["LONGEST"])
    groups = triton.cdiv(span + overlap, BT)
    warps = max(1, config.warps * BD // config.blocks["BD"])
    options = {**config.options(contract=False), "num_warps": warps}
    return _Spans(triton.cdiv(T, groups * BT - overlap), groups, blocks, BD, BT, options)


def _sequences(cu_seqlens: Tensor | int, *states: Tensor | None) -> int:
    """Number of sequences; for one common length, the first dimension of the states."""
    if isinstance(cu_seqlens, Tensor):
        return cu_seqlens.shape[0] - 1
    return max((state.shape[0] for state in states if state is not None), default=0)


def _length(cu_seqlens: Tensor | int) -> int:
    return 0 if isinstance(cu_seqlens, Tensor) else cu_seqlens


def _boundaries(cu_seqlens: Tensor | int) -> Tensor | None:
    return cu_seqlens.contiguous() if isinstance(cu_seqlens, Tensor) else None


def _strides(x: Tensor | None, rank: int) -> tuple[int, ...]:
    return (0,) * rank if x is None else x.stride()


def _vector(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()
