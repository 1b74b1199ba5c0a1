"""TTT-Linear, token by token: a linear model (S, c) per head, trained by gradient steps on the sequence.

All tokens of a mini-batch take their gradients at the state (S0, c0) at its start. G and a sum the gradients, each
times the token's factor eta_col_t, which is 1 by default:

    z  = S0^T k_t + c0           x = (z - mean z) r,   r = (var z + eps)^(-1/2)       biased variance
    y  = w (w x + b - (v_t - k_t))                     gradient of 1/2 |w x + b - (v_t - k_t)|^2 in x
    n  = (r/D) (D y - sum y - x sum(y x)) eta_col_t    the same gradient in z, times the token's factor
    G <- G + k_t n^T             a <- a + n
    S  = S0 - eta_t G            c  = c0 - eta_t a
    o  = scale S^T q_t + c       out_t = o + w LN(o) + b, or q_t + w LN(o) + b
"""

import torch
from torch import Tensor

from wyfold.reference.sequences import sequence_count, share_heads, spans, used_rows, working_dtype, zero_rows


def ttt_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    eta: Tensor | float,
    *,
    eta_col: Tensor | float | None = None,
    residual: str = "o",
    scale: float | None = None,
    eps: float = 1e-6,
    chunk_size: int = 16,
    initial_state: Tensor | None = None,
    initial_state_bias: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    state_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """TTT-Linear with inner norm, output norm and residual.

    Args:
        q: [B, T, H, K], any float.
        k: [B, T, H, K].
        v: [B, T, HV, V], V = K = D, HV a multiple of H; value head j reads query and key head `j // (HV // H)`.
        w: [HV, V]. Weight of both norms.
        b: [HV, V]. Bias of both norms.
        eta: [B, T, HV, 1] or [B, T, HV] or a number. Step size at token t, a factor of the mini-batch's whole sum.
        eta_col: As eta. Factor of the token's own gradient: token t uses the step size eta[t] * eta_col[s] for token
            s's gradient. None: 1.
        residual: Summand next to the norm of o: "o" adds o itself, "q" the query without `scale`.
        scale: Factor of q in o. None: K ** -0.5.
        eps: Added to the variances.
        chunk_size: Tokens of a mini-batch, counted from each sequence's first; the last one may be short. Part of the
            model, not a tile size.
        initial_state: [N, HV, K, V], or [N, HV, V, K] with `state_v_first`. None: zeros.
        initial_state_bias: [N, HV, 1, V]. None: zeros.
        output_final_state: Return the states after each sequence's last token, which ends its mini-batch.
        state_v_first: Layout of the matrix state, in and out.
        state_dtype: Dtype of returned states. None: the working dtype.
        cu_seqlens: [N+1] boundaries of sequences packed into one row, or a layout with that attribute.

    Returns:
        out: [B, T, HV, V], dtype of v. Rows past the last boundary are zero and were never read.
        final_state, final_state_bias: Shapes of the initial ones; None without `output_final_state`.

    Source:
        Learning to (learn at test time), arXiv:2407.04620, sections 2.4 to 2.7.
    """
    batch, tokens, heads, D = v.shape
    dtype = v.dtype
    work = working_dtype(q, k, v, w, b, eta, eta_col, initial_state, initial_state_bias)
    pieces = spans(cu_seqlens, batch, tokens)
    used = used_rows(pieces)
    scale = D**-0.5 if scale is None else scale

    q, k, v = (x[:, :used].to(work) for x in (q, k, v))
    q, k = share_heads(q, heads), share_heads(k, heads)
    w, b = w.to(work), b.to(work)
    if residual not in ("o", "q"):
        raise ValueError(f'ttt_linear: residual must be "o" or "q", got {residual!r}')
    step, factor = (
        (x[:, :used].to(work) if isinstance(x, Tensor) else v.new_full((batch, used, heads), x)).reshape(
            batch, used, heads, 1
        )
        for x in (eta, 1.0 if eta_col is None else eta_col)
    )
    N = sequence_count(pieces)
    if initial_state is None:
        initial_state = v.new_zeros(N, heads, D, D)
    elif state_v_first:
        initial_state = initial_state.mT
    if initial_state_bias is None:
        initial_state_bias = v.new_zeros(N, heads, 1, D)

    out, final, final_bias = [v[:, :0]], [initial_state[:0].to(work)], [initial_state_bias[:0].to(work)]
    for rows, states in pieces:
        S = initial_state[states].to(work)  # [n, HV, D, D]
        c = initial_state_bias[states, :, 0].to(work)  # [n, HV, D]
        for start in range(rows.start, rows.stop, chunk_size):
            S0, c0, G, a = S, c, torch.zeros_like(S), torch.zeros_like(c)
            for t in range(start, min(start + chunk_size, rows.stop)):
                x, r = _norm(torch.einsum("nhkv,nhk->nhv", S0, k[:, t]) + c0, eps)
                y = w * (w * x + b - (v[:, t] - k[:, t]))
                n = r / D * (D * y - y.sum(-1, keepdim=True) - x * (y * x).sum(-1, keepdim=True)) * factor[:, t]
                G = G + torch.einsum("nhk,nhv->nhkv", k[:, t], n)
                a = a + n
                S = S0 - step[:, t, :, :, None] * G
                c = c0 - step[:, t] * a
                o = scale * torch.einsum("nhkv,nhk->nhv", S, q[:, t]) + c
                out.append(((o if residual == "o" else q[:, t]) + w * _norm(o, eps)[0] + b).unsqueeze(1))
        final.append(S)
        final_bias.append(c.unsqueeze(2))

    o_all = zero_rows(torch.cat(out, dim=1), tokens).to(dtype)
    if not output_final_state:
        return o_all, None, None
    final_state = torch.cat(final).mT if state_v_first else torch.cat(final)
    return o_all, final_state.to(state_dtype or work), torch.cat(final_bias).to(state_dtype or work)


def _norm(z: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """z [.., D] normalised to mean 0 and variance 1, and its reciprocal standard deviation [.., 1]."""
    centred = z - z.mean(-1, keepdim=True)
    r = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return centred * r, r
