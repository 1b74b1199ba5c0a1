"""Counts of segments and rows of tables of a cut call, alone on one card: errors, launches, time from a CUDA graph.

    PYTHONPATH=src:. python tools/experiments/segment_counts.py --commit HASH --out DIR --budget 120

One sequence of 65,536 tokens and eight heads, bfloat16, forward, for GDN and KDA. A row's outputs are compared with
those of the whole call, in RMS. `segment-counts.json` is written after every step; nothing new is begun when the budget
is spent. On a CPU, with TRITON_INTERPRET=1 and --device cpu, sizes are tiny, and Gluon and times are left out.
"""

import argparse
import contextlib
import json
import sys
import time
from functools import partial
from pathlib import Path

import torch
from tools.proofs.serving_times import _graph, _medians

import wyfold
from wyfold.parallel import segments
from wyfold.runtime import launch
from wyfold.runtime.launch import Config

ROUNDS, REPLAYS = 7, 3
FOLD = ("16 128 w8 s2", "16 64 w8 s3", "16 64 w4 s3", "16 32 w4 s4", "16 32 w8 s4", "32 64 w8 s3", "16 128 w4 s2")
COUNTS = {"gdn": (8, 10, 12, 13, 16), "kda": (8, 9, 12, 16)}
SCAN = {"64": Config(4, 3, {"BV": 64, "PARTS": 1, "OUT": 1}), "128": Config(4, 3, {"BV": 128, "PARTS": 2, "OUT": 0})}
KEYS = {"gdn": "bf16 K128 V128 C64 WF", "kda": "bf16 K128 V128 C64 channel EF"}


def drawn(rule, device, tokens, heads, width):
    draw = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(1, tokens, heads, width, device=device, generator=draw) for _ in range(3))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    beta = torch.rand(1, tokens, heads, device=device, generator=draw)
    channels = (width,) if rule == "kda" else ()
    g = -torch.rand(1, tokens, heads, *channels, device=device, generator=draw) / 16
    return *(x.bfloat16() for x in (q, k, v)), g, beta


def call(rule, given, how, rows):
    """The operator under rows of tables, cut into so many segments (0: as the rule cuts)."""
    op = wyfold.chunk_kda if rule == "kda" else wyfold.chunk_gated_delta_rule
    with contextlib.ExitStack() as stack:
        for kernel, name, config in rows:
            stack.enter_context(launch.trying(launch.architecture(given[0].device), kernel, name, config))
        if how > 1:
            stack.enter_context(segments.forced(how))
        with torch.no_grad():
            return op(*given, backend="triton", output_final_state=True, max_splits=1 if how == 1 else None)


def fold_row(text):
    BV, BS, warps, stages = text.replace("w", "").replace("s", "").split()
    return "fold.triton", "default", Config(int(warps), int(stages), {"BV": int(BV), "BS": int(BS)})


def work():
    for rule, counts in COUNTS.items():
        yield rule, "as shipped", 0, ()
        for scan, row in SCAN.items():
            rows = (("scan.gluon", f"{KEYS[rule]} few", row), ("scan.gluon", KEYS[rule], row))
            yield from ((rule, f"{n} segments, scan {scan}", n, rows) for n in counts)
        if rule == "gdn":
            yield from ((rule, f"8 segments, fold {fold}", 8, (fold_row(fold),)) for fold in FOLD)


def launches(run):
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(4):
            run()
        torch.cuda.synchronize()
    found = {}
    for event in seen.key_averages():
        if event.device_time_total:
            found[event.key[:40]] = round(event.device_time_total / 4, 1)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=Path("counts"))
    parser.add_argument("--budget", type=float, default=120.0, help="seconds")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    ends, on_card = time.monotonic() + args.budget, args.device == "cuda"
    args.out.mkdir(parents=True, exist_ok=True)
    size = (65536, 8, 128) if on_card else (400, 1, 16)
    found = {"commit": args.commit, "torch": torch.__version__, "rows": []}
    if not on_card:
        from tests import triton_bf16

        triton_bf16.repair()  # of the interpreter
    whole, given = {}, {}
    for rule, name, how, rows in work():
        if time.monotonic() > ends:
            found["cut off"] = f"before {rule} {name}"
            break
        if rule not in given:
            given = {rule: drawn(rule, args.device, *size)}
            whole = {rule: [x.float() for x in call(rule, given[rule], 1, ())[:2]]}
        row = {"rule": rule, "name": name}
        try:
            run = partial(call, rule, given[rule], how, rows)
            o, S = (x.float() for x in run()[:2])
            row["error"] = [((x - y).norm() / y.norm()).item() for x, y in zip((o, S), whole[rule], strict=True)]
            again = run()[0].float()
            row["repeats"] = torch.equal(again, o)
            if on_card:
                row["us"] = launches(run)
                replay = _graph(run)
                row["ms"] = _medians({"": replay}, ROUNDS, REPLAYS)[""]
        except Exception as reason:
            row["refused"] = f"{type(reason).__name__}: {reason}"[:300]
        found["rows"].append(row)
        (args.out / "segment-counts.json").write_text(json.dumps(found, indent=1) + "\n")
    for row in found["rows"]:
        if "refused" in row:
            print(row["rule"], row["name"], "refused:", row["refused"][:120])
            continue
        errors = " ".join(f"{x:.1e}" for x in row["error"])
        us = " ".join(f"{name.removeprefix('wyfold_')[:14]} {x:.0f}" for name, x in row.get("us", {}).items())
        print(f"{row['rule']} {row['name']:28} {row.get('ms', 0):.4f} ms  {errors}  {row['repeats']}  {us}")
    print(found.get("cut off", "whole"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
