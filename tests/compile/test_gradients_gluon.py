"""`gradients` in Gluon: the calls that use it, its occupancy, and no left operand overwritten in flight.

A channel gate's kernel has a loop over the value heads of a key head around the same code, which must not cost
registers.
"""

import importlib.util
from dataclasses import replace

import pytest
import torch
from tests.compile import aot
from tests.compile.machine_code import count_instructions, disassemble, overwritten_operands, reloaded_addresses

import wyfold

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

CACHED = 128 * aot.KIB // 16
"""Most instructions that stay cached. Every program fetches longer code again and is several times slower (SASS-8 in
docs/facts/hopper.md)."""

GLUON = ("wyfold_gradients_gluon", "wyfold_gradients_channel_gluon", "wyfold_gradients_wide_gluon")
NAMES = ("wyfold_gradients_triton", *GLUON)


def kernels_of(
    op=wyfold.chunk_gated_delta_rule,
    T=70,
    H=2,
    HV=2,
    K=128,
    V=128,
    dtype=torch.bfloat16,
    stride=1,
    wrt="qkv",
    **options,
):
    """Kernels of `gradients` that a call would launch on sm_90."""
    found = []
    q, k = (torch.zeros(2, T * stride, H, K, dtype=dtype)[:, ::stride].requires_grad_() for _ in range(2))
    v, beta = torch.zeros(2, T, HV, V, dtype=dtype).requires_grad_(), torch.ones(2, T, HV)
    g = {wyfold.chunk_delta_rule: (), wyfold.chunk_kda: (torch.zeros(2, T, HV, K),)}.get(op, (torch.zeros(2, T, HV),))
    if "cu_seqlens" in options:
        q, k, v, beta, *g = (x[:1] for x in (q, k, v, beta, *g))
    options = {"chunk_size": 64, "backend": "triton", **options}
    with aot.pretend_gpu("sm_90", lambda kernel, *_, **__: found.append(kernel.fn.__name__)):
        o = op(q, k, v, *g, beta, **options)[0]
        torch.autograd.grad(o.sum(), [{"q": q, "k": k, "v": v}[name] for name in wrt])
    return [name for name in found if name in NAMES]


def title(call: dict) -> str:
    """Test identifier of a call, equal in every process."""
    return ", ".join(f"{name}={getattr(x, '__name__', x)}" for name, x in call.items()) or "as it is"


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"op": wyfold.chunk_delta_rule},
        {"T": 128},
        {"cu_seqlens": torch.tensor([0, 30, 70])},
        {"use_qk_l2norm_in_kernel": True},
        {"disable_recompute": True},
        {"stride": 2},
        {"wrt": "v"},
        {"HV": 4},
        {"HV": 6, "use_qk_l2norm_in_kernel": True},
        {"H": 1, "HV": 4, "cu_seqlens": torch.tensor([0, 30, 70])},
        {"K": 96, "V": 192},
        {"V": 512},
        {"op": wyfold.chunk_delta_rule, "K": 100, "V": 130},
    ],
    ids=title,
)
def test_served_in_gluon(call: dict):
    assert kernels_of(**call) == ["wyfold_gradients_gluon"]


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"T": 128},
        {"cu_seqlens": torch.tensor([0, 30, 70])},
        {"use_qk_l2norm_in_kernel": True},
        {"safe_gate": True},
        {"stride": 2},
        {"wrt": "v"},
        {"HV": 4},
        {"HV": 6, "use_qk_l2norm_in_kernel": True},
        {"H": 1, "HV": 4, "cu_seqlens": torch.tensor([0, 30, 70])},
        {"V": 256},
    ],
    ids=title,
)
def test_channel_gate_served_in_gluon(call: dict):
    assert kernels_of(wyfold.chunk_kda, **call) == ["wyfold_gradients_channel_gluon"]


@pytest.mark.parametrize(
    "call",
    [
        {"K": 64, "V": 64},
        {"K": 256, "V": 256, "op": wyfold.chunk_delta_rule},
        {"K": 256, "V": 512, "cu_seqlens": torch.tensor([0, 30, 70]), "use_qk_l2norm_in_kernel": True},
        {"K": 256, "V": 512, "HV": 4},
        {"K": 64, "V": 64, "HV": 6, "use_qk_l2norm_in_kernel": True},
        {"H": 9, "HV": 9, "K": 96, "V": 192},
        {"H": 16, "HV": 16, "V": 256},
        {"H": 5, "HV": 10, "K": 100, "V": 130, "op": wyfold.chunk_delta_rule},
    ],
    ids=title,
)
def test_other_widths_served_in_gluon(call: dict):
    assert kernels_of(**call) == ["wyfold_gradients_wide_gluon"]


KDA = {"op": wyfold.chunk_kda}


@pytest.mark.parametrize(
    "call",
    [
        {"K": 64},
        {"dtype": torch.float16},
        {"chunk_size": 32},
        {"K": 64, "HV": 4},
        {"K": 64, "V": 256},
        {"K": 256, "V": 128},
        {**KDA, "K": 96, "V": 192, "chunk_size": 32},
        {**KDA, "chunk_size": 32},
    ],
    ids=title,
)
def test_left_to_triton(call: dict):
    assert kernels_of(**call) == ["wyfold_gradients_triton"]


def test_an_overwritten_operand_is_found():
    lines = [
        "HGMMA.64x64x16.F32.BF16 R24, R72, gdesc[UR4], RZ, !UPT, gsb0",
        "IMAD.MOV.U32 R74, RZ, RZ, 0x3f803f80",
        "WARPGROUP.DEPBAR.LE gsb0, 0x0",
        "IMAD.MOV.U32 R75, RZ, RZ, RZ",
    ]
    sass = "\n".join(f"        /*{at:04x}*/    {line} ;" for at, line in enumerate(lines))
    assert [line.split()[1] for line in overwritten_operands(sass)] == ["R74,"]


@pytest.mark.parametrize("kind, found", [("LDL.64", 2), ("LDS.64", 0)])
def test_a_reloaded_address_is_found(kind: str, found: int):
    lines = [
        f"{kind} R190, [R1]",
        "R2UR UR18, R190",
        "R2UR UR19, R191",
        "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR16], RZ, !UPT",
    ]
    sass = "\n".join([".L_x_1:", *(f"        /*{at:04x}*/    {line} ;" for at, line in enumerate(lines))])
    assert len(reloaded_addresses(sass + "\n        /*0040*/    @P0 BRA `(.L_x_1) ;")) == found


CALLS = [call for call in aot.PER_ARCHITECTURE["sm_90"] if isinstance(call, aot.Call) and call.heads == 1]
IN_GROUPS = [replace(call, heads=3) for call in CALLS if "inside" not in call.subject]


# One call with a scalar gate, one with a channel gate and one with wide heads, which `test_kernels` compiles too.
FIRST = [call for call in CALLS if call.tested]


@pytest.mark.parametrize(
    "call",
    [pytest.param(call, marks=[] if call in FIRST else pytest.mark.release) for call in CALLS + IN_GROUPS],
    ids=str,
)
def test_operands_are_not_overwritten_nor_addresses_reloaded(call: aot.Call):
    """The assembler may write constants late (PTXAS-2), and hoist and spill loop invariants (SASS-7)."""
    made = []

    def look(kernel, *arguments, **options) -> None:
        if kernel.fn.__name__ in GLUON:
            made.append(aot.code(kernel, *arguments, **options)[0])

    with aot.pretend_gpu("sm_90", look):
        call.run()
    assert len(made) == 1
    programs = 1 if call.K > 128 else 2
    assert programs * (made[0].metadata.shared + aot.KIB) <= 228 * aot.KIB, "two programs fill a multiprocessor"
    code = disassemble(made[0])
    assert code.count("HGMMA") > 30
    assert not overwritten_operands(code)
    # Other loops are longer, and read each address once; those of wide heads wait for memory.
    if "kda" not in call.subject and call.K <= 128:
        assert not reloaded_addresses(code)
    assert count_instructions(code) <= CACHED
