"""Where gates' decays are made: a scalar's beside the products they multiply, from a gate asked for with the keys;
those of channels in the layout of a product's operand, which so never lies in shared memory."""

import importlib.util
import re

import pytest
from tests.compile import aot

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def tiles(call: aot.Call, architecture: str) -> str:
    """What Triton's passes over tiles leave of a call's kernel."""
    found = []

    def compiling(kernel, *arguments, **options):
        found.append(aot.code(kernel, *arguments, **options)[0])

    with aot.pretending(architecture, compiling):
        call.run()
    return found[0].asm["ttgir"]


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("C", [16, 32, 64])
def test_a_scalar_gate_exchanges_no_tile(C: int, architecture: str):
    code = tiles(aot.Call("chunk_scaled_dot_kkt", options=(("chunk_size", C),), scalar=True), architecture)
    assert re.search(rf"math\.exp2 .*tensor<{C}x{C}xf32, #mma>", code)
    # Rows of L, to the layout they are stored in.
    assert len(re.findall(rf"convert_layout .*tensor<{C}x{C}xf32", code)) == 1
    # The gate, and beta, are not asked for behind the products.
    before = re.split(r"tt\.dot |warp_group_dot ", code, maxsplit=1)[0]
    assert len(re.findall(rf"tt\.load .*: tensor<{C}x!tt\.ptr", before)) == 2


@pytest.mark.skipif(not aot.keeps_modules(), reason="a Triton that stores this operand to shared memory (TRITON-10)")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_channel_gates_operand_is_made_where_it_is_wanted(dtype: str, architecture: str):
    code = tiles(aot.Call("chunk_scaled_dot_kkt", dtype, options=(("chunk_size", 64),)), architecture)
    usual = code[code.index("scf.for") : code.index("scf.if")]
    assert usual.count("tt.dot ") == 3
    assert not re.search(r"(convert_layout|local_alloc) .*tensor<4x(4x16|64)x32xf32", usual)
    # Laid out as float32 is, whatever the keys were: bfloat16's way of 2 takes a load for each element.
    assert set(re.findall(r"kWidth = (\d)", usual)) == {"1"}
