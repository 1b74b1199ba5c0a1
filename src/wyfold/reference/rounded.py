"""Chunk form of the delta rules with the roundings of the 16-bit kernels: the yardstick of `error.judge`.

A yardstick is a result in the same dtype with the error that this dtype implies. A token loop is too accurate, because
it rounds only inputs and results. Kernels use matrix units with 16-bit operands, and store 16-bit tiles between
launches. This module computes the same form in the same chunks, and rounds the same values:

    prepare     decayed rows of a channel gate, those in its Gram matrices (from float16 all) to TF32; E; F; W
    scan        the state as an operand; y; without E also R and the written values
    scan_bwd    the same; R; e, X, and S and dS of each chunk; the terms of do and dR in dS, do before the scale.
                R, and without E the gradient of N, only as operands of products between tokens, not in a token's own
                term; but R everywhere if e is written into the state
    gradients   the gradients of the Gram matrices; the decayed rows of each level of a channel gate; neither inside
                blocks of 8 rows

All other values are float32, including the products that form A, E, F and W: kernels split their operands into pairs,
whose error is negligible in comparison. With float64 inputs everything is float64 and nothing is rounded.

    A = (I + diag(beta) J)^-1     F = P A     W = (I + J diag(beta))^-1     E = A^T (k decayed to the chunk's end)

Forward and backward are explicit; autograd differentiates the operations before them (norms, gates, sigmoids, groups).
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.reference.delta import SAFE_BOUND
from wyfold.reference.gates import beta_sigmoid, floored, gdn_gate, kda_gate, raise_to
from wyfold.reference.norm import l2norm
from wyfold.reference.sequences import sequence_count, share_heads, spans, used_rows, working_dtype, zero_rows


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    folded: bool | None = None,
    erases: bool = True,
    chunk_size: int = 64,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The three rules, selected by the rank of g. Other arguments and results as in `delta.kda`.

    Args:
        folded: The scans read E instead of W. None: as the kernels, E for a channel gate, else W.
        erases: Writes erase what their keys read. False: GLA.
        chunk_size: Tokens of a chunk, a power of two.
    """
    batch, tokens, value_heads, V = v.shape
    channel = g is not None and g.ndim == 4
    work = working_dtype(q, k, v, g, beta, initial_state)
    pieces = spans(cu_seqlens, batch, tokens)
    used = used_rows(pieces)

    rows, keys, values = (x[:, :used].to(work) for x in (q, k, v))
    if use_qk_l2norm_in_kernel:
        rows, keys = l2norm(rows), l2norm(keys)
    strength = values.new_ones(values.shape[:3]) if beta is None else beta[:, :used].to(work)
    if use_beta_sigmoid_in_kernel:
        strength = beta_sigmoid(strength, 2.0 if allow_neg_eigval else 1.0)
    log = values.new_zeros(values.shape[:3]) if g is None else g[:, :used].to(work)
    if use_gate_in_kernel:
        log = kda_gate(log, A_log, dt_bias, lower_bound) if channel else gdn_gate(log, A_log, dt_bias)
    if safe_gate:
        log = raise_to(log, SAFE_BOUND if lower_bound is None else lower_bound)
    log = floored(log.to(work))
    S0 = values.new_zeros(sequence_count(pieces), value_heads, q.shape[-1], V)
    if initial_state is not None:
        S0 = initial_state.to(work)

    scale = q.shape[-1] ** -0.5 if scale is None else scale
    form = Form(v.dtype, channel, channel if folded is None else folded, scale, erases)
    rows, keys = share_heads(rows, value_heads), share_heads(keys, value_heads)
    given = [rows, keys, values, log if channel else log[..., None], strength[..., None]]
    outputs, final = [values[:, :0]], [S0[:0]]
    for span, states in pieces:
        tiles = [_tiles(x[:, span], chunk_size) for x in given]
        o, S = _Chunks.apply(form, S0[states].flatten(0, 1), *tiles)
        o = o.flatten(1, 2)[:, : span.stop - span.start]
        outputs.append(o.unflatten(0, (-1, value_heads)).transpose(1, 2))
        final.append(S.unflatten(0, (-1, value_heads)))
    o = zero_rows(torch.cat(outputs, dim=1), tokens).to(v.dtype)
    return o, torch.cat(final) if output_final_state else None


def _tiles(x: Tensor, C: int) -> Tensor:
    """Tokens [B, T, HV, W] as tiles [B * HV, chunks, C, W], padded with zeros."""
    padded = zero_rows(x, -(-x.shape[1] // C) * C)
    return padded.transpose(1, 2).flatten(0, 1).unflatten(1, (-1, C))


@dataclass(frozen=True)
class Form:
    """Arithmetic of a call.

    Attributes:
        dtype: Dtype of the inputs.
        channel: The gate is per key channel.
        folded: The scans read E instead of W.
        scale: Factor of q.
        erases: Writes erase what their keys read.
    """

    dtype: torch.dtype
    channel: bool
    folded: bool
    scale: float
    erases: bool

    def fed(self, x: Tensor) -> Tensor:
        """Round x as an operand of a matrix product. Float16 uses TF32: the same mantissa without overflow."""
        return self.in_a_gram(x) if self.dtype == torch.float16 else self.stored(x)

    def in_a_gram(self, x: Tensor) -> Tensor:
        """Round x as an operand of a channel gate's Gram matrices: TF32, to nearest."""
        if self.dtype not in (torch.bfloat16, torch.float16):
            return x
        return ((x.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)

    def stored(self, x: Tensor) -> Tensor:
        """Round x as a tile stored for another launch. Float16 has too small a range and stores float32 tiles."""
        return x.to(torch.bfloat16).to(x.dtype) if self.dtype == torch.bfloat16 else x

    def of_rows(self, x: Tensor) -> Tensor:
        """Round x as decayed rows, which are read by matrix products only."""
        return self.stored(x) if self.dtype == torch.bfloat16 else self.in_a_gram(x)

    def of_gate(self, x: Tensor) -> Tensor:
        """Sum terms of channels to the granularity of the gate."""
        return x if self.channel else x.sum(-1, keepdim=True)


# --- intervals of tokens, as 0/1 matrices [C, C]; times a log gate they give log decays, transposed their adjoint


def _positions(x: Tensor) -> tuple[Tensor, Tensor]:
    o = torch.arange(x.shape[-2], device=x.device)
    return o[:, None], o[None, :]


def _to_row(x: Tensor) -> Tensor:
    """Intervals from the chunk's start to each row, inclusive. The complements run from after the row to the end."""
    row, token = _positions(x)
    return (token <= row).to(x)


NEAR = 8  # block of rows whose gradients under a channel gate are computed pair by pair, in float32


def _levels(x: Tensor) -> list[tuple[bool, Tensor, Tensor]]:
    """Levels of the recursive halving of a chunk into blocks of h rows, with an anchor at every second block's start.

    Returns:
        For each level: whether blocks are multiplied as tiles; the intervals between each row and its anchor; the mask
        of the pairs [r, s] that the level covers.
    """
    row, token = _positions(x)
    found = []
    for level in range((x.shape[-2] - 1).bit_length()):
        h = 1 << level
        anchor = row // (2 * h) * (2 * h) + h
        between = (token > torch.minimum(row, anchor)) & (token <= torch.maximum(row, anchor))
        found.append((h >= NEAR, between.to(x), (row // h % 2 == 1) & (token // h == row // h - 1)))
    return found


REACH = 96 * math.log(2)  # range of log decay covered by one anchor of the Gram matrices


# --- the launches, on tiles [n, chunks, C, width] and states [n, K, V] ------------------------------------------------


@dataclass(frozen=True)
class Factors:
    """Results of `prepare`, per chunk.

    Attributes:
        q, k: Rows multiplied with the entering state; decayed under a channel gate.
        k_end: Keys that write to the state; decayed to the chunk's end under a channel gate.
        read, write: Decays applied after the products if the gate is per head; else ones.
        total: Decay of the state over the chunk.
        E, F, W: Factors, as in the module's docstring.
        FB: F diag(beta).
    """

    q: Tensor
    k: Tensor
    k_end: Tensor
    read: Tensor
    write: Tensor
    total: Tensor
    E: Tensor
    F: Tensor
    W: Tensor
    FB: Tensor


class Borders(NamedTuple):
    """Results of `scan_bwd`, per chunk.

    Attributes:
        S: State entering the chunk.
        dS: Gradient of the state leaving it.
        e: Errors.
        X: Gradients of y.
    """

    S: Tensor
    dS: Tensor
    e: Tensor
    X: Tensor


class Gradients(NamedTuple):
    """Gradients of the tiles, in the order of the arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def prepare(form: Form, q: Tensor, k: Tensor, g: Tensor, beta: Tensor) -> Factors:
    J, P = _grams(form, q, k, g)
    J = J * form.erases
    unit = torch.eye(J.shape[-1], dtype=J.dtype, device=J.device).expand_as(J)
    A = torch.linalg.solve_triangular(unit + beta * J, unit, upper=False, unitriangular=True)
    W = torch.linalg.solve_triangular(unit + J * divisor(beta).mT, unit, upper=False, unitriangular=True)
    from_start, to_end = _decays(g)
    E, F = A.mT @ (k * to_end), P @ A
    read, write, k_end = from_start, to_end, k
    if form.channel:
        q, k, k_end = form.of_rows(q * from_start), form.of_rows(k * from_start), form.of_rows(k * to_end)
        read = write = torch.ones_like(beta)
    k = k * form.erases
    total = g.sum(-2, keepdim=True).exp().mT
    tiles = E, F, W, F * beta.mT
    return Factors(q, k, k_end, read, write, total, *(form.fed(form.stored(x)) for x in tiles))


def divisor(beta: Tensor) -> Tensor:
    """beta with tiny values replaced by 2^-60, so that A = diag(beta) W / diag(beta) is defined."""
    return beta.where(beta.abs() >= 2.0**-60, 2.0**-60)


def forward_step(form: Form, f: Factors, v: Tensor, beta: Tensor, S: Tensor, i: int) -> tuple[Tensor, Tensor, Tensor]:
    """One chunk of the scan.

    Returns:
        The operand of the output's product, errors e = N / beta as the backward uses them, and the state leaving chunk
        i.
    """
    R = v[:, i] - f.read[:, i] * (f.k[:, i] @ form.fed(S))
    r, y, e = form.fed(R), form.fed(beta[:, i] * R), f.W[:, i] @ form.fed(R)
    if form.folded:
        return y, e + (R - r), f.total[:, i] * S + f.E[:, i].mT @ y
    return r, e, f.total[:, i] * S + f.k_end[:, i].mT @ form.fed(f.write[:, i] * beta[:, i] * e)


def scan(form: Form, f: Factors, v: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    o = torch.empty_like(v)
    for i in range(v.shape[1]):
        read = f.read[:, i] * (f.q[:, i] @ form.fed(S))
        taken, _, S = forward_step(form, f, v, beta, S, i)
        o[:, i] = form.scale * (read + (f.F if form.folded else f.FB)[:, i] @ taken)
    return o, S


def scan_bwd(
    form: Form, f: Factors, v: Tensor, beta: Tensor, do: Tensor, S: Tensor, dS: Tensor
) -> tuple[Borders, Tensor]:
    """Backward scan; returns borders and the gradient of the initial state."""
    states = v.new_empty(2, *v.shape[:2], S.shape[-2], v.shape[-1])
    e, X = torch.empty_like(v), torch.empty_like(v)
    for i in range(v.shape[1]):
        states[0, :, i] = S
        _, e[:, i], S = forward_step(form, f, v, beta, S, i)
    for i in reversed(range(v.shape[1])):
        states[1, :, i] = dS
        if form.folded:
            through = f.E[:, i] @ form.fed(dS)
        else:
            b = divisor(beta[:, i])
            dN = b * f.write[:, i] * (f.k_end[:, i] @ form.fed(dS))
            through = (dN - form.fed(dN) + f.W[:, i].mT @ form.fed(dN)) / b
        X[:, i] = f.F[:, i].mT @ do[:, i] + through
        dS = f.total[:, i] * dS + f.q[:, i].mT @ form.fed(f.read[:, i] * do[:, i])
        dS -= f.k[:, i].mT @ form.fed(f.read[:, i] * beta[:, i] * X[:, i])
    return Borders(*(form.stored(x) for x in (*states, e, X))), dS


def gradients(form: Form, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, do: Tensor, borders: Borders) -> Gradients:
    S, dS, e, X = borders
    S_, dS_, e_, X_ = (form.fed(x) for x in borders)
    dJ, dP = -beta * beta.mT * (X_ @ e_.mT) * form.erases, beta.mT * (do @ e_.mT)
    (from_start, to_end), start = _decays(g), _to_row(g)
    dq, dk_end = from_start * (do @ S_.mT), beta * to_end * (e_ @ dS_.mT)
    dk = -beta * from_start * (X_ @ S_.mT) * form.erases
    dg = start.mT @ form.of_gate(q * dq + k * dk) + (1 - start).mT @ form.of_gate(k * dk_end)
    dg += form.of_gate((S * dS).sum(-1)[..., None, :]) * g.sum(-2, keepdim=True).exp()
    for x, dx in zip((dq, dk, dg), _grams_bwd(form, q, k, g, dJ.tril(-1), dP.tril())):
        x += dx
    return Gradients(dq, dk + dk_end, beta * X, dg, (X * e).sum(-1, keepdim=True))


def _decays(g: Tensor) -> tuple[Tensor, Tensor]:
    """Decays from the chunk's start to each row, and from each row to the chunk's end."""
    start = _to_row(g)
    return (start @ g).exp(), ((1 - start) @ g).exp()


def _pairwise(g: Tensor) -> Tensor:
    """Decay between two rows, for a gate per head; masked before the exponential."""
    G = _to_row(g) @ g
    row, token = _positions(g)
    return (G - G.mT).masked_fill(token > row, -torch.inf).exp()


def _grams(form: Form, q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Decayed Gram matrices J (keys) and P (queries and keys).

    Under a channel gate, blocks of 16 rows are multiplied with all earlier rows and with themselves relative to an
    anchor at the block's first row. Inside the block, decays back to that anchor can grow without bound, so further
    anchors follow at distances `REACH`, each for the rows in its range.
    """
    if not form.channel:
        return (_pairwise(g) * (k @ k.mT)).tril(-1), _pairwise(g) * (q @ k.mT)
    row, token = _positions(g)
    J, P = (k.new_zeros(*k.shape[:-1], k.shape[-2]) for _ in range(2))
    for first in range(0, k.shape[-2] if k.numel() else 0, 16):
        mine = slice(first, first + 16)
        sums = ((token > row.clamp(max=first)) & (token <= row.clamp(min=first))).to(g) @ g
        for i in range(int(-sums[..., mine, :].min() / REACH) + 1):
            anchor = -i * REACH
            near = (row >= first) & (sums >= anchor - REACH) & ((sums < anchor) | (i == 0))
            back = (anchor - sums).where(near, -torch.inf)
            columns = form.in_a_gram(k * (sums.where(row < first, back) if i == 0 else back).exp()).mT
            decay = (sums[..., mine, :] - anchor).clamp(max=0).exp()
            J[..., mine, :] += form.in_a_gram(k[..., mine, :] * decay) @ columns
            P[..., mine, :] += form.in_a_gram(q[..., mine, :] * decay) @ columns
    return J.tril(-1), P.tril(-1) + torch.diag_embed((q * k).sum(-1))


def _grams_bwd(form: Form, q: Tensor, k: Tensor, g: Tensor, dJ: Tensor, dP: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and of each token's log gate, which sums over the pairs whose interval contains the token."""
    start = _to_row(g)
    if not form.channel:
        dJ, dP = _pairwise(g) * dJ, _pairwise(g) * dP
        pairs = (dP * (q @ k.mT) + dJ * (k @ k.mT)).tril(-1)
        dg = (start.mT @ pairs).tril(-1).sum(-1, keepdim=True)
        dJ, dP = form.fed(dJ), form.fed(dP)
        return dP @ k, (dJ + dJ.mT) @ k + dP.mT @ q, dg
    diagonal = dP.diagonal(dim1=-2, dim2=-1)[..., None]
    dq, dk, dg = diagonal * k, diagonal * q, torch.zeros_like(g)
    for tiles, between, meet in _levels(g):
        decay = (between @ g).exp()
        operands = k * decay, q * decay, dJ.where(meet, 0), dP.where(meet, 0)
        k_level, q_level, dJ_level, dP_level = (form.fed(x) if tiles else x for x in operands)
        dq_level = decay * (dP_level @ k_level)
        dk_level = decay * ((dJ_level + dJ_level.mT) @ k_level + dP_level.mT @ q_level)
        dq, dk, dg = dq + dq_level, dk + dk_level, dg + between.mT @ (q * dq_level + k * dk_level)
    return dq, dk, dg


class _Chunks(torch.autograd.Function):
    """Autograd function of the chunk form; returns o and the state after the last chunk."""

    @staticmethod
    def forward(ctx: Any, form: Form, S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
        ctx.form, ctx.factors = form, prepare(form, q, k, g, beta)
        ctx.save_for_backward(S, q, k, v, g, beta)
        return scan(form, ctx.factors, v, beta, S)

    @staticmethod
    def backward(ctx: Any, do: Tensor, dS: Tensor) -> Any:
        S, q, k, v, g, beta = ctx.saved_tensors
        scale = ctx.form.scale or 1.0  # the backward is linear in do and dS, and computed in units of the scale
        do = do if ctx.form.scale else torch.zeros_like(do)
        borders, dS = scan_bwd(ctx.form, ctx.factors, v, beta, do, S, dS / scale)
        return None, *(scale * x for x in (dS, *gradients(ctx.form, q, k, g, beta, do, borders)))
