"""Sequence layouts: boundaries of the documents in a packed buffer, made once per batch.

A user makes a `SequenceLayout` and passes it to every operator and layer of a model. Its tensors are on the batch's
device and are sized by capacity, so making or refilling a layout never waits for the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from wyfold.runtime import check

_NAME = "SequenceLayout"


class SequenceLayout:
    """Boundaries of the documents that share one buffer of tokens.

    Sequence n holds tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1. Tokens from cu_seqlens[N] on belong to no sequence;
    they are never read, and their outputs are zero. A layout is a pytree. Equal layouts give equal bits, however they
    were made.

    Args:
        cu_seqlens: [N+1] int32 or int64. Non-decreasing, from 0 to at most `tokens`; equal neighbours are an empty
            sequence.
        tokens: Length of the buffer: T of every tensor that is used with the layout.
        max_seqs: Capacity. Empty sequences at the end raise N to it, so that `update_` can set more sequences.

    Raises:
        TypeError: cu_seqlens is no tensor, or a number no int.
        ValueError: wrong shape or dtype, contents that are no boundaries (read on the CPU only), or more than max_seqs
            sequences.

    Examples:
        >>> import torch
        >>> layout = SequenceLayout(torch.tensor([0, 5, 5, 9]), tokens=12)
        >>> layout.sequence_ids.tolist()
        [0, 0, 0, 0, 0, 2, 2, 2, 2, -1, -1, -1]
        >>> layout.positions.tolist()
        [0, 1, 2, 3, 4, 0, 1, 2, 3, -1, -1, -1]
    """

    cu_seqlens: Tensor
    tokens: int
    longest: int | None = None
    """Tokens of the longest sequence, if the layout was made from lengths and not updated since; else None."""

    def __init__(self, cu_seqlens: Tensor, tokens: int, *, max_seqs: int | None = None):
        boundaries(_NAME, cu_seqlens)
        self.tokens = check.integer(_NAME, "tokens", tokens, least=0)
        if check.readable(cu_seqlens):
            legal_boundaries(_NAME, cu_seqlens, tokens)
        if max_seqs is not None:
            N = cu_seqlens.shape[0] - 1
            if check.integer(_NAME, "max_seqs", max_seqs, least=0) < N:
                raise ValueError(f"{_NAME}: max_seqs must be at least the number of sequences, {N}, got {max_seqs}")
            cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:].expand(max_seqs - N)])
        self.cu_seqlens = cu_seqlens.clone()  # `update_` must not write into the caller's tensor

    @classmethod
    def from_lengths(
        cls, lengths: list[int], *, tokens: int | None = None, device: torch.device | str | None = None
    ) -> SequenceLayout:
        """Layout of sequences of the given lengths, one after another; `tokens` defaults to their sum."""
        if not isinstance(lengths, list | tuple):
            raise TypeError(f"{_NAME}: lengths must be a list of ints, got {type(lengths).__name__}")
        for length in lengths:
            check.integer(_NAME, "lengths", length, least=0)
        cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0)
        layout = cls(cu_seqlens, sum(lengths) if tokens is None else tokens)
        layout.longest = max(lengths, default=0)
        return layout

    @classmethod
    def from_position_ids(cls, position_ids: Tensor, *, max_seqs: int | None = None) -> SequenceLayout:
        """Layout in which a sequence starts wherever the position is 0.

        Args:
            position_ids: [T] or [1, T] integer. Must begin with 0.
            max_seqs: Capacity. None counts the sequences, which waits for the device once.
        """
        position_ids = _row(position_ids, "position_ids")
        if check.readable(position_ids) and bool((position_ids[:1] != 0).any()):
            raise ValueError(f"{_NAME}: position_ids must begin with 0, got {int(position_ids[0])}")
        return cls._from_starts(position_ids == 0, max_seqs)

    @classmethod
    def from_seq_idx(cls, seq_idx: Tensor, *, max_seqs: int | None = None) -> SequenceLayout:
        """Layout in which a sequence starts wherever the sequence's number changes.

        Args:
            seq_idx: [T] or [1, T] integer, the sequence of each token. Tokens with a negative number belong to no
                sequence, and are at the end.
            max_seqs: Capacity. None counts the sequences, which waits for the device once.
        """
        seq_idx = _row(seq_idx, "seq_idx")
        if check.readable(seq_idx) and bool(((seq_idx[:-1] < 0) & (seq_idx[1:] >= 0)).any()):
            raise ValueError(
                f"{_NAME}: seq_idx must be negative only at its end, got a sequence after negative numbers"
            )
        starts = torch.ones_like(seq_idx, dtype=torch.bool)
        starts[1:] = seq_idx[1:] != seq_idx[:-1]
        return cls._from_starts(starts & (seq_idx >= 0), max_seqs, end=(seq_idx >= 0).sum())

    @classmethod
    def _from_starts(cls, starts: Tensor, max_seqs: int | None, end: Tensor | None = None) -> SequenceLayout:
        T = starts.shape[0]
        N = int(starts.sum()) if max_seqs is None else check.integer(_NAME, "max_seqs", max_seqs, least=0)
        if check.readable(starts) and N < int(starts.sum()):
            # Sequences beyond the capacity would become part of the last one.
            raise ValueError(
                f"{_NAME}: max_seqs must be at least the number of sequences, {int(starts.sum())}, got {N}"
            )
        # A stable sort puts the starts first, in order. Entries without a start get the end.
        first = torch.argsort(~starts, stable=True)[:N]
        found = torch.arange(first.shape[0], device=starts.device) < starts.sum()
        end = torch.tensor(T, device=starts.device) if end is None else end
        cu_seqlens = torch.cat([torch.where(found, first, end), end.expand(1 + max(0, N - T))])
        return cls(cu_seqlens, T)

    @classmethod
    def from_mask(cls, mask: Tensor) -> PaddedLayout:
        """Layout of a padded batch, with `pack` and `unpack` to convert between padded and packed tensors.

        Args:
            mask: [B, T] bool or integer, nonzero where a token is real. Padding may be left or right.
        """
        return PaddedLayout(mask)

    @property
    def max_seqs(self) -> int:
        """Number of sequences N, including empty ones at the end."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def device(self) -> torch.device:
        return self.cu_seqlens.device

    @property
    def lengths(self) -> Tensor:
        """[N] tokens of each sequence."""
        return self.cu_seqlens.diff()

    @property
    def sequence_ids(self) -> Tensor:
        """[T] int64 sequence of each token, -1 past the last boundary."""
        token = torch.arange(self.tokens, device=self.device)
        ids = torch.searchsorted(self.cu_seqlens[1:].to(token.dtype).contiguous(), token, right=True)
        return torch.where(token < self.cu_seqlens[-1], ids, -1)

    @property
    def positions(self) -> Tensor:
        """[T] int64 position of each token in its sequence, -1 past the last boundary."""
        ids = self.sequence_ids
        token = torch.arange(self.tokens, device=self.device)
        return torch.where(ids >= 0, token - self.cu_seqlens.to(token.dtype)[ids.clamp(min=0)], -1)

    def checkpoint_offsets(self, n: int) -> Tensor:
        """[N+1] int64 offsets: states of sequence i after n, 2n, ... tokens are rows offsets[i] to offsets[i+1] - 1."""
        check.integer(_NAME, "n", n, least=1)
        rows = (self.lengths // n).to(torch.int64).cumsum(0)
        return torch.cat([rows.new_zeros(1), rows])

    def update_(self, cu_seqlens: Tensor) -> SequenceLayout:
        """Replace the boundaries in place, for graph replay and reused buffers. Missing sequences become empty."""
        boundaries(_NAME, cu_seqlens)
        if check.readable(cu_seqlens):
            legal_boundaries(_NAME, cu_seqlens, self.tokens)
        N = cu_seqlens.shape[0] - 1
        if N > self.max_seqs:
            raise ValueError(f"{_NAME}.update_: cu_seqlens must have at most {self.max_seqs} sequences, got {N}")
        self.longest = None
        self.cu_seqlens[: N + 1].copy_(cu_seqlens)
        self.cu_seqlens[N + 1 :].copy_(cu_seqlens[-1:].expand(self.max_seqs - N))
        return self

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> SequenceLayout:
        """Copy the layout to a device, as data loaders move a batch; returns itself if it is there already.

        Args:
            device: Target of the boundaries.
            non_blocking: Whether a copy from pinned memory may run asynchronously to the host.

        Raises:
            TypeError: device is a dtype; boundaries are not cast.
        """
        if isinstance(device, torch.dtype):
            raise TypeError(f"{_NAME}.to: device must be a device, got {device}; boundaries are integers and not cast")
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> SequenceLayout:
        """Copy the layout to pinned memory, for asynchronous copies to a GPU; returns itself if it is there already."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> SequenceLayout:
        """A copy with `change` applied to each tensor and all other attributes kept; itself if no tensor changes."""
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        changed = {name: change(x) for name, x in tensors.items()}
        if all(changed[name] is x for name, x in tensors.items()):
            return self
        layout = copy.copy(self)
        vars(layout).update(changed)
        return layout

    def check(self) -> None:
        """Wait for the device, read the boundaries, and raise a ValueError unless they are legal."""
        legal_boundaries(_NAME, self.cu_seqlens, self.tokens)

    def __repr__(self) -> str:
        return f"SequenceLayout(max_seqs={self.max_seqs}, tokens={self.tokens}, device={str(self.device)!r})"


class PaddedLayout(SequenceLayout):
    """The layout of a padded batch packed into one buffer of B * T tokens, real tokens first.

    Attributes:
        mask: [B, T] bool, True where a token is real.
    """

    def __init__(self, mask: Tensor):
        if check.tensor(_NAME, "mask", mask).ndim != 2 or mask.is_floating_point():
            raise ValueError(f"{_NAME}: mask must be [B, T] bool or integer, got {list(mask.shape)} {mask.dtype}")
        self.mask = mask != 0
        lengths = self.mask.sum(1)
        super().__init__(torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), self.mask.numel())

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, ...] padded -> [1, B * T, ...] packed, zeros past the last boundary. Differentiable."""
        self._expect(x, self.mask.shape)
        order = torch.argsort(~self.mask.flatten(), stable=True)
        packed = x.flatten(0, 1).index_select(0, order)
        return torch.where(_expand_mask(self.positions >= 0, packed), packed, 0)[None]

    def unpack(self, x: Tensor) -> Tensor:
        """[1, B * T, ...] packed -> [B, T, ...] padded, zeros in the padding. Differentiable."""
        self._expect(x, torch.Size((1, self.tokens)))
        real = self.mask.flatten()
        row = (real.cumsum(0) - 1).clamp(min=0)
        return torch.where(_expand_mask(real, x[0]), x[0].index_select(0, row), 0).unflatten(0, self.mask.shape)

    def update_(self, cu_seqlens: Tensor) -> SequenceLayout:
        """Not supported: boundaries do not determine where the padding of a row is.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"{_NAME}.update_: cu_seqlens must go to a layout made from boundaries, got one made from a mask; "
            "make a new layout from the new mask"
        )

    def _expect(self, x: Tensor, leading: torch.Size) -> None:
        if check.tensor(_NAME, "x", x).shape[:2] != leading:
            raise ValueError(f"{_NAME}: x must begin with {list(leading)}, got {list(x.shape)}")


def boundaries(op: str, cu_seqlens: object, name: str = "cu_seqlens") -> Tensor:
    """Return cu_seqlens if it is [N+1] int32 or int64, or raise. `name` is the argument's, for the message."""
    cu = check.tensor(op, name, cu_seqlens)
    if cu.ndim != 1 or cu.shape[0] < 1:
        raise ValueError(f"{op}: {name} must be [N+1] with at least one entry, got {list(cu.shape)}")
    if cu.dtype not in check.INDICES:
        raise ValueError(f"{op}: {name} must be int32 or int64, got {str(cu.dtype).removeprefix('torch.')}")
    return cu


def boundaries_of(cu_seqlens: Any) -> tuple[Any, int | None]:
    """Boundaries and tokens of a layout. Anything else is returned as it is, with None."""
    if isinstance(cu_seqlens, SequenceLayout):
        return cu_seqlens.cu_seqlens, cu_seqlens.tokens
    return cu_seqlens, None


def legal_boundaries(op: str, cu_seqlens: Tensor, tokens: int, name: str = "cu_seqlens") -> Tensor:
    """Return cu_seqlens as int64 on the CPU if its contents are boundaries, or raise. Waits for the device."""
    cu = cu_seqlens.detach().to("cpu", torch.int64)
    first, last = int(cu[0]), int(cu[-1])
    if first != 0:
        raise ValueError(f"{op}: {name} must begin with 0, got {first}")
    if bool((cu.diff() < 0).any()):
        raise ValueError(
            f"{op}: {name} must not decrease, got {cu.tolist() if cu.shape[0] <= 16 else 'a decreasing pair'}"
        )
    if last > tokens:
        raise ValueError(f"{op}: {name} must end at most at T = {tokens}, got {last}")
    return cu


def packed_boundaries(op: str, x: Tensor, cu_seqlens: Tensor, tokens: int | None = None) -> Tensor:
    """Check cu_seqlens against a packed batch x [1, T, ...], and return it.

    Args:
        op: Operator's name, for messages.
        x: A tensor of the batch.
        cu_seqlens, tokens: Results of `boundaries_of`.
    """
    if tokens is not None and tokens != x.shape[1]:
        raise ValueError(f"{op}: cu_seqlens must be a layout of T = {x.shape[1]} tokens, got {tokens}")
    cu = boundaries(op, cu_seqlens)
    if x.shape[0] != 1:
        raise ValueError(f"{op}: cu_seqlens must come with a batch of B = 1, got B = {x.shape[0]}")
    if cu.device != x.device:
        raise ValueError(f"{op}: cu_seqlens must be on {x.device}, got {cu.device}")
    return cu


def _row(x: Tensor, name: str) -> Tensor:
    check.tensor(_NAME, name, x)
    if x.is_floating_point() or x.ndim not in (1, 2) or (x.ndim == 2 and x.shape[0] != 1):
        raise ValueError(f"{_NAME}: {name} must be [T] or [1, T] integer, got {list(x.shape)} {x.dtype}")
    return x.flatten()


def _expand_mask(mask: Tensor, x: Tensor) -> Tensor:
    return mask.reshape(-1, *[1] * (x.ndim - 1))


def _flatten(layout: SequenceLayout) -> tuple[list[Any], Any]:
    return [layout.cu_seqlens], layout.tokens


def _flatten_with_keys(layout: SequenceLayout) -> tuple[list[Any], Any]:
    return [(pytree.GetAttrKey("cu_seqlens"), layout.cu_seqlens)], layout.tokens


def _unflatten(children: Any, tokens: Any) -> SequenceLayout:
    layout = object.__new__(SequenceLayout)
    (layout.cu_seqlens,), layout.tokens = children, tokens
    return layout


def _flatten_padded(layout: PaddedLayout) -> tuple[list[Any], Any]:
    return [layout.cu_seqlens, layout.mask], layout.tokens


def _flatten_padded_with_keys(layout: PaddedLayout) -> tuple[list[Any], Any]:
    children, tokens = _flatten_padded(layout)
    return [(pytree.GetAttrKey(name), x) for name, x in zip(("cu_seqlens", "mask"), children)], tokens


def _unflatten_padded(children: Any, tokens: Any) -> PaddedLayout:
    layout = object.__new__(PaddedLayout)
    (layout.cu_seqlens, layout.mask), layout.tokens = children, tokens
    return layout


for _kind, _parts, _named_parts, _joined in (
    (SequenceLayout, _flatten, _flatten_with_keys, _unflatten),
    (PaddedLayout, _flatten_padded, _flatten_padded_with_keys, _unflatten_padded),
):
    pytree.register_pytree_node(
        _kind,
        _parts,
        _joined,
        serialized_type_name=f"wyfold.{_kind.__name__}",
        flatten_with_keys_fn=_named_parts,  # torch.export names its inputs by them
    )
