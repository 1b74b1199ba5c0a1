"""Float32 results keep float32 accuracy where PyTorch may use TF32, for every operator and gradient."""

import pytest
import torch

from wyfold.cli.operators import OPERATOR_SPECS, measured, verdicts
from wyfold.kernels.scan import eager as scan_stage
from wyfold.reference.shapes import Shape


def failures(name: str) -> list[str]:
    """Tensors of one operator over their float32 limits, with TF32 allowed in the whole process."""
    spec = OPERATOR_SPECS[name]
    arguments = spec.arguments(Shape(1, 130, 1, 2, 64, 64), torch.float32, 3)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        got = measured(spec.ours, arguments, spec.outputs, backward=spec.backward, seed=3)
    finally:
        torch.set_float32_matmul_precision(before)
    return [str(verdict) for verdict in verdicts(spec, arguments, got, 3) if not verdict.passed]


@pytest.mark.parametrize("name", OPERATOR_SPECS)
def test_float32_stays_float32(name: str):
    assert failures(name) == []


def test_lower_precision_is_detected(monkeypatch: pytest.MonkeyPatch):
    usual = scan_stage.scan

    def rounded(inputs, factors, S, table, scale, out, leaving):
        left = usual(inputs, factors, S, table, scale, out, leaving)
        out.copy_(out.bfloat16())
        return left

    monkeypatch.setattr(scan_stage, "scan", rounded)
    assert any(line.startswith("o ") for line in failures("chunk_kda"))
