"""Initialisation of PyTorch modules with values other than their own defaults."""

from __future__ import annotations

import weakref

import torch
from torch import nn


def set_normal_initial(module: nn.Linear | nn.Embedding, std: float) -> None:
    """Make `module.reset_parameters()` draw a normal matrix and a zero bias; the call itself draws nothing.

    Code that materialises a model from the meta device calls `reset_parameters` of every module, parents before their
    children. A parent cannot draw for its child, because the child would then overwrite it with PyTorch's defaults. The
    module keeps its PyTorch class, which quantizers and adapters look for.

    Args:
        module: Changed in place; copies and pickles of it keep the change.
        std: Standard deviation.
    """
    module.reset_parameters = NormalInitial(module, std)  # type: ignore[method-assign]


class NormalInitial:
    """`reset_parameters` of one module: a normal matrix and a zero bias.

    The module holds this object in its `__dict__`, so a strong reference back would be a cycle: the weights of a
    deleted model would stay allocated until the garbage collector runs.
    """

    def __init__(self, module: nn.Linear | nn.Embedding, std: float):
        self._module, self._std = weakref.ref(module), std

    @torch.no_grad()
    def __call__(self) -> None:
        module = self._live_module()
        nn.init.normal_(module.weight, std=self._std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def __reduce__(self) -> tuple[type[NormalInitial], tuple[nn.Module, float]]:
        """Copy and pickle the module by reference, so that the copy of a module draws into its own weight."""
        return type(self), (self._live_module(), self._std)

    def _live_module(self) -> nn.Linear | nn.Embedding:
        module = self._module()
        if module is None:
            raise ReferenceError("reset_parameters: its module must exist, got a deleted one; call it before")
        return module
