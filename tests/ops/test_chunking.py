"""Default chunk sizes."""

from types import SimpleNamespace

import pytest
import torch

from wyfold.ops.delta_plan import best_chunk_size
from wyfold.runtime import triton_support


@pytest.mark.parametrize(
    "architecture, dtype, K, V, group, expected",
    [
        ("sm_90", torch.bfloat16, 128, 128, 1, 64),
        ("sm_90", torch.bfloat16, 128, 128, 2, 64),
        ("sm_90", torch.bfloat16, 128, 64, 1, 32),
        ("sm_90", torch.float16, 128, 128, 1, 32),
        ("sm_90", torch.float64, 128, 128, 1, 32),
        ("sm_80", torch.bfloat16, 128, 128, 1, 32),
    ],
    ids=str,
)
def test_chunks_of_a_channel_gate_follow_its_kernels(architecture, dtype, K, V, group, expected, monkeypatch):
    """Stubs replace tensors of the card: only the attributes that are read."""
    monkeypatch.setattr(triton_support, "architecture", lambda device: architecture)
    monkeypatch.setattr(triton_support, "support_of", lambda device: SimpleNamespace(refusal=""))
    q, v = (
        SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(1, 9, H, n))
        for H, n in ((2, K), (2 * group, V))
    )
    assert best_chunk_size(q, v, channel_gate=True) == expected
    assert best_chunk_size(q, v, channel_gate=False) == 64


@pytest.mark.parametrize("channel_gate", [False, True])
def test_the_chunk_size_is_found_for_symbolic_widths(channel_gate):
    """Symbolic widths, as in a compiled function whose widths changed once; meta tensors are not on the CPU."""

    def chunk(q, v):
        return q.new_empty(best_chunk_size(q, v, channel_gate=channel_gate))

    q, v = (torch.empty(1, 9, H, 48, device="meta") for H in (2, 4))
    compiled = torch.compile(chunk, backend="eager", dynamic=True, fullgraph=True)
    assert compiled(q, v).shape[0] == chunk(q, v).shape[0]
