"""The launches of `rank_carry` as one operator that needs no ranks, for their self-check."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wyfold.kernels import table
from wyfold.kernels.records import StateRows
from wyfold.kernels.trial import Sample, Trial
from wyfold.runtime.options import DeltaOptions
from wyfold.runtime.torch_ops import register

ROUTES = (4, 5, 8, 10, 0, 4, 3, 1, 2, 5)
"""Three routes of one, three and two rows of the six that two ranks gather, as `context_parallel.routes` lists them."""


def exchange_trials(options: DeltaOptions, q: Tensor, v: Tensor) -> tuple[Trial, ...]:
    """Checks of the launches that a call over ranks makes beside those of one rank: forward, and with `save` back.

    Args:
        options: Options of the call.
        q, v: [B, T, H, K] and [B, T, HV, V].
    """
    (HV, V), K = v.shape[2:], q.shape[3]
    tokens = Sample("normal", q.dtype, "", (1,))
    gathered = Sample("map", torch.float32, "", (2, 3, 2, HV, K, V + K))
    tails = Sample("map", torch.float32, "", (6, HV, K, V + K))
    forward = Trial(
        f"{options.operator} over ranks",
        "delta_rank_exchange",
        (tokens, gathered, tails),
        (False, "triton"),
        ("outer", "borders", "sent"),
        gradients=False,
        rounding="inputs",
    )
    return (forward, forward._replace(values=(True, "triton"))) if options.save else (forward,)


def _exchange(tokens: Tensor, gathered: Tensor, tails: Tensor, reverse: bool, backend: str) -> tuple[Tensor, ...]:
    """Apply gathered maps along `ROUTES`, and pack the states at their ends.

    Args:
        tokens: Any tensor with the dtype of the call's tokens, which sets the precision of products.
        gathered: [world, rows, B, HV, K, V + K], as of `rank_carry`.
        tails: [routes B, HV, K, V + K] maps of the tokens after the last full chunk; forward `rank_send` applies them.
        reverse: Whether the states are gradients.
        backend: "eager" or "triton".

    Returns:
        The states at the ends of the routes, the border states, and the send buffer.
    """
    n, HV, K = tails.shape[:3]
    V = tails.shape[3] - K
    outer, borders = (gathered.new_zeros(n, HV, V, K).mT for _ in range(2))
    rows, sent = torch.arange(n, device=gathered.device), torch.zeros_like(tails)
    stage: Any = table.kernel_module("rank_carry", backend)
    precision = {} if backend == "eager" else {"dtype": tokens.dtype}
    routes = torch.tensor(ROUTES, device=gathered.device)
    ends = StateRows(outer, rows), StateRows(borders, rows)
    stage.rank_carry(gathered, routes, *ends, tails if reverse else None, reverse=reverse, **precision)
    stage.rank_send(ends[1], None if reverse else tails, sent, **precision)
    return outer.contiguous(), borders.contiguous(), sent


def _exchange_fake(
    tokens: Tensor, gathered: Tensor, tails: Tensor, reverse: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    states = gathered.new_empty(*tails.shape[:3], tails.shape[3] - tails.shape[2])
    return states, states.clone(), torch.empty_like(tails)


register(
    "delta_rank_exchange(Tensor tokens, Tensor gathered, Tensor tails, bool reverse, str backend) "
    "-> (Tensor outer, Tensor borders, Tensor sent)",
    _exchange,
    _exchange_fake,
)
