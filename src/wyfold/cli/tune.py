"""Search launch configurations of a stage's kernels for this GPU.

For developers. Every candidate is compiled. It is dropped if it does not fit
the GPU, or spills more than others. The remaining candidates are checked:
outputs and gradients of the operator against the float64 token loop, as in
`wyfold verify`, and twenty calls with equal bits. Only then they are timed,
kernel by kernel. The fastest becomes a new row unless it is the shipped one.

Writes two files: <architecture>.json, the architecture's own rows with the
new ones, to be reviewed and copied to src/wyfold/runtime/configs/; and a
report of every candidate.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from wyfold.cli import DONE, FAILED, Failure, UsageError, results
from wyfold.cli.arguments import whole
from wyfold.cli.catalog import OPS, SHAPES

RULES = ("delta_rule", "gdn", "kda")
STAGES = {
    **dict.fromkeys(("prepare", "scan", "scan_bwd", "gradients"), RULES),
    "norm": ("l2norm", "norm"),
    "gate": ("gdn_gate", "kda_gate"),
    "conv": ("conv",),
    "kkt": ("kkt",),
    "solve_tril": ("solve",),
}
"""Stage -> operators, by their name in `bench`, whose calls launch it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wyfold tune`."""
    parser.add_argument("stage", nargs="?", choices=tuple(STAGES), metavar="STAGE", help="%(choices)s (default: all)")
    parser.add_argument("--arch", metavar="SM", help="required architecture, such as sm_90; another GPU is an error")
    parser.add_argument("--ops", help="only these operators, comma-separated names of `wyfold bench`")
    parser.add_argument(
        "--dtypes", default="bfloat16", help="dtypes of the inputs, comma-separated (default: %(default)s)"
    )
    parser.add_argument(
        "--shape",
        choices=SHAPES,
        default="h96",
        metavar="SHAPE",
        help="shape to time, a name of `wyfold bench --shapes` (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds", type=whole(1, 100_000), default=3, help="timing rounds per candidate (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("tuned"), metavar="DIR", help="output folder (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Tune and write the files. Returns 0, or 1 if a launch has no correct configuration."""
    results.ready(args.out)

    import torch

    from wyfold.cli import tuner
    from wyfold.cli.bench.cases import PINNED, Case
    from wyfold.runtime import kernel_configs, triton_support

    if not torch.cuda.is_available():
        raise Failure("needs a CUDA device: configurations are proved and timed on the card they are for")
    device = torch.device("cuda", torch.cuda.current_device())
    support = triton_support.support_of(device)
    if support.refusal:
        raise Failure(support.refusal)
    if args.arch not in (None, support.architecture):
        raise UsageError(f"--arch {args.arch}: this card is {support.architecture}, and no other can be timed on it")
    asked = args.ops.split(",") if args.ops else [op for op in OPS if not op.startswith("decode_")]
    cases = [
        (stage, Case(op, PINNED[args.shape], "mid", dtype, "fwdbwd", 0, norm="outside", device="cuda"))
        for stage in ([args.stage] if args.stage else STAGES)
        for op in STAGES[stage]
        if op in asked
        for dtype in args.dtypes.split(",")
    ]
    found, own = {}, kernel_configs.overrides(kernel_configs.borrowed_from(support.architecture))
    report = f"tune-{support.architecture}-{args.stage or 'all'}.json"
    for stage, case in cases:
        for launched in tuner.launches(stage, case):
            candidates = tuner.Tuner(launched, case, device, args.rounds).tune()
            found[f"{launched.stage}, {launched.key}"] = [c.as_dict() for c in candidates]
            right = [c for c in candidates if not c.refusal]
            best = min(right, key=lambda c: c.milliseconds, default=candidates[0])
            if best is not candidates[0]:
                rows = own.setdefault(f"{launched.stage}.triton", {})
                rows[launched.key] = {**best.as_row(), "proved": report}
    words = [*([args.stage] if args.stage else []), "--dtypes", args.dtypes, "--shape", args.shape]
    record = results.provenance("tune", words) | {"support": support._asdict(), "launches": found}
    for name, contents in ((f"{support.architecture}.json", own), (report, record)):
        results.say(f"wrote {results.write(args.out, name, contents)}")
    left_out = [name for name, candidates in found.items() if all("refused" in c for c in candidates)]
    for name in left_out:
        print(f"FAIL {name}: no candidate is correct")
    return FAILED if left_out else DONE
