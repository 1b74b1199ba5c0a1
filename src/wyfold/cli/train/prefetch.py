"""Overlap of host and GPU work in training: batch prefetch, and deferred reading of a step's metrics.

Neither changes a number of a run. A batch depends on its index alone. The loss of a step is the same whether it is read
at once or while the next step runs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from wyfold.cli.train.corpus import Batch


class BatchPrefetcher:
    """Draws the next batch in a thread while the current one is used.

    Args:
        draw: Returns batch number i. Called by the thread only, one call at a time.
        stride: Difference between consecutive indices.
        device: Device of the model. For a GPU, batches are copied to pinned memory, for asynchronous copies.
    """

    def __init__(self, draw: Callable[[int], Batch], stride: int, device: torch.device) -> None:
        self.draw, self.stride, self.pinned = draw, stride, device.type == "cuda"
        # A thread starts on GPU 0, where pinning would make every process of a host hold memory.
        own: dict[str, Any] = {"initializer": torch.cuda.set_device, "initargs": (device,)} if self.pinned else {}
        self.thread = ThreadPoolExecutor(1, "batches", **own)
        self.upcoming: tuple[int, Future[Batch]] | None = None

    def at(self, index: int) -> Batch:
        """Batch number `index`. Re-raises an exception of `draw`."""
        expected, batch = self.upcoming or (None, None)
        if batch is None or expected != index:
            batch = self._submit(index)
        self.upcoming = index + self.stride, self._submit(index + self.stride)
        return batch.result()

    def _submit(self, index: int) -> Future[Batch]:
        return self.thread.submit(self._draw, index)

    def _draw(self, index: int) -> Batch:
        batch = self.draw(index)
        if not self.pinned:
            return batch
        places = None if batch.places is None else batch.places.pin_memory()
        return Batch(batch.ids.pin_memory(), batch.labels.pin_memory(), batch.lengths, places)


class StepMetrics:
    """Metrics of a step, copied asynchronously to the host.

    Args:
        number: Number of the step, from 1.
        rate: Learning rate of the step.
        tokens: Tokens of the step.
        values: [2] loss and gradient norm, on the device.

    Attributes:
        host: Seconds that the host took to launch the step, a lower bound of its time; 0 if unknown.
    """

    def __init__(self, number: int, rate: float, tokens: int, values: Tensor) -> None:
        self.number, self.rate, self.tokens, self.host = number, rate, tokens, 0.0
        self.values = values.to("cpu", non_blocking=True)
        self.copied: torch.cuda.Event | None = None
        if values.is_cuda:
            self.copied = torch.cuda.Event()
            self.copied.record()

    def read(self) -> tuple[float, float]:
        """Loss and gradient norm. Waits for this step, but not for later ones."""
        if self.copied is not None:
            self.copied.synchronize()
        loss, norm = self.values.tolist()
        return loss, norm
