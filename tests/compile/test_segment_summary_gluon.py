"""`segment_summary_bwd` in Gluon: products wait for each other only where the source has a wait."""

import importlib.util
import re

import pytest
from tests.compile import aot
from tests.compile.machine_code import disassemble, mma_loops, overwritten_operands

from wyfold.autograd.kernel_call import KernelCall

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.parametrize(
    "operator, horizon",
    [
        ("chunk_gated_delta_rule", False),
        ("chunk_gated_delta_rule", True),
        pytest.param("chunk_kda", False, marks=pytest.mark.release),
        pytest.param("chunk_kda", True, marks=pytest.mark.release),
    ],
)
def test_no_wait_is_added(operator: str, horizon: bool, monkeypatch):
    """ptxas may add a wait if an accumulator is written during another product (docs/facts/compilers.md, PTXAS-4)."""
    monkeypatch.setattr(KernelCall, "begins_at_horizon", lambda *_: horizon)
    call = aot.Call(operator, options=(("chunk_size", 64),), heads=32, wrt=("initial_state",), segments=4)
    found = []

    def compiling(kernel, *arguments, **options):
        if kernel.fn.__name__ == "wyfold_segment_summary_bwd_gluon":
            found.append(disassemble(aot.code(kernel, *arguments, **options)[0]))

    with aot.pretend_gpu("sm_90", compiling):
        call.run()
    (sass,) = found
    assert overwritten_operands(sass) == []
    waits = [re.findall(r"DEPBAR\.LE gsb0, 0x(\d+)", "\n".join(loop)) for loop in mma_loops(sass)]
    assert waits
    assert all(x == ["1", "1", "0"] for x in waits), waits
