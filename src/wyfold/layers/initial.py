"""Initial values that differ from those of PyTorch's module."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn


def set_normal_initial(module: nn.Linear | nn.Embedding, std: float) -> None:
    """Make `module.reset_parameters()` draw a normal matrix and a zero bias; draw nothing yet.

    Code that materialises a model from the meta device calls `reset_parameters` of every module, parents before their
    children, so a parent cannot draw for its child: the child would draw PyTorch's own values afterwards. The module
    stays of PyTorch's own class, by which quantizers and adapters find it.

    Args:
        module: Changed in place; copies and pickles of it keep the change.
        std: Standard deviation.
    """
    module.reset_parameters = partial(_draw, module, std)  # type: ignore[method-assign]


@torch.no_grad()
def _draw(module: nn.Linear | nn.Embedding, std: float) -> None:
    nn.init.normal_(module.weight, std=std)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
