"""Layouts in `kkt`: decays of a scalar gate are computed in the layout of the products that they multiply.

The scalar gate is loaded with the keys. Decays of a channel gate are computed in the layout of a product's operand, so
the operand never goes through shared memory.
"""

import importlib.util
import re

import pytest
from tests.compile import aot

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def tiles(call: aot.Call, architecture: str) -> str:
    """TTGIR of a call's kernel after Triton's passes."""
    found = []

    def compiling(kernel, *arguments, **options):
        found.append(aot.code(kernel, *arguments, **options)[0])

    with aot.pretend_gpu(architecture, compiling):
        call.run()
    return found[0].asm["ttgir"]


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    "C", [pytest.param(16, marks=pytest.mark.release), pytest.param(32, marks=pytest.mark.release), 64]
)
def test_a_scalar_gate_exchanges_no_tile(C: int, architecture: str):
    code = tiles(aot.Call("chunk_scaled_dot_kkt", options=(("chunk_size", C),), scalar=True), architecture)
    assert re.search(rf"math\.exp2 .*tensor<{C}x{C}xf32, #mma>", code)
    # One conversion: rows of L, to the layout in which they are stored.
    assert len(re.findall(rf"convert_layout .*tensor<{C}x{C}xf32", code)) == 1
    # The gate and beta are loaded before the products.
    before = re.split(r"tt\.dot |warp_group_dot ", code, maxsplit=1)[0]
    assert len(re.findall(rf"tt\.load .*: tensor<{C}x!tt\.ptr", before)) == 2


@pytest.mark.skipif(not aot.passes_are_known(), reason="a Triton that stores this operand to shared memory (TRITON-10)")
@pytest.mark.parametrize("architecture", [pytest.param("sm_80", marks=pytest.mark.release), "sm_90"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_channel_gate_s_operand_is_computed_in_its_layout(dtype: str, architecture: str):
    code = tiles(aot.Call("chunk_scaled_dot_kkt", dtype, options=(("chunk_size", 64),)), architecture)
    usual = code[code.index("scf.for") : code.index("scf.if")]
    assert usual.count("tt.dot ") == 3
    assert not re.search(r"(convert_layout|local_alloc) .*tensor<4x(4x16|64)x32xf32", usual)
    # The layout is that of float32 for keys of any dtype. With a kWidth of 2 each element would be loaded separately.
    assert set(re.findall(r"kWidth = (\d)", usual)) == {"1"}
