"""Prefetched batches are the requested ones, drawn once each; exceptions reach the caller."""

import threading

import pytest
import torch

from wyfold.cli.train.corpus import Batch
from wyfold.cli.train.prefetch import BatchPrefetcher, StepMetrics


class Drawn:
    """Records the drawn indices and the threads that drew them."""

    def __init__(self):
        self.indices: list[int] = []
        self.threads: set[int] = set()

    def __call__(self, index: int) -> Batch:
        self.threads.add(threading.get_ident())
        if index < 0:
            raise ValueError("no such batch")
        self.indices.append(index)
        return Batch(torch.full((1, 2), index), torch.zeros(1, 2), None)


def test_the_next_batch_is_drawn_before_it_is_requested():
    drawn = Drawn()
    ahead = BatchPrefetcher(drawn, 3, torch.device("cpu"))
    for index in (2, 5, 8, 40, 43):  # a resumed run starts at any index
        assert ahead.at(index).ids.tolist() == [[index, index]]
    ahead.thread.shutdown()
    assert drawn.indices == [2, 5, 8, 11, 40, 43, 46]
    assert drawn.threads.isdisjoint({threading.get_ident()}) and len(drawn.threads) == 1


def test_exceptions_of_draw_reach_the_caller():
    ahead = BatchPrefetcher(Drawn(), -1, torch.device("cpu"))
    assert ahead.at(0).ids.tolist() == [[0, 0]]
    with pytest.raises(ValueError, match="no such batch"):
        ahead.at(-1)


def test_metrics_of_a_step_do_not_change_later():
    values = torch.tensor([0.5, 2.0])
    figures = StepMetrics(7, 1e-3, 64, values)
    assert (figures.number, figures.read()) == (7, (0.5, 2.0))
