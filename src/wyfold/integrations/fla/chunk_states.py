"""States that enter each chunk, as fla returns them, from the states that Wyfold returns after every n tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def with_chunk_states(
    found: Any, initial: Tensor | None, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None, k: Tensor, n: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Results of an operator with the states after every n tokens, with fla's in their place, in the dtype of k."""
    o, final, states = found
    boundaries = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    return o, final, chunk_states(states, initial, boundaries, k.shape[1], n).to(k.dtype)


def chunk_states(states: Tensor, initial: Tensor | None, boundaries: Tensor | None, T: int, n: int) -> Tensor:
    """States [B, chunks, HV, K, V] that enter each chunk of n tokens, with the chunks of packed sequences in order.

    Args:
        states: [B, T // n, HV, K, V] after n, 2n, ... tokens of each row, or [T // n, HV, K, V] of packed sequences.
        initial: [N, HV, K, V] state that enters each sequence; None: zeros.
        boundaries: [N+1] of packed sequences. They are copied to the CPU, as the number of chunks depends on them.
        T: Tokens of a row.
    """
    if boundaries is None:
        first = _first(initial, states, states.shape[0])[:, None]
        return torch.cat([first, states], 1)[:, : -(-T // n)]
    lengths = boundaries.detach().cpu().long().diff()
    counts = -(-lengths // n)
    sequence = torch.arange(len(lengths)).repeat_interleave(counts)
    number = torch.arange(len(sequence)) - (counts.cumsum(0) - counts)[sequence]
    whole = lengths // n
    row = (whole.cumsum(0) - whole)[sequence] + number - 1
    first = _first(initial, states, len(lengths))
    at = torch.where(number == 0, sequence, len(first) + row).to(states.device)
    return torch.cat([first, states]).index_select(0, at)[None]


def _first(initial: Tensor | None, states: Tensor, N: int) -> Tensor:
    return states.new_zeros(N, *states.shape[-3:]) if initial is None else initial.detach().to(states.dtype)
