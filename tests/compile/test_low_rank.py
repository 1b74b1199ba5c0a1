"""Slices of the low-rank kernels: none is narrower than a right operand of 16 bits may be on Hopper (H200-4)."""

import importlib.util
from typing import Any

import pytest
import torch
from tests.compile import aot

import wyfold
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


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("K", [64, 128])
def test_two_columns_are_prepared_in_gluon_in_chunks_of_32_alone(K: int, chunk_size: int):
    """In chunks of 64, DPLR of K = 128 got the row of GDN-2 in the dispatch table, and the kernel for 32 rows."""
    found = sizes(aot.Call("chunk_dplr_delta_rule", K=K, V=K, options=(("chunk_size", chunk_size),), heads=2))
    assert ("low_rank_prepare.gluon" in found) == (chunk_size == 32)


@pytest.mark.parametrize("kind", [pytest.param("channel", marks=pytest.mark.release), "scalar"])
def test_packed_calls_compile(kind: str):
    """Packed calls have a branch for tokens past the last boundary, and the interpreter takes more than Triton."""
    made = []

    def launched(kernel: Any, *arguments: Any, **options: Any) -> None:
        if "low_rank" in kernel.fn.__name__ and "scan" not in kernel.fn.__name__:
            made.append(aot.code(kernel, *arguments, **options)[0].metadata.name)

    row = Config(4, 1, {"BK": 64, "BE": 64, "TOKEN_GATE": int(kind == "scalar")}, None)
    with kernel_configs.override_row("sm_90", "low_rank_prepare.triton", "bf16 C32 scalar", row):
        with aot.pretend_gpu("sm_90", launched):
            q = torch.zeros(1, 70, 1, 16, dtype=torch.bfloat16, requires_grad=True)
            g = torch.zeros(1, 70, 1, requires_grad=True)
            o, _ = wyfold.chunk_comba(
                q, q, q, p=q, g=g, cu_seqlens=torch.tensor([0, 40, 60]), chunk_size=32, backend="triton"
            )
            o.sum().backward()
    assert len(set(made)) == 2 and all(("token_gate" in name) == (kind == "scalar") for name in made)
