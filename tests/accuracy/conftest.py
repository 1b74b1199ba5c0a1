"""Fixtures of the tests on a GPU. Their shapes are too large for an interpreter; without a GPU they are skipped."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from wyfold.reference import inputs


@pytest.fixture(scope="session")
def card() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")
    return torch.device("cuda")


@pytest.fixture(scope="session")
def placed(card: torch.device) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """`placed(arguments)`: the arguments on the GPU, with their strides."""
    return lambda given: {name: x.to(card) if isinstance(x, Tensor) else x for name, x in given.items()}


@pytest.fixture(scope="session")
def arrows() -> Callable[[Mapping[str, Any]], dict[str, Tensor]]:
    """`arrows(arguments)`: incoming gradients of o and of the final state, of the size of the values and the initial
    state.

    An initial state of zeros gets a gradient of zeros, so that the kernels compute a call without either.
    """

    def drawn(given: Mapping[str, Any]) -> dict[str, Tensor]:
        state = given["initial_state"]
        back = inputs.incoming(state, 2) if state.any() else torch.zeros_like(state)
        return {"o": inputs.incoming(given["v"], 1), "state": back}

    return drawn
