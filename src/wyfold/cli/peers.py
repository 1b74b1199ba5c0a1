"""Other libraries' versions of our operators: an adapter of a few lines each, for `bench` to run beside ours.

An adapter imports its library when asked, takes the tensors of one call and returns the output. It says by name what
ran: libraries exchange their functions for others when further packages are installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Call = Callable[..., Tensor]
"""(q, k, v, g, beta) -> o, with normalisation of q and k inside."""


@dataclass(frozen=True)
class Peer:
    """One library.

    Attributes:
        name: As `--peers` has it; also the package to look for.
        install: What brings it.
        adapters: Public operator of ours -> what loads theirs, as (full name, call).
    """

    name: str
    install: str
    adapters: dict[str, Callable[[], tuple[str, Call]]]

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.name) is not None


def _named(function: Callable[..., tuple[Tensor, Tensor | None]]) -> tuple[str, Call]:
    def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return function(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    return f"{function.__module__}.{function.__qualname__}", call


def _transformers_gdn() -> tuple[str, Call]:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    return _named(torch_chunk_gated_delta_rule)


def _transformers_kda() -> tuple[str, Call]:
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

    return _named(chunk_kimi_delta_attention)


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "transformers",
            'pip install "wyfold[bench]"',
            {"chunk_gated_delta_rule": _transformers_gdn, "chunk_kda": _transformers_kda},
        ),
    )
}
