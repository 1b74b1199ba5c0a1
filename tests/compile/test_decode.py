"""How a state travels when a token is decoded: in whole vectors, many in flight, and never through shared memory."""

import importlib.util
import re

import pytest
import torch
from tests.compile import aot

from wyfold import serving

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

SMALL = 1024
"""Bytes of shared memory in which the threads of a warp may hand each other a token's q, k, v and gate."""


def decoded(architecture: str, stored: torch.dtype, v_first: bool):
    """The kernel that a KDA layer's decoding gets, as Triton compiled it."""
    found = []

    def compiling(kernel, *arguments, **options):
        found.append(aot.code(kernel, *arguments, **options)[0])

    q, v = torch.randn(2, 1, 1, 128, dtype=torch.bfloat16), torch.randn(2, 1, 2, 128, dtype=torch.bfloat16)
    g, beta = torch.randn(2, 1, 2, 128, dtype=torch.bfloat16), torch.randn(2, 1, 2, dtype=torch.bfloat16)
    pool, slots = torch.zeros(3, 2, 128, 128, dtype=stored), torch.zeros(2, dtype=torch.int32)
    inside = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    gate = {"A_log": torch.zeros(2), "dt_bias": torch.zeros(256)}
    with aot.pretending(architecture, compiling), torch.no_grad():
        serving.decode(q, q, v, g, beta, pool, slots, state_v_first=v_first, backend="triton", **inside, **gate)
    return found[0]


@pytest.mark.parametrize("v_first", [False, True], ids=["K first", "V first"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_a_decoded_state_travels_in_whole_vectors(architecture: str, stored: torch.dtype, v_first: bool):
    kernel = decoded(architecture, stored, v_first)
    code = kernel.asm["ptx"]
    rows = int(re.search(r"tensor<(\d+)x128x(?:f32|bf16)", kernel.asm["ttgir"])[1])
    vectors = rows * 128 * stored.itemsize // (32 * kernel.metadata.num_warps * 16)
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", code)) >= vectors
    assert len(re.findall(r"st\.global\S*\.v4\.b32", code)) >= vectors
    assert kernel.metadata.shared <= SMALL
    log = aot.assembled(kernel)
    assert re.findall(r"(\d+) bytes spill stores", log) == ["0"], log
