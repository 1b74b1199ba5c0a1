"""`gradients` in Gluon: the calls that use it, its occupancy, and no left operand overwritten in flight.

Most calls have one value head per key head. In groups, the kernels loop over the value heads of a key head. The
dispatch table has no row of groups yet: that loop has not run on a card. Its tests add the rows (`groups_in_gluon`).
"""

import contextlib
import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
from tests.compile import aot
from tests.compile.machine_code import count_instructions, disassemble, overwritten_operands, reloaded_addresses

import wyfold
from wyfold.runtime import kernel_configs
from wyfold.runtime.kernel_configs import LaunchKey

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

CACHED = 128 * aot.KIB // 16
"""Most instructions that stay cached. Every program fetches longer code again and is several times slower (SASS-8 in
docs/facts/hopper.md)."""

GLUON = ("wyfold_gradients_gluon", "wyfold_gradients_channel_gluon")
NAMES = ("wyfold_gradients_triton", *GLUON)


def kernels_of(
    op=wyfold.chunk_gated_delta_rule, T=70, H=2, HV=2, K=128, dtype=torch.bfloat16, stride=1, wrt="qkv", **options
):
    """Kernels of `gradients` that a call would launch on sm_90."""
    found = []
    q, k = (torch.zeros(2, T * stride, H, K, dtype=dtype)[:, ::stride].requires_grad_() for _ in range(2))
    v, beta = torch.zeros(2, T, HV, 128, dtype=dtype).requires_grad_(), torch.ones(2, T, HV)
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
    ],
    ids=title,
)
def test_channel_gate_served_in_gluon(call: dict):
    assert kernels_of(wyfold.chunk_kda, **call) == ["wyfold_gradients_channel_gluon"]


KDA = {"op": wyfold.chunk_kda}


@pytest.mark.parametrize(
    "call",
    [
        {"HV": 4},
        {"K": 64},
        {"dtype": torch.float16},
        {"chunk_size": 32},
        {**KDA, "HV": 4},
        {**KDA, "chunk_size": 32},
    ],
    ids=title,
)
def test_left_to_triton(call: dict):
    assert kernels_of(**call) == ["wyfold_gradients_triton"]


@contextlib.contextmanager
def groups_in_gluon() -> Iterator[None]:
    """Rows for calls with several value heads per key head, as those with one have."""
    usual = kernel_configs.dispatched

    def dispatched(architecture: str, stage: str, key: LaunchKey) -> bool:
        return usual(architecture, stage, key._replace(group=1) if stage == "gradients" else key)

    with contextlib.ExitStack() as rows:
        rows.enter_context(mock.patch.object(kernel_configs, "dispatched", dispatched))
        for words, config in [*kernel_configs._table("sm_90")["gradients.gluon"].items()]:
            every = str(LaunchKey.parse(words)._replace(group=None))
            rows.enter_context(kernel_configs.override_row("sm_90", "gradients.gluon", every, config))
        yield


@pytest.mark.parametrize(
    "call",
    [
        {"HV": 4},
        {"HV": 6, "use_qk_l2norm_in_kernel": True},
        {"H": 1, "HV": 4, "cu_seqlens": torch.tensor([0, 30, 70])},
    ],
    ids=title,
)
@pytest.mark.parametrize("op", [wyfold.chunk_delta_rule, wyfold.chunk_gated_delta_rule, wyfold.chunk_kda])
def test_groups_with_rows_served_in_gluon(op, call: dict):
    kernel = "wyfold_gradients_channel_gluon" if op is wyfold.chunk_kda else "wyfold_gradients_gluon"
    with groups_in_gluon():
        assert kernels_of(op, **call) == [kernel]


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


@pytest.mark.long
@pytest.mark.parametrize("call", CALLS + IN_GROUPS, ids=str)
def test_operands_are_not_overwritten_nor_addresses_reloaded(call: aot.Call):
    """The assembler may write constants late (PTXAS-2), and hoist and spill loop invariants (SASS-7)."""
    made = []

    def look(kernel, *arguments, **options) -> None:
        if kernel.fn.__name__ in GLUON:
            made.append(aot.code(kernel, *arguments, **options)[0])

    with groups_in_gluon(), aot.pretend_gpu("sm_90", look):
        call.run()
    assert len(made) == 1
    assert 2 * (made[0].metadata.shared + aot.KIB) <= 228 * aot.KIB, "two programs fill a multiprocessor"
    code = disassemble(made[0])
    assert code.count("HGMMA") > 50
    assert not overwritten_operands(code)
    if "kda" not in call.subject and call.heads == 1:  # the other loops are longer, and read each address once
        assert not reloaded_addresses(code)
    if call.projected or "inside" not in call.subject:
        assert count_instructions(code) <= CACHED
