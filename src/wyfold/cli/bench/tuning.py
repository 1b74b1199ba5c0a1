"""Kernels whose launch sizes Triton chooses in the first calls: compile them faster, and choose in less time.

A library gives Triton's autotuner up to some hundred launch sizes for one kernel. A first call compiles and times them
all, one after another. `compile_only` launches a share of them once each, so that several processes compile them.
`quick_choice` times each for less, in the process that times.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

WARM_MS, TIMED_MS = 2, 10
"""Milliseconds for which a launch size runs before it is timed and while it is. Triton's are 25 and 100."""

QUICK = f"; launch sizes that Triton chooses for a peer: by {TIMED_MS} ms of calls of each"
"""What the method of a result adds with `quick_choice`."""


@contextmanager
def compile_only(share: int, shares: int) -> Iterator[None]:
    """Launch each launch size of this share once, instead of timing all.

    Args:
        share: Number of this process, from 0.
        shares: Number of processes that have one each.
    """
    from triton import testing
    from triton.runtime.autotuner import Autotuner

    every = Autotuner.prune_configs

    def own(tuner: Any, arguments: dict[str, Any]) -> list[Any]:
        sizes = every(tuner, arguments)
        return sizes[share::shares] or sizes[:1]

    def once(call: Callable[[], object], **_: Any) -> list[float]:
        call()
        return [1.0, 1.0, 1.0]

    with _replaced(Autotuner, "prune_configs", own), _replaced(testing, "do_bench", once):
        yield


@contextmanager
def quick_choice() -> Iterator[None]:
    """Time each launch size for `TIMED_MS`."""
    from triton import testing

    with _replaced(testing, "do_bench", functools.partial(testing.do_bench, warmup=WARM_MS, rep=TIMED_MS)):
        yield


@contextmanager
def _replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Give an attribute another value for a while."""
    old = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, old)
