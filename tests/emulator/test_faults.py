"""The emulator detects races.

A shipped kernel fails if any one of its synchronisations is skipped. A small pipeline fails with each planted fault.
"""

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from tests.emulator import (
    test_gradients,
    test_prepare_channel,
    test_prepare_scalar,
    test_recurrent,
    test_scan,
    test_scan_bwd,
)
from tests.emulator.cases import SCHEDULES
from tests.emulator.delta import draw
from tests.emulator.fault import Fault
from tests.emulator.machine import Machine
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from wyfold.tile.index.gluon import barrier, gluon_descriptors, tma_load, tma_store
from wyfold.tile.index.triton.descriptors import tile_descriptor

# --- shipped kernels without one of their synchronisations -----------------------------------------------------------

UNEVEN = {"T": 600, "cu": [0, 0, 320, 590], "HV": 1}
"""Sequences of more chunks than stages, with and without a partly filled last chunk."""

RUNS = {
    "scan with W": lambda: partial(test_scan.judge, config=test_scan.CONFIGS[0], call=draw("scalar", False, **UNEVEN)),
    "scan with E": lambda: partial(test_scan.judge, config=test_scan.CONFIGS[1], call=draw("scalar", True, **UNEVEN)),
    "scan_bwd": lambda: partial(
        test_scan_bwd.judge, config=test_scan_bwd.CONFIGS[2], call=draw("scalar", False, **UNEVEN)
    ),
    "recurrent": lambda: partial(test_recurrent.judge, config=test_recurrent.CONFIGS[0], gate="channel"),
    "prepare, scalar gate": lambda: partial(test_prepare_scalar.judge, T=64, HV=1),
    "prepare, gate over channels": lambda: partial(
        test_prepare_channel.judge, call=test_prepare_channel.draw(T=192, HV=1)
    ),
    "gradients, scalar gate": lambda: partial(
        test_gradients.judge, call=test_gradients.draw("scalar", T=120, cu=[0, 64, 100], group=2, norm=True)
    ),
    "gradients, gate over channels": lambda: partial(
        test_gradients.judge, call=test_gradients.draw("channel", T=120, cu=[0, 64, 100], group=2, norm=True)
    ),
}
"""By kernel: a function that draws a call and returns a function that runs and checks it on a machine."""


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_every_synchronisation_is_needed(name: str):
    """Skipping any wait, arrival, fence or barrier initialisation fails under one of the two schedules."""
    run, places = RUNS[name](), set()
    for order in SCHEDULES:
        run(machine := Machine(*order))
        places |= machine.sync_points
    unseen = [place for place in sorted(places) if not any(fails_without(place, order, run) for order in SCHEDULES)]
    assert places
    assert not unseen, unseen


def fails_without(place: str, order: tuple[str, str], run: Callable[[Machine], None]) -> bool:
    machine = Machine(*order)
    machine.omit = place
    try:
        run(machine)
    except (Fault, AssertionError):
        return True
    return False


# --- a pipeline with planted faults ----------------------------------------------------------------------------------

N, TILES, STAGES = 64, 6, 2

FAULTS = {
    "no wait for a load": "no wait for its barrier|every partition waits",
    "no wait for a free stage": "no wait for its barrier|more arrivals",
    "the consumer waits for the other phase": "no wait for its barrier|every partition waits",
    "the producer waits for the other phase": "every partition waits",
    "a stage is free while a product reads it": "wrong numbers",
    "no wait for a product": "before it was waited for|before its wait",
    "no wait for stores": "no store_wait",
    "no fence before a store": "no fence_async_shared",
    "no fence before a product": "no fence_async_shared",
    "no fence after barriers are initialised": "not fenced since it was initialised",
    "a barrier is not initialised": "before it was initialised",
    "too few bytes expected": "expects bytes|every partition waits|no wait for its barrier|more arrivals",
    "too many bytes expected": "every partition waits",
    "an arrival too many": "more arrivals|every partition waits",
    "a load outside": "outside of its tensor",
    "a store outside": "outside of its tensor",
    "an address outside": "an address outside of its tensor",
    "a load of another shape": "into a tile of",
}


@gluon.jit
def accumulate(
    x_in,
    x_out,
    p_last,
    TILES: gl.constexpr,
    STAGES: gl.constexpr,
    N: gl.constexpr,
    FAULT: gl.constexpr,
):
    """out[i] = 2 (in[0] + ... + in[i]), the last of them by address as well."""
    tiles = gl.allocate_shared_memory(x_in.dtype, [STAGES, N, N], x_in.layout)
    out = gl.allocate_shared_memory(x_out.dtype, [N, N], x_out.layout)
    two = gl.allocate_shared_memory(x_in.dtype, [N, N], x_in.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        if FAULT != "a barrier is not initialised":
            mbarrier.init(full.index(s), count=1)
        mbarrier.init(free.index(s), count=1)
    if FAULT != "no fence after barriers are initialised":
        fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (consume, (tiles, out, two, full, free, x_out, p_last, TILES, STAGES, N, FAULT)),
            (produce, (tiles, full, free, x_in, TILES, STAGES, N, FAULT)),
        ],
        [1],
        [24],
    )


@gluon.jit
def produce(tiles, full, free, x_in, TILES: gl.constexpr, STAGES: gl.constexpr, N: gl.constexpr, FAULT: gl.constexpr):
    BYTES: gl.constexpr = x_in.block_type.nbytes
    stage = 0
    phase = 0 if FAULT == "the producer waits for the other phase" else 1
    for i in range(TILES):
        bar = full.index(stage)
        if FAULT != "no wait for a free stage":
            mbarrier.wait(free.index(stage), phase)
        if FAULT == "too few bytes expected":
            mbarrier.expect(bar, BYTES // 2)
        elif FAULT == "too many bytes expected":
            mbarrier.expect(bar, BYTES + 16)
        else:
            mbarrier.expect(bar, BYTES)
        row = i * N
        if FAULT == "a load outside":
            row += N
        if FAULT == "a load of another shape":
            tma_load(x_in, [row, 0], bar, tiles.index(stage).slice(0, N // 2))
        else:
            tma_load(x_in, [row, 0], bar, tiles.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def consume(
    tiles,
    out,
    two,
    full,
    free,
    x_out,
    p_last,
    TILES: gl.constexpr,
    STAGES: gl.constexpr,
    N: gl.constexpr,
    FAULT: gl.constexpr,
):
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, N, 16])
    row = gl.arange(0, N, layout=gl.SliceLayout(1, L))
    column = gl.arange(0, N, layout=gl.SliceLayout(0, L))
    two.store(gl.where(row[:, None] == column[None, :], 2.0, 0.0).to(two.dtype))
    if FAULT != "no fence before a product":
        fence_async_shared()
    barrier()
    total = gl.zeros([N, N], gl.float32, L)
    stage = 0
    phase = 1 if FAULT == "the consumer waits for the other phase" else 0
    for i in range(TILES):
        if FAULT != "no wait for a load":
            mbarrier.wait(full.index(stage), phase)
        total = warpgroup_mma(two, tiles.index(stage), total, is_async=True)
        if FAULT == "a stage is free while a product reads it":
            mbarrier.arrive(free.index(stage), count=1)
        if FAULT != "no wait for a product":
            total = warpgroup_mma_wait(0, deps=[total])
        if FAULT != "a stage is free while a product reads it":
            mbarrier.arrive(free.index(stage), count=1)
        if FAULT == "an arrival too many":
            mbarrier.arrive(free.index(stage), count=1)
        if FAULT != "no wait for stores":
            tma.store_wait(pendings=0)
        out.store(total.to(out.dtype))
        if FAULT != "no fence before a store":
            fence_async_shared()
        barrier()
        tma_store(x_out, [(i - 1 if FAULT == "a store outside" else i) * N, 0], out)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    if FAULT != "no wait for stores":
        tma.store_wait(pendings=0)
    offsets = row[:, None] * N + column[None, :]
    if FAULT == "an address outside":
        offsets += 1
    gl.store(p_last + offsets, total)


@pytest.mark.parametrize(
    "order", [*SCHEDULES, ("late", "first"), ("early", "last"), ("late", 0), ("early", 1)], ids=str
)
def test_the_pipeline_without_a_fault(order):
    assert ending("", Machine(*order)) == ""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str):
    found = [ending(fault, Machine(*order)) for order in SCHEDULES]
    assert any(found), "neither order fails"
    assert all(re.search(FAULTS[fault], one) for one in found if one), found


def ending(fault: str, machine: Machine) -> str:
    """How a run of the pipeline ends: the message of the fault, "wrong numbers", or "" if it is correct."""
    x = torch.randint(-4, 5, (TILES, N, N)).bfloat16()
    out, last = torch.full((TILES, N, N), torch.nan), torch.full((N, N), torch.nan)
    given = *gluon_descriptors([tile_descriptor(y, N, N) for y in (x, out)]), last
    try:
        machine.launch(accumulate, 1, *given, TILES=TILES, STAGES=STAGES, N=N, FAULT=fault, num_warps=4)
    except Fault as error:
        return str(error)
    want = 2 * x.float().cumsum(0)
    right = torch.equal(out, want) and torch.equal(last, want[-1])
    return "" if right else "wrong numbers"
