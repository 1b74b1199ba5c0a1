"""Where a scalar gate's decays are made: beside the products they multiply, from a gate asked for with the keys."""

import importlib.util
import re

import pytest
from tests.compile import aot

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("C", [16, 32, 64])
def test_a_scalar_gate_exchanges_no_tile(C: int, architecture: str):
    found = []

    def compiling(kernel, *arguments, **options):
        found.append(aot.code(kernel, *arguments, **options)[0])

    with aot.pretending(architecture, compiling):
        aot.Call("chunk_scaled_dot_kkt", options=(("chunk_size", C),), scalar=True).run()
    code = found[0].asm["ttgir"]
    assert re.search(rf"math\.exp2 .*tensor<{C}x{C}xf32, #mma>", code)
    # Rows of L, to the layout they are stored in.
    assert len(re.findall(rf"convert_layout .*tensor<{C}x{C}xf32", code)) == 1
    # The gate, and beta, are not asked for behind the products.
    before = re.split(r"tt\.dot |warp_group_dot ", code, maxsplit=1)[0]
    assert len(re.findall(rf"tt\.load .*: tensor<{C}x!tt\.ptr", before)) == 2
