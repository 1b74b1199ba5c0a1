"""What the tests on a card share. They have shapes that no interpreter reaches, and skip where there is no card."""

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
    """`placed(arguments)`: the same on the card. Tensors keep their strides."""
    return lambda given: {name: x.to(card) if isinstance(x, Tensor) else x for name, x in given.items()}


@pytest.fixture(scope="session")
def arrows() -> Callable[[Mapping[str, Any]], dict[str, Tensor]]:
    """`arrows(arguments)`: gradients of o and of the final state, as big as the values and the initial state are.

    A state of zeros gets a gradient of zeros: what kernels then compute is a call without either.
    """

    def drawn(given: Mapping[str, Any]) -> dict[str, Tensor]:
        state = given["initial_state"]
        back = inputs.incoming(state, 2) if state.any() else torch.zeros_like(state)
        return {"o": inputs.incoming(given["v"], 1), "state": back}

    return drawn
