"""Digests of results, microseconds of each launch and milliseconds of a CUDA graph for delta-rule calls on one idle
card.

    PYTHONPATH=src:. python tools/experiments/launch_times.py --commit HASH --out DIR --budget 120 [--cases EXPRESSION]
        [--row KERNEL NAME JSON]... [--against FILE]

Calls are in bfloat16 with K = V = 128. --norm normalises q and k inside, --gate activates the gate and beta inside, as
layers do. --row puts a row into a kernel's configuration table, such as
`--row segment_fold.triton default '{"BV": 16, "BS": 64, "warps": 8, "stages": 3}'`.
A kernel that is selected by having a row needs one in the table file. --segments forces a segment count, --decay sets
how fast gates decay. --against names the output of another run, whose digests are compared.

`launch-times.json` is written after every case; no case starts after the budget is spent. With --device cpu and
TRITON_INTERPRET=1 sizes are tiny, and nothing is timed.
"""

import argparse
import contextlib
import hashlib
import json
import re
import sys
import time
from functools import partial
from pathlib import Path

import torch
from tools.proofs.serving_times import _graph, _medians

import wyfold
from wyfold.runtime import kernel_configs, segment_rule, triton_support
from wyfold.runtime.kernel_configs import Config

ROUNDS, REPLAYS, PROFILED = 7, 3, 4
WIDTH = 128
SHAPES = {"h96": (1, 8192, 96), "b4h64": (4, 4096, 64), "h8": (1, 8192, 8), "64k": (1, 65536, 8)}
CASES = [
    f"{rule} {shape} {mode}"
    for shape in SHAPES
    for rule in ("delta_rule", "gdn", "kda")
    for mode in ("fwd", "fwdbwd")
    if not (rule == "delta_rule" and shape == "64k")
]


def drawn(rule, shape, device, decay, gate="given"):
    B, T, H = SHAPES[shape] if device == "cuda" else (1, 400, 1)
    width = WIDTH if device == "cuda" else 16
    draw = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(B, T, H, width, device=device, generator=draw) for _ in range(3))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    beta = torch.rand(B, T, H, device=device, generator=draw)
    channels = (width,) if rule == "kda" else ()
    g = -torch.rand(B, T, H, *channels, device=device, generator=draw) * (2 * decay)
    tokens = [x.bfloat16() for x in (q, k, v)]
    if gate == "given" or rule == "delta_rule":
        return [*tokens, *(() if rule == "delta_rule" else (g,)), beta]
    # Raw gate values as a layer's projection gives them, and the layer's two gate parameters.
    A_log, dt_bias = torch.zeros(H, device=device), torch.full((H, *channels), -3.0, device=device)
    return [*tokens, g.mul_(-1 / decay).bfloat16(), beta.logit(1e-3).bfloat16(), A_log, dt_bias]


def call(rule, given, fed, norm=False, gate="given"):
    """Results, and every gradient if incoming gradients are given."""
    names = {"delta_rule": "chunk_delta_rule", "gdn": "chunk_gated_delta_rule", "kda": "chunk_kda"}
    inside = {}
    if gate != "given" and rule != "delta_rule":
        inside = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
        inside |= {"A_log": given[5], "dt_bias": given[6]}
        inside |= {"safe_gate": True, "lower_bound": -5.0} if gate == "bounded" else {}
    o, state = getattr(wyfold, names[rule])(
        *given[:5], backend="triton", output_final_state=True, use_qk_l2norm_in_kernel=norm, **inside
    )
    return (o.detach(), state.detach(), *(() if fed is None else torch.autograd.grad(o, given, fed)))


def digest(x):
    return hashlib.sha256(x.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:16]


def launches(run):
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            run()
        torch.cuda.synchronize()
    total = {event.key: event.device_time_total for event in seen.key_averages()}
    return {name[:48]: round(us / PROFILED, 1) for name, us in total.items() if us and "wyfold" in name}


def measured(case, args):
    rule, shape, mode = case.split()
    given = drawn(rule, shape, args.device, args.decay, args.gate)
    fed = None
    if mode == "fwdbwd":
        given = [x.requires_grad_() for x in given]
        fed = torch.randn(given[2].shape, device=args.device, generator=torch.Generator(args.device).manual_seed(1))
        fed = fed.to(given[2].dtype)
    run = partial(call, rule, given, fed, args.norm, args.gate)
    with torch.set_grad_enabled(fed is not None), contextlib.ExitStack() as stack:
        for kernel, name, text in args.row:
            blocks = json.loads(text)
            fixed = [blocks.pop(word, None) for word in ("warps", "stages", "registers")]
            config = Config(fixed[0], fixed[1], blocks, fixed[2])
            stack.enter_context(
                kernel_configs.override_row(triton_support.architecture(given[0].device), kernel, name, config)
            )
        if args.segments:
            stack.enter_context(segment_rule.forced(args.segments))
        row = {"case": case, "digests": [digest(x) for x in run()]}
        row["repeats"] = row["digests"] == [digest(x) for x in run()]
        if args.device == "cuda":
            row["us"] = launches(run)
            row["ms"] = _medians({"": _graph(run)}, ROUNDS, REPLAYS)[""]
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=Path("launches"))
    parser.add_argument("--budget", type=float, default=120.0, help="seconds")
    parser.add_argument("--cases", default="", help="an expression found in a case, such as 'gdn (h96|64k) fwd$'")
    parser.add_argument("--row", nargs=3, action="append", default=[], metavar=("KERNEL", "NAME", "JSON"))
    parser.add_argument("--norm", action="store_true", help="of q and k, inside the operator")
    parser.add_argument("--gate", choices=("given", "softplus", "bounded"), default="given", help="activated inside")
    parser.add_argument("--segments", type=int, default=0)
    parser.add_argument("--decay", type=float, default=1 / 32, help="minus the mean log decay of a token")
    parser.add_argument("--against", type=Path)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    ends = time.monotonic() + args.budget
    args.out.mkdir(parents=True, exist_ok=True)
    against = {}
    if args.against:
        against = {row["case"]: row.get("digests") for row in json.loads(args.against.read_text())["rows"]}
    found = {
        "commit": args.commit,
        "gpu": torch.cuda.get_device_name() if args.device == "cuda" else "",
        "torch": torch.__version__,
        "rows of tables": args.row,
        "norm inside": args.norm,
        "gate": args.gate,
        "decay": args.decay,
        "rows": [],
    }
    if args.device != "cuda":
        from tests import triton_bf16

        triton_bf16.repair()  # correct bfloat16 in the interpreter
    chosen = [case for case in CASES if re.search(args.cases, case)]
    if not chosen:
        parser.error(f"--cases {args.cases!r}: none of {', '.join(CASES)}")

    def keep():
        (args.out / "launch-times.json").write_text(json.dumps(found, indent=1) + "\n")

    for case in chosen:
        if time.monotonic() > ends:
            found["cut off"] = f"before {case}"
            keep()
            break
        try:
            row = measured(case, args)
        except Exception as reason:
            row = {"case": case, "refused": f"{type(reason).__name__}: {reason}"[:300]}
        found["rows"].append(row)
        keep()
        if "refused" in row:
            print(f"{case:20} refused: {row['refused'][:150]}", flush=True)
            continue
        bits = "" if case not in against else " bits of before" if against[case] == row["digests"] else " OTHER BITS"
        us = " ".join(f"{name.removeprefix('wyfold_')[:16]} {x:.0f}" for name, x in row.get("us", {}).items())
        print(f"{case:20} {row.get('ms', 0):.4f} ms {'' if row['repeats'] else 'NO REPEAT '}{us}{bits}", flush=True)
    print(found.get("cut off", "whole"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
