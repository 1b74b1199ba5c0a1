"""`scan_bwd` in Gluon on a Hopper card, bit for bit beside the Triton launch, then timed beside it.

    JOBS=16 PYTHONPATH=src python tools/experiments/scan_bwd_gluon_check.py

Every variant and kind of gate is checked in a process of its own, while others compile what is timed at the end, with
nothing else on the card. ONLY=word of "variant gate"; NOTIME=1; LIMIT=110 seconds a process;
nothing new is begun after BUDGET=400 s. A table, and JSON under $OUT.
"""

import json
import os
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

VARIANTS = {
    "p1o1s2": {"BV": 128, "PARTS": 1, "OUT": 1, "stages": 2},
    "p1o2s2": {"BV": 128, "PARTS": 1, "OUT": 2, "stages": 2},
    "p2o1s2": {"BV": 128, "PARTS": 2, "OUT": 1, "stages": 2},
    "p2o2s2": {"BV": 128, "PARTS": 2, "OUT": 2, "stages": 2},
    "v64o1s3": {"BV": 64, "PARTS": 1, "OUT": 1, "stages": 3},
    "v64o2s3": {"BV": 64, "PARTS": 1, "OUT": 2, "stages": 3},
}
FIT = {"scalar": tuple(VARIANTS), "channel": ("p1o1s2", "p2o1s2", "v64o1s3")}  # without a gate is as with a scalar
CHECKS = (*((variant, gate) for gate, fit in FIT.items() for variant in fit), ("p1o1s2", "scalarEF"))
SHORT = ("p1o2s2", "p2o2s2", "v64o2s3")  # checked in fewer cases
PACKED = (0, 1, 65, 129, 129, 300, 517)
CASES = {  # B, T, H, HV, K, V; boundaries; whether states enter and gradients leave
    "ragged B2 HV4": ((2, 200, 2, 4, 128, 128), None, True),
    "short": ((1, 40, 2, 4, 128, 128), None, True),
    "two chunks": ((1, 128, 2, 4, 128, 128), None, True),
    "packed": ((1, 530, 2, 4, 128, 128), PACKED, True),
    "packed K64": ((1, 530, 2, 2, 64, 128), PACKED, False),
    "V64": ((1, 200, 2, 2, 128, 64), None, False),
}
SHAPES = {
    "h96": (1, 8192, 96, 96, 128, 128),
    "qwen": (1, 8192, 16, 32, 128, 128),
    "b4t4k": (4, 4096, 64, 64, 128, 128),
    "t8": (1, 16384, 8, 8, 128, 128),
}
NAMES = ("S", "dS", "e", "X", "dS0")


def launches(variant):
    """(the Gluon launch of a variant, which says whether it was one; the Triton launch)."""
    from unittest import mock

    from wyfold.runtime.launch import Config
    from wyfold.stages.scan_bwd import gluon, triton

    spec = dict(VARIANTS[variant])
    config = Config(spec["BV"] // 16 // spec["PARTS"], spec.pop("stages"), spec)
    usual, ran = gluon.launched, []

    def launched(*arguments, **fixed):
        ran.append(1)
        usual(*arguments, **fixed)

    def ours(*arguments):
        with mock.patch.object(gluon, "tuned", lambda *_: config), mock.patch.object(gluon, "launched", launched):
            return made(gluon.scan_bwd, arguments)

    def made(scan_bwd, arguments):
        q, _, v, *rest = arguments
        found = triton.token_borders(q, v, rest[4])
        scan_bwd(*arguments, found)
        return found

    return ours, lambda *arguments: made(triton.scan_bwd, arguments), ran


def call(gate, shape, cu, given, seed=1):
    """Arguments of a launch but dS0, on the card; options and key among them."""
    import torch
    from scan_bwd_gluon_emulate import drawn
    from scan_gluon_emulate import options

    from wyfold.stages.prepare.triton import launch_key

    *tensors, grid, scale = drawn(gate, *shape, cu, given, "cuda", seed)
    kind, folded = gate.removesuffix("EF"), gate in ("channel", "scalarEF")
    return *tensors, grid, options(scale), launch_key(torch.bfloat16, shape[4], shape[5], 64, kind, folded)


def check(variant, gate):
    """Bits of every result against the Triton launch's; tiles of no sequence stay as they were."""
    import torch
    from scan_bwd_gluon_emulate import expected

    ours, theirs, ran = launches(variant)
    report = {"variant": variant, "gate": gate, "cases": {}, "ok": True}

    def of(launch, arguments, wanted):
        N, HV, (K, V) = arguments[7].sequences, arguments[2].shape[2], (arguments[0].shape[3], arguments[2].shape[3])
        dS0 = torch.full((N, HV, K, V), float("nan"), device="cuda") if wanted else None
        torch.use_deterministic_algorithms(True)  # what is allocated is filled with NaN
        found = launch(*arguments, dS0)
        torch.use_deterministic_algorithms(False)
        torch.cuda.synchronize()
        return [*found, *([dS0] if wanted else [])]

    def bits(x):
        return x.view(torch.int16 if x.itemsize == 2 else torch.int32)

    def differing(xs, ys):
        return {name: int((bits(x) != bits(y)).sum()) for name, x, y in zip(NAMES, xs, ys)}

    def note(name, row):
        report["cases"][name] = row
        report["ok"] &= row["ok"]
        return row["ok"]

    for name, (shape, cu, given) in CASES.items():
        if shape[5] % VARIANTS[variant]["BV"] or (variant in SHORT and name != "packed"):
            continue
        arguments = call(gate, shape, cu, given)
        if cu is not None:
            for x in (*arguments[:3], arguments[5]):
                x[:, cu[-1] :] = float("nan")
        ran.clear()
        mine = of(ours, arguments, given)
        row = {"ran": bool(ran)}
        his = of(theirs, arguments, given)
        row["differ"] = differing(mine, his)
        down = lambda x: None if x is None else x.cpu()
        q, k, v, prepared, S0, do, dST, grid = arguments[:8]
        prepared = type(prepared)(*map(down, prepared))
        q, k, v, S0, do, dST = map(down, (q, k, v, S0, do, dST))
        written, *want = expected(q, k, v, prepared, S0, do, dST, grid, shape[4] ** -0.5, cu)
        pairs = [(x.cpu()[written], y[written]) for x, y in zip(mine[:4], want)]
        pairs += [(mine[4].cpu(), want[4])] if given else []
        row["error"] = max(((x.double() - y.double()).norm() / y.double().norm()).item() for x, y in pairs)
        row["ok"] = row["ran"] and not any(row["differ"].values()) and row["error"] < 8e-3
        if not note(name, row):
            for x, y, result in zip(mine, his, NAMES):
                bad = (bits(x) != bits(y)).nonzero()
                row[f"where {result}"] = [len(bad), *bad[:2].tolist()]
            if row["error"] != row["error"] or row["error"] > 8e-3:
                return report
    # NaN in one sequence stays there.
    cu = (0, 70, 200, 517)
    arguments = call(gate, (1, 530, 2, 4, 128, 128), cu, True)
    clean = of(ours, arguments, True)
    for x in (*arguments[:3], arguments[5]):
        x[:, 70:200] = float("nan")
        x[:, 517:] = float("nan")
    dirty = of(ours, arguments, True)
    keep = torch.ones(arguments[7].chunks, dtype=torch.bool)
    keep[2:5] = False  # three chunks of the second sequence
    keep = keep.repeat_interleave(4).cuda()
    pairs = [(x[keep], y[keep]) for x, y in zip(clean[:4], dirty[:4])] + [(clean[4][[0, 2]], dirty[4][[0, 2]])]
    counts = differing(*zip(*pairs))
    note("NaN next door", {"differ": counts, "ok": not any(counts.values())})
    # Races: a long run on all multiprocessors, again and again.
    arguments = call(gate, (1, 4096, 96, 96, 128, 128), None, True)
    his, mine = of(theirs, arguments, True), of(ours, arguments, True)
    counts = differing(mine, his)
    same = all(not any(differing(of(ours, arguments, True), mine).values()) for _ in range(8))
    finite = all(bool(x.isfinite().all()) for x in mine)
    note("long", {"differ": counts, "repeats": same, "ok": same and finite and not any(counts.values())})
    return report


def warm(gate, name):
    """Compile what is timed."""
    import torch

    B, _, *rest = SHAPES[name]
    arguments = call(gate, (B, 128, *rest), None, False)
    for variant in FIT[gate]:
        ours, theirs, _ = launches(variant)
        ours(*arguments, None)
    theirs(*arguments, None)
    torch.cuda.synchronize()
    return {}


def timing(gate):
    """Milliseconds of every launch at every shape, and the bytes that one moves at least."""
    import torch
    import triton

    def bench(launch, arguments):
        return triton.testing.do_bench(partial(launch, *arguments, None), warmup=10, rep=40, return_mode="median")

    report = {}
    for name, shape in SHAPES.items():
        arguments = call(gate, shape, None, False)
        found = report[name] = {}
        for variant in FIT[gate]:
            try:
                found[variant] = bench(launches(variant)[0], arguments)
            except Exception as e:
                print(name, variant, repr(e)[:300], file=sys.stderr)
        found["triton"] = bench(launches(FIT[gate][0])[1], arguments)
        found["GB"] = moved(gate, shape) / 1e9
        del arguments
        torch.cuda.empty_cache()
    return report


def moved(gate, shape):
    """Bytes of a launch: what either walk reads once and writes once, tokens of grouped heads once for the group."""
    B, T, H, HV, K, V = shape
    folded = gate in ("channel", "scalarEF")
    row, square, own = 2 * 64 * K, 2 * 64 * 64, 1 if folded else H / HV
    forward = own * row + 2 * 64 * V + square + 1024 + folded * row + 2 * K * V + 2 * 64 * V
    reverse = 2 * own * row + 2 * 64 * V + square + 1024 + (row if folded else square) + 2 * K * V + 2 * 64 * V
    return B * T // 64 * HV * (forward + reverse)


BEGUN = time.time()


def run(mode, *words, limit=None):
    limit, t0 = limit or int(os.environ.get("LIMIT", 110)), time.time()
    if t0 - BEGUN > float(os.environ.get("BUDGET", 400)):
        return {"error": "not begun: no time left", "s": 0.0}
    try:
        done = subprocess.run([sys.executable, __file__, mode, *words], capture_output=True, text=True, timeout=limit)
        last = (done.stdout.strip().splitlines() or [""])[-1]
        found = json.loads(last) if last.startswith("{") else {"error": (done.stderr or done.stdout)[-1200:]}
        if mode == "timing" and done.stderr.strip():
            found["words"] = done.stderr[-400:]
    except subprocess.TimeoutExpired:
        found = {"error": "timed out (hang?)"}
    return {**found, "s": round(time.time() - t0, 1)}


def main():
    import torch

    only = os.environ.get("ONLY", "")
    checks = [x for x in CHECKS if only in " ".join(x)]
    gates = [gate for gate in FIT if not os.environ.get("NOTIME") and any(gate == x[1] for x in checks)]
    results = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "checks": [], "times": []}
    print(results["device"], flush=True)
    with ThreadPoolExecutor(int(os.environ.get("JOBS", "12"))) as pool:
        pending = [(x, pool.submit(run, "check", *x)) for x in checks]
        warmed = [pool.submit(run, "warm", gate, name) for gate in gates for name in SHAPES]
        for (variant, gate), one in pending:
            found = {"variant": variant, "gate": gate, "ok": False, "cases": {}, **one.result()}
            results["checks"].append(found)
            print(f"{variant:6} {gate:9} {'ok ' if found['ok'] else 'BAD'} {found['s']:6.1f} s", flush=True)
            for name, row in found["cases"].items():
                if not row["ok"] or name in ("packed", "long"):
                    print("    ", f"{name:14}", json.dumps(row))
            if "error" in found:
                print("    ", found["error"][-700:])
        for one in warmed:
            if "error" in one.result():
                print("warm:", one.result()["error"][-300:])
    wrong = {(x["variant"], x["gate"]) for x in results["checks"] if not x["ok"]}
    for gate in gates:
        found = run("timing", gate)
        results["times"].append({"gate": gate, **found})
        print(found.get("error", "")[-400:], found.get("words", ""))
        for name in SHAPES:
            row = dict(found.get(name, {}))
            size = row.pop("GB", 0.0)
            columns = [
                f"{x} {ms:.4f}{' WRONG' if (x, gate) in wrong else ''} ({size / ms:.2f})" for x, ms in row.items()
            ]
            print(f"{gate:8} {name:6} {size:.2f} GB; ms (TB/s):", ", ".join(columns), flush=True)
    print(f"{time.time() - BEGUN:.0f} s")
    if out := os.environ.get("OUT"):
        Path(out, "scan_bwd_gluon_check.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in ("check", "warm", "timing"):
        try:
            print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
        except Exception:
            traceback.print_exc()
            sys.exit(1)
    else:
        main()
