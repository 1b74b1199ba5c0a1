"""`segment_summary_bwd` in Gluon: products wait for each other where its source says, and nowhere else."""

import importlib.util
import re

import pytest
from tests.compile import aot
from tests.compile.machine_code import loops_with_products, overtaken, read

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.parametrize("operator", ["chunk_gated_delta_rule", "chunk_kda"])
def test_no_wait_is_added(operator: str):
    """ptxas may add one where an accumulator is written under another product: docs/facts/compilers.md, PTXAS-4."""
    call = aot.Call(operator, options=(("chunk_size", 64),), heads=32, wrt=("initial_state",), segments=4)
    found = []

    def compiling(kernel, *arguments, **options):
        if kernel.fn.__name__ == "wyfold_segment_summary_bwd_gluon":
            found.append(read(aot.code(kernel, *arguments, **options)[0]))

    with aot.pretending("sm_90", compiling):
        call.run()
    (sass,) = found
    assert overtaken(sass) == []
    waits = [re.findall(r"DEPBAR\.LE gsb0, 0x(\d+)", "\n".join(loop)) for loop in loops_with_products(sass)]
    assert waits
    assert all(x == ["1", "1", "0"] for x in waits), waits
