"""Memory accesses of a decode step: states are moved in whole vectors with many in flight.

A state goes to a tile in registers or, unchanged and one head at a time, to shared memory.
"""

import importlib.util
import re

import pytest
import torch
from tests.compile import aot

from wyfold import serving

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

SMALL = 1024
"""Most bytes of shared memory for the exchange of a token's q, k, v and gate between the threads of a warp."""


def decoded(architecture: str, stored: torch.dtype, v_first: bool):
    """The compiled kernel of a decode step of a KDA layer."""
    found = []

    def compiling(kernel, *arguments, **options):
        found.append(aot.code(kernel, *arguments, **options)[0])

    q, v = torch.randn(2, 1, 1, 128, dtype=torch.bfloat16), torch.randn(2, 1, 2, 128, dtype=torch.bfloat16)
    g, beta = torch.randn(2, 1, 2, 128, dtype=torch.bfloat16), torch.randn(2, 1, 2, dtype=torch.bfloat16)
    pool, slots = torch.zeros(3, 2, 128, 128, dtype=stored), torch.zeros(2, dtype=torch.int32)
    inside = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    gate = {"A_log": torch.zeros(2), "dt_bias": torch.zeros(256)}
    with aot.pretend_gpu(architecture, compiling), torch.no_grad():
        serving.decode(q, q, v, g, beta, pool, slots, state_v_first=v_first, backend="triton", **inside, **gate)
    return found[0]


HELD = ("sm_90", torch.bfloat16, False)
"""The case whose states are copied to shared memory, one head at a time."""

IN_REGISTERS = [
    pytest.param("sm_80", torch.float32, False, marks=pytest.mark.release),
    ("sm_80", torch.bfloat16, True),
    pytest.param("sm_90", torch.float32, False, marks=pytest.mark.release),
    ("sm_90", torch.float32, True),
    ("sm_90", torch.bfloat16, True),
]


@pytest.mark.parametrize("architecture, stored, v_first", IN_REGISTERS)
def test_a_state_is_loaded_and_stored_in_whole_vectors(architecture: str, stored: torch.dtype, v_first: bool):
    kernel = decoded(architecture, stored, v_first)
    code = kernel.asm["ptx"]
    rows = int(re.search(r"tensor<(\d+)x128x(?:f32|bf16)", kernel.asm["ttgir"])[1])
    vectors = rows * 128 * stored.itemsize // (32 * kernel.metadata.num_warps * 16)
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", code)) >= vectors
    assert len(re.findall(r"st\.global\S*\.v4\.b32", code)) >= vectors
    assert kernel.metadata.shared <= SMALL
    log = aot.assembler_log(kernel)
    assert re.findall(r"(\d+) bytes spill stores", log) == ["0"], log


def test_five_programs_with_states_in_shared_memory_fit():
    """A state is copied asynchronously and stored in whole vectors; a multiprocessor holds five programs."""
    kernel = decoded(*HELD)
    code, threads = kernel.asm["ptx"], 32 * kernel.metadata.num_warps
    vectors = 128 * 128 * HELD[1].itemsize // (threads * 16)
    assert len(re.findall(r"cp\.async\.cg\.shared\.global.* 0x10, ", code)) == vectors
    assert len(re.findall(r"st\.global\S*\.v4\.b32", code)) >= vectors
    log = aot.assembler_log(kernel)
    registers = 8 * -(-int(re.search(r"Used (\d+) registers", log)[1]) // 8)
    assert 5 * registers * threads <= 65536 and 5 * (kernel.metadata.shared + 1024) <= 228 * 1024
    assert re.findall(r"(\d+) bytes spill stores", log) == ["0"], log
