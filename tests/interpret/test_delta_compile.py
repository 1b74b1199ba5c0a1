"""The registered delta-rule operators on kernels: PyTorch's operator checks and its compiler."""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import wyfold
from wyfold.autograd import delta as pipeline
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape

RULES = ("delta_rule", "gated_delta_rule", "kda")
PACKED = (0, 5, 5, 17)


def call(rule: str, T: int, packed: bool, device: torch.device) -> dict[str, Any]:
    shape = Shape(1, T, 1, 2, 8, 16)
    a = inputs.draw("random", rule, shape, gate="model", state="normal", sequences=3 if packed else None)
    if packed:
        a["cu_seqlens"] = torch.tensor(PACKED)
    a = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in a.items()}
    return a | {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "chunk_size": 16, "backend": "triton"}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple]:
    """Operator and arguments of the last call in each direction."""
    seen = {}
    for name in ("_forward_op", "_backward_op"):
        op = getattr(pipeline, name)

        def record(*arguments: Any, name: str = name, op: Any = op):
            seen[name] = (op, arguments)
            return op(*arguments)

        monkeypatch.setattr(pipeline, name, record)
    return seen


@pytest.mark.long
@pytest.mark.parametrize(
    "rule, packed, keep",
    [
        pytest.param("delta_rule", False, False, marks=pytest.mark.release_if_interpreted),
        ("gated_delta_rule", True, True),
        pytest.param("kda", True, False, marks=pytest.mark.release_if_interpreted),
    ],
)
def test_both_directions(rule: str, packed: bool, keep: bool, device, recorded, results):
    """Schema, fake implementations and tracing agree with the real run."""
    op = getattr(wyfold, f"chunk_{rule}")
    results(op, call(rule, 17, packed, device), None if keep else ["q", "v"], disable_recompute=keep)
    assert set(recorded) == {"_forward_op", "_backward_op"}
    for operator, arguments in recorded.values():
        plain = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in arguments)
        torch.library.opcheck(operator, plain)


@pytest.mark.long
@pytest.mark.parametrize("rule, packed", [("gated_delta_rule", True)])
def test_lengths_through_the_compiler(rule: str, packed: bool, device, results):
    """One graph serves every length, with the bits of the plain call."""
    op = getattr(wyfold, f"chunk_{rule}")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(op, backend=counter, fullgraph=True)
    for T in (17, 20):
        a = call(rule, T, packed, device) | {"disable_recompute": packed}
        got, plain = results(compiled, a), results(op, a)
        for name, x in plain.items():
            assert torch.equal(got[name], x), (T, name)
    assert counter.frame_count <= 2
    torch._dynamo.reset()


@pytest.mark.parametrize("rule", RULES)
def test_autocast_casts_q_k_and_v_and_nothing_else(rule: str, device, results):
    op, a = getattr(wyfold, f"chunk_{rule}"), call(rule, 17, False, device)
    narrow = a | {name: a[name].bfloat16() for name in ("q", "k", "v")}
    plain = results(op, narrow)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = results(op, a)
    for name, x in plain.items():
        assert torch.equal(got[name], x.to(got[name].dtype)), name
