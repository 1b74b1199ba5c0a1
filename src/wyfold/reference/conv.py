"""Short causal convolution, token by token."""

import torch
import torch.nn.functional as F
from torch import Tensor

from wyfold.reference.sequences import sequence_count, spans, used_rows, working_dtype, zero_rows


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Depthwise convolution over the last W inputs of each channel.

        y_t = act(bias + sum_{j=1..W} weight[:, j] x_{t-W+j}) + residual_t

    Inputs before a sequence's first token come from its state, or are zero.

    Args:
        x: [B, T, D], any float.
        weight: [D, W]. The last column multiplies the current token.
        bias: [D] or None.
        residual: [B, T, D] or None. Added after the activation.
        initial_state: [N, D, S] or None, S >= W-1. The latest inputs, oldest first.
        output_final_state: Return the latest S inputs (W-1 without an initial state).
        activation: None, or "silu" or "swish" (the same).
        cu_seqlens: [N+1] boundaries of packed sequences, or a layout with that attribute.

    Returns:
        y: [B, T, D], dtype of x. Rows past the last boundary are zero.
        final_state: [N, D, S], dtype of the initial state, else of x; None without `output_final_state`.
    """
    work = working_dtype(x, weight, bias, residual, initial_state)
    pieces = spans(cu_seqlens, x.shape[0], x.shape[1])
    width = weight.shape[1]
    w = weight.to(work)
    if initial_state is None:
        initial_state = x.new_zeros(sequence_count(pieces), x.shape[2], width - 1)

    y = [x[:, :0].to(work)]
    final = [initial_state[:0]]
    for rows, states in pieces:
        carried = initial_state[states]  # [n, D, S]
        inputs = torch.cat([carried.to(work), x[:, rows].mT.to(work)], dim=2)  # [n, D, S + T]
        first = carried.shape[2] - width + 1
        for t in range(rows.stop - rows.start):
            y_t = (inputs[:, :, first + t : first + t + width] * w).sum(-1)  # [n, D]
            y_t = y_t if bias is None else y_t + bias.to(work)
            y.append((y_t if activation is None else F.silu(y_t)).unsqueeze(1))
        final.append(inputs[:, :, inputs.shape[2] - carried.shape[2] :].to(carried.dtype))

    out = torch.cat(y, dim=1)
    if residual is not None:
        out = out + residual[:, : used_rows(pieces)].to(work)
    return zero_rows(out, x.shape[1]).to(x.dtype), torch.cat(final) if output_final_state else None
