"""Configurations of decoding, and of `kkt`, beside the shipped row: bits, then time from a CUDA graph, on one card.

    PYTHONPATH=src:. python tools/experiments/decode_variants.py --commit HASH --out DIR --budget 60
    PYTHONPATH=src:. python tools/experiments/decode_variants.py --only decode --states "KV bf16" --names "held|v32 w1"

Every variant is compiled first, by JOBS processes into one cache on disk. `variants.json` is written after every case,
so that what a cut-off run found is there; nothing new is begun when the budget is spent. On a CPU, with
TRITON_INTERPRET=1 and --device cpu, sizes are tiny and times mean nothing.
"""

import argparse
import contextlib
import json
import os
import re
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import torch
from tools.proofs.serving_paths import Case, same
from tools.proofs.serving_times import Decoding, _graph, _medians, decodings

import wyfold
from wyfold import serving
from wyfold.runtime import launch
from wyfold.runtime.launch import Config

JOBS = 14
ROUNDS, REPLAYS = 5, 2
GATE = {"delta_rule": "none", "gated_delta_rule": "scalar", "kda": "channel"}
WORD = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def decode_row(name):
    """Config of a variant's name: value rows, warps, most registers."""
    rows, warps, registers = (int(x[1:]) for x in name.split())
    return Config(warps, 1, {"BV": rows}, registers or None)


TILES = {
    name: decode_row(name)
    for name in (
        *("v8 w1 r0", "v8 w1 r96", "v16 w1 r0", "v16 w1 r128", "v16 w1 r168", "v16 w2 r0"),
        *("v32 w1 r0", "v32 w2 r0", "v32 w4 r0", "v64 w2 r0", "v64 w4 r0"),
    )
}
"""Of Triton's kernel. r0: without a limit."""

HELD = {
    f"held {name}": decode_row(name)
    for name in (
        *("v128 w2 r0", "v128 w4 r0", "v128 w4 r80", "v128 w8 r0"),
        *("v64 w1 r0", "v64 w2 r0", "v64 w4 r0", "v32 w1 r0"),
    )
}
"""Of the one in Gluon, which holds its columns in shared memory; for what it serves."""

KKT = {
    ("float32", 16): ("k64 w1 s1 r0", "k32 w1 s3 r0", "k128 w1 s1 r0", "k64 w1 s2 r0"),
    ("float32", 32): ("k64 w4 s1 r0", "k32 w1 s4 r0", "k64 w2 s2 r0", "k32 w2 s3 r0"),
    ("float32", 64): ("k64 w4 s1 r0", "k32 w4 s4 r0", "k32 w8 s4 r0", "k64 w8 s2 r0"),
    ("bfloat16", 16): ("k128 w1 s1 r0", "k64 w1 s3 r0", "k32 w2 s4 r0", "k32 w1 s4 r0"),
    ("bfloat16", 32): ("k128 w2 s1 r0", "k128 w1 s1 r0", "k32 w2 s4 r0", "k64 w1 s3 r0", "k32 w1 s4 r0"),
    ("bfloat16", 64): ("k64 w4 s2 r0",),
}
"""The first of each is the row before this one, under today's kernel."""


def kkt_row(name):
    columns, warps, stages, registers = (int(x[1:]) for x in name.split())
    return Config(warps, stages, {"BK": columns}, registers or None)


@contextlib.contextmanager
def trying(kernel, key, config):
    """Within, a launch of that key is this kernel's, under this config; None: whose it is, as it is shipped."""
    if config is None:
        yield
        return
    offers, device = launch.offers, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    stands_in = kernel.endswith(".gluon")

    def offered(where, which, key):
        return offers(where, which, key) and (stands_in or which != kernel.replace(".triton", ".gluon"))

    with mock.patch.object(launch, "offers", offered), launch.trying(launch.architecture(device), kernel, key, config):
        yield


def decode_variants(case, stored, names=""):
    """Name -> kernel, key and config of what a case is tried with; of the names that this expression is found in."""
    key = f"{WORD[stored]} K{case.width} V{case.width} {'VK' if case.v_first else 'KV'} {GATE[case.rule]}"
    found = {"shipped": ("", "", None)}
    found |= {name: ("recurrent.triton", key, config) for name, config in TILES.items()}
    if stored == torch.bfloat16 and not case.v_first and case.width == 128 and not launch.interpreting():
        found |= {name: ("recurrent.gluon", f"{key} alone", config) for name, config in HELD.items()}
    return {name: variant for name, variant in found.items() if name == "shipped" or re.search(names, name)}


def small(held, variant):
    """Outputs and states of one token of the first sequences, under a variant; twice, for two kernels.

    The second time one sequence has no slot, one starts from zeros though its slot holds NaN, one state is dropped.
    """
    some = slice(0, min(held.batch, 64))
    tokens = {name: x[some] if isinstance(x, torch.Tensor) else x for name, x in held.call.items()}
    tokens |= {"state_v_first": held.case.v_first, "backend": "triton"}
    pools = [held.pools[0][some].clone() for _ in range(2)]
    slots = torch.arange(len(pools[0]), device=pools[0].device).flip(0).int()
    odd, given, target = slots.clone(), slots >= 0, slots.clone()
    if len(slots) > 3:
        pools[1][slots[2].long()] = torch.nan
        odd[1], given[2], target[3] = -1, False, len(slots)
    with trying(*variant):
        plain = serving.decode(**tokens, pool=pools[0], state_indices=slots)
        tokens |= {"has_initial_state": given, "output_state_indices": target}
        return plain, serving.decode(**tokens, pool=pools[1], state_indices=odd), *pools


def keys_of(dtype, C, device, tokens, heads):
    draw = torch.Generator(device).manual_seed(0)
    k = torch.nn.functional.normalize(torch.randn(1, tokens, heads, 128, device=device, generator=draw), dim=-1)
    return k.to(getattr(torch, dtype)), torch.rand(1, tokens, heads, device=device, generator=draw)


def gram(dtype, C, given, variant):
    with trying("kkt.triton", f"{WORD[given[0].dtype]} K128 C{C} none", variant):
        return wyfold.chunk_scaled_dot_kkt(*given, None, chunk_size=C, backend="triton")


def compile_one(job):
    """Put a variant's kernel into the cache; a refusal is told where it is timed."""
    kind, *what = job
    try:
        if kind == "decode":
            case, stored, variant = what
            small(Decoding(case, 2, stored, pools=1), variant)
        else:
            (dtype, C), variant = what
            gram(dtype, C, keys_of(dtype, C, torch.device("cuda"), 128, 96), variant)
        torch.cuda.synchronize()
    except Exception as reason:
        return f"{job}: {type(reason).__name__}: {reason}"[:300]
    return ""


def timed(runs, on_card):
    """Milliseconds of each run."""
    if on_card:
        return _medians({name: _graph(run) for name, run in runs.items()}, ROUNDS, REPLAYS)
    found = {}
    for name, run in runs.items():
        began = time.perf_counter()
        run()
        found[name] = (time.perf_counter() - began) * 1e3
    return found


def decoding(case, stored, batch, on_card, names):
    """One table row: us of each variant and of a copy, and whose bits are the shipped row's."""
    held = Decoding(case, batch, stored, pools=None if on_card else 1)
    pools, variants = held.pools, decode_variants(case, stored, names)
    row = {"rule": case.rule, "layout": "VK" if case.v_first else "KV", "states": WORD[stored], "batch": batch}
    shipped, runs, bits = small(held, variants["shipped"]), {}, {}

    def graphed(variant):
        # Captured inside: a replay asks no table.
        with trying(*variant):
            for pool in pools:
                held.ours(pool)

    for name, variant in variants.items():
        try:
            bits[name] = all(same(one, other) for one, other in zip(shipped, small(held, variant)))
            runs[name] = partial(graphed, variant)
        except Exception as reason:
            row.setdefault("refused", {})[name] = f"{type(reason).__name__}: {reason}"[:200]
    onto = list(zip(pools, [*pools[1:], pools[0]]))
    runs["copy"] = lambda: [torch.neg(x, out=to) for x, to in onto]
    runs["copy in place"] = lambda: [torch.neg(x, out=x) for x in pools]
    us = {name: 1e3 * x / len(pools) for name, x in timed(runs, on_card).items()}
    row |= {"us": us, "bits": bits, "share": {name: us["copy"] / x for name, x in us.items() if "copy" not in name}}
    return row


def grams(which, on_card):
    """One table row of `kkt`: us of each variant, and how far each is from float64 in a few heads."""
    dtype, C = which
    device = torch.device("cuda" if on_card else "cpu")
    given = keys_of(dtype, C, device, 8192 if on_card else 64, 96 if on_card else 1)
    few = [x[:, :512, :2] for x in given]
    truth = wyfold.chunk_scaled_dot_kkt(*(x.double() for x in few), None, chunk_size=C, backend="eager")
    row, runs = {"op": "kkt", "dtype": dtype, "C": C}, {}
    for name in ("shipped", *KKT[which]):
        variant = None if name == "shipped" else kkt_row(name)
        try:
            L = gram(dtype, C, few, variant).double()
            row.setdefault("error", {})[name] = ((L - truth).norm() / truth.norm()).item()
            runs[name] = partial(gram, dtype, C, given, variant)
        except Exception as reason:
            row.setdefault("refused", {})[name] = f"{type(reason).__name__}: {reason}"[:200]
    moved = sum(x.numel() * x.element_size() for x in given) + given[1].numel() * C * 4
    row |= {"us": {name: 1e3 * x for name, x in timed(runs, on_card).items()}, "bytes": moved}
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=Path("variants"))
    parser.add_argument("--budget", type=float, default=60.0, help="seconds")
    parser.add_argument("--batches", default="64,1024")
    parser.add_argument("--only", choices=("decode", "kkt"))
    parser.add_argument("--states", default="", help='of decoding, such as "KV bf16"; all where empty')
    parser.add_argument("--names", default="", help="variants of decoding: an expression found in theirs")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    ends, on_card = time.monotonic() + args.budget, args.device == "cuda"
    args.out.mkdir(parents=True, exist_ok=True)
    found = {"commit": args.commit, "torch": torch.__version__, "seconds": {}, "not compiled": [], "rows": []}

    def keep():
        (args.out / "variants.json").write_text(json.dumps(found, indent=1) + "\n")

    device = torch.device(args.device)
    cases = list(decodings(device, "triton"))[::-1]  # bfloat16 first, which has most to gain
    cases = [x for x in cases if args.states in ("", f"{'VK' if x[0].v_first else 'KV'} {WORD[x[1]]}")]
    if not on_card:
        from tests import triton_bf16

        triton_bf16.repair()  # of the interpreter
        cases = [(Case(case.rule, case.v_first, 128, device, "triton", (1, 1)), stored) for case, stored in cases[:3]]
    wanted = [kind for kind in ("kkt", "decode") if args.only in (None, kind)]
    if on_card:
        began = time.monotonic()
        jobs = [("kkt", which, kkt_row(name)) for which, names in KKT.items() for name in names]
        jobs += [("kkt", which, None) for which in KKT]
        jobs += [
            ("decode", *case, variant) for case in cases for variant in decode_variants(*case, args.names).values()
        ]
        jobs = [job for job in jobs if job[0] in wanted]
        with ProcessPoolExecutor(min(JOBS, os.cpu_count() or 1), mp_context=get_context("spawn")) as workers:
            found["not compiled"] = [told for told in workers.map(compile_one, jobs) if told]
        found["seconds"]["compiling"] = time.monotonic() - began
        keep()
    work = [(kind, what) for kind in wanted for what in (KKT if kind == "kkt" else cases)]
    batches = [int(x) for x in args.batches.split(",")] if on_card else [2]
    for kind, what in work:
        for batch in batches if kind == "decode" else (0,):
            if time.monotonic() > ends:
                found["cut off"] = f"before {kind} {what} {batch}"
                keep()
                break
            began = time.monotonic()
            row = decoding(*what, batch, on_card, args.names) if kind == "decode" else grams(what, on_card)
            found["rows"].append(row | {"seconds": time.monotonic() - began})
            keep()
            if on_card:
                torch.cuda.empty_cache()
    for row in found["rows"]:
        print(*(row[x] for x in ("op", "dtype", "C", "rule", "layout", "states", "batch") if x in row))
        for name, us in row["us"].items():
            share = f"  {row['share'][name]:.3f} of a copy" if name in row.get("share", {}) else ""
            share += f"  {row['bytes'] / us / 1e6:.2f} TB/s, {row['error'][name]:.1e} off" if "bytes" in row else ""
            other = "  OTHER BITS" if not row.get("bits", {}).get(name, True) else ""
            print(f"    {name:14} {us:9.1f} us{share}{other}")
        for name, reason in row.get("refused", {}).items():
            print(f"    {name:14} refused: {reason[:90]}")
    shares = [row["share"]["shipped"] for row in found["rows"] if "share" in row]
    if shares:
        print(f"shipped: {min(shares):.3f} to {max(shares):.3f} of a copy, median {statistics.median(shares):.3f}")
    print(found.get("cut off", "whole"), found["seconds"], *found["not compiled"], sep="\n")
    return 0 if all(all(row.get("bits", {}).values()) for row in found["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
