"""Forward of TTT-Linear in Gluon: the calls that use it, its barriers, and the width of its stores."""

import functools
import importlib.util
import itertools
import re

import pytest
import torch
from tests.compile import aot

import wyfold

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

BACKWARD = ["wyfold_ttt_replay_triton", "wyfold_ttt_bwd_triton", "wyfold_ttt_parameters_triton"]
BACKWARD += ["wyfold_ttt_gradients_triton"]


def kernels_of(T=70, D=64, dtype=torch.bfloat16, stride=1, B=2, grad=True, **options):
    """Kernels that a call would launch on sm_90."""
    found = []
    q, k, v = (torch.zeros(B, T * stride, 2, D, dtype=dtype)[:, ::stride].requires_grad_(grad) for _ in range(3))
    w, options = torch.ones(2, D), {"chunk_size": 16, "backend": "triton", **options}
    with aot.pretend_gpu("sm_90", lambda kernel, *_, **__: found.append(kernel.fn.__name__)):
        o = wyfold.chunk_ttt_linear(q, k, v, w, w, 0.1, **options)[0]
        if grad:
            torch.autograd.grad(o.sum(), q)
    return [name for name in found if "grid" not in name]


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"T": 128, "grad": False},
        {"B": 1, "cu_seqlens": torch.tensor([0, 30, 70])},
        {"stride": 2},
        {"eta_col": 0.3, "residual": "q"},
        {"output_final_state": True},
    ],
    ids=lambda call: ", ".join(call) or "as it is",
)
def test_served_in_gluon(call: dict):
    assert kernels_of(**call) == ["wyfold_ttt_gluon", *(BACKWARD if call.get("grad", True) else [])]


@pytest.mark.parametrize(
    "call",
    [{"D": 128}, {"D": 40}, {"dtype": torch.float16}, {"dtype": torch.float32}, {"chunk_size": 32}],
    ids=lambda call: ", ".join(call),
)
def test_left_to_triton(call: dict):
    assert kernels_of(**call) == ["wyfold_ttt_triton", "wyfold_ttt_outputs_triton", *BACKWARD]


def test_explained_as_it_is_launched():
    call = aot.Call("chunk_ttt_linear", K=64, V=64, options=(("chunk_size", 16),))
    rows = aot.explained_rows(call, "sm_90")
    assert ("ttt.gluon", "bf16 K64 V64 C16 forward") in rows and rows == set(aot.uncompiled(call, "sm_90").rows)


@functools.cache
def ptx_of(grad: bool) -> str:
    """PTX of a launch without states, which stores the inputs of a backward or not."""
    code = []

    def compile_it(kernel, *arguments, **options):
        if kernel.fn.__name__ == "wyfold_ttt_gluon":
            code.append(aot.code(kernel, *arguments, **options)[0].asm["ptx"])

    x = [torch.zeros(1, 64, 2, 64, dtype=torch.bfloat16, requires_grad=grad) for _ in range(3)]
    w = torch.ones(2, 64)
    with aot.pretend_gpu("sm_90", compile_it):
        wyfold.chunk_ttt_linear(*x, w, w, 0.1, chunk_size=16, backend="triton")
    (ptx,) = code
    return ptx


def test_two_barriers_a_mini_batch():
    """The chain of mini-batches is unrolled. Two barriers are between the reciprocal roots of consecutive ones."""
    ptx = ptx_of(True)
    words = [line.split()[0] for line in ptx.splitlines() if line.strip().startswith(("bar.sync", "rsqrt"))]
    chain = [i for i, word in enumerate(words) if word.startswith("rsqrt")]
    between = [b - a - 1 for a, b in itertools.pairwise(chain)]
    assert [2, 2, 2] in [between[i : i + 3] for i in range(len(between))], words


@pytest.mark.parametrize("grad", [True, False], ids=["kept", "not kept"])
def test_tiles_are_stored_16_bytes_at_a_time(grad: bool):
    """Inside a warp group the compiler does not know that a stride is 1; it once stored each element separately."""
    stored = re.findall(r"st\.global\S*", ptx_of(grad))
    assert not [word for word in stored if word.endswith(("b8", "b16"))]
    assert len([word for word in stored if ".v4." in word]) == (17 if grad else 4)


@pytest.mark.parametrize("grad", [True, False], ids=["kept", "not kept"])
def test_one_thread_arrives_for_all(grad: bool):
    """A barrier of the warp group precedes every arrival.

    Groups pass tiles to each other through shared memory. One thread arrives for its group, and only a barrier orders
    the accesses of the other threads before the arrival.
    """
    order = r"(?P<meet>bar\.sync)|(?P<arrive>mbarrier\.arrive\.shared)|(?P<touch>(?:ld|st)\.shared|ldmatrix|stmatrix)"
    words = [match.lastgroup for match in re.finditer(order, ptx_of(grad))]
    arrivals = [n for n, word in enumerate(words) if word == "arrive"]
    assert len(arrivals) >= 3
    for n in arrivals:
        assert next(word for word in reversed(words[:n]) if word != "arrive") == "meet"
