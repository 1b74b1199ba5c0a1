"""`prepare` in Gluon: the calls with a channel gate that use it, and its machine code."""

import importlib.util
import re

import pytest
import torch
from tests.compile import aot

import wyfold

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from tests.compile.machine_code import disassemble, overwritten_operands

from wyfold.kernels.prepare.gluon import wyfold_prepare_channel_gluon, wyfold_prepare_gluon

NAMES = ("wyfold_prepare_triton", "wyfold_prepare_gluon", "wyfold_prepare_channel_gluon")


def call(
    T: int = 70,
    *,
    K: int = 128,
    V: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    gate: torch.dtype = torch.float32,
    stride: int = 1,
    HV: int = 2,
    cu: tuple[int, ...] | None = None,
    **options,
) -> None:
    B = 2 if cu is None else 1
    q, k = (torch.zeros(B, T * stride, 2, K, dtype=dtype)[:, ::stride] for _ in range(2))
    v, beta, g = torch.zeros(B, T, HV, V, dtype=dtype), torch.ones(B, T, HV), torch.zeros(B, T, HV, K, dtype=gate)
    options = {"chunk_size": 64, "backend": "triton", **options}
    wyfold.chunk_kda(q, k, v, g, beta, cu_seqlens=None if cu is None else torch.tensor(cu), **options)


def kernels_of(**given) -> list[str]:
    """Kernels of `prepare` that a call would launch on sm_90."""
    found = []
    with aot.pretend_gpu("sm_90", lambda kernel, *_, **__: found.append(kernel.fn.__name__)):
        call(**given)
    return [name for name in found if name in NAMES]


INSIDE = {"use_gate_in_kernel": True, "A_log": torch.zeros(2), "dt_bias": torch.zeros(256)}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"T": 128},
        {"cu": (0, 30, 70)},
        {"use_qk_l2norm_in_kernel": True},
        {"stride": 2},
        {"HV": 4},
        {"V": 64},
        {"gate": torch.bfloat16, **INSIDE},
        {"safe_gate": True, "lower_bound": -5.0, **INSIDE},
    ],
    ids=lambda given: ", ".join(given) or "as it is",
)
def test_served_in_gluon(given: dict):
    assert kernels_of(**given) == ["wyfold_prepare_channel_gluon"]


@pytest.mark.parametrize(
    "given", [{"K": 64}, {"dtype": torch.float16}, {"chunk_size": 32}], ids=lambda given: ", ".join(given)
)
def test_left_to_triton(given: dict):
    assert kernels_of(**given) == ["wyfold_prepare_triton"]


@pytest.mark.long
def test_two_programs_fit_and_no_left_operand_is_overwritten():
    """A block takes 1 KiB more than it allocates, of 228 KiB of shared memory. For left operands see PTXAS-2."""
    made = []

    def look(kernel, *arguments, **options) -> None:
        if kernel is wyfold_prepare_channel_gluon:
            made.append(aot.code(kernel, *arguments, **options))

    with aot.pretend_gpu("sm_90", look):
        call(T=128)
    (kernel, log), code = made[0], disassemble(made[0][0])
    found = aot.usage(kernel, log)
    assert len(made) == 1
    assert 2 * (found.shared + aot.KIB) <= 228 * aot.KIB
    assert 2 * 128 * found.registers <= 65536
    assert found.spilled == 0
    assert code.count("HGMMA") == 36  # 12 between sub-chunks for each slice, 12 for F, 12 for E
    assert not copy_issued_late(code)
    assert not overwritten_operands(code)


def copy_issued_late(sass: str) -> bool:
    """Whether a load through a pointer precedes a TMA copy that the first wait is for, and may delay it."""
    sass = sass[: sass.index("SYNCS.PHASECHK")]
    issued, loaded = (sass.rfind("UTMALDG"), re.search(r"\bLDG\b", sass))
    return issued < 0 or loaded is None or loaded.start() < issued


@pytest.mark.long
@pytest.mark.parametrize(
    "gate", [pytest.param(False, id="no gate", marks=pytest.mark.release), pytest.param(True, id="scalar gate")]
)
def test_five_programs_fit_with_a_scalar_gate(gate: bool):
    """Every copy is issued before any load through a pointer (docs/facts/hopper.md, SASS-6)."""
    made = []

    def look(kernel, *arguments, **options) -> None:
        if kernel is wyfold_prepare_gluon:
            made.append(aot.code(kernel, *arguments, **options))

    q, k, v = (torch.zeros(1, 128, 2, 128, dtype=torch.bfloat16) for _ in range(3))
    beta, options = torch.ones(1, 128, 2), {"chunk_size": 64, "backend": "triton"}
    with aot.pretend_gpu("sm_90", look):
        if gate:
            wyfold.chunk_gated_delta_rule(q, k, v, torch.zeros(1, 128, 2), beta, **options)
        else:
            wyfold.chunk_delta_rule(q, k, v, beta, **options)
    (kernel, log), code = made[0], disassemble(made[0][0])
    found = aot.usage(kernel, log)
    assert len(made) == 1
    assert 5 * (found.shared + aot.KIB) <= 228 * aot.KIB
    assert 5 * 128 * found.registers <= 65536
    assert found.spilled == 0
    assert not overwritten_operands(code)
    assert not copy_issued_late(code)
