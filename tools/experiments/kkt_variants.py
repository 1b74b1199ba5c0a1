"""Configurations of `kkt`, alone on one card: bits beside the first of each case, error, time from a CUDA graph.

    PYTHONPATH=src:. python tools/experiments/kkt_variants.py --commit HASH --out DIR --budget 90
    PYTHONPATH=src:. python tools/experiments/kkt_variants.py --cases "C64 channel" --names "r128|r168" --against FILE

A case is a dtype, a chunk size and a kind of gate; what others take is settled (docs/facts.md, SASS-4). Every
configuration is compiled first, by JOBS processes into one cache on disk. `kkt-variants.json` is written after every
step, so that what a cut-off run found is there; nothing new is begun when the budget is spent. --against: such a file
of another commit, whose bits are compared as well. On a CPU, with TRITON_INTERPRET=1 and --device cpu, sizes are tiny
and times mean nothing.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from tools.proofs.serving_times import _graph, _medians

import wyfold
from wyfold.runtime import launch
from wyfold.runtime.launch import Config

JOBS = 14
ROUNDS, REPLAYS, CALLS = 7, 3, 4
HEADS, WIDTH, TOKENS, SOME = 96, 128, 8192, 200
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

CASES = {
    "bf16 C64 channel": ("k32 w4 s1 r0", "k32 w4 s1 r168", "k32 w4 s1 r128", "k16 w4 s1 r128"),
    "fp32 C64 channel": ("k32 w4 s1 r0", "k32 w4 s1 r168", "k32 w4 s1 r128"),
    "bf16 C32 channel": ("k32 w2 s1 r0", "k32 w2 s1 r168", "k32 w2 s1 r128", "k64 w2 s1 r0"),
    "fp32 C32 channel": ("k32 w2 s1 r0", "k32 w2 s1 r168", "k32 w2 s1 r128"),
    "bf16 C16 channel": ("k32 w1 s1 r0", "k32 w1 s1 r128", "k64 w1 s1 r168", "k64 w1 s1 r0"),
    "fp32 C16 channel": ("k32 w1 s1 r0", "k32 w1 s1 r128", "k64 w1 s1 r168"),
    "bf16 C64 none": ("k128 w4 s1 r0",),
    "bf16 C64 scalar": ("k64 w4 s3 r0", "k64 w2 s3 r0"),
    "fp32 C64 none": ("k64 w4 s1 r0", "k32 w2 s4 r0"),
    "fp32 C64 scalar": ("k64 w4 s1 r0", "k32 w2 s4 r0", "k16 w2 s6 r200"),
    "fp32 C32 scalar": ("k32 w2 s4 r0", "k32 w1 s4 r0"),
}
"""Channels of a slice, warps, stages, most registers (r0: no limit). In 16 bits no slice of fewer than 64 channels has
four warps in chunks of 64 (docs/facts.md, H200-4)."""


def config(name):
    columns, warps, stages, registers = (int(x[1:]) for x in name.split())
    return Config(warps, stages, {"BK": columns}, registers or None)


def drawn(case, device, tokens, heads):
    """k, beta, g and the chunk size of a case."""
    dtype, C, gate = case.split()
    draw = torch.Generator(device).manual_seed(0)
    shape = (1, tokens, heads)
    k = torch.nn.functional.normalize(torch.randn(*shape, WIDTH, device=device, generator=draw), dim=-1)
    beta = torch.rand(shape, device=device, generator=draw)
    channels = {"none": None, "scalar": (), "channel": (WIDTH,)}[gate]
    g = None if channels is None else -torch.rand(*shape, *channels, device=device, generator=draw) / 16
    return k.to(DTYPES[dtype]), beta, g, int(C[1:])


def gram(case, given, name):
    """L under a configuration; "shipped": under the table's."""
    dtype, C, gate = case.split()
    where = launch.architecture(given[0].device)
    row = contextlib.nullcontext()
    if name != "shipped":
        row = launch.trying(where, "kkt.triton", f"{dtype} K{WIDTH} {C} {gate}", config(name))
    with row:
        return wyfold.chunk_scaled_dot_kkt(*given[:3], chunk_size=given[3], backend="triton")


def repeatedly(case, given, name):
    for _ in range(CALLS):
        L = gram(case, given, name)
    return L


def compile_one(job):
    """Put a configuration's kernel into the cache; a refusal is told where it is timed."""
    case, name = job
    try:
        gram(case, drawn(case, torch.device("cuda"), SOME, HEADS), name)
        torch.cuda.synchronize()
    except Exception as reason:
        return f"{job}: {type(reason).__name__}: {reason}"[:300]
    return ""


def timed(runs, on_card):
    """Milliseconds of a call of each run."""
    if on_card:
        taken = _medians({name: _graph(run) for name, run in runs.items()}, ROUNDS, REPLAYS)
        return {name: ms / CALLS for name, ms in taken.items()}
    found = {}
    for name, run in runs.items():
        began = time.perf_counter()
        run()
        found[name] = (time.perf_counter() - began) * 1e3 / CALLS
    return found


def compared(case, names, on_card):
    """A case's row: of each configuration ms, whether its bits are the first's, their digest, and the error in RMS."""
    device = torch.device("cuda" if on_card else "cpu")
    heads = HEADS if on_card else 1
    # As many heads as are timed, so that it is the same kernel; the last chunk is not full.
    few = drawn(case, device, SOME if on_card else 70, heads)
    wide = (x if x is None else x.double() for x in few[:3])
    truth = wyfold.chunk_scaled_dot_kkt(*wide, chunk_size=few[3], backend="eager")
    given = drawn(case, device, TOKENS if on_card else 64, heads)
    row, runs, first = {"case": case, "bits": {}, "digest": {}, "error": {}, "refused": {}}, {}, None
    for name in names:
        try:
            L = gram(case, few, name)
            first = L if first is None else first
            row["bits"][name] = torch.equal(first, L)
            row["digest"][name] = hashlib.sha256(L.cpu().numpy().tobytes()).hexdigest()[:16]
            row["error"][name] = ((L - truth).norm() / truth.norm()).item()
            runs[name] = partial(repeatedly, case, given, name)
        except Exception as reason:
            row["refused"][name] = f"{type(reason).__name__}: {reason}"[:200]
    moved = sum(x.numel() * x.element_size() for x in given[:3] if x is not None)
    return row | {"ms": timed(runs, on_card), "bytes": moved + given[1].numel() * given[3] * 4}


def copied(on_card):
    """Bytes a second of a copy as large as bfloat16 keys and what is made of them in chunks of 64."""
    x = torch.zeros(HEADS * TOKENS * 64 if on_card else 4096, device="cuda" if on_card else "cpu")
    to = torch.empty_like(x)
    ms = timed({"copy": lambda: [torch.neg(x, out=to) for _ in range(CALLS)]}, on_card)["copy"]
    return 2 * x.numel() * 4 / ms * 1e3


def told(row, speed, against):
    """A case's lines of the table."""
    yield f"{row['case']:17} bytes alone {row['bytes'] / speed * 1e3:.4f} ms"
    before = against.get(row["case"], {})
    for name, ms in row["ms"].items():
        times = ms * speed / row["bytes"] / 1e3
        words = f"    {name:15} {ms:8.4f} ms {times:6.2f} x bytes  error {row['error'][name]:.1e}"
        other = "" if row["bits"][name] else "  OTHER BITS than the first"
        if name in before and before[name] != row["digest"][name]:
            other += "  OTHER BITS than before"
        yield words + other
    for name, reason in row["refused"].items():
        yield f"    {name:15} refused: {reason[:90]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=Path("variants"))
    parser.add_argument("--budget", type=float, default=90.0, help="seconds")
    parser.add_argument("--cases", default="", help="an expression found in theirs, such as 'C64 (none|scalar)'")
    parser.add_argument("--names", default="", help="an expression found in a configuration's; the first stays")
    parser.add_argument("--against", type=Path, help="a file of another run, whose digests are compared")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    ends, on_card = time.monotonic() + args.budget, args.device == "cuda"
    args.out.mkdir(parents=True, exist_ok=True)
    against = {}
    if args.against:
        against = {row["case"]: row["digest"] for row in json.loads(args.against.read_text())["rows"]}
    work = {
        case: (names[0], "shipped", *(name for name in names[1:] if re.search(args.names, name)))
        for case, names in CASES.items()
        if re.search(args.cases, case)
    }
    found = {"commit": args.commit, "torch": torch.__version__, "seconds": {}, "not compiled": [], "rows": []}

    def keep():
        (args.out / "kkt-variants.json").write_text(json.dumps(found, indent=1) + "\n")

    if on_card:
        began = time.monotonic()
        jobs = [(case, name) for case, names in work.items() for name in names]
        with ProcessPoolExecutor(min(JOBS, os.cpu_count() or 1), mp_context=get_context("spawn")) as workers:
            found["not compiled"] = [text for text in workers.map(compile_one, jobs) if text]
        found["seconds"]["compiling"] = time.monotonic() - began
        keep()
    else:
        from tests import triton_bf16

        triton_bf16.repair()  # of the interpreter
    found["bytes a second"] = copied(on_card)
    for case, names in work.items():
        if time.monotonic() > ends:
            found["cut off"] = f"before {case}"
            break
        began = time.monotonic()
        row = compared(case, names, on_card)
        found["rows"].append(row | {"seconds": time.monotonic() - began})
        keep()
        if on_card:
            torch.cuda.empty_cache()
    keep()
    for row in found["rows"]:
        print(*told(row, found["bytes a second"], against), sep="\n")
    print(f"a copy: {found['bytes a second'] / 1e12:.2f} TB/s", found.get("cut off", "whole"), found["seconds"])
    print(*found["not compiled"], sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
