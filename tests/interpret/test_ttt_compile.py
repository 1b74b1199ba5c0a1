"""The registered operators of TTT-Linear on kernels: PyTorch's operator checks and its compiler."""

from typing import Any

import pytest
import torch
from tests.interpret.test_ttt_ops import NAMES, results
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import wyfold
from wyfold.autograd import ttt as pipeline
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape


def call(T: int, packed: bool, device: torch.device) -> dict[str, Any]:
    a = inputs.draw(
        rule="ttt_linear",
        shape=Shape(1, T, 1, 2, 8, 8),
        state="normal",
        sequences=3 if packed else None,
        dtype=torch.float32,
        eta_col="signed" if packed else None,
    )
    if packed:
        a["residual"] = "q"
        a["cu_seqlens"] = torch.tensor([0, 5, 5, 17])
    a = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in a.items()}
    return a | {"output_final_state": True, "backend": "triton"}


def incoming(a: dict[str, Any]) -> dict[str, Tensor]:
    like = (a["v"], a["initial_state"], a["initial_state_bias"])
    return {name: inputs.incoming(x, i) for i, (name, x) in enumerate(zip(NAMES, like, strict=True))}


@pytest.mark.long
@pytest.mark.parametrize(
    "packed, keep",
    [
        pytest.param(False, True, id="dense, kept"),
        pytest.param(True, False, id="packed, recomputed", marks=pytest.mark.release_if_interpreted),
    ],
)
def test_both_directions(packed: bool, keep: bool, device, monkeypatch):
    """Schema, fake implementations and tracing agree with the real run."""
    seen = {}
    for name in ("_forward_op", "_backward_op"):
        operator = getattr(pipeline, name)

        def record(*arguments: Any, name: str = name, operator: Any = operator):
            seen[name] = (operator, arguments)
            return operator(*arguments)

        monkeypatch.setattr(pipeline, name, record)
    a = call(17, packed, device)
    results(wyfold.chunk_ttt_linear, a | {"disable_recompute": keep}, incoming(a))
    assert set(seen) == {"_forward_op", "_backward_op"}
    for operator, arguments in seen.values():
        plain = tuple(x.detach() if isinstance(x, Tensor) else x for x in arguments)
        torch.library.opcheck(operator, plain)


@pytest.mark.long
@pytest.mark.parametrize(
    "packed",
    [pytest.param(False, id="dense", marks=pytest.mark.release_if_interpreted), pytest.param(True, id="packed")],
)
def test_lengths_through_the_compiler(packed: bool, device):
    """One graph serves every length, with the bits of the plain call."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(wyfold.chunk_ttt_linear, backend=counter, fullgraph=True)
    for T in (17, 20):
        a = call(T, packed, device) | {"disable_recompute": packed}
        got, plain = (results(op, a, incoming(a)) for op in (compiled, wyfold.chunk_ttt_linear))
        for name, x in plain.items():
            assert torch.equal(got[name], x), (T, name)
    assert counter.frame_count <= 2
    torch._dynamo.reset()
