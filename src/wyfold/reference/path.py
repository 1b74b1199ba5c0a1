"""PaTH attention, token by token: softmax attention whose keys are reflected by every later token.

A token first changes all earlier keys, and adds its gate to their log decays. Then it is appended, and attends:

    k_j <- k_j - beta_t (w_t . k_j) w_t       d_j <- d_j + g_t       j < t
    o_t  = sum_{j <= t} softmax_j(scale k_j . q_t + s d_j) v_j       s = scale, or 1 without `gate_scaled`
"""

import torch
from torch import Tensor

from wyfold.reference.sequences import spans, used_rows, working_dtype, zero_rows


def path_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    gate_scaled: bool = True,
    cu_seqlens: Tensor | None = None,
    use_cache: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """PaTH attention with an optional forget gate.

    Args:
        q: [B, T, HQ, K], any float; HQ a multiple of H. Query head j reads key and value head `j // (HQ // H)`.
        k: [B, T, H, K].
        v: [B, T, H, V].
        w: [B, T, H, K]. Directions of the reflections, of length 1.
        beta: [B, T, H]. Strengths of the reflections, in [0, 2].
        g: [B, T, HQ]. Log decay per token, <= 0; minus infinity hides all earlier tokens. None: no decay.
        scale: Factor of the products of queries and keys. None: K ** -0.5.
        gate_scaled: Whether the gate is multiplied by `scale` as well.
        cu_seqlens: [N+1] boundaries of sequences packed into one row, or a layout with that attribute.
        use_cache: Return the keys after each sequence's last token.

    Returns:
        o: [B, T, HQ, V], dtype of v. Rows past the last boundary are zero and were never read.
        k_cache: [B, T, H, K], dtype of k, the keys after the last token of their sequence; None without `use_cache`.

    Source:
        PaTH Attention, arXiv:2505.16381, Eq. (1) to (3); the gate is that of Forgetting Transformer, arXiv:2503.02130.
    """
    (batch, tokens, H, K), HQ = k.shape, q.shape[2]
    work = working_dtype(q, k, v, w, beta, g)
    pieces = spans(cu_seqlens, batch, tokens)
    used = used_rows(pieces)
    scale = K**-0.5 if scale is None else scale
    gate = scale if gate_scaled else 1.0
    o_dtype, k_dtype = v.dtype, k.dtype
    q = q[:, :used].to(work).unflatten(2, (H, HQ // H))
    k, v, w, beta = (x[:, :used].to(work) for x in (k, v, w, beta))
    g = None if g is None else g[:, :used].to(work).unflatten(2, (H, HQ // H))

    out, cached = [q.new_zeros(batch, 0, HQ, v.shape[3])], [k[:, :0]]
    for rows, _ in pieces:
        keys = k[:, rows.start : rows.start]  # [n, S, H, K]
        decays = q.new_zeros(keys.shape[0], 0, H, HQ // H)  # [n, S, H, HQ // H]
        for t in range(rows.start, rows.stop):
            along = torch.einsum("nshk,nhk->nsh", keys, w[:, t]) * beta[:, None, t]
            keys = torch.cat([keys - along[..., None] * w[:, None, t], k[:, t : t + 1]], dim=1)
            logits = scale * torch.einsum("nshk,nhek->nshe", keys, q[:, t])
            if g is not None:
                decays = torch.cat([decays + g[:, None, t], torch.zeros_like(g[:, t : t + 1])], dim=1)
                logits = logits + gate * decays
            # Weights sum to one. Values relative to the token's own keep the small gradients of that weight exact.
            values = v[:, rows.start : t + 1] - v[:, t : t + 1]
            read = torch.einsum("nshe,nshv->nhev", logits.softmax(1), values) + v[:, t, :, None]
            out.append(read.flatten(1, 2).unsqueeze(1))
        cached.append(keys)
    o = zero_rows(torch.cat(out, dim=1), tokens).to(o_dtype)
    return o, zero_rows(torch.cat(cached, dim=1), tokens).to(k_dtype) if use_cache else None
