"""Floating-point operations of Wyfold's operators, for PyTorch's counter (`torch.utils.flop_counter`).

    wyfold.integrations.flops.register()
    with FlopCounterMode() as counter:
        loss = model(...)
        loss.backward()

What is counted is what the definition of an operator needs, not what an implementation of it does: a token of a delta
rule reads the state twice and writes it once, 3 products of K x V at 2 operations an element, and its gradient takes
two such products for each. Chunks trade that for matrix products which are more operations and less time, and what a
backward computes again is not counted either. So a number depends on shapes alone, and a share of a card's peak that
is made from it (model flops utilisation, MFU) can be compared between implementations. Norms and gates count nothing,
as everywhere in PyTorch's counter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

Shape = Sequence[int]


def delta(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """6 K V for each token of each value head."""
    return 6 * math.prod(v) * k[-1]


def ttt(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """6 D^2 for each token of each head: the prediction, the step, the output."""
    return 6 * math.prod(v) * k[-1]


def conv(x: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    """2 W for each token of each channel."""
    return 2 * math.prod(x) * weight[-1]


def solve(A: Shape, *_: Any, **__: Any) -> int:
    """C^3 / 3 for each chunk of C rows: the inverse of a triangle."""
    return math.prod(A) * A[-1] // 3


def kkt(k: Shape, beta: Shape, g: Shape | None, cu_seqlens: Shape | None, chunk_size: int, *_: Any, **__: Any) -> int:
    """K C for each row: half of a square of products."""
    return math.prod(beta) * k[-1] * chunk_size


FORMULAS: dict[str, tuple[Callable[..., int], int]] = {
    "delta_fwd": (delta, 1),
    "delta_bwd": (delta, 2),
    "delta_rank_fwd": (delta, 1),
    "delta_rank_scan_bwd": (delta, 1),
    "delta_rank_gradients": (delta, 1),
    "ttt_fwd": (ttt, 1),
    "ttt_bwd": (ttt, 2),
    "causal_conv1d_fwd": (conv, 1),
    "causal_conv1d_bwd": (conv, 2),
    "solve_tril": (solve, 1),
    "chunk_scaled_dot_kkt": (kkt, 1),
}
"""Registered operator -> its formula, and how many times that it takes."""


def register() -> None:
    """Let PyTorch's counter know the operators; once or more often."""
    # Imported here: it imports Triton, where there is one.
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    import wyfold.ops  # noqa: F401  # registers the operators, where only this module was imported so far

    for name, (formula, times) in FORMULAS.items():
        operator = getattr(torch.ops.wyfold, name)
        if operator not in flop_registry:
            register_flop_formula(operator)(_times(formula, times))


def _times(formula: Callable[..., int], times: int) -> Callable[..., int]:
    def counted(*shapes: Any, out_shape: Any = None, **named: Any) -> int:
        return times * formula(*shapes, **named)

    return counted
