"""FLOP formulas of Wyfold's operators for PyTorch's counter (`torch.utils.flop_counter`).

    wyfold.integrations.flops.register()
    with FlopCounterMode() as counter:
        loss = model(...)
        loss.backward()

The formulas count an operator's definition, not its implementation. A token of a delta rule reads the state twice and
writes it once: 3 products of K x V with 2 operations per element; the gradient needs two such products for each. DPLR,
IPLR and RWKV-7 write along two columns: 4 products. GLA, which erases nothing, reads once: 2 products. The chunk form
does more operations in less time, and the backward recomputes; neither is counted. Counts therefore depend on shapes
alone, and model FLOPs utilisation (MFU) is comparable between implementations. Norms and gates count zero, as elsewhere
in PyTorch's counter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from wyfold.autograd.delta_records import DeltaTensors

Shape = Sequence[int]


def delta(q: Shape, k: Shape, v: Shape, *rest: Any, **_: Any) -> int:
    """FLOPs of a delta rule: 6 K V for each token of each value head; 8 K V for a rule with an erasing column b; 4 K V
    of GLA, by the last argument, `DeltaOptions.erases`."""
    a, b = rest[DeltaTensors._fields.index("a") - 3 :][:2]
    products = 2 if rest[-1] is False else 3 if a is None or b is None else 4
    return 2 * products * math.prod(v) * k[-1]


def ttt(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """FLOPs of TTT-Linear: 6 D^2 for each token of each head, for prediction, step and output."""
    return 6 * math.prod(v) * k[-1]


def path(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """FLOPs of PaTH attention: as PyTorch counts softmax attention, 2 (K + V) for each pair of a query and a key."""
    return 2 * math.prod(q[:3]) * k[1] * (k[-1] + v[-1])


def conv(x: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    """FLOPs of the short convolution: 2 W for each token of each channel."""
    return 2 * math.prod(x) * weight[-1]


def solve(A: Shape, *_: Any, **__: Any) -> int:
    """FLOPs of a triangular inverse: C^3 / 3 for each chunk of C rows."""
    return math.prod(A) * A[-1] // 3


def kkt(k: Shape, beta: Shape, g: Shape | None, cu_seqlens: Shape | None, chunk_size: int, *_: Any, **__: Any) -> int:
    """FLOPs of a chunk's key Gram matrix: K C for each row, half of a full matrix product."""
    return math.prod(beta) * k[-1] * chunk_size


FORMULAS: dict[str, tuple[Callable[..., int], int]] = {
    "delta_fwd": (delta, 1),
    "delta_bwd": (delta, 2),
    "delta_rank_fwd": (delta, 1),
    "delta_rank_bwd": (delta, 2),
    "ttt_fwd": (ttt, 1),
    "ttt_bwd": (ttt, 2),
    "path_fwd": (path, 1),
    "path_bwd": (path, 2),
    "causal_conv1d_fwd": (conv, 1),
    "causal_conv1d_bwd": (conv, 2),
    "conv_rank_fwd": (conv, 1),
    "conv_rank_bwd": (conv, 2),
    "solve_tril": (solve, 1),
    "chunk_scaled_dot_kkt": (kkt, 1),
}
"""Registered operator -> its formula, and a factor."""


def register() -> None:
    """Register the formulas with PyTorch's FLOP counter; repeated calls have no effect.

    Examples:
        >>> import torch, wyfold
        >>> from torch.utils.flop_counter import FlopCounterMode
        >>> wyfold.integrations.flops.register()
        >>> q = torch.randn(1, 10, 2, 16)
        >>> with FlopCounterMode(display=False) as counter:
        ...     _ = wyfold.chunk_delta_rule(q, q, q)
        >>> counter.get_total_flops() == 6 * 10 * 2 * 16 * 16
        True
    """
    # Imported here, because the module imports Triton if it is installed.
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    import wyfold.ops  # noqa: F401  # registers the operators, if only this module was imported so far

    for name, (formula, times) in FORMULAS.items():
        operator = getattr(torch.ops.wyfold, name)
        if operator not in flop_registry:
            register_flop_formula(operator)(_times(formula, times))


def _times(formula: Callable[..., int], times: int) -> Callable[..., int]:
    def counted(*shapes: Any, out_shape: Any = None, **named: Any) -> int:
        return times * formula(*shapes, **named)

    return counted
