"""Rows follow the papers, labels are correct, and a batch depends only on its seed and index."""

import itertools

import pytest
import torch

from wyfold.cli import UsageError
from wyfold.cli.train.synthetic import TASKS, AssociativeRecall, Curriculum, Needle, Parity, Permutations, TaskBatches
from wyfold.models import IGNORED

SMALL = {
    "mqar": (AssociativeRecall(pairs=4, vocabulary=32), 24),
    "s_niah": (Needle(vocabulary=32, digits=3), 24),
    "parity": (Parity(), 24),
    "s5": (Permutations(), 24),
}


def drawn(task, rows, length, seed=0):
    return task.draw(rows, length, torch.Generator().manual_seed(seed))


def test_every_task_is_tested():
    assert SMALL.keys() == TASKS.keys()


@pytest.mark.parametrize(("task", "length"), SMALL.values(), ids=SMALL)
def test_a_batch_depends_on_seed_index_and_stream_only(task, length):
    rows = TaskBatches(task, 3, length, 7, "training")
    first = rows.at(5)
    rows.at(6)
    again = TaskBatches(task, 3, length, 7, "training").at(5)
    assert torch.equal(first.ids, again.ids) and torch.equal(first.labels, again.labels)
    for other in (
        rows.at(4),
        TaskBatches(task, 3, length, 8, "training").at(5),
        TaskBatches(task, 3, length, 7, "examination").at(5),
    ):
        assert not torch.equal(first.ids, other.ids)


@pytest.mark.parametrize(("task", "length"), SMALL.values(), ids=SMALL)
def test_tokens_are_in_the_vocabulary(task, length):
    batch = drawn(task, 50, length)
    assert batch.ids.shape == batch.labels.shape == (50, length)
    counted = batch.labels[batch.labels != IGNORED]
    for tokens in (batch.ids, counted):
        assert 0 <= tokens.min() and tokens.max() < task.vocabulary


@pytest.mark.parametrize(
    ("task", "length"), [(AssociativeRecall(4, 64), 32), (Needle(32, 3), 24)], ids=["mqar", "s_niah"]
)
def test_places_are_the_positions_of_labels(task, length):
    batch = drawn(task, 50, length)
    expected = [[place for place, label in enumerate(row) if label != IGNORED] for row in batch.labels.tolist()]
    assert batch.places.tolist() == expected


def test_each_pair_of_associative_recall_is_queried_once_and_not_answered():
    task = AssociativeRecall(pairs=4, vocabulary=64)
    batch = drawn(task, 200, 32)
    for ids, labels in zip(batch.ids.tolist(), batch.labels.tolist(), strict=True):
        pairs = (
            dict(itertools.batched(ids[:8], 2)) if hasattr(itertools, "batched") else dict(zip(ids[:8:2], ids[1:8:2]))
        )
        assert len(pairs) == 4
        assert all(0 < key < 32 <= value for key, value in pairs.items())
        asked = [place for place, label in enumerate(labels) if label != IGNORED]
        assert sorted(ids[place] for place in asked) == sorted(pairs)
        assert all(place >= 8 and place % 2 == 0 and labels[place] == pairs[ids[place]] for place in asked)
    following = batch.ids[:, 1:][batch.labels[:, :-1] != IGNORED]
    answers = batch.labels[:, :-1][batch.labels[:, :-1] != IGNORED]
    assert (following == answers).double().mean() < 0.1  # noise equals the answer one time in 64


def test_keys_of_associative_recall_return_early_more_often_than_late():
    """Slots follow the power law: the first of 28 is drawn far more often than the last."""
    task = AssociativeRecall(pairs=4, vocabulary=64)
    counts = (drawn(task, 2000, 64).labels != IGNORED).sum(0)[8::2].tolist()
    assert len(counts) == 28 and sum(counts) == 4 * 2000
    assert counts[0] > 1200 and counts[-1] < 200


def test_the_needle_occurs_once_at_any_depth_and_is_queried_at_the_end():
    task = Needle(vocabulary=32, digits=3)
    batch = drawn(task, 400, 24)
    depths = set()
    for ids, labels in zip(batch.ids.tolist(), batch.labels.tolist(), strict=True):
        assert ids.count(30) == ids.count(31) == 1
        depth = ids.index(30)
        depths.add(depth)
        key, *digits = ids[depth + 1 : depth + 5]
        assert ids[-4:] == [31, key, *digits[:2]]
        assert labels[:-3] == [IGNORED] * 21 and labels[-3:] == digits
        assert 10 <= key < 30 and max(digits) < 10
    assert depths == set(range(16))


def test_parity_is_the_parity_of_the_ones_so_far():
    batch = drawn(Parity(), 20, 30)
    for t in range(30):
        assert torch.equal((batch.ids[:, : t + 1] == 3).sum(1) % 2, batch.labels[:, t])


def test_permutation_labels_are_products_of_transpositions():
    batch = drawn(Permutations(5), 20, 12)
    every = list(itertools.permutations(range(5)))
    exchanges = list(itertools.combinations(range(5), 2))
    assert Permutations(5).vocabulary == 130
    for ids, labels in zip(batch.ids.tolist(), batch.labels.tolist(), strict=True):
        things = list(range(5))
        for letter, label in zip(ids, labels, strict=True):
            i, j = exchanges[letter - 120]
            things[i], things[j] = things[j], things[i]
            assert every[label] == tuple(things)


@pytest.mark.parametrize(
    ("task", "length", "message"),
    [
        (AssociativeRecall(pairs=8, vocabulary=64), 31, "rows of at least 32 tokens"),
        (AssociativeRecall(pairs=8, vocabulary=16), 64, "a --vocabulary of at least 18"),
        (Needle(digits=7), 16, "rows of at least 17 tokens"),
    ],
)
def test_invalid_sizes_of_rows_are_refused(task, length, message):
    with pytest.raises(UsageError, match=message):
        TaskBatches(task, 2, length, 0, "training")
    if "length" in message:
        TaskBatches(task, 2, length + 1, 0, "training")


def test_a_curriculum_begins_at_an_eighth_and_ends_with_full_rows():
    task = AssociativeRecall(pairs=16, vocabulary=128)
    rows = Curriculum(task, 2, 128, 7, batches=6)
    sizes = [(tuple(batch.ids.shape), batch.places.shape[1]) for batch in map(rows.at, range(8))]
    assert sizes == [((16, 16), 2)] * 2 + [((8, 32), 4)] * 2 + [((4, 64), 8)] * 2 + [((2, 128), 16)] * 2
    whole = TaskBatches(task, 2, 128, 7, "training")
    for index in (6, 7, 100):
        assert torch.equal(rows.at(index).ids, whole.at(index).ids)


def test_a_curriculum_of_few_pairs_begins_with_one_pair():
    rows = Curriculum(AssociativeRecall(pairs=4, vocabulary=128), 2, 36, 0, batches=3)
    assert [(tuple(rows.at(i).ids.shape), rows.at(i).places.shape[1]) for i in range(4)] == [
        ((16, 4), 1),
        ((8, 9), 1),
        ((4, 18), 2),
        ((2, 36), 4),
    ]


def test_a_curriculum_of_rows_too_short_to_divide_is_refused():
    with pytest.raises(UsageError, match="at least 32, got 31; --curriculum 0 begins"):
        Curriculum(AssociativeRecall(pairs=4, vocabulary=128), 2, 31, 0, batches=3)
