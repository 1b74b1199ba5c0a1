"""Every operator that the package registers passes PyTorch's opcheck."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from wyfold import TTTState, serving
from wyfold.cli.operators import OPERATOR_SPECS, measured
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape

Call = tuple[Any, tuple[Any, ...]]
"""An operator, and the arguments of one call of it."""


class Recorder(TorchDispatchMode):
    """Records one call of every operator in the namespace `wyfold`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, Call] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "wyfold":
            copied = tuple(x.detach().clone() if isinstance(x, Tensor) else x for x in args)
            self.calls.setdefault(func.name().partition(".")[0], (func, copied))
        return func(*args, **(kwargs or {}))


def serve() -> None:
    """Decode one token of two sequences from pools of three. Serving functions are not in `OPERATOR_SPECS`."""
    drawn = inputs.draw("random", "kda", Shape(2, 1, 1, 2, 8, 8), dtype=torch.float32)
    pool = torch.zeros(3, 2, 8, 8)
    q, k, v, g, beta = (drawn[name] for name in ("q", "k", "v", "g", "beta"))
    serving.decode(q, k, v, g, beta, pool, state_v_first=False)
    serving.conv1d_update(torch.ones(2, 16), torch.zeros(3, 16, 3), torch.ones(16, 4))
    bias = pool[:, :, :1]
    states = TTTState(pool, bias.clone(), pool.clone(), bias.clone(), torch.zeros(3, dtype=torch.int32))
    serving.ttt_decode(q, k, v, torch.ones(2, 8), torch.zeros(2, 8), beta, states)


@pytest.fixture(scope="module")
def calls() -> dict[str, Call]:
    """Name of every registered operator -> one call of it."""
    recorder = Recorder()
    with recorder:
        for spec in OPERATOR_SPECS.values():
            arguments = spec.arguments(Shape(1, 20, 1, 2, 8, 8), torch.float32, 3)
            measured(spec.ours, arguments, spec.outputs, backward=spec.backward)
        serve()
        # `after` orders a collective in a compiled graph, `delta_received` uses its result. Neither occurs in other
        # calls of a single process.
        torch.ops.wyfold.after(torch.ones(2, 3), [torch.ones(4)])
        torch.ops.wyfold.delta_received(torch.ones(2, 1, 1, 2, 8, 16), [2, 4, 0, 1], 8)
    return recorder.calls


def registered() -> set[str]:
    """Names of the operators that the package registers, with two exceptions.

    Operators with collectives are tested on ranks, in tests/interpret/test_context.py and
    tests/context_parallel/test_context.py. `once` computes nothing: it marks arguments for the compiler and is removed
    in lowering (tests/reports/test_second_derivatives.py).
    """
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()} - {"wyfold::once"}
    over_ranks = ("wyfold::delta_rank_", "wyfold::conv_rank_")
    return {name for name in names if name.startswith("wyfold::") and not name.startswith(over_ranks)}


def test_every_registered_operator_is_called(calls: dict[str, Call]):
    assert set(calls) == registered()


@pytest.mark.long
def test_opcheck(calls: dict[str, Call]):
    for operator, arguments in calls.values():
        torch.library.opcheck(operator, arguments)
