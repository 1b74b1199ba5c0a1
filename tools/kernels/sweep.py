"""Launch configurations of the delta rules' kernels, tried on the card: `python tools/kernels/sweep.py JOBS.json OUT`.

For whoever works on a kernel and has minutes of a card; `wyfold tune` is the way to a table that ships. JOBS is a list
of objects:

    {"op": "gdn", "chunk": 64, "rows": {"prepare": {"BK": 32, "BE": 64, "BM": 64, "warps": 4, "stages": 1}}}

op as `wyfold bench` names it; `rows` replaces every row of the stages it names; "folded": 0 or 1 takes that form,
"shape" a size by name. Each job is compiled and checked in a process of its own, so that a launch that hangs or falls
over costs only itself: errors against the float64 token loop at 200 tokens, the same bits twice at both sizes. What is
right is timed kernel by kernel, in one process. Lines come as jobs end; OUT gets checked.json and timed.json.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import wyfold
from wyfold import reference
from wyfold.cli.bench.cases import PINNED, Case, leaves
from wyfold.cli.bench.timing import Gpu
from wyfold.cli.catalog import OPS
from wyfold.kernels import table
from wyfold.reference.shapes import Shape
from wyfold.runtime import kernel_configs, triton_support
from wyfold.runtime.kernel_configs import Config

STAGES = ("prepare", "scan", "scan_bwd", "gradients")
LIMIT = 75
"""Seconds of one check."""

Job = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("jobs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--workers", type=int, default=14, help="checks at a time (default: %(default)s)")
    parser.add_argument("--check", type=int, help=argparse.SUPPRESS)  # how this program asks itself for one check
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    jobs: list[Job] = json.loads(args.jobs.read_text())
    if args.check is not None:
        print(json.dumps(checked(jobs[args.check])))
        return
    args.out.mkdir(parents=True, exist_ok=True)

    def elsewhere(i: int) -> Job:
        command = [sys.executable, __file__, str(args.jobs), str(args.out), "--check", str(i)]
        try:
            # One thread each: fourteen processes of sixteen threads only wait for each other.
            one = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=one)
            found: Job = json.loads(done.stdout.strip().splitlines()[-1]) if not done.returncode else {}
            return found or {"refused": done.stderr[-300:]}
        except subprocess.TimeoutExpired:
            return {"refused": f"nothing after {LIMIT} s"}

    begun = time.time()
    with ThreadPoolExecutor(args.workers) as pool:
        found = list(pool.map(elsewhere, range(len(jobs))))
    (args.out / "checked.json").write_text(json.dumps(found, indent=1))
    print(f"checked {len(jobs)} in {time.time() - begun:.0f} s", flush=True)
    timed(jobs, found)
    (args.out / "timed.json").write_text(json.dumps([{**job, **row} for job, row in zip(jobs, found)], indent=1))


def take(job: Job) -> None:
    """Put a job's configurations, and its form, in place of the table's."""
    prepare: Any = table.kernel_module("prepare", "triton")
    if "folded" in job:
        prepare.reads_folded = lambda g: bool(job["folded"])
    rows = kernel_configs._table(triton_support.architecture(torch.device("cuda", 0)))
    for stage, row in job["rows"].items():
        blocks = {name: size for name, size in row.items() if name.isupper()}
        config = Config(row["warps"], row["stages"], blocks, row.get("registers"))
        for name in rows[f"{stage}.triton"]:
            rows[f"{stage}.triton"][name] = config
    kernel_configs.row.cache_clear()


def call(job: Job, shape: Shape) -> tuple[Callable[[], tuple[torch.Tensor, ...]], Job, list[str], torch.Tensor]:
    """Forward and backward on drawn tensors; the tensors, the names of those differentiated, and what is fed back."""
    op = job["op"]
    gate = "none" if op == "delta_rule" else "mid"
    case = Case(op, shape, gate, "bfloat16", "fwdbwd", 0, norm="outside", device="cuda")
    arguments = case.arguments()
    wanted, fed = leaves(arguments), case.incoming(arguments)

    def run() -> tuple[torch.Tensor, ...]:
        function = getattr(wyfold, OPS[op])
        o = function(**{**arguments, **wanted}, chunk_size=job.get("chunk", 64), backend="triton")[0]
        return (o, *torch.autograd.grad(o, list(wanted.values()), fed.to(o.dtype)))

    return run, arguments, list(wanted), fed


def checked(job: Job) -> Job:
    """Errors, whether bits repeat, and what the compiled kernels take."""
    take(job)
    run, arguments, names, fed = call(job, Shape(1, 200, 2, 2, 128, 128))
    got = run()
    wide = {name: x.cpu().double() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    for name in names:
        wide[name].requires_grad_()
    o = getattr(reference, OPS[job["op"]].removeprefix("chunk_"))(**wide)[0]
    truth = (o, *torch.autograd.grad(o, [wide[name] for name in names], fed.cpu().double()))
    errors = {name: float((x.cpu().double() - y).norm() / y.norm()) for name, x, y in zip(("o", *names), got, truth)}
    same = all(torch.equal(x, y) for x, y in zip(got, run()))
    large = call(job, PINNED[job.get("shape", "h96")])[0]
    first = [x.clone() for x in large()]
    same = same and all(torch.equal(x, y) and bool(x.isfinite().all()) for x, y in zip(first, large()))
    kernels = {
        stage: [(k.n_regs, k.n_spills, k.metadata.shared) for k in made.values()]
        for stage in STAGES
        for made in kernel_configs.compiled(table.kernel_module(stage, "triton"), torch.device("cuda", 0)).values()
    }
    return {"errors": errors, "same": same, "registers, spills, shared": kernels}


def timed(jobs: list[Job], found: list[Job]) -> None:
    """Milliseconds of every kernel of each job that is right, a launch."""
    gpu, current = Gpu(), kernel_configs._table(triton_support.architecture(torch.device("cuda", 0)))
    shipped = {name: dict(rows) for name, rows in current.items()}
    prepare: Any = table.kernel_module("prepare", "triton")
    form, drawn = prepare.reads_folded, {}
    for job, row in zip(jobs, found):
        if "refused" not in row:
            for name, rows in shipped.items():
                current[name].update(rows)
            prepare.reads_folded = form
            take(job)
            size = job["op"], job.get("chunk", 64), job.get("shape", "h96")
            if size not in drawn:
                drawn.clear()
                drawn[size] = call(job, PINNED[size[2]])[0]
            drawn[size]()
            own = [k for k in gpu.kernels(drawn[size]) if k.name.startswith("wyfold")]
            row["milliseconds"] = {k.name: round(k.milliseconds / k.count, 4) for k in own}
        times = " ".join(f"{name.split('_triton')[0]} {ms}" for name, ms in row.get("milliseconds", {}).items())
        worst = max(row.get("errors", {"-": 0.0}).items(), key=lambda x: x[1])
        print(
            job,
            times,
            f"worst {worst[0]} {worst[1]:.1e}",
            "" if row.get("same") else row.get("refused", "BITS"),
            flush=True,
        )


if __name__ == "__main__":
    main()
