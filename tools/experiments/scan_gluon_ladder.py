"""Which feature of the Gluon scan a card refuses: small kernels, each with one feature more, in processes of their own.

    PYTHONPATH=src python tools/experiments/scan_gluon_ladder.py          ONLY=word of a step's name; JOBS=6 at once;
LIMIT=40 seconds a step. Prints ok, wrong, error or hang for each; about a minute in all, most of it compilation.

The kernel of the first steps is a delta rule without gates: r = v - S k^T, S += r k, output r. Its first step has the
shape that is known to run: one partition of eight warps, one warp that brings tiles, stores of boxes inside of memory.
The last steps are the kernel itself, by `scan_gluon_check.py`.
"""

import json
import os
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from wyfold.tile.index.gluon import tma_load, tma_store

PLAIN = {"PARTS": 1, "NUMBERS": 0, "PREDICATE": 0, "SHADOW": 0, "OUTSIDE": 0, "INPLACE": 0, "STAGES": 2}
STEPS = {
    "1 one partition, as the probe": {},
    "2 three stages": {"STAGES": 3},
    "3 boxes of one dimension": {"NUMBERS": 1},
    "4 arrivals with a predicate": {"PREDICATE": 1},
    "5 store under products, in an if": {"PREDICATE": 1, "SHADOW": 1},
    "6 store of a box before memory": {"PREDICATE": 1, "SHADOW": 1, "OUTSIDE": -1},
    "7 store of a box behind memory": {"PREDICATE": 1, "SHADOW": 1, "OUTSIDE": 1},
    "8 two partitions of four warps": {"PARTS": 2},
    "9 two partitions, 3 and 5": {"PARTS": 2, "NUMBERS": 1, "PREDICATE": 1, "SHADOW": 1, "STAGES": 3},
    "10 output in the place of v": {"PARTS": 2, "PREDICATE": 1, "SHADOW": 1, "INPLACE": 1, "STAGES": 3},
}
REAL = {
    "11 the kernel, one partition": ("p1o2s2", "none", "two chunks"),
    "12 the kernel, two partitions": ("p2o1s3", "none", "two chunks"),
    "13 output in the place of v": ("p2o0s3", "none", "two chunks"),
    "14 a chunk that is not full": ("p1o2s2", "none", "ragged B2 HV4"),
    "15 scalar gate, packed": ("p1o2s2", "scalar", "packed"),
    "16 channel gate": ("p1o2s2", "channel", "two chunks"),
}


@gluon.jit
def rung(
    x_k,
    x_v,
    x_rows,
    x_o,
    outside,
    steps,
    K: gl.constexpr,
    BT: gl.constexpr,
    BW: gl.constexpr,
    PARTS: gl.constexpr,
    NUMBERS: gl.constexpr,
    PREDICATE: gl.constexpr,
    SHADOW: gl.constexpr,
    OUTSIDE: gl.constexpr,
    INPLACE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """x_k [programs T, K], x_v, x_o [programs T, BW PARTS], x_rows four numbers a token: r is multiplied by the
    last BT of a chunk."""
    k = gl.allocate_shared_memory(x_k.dtype, [STAGES, BT, K], x_k.layout)
    v = gl.allocate_shared_memory(x_v.dtype, [STAGES * PARTS, BT, BW], x_v.layout)
    rows = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * BT], x_rows.layout)
    out = v
    if not INPLACE:
        out = gl.allocate_shared_memory(x_o.dtype, [PARTS, BT, BW], x_o.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    spare = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(free.index(s), count=PARTS)
        mbarrier.init(spare.index(s), count=PARTS)
    fence_async_shared()
    token = gl.program_id(0) * steps * BT
    if PARTS == 1:
        gl.warp_specialize(
            [
                (
                    _take,
                    (
                        x_o,
                        k,
                        v,
                        rows,
                        out,
                        full,
                        free,
                        spare,
                        token,
                        outside,
                        steps,
                        0,
                        K,
                        BT,
                        BW,
                        PARTS,
                        NUMBERS,
                        PREDICATE,
                        SHADOW,
                        OUTSIDE,
                        INPLACE,
                        STAGES,
                    ),
                ),
                (
                    _bring,
                    (
                        x_k,
                        x_v,
                        x_rows,
                        k,
                        v,
                        rows,
                        full,
                        free,
                        spare,
                        token,
                        steps,
                        BT,
                        BW,
                        PARTS,
                        NUMBERS,
                        INPLACE,
                        STAGES,
                    ),
                ),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _take,
                    (
                        x_o,
                        k,
                        v,
                        rows,
                        out,
                        full,
                        free,
                        spare,
                        token,
                        outside,
                        steps,
                        0,
                        K,
                        BT,
                        BW,
                        PARTS,
                        NUMBERS,
                        PREDICATE,
                        SHADOW,
                        OUTSIDE,
                        INPLACE,
                        STAGES,
                    ),
                ),
                (
                    _take,
                    (
                        x_o,
                        k,
                        v,
                        rows,
                        out,
                        full,
                        free,
                        spare,
                        token,
                        outside,
                        steps,
                        1,
                        K,
                        BT,
                        BW,
                        PARTS,
                        NUMBERS,
                        PREDICATE,
                        SHADOW,
                        OUTSIDE,
                        INPLACE,
                        STAGES,
                    ),
                ),
                (
                    _bring,
                    (
                        x_k,
                        x_v,
                        x_rows,
                        k,
                        v,
                        rows,
                        full,
                        free,
                        spare,
                        token,
                        steps,
                        BT,
                        BW,
                        PARTS,
                        NUMBERS,
                        INPLACE,
                        STAGES,
                    ),
                ),
            ],
            [4, 1],
            [240, 24],
        )


@gluon.jit
def _bring(
    x_k,
    x_v,
    x_rows,
    k,
    v,
    rows,
    full,
    free,
    spare,
    token,
    steps,
    BT: gl.constexpr,
    BW: gl.constexpr,
    PARTS: gl.constexpr,
    NUMBERS: gl.constexpr,
    INPLACE: gl.constexpr,
    STAGES: gl.constexpr,
):
    BYTES: gl.constexpr = x_k.block_type.nbytes + x_v.block_type.nbytes * PARTS
    stage = 0
    phase = 1
    for _ in range(steps):
        mbarrier.wait(free.index(stage), phase)
        if INPLACE:
            mbarrier.wait(spare.index(stage), phase)
        if NUMBERS:
            mbarrier.expect(full.index(stage), BYTES + x_rows.block_type.nbytes)
            tma_load(x_rows, [token * 4], full.index(stage), rows.index(stage))
        else:
            mbarrier.expect(full.index(stage), BYTES)
        tma_load(x_k, [token, 0], full.index(stage), k.index(stage))
        for part in gl.static_range(PARTS):
            tma_load(x_v, [token, part * BW], full.index(stage), v.index(stage * PARTS + part))
        token += BT
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _take(
    x_o,
    k,
    v,
    rows,
    out,
    full,
    free,
    spare,
    token,
    outside,
    steps,
    part,
    K: gl.constexpr,
    BT: gl.constexpr,
    BW: gl.constexpr,
    PARTS: gl.constexpr,
    NUMBERS: gl.constexpr,
    PREDICATE: gl.constexpr,
    SHADOW: gl.constexpr,
    OUTSIDE: gl.constexpr,
    INPLACE: gl.constexpr,
    STAGES: gl.constexpr,
):
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, K, 16])
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BT, 16])
    S = gl.zeros([BW, K], gl.float32, LS)
    nothing = gl.zeros([BW, BT], gl.float32, LC)
    stage = 0
    phase = 0
    for i in range(steps):
        before = gl.where(stage == 0, STAGES, stage) - 1
        mbarrier.wait(full.index(stage), phase)
        left = gl.convert_layout(S.to(gl.bfloat16), gl.DotOperandLayout(0, LS, 2))
        r = warpgroup_mma(left, k.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        if SHADOW:
            _leave(x_o, out, token, outside, i - 1, before, part, BT, BW, PARTS, OUTSIDE, INPLACE)
        if PREDICATE:
            mbarrier.arrive(free.index(before), count=1, pred=i > 0)
        x = v.index(stage * PARTS + part).permute((1, 0)).load(LC).to(gl.float32)
        r = warpgroup_mma_wait(0, deps=[r])
        r = x - r
        if NUMBERS:
            r = r * rows.index(stage).slice(3 * BT, BT).load(gl.SliceLayout(0, LC))[None, :]
        y = gl.convert_layout(r.to(gl.bfloat16), gl.DotOperandLayout(0, LC, 2))
        S = warpgroup_mma(y, k.index(stage), S, is_async=True)
        tma.store_wait(pendings=0)
        if INPLACE:
            mbarrier.arrive(spare.index(before), count=1, pred=i > 0)
        _place(out, stage, part, PARTS, INPLACE).permute((1, 0)).store(r.to(gl.bfloat16))
        S = warpgroup_mma_wait(0, deps=[S])
        if not SHADOW:
            fence_async_shared()
            _leave(x_o, out, token, outside, i, stage, part, BT, BW, PARTS, 0, INPLACE)
        if not PREDICATE:
            mbarrier.arrive(free.index(stage), count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    if SHADOW:
        before = gl.where(stage == 0, STAGES, stage) - 1
        _leave(x_o, out, token, outside, steps - 1, before, part, BT, BW, PARTS, 0, INPLACE)
    tma.store_wait(pendings=0)


@gluon.jit
def _place(out, stage, part, PARTS: gl.constexpr, INPLACE: gl.constexpr):
    if INPLACE:
        return out.index(stage * PARTS + part)
    else:
        return out.index(part)


@gluon.jit
def _leave(
    x_o,
    out,
    token,
    outside,
    i,
    stage,
    part,
    BT: gl.constexpr,
    BW: gl.constexpr,
    PARTS: gl.constexpr,
    OUTSIDE: gl.constexpr,
    INPLACE: gl.constexpr,
):
    """Give chunk i's output to the copy engine; of chunk -1 nothing, or with OUTSIDE a box outside of memory."""
    fence_async_shared()
    place = _place(out, stage, part, PARTS, INPLACE)
    if OUTSIDE != 0:
        tma_store(x_o, [gl.where(i < 0, outside, token + i * BT), part * BW], place)
    else:
        if i >= 0:
            tma_store(x_o, [token + i * BT, part * BW], place)


def launch_of(name, device, programs=4, steps=7):
    """A step's kernel arguments, and what tells whether its output is right."""
    import torch
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    fixed = PLAIN | STEPS[name]
    parts, K, BT, V = fixed["PARTS"], 128, 64, 128
    gen = torch.Generator(device).manual_seed(0)
    random = lambda *shape: torch.randn(*shape, device=device, generator=gen)
    k = (random(programs * steps * BT, K) / (2 * K**0.5)).bfloat16()
    v, numbers = random(programs * steps * BT, V).bfloat16(), random(programs * steps * 4 * BT).sigmoid()
    o = torch.full_like(v, float("nan"))

    def boxes(x, *block):
        kind = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float32
        layout = gl.NVMMASharedLayout.get_default_for(list(block), kind)
        return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), layout)

    BW = V // parts
    outside = -BT if fixed["OUTSIDE"] < 0 else programs * steps * BT
    given = boxes(k, BT, K), boxes(v, BT, BW), boxes(numbers, 4 * BT), boxes(o, BT, BW), outside, steps
    options = dict(K=K, BT=BT, BW=BW, num_warps=8 // parts, **fixed)

    def error():
        S, worst = torch.zeros(programs, V, K, device=device), 0.0
        last = numbers.view(programs, steps, 4, BT)[:, :, 3]
        shaped = [x.reshape(programs, steps, BT, -1).float() for x in (k, v, last, o)]
        for i in range(steps):
            k_i, v_i, n_i, o_i = (x[:, i] for x in shaped)
            r = v_i.mT - S.bfloat16().float() @ k_i.mT
            r = r * n_i.mT if fixed["NUMBERS"] else r
            S = S + r.bfloat16().float() @ k_i
            found = ((o_i.mT - r).norm() / r.norm()).item()
            worst = found if found != found else max(worst, found)  # NaN stays
            if worst != worst:
                break
        return worst

    return programs, given, options, error


def child(name):
    import torch

    programs, given, options, error = launch_of(name, torch.device("cuda"))
    rung[(programs,)](*given, **options)
    torch.cuda.synchronize()
    worst = error()
    print(json.dumps({"ok": worst < 0.01, "error": worst}))


def run(name):
    begun, here = time.time(), Path(__file__)
    command, environment = [sys.executable, here, "child", name], dict(os.environ)
    if name in REAL:
        variant, gate, environment["CASES"] = REAL[name]
        command = [sys.executable, here.with_name("scan_gluon_check.py"), "child", variant, gate, "0"]
    try:
        limit = int(os.environ.get("LIMIT", 40))
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment)
        last = done.stdout.strip().splitlines()[-1:] or [""]
        if last[0].startswith("{"):
            found = json.loads(last[0])
            found["verdict"] = "ok" if found["ok"] else "wrong"
        else:
            lines = [x for x in done.stderr.splitlines() if "Error:" in x] or ["no word"]
            found = {"verdict": "error", "error": lines[0][:110]}
    except subprocess.TimeoutExpired:
        found = {"verdict": "hang", "error": ""}
    return dict(found, name=name, s=time.time() - begun)


def main():
    only = os.environ.get("ONLY", "")
    with ThreadPoolExecutor(int(os.environ.get("JOBS", "6"))) as pool:
        found = list(pool.map(run, [name for name in (*STEPS, *REAL) if only in name]))
    for x in found:
        detail = x.get("error", next(iter(x.get("cases", {}).values()), {}).get("o", ""))
        print(f"{x['name']:36} {x['verdict']:6} {x['s']:5.1f} s  {detail}")
    if out := os.environ.get("OUT"):
        Path(out, "scan_gluon_ladder.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        try:
            child(sys.argv[2])
        except Exception:
            traceback.print_exc()
            sys.exit(1)
    else:
        main()
