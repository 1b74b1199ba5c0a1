"""Text as bytes: what `train` and `demo` read, how it is split, and the batches a step takes from it.

A corpus is one row of bytes and the borders of its documents. Nothing is tokenised: the vocabulary is the 256 bytes.
Batches depend on the seed and on how many were taken before, on nothing else, so one integer resumes them.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from wyfold.cli import UsageError, documents


@dataclass(frozen=True)
class Corpus:
    """Documents, end to end.

    Args:
        name: where they come from, for messages.
        text: [n] uint8.
        borders: document i is `text[borders[i]:borders[i + 1]]`; the first is 0, the last n; none is empty.
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

    def digest(self) -> str:
        """Name of the content: equal for equal documents, wherever they were read."""
        content = hashlib.sha256(self.text.numpy().tobytes())
        content.update(repr(self.borders).encode())
        return content.hexdigest()[:16]

    def split(self, fraction: float, *, at_document: bool) -> tuple[Corpus, Corpus]:
        """Training and validation parts: the last `fraction` of the bytes is held out.

        With `at_document` the cut moves back to the nearest document border before it, so that no document is on
        both sides; a corpus of one document is cut inside it all the same.
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
    """The corpus of the documents that `documents.read` finds.

    Raises:
        UsageError: nothing there, nothing readable, or nothing in it.
    """
    return Corpus.of(*documents.read(path))


def standard_library() -> Corpus:
    """The corpus of `documents.standard_library`."""
    return Corpus.of(*documents.standard_library())


@dataclass(frozen=True)
class Batch:
    """What one forward pass takes.

    Args:
        ids: [B, T] int64, the bytes read.
        labels: [B, T] int64, at each place the byte that follows there.
        lengths: of the documents packed into the one row, or None where rows are independent.
        places: [B, n] int64, of each row where its labels are, all others being ignored; None where they are many.
    """

    ids: Tensor
    labels: Tensor
    lengths: tuple[int, ...] | None = None
    places: Tensor | None = None


class Windows:
    """Batches of equally long windows, cut from the documents as if they were one text.

    An epoch visits every window once in random order; windows start at a random phase, so that borders move.

    Args:
        corpus: at least `length + 1` bytes.
        batch, length: rows of a batch, bytes of a row.
        seed: of order and phase.
    """

    def __init__(self, corpus: Corpus, batch: int, length: int, seed: int) -> None:
        _long_enough(corpus, length + 1)
        self.text = corpus.text
        self.batch, self.length, self.seed = batch, length, seed
        self.epoch = -1
        self.starts = torch.empty(0, dtype=torch.int64)
        self.per_epoch = max(1, (len(self.text) - 1) // length - 1)  # one window is what the phase may cost

    def at(self, index: int) -> Batch:
        """Batch number `index`, counted from the first of the run."""
        return self._windows([self._start(index * self.batch + row) for row in range(self.batch)])

    def in_order(self, limit: int) -> Iterator[Batch]:
        """Every window from the first, not shuffled, until `limit` bytes are read: what validation measures."""
        starts = list(range(0, min(len(self.text) - self.length, max(limit, self.length)), self.length))
        for first in range(0, len(starts), self.batch):
            yield self._windows(starts[first : first + self.batch])

    def _start(self, drawn: int) -> int:
        epoch, place = divmod(drawn, self.per_epoch)
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(mix(self.seed, epoch))
            slack = len(self.text) - 1 - self.per_epoch * self.length
            phase = torch.randint(min(slack, self.length) + 1, (), generator=generator)
            self.starts = torch.randperm(self.per_epoch, generator=generator) * self.length + phase
            self.epoch = epoch
        return int(self.starts[place])

    def _windows(self, starts: list[int]) -> Batch:
        rows = torch.stack([self.text[start : start + self.length + 1] for start in starts]).long()
        return Batch(rows[:, :-1], rows[:, 1:])


class Packs:
    """Batches of one row that holds many documents, with their lengths; no document sees another.

    Documents longer than `length` are cut into pieces of that length. An epoch lays the pieces end to end in random
    order and cuts the row into packs of `batch * length` bytes; a piece that crosses such a cut becomes two. Within a
    piece each byte predicts the next of its own document, so a document's last byte is only ever a label.

    Args:
        corpus: its pieces fill at least one pack.
        batch, length: a pack holds `batch * length` bytes, a piece at most `length`.
        seed: of the order.
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
            generator = torch.Generator().manual_seed(mix(self.seed, epoch))
            order = torch.randperm(len(self.pieces), generator=generator).tolist()
            self.packs = list(_fill([self.pieces[i] for i in order], self.capacity))
            self.epoch = epoch
        return self._pack(self.packs[place])

    def in_order(self, limit: int) -> Iterator[Batch]:
        """Packs of the documents as they stand, until `limit` bytes are read: what validation measures."""
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
    """The pieces, in order, in packs of exactly `capacity` bytes; what does not fill a last pack is left."""
    pack: list[tuple[int, int]] = []
    room = capacity
    for start, end in pieces:
        while start < end:
            stop = min(end, start + room)
            pack.append((start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield pack
                pack, room = [], capacity


def mix(*parts: int | str) -> int:
    """A seed of its own for every (seed, epoch), or whatever is counted: neighbouring seeds must not share epochs."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:7], "big")


def _long_enough(corpus: Corpus, least: int) -> None:
    if len(corpus.text) < least:
        raise UsageError(
            f"{corpus.name}: {len(corpus.text)} bytes are too few, this --batch and --length need at least {least}"
        )
