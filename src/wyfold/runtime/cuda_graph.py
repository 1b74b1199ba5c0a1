"""CUDA graph of a step that is repeated, such as a decode step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Replay:
    """A function of one GPU tensor that runs as a CUDA graph from its second call on.

    The first call runs eagerly, which compiles and loads the kernels. The second call is captured, which executes
    nothing, and then replayed. Every call therefore takes effect once, also on tensors that it writes in place. A call
    overwrites the result of the call before it.

    Args:
        run: The function. It must not synchronise, and its argument always has the same shape. Other tensors that it
            reads must keep their addresses; their contents may change.
    """

    def __init__(self, run: Callable[[Tensor], Tensor]):
        self._run = run
        self._given: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._given is None:
            self._given = x.clone()
            return self._run(x)
        self._given.copy_(x)
        if self._graph is None or self._result is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(x.device), torch.cuda.graph(self._graph):
                self._result = self._run(self._given)
        self._graph.replay()
        return self._result
