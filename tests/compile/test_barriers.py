"""The check for reused memory of barriers in Gluon kernels finds a reuse."""

import importlib.util

import pytest
import torch
from tests.compile import aot
from tests.compile.machine_code import reused_barriers

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def gluon_sum(p, KEPT: gl.constexpr):
    """A sum across warps allocates shared memory after the last use of a barrier."""
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    mbarrier.arrive(barrier, count=1)
    mbarrier.wait(barrier, 0)
    o = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(p, gl.sum(gl.load(p + o), axis=0))
    if KEPT:
        barrier._keep_alive()


@pytest.mark.parametrize("kept", [False, True])
def test_a_reused_barrier_is_found(kept: bool):
    made = []
    with aot.pretend_gpu("sm_90", lambda *given, **options: made.append(aot.code(*given, **options)[0])):
        gluon_sum[(1,)](torch.zeros(128), KEPT=kept, num_warps=4, enable_fp_fusion=True)
    assert bool(reused_barriers(made[0])) is not kept
