"""`ttt` in one Gluon launch on a Hopper card: what it writes, beside float64 and the two Triton launches; then times.

    PYTHONPATH=src:. python tools/experiments/ttt_stores_check.py --commit HASH --out DIR --budget 60

Every case has a process of its own, which compiles what it needs; times are taken afterwards, alone. What is found is
written to DIR/ttt_stores.json after every step. --cases WORD: cases with it in their name; --no-times. Without a card
--emulate runs the launch's source in the cases instead, and nothing of Triton.
"""

import argparse
import json
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

REPEATS = 30
LIMIT = 6e-3
"""Of an error against float64, relative to the norm: bfloat16 tensors have 1.7e-3, and sums of them less."""

PACKED = (0, 1, 65, 129, 129, 300, 517)
CASES = {
    "dense": {"B": 2, "T": 256},
    "no states": {"T": 384, "states": False},
    "ragged tail": {"B": 2, "T": 200, "HV": 4, "H": 2},
    "short": {"T": 7},
    "packed": {"T": 530, "cu": PACKED, "H": 2},
    "bfloat16 numbers": {"B": 2, "T": 200, "numbers": "bfloat16"},
    "factors, on q": {"T": 530, "cu": PACKED, "col": True, "residual": "q"},
    "strided, no multiple of 16": {"B": 2, "T": 100, "H": 3, "HV": 3, "strided": True},
}
TIMED = (4, 4096, 32, 64)
TIMES = ("gluon, not kept", "gluon, kept", "triton, not kept", "triton, kept", "call, forward", "call, both")


def tokens(torch, device, B=1, T=200, H=1, HV=2, D=64, cu=None, col=False, residual="o", strided=False, **rest):
    """Tokens and entering states; behind the last boundary they are NaN."""
    from wyfold.stages.ttt import States, Tokens

    g = torch.Generator().manual_seed(0)
    numbers, states = getattr(torch, rest.get("numbers", "float32")), rest.get("states", True)
    draw = lambda *shape: torch.randn(*shape, generator=g)
    q, k = (torch.nn.functional.normalize(draw(B, T, H, D), dim=-1).bfloat16() for _ in range(2))
    v = draw(B, T, HV, D).bfloat16()
    w, u = (1 + 0.1 * draw(HV, D)).to(numbers), (0.1 * draw(HV, D)).to(numbers)
    eta = (torch.rand(B, T, HV, 1, generator=g) * 0.5).to(numbers)
    factor = draw(B, T, HV, 1).bfloat16() if col else None
    if strided:
        q, v = (y.transpose(1, 2).contiguous().transpose(1, 2) for y in (q, v))
    N = B if cu is None else len(cu) - 1
    S = draw(N, HV, D, D) * 0.1 if states else None
    c = draw(N, HV, 1, D) * 0.1 if states else None
    x = Tokens(q, k, v, w, u, eta, factor, residual)
    clean = Tokens(*(y.clone() if isinstance(y, torch.Tensor) else y for y in x))
    for y in (q, k, v, eta, *((factor,) if col else ())):
        y[:, T if cu is None else cu[-1] :] = float("nan")
    move = lambda y: None if y is None else y.to(device)
    given = Tokens(*(move(y) if isinstance(y, torch.Tensor) else y for y in x))
    return clean, given, (S, c), States(move(S), move(c))


def outputs(torch, x, entering, grid, launches, kept):
    """What `ttt` of a module of launches writes, from memory full of NaN."""
    from wyfold.stages.ttt import Borders, States

    B, T, HV, D = x.v.shape
    nan = lambda *shape, dtype=torch.float32: torch.full(shape, float("nan"), dtype=dtype, device=x.v.device)
    o, N, tiles = nan(B, T, HV, D, dtype=x.v.dtype), grid.sequences, grid.chunks * HV
    leaving = States(nan(N, HV, D, D), nan(N, HV, 1, D))
    borders = None
    if kept:
        low = x.v.dtype
        shapes = nan(B, T, HV, D, dtype=low), nan(tiles, D, D, dtype=low), nan(tiles, D), nan(B, T, HV, D, dtype=low)
        borders = Borders(*shapes, nan(B, T, HV, 4))
    launches.ttt(x, entering, leaving, grid, 16, D**-0.5, 1e-6, o, borders)
    found = {"o": o, "S": leaving.S, "c": leaving.c}
    if borders is not None:
        found |= {"N": borders.N, "X": borders.X, "rows": borders.rows, "border S": borders.S, "border c": borders.c}
    return found


def same(torch, a, b):
    """Bit for bit, NaN being equal to NaN."""
    word = {2: torch.int16, 4: torch.int32}
    return all(torch.equal(a[n].view(word[a[n].itemsize]), b[n].view(word[b[n].itemsize])) for n in b)


def tiles_used(grid, B, T, HV, cu):
    """Tiles of the segments that hold tokens, in the order of `truth`."""
    if cu is None:
        spans = [(b * grid.per_sequence, T) for b in range(B)]
    else:
        spans = [(int(grid.first[n]), cu[n + 1] - cu[n]) for n in range(len(cu) - 1)]
    return [(f + j) * HV + h for f, length in spans for h in range(HV) for j in range(-(-length // 64))]


def check(name, emulated):
    """One case: errors, equal bits, and that nothing is written where there are no tokens."""
    import torch
    import ttt_gluon_emulate as E

    from wyfold.runtime.launch import Config
    from wyfold.stages.ttt import gluon as G

    kw = CASES[name]
    device = torch.device("cpu" if emulated else "cuda")
    clean, x, (S0, c0), entering = tokens(torch, device, **kw)
    B, T, HV, D = x.v.shape
    cu = kw.get("cu")
    used = T if cu is None else cu[-1]
    boundaries = None if cu is None else torch.tensor(cu, device=device)
    if emulated:
        from wyfold.runtime.chunks import chunk_grid

        G.tuned, G.launched = lambda *_: Config(4, 3, {"READ": 152, "PREPARE": 96}), E.emulate
        both = {"gluon": G}
    else:
        from wyfold.stages.chunk_grid.triton import chunk_grid
        from wyfold.stages.ttt import triton as Tr

        both = {"gluon": G, "triton": Tr}
        launches = []
        usual = G.launched
        G.launched = lambda *a, **b: (launches.append(1), usual(*a, **b))
    grid = chunk_grid(B, T, 64, boundaries)
    found = {who: outputs(torch, x, entering, grid, module, True) for who, module in both.items()}
    bare = outputs(torch, x, entering, grid, G, False)
    o, S, c, N, X, rows, at_S, at_c = E.truth(clean, S0, c0, cu, 16, D**-0.5, 1e-6)
    true = {"o": o, "S": S, "c": c, "N": N, "X": X, "rows": rows, "border S": at_S, "border c": at_c}
    at = tiles_used(grid, B, T, HV, cu)
    unused = [i for i in range(grid.chunks * HV) if i not in set(at)]

    def error(given, name):
        y, want = given[name].cpu().double(), true[name]
        if name.startswith("border"):
            y, want = y[at], torch.stack(want)
        elif name not in ("S", "c"):
            y, want = y[:, :used], want[:, :used]
        if name == "rows":
            return max(relative(y[..., i], want[..., i]) for i in range(4))
        return relative(y, want)

    def relative(y, want):
        size = want.norm()
        return ((y - want).norm() / (size if size > 0 else 1.0)).item()

    result = {"errors": {}, "bits": {}}
    for who, given in found.items():
        result["errors"][who] = {n: error(given, n) for n in given}
    gluon = found["gluon"]
    if "triton" in found:
        equal = lambda n: (gluon[n] == found["triton"][n]) | (gluon[n].isnan() & found["triton"][n].isnan())
        result["differs from triton in"] = {n: int((~equal(n)).sum()) for n in gluon}
        result["ran in gluon"] = bool(launches)
        again = all(same(torch, outputs(torch, x, entering, grid, G, True), gluon) for _ in range(REPEATS))
        again &= all(same(torch, outputs(torch, x, entering, grid, G, False), bare) for _ in range(REPEATS))
        result["bits"]["repeats"] = again
    result["bits"]["kept as not kept"] = same(torch, gluon, bare)
    behind = [gluon[n][:, used:] for n in ("N", "X", "rows")] + [gluon[n][unused] for n in ("border S", "border c")]
    result["bits"]["nothing behind the end"] = all(bool(y.isnan().all()) for y in behind)
    result["bits"]["o is zero there"] = bool((gluon["o"][:, used:] == 0).all())
    result["ok"] = (
        all(e < LIMIT for e in result["errors"]["gluon"].values())
        and all(result["bits"].values())
        and result.get("ran in gluon", True)
    )
    return result


def shape_of_facts(torch):
    """Tokens, no states, the grid, and all that is timed, by name."""
    import wyfold
    from wyfold.stages.chunk_grid.triton import chunk_grid
    from wyfold.stages.ttt import States, Tokens, gluon, triton

    B, T, H, D = TIMED
    device = torch.device("cuda")
    g = torch.Generator(device).manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g, device=device)
    q, k = (torch.nn.functional.normalize(draw(B, T, H, D), dim=-1).bfloat16() for _ in range(2))
    v, do = draw(B, T, H, D).bfloat16(), draw(B, T, H, D).bfloat16()
    w, u = (1 + 0.1 * draw(H, D)).bfloat16(), (0.1 * draw(H, D)).bfloat16()
    eta = (torch.rand(B, T, H, 1, generator=g, device=device) * 0.5).bfloat16()
    x, none, grid = Tokens(q, k, v, w, u, eta, None, "o"), States(None, None), chunk_grid(B, T, 64, None)

    def staged(module, kept):
        o, borders = torch.empty_like(v), module.empty(q, v, grid.chunks, True) if kept else None
        return lambda: module.ttt(x, none, none, grid, 16, D**-0.5, 1e-6, o, borders)

    given = q, k, v, w, u, eta
    leaves = [y.clone().requires_grad_() for y in given]
    call = lambda tensors: wyfold.chunk_ttt_linear(*tensors, chunk_size=16)[0]
    runs = {
        "gluon, not kept": staged(gluon, False),
        "gluon, kept": staged(gluon, True),
        "triton, not kept": staged(triton, False),
        "triton, kept": staged(triton, True),
        "call, forward": lambda: call(given),
        "call, both": lambda: torch.autograd.grad(call(leaves), leaves, do),
    }
    return x, none, grid, runs


def compiled(name):
    """Compiles, in a process of its own, what one of the timed runs launches."""
    import torch

    shape_of_facts(torch)[-1][name]()
    torch.cuda.synchronize()
    return {"ok": True}


def large():
    """At the shape of the facts: bits, every multiprocessor at work; then times."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from wyfold.stages.ttt import gluon, triton

    x, none, grid, runs = shape_of_facts(torch)
    first, other = (outputs(torch, x, none, grid, module, True) for module in (gluon, triton))
    apart = lambda a, b: ((a.double() - b.double()).norm() / b.double().norm()).item()
    result = {"shape": TIMED, "ms": {}, "beside triton": {n: apart(first[n], other[n]) for n in first if n not in "Sc"}}
    result["kept as not kept"] = same(torch, first, outputs(torch, x, none, grid, gluon, False))
    result["repeats"] = all(same(torch, outputs(torch, x, none, grid, gluon, True), first) for _ in range(REPEATS))
    yield result

    def captured(run):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held = run()
        return graph, held

    def median(run):
        events = []
        for _ in range(3 + REPEATS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        return sorted(a.elapsed_time(b) for a, b in events[3:])[REPEATS // 2]

    for name, run in runs.items():
        result["ms"][name] = {"call": median(run)}
        try:
            graph, held = captured(run)
            result["ms"][name]["graph"] = median(graph.replay)
            del graph, held
        except RuntimeError as refused:
            result["ms"][name]["graph"] = repr(refused)[-300:]
        yield result
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(10):
            runs["call, both"]()
        torch.cuda.synchronize()
    result["kernels of both, ms"] = {
        e.key[:60]: e.self_device_time_total / 1e3 / 10 for e in seen.key_averages() if e.self_device_time_total > 0
    }
    yield result


class Run:
    """Processes begun and results kept, inside a budget."""

    def __init__(self, options):
        self.options, self.begun = options, time.time()
        self.found = {"commit": options.commit, "cases": {}, "large": None}
        self.path = Path(options.out or ".") / "ttt_stores.json"

    def left(self):
        return self.options.budget - (time.time() - self.begun)

    def keep(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.found, indent=1))

    def child(self, *words):
        """The last line of a process that prints a line of JSON after every step."""
        command = [sys.executable, __file__, "--child", *words] + (["--emulate"] if self.options.emulate else [])
        t0, error = time.time(), ""
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=max(1.0, self.left()))
            out, error = done.stdout, "" if done.returncode == 0 else done.stderr[-1500:]
        except subprocess.TimeoutExpired as late:
            out, error = (late.stdout or b"").decode(), "timed out"
        lines = [line for line in out.splitlines() if line.startswith("{")]
        result = json.loads(lines[-1]) if lines else {"ok": False}
        if error:
            result |= {"ok": False, "error": error}
        return result | {"s": round(time.time() - t0, 1)}

    def all(self):
        names = [name for name in CASES if self.options.cases in name]
        timed = not (self.options.no_times or self.options.emulate)
        with ThreadPoolExecutor(2 if self.options.emulate else 16) as pool:
            warm = [pool.submit(self.child, "compile", name) for name in TIMES] if timed else []
            waiting = {pool.submit(self.child, "case", name): name for name in names}
            for done in as_completed(waiting):
                self.found["cases"][waiting[done]] = done.result()
                self.keep()
        if timed:
            self.found["compile"] = [one.result() for one in warm]
            self.found["large"] = self.child("large")
            self.keep()
        self.table(names)
        return all(self.found["cases"][name]["ok"] for name in names)

    def table(self, names):
        for name in names:
            row = self.found["cases"][name]
            errors = row.get("errors", {}).get("gluon", {})
            print("ok " if row["ok"] else "BAD", f"{name:28}", f"{row['s']:5.1f} s", end="  ")
            print({n: f"{e:.1e}" for n, e in errors.items()}, {n: v for n, v in row.get("bits", {}).items() if not v})
            if not row["ok"]:
                print("    ", row.get("error", json.dumps({n: row[n] for n in row if n != "bits"})))
        big = self.found["large"]
        if big:
            print({n: v for n, v in big.items() if n not in ("ms", "kernels of both, ms")})
            print([one["error"] for one in self.found["compile"] if "error" in one])
            for name, ms in big.get("ms", {}).items():
                print(f"{name:20}", {n: round(v, 4) if isinstance(v, float) else v for n, v in ms.items()})
            for name, ms in sorted(big.get("kernels of both, ms", {}).items(), key=lambda x: -x[1]):
                print(f"    {ms:7.4f} {name}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", default=".")
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--cases", default="")
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--emulate", action="store_true")
    parser.add_argument("--child", nargs="+")
    options = parser.parse_args()
    if not options.child:
        sys.exit(not Run(options).all())
    try:
        what, name = options.child[0], options.child[-1]
        if what == "large":
            steps = large()
        else:
            steps = [check(name, options.emulate) if what == "case" else compiled(name)]
        for step in steps:
            print(json.dumps(step), flush=True)
    except Exception:
        traceback.print_exc()
        sys.exit(1)


if __name__ == "__main__":
    main()
