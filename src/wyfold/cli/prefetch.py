"""What keeps a GPU at work while the host does something else: batches are drawn ahead, a step's numbers read behind.

Neither changes a number of a run: a batch depends on its index alone, whoever draws it, and a step's loss is the same
whether it is read now or while the next step runs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from wyfold.cli.corpus import Batch


class Ahead:
    """Batches, of which the next is drawn by a thread while this one is learned.

    Args:
        draw: Gives batch number i. Called by that thread alone, one call at a time.
        stride: From one index asked for to the next.
        pinned: Batches lie in memory from which a GPU copies them by itself.
    """

    def __init__(self, draw: Callable[[int], Batch], stride: int, *, pinned: bool) -> None:
        self.draw, self.stride, self.pinned = draw, stride, pinned
        self.thread = ThreadPoolExecutor(1, "batches")
        self.coming: tuple[int, Future[Batch]] | None = None

    def at(self, index: int) -> Batch:
        """Batch number `index`; what drawing it raised."""
        expected, batch = self.coming or (None, None)
        if batch is None or expected != index:
            batch = self._asked(index)
        self.coming = index + self.stride, self._asked(index + self.stride)
        return batch.result()

    def _asked(self, index: int) -> Future[Batch]:
        return self.thread.submit(self._drawn, index)

    def _drawn(self, index: int) -> Batch:
        batch = self.draw(index)
        if not self.pinned:
            return batch
        places = None if batch.places is None else batch.places.pin_memory()
        return Batch(batch.ids.pin_memory(), batch.labels.pin_memory(), batch.lengths, places)


class Figures:
    """Numbers of a step on their way to the host.

    Args:
        number: Of the step, from 1.
        rate, tokens: What it was taken with.
        values: [2] its loss and its gradient norm, on the device.

    Attributes:
        host: Seconds that the host took to ask for it, where they are known: it was no faster.
    """

    def __init__(self, number: int, rate: float, tokens: int, values: Tensor) -> None:
        self.number, self.rate, self.tokens, self.host = number, rate, tokens, 0.0
        self.values = values.to("cpu", non_blocking=True)
        self.there: torch.cuda.Event | None = None
        if values.is_cuda:
            self.there = torch.cuda.Event()
            self.there.record()

    def read(self) -> tuple[float, float]:
        """Loss and gradient norm; waits for this step, and for none that was asked for after it."""
        if self.there is not None:
            self.there.synchronize()
        loss, norm = self.values.tolist()
        return loss, norm
