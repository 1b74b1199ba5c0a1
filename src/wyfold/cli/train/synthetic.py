"""Known tasks: synthetic rows of tokens with known answers.

| task | row | labels | source |
|---|---|---|---|
| mqar | key-value pairs, then the keys again among noise | the value after each repeated key | arXiv:2312.04927 |
| s_niah | noise with a needle (mark, key, digits) at any depth, then the query | the digits | arXiv:2404.06654 |
| parity | bits | at each bit, the parity so far | arXiv:2411.12537 |
| s5 | transpositions of five elements | at each, their product so far | arXiv:2411.12537 |

A batch depends only on the task, the seed and its index, so one integer resumes a run. Evaluation rows come from a
separate random stream. If rows are long, training does not contain any of them.
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
from wyfold.cli.train.corpus import Batch, derive_seed
from wyfold.cli.train.settings import LEAST_WHOLE, SHORTEST
from wyfold.models import IGNORED


class Task(Protocol):
    """Interface of a task.

    Attributes:
        vocabulary: Tokens are 0 to vocabulary - 1.
    """

    @property
    def vocabulary(self) -> int: ...

    def draw(self, rows: int, length: int, generator: torch.Generator) -> Batch:
        """Draw rows [rows, length]. Labels without a query are -100; `places` has the label positions if they are few.

        Raises:
            UsageError: rows of this task must be longer.
        """


@dataclass(frozen=True)
class AssociativeRecall:
    """Multi-query associative recall: each key occurs again once, and the label there is its value.

    Tokens below vocabulary / 2, except 0, are keys; those above are values. A row begins with `pairs` keys, each
    followed by its value. The rest of the row is divided into slots of two positions. Every key is repeated at the
    first position of a slot. Slots are drawn without replacement; slot s (from 1) has a probability proportional to
    s^(power - 1), so early slots are more likely. All other positions hold random tokens of the whole vocabulary. The
    position after a repeated key is random too, so an earlier answer cannot be copied.

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
    """A single needle in a haystack: one statement in noise, queried at the end of the row.

    Tokens 0 to 9 are digits, and the last two tokens are marks. The needle is a mark, a key and `digits` digits. The
    row ends with the other mark, the key and the digits to predict, where each digit is an input after it was a label.
    Noise is any token but the marks, digits included. The position of the needle is uniform.

    Source:
        arXiv:2404.06654, single needle, with tokens instead of words. Its numbers of seven digits are about three
        tokens of a language model.
    """

    vocabulary: int = 256
    digits: int = 3

    def draw(self, rows: int, length: int, generator: torch.Generator) -> Batch:
        needle, noise = self.digits + 2, self.vocabulary - 2
        depths = length - 2 * needle + 1  # the last digit is only a label
        if depths < 0 or noise <= 10:
            raise UsageError(
                f"s_niah: takes rows of at least {2 * needle - 1} tokens (--length) and a --vocabulary above 12, got "
                f"rows of {length} and a vocabulary of {self.vocabulary}"
            )
        keys = torch.randint(10, noise, (rows, 1), generator=generator)
        digits = torch.randint(10, (rows, self.digits), generator=generator)
        ids = torch.randint(noise, (rows, length), generator=generator)
        depth = torch.randint(depths + 1, (rows, 1), generator=generator)
        mark = torch.full_like(keys, noise)
        ids.scatter_(1, depth + torch.arange(needle), torch.cat([mark, keys, digits], dim=1))
        ids[:, 1 - needle :] = torch.cat([mark + 1, keys, digits[:, :-1]], dim=1)
        labels = torch.full_like(ids, IGNORED)
        labels[:, -self.digits :] = digits
        places = torch.arange(length - self.digits, length).repeat(rows, 1)
        return Batch(ids, labels, places=places)


@dataclass(frozen=True)
class Parity:
    """Word problem of the group of two elements. Tokens 2 and 3 are the bits 0 and 1; labels 0 and 1 are even and odd.

    Source:
        arXiv:2411.12537: no recurrence with positive eigenvalues solves it at every length.
    """

    vocabulary: int = 4

    def draw(self, rows: int, length: int, generator: torch.Generator) -> Batch:
        bits = torch.randint(2, (rows, length), generator=generator)
        return Batch(bits + 2, bits.cumsum(1) % 2)


@dataclass(frozen=True)
class Permutations:
    """Word problem of the symmetric group on n symbols, with transpositions as letters.

    Tokens below n! are the permutations in lexicographic order. The next n (n - 1) / 2 tokens are the transpositions.
    The label at every letter is the product of all letters so far.

    Source:
        arXiv:2411.12537: a transposition is a reflection, which needs an eigenvalue of -1.
    """

    symbols: int = 5

    @property
    def vocabulary(self) -> int:
        return len(self._table) + len(self._table[0])

    @cached_property
    def _table(self) -> list[list[int]]:
        """[n!][n (n - 1) / 2]: product of a permutation and a transposition."""
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


class TaskBatches:
    """Batches of a task.

    Args:
        task: Definition of the rows.
        batch, length: Rows of a batch, tokens of a row.
        seed: Seed of the rows.
        stream: Name of the random stream, "training" or "examination"; streams of one seed are independent.
    """

    def __init__(self, task: Task, batch: int, length: int, seed: int, stream: str) -> None:
        self.task, self.batch, self.length = task, batch, length
        self.seed, self.stream = seed, stream
        self.at(0)  # refuses invalid sizes

    def at(self, index: int) -> Batch:
        """Batch number `index`, counted from the first of the run."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, self.stream, index))
        return self.task.draw(self.batch, self.length, generator)

    def in_order(self, limit: int) -> Iterator[Batch]:
        """Yield batches in order, until `limit` tokens are read."""
        for index in range(max(1, limit // (self.batch * self.length))):
            yield self.at(index)


class Curriculum:
    """Batches of associative recall with growing rows and a constant number of tokens.

    Rows have an eighth, a quarter and a half of the length, with the same fraction of the pairs, and then full length.
    A model that recalls 8 pairs soon recalls 64; starting with 64 succeeds only with some seeds (docs/tasks.md).

    Args:
        task, batch, length, seed: Of the batches with full length.
        batches: Number of batches before those of full length; each of the three shorter lengths has a third.
    """

    def __init__(self, task: AssociativeRecall, batch: int, length: int, seed: int, batches: int) -> None:
        whole = TaskBatches(task, batch, length, seed, "training")
        if length < LEAST_WHOLE:
            raise UsageError(
                f"--curriculum: rows begin at an eighth of --length, which must be at least {LEAST_WHOLE}, "
                f"got {length}; --curriculum 0 begins with whole rows"
            )
        shorter = [
            TaskBatches(replace(task, pairs=max(1, task.pairs // part)), batch * part, length // part, seed, "training")
            for part in (SHORTEST, SHORTEST // 2, SHORTEST // 4)
        ]
        self.stages, self.batches = [*shorter, whole], batches

    def at(self, index: int) -> Batch:
        """Batch number `index`, counted from the first of the run."""
        return self.stages[min(3 * index // self.batches, 3)].at(index)


def _subsets(count: int, rows: int, size: int, generator: torch.Generator) -> Tensor:
    """[rows, size] distinct random numbers below `count` in every row, in random order."""
    return torch.rand(rows, count, generator=generator).topk(size, dim=1).indices


def _weighted_subsets(weights: Tensor, rows: int, size: int, generator: torch.Generator) -> Tensor:
    """[rows, size] indices sampled without replacement in every row, with probabilities by the weights [n]."""
    # The order of independent exponential arrival times is a weighted sample without replacement.
    clocks = torch.empty(rows, len(weights), dtype=torch.float64).exponential_(generator=generator) / weights
    return clocks.topk(size, dim=1, largest=False).indices
