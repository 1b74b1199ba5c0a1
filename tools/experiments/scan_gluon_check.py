"""`scan` in Gluon on a Hopper card: each variant in a process of its own, checked, then timed beside the Triton launch.

    PYTHONPATH=src python tools/experiments/scan_gluon_check.py

NOTIME=1: no timing; ONLY=word: of "variant gate"; CASES=name of one case; JOBS=5 at once; LIMIT=100 seconds for a check
with its compilations (the first, alone: 150); nothing new is begun after BUDGET=480 s.
"""

import json
import os
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial

VARIANTS = {
    "p1o2s2": {"BV": 128, "PARTS": 1, "OUT": 2, "stages": 2},
    "p1o1s3": {"BV": 128, "PARTS": 1, "OUT": 1, "stages": 3},
    "p2o1s3": {"BV": 128, "PARTS": 2, "OUT": 1, "stages": 3},
    "p2o0s3": {"BV": 128, "PARTS": 2, "OUT": 0, "stages": 3},
    "p2o2s2": {"BV": 128, "PARTS": 2, "OUT": 2, "stages": 2},
    "v64o1s3": {"BV": 64, "PARTS": 1, "OUT": 1, "stages": 3},
}
GATES = ("none", "scalar", "scalarEF", "channel")
FITS = {  # three stages of the folded form leave no room for output of its own
    "scalarEF": ("p2o0s3", "p1o2s2", "p2o2s2", "v64o1s3"),
    "channel": ("p2o0s3", "p1o2s2", "p2o2s2", "v64o1s3"),
}


def child(variant, gate, timing):
    from unittest import mock

    import torch

    from wyfold.reference import delta
    from wyfold.runtime.launch import Config
    from wyfold.runtime.options import DeltaOptions
    from wyfold.stages.chunk_grid.triton import chunk_grid
    from wyfold.stages.prepare import triton as prep
    from wyfold.stages.scan import gluon as G
    from wyfold.stages.scan import triton as Tr

    launched = G.launched
    spec = dict(VARIANTS[variant])
    config = Config(spec["BV"] // 16 // spec["PARTS"], spec.pop("stages"), spec)
    folded = gate in ("scalarEF", "channel")
    kind = {"scalarEF": "scalar"}.get(gate, gate)
    dev = torch.device("cuda")

    def options(scale):
        return DeltaOptions(
            "x",
            False,
            scale,
            False,
            "given",
            0.0,
            0.0,
            False,
            1.0,
            False,
            torch.float32,
            True,
            64,
            0,
            False,
            False,
            "triton",
        )

    def make(B, T, H, HV, K, V, seed=0, unit=True):
        gen = torch.Generator(dev).manual_seed(seed)
        r = lambda *s: torch.randn(*s, device=dev, generator=gen)
        q, k = r(B, T, H, K), r(B, T, H, K)
        q, k = (torch.nn.functional.normalize(x, dim=-1).bfloat16() for x in (q, k))
        v, beta = r(B, T, HV, V).bfloat16(), torch.rand(B, T, HV, device=dev, generator=gen)
        g = None
        if kind != "none":
            g = torch.nn.functional.logsigmoid(r(B, T, HV, *((K,) if kind == "channel" else ()))).clamp(min=-5)
        return q, k, v, g, beta

    def prepared(x, cu):
        q, k, v, g, beta = x
        B, T = q.shape[:2]
        o = torch.full_like(v, float("nan"))
        grid = chunk_grid(B, T, 64, cu)
        opts = options(q.shape[3] ** -0.5)
        p = prep.prepare(q, k, g, beta, None, None, grid, opts, o, folded=folded, backward=False, clear=True)
        key = prep.launch_key(q.dtype, q.shape[3], v.shape[3], 64, kind, folded)
        return p, grid, opts, key, o

    def both(x, cu, S0):
        q, k, v, _, _ = x
        p, grid, opts, key, o = prepared(x, cu)
        og = o.clone()
        ST = torch.full((grid.sequences, v.shape[2], q.shape[3], v.shape[3]), float("nan"), device=dev)
        SG = ST.clone()
        Tr.scan(q, k, v, p, S0, grid, opts, key, o, ST, None, None)
        torch.cuda.synchronize()
        done = []
        launch = lambda *a, **b: (done.append(1), launched(*a, **b))
        with mock.patch.object(G, "tuned", lambda *a: config), mock.patch.object(G, "launched", launch):
            G.scan(q, k, v, p, S0, grid, opts, key, og, SG, None, None)
        torch.cuda.synchronize()
        done = bool(done)
        return done, o, ST, og, SG

    def reference(x, cu, S0):
        q, k, v, g, beta = (None if y is None else y.double() for y in x)
        rule = delta.kda if kind == "channel" else delta.gated_delta_rule
        return rule(
            q,
            k,
            v,
            g,
            beta,
            scale=q.shape[3] ** -0.5,
            initial_state=None if S0 is None else S0.double(),
            output_final_state=True,
            cu_seqlens=cu,
        )[:2]

    def rel(a, b):
        a, b = a.double(), b.double()
        return ((a - b).norm() / b.norm()).item() if b.numel() else 0.0

    report = {"variant": variant, "gate": gate, "cases": {}, "ok": True}
    if not timing:
        cases = [
            ("two chunks", (1, 128, 2, 2, 128, 128), None, False),
            ("ragged B2 HV4", (2, 200, 2, 4, 128, 128), None, True),
            ("packed", (1, 530, 2, 2, 128, 128), [0, 1, 65, 129, 129, 300, 517], True),
            ("short", (1, 40, 1, 2, 128, 128), None, True),
            ("K64", (1, 200, 2, 2, 64, 128), None, True),
            ("V64", (1, 200, 2, 2, 128, 64), None, True),
        ]
        wanted = os.environ.get("CASES", "")
        for name, shape, cu, initial in cases:
            if shape[5] % spec["BV"] or wanted not in name:
                continue
            x = make(*shape)
            cu_t = None if cu is None else torch.tensor(cu, device=dev)
            N = shape[0] if cu is None else len(cu) - 1
            S0 = torch.randn(N, shape[3], shape[4], shape[5], device=dev) * 0.1 if initial else None
            done, o, ST, og, SG = both(x, cu_t, S0)
            ro, rS = reference(x, cu_t, S0)
            used = shape[1] if cu is None else cu[-1]
            row = {
                "ran": done,
                "same_o": torch.equal(o, og),
                "same_S": torch.equal(ST, SG),
                "differ_o": (o != og).sum().item(),
                "worst": (o.float() - og.float()).abs().nan_to_num(9e9).max().item(),
                "o": rel(og[:, :used], ro[:, :used]),
                "S": rel(SG, rS),
                "triton_o": rel(o[:, :used], ro[:, :used]),
                "triton_S": rel(ST, rS),
            }
            row["ok"] = bool(done and row["o"] < 6e-3 and row["S"] < 8e-3)
            report["cases"][name] = row
            report["ok"] &= row["ok"]
            if not row["ok"]:
                bad = (~((og[:, :used].double() - ro[:, :used]).abs() <= 0.05)).nonzero()
                row["where"] = bad[:3].tolist() + [len(bad)]
                print(json.dumps(report))
                return
        if wanted:
            print(json.dumps(report))
            return
        # NaN in one sequence stays there; what follows the last boundary is never met.
        x = make(1, 530, 2, 2, 128, 128)
        cu_t = torch.tensor([0, 70, 200, 517], device=dev)
        clean = both(x, cu_t, None)
        y = [None if z is None else z.clone() for z in x]
        for z in (y[0], y[1], y[2]):
            z[:, 70:200] = float("nan")
            z[:, 517:] = float("nan")
        dirty = both(y, cu_t, None)
        keep = torch.cat([torch.arange(0, 70), torch.arange(200, 517)]).to(dev)
        row = {
            "ran": dirty[0],
            "o": rel(dirty[3][:, keep], clean[3][:, keep]),
            "S": rel(dirty[4][[0, 2]], clean[4][[0, 2]]),
        }
        row["ok"] = bool(
            torch.equal(dirty[3][:, keep], clean[3][:, keep]) and torch.equal(dirty[4][[0, 2]], clean[4][[0, 2]])
        )
        report["cases"]["NaN next door"] = row
        report["ok"] &= row["ok"]
        # Races: a long run on all multiprocessors, again and again; against the Triton launch.
        x = make(1, 4096, 96, 96, 128, 128)
        done, o, ST, og, SG = both(x, None, None)
        same = all(torch.equal(both(x, None, None)[3], og) for _ in range(5))
        row = {
            "ran": done,
            "repeats": same,
            "same_o": torch.equal(o, og),
            "same_S": torch.equal(ST, SG),
            "o": rel(og, o),
            "S": rel(SG, ST),
        }
        row["ok"] = bool(done and same and row["o"] < 4e-3 and row["S"] < 4e-3)
        report["cases"]["long"] = row
        report["ok"] &= row["ok"]
    else:
        import triton

        shapes = {
            "h96": (1, 8192, 96, 96, 128, 128),
            "qwen": (1, 8192, 16, 32, 128, 128),
            "b4t4k": (4, 4096, 64, 64, 128, 128),
            "t8": (1, 16384, 8, 8, 128, 128),
        }
        bench = lambda f: triton.testing.do_bench(f, warmup=20, rep=60, return_mode="median")
        for name, shape in shapes.items():
            x = make(*shape)
            q, k, v, _, _ = x
            p, grid, opts, key, o = prepared(x, None)
            ST = torch.empty(grid.sequences, shape[3], shape[4], shape[5], device=dev)
            with mock.patch.object(G, "tuned", lambda *a: config):
                gl_ms = bench(partial(G.scan, q, k, v, p, None, grid, opts, key, o, ST, None, None))
            tr_ms = bench(partial(Tr.scan, q, k, v, p, None, grid, opts, key, o, ST, None, None))
            per = (
                2 * (128 * 64 * (5 if folded else 4) + 64 * 64 * (1 if folded else 2))
                + 1024
                + (512 if kind == "channel" else 0)
            )
            chunks = shape[0] * shape[1] // 64 * shape[3]
            report["cases"][name] = {
                "gluon": gl_ms,
                "triton": tr_ms,
                "us": gl_ms * 1e3 / (shape[1] // 64),
                "TB": per * chunks / gl_ms / 1e9,
                "ok": True,
            }
            del x, p, o, ST
    print(json.dumps(report))


BEGUN = time.time()
LIMIT = int(os.environ.get("LIMIT", 100))


def run(variant, gate, timing, limit=LIMIT):
    t0 = time.time()
    if t0 - BEGUN > float(os.environ.get("BUDGET", 480)):
        return {
            "variant": variant,
            "gate": gate,
            "ok": False,
            "cases": {},
            "error": "not begun: no time left",
            "s": 0.0,
        }
    try:
        p = subprocess.run(
            [sys.executable, __file__, "child", variant, gate, str(int(timing))],
            capture_output=True,
            text=True,
            timeout=60 if timing else limit,
        )
        line = p.stdout.strip().splitlines()[-1] if p.stdout.strip() else ""
        found = (
            json.loads(line)
            if line.startswith("{")
            else {
                "variant": variant,
                "gate": gate,
                "ok": False,
                "cases": {},
                "error": (p.stderr or p.stdout)[-1500:],
                "rc": p.returncode,
            }
        )
    except subprocess.TimeoutExpired:
        found = {"variant": variant, "gate": gate, "ok": False, "cases": {}, "error": "timed out (hang?)"}
    found["s"] = round(time.time() - t0, 1)
    return found


def main():
    import torch

    only = os.environ.get("ONLY", "")
    todo = [(v, g) for g in GATES for v in VARIANTS if v in FITS.get(g, VARIANTS) and only in f"{v} {g}"]
    print(torch.cuda.get_device_name(), len(todo), "variants", flush=True)
    results = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "checks": [], "times": []}
    # One alone first: if that one hangs or faults the rest is not worth much, and it fills the cache.
    first, rest = todo[:1], todo[1:]
    checks = [run(*x, False, 150) for x in first]
    if not checks[0]["ok"] and not checks[0]["cases"]:
        print("the first one hung or fell: one other, no more")
        rest = todo[-1:]
    with ThreadPoolExecutor(int(os.environ.get("JOBS", "5"))) as pool:
        checks += list(pool.map(lambda x: run(*x, False), rest))
    for c in checks:
        results["checks"].append(c)
        print(f"{c['variant']:8} {c['gate']:9} {'ok ' if c['ok'] else 'BAD'} {c['s']:6.1f} s", flush=True)
        for name, row in c["cases"].items():
            if not c["ok"] or name in ("ragged B2 HV4", "packed", "long"):
                print("    ", f"{name:14}", {a: (f"{b:.2e}" if isinstance(b, float) else b) for a, b in row.items()})
        if "error" in c:
            print("    ", c["error"][-700:])
    if not os.environ.get("NOTIME"):
        print(f"{'variant':8} {'gate':9} {'shape':6} {'gluon ms':>9} {'triton ms':>9} {'us/chunk':>9} {'TB/s':>6}")
        for c in checks:
            if not c["ok"] or (c["gate"] not in ("scalar", "channel") and not only):
                continue
            t = run(c["variant"], c["gate"], True)
            results["times"].append(t)
            for name, row in t["cases"].items():
                times = f"{row['gluon']:9.3f} {row['triton']:9.3f} {row['us']:9.2f} {row['TB']:6.2f}"
                print(f"{c['variant']:8} {c['gate']:9} {name:6} {times}", flush=True)
            if "error" in t:
                print("    ", t["error"][-500:])
    out = os.environ.get("OUT")
    if out:
        with open(os.path.join(out, "gluon_check.json"), "w") as f:
            json.dump(results, f, indent=1)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "child":
        try:
            child(sys.argv[2], sys.argv[3], sys.argv[4] == "1")
        except Exception:
            traceback.print_exc()
            sys.exit(1)
    else:
        main()
