"""Scans in Gluon: in the loop over chunks, no warp waits for a value that it needs one chunk later."""

import importlib.util

import pytest
from tests.compile import aot
from tests.compile.machine_code import blocking_loads, disassemble

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

UNIFORM = """
        /*0010*/                   LDG.E R4, desc[UR4][R2.64] ;
.L_x_1:
        /*0020*/                   LDG.E R6, desc[UR4][R2.64] ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R120, R180, gdesc[UR12], RZ, !UPT ;
        /*0038*/                   LDG.E R8, desc[UR4][R2.64] ;
        /*003c*/                   IMAD.WIDE.U32 R8, R7, UR9, RZ ;
        /*003d*/                   LDG.E R9, desc[UR4][R2.64] ;
        /*003e*/                   LDS.128 R8, [UR5] ;
        /*0040*/              @!P4 R2UR UR34, {} ;
        /*0050*/               @P0 BRA `(.L_x_1) ;
"""


@pytest.mark.parametrize("register, waits", [("R6", True), ("R4", False), ("R8", False), ("R9", False)])
def test_a_blocking_load_is_found(register: str, waits: bool):
    assert bool(blocking_loads(UNIFORM.format(register))) is waits


# The last one is a call of `test_kernels`.
@pytest.mark.parametrize(
    "heads, segments, wrt",
    [(2, 1, ()), pytest.param(96, 1, (), marks=pytest.mark.release), (32, 4, ("initial_state",))],
)
def test_no_warp_waits_for_a_decay(heads: int, segments: int, wrt: tuple[str, ...]):
    call = aot.Call("chunk_gated_delta_rule", options=aot.GPU_CHUNKS, heads=heads, wrt=wrt, segments=segments)
    names = ("scan",) if segments == 1 else ("scan", "segment_summary", "segment_summary_bwd")
    found = {}

    def compiling(kernel, *arguments, **options):
        if aot.kernel_name(kernel) in ("scan.gluon", "segment_summary.gluon"):
            found[kernel.fn.__name__] = blocking_loads(disassemble(aot.code(kernel, *arguments, **options)[0]))

    with aot.pretend_gpu("sm_90", compiling):
        call.run()
    assert found == {f"wyfold_{name}_gluon": [] for name in names}


@pytest.mark.parametrize("segments", [1, 4])
def test_launches_that_start_early_wait(segments: int):
    """All of a dense forward but the first. In segments the scan's producer loads before the fold has ended; without
    segments it waits as well, because it loads what `prepare` writes."""
    early, before = [], []

    def compiling(kernel, *arguments, **options):
        early.append((kernel.fn.__name__, options.get("launch_pdl", False)))
        if kernel.fn.__name__ == "wyfold_scan_gluon":
            code = disassemble(aot.code(kernel, *arguments, **options)[0])
            before.append(code.partition("UTMALDG")[0].count("ACQBULK"))
            assert code.count("ACQBULK") == (2 if segments == 1 else 1)

    with aot.pretend_gpu("sm_90", compiling):
        aot.Call("chunk_gated_delta_rule", options=aot.GPU_CHUNKS, wrt=("initial_state",), segments=segments).run()
    between = [("wyfold_segment_summary_gluon", True), ("wyfold_segment_fold_gluon", True)]
    forward = [("wyfold_prepare_gluon", False), *between * (segments > 1), ("wyfold_scan_gluon", True)]
    assert early[: len(forward)] == forward and not any(started for _, started in early[len(forward) :])
    assert before == [1 if segments == 1 else 0]
