"""Known tasks: rows of tokens made from a definition, endlessly, whose right answers are known.

| task | a row | counts | from |
|---|---|---|---|
| mqar | pairs key, value; then keys again, in between noise | the value after each repeated key | arXiv:2312.04927 |
| s_niah | noise with a needle (mark, key, digits) at any depth; last the question | the digits | arXiv:2404.06654 |
| parity | bits | at each bit, whether the ones so far are odd | arXiv:2411.12537 |
| s5 | transpositions of five things | at each, the permutation they make so far | arXiv:2411.12537 |

A batch depends on the task, the seed and its number alone, so that one integer resumes a run. What a model is examined
on comes from a stream of its own that no batch is taken from: where rows are long, no run has seen one of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from wyfold.cli import UsageError
from wyfold.cli.corpus import Batch, mix
from wyfold.cli.settings import LEAST_WHOLE, SHORTEST
from wyfold.models import IGNORED


class Task(Protocol):
    """A definition of rows.

    Attributes:
        vocabulary: Tokens are 0 to vocabulary - 1.
    """

    @property
    def vocabulary(self) -> int: ...

    def draw(self, rows: int, length: int, generator: torch.Generator) -> Batch:
        """That many rows [rows, length]; labels are -100 where no answer is asked for, places say where few are.

        Raises:
            UsageError: no row of this task is so short.
        """


@dataclass(frozen=True)
class AssociativeRecall:
    """Multi-query associative recall: each key comes back once, and its value is asked for there.

    Tokens below vocabulary / 2, but 0, are keys, those above are values. A row begins with `pairs` keys, each followed
    by its value. The rest is slots of two places; every key returns at the head of a slot of its own, slot s (from 1)
    being drawn, without replacement, with a probability proportional to s^(power - 1): recent things come back sooner.
    Every other place holds a token of the whole vocabulary, the answer's place too: nothing that was answered once can
    be copied.

    Source:
        arXiv:2312.04927, the definition of the task and the appendix on its data.
    """

    pairs: int = 64
    vocabulary: int = 8192
    power: float = 0.01

    def draw(self, rows: int, length: int, generator: torch.Generator) -> Batch:
        half, slots = self.vocabulary // 2, (length - 2 * self.pairs) // 2
        if self.pairs >= half or slots < self.pairs:
            raise UsageError(
                f"mqar: {self.pairs} --pairs take rows of at least {4 * self.pairs} tokens and a --vocabulary "
                f"of at least {2 * self.pairs + 2}, got rows of {length} and a vocabulary of {self.vocabulary}"
            )
        keys = _subsets(half - 1, rows, self.pairs, generator) + 1
        values = _subsets(self.vocabulary - half, rows, self.pairs, generator) + half
        weights = torch.arange(1, slots + 1, dtype=torch.float64) ** (self.power - 1)
        places = 2 * (self.pairs + _weighted_subsets(weights, rows, self.pairs, generator))
        ids = torch.randint(self.vocabulary, (rows, length), generator=generator)
        ids[:, : 2 * self.pairs] = torch.stack([keys, values], dim=-1).flatten(1)
        ids.scatter_(1, places, keys)
        labels = torch.full_like(ids, IGNORED).scatter_(1, places, values)
        return Batch(ids, labels, places=places.sort(1).values)


@dataclass(frozen=True)
class Needle:
    """A single needle in a haystack: one statement somewhere in noise, asked for at the end.

    Tokens 0 to 9 are digits, the last two are marks. The needle is a mark, a key and `digits` digits; the row's end
    the other mark, the key, and the digits that are to be said, each given once it was asked for. Noise is everything
    but the marks, digits included; the needle begins anywhere in it with equal probability.

    Source:
        arXiv:2404.06654, single needle, with tokens in the place of words; its numbers of seven digits are about three
        tokens of a language model.
    """

    vocabulary: int = 256
    digits: int = 3

    def draw(self, rows: int, length: int, generator: torch.Generator) -> Batch:
        needle, noise = self.digits + 2, self.vocabulary - 2
        room = length - 2 * needle + 1  # the last digit is only ever a label
        if room < 0 or noise <= 10:
            raise UsageError(
                f"s_niah: takes rows of at least {2 * needle - 1} tokens (--length) and a --vocabulary above 12, got "
                f"rows of {length} and a vocabulary of {self.vocabulary}"
            )
        keys = torch.randint(10, noise, (rows, 1), generator=generator)
        digits = torch.randint(10, (rows, self.digits), generator=generator)
        ids = torch.randint(noise, (rows, length), generator=generator)
        depth = torch.randint(room + 1, (rows, 1), generator=generator)
        mark = torch.full_like(keys, noise)
        ids.scatter_(1, depth + torch.arange(needle), torch.cat([mark, keys, digits], dim=1))
        ids[:, 1 - needle :] = torch.cat([mark + 1, keys, digits[:, :-1]], dim=1)
        labels = torch.full_like(ids, IGNORED)
        labels[:, -self.digits :] = digits
        places = torch.arange(length - self.digits, length).repeat(rows, 1)
        return Batch(ids, labels, places=places)


@dataclass(frozen=True)
class Parity:
    """The word problem of the group of two elements: 2 and 3 are the bits zero and one, 0 and 1 say even and odd.

    Source:
        arXiv:2411.12537, where it is what no recurrence with positive eigenvalues can do at every length.
    """

    vocabulary: int = 4

    def draw(self, rows: int, length: int, generator: torch.Generator) -> Batch:
        bits = torch.randint(2, (rows, length), generator=generator)
        return Batch(bits + 2, bits.cumsum(1) % 2)


@dataclass(frozen=True)
class Permutations:
    """The word problem of the permutations of some symbols, with transpositions as its letters.

    Tokens below n! name permutations in lexicographic order; after them come the n (n - 1) / 2 transpositions. After
    every letter the label is the permutation that all letters so far make, each exchanging two places of the last.

    Source:
        arXiv:2411.12537: a transposition is one reflection, which takes an eigenvalue of -1.
    """

    symbols: int = 5

    @property
    def vocabulary(self) -> int:
        return len(self._table) + len(self._table[0])

    @cached_property
    def _table(self) -> list[list[int]]:
        """[n!][n (n - 1) / 2]: the permutation that a transposition makes of another."""
        every = list(itertools.permutations(range(self.symbols)))
        names = {permutation: name for name, permutation in enumerate(every)}
        table = []
        for permutation in every:
            row = []
            for i, j in itertools.combinations(range(self.symbols), 2):
                exchanged = list(permutation)
                exchanged[i], exchanged[j] = permutation[j], permutation[i]
                row.append(names[tuple(exchanged)])
            table.append(row)
        return table

    def draw(self, rows: int, length: int, generator: torch.Generator) -> Batch:
        table = torch.tensor(self._table)
        letters = torch.randint(table.shape[1], (rows, length), generator=generator)
        labels = torch.empty_like(letters)
        now = torch.zeros(rows, dtype=torch.int64)
        for t in range(length):
            now = labels[:, t] = table[now, letters[:, t]]
        return Batch(letters + table.shape[0], labels)


TASKS: dict[str, type[Task]] = {"mqar": AssociativeRecall, "s_niah": Needle, "parity": Parity, "s5": Permutations}


class Rows:
    """Batches of a task.

    Args:
        task: What rows are.
        batch, length: Rows of a batch, tokens of a row.
        seed: Of the rows.
        stream: Name of these batches among those of one seed: "training" never meets "examination".
    """

    def __init__(self, task: Task, batch: int, length: int, seed: int, stream: str) -> None:
        self.task, self.batch, self.length = task, batch, length
        self.seed, self.stream = seed, stream
        self.at(0)  # rows that cannot be are refused here

    def at(self, index: int) -> Batch:
        """Batch number `index`, counted from the first of the run."""
        generator = torch.Generator().manual_seed(mix(self.seed, self.stream, index))
        return self.task.draw(self.batch, self.length, generator)

    def in_order(self, limit: int) -> Iterator[Batch]:
        """Batches from the first, until `limit` tokens are read."""
        for index in range(max(1, limit // (self.batch * self.length))):
            yield self.at(index)


class Curriculum:
    """Batches of associative recall whose rows grow, to as many tokens each: rows of an eighth, a quarter and a half of
    the length with as large a part of the pairs, then whole ones. What recalls 8 pairs recalls 64 soon; to begin with
    64 takes luck (docs/tasks.md).

    Args:
        task, batch, length, seed: Of the whole rows.
        batches: So many, a third of them of each kind, come before the whole rows.
    """

    def __init__(self, task: AssociativeRecall, batch: int, length: int, seed: int, batches: int) -> None:
        whole = Rows(task, batch, length, seed, "training")
        if length < LEAST_WHOLE:
            raise UsageError(
                f"--curriculum: rows begin at an eighth of --length, which must be at least {LEAST_WHOLE}, "
                f"got {length}; --curriculum 0 begins with whole rows"
            )
        shorter = [
            Rows(replace(task, pairs=max(1, task.pairs // part)), batch * part, length // part, seed, "training")
            for part in (SHORTEST, SHORTEST // 2, SHORTEST // 4)
        ]
        self.stages, self.batches = [*shorter, whole], batches

    def at(self, index: int) -> Batch:
        """Batch number `index`, counted from the first of the run."""
        return self.stages[min(3 * index // self.batches, 3)].at(index)


def _subsets(count: int, rows: int, size: int, generator: torch.Generator) -> Tensor:
    """[rows, size] numbers below count, in random order, no two of a row alike."""
    return torch.rand(rows, count, generator=generator).topk(size, dim=1).indices


def _weighted_subsets(weights: Tensor, rows: int, size: int, generator: torch.Generator) -> Tensor:
    """[rows, size] indices drawn one after the other by the weights [n] that are left, no two of a row alike."""
    # The first of independent exponential clocks to ring is drawn by its rate; so is the next of those that are left.
    clocks = torch.empty(rows, len(weights), dtype=torch.float64).exponential_(generator=generator) / weights
    return clocks.topk(size, dim=1, largest=False).indices
