"""DPLR, GDN-2 and Comba on kernels with sequences cut into segments: accuracy, and promises about bits."""

from typing import Any

import pytest
import torch
from tests.interpret.test_delta_ops import moved
from tests.interpret.test_low_rank import PER_TOKEN, drawn, require_accurate, require_separate_bits
from tests.ops.low_rank_calls import OPERATORS

import wyfold
from wyfold.kernels import self_check
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape
from wyfold.runtime import kernel_configs, segment_rule

C, BF16, FP32 = 16, torch.bfloat16, torch.float32
PACKED = [0, 70, 70, 71, 150]
SEGMENTED = {
    "two columns, rows of a batch": ("chunk_dplr_delta_rule", Shape(2, 89, 1, 2, 24, 16), "any", None, FP32),
    "one column, packed": ("chunk_gdn2", Shape(1, 153, 1, 2, 16, 24), "any", PACKED, FP32),
    "read key, 16 bits": ("chunk_comba", Shape(1, 80, 1, 1, 16, 16), "weak", None, BF16),
    "resets": ("chunk_dplr_delta_rule", Shape(1, 80, 1, 1, 16, 16), "reset one", None, FP32),
}


@pytest.mark.parametrize("case", SEGMENTED)
def test_segments_compute_what_whole_sequences_do(case: str, device, guarded, results):
    name, shape, gate, borders, dtype = SEGMENTED[case]
    a = drawn(name, shape, gate, dtype=dtype, **({} if borders is None else {"sequences": len(borders) - 1}))
    if borders is not None:
        for part in PER_TOKEN:
            if part in a:
                a[part][:, borders[-1] :] = torch.nan
        a["cu_seqlens"] = torch.tensor(borders)
    with segment_rule.forced(4):
        plan = wyfold.explain(OPERATORS[name][0], **moved_all(a, device), chunk_size=C, backend="triton")
        assert plan.segments >= 3
        require_accurate(name, a, device, guarded, results, chunk_size=C, disable_recompute=dtype == BF16)


def test_packed_is_separate_and_repeats(device, results):
    """Also with states that are V-first, and strided tokens."""
    name, op = "chunk_gdn2", wyfold.chunk_gdn2
    a = moved_all(drawn(name, Shape(1, 153, 1, 2, 16, 24), dtype=BF16, sequences=4), device)
    a |= {"backend": "triton", "chunk_size": C, "state_v_first": True, "initial_state": a["initial_state"].mT}
    fed = {"o": inputs.incoming(a["v"], 1), "state": inputs.incoming(a["initial_state"], 2)}
    for x in (*(a[part] for part in PER_TOKEN if part in a), fed["o"]):
        x[:, PACKED[-1] :] = torch.nan
    strided = {
        part: x.transpose(1, 2).contiguous().transpose(1, 2) if part in PER_TOKEN else x for part, x in a.items()
    }
    with segment_rule.forced(4):
        cu = torch.tensor(PACKED, device=device)
        packed, again = (results(op, x, None, fed, cu_seqlens=cu) for x in (a, strided))
        assert all(torch.equal(again[part], x) for part, x in packed.items())
        require_separate_bits(results, op, a, fed, packed, PACKED)


def test_the_plan_and_the_self_check_have_segments(device):
    q = torch.randn(1, 80, 1, 8, device=device, requires_grad=True)
    with segment_rule.forced(4):
        plan = wyfold.explain(wyfold.chunk_gdn2, *(q,) * 6, backend="triton", chunk_size=C)
        steps = [launch.partition(" ")[0] for launch in (*plan.forward, *plan.backward)]
        assert [steps.count(stage) for stage in ("segment_grid", "segment_fold", "low_rank_scan")] == [2, 2, 1]
        with self_check.collecting() as found:
            wyfold.chunk_gdn2(*(q,) * 6, backend="triton", chunk_size=C)
    assert found and all(record["passed"] for record in found.values()), found


def moved_all(a: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {part: moved(x, device) for part, x in a.items()}


def test_calls_cut_long_sequences_and_forbid_it(device, monkeypatch):
    """By the split rule of the delta rules, on kernels alone."""
    monkeypatch.setattr(kernel_configs, "processors", lambda device: 132)
    q = torch.randn(1, 8192, 1, 8, device=device)
    count = lambda **more: wyfold.explain(wyfold.chunk_gdn2, *(q,) * 6, chunk_size=32, **more).segments
    assert count(backend="triton") == 8 and count(backend="triton", max_splits=5) == 5
    assert count(backend="triton", max_splits=1) == count(backend="triton", batch_invariant=True) == 1
    assert count(backend="eager") == 1
    with pytest.raises(ValueError, match="chunk_gdn2: max_splits must be at least 1"):
        wyfold.chunk_gdn2(*(q,) * 6, max_splits=0)
