"""Scans in Gluon: in the loop over chunks, no warp waits for a value that it needs one chunk later."""

import importlib.util

import pytest
import torch
from tests.compile import aot
from tests.compile.machine_code import blocking_loads, disassemble
from torch.utils._python_dispatch import TorchDispatchMode

from wyfold import serving
from wyfold.autograd import delta_chunk
from wyfold.ops import serving_call
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape
from wyfold.runtime import segment_rule

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


@pytest.mark.parametrize("segments", [1, 4])
def test_an_output_is_copied_before_the_launch_that_runs_ahead_of_the_scan(segments: int, monkeypatch):
    """`scan` clears the outputs of skipped sequences before it waits: a copy just ahead of it could undo that."""
    monkeypatch.setattr(serving_call, "best_chunk_size", lambda *_, **__: 64)  # as on a GPU
    forward, steps = delta_chunk.forward, []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.copy_.default:
                steps.append("copy")
            return func(*args, **(kwargs or {}))

    def observed(*given):
        with Copies():
            return forward(*given)

    monkeypatch.setattr(delta_chunk, "forward", observed)
    a = inputs.draw("random", "gated_delta_rule", Shape(2, 256, 1, 1, 128, 128), gate="weak", dtype=torch.bfloat16)
    a |= {"pool": torch.zeros(3, 1, 128, 128), "state_indices": torch.tensor([1, -1]), "state_v_first": True}
    a |= {"out": a["v"].new_empty(2, 256, 1, 256)[..., ::2], "backend": "triton"}
    launched = lambda kernel, *_, **__: steps.append(aot.kernel_name(kernel))
    with aot.pretend_gpu("sm_90", launched), segment_rule.forced(segments):
        serving.prefill(**a)
    between = ["segment_summary.gluon", "segment_fold.gluon"] * (segments > 1)
    assert steps == ["copy", "prepare.gluon", *between, "scan.gluon", "copy"]
