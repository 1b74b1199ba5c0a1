"""Byte-level text for `train` and `demo`: the corpus, its split, and batches.

A corpus is one row of bytes and the borders of its documents. There is no tokenizer: the vocabulary is the 256 bytes. A
batch depends only on the seed and its index, so one integer is enough to resume.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from wyfold.cli import UsageError
from wyfold.cli.train import documents


@dataclass(frozen=True)
class Corpus:
    """Concatenated documents.

    Args:
        name: Source of the documents, for messages.
        text: [n] uint8.
        borders: Document i is `text[borders[i]:borders[i + 1]]`. The first is 0, the last n; no document is empty.
    """

    name: str
    text: Tensor
    borders: tuple[int, ...]

    @classmethod
    def of(cls, name: str, contents: list[bytes]) -> Corpus:
        borders = [0]
        for content in contents:
            borders.append(borders[-1] + len(content))
        return cls(name, torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8), tuple(borders))

    @property
    def documents(self) -> int:
        return len(self.borders) - 1

    def describe(self) -> str:
        """Source and size, as text."""
        documents = "1 document" if self.documents == 1 else f"{self.documents:,} documents"
        return f"{self.name}: {len(self.text):,} bytes in {documents}"

    def digest(self) -> str:
        """Digest of the content: equal for equal documents, independent of their path."""
        content = hashlib.sha256(self.text.numpy().tobytes())
        content.update(repr(self.borders).encode())
        return content.hexdigest()[:16]

    def split(self, fraction: float, *, at_document: bool) -> tuple[Corpus, Corpus]:
        """Split into a training part and a validation part, which is the last `fraction` of the bytes.

        With `at_document` the cut moves back to the nearest document border, so that no document is in both parts. A
        corpus of one document is cut inside it.
        """
        cut = len(self.text) - math.ceil(len(self.text) * fraction)
        if at_document and self.documents > 1:
            cut = max([border for border in self.borders[1:-1] if border <= cut], default=self.borders[1])
        before = tuple(border for border in self.borders if border < cut) + (cut,)
        after = (0,) + tuple(border - cut for border in self.borders if border > cut)
        return (
            Corpus(f"training part of {self.name}", self.text[:cut], before),
            Corpus(f"validation part of {self.name}", self.text[cut:], after),
        )


def read(path: str | os.PathLike[str] | None) -> Corpus:
    """Read the documents of a path, by `documents.read`, as a corpus.

    Raises:
        UsageError: the path does not exist, cannot be read, or is empty.
    """
    return Corpus.of(*documents.read(path))


def standard_library() -> Corpus:
    """The documents of `documents.standard_library` as a corpus."""
    return Corpus.of(*documents.standard_library())


@dataclass(frozen=True)
class Batch:
    """Inputs of one forward pass.

    Args:
        ids: [B, T] int64, input tokens.
        labels: [B, T] int64, the token to predict at each position, or -100.
        lengths: Lengths of the documents packed into the one row; None if rows are independent.
        places: [B, n] int64, positions of the labels of each row, all others being ignored; None if most positions
            have labels.
    """

    ids: Tensor
    labels: Tensor
    lengths: tuple[int, ...] | None = None
    places: Tensor | None = None


class WindowBatches:
    """Batches of windows of equal length, cut from the concatenated documents.

    An epoch visits every window once, in random order. Each epoch shifts all windows by a random phase.

    Args:
        corpus: At least `length + 1` bytes.
        batch, length: Rows of a batch, bytes of a row.
        seed: Seed of order and phase.
    """

    def __init__(self, corpus: Corpus, batch: int, length: int, seed: int) -> None:
        _long_enough(corpus, length + 1)
        self.text = corpus.text
        self.batch, self.length, self.seed = batch, length, seed
        self.epoch = -1
        self.starts = torch.empty(0, dtype=torch.int64)
        self.per_epoch = max(1, (len(self.text) - 1) // length - 1)  # the phase may take up to one window

    def at(self, index: int) -> Batch:
        """Batch number `index`, counted from the first of the run."""
        return self._windows([self._start(index * self.batch + row) for row in range(self.batch)])

    def in_order(self, limit: int) -> Iterator[Batch]:
        """Yield every window in order, until `limit` bytes are read, for validation."""
        starts = list(range(0, min(len(self.text) - self.length, max(limit, self.length)), self.length))
        for first in range(0, len(starts), self.batch):
            yield self._windows(starts[first : first + self.batch])

    def _start(self, drawn: int) -> int:
        epoch, place = divmod(drawn, self.per_epoch)
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
            slack = len(self.text) - 1 - self.per_epoch * self.length
            phase = torch.randint(min(slack, self.length) + 1, (), generator=generator)
            self.starts = torch.randperm(self.per_epoch, generator=generator) * self.length + phase
            self.epoch = epoch
        return int(self.starts[place])

    def _windows(self, starts: list[int]) -> Batch:
        rows = torch.stack([self.text[start : start + self.length + 1] for start in starts]).long()
        return Batch(rows[:, :-1], rows[:, 1:])


class PackedBatches:
    """Packed batches: one row of many documents with their lengths. No document sees another.

    Documents longer than `length` are cut into pieces of that length. An epoch concatenates the pieces in random order
    and cuts the row into packs of `batch * length` bytes; a piece that crosses a cut becomes two. Each byte of a piece
    predicts the next byte of its document, so the last byte of a document is only a label.

    Args:
        corpus: Its pieces must fill at least one pack.
        batch, length: A pack holds `batch * length` bytes, a piece at most `length`.
        seed: Seed of the order.
    """

    def __init__(self, corpus: Corpus, batch: int, length: int, seed: int) -> None:
        self.text, self.length, self.seed = corpus.text, length, seed
        self.capacity = batch * length
        spans = zip(corpus.borders[:-1], corpus.borders[1:], strict=True)
        self.pieces = [
            (start, min(start + length, end - 1)) for begin, end in spans for start in range(begin, end - 1, length)
        ]
        self.total = sum(end - start for start, end in self.pieces)
        if not self.pieces:
            raise UsageError(f"{corpus.name}: no document has two bytes, the least that can be learned from")
        self.epoch = -1
        self.packs: list[list[tuple[int, int]]] = []
        self.per_epoch = self.total // self.capacity
        if self.per_epoch == 0:
            _long_enough(corpus, self.capacity + corpus.documents)

    def at(self, index: int) -> Batch:
        """Batch number `index`, counted from the first of the run."""
        epoch, place = divmod(index, self.per_epoch)
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
            order = torch.randperm(len(self.pieces), generator=generator).tolist()
            self.packs = list(_fill([self.pieces[i] for i in order], self.capacity))
            self.epoch = epoch
        return self._pack(self.packs[place])

    def in_order(self, limit: int) -> Iterator[Batch]:
        """Yield packs of the documents in order, until `limit` bytes are read, for validation."""
        read = 0
        for pack in _fill(self.pieces, self.capacity):
            yield self._pack(pack)
            read += self.capacity
            if read >= limit:
                return

    def _pack(self, pieces: list[tuple[int, int]]) -> Batch:
        ids = torch.cat([self.text[start:end] for start, end in pieces]).long()
        labels = torch.cat([self.text[start + 1 : end + 1] for start, end in pieces]).long()
        return Batch(ids[None], labels[None], tuple(end - start for start, end in pieces))


def _fill(pieces: list[tuple[int, int]], capacity: int) -> Iterator[list[tuple[int, int]]]:
    """Fill packs of exactly `capacity` bytes with the pieces, in order. An incomplete last pack is dropped."""
    pack: list[tuple[int, int]] = []
    free = capacity
    for start, end in pieces:
        while start < end:
            stop = min(end, start + free)
            pack.append((start, stop))
            free -= stop - start
            start = stop
            if free == 0:
                yield pack
                pack, free = [], capacity


def derive_seed(*parts: int | str) -> int:
    """Derive a seed by hashing the parts, such as (seed, epoch), so that neighbouring seeds do not share epochs."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:7], "big")


def _long_enough(corpus: Corpus, least: int) -> None:
    if len(corpus.text) < least:
        raise UsageError(
            f"{corpus.name}: {len(corpus.text)} bytes are too few, this --batch and --length need at least {least}"
        )
