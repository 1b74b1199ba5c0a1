"""The triangular steps of a chunk as loops over rows: the key Gram matrix, and the inverse of I plus it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from wyfold.reference.gates import floored
from wyfold.reference.sequences import chunks, share_heads, spans, used_rows, working_dtype, zero_rows


def chunk_scaled_dot_kkt(
    k: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    chunk_size: int = 64,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Decayed Gram matrix of the keys of every chunk, times the write strength.

        L[r, s] = beta_r sum_d k[r, d] k[s, d] exp(g[s+1, d] + ... + g[r, d])     s < r, else 0

    Args:
        k: [B, T, H, K], any float.
        beta: [B, T, HV]. Write strength.
        g: [B, T, HV] or [B, T, HV, K] or None. Natural log of the decay per token, <= 0.
        chunk_size: C, counted from each sequence's first token.
        cu_seqlens: [N+1] boundaries of packed sequences, or a layout with that attribute.
        output_dtype: None: float32, or float64 if an input is float64.

    Returns:
        L: [B, T, HV, C]; a token holds its row of the chunk's matrix. Zero from the diagonal on, and past the last
            boundary.
    """
    work = working_dtype(k, beta, g)
    pieces = spans(cu_seqlens, k.shape[0], k.shape[1])
    used = used_rows(pieces)
    keys = share_heads(k[:, :used].to(work), beta.shape[2])
    strength = beta[:, :used].to(work)
    decay = None if g is None else floored(g[:, :used].to(work)).exp()
    if decay is not None and decay.ndim == 3:
        decay = decay.unsqueeze(-1)  # the same for all channels

    L = [strength[:, :0, :, None].expand(-1, -1, -1, chunk_size)]
    for span in pieces:
        for chunk in chunks(span, chunk_size):
            seen = keys[:, chunk.start : chunk.start].transpose(1, 2)  # [B, HV, 0, K]: earlier keys, decayed to now
            for r in range(chunk.start, chunk.stop):
                if decay is not None:
                    seen = seen * decay[:, r, :, None]
                row = strength[:, r, :, None] * (seen @ keys[:, r, :, :, None]).squeeze(-1)  # [B, HV, rows so far]
                L.append(F.pad(row, (0, chunk_size - row.shape[-1])).unsqueeze(1))
                seen = torch.cat([seen, keys[:, r, :, None]], dim=2)
    return zero_rows(torch.cat(L, dim=1), k.shape[1]).to(output_dtype or work)


def solve_tril(A: Tensor, *, cu_seqlens: Tensor | None = None, output_dtype: torch.dtype | None = None) -> Tensor:
    """Inverse of I plus a strictly lower triangular matrix, for every chunk, by forward substitution.

        X[r, :] = I[r, :] - sum_{s<r} A[r, s] X[s, :]

    Args:
        A: [B, T, H, C], any float. A token holds its row r of the chunk's matrix; only columns s < r are read.
        cu_seqlens: [N+1] boundaries of packed sequences, or a layout with that attribute.
        output_dtype: None: float32, or float64 for a float64 A.

    Returns:
        X: [B, T, H, C], unit lower triangular; zero past a short chunk's last column and past the last boundary.
    """
    work = working_dtype(A)
    size = A.shape[-1]
    identity = torch.eye(size, dtype=work, device=A.device)

    X = [A[:, :0].to(work)]
    pieces = spans(cu_seqlens, A.shape[0], A.shape[1])
    for span in pieces:
        for chunk in chunks(span, size):
            solved = A[:, :0].to(work).transpose(1, 2)  # [B, H, 0, C]
            for r, token in enumerate(range(chunk.start, chunk.stop)):
                below = A[:, token, :, None, :r].to(work)  # [B, H, 1, r]
                solved = torch.cat([solved, identity[r] - below @ solved], dim=2)
            X.append(solved.transpose(1, 2))
    return zero_rows(torch.cat(X, dim=1), A.shape[1]).to(output_dtype or work)
