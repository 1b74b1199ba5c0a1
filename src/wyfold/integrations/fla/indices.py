"""Positions, sequence numbers and chunk numbers of packed sequences, under fla's names (`fla.ops.utils.index`).

`cu_seqlens` [N+1] are boundaries of N sequences in one buffer. `cu_seqlens_cpu` is a copy of them on the CPU; a
function that gets it does not wait for the device.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from wyfold.runtime import check

Device = torch.device | str | None


def prepare_lens(cu_seqlens: Tensor) -> Tensor:
    """Lengths [N] of the sequences."""
    return cu_seqlens.diff()


def prepare_lens_from_mask(mask: Tensor) -> Tensor:
    """Number of tokens [B] int32 that a mask [B, T] keeps in each row."""
    return mask.sum(-1, dtype=torch.int32)


def prepare_cu_seqlens_from_lens(lens: Tensor, dtype: torch.dtype | None = torch.int32) -> Tensor:
    """Boundaries [N+1] of sequences with these lengths [N]."""
    return F.pad(lens.cumsum(0, dtype=dtype), (1, 0))


def prepare_cu_seqlens_from_mask(mask: Tensor, dtype: torch.dtype | None = torch.int32) -> Tensor:
    """Boundaries [B+1] of the tokens that a mask [B, T] keeps, packed row after row."""
    return prepare_cu_seqlens_from_lens(prepare_lens_from_mask(mask), dtype)


def prepare_split_cu_seqlens(
    batch_size: int | None = None,
    seq_len: int | None = None,
    split_size: int | None = None,
    cu_seqlens: Tensor | None = None,
    dtype: torch.dtype | None = torch.int32,
    device: Device = "cpu",
) -> Tensor:
    """Boundaries of parts of at most `split_size` tokens, of B rows of equal length or of packed sequences.

    Args:
        batch_size, seq_len: Rows and their length; ignored with `cu_seqlens`.
        split_size: Longest part; must be given.
        cu_seqlens: Boundaries of the sequences; waits for their device.
        dtype, device: Of the result.

    Raises:
        TypeError: Neither boundaries nor rows are given, or no split_size.
    """
    name = "prepare_split_cu_seqlens"
    if split_size is None:
        raise TypeError(f"{name}: split_size must be given, got None")
    check.integer(name, "split_size", split_size, least=1)
    if cu_seqlens is not None:
        ends = cu_seqlens.tolist()
    elif batch_size is None or seq_len is None:
        raise TypeError(f"{name}: cu_seqlens, or batch_size and seq_len, must be given")
    else:
        ends = [row * seq_len for row in range(batch_size + 1)]
    starts = [part for start, stop in pairwise(ends) for part in range(start, stop, split_size)]
    return torch.tensor([*starts, ends[-1]], dtype=dtype, device=device)


def prepare_position_ids(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """Position [total] of each token in its sequence; dtype and device of `cu_seqlens`."""
    lens = prepare_lens(cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu)
    return _numbered(lens)[1].to(cu_seqlens)


def prepare_sequence_ids(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """Number [total] int64 of each token's sequence. As in fla, sequences without tokens are not counted."""
    return prepare_position_ids(cu_seqlens, cu_seqlens_cpu).eq(0).cumsum(0) - 1


def prepare_token_indices(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """[total, 2]: sequence number and position of each token."""
    positions = prepare_position_ids(cu_seqlens, cu_seqlens_cpu)
    return torch.stack([positions.eq(0).cumsum(0) - 1, positions], 1).to(cu_seqlens)


def prepare_chunk_indices(cu_seqlens: Tensor, chunk_size: int, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """[chunks, 2]: sequence number, and number within the sequence, of each chunk of `chunk_size` tokens."""
    lens = prepare_lens(cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu)
    return torch.stack(_numbered(_chunks(lens, chunk_size)), 1).to(cu_seqlens)


def prepare_chunk_offsets(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    """[N+1] int64: chunks before each sequence, and all chunks."""
    return F.pad(_chunks(prepare_lens(cu_seqlens), chunk_size), (1, 0)).cumsum(-1)


def prepare_chunk_indices_static(cu_seqlens: Tensor, chunk_size: int, nt_max: int) -> tuple[Tensor, Tensor]:
    """`prepare_chunk_indices` with a fixed number of rows, for CUDA graphs, and the chunk offsets.

    Args:
        cu_seqlens: [N+1]; sequences without tokens fill it up.
        nt_max: Rows of the result.

    Returns:
        indices: [nt_max, 2]; rows that no chunk needs are (-1, 0).
        offsets: [N+1], as of `prepare_chunk_offsets`.
    """
    offsets = prepare_chunk_offsets(cu_seqlens, chunk_size)
    row = torch.arange(nt_max, device=cu_seqlens.device, dtype=offsets.dtype)
    sequence = torch.searchsorted(offsets, row, right=True) - 1
    needed = row < offsets[-1]
    number = row - offsets[sequence]
    indices = torch.stack([sequence.where(needed, -1), number.where(needed, 0)], 1)
    return indices.to(cu_seqlens), offsets.to(cu_seqlens)


def get_max_num_splits(cu_seqlens: Tensor, chunk_size: int, cu_seqlens_cpu: Tensor | None = None) -> int:
    """Number of chunks of the longest sequence; without `cu_seqlens_cpu` it waits for the device."""
    lens = prepare_lens(cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu)
    return int(_chunks(lens.max(), chunk_size))


def _chunks(lens: Tensor, chunk_size: int) -> Tensor:
    check.integer("chunk indices", "chunk_size", chunk_size, least=1)
    return (lens + chunk_size - 1) // chunk_size


def _numbered(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For groups of these sizes: each member's group, and its number within the group."""
    group = torch.arange(counts.shape[0], device=counts.device).repeat_interleave(counts)
    first = F.pad(counts.cumsum(0), (1, 0))[:-1]
    return group, torch.arange(group.shape[0], device=counts.device) - first[group]
