"""Slices of the low-rank kernels: none is narrower than a right operand of 16 bits may be on Hopper (H200-4)."""

import importlib.util
from typing import Any

import pytest
from tests.compile import aot

from wyfold.runtime import kernel_configs
from wyfold.runtime.kernel_configs import Config

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def sizes(call: aot.Call) -> dict[str, Any]:
    """Kernel -> its constexpr sizes, of a call on an H200. Nothing is compiled."""
    found = {}

    def launched(kernel: Any, *arguments: Any, **options: Any) -> None:
        found[aot.kernel_name(kernel)] = (dict(zip(kernel.arg_names, arguments, strict=False)) | options).get("SIZES")

    with aot.pretend_gpu("sm_90", launched):
        call.run()
    return found


def test_no_right_operand_is_narrow():
    """On an H200, a slice of 32 channels made an illegal memory access in `low_rank_gradients`."""
    narrow = Config(4, 1, {"BK": 32, "BV": 32}, 255)
    with kernel_configs.override_row("sm_90", "low_rank_gradients.triton", "bf16", narrow):
        found = sizes(aot.Call("chunk_dplr_delta_rule", K=24, V=24, options=(("chunk_size", 64),)))
    assert found["low_rank_prepare.triton"].BE == 64
    assert (found["low_rank_gradients.triton"].BK, found["low_rank_gradients.triton"].BV) == (64, 64)
