"""`summary_bwd` in Gluon on one card: the bits of Triton's launch on factors at random, and us of both, row by row.

    PYTHONPATH=src:. python tools/experiments/summary_bwd_gluon_check.py --commit HASH --out DIR --budget 90
        [--variants]

About 40 s, most of them the compiler's; --variants times other rows too, for 20 more. Writes `summary-bwd.json` after
every call; nothing new is begun when the budget is spent. With --device cpu and TRITON_INTERPRET=1 lengths are tiny,
Triton's launch stands in for Gluon's, and nothing is timed.
"""

import argparse
import contextlib
import json
import math
import sys
import time
from itertools import accumulate, product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from tools.proofs.serving_times import _graph, _medians

from wyfold.parallel import segments as parallel
from wyfold.runtime import launch
from wyfold.runtime.chunks import Cut, chunk_grid, segment_grid
from wyfold.runtime.launch import Config
from wyfold.stages.records import Prepared

C, K, V = 64, 128, 128
KEYS = {"gdn": "bf16 K128 V128 C64 scalar WF", "kda": "bf16 K128 V128 C64 channel EF"}
ROWS = {"gdn": "bf16 K128 V128 C64 WF bwd", "kda": "bf16 K128 V128 C64 channel EF bwd"}
VARIANTS = [(64, 1, 3), (64, 1, 2), (128, 2, 3), (128, 2, 2)]
"""Value rows of a program, warpgroups that share them, stages; the first is the table's."""

LONG = "B1 T65536 H8"
ODD = (5000, 0, 1, 8191, 64 * 65, 63, 12345)


def drawn(rule, lengths, H, HV, cut, device, spare=0, final=None, seed=0):
    """Arguments of a launch. spare: tokens past the last sequence, which hold NaN; final: dtype of dST, if any."""
    gen = torch.Generator(device).manual_seed(seed)
    r = lambda *s: torch.randn(*s, generator=gen, device=device)
    unit = lambda *s: torch.nn.functional.normalize(r(*s), dim=-1).bfloat16()
    T, channel = sum(lengths) + spare, rule == "kda"
    cu = None if len(lengths) == 1 else torch.tensor([0, *accumulate(lengths)], device=device)
    grid = chunk_grid(1, T, C, cu)
    found = segment_grid(grid, cut, torch.device(device))
    q, k, do = unit(1, T, H, K), unit(1, T, H, K), r(1, T, HV, V).bfloat16()
    for x in (q, k, do):
        x[:, sum(lengths) :] = torch.nan
    n = grid.chunks * HV
    square = lambda: (torch.eye(C, device=device) + 0.05 * r(n, C, C).tril(-1).mT).bfloat16()
    rows = torch.rand(n, 4, C, generator=gen, device=device)
    if channel:
        rows[:, :3] = 1
    rows[::7, 3, ::5] = 0  # strengths that nothing is divided by
    total = torch.rand(n, K if channel else 1, generator=gen, device=device) ** 0.1
    tiles = [by * unit(n, C, K) if channel else None for by in (1, 1, 0.3)]
    p = Prepared(rows, total, *tiles, square(), square())
    dST = None if final is None else r(len(lengths), HV, V, K).to(final).mT
    return q, k, p, do, dST, found, SimpleNamespace(scale=K**-0.5)


def calls(on_card):
    """(what it is, arguments of `drawn`), the long one first."""
    if not on_card:
        for rule, final in product(KEYS, (None, torch.float32)):
            lengths = (3 * C + 5, 1, 2 * C)
            yield f"{rule} tiny dST {final}", {"rule": rule, "lengths": lengths, "H": 1, "HV": 2, "cut": Cut(1, 2)}
        return
    for rule in KEYS:
        cut = parallel.cut(8, K, V, C, 132)
        yield f"{rule} {LONG}", {"rule": rule, "lengths": (65536,), "H": 8, "HV": 8, "cut": cut}
    for rule in KEYS:
        odd = {"rule": rule, "lengths": ODD, "H": 2, "HV": 4, "cut": Cut(2, 4), "spare": 77, "final": torch.float32}
        yield f"{rule} packed", odd
    for rule in KEYS:
        one = {"rule": rule, "lengths": (64 * 200 + 9,), "H": 4, "HV": 4, "cut": Cut(16, 12), "final": torch.bfloat16}
        yield f"{rule} one of {64 * 200 + 9} tokens", one


def left_to_triton(*_):
    raise RuntimeError("Gluon's launch left the call to Triton's")


def bits(x):
    return x.contiguous().view(torch.int32)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=Path("summary-bwd"))
    parser.add_argument("--budget", type=float, default=90.0, help="seconds")
    parser.add_argument("--variants", action="store_true", help="of the long call, rows that are not the table's too")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    on_card, ends = args.device == "cuda", time.monotonic() + args.budget
    if not on_card:
        from tests import triton_bf16

        triton_bf16.repair()  # of the interpreter
    import wyfold.stages.summary.triton as triton

    gluon = triton
    if on_card:
        import wyfold.stages.summary.gluon as gluon
    args.out.mkdir(parents=True, exist_ok=True)
    found = {"commit": args.commit, "torch": torch.__version__, "calls": []}
    wrong = 0
    for name, given in calls(on_card):
        if time.monotonic() > ends:
            found["cut off before"] = name
            break
        *arguments, segments, options = drawn(**given, device=args.device)
        made = lambda: torch.full((segments.borders, given["HV"], V, K), math.nan, device=args.device).mT  # noqa: B023
        key, row, expected = KEYS[given["rule"]], ROWS[given["rule"]], made()
        triton.summary_bwd(*arguments, segments, options, key, expected)
        asked = ~expected.isnan().all(-1).all(-1)
        line = {"call": name, "asked": int(asked.sum()), "finite": bool(expected[asked].isfinite().all())}
        timed = {}
        if on_card and LONG in name:
            timed["triton"] = _graph(lambda: triton.summary_bwd(*arguments, segments, options, key, expected))  # noqa: B023
        for BV, parts, stages in VARIANTS[: len(VARIANTS) if args.variants and timed else 1]:
            which = f"{BV} rows in {parts}, {stages} stages"
            config = Config(4, stages, {"BV": BV, "PARTS": parts})
            alone = mock.patch.object(triton, "summary_bwd", left_to_triton) if on_card else contextlib.nullcontext()
            with launch.trying("sm_90", "summary.gluon", row, config), alone:
                c = made()
                gluon.summary_bwd(*arguments, segments, options, key, c)
                line[which] = int((bits(c) != bits(expected)).sum())
                again = made()
                gluon.summary_bwd(*arguments, segments, options, key, again)
                line[which] += int((bits(c) != bits(again)).sum())
                if timed:
                    timed[which] = _graph(lambda c=c: gluon.summary_bwd(*arguments, segments, options, key, c))  # noqa: B023
            wrong += line[which] > 0
        wrong += not (line["finite"] and line["asked"])
        if timed:
            line["us"] = {which: round(1000 * ms, 1) for which, ms in _medians(timed, 7, 5).items()}
        found["calls"].append(line)
        (args.out / "summary-bwd.json").write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps(line), flush=True)
    print(f"{wrong} wrong" + (", cut off" if "cut off before" in found else ""))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
