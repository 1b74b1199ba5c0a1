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
import triton.language as tl
from torch import Tensor

from wyfold.kernels.conv import ConvGradients
from wyfold.runtime.kernel_configs import LaunchKey, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.tile.activation.triton import silu, silu_bwd
from wyfold.tile.taps.triton import load_row, load_taps, tap_products, taps, taps_bwd, zeros

NEVER = tl.constexpr(1 << 62)


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
        inputs=Inputs(
            x=x,
            s_x=x.stride(),
            w=weight,
            s_w=weight.stride(),
            bias=_vector(bias),
            state=state,
            s_state=_strides(state, 3),
            residual=residual,
            s_residual=_strides(residual, 2),
        ),
        outputs=Outputs(y=out, s_y=out.stride(), final=final_state, s_final=_strides(final_state, 3)),
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
    sums = out.weight is not None or out.bias is not None
    token_programs = spans.programs if sums or out.x is not None else 0
    programs = token_programs + (0 if out.state is None else N)
    if programs * D == 0:
        return
    partial = x.new_empty(token_programs, W + 1, D, dtype=dtype) if sums and token_programs else None
    launch_kernel(
        wyfold_conv_bwd_triton,
        programs * spans.blocks,
        inputs=Inputs(
            x=x,
            s_x=x.stride(),
            w=weight,
            s_w=weight.stride(),
            bias=_vector(bias),
            state=state,
            s_state=_strides(state, 3),
        ),
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
            out.weight.add_(total[:W])
        if out.bias is not None:
            out.bias.add_(total[W])


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


@triton.jit
def _boundary(p_cu, n, T, length):
    """First token of sequence n in the row of tokens."""
    if p_cu is None:
        return n.to(tl.int64) * length
    else:
        return tl.minimum(tl.maximum(tl.load(p_cu + n).to(tl.int64), 0), T)


@triton.jit
def _last_boundary(p_cu, N, T):
    """First token that belongs to no sequence."""
    if p_cu is None:
        return T
    else:
        return tl.minimum(tl.maximum(tl.load(p_cu + N).to(tl.int64), 0), T)


@triton.jit
def _sequence(p_cu, t, n, N, T, last, length):
    """Sequence n or a later one that holds token t: its number, first token and end.

    Tokens from `last` on are sequence N, which has no end. The search doubles its step, then halves it: the result is
    usually the next sequence, but any number of empty ones may lie between.
    """
    if p_cu is None:
        n = t // tl.maximum(length, 1)
        start = n * length
        end = tl.where(t < last, start + length, NEVER)
    elif t >= last:
        n = n * 0 + N
        start = last
        end = last * 0 + NEVER
    else:
        step = n * 0 + 1
        while (n + step < N) & (_boundary(p_cu, tl.minimum(n + step, N), T, length) <= t):
            n += step
            step *= 2
        high = tl.minimum(n + step, N)
        while high - n > 1:
            middle = (n + high) // 2
            if _boundary(p_cu, middle, T, length) <= t:
                n = middle
            else:
                high = middle
        # Clamped, so that t is inside the sequence for any contents.
        start = tl.minimum(_boundary(p_cu, n, T, length), t)
        end = tl.maximum(_boundary(p_cu, n + 1, T, length), t + 1)
    return n, start, end


@triton.jit
def _input(inputs, n, start, t, N, S, last, o_d, m_d):
    """Input at token t of sequence n; from its initial state if t is before its start."""
    b_x = load_row(inputs.x, t * inputs.s_x[0] + o_d * inputs.s_x[1], m_d & (t >= start) & (t < last))
    if inputs.state is not None:
        o_state = n * inputs.s_state[0] + o_d * inputs.s_state[1] + (S + t - start) * inputs.s_state[2]
        b_x = tl.where(t < start, load_row(inputs.state, o_state, m_d & (t < start) & (n < N)), b_x)
    return b_x


@triton.jit
def _store_row(p, strides, t, o_d, b_x, mask):
    """Store channels of token t of a [T, D], rounding once."""
    tl.store(p + t * strides[0] + o_d * strides[1], b_x.to(p.dtype.element_ty), mask=mask)


@triton.jit
def _window(inputs, n, start, t, N, S, last, o_d, m_d, W: tl.constexpr):
    """The W - 1 inputs before token t of sequence n, oldest first."""
    window: tl.tuple = ()
    for i in tl.static_range(W - 1):
        token = t - (W - 1) + i
        window = window + (_input(inputs, n, start, token, N, S, last, o_d, m_d),)
    return window


@triton.jit
def _rows(p, s_rows, t, limit, o_d, m_d, BT: tl.constexpr):
    """BT neighbouring tokens, each a row; zeros from `limit` on."""
    rows: tl.tuple = ()
    for i in tl.static_range(BT):
        if p is not None:
            rows = rows + (load_row(p, (t + i) * s_rows[0] + o_d * s_rows[1], m_d & (t + i < limit)),)
        else:
            rows = rows + (o_d * 0.0,)
    return rows


@triton.jit
def _output(
    window, w, b_bias, b_residual, exists, p_bias, p_residual, ACTIVATED: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """y of the token at the end of this window; zeros outside sequences."""
    b_y = taps(window, w, W)
    if p_bias is not None:
        b_y += b_bias
    if ACTIVATED:
        b_y = silu(b_y)
    if p_residual is not None:
        b_y += b_residual
    return tl.where(exists, b_y, 0.0)


@triton.jit
def _activation_gradient(window, w, b_bias, b_dy, exists, p_bias, ACTIVATED: tl.constexpr, W: tl.constexpr):
    """dp = dy act'(p) of the token at the end of this window; zeros outside sequences."""
    b_d = b_dy
    if ACTIVATED:
        b_p = taps(window, w, W)
        if p_bias is not None:
            b_p += b_bias
        b_d = tl.where(exists, silu_bwd(b_p, b_d), 0.0)
    return b_d


class Inputs(NamedTuple):
    """Kernel argument: inputs of the convolution, each with its strides, or None.

    Attributes:
        x, s_x: [T, D] tokens.
        w, s_w, bias: Taps, and bias.
        state, s_state: [N, D, S] inputs before each sequence.
        residual, s_residual: [T, D], added to the result; None in the backward.
    """

    x: Any
    s_x: Any
    w: Any
    s_w: Any
    bias: Any
    state: Any
    s_state: Any
    residual: Any = None
    s_residual: Any = None
    end: None = None


class Outputs(NamedTuple):
    """Kernel argument: results that are written, each with its strides, or None."""

    y: Any
    s_y: Any
    final: Any
    s_final: Any
    end: None = None


class Gradients(NamedTuple):
    """Kernel argument: gradients, each with its strides, or None.

    Attributes:
        dy, s_dy, dfinal, s_dfinal: Of the results.
        dx, s_dx, dstate, s_dstate: Of the inputs, written.
        partial: [spans, W + 1, D] float32 sums of the gradients of taps and bias, written.
    """

    dy: Any
    s_dy: Any
    dfinal: Any
    s_dfinal: Any
    dx: Any
    s_dx: Any
    dstate: Any
    s_dstate: Any
    partial: Any
    end: None = None


@triton.jit(do_not_specialize=["T", "N", "length", "spans", "groups"])
def wyfold_conv_triton(
    inputs, outputs, p_cu, T, N, length, S, S_final, spans, groups, ACTIVATED: tl.constexpr, D: tl.constexpr,
    W: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (D + BD - 1) // BD
    o_d = (tl.program_id(0) % blocks).to(tl.int64) * BD + tl.arange(0, BD)
    m_d = o_d < D
    i_program = (tl.program_id(0) // blocks).to(tl.int64)
    last = _last_boundary(p_cu, N, T).to(tl.int64)
    if i_program < spans:
        w, b_bias = load_taps(inputs.w, inputs.s_w, inputs.bias, o_d, m_d, W)
        t = i_program * groups * BT
        n, start, end = _sequence(p_cu, t, t * 0, N, T, last, length)
        window = _window(inputs, n, start, t, N, S, last, o_d, m_d, W)
        for _ in range(groups):
            if t + BT <= end:
                rows = _rows(inputs.x, inputs.s_x, t, last, o_d, m_d, BT)
                residuals = _rows(inputs.residual, inputs.s_residual, t, last, o_d, m_d, BT)
                for i in tl.static_range(BT):
                    full = window + (rows[i],)
                    b_y = _output(
                        full, w, b_bias, residuals[i], t + i < last, inputs.bias, inputs.residual, ACTIVATED, W
                    )
                    _store_row(outputs.y, outputs.s_y, t + i, o_d, b_y, m_d & (t + i < T))
                    window = full[1:]
            else:
                # A sequence ends among these tokens, so they are processed one by one.
                for i in range(BT):
                    if t + i >= end:
                        n, start, end = _sequence(p_cu, t + i, n, N, T, last, length)
                        window = _window(inputs, n, start, t + i, N, S, last, o_d, m_d, W)
                    full = window + _rows(inputs.x, inputs.s_x, t + i, last, o_d, m_d, 1)
                    residual = _rows(inputs.residual, inputs.s_residual, t + i, last, o_d, m_d, 1)
                    b_y = _output(
                        full, w, b_bias, residual[0], t + i < last, inputs.bias, inputs.residual, ACTIVATED, W
                    )
                    _store_row(outputs.y, outputs.s_y, t + i, o_d, b_y, m_d & (t + i < T))
                    window = full[1:]
            t += BT
    elif outputs.final is not None:
        n = i_program - spans
        start = _boundary(p_cu, n, T, length)
        end = tl.maximum(_boundary(p_cu, n + 1, T, length), start)
        for c in range(S_final):
            b_x = _input(inputs, n, start, end - S_final + c, N, S, last, o_d, m_d)
            p_out = outputs.final + n * outputs.s_final[0] + o_d * outputs.s_final[1] + c * outputs.s_final[2]
            tl.store(p_out, b_x.to(outputs.final.dtype.element_ty), mask=m_d)


@triton.jit
def _final_grad(gradients, n, end, t, N, S, o_d, m_d):
    """Gradient of the input at t of sequence n through the final state, of which it is entry S - (end - t)."""
    c = S - (end - t)
    offsets = n * gradients.s_dfinal[0] + o_d * gradients.s_dfinal[1] + c * gradients.s_dfinal[2]
    return load_row(gradients.dfinal, offsets, m_d & (c >= 0) & (n < N))


@triton.jit(do_not_specialize=["T", "N", "length", "spans", "groups"])
def wyfold_conv_bwd_triton(
    inputs, gradients, p_cu, T, N, length, S, S_final, S_dstate, spans, groups, ACTIVATED: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (D + BD - 1) // BD
    o_d = (tl.program_id(0) % blocks).to(tl.int64) * BD + tl.arange(0, BD)
    m_d = o_d < D
    i_program = (tl.program_id(0) // blocks).to(tl.int64)
    last = _last_boundary(p_cu, N, T).to(tl.int64)
    w, b_bias = load_taps(inputs.w, inputs.s_w, inputs.bias, o_d, m_d, W)
    if i_program < spans:
        first = i_program * (groups * BT - (W - 1))
        limit = tl.minimum(first + groups * BT - (W - 1), T)
        t = first
        n, start, end = _sequence(p_cu, t, t * 0, N, T, last, length)
        window = _window(inputs, n, start, t, N, S, last, o_d, m_d, W)
        pending = zeros(W - 1, BD)
        total = zeros(W + 1, BD)
        for _ in range(groups):
            dw = zeros(W, BD)
            b_dbias = tl.zeros((BD,), tl.float32)
            # Token t + i completes the row W - 1 tokens before it. Near a sequence's end the final state contributes
            # to it as well.
            if (t + BT <= end) & (t + BT <= limit) & ((gradients.dfinal is None) | (end - (t + BT - W) > S_final)):
                rows = _rows(inputs.x, inputs.s_x, t, last, o_d, m_d, BT)
                d_rows = _rows(gradients.dy, gradients.s_dy, t, last, o_d, m_d, BT)
                for i in tl.static_range(BT):
                    full = window + (rows[i],)
                    b_d = _activation_gradient(full, w, b_bias, d_rows[i], t + i < last, inputs.bias, ACTIVATED, W)
                    if gradients.partial is not None:
                        dw = tap_products(full, b_d, dw, W)
                        b_dbias += b_d
                    if gradients.dx is not None:
                        b_dx, pending = taps_bwd(b_d, w, pending, W)
                        token = t + i - (W - 1)
                        mask = m_d & (token >= first) & (token >= start)
                        _store_row(gradients.dx, gradients.s_dx, token, o_d, b_dx, mask)
                    window = full[1:]
            else:
                for i in range(BT):
                    if t + i >= end:
                        # Pending gradients belong to a finished sequence: no later token contributes.
                        if gradients.dx is not None:
                            for k in tl.static_range(W - 1):
                                token = t + i - (W - 1) + k
                                mask = m_d & (token >= first) & (token >= start) & (token < limit)
                                b_dx = pending[k]
                                if gradients.dfinal is not None:
                                    b_dx += _final_grad(gradients, n, end, token, N, S_final, o_d, mask)
                                _store_row(gradients.dx, gradients.s_dx, token, o_d, b_dx, mask)
                        n, start, end = _sequence(p_cu, t + i, n, N, T, last, length)
                        window = _window(inputs, n, start, t + i, N, S, last, o_d, m_d, W)
                        pending = zeros(W - 1, BD)
                    full = window + _rows(inputs.x, inputs.s_x, t + i, last, o_d, m_d, 1)
                    d_row = _rows(gradients.dy, gradients.s_dy, t + i, last, o_d, m_d, 1)
                    b_d = _activation_gradient(full, w, b_bias, d_row[0], t + i < last, inputs.bias, ACTIVATED, W)
                    if gradients.partial is not None:
                        b_own = tl.where(t + i < limit, b_d, 0.0)
                        dw = tap_products(full, b_own, dw, W)
                        b_dbias += b_own
                    if gradients.dx is not None:
                        b_dx, pending = taps_bwd(b_d, w, pending, W)
                        token = t + i - (W - 1)
                        mask = m_d & (token >= first) & (token >= start) & (token < limit)
                        if gradients.dfinal is not None:
                            b_dx += _final_grad(gradients, n, end, token, N, S_final, o_d, mask)
                        _store_row(gradients.dx, gradients.s_dx, token, o_d, b_dx, mask)
                    window = full[1:]
            sums: tl.tuple = ()
            for i in tl.static_range(W):
                sums = sums + (total[i] + dw[i],)
            total = sums + (total[W] + b_dbias,)
            t += BT
        if gradients.partial is not None:
            for i in tl.static_range(W + 1):
                tl.store(gradients.partial + (i_program * (W + 1) + i) * D + o_d, total[i], mask=m_d)
    elif gradients.dstate is not None:
        n = i_program - spans
        start = _boundary(p_cu, n, T, length)
        end = tl.maximum(_boundary(p_cu, n + 1, T, length), start)
        window = _window(inputs, n, start, start, N, S, last, o_d, m_d, W)
        rows = _rows(inputs.x, inputs.s_x, start, end, o_d, m_d, W - 1)
        d_rows = _rows(gradients.dy, gradients.s_dy, start, end, o_d, m_d, W - 1)
        dstate = zeros(W - 1, BD)
        for i in tl.static_range(W - 1):
            full = window + (rows[i],)
            b_d = _activation_gradient(full, w, b_bias, d_rows[i], start + i < end, inputs.bias, ACTIVATED, W)
            given: tl.tuple = ()
            for k in tl.static_range(W - 1):
                given = given + ((tl.fma(w[k - i], b_d, dstate[k]) if k >= i else dstate[k]),)
            dstate = given
            window = full[1:]
        p_out = gradients.dstate + n * gradients.s_dstate[0] + o_d * gradients.s_dstate[1]
        for i in tl.static_range(W - 1):
            b_dstate = dstate[i]
            if gradients.dfinal is not None:
                token = start - (W - 1) + i
                b_dstate += _final_grad(gradients, n, end, token, N, S_final, o_d, m_d)
            tl.store(p_out + (S_dstate - (W - 1) + i) * gradients.s_dstate[2], b_dstate, mask=m_d)
        for c in range(S_dstate - (W - 1)):
            b_dstate = tl.zeros((BD,), tl.float32)
            if gradients.dfinal is not None:
                token = start - S_dstate + c
                b_dstate += _final_grad(gradients, n, end, token, N, S_final, o_d, m_d)
            tl.store(p_out + c * gradients.s_dstate[2], b_dstate, mask=m_d)
