"""The GPU tests under another Triton, and times at four shapes, next to those of the installed Triton.

    PYTHONPATH=src:. python tools/proofs/toolchain.py --triton FOLDER --commit HASH --out DIR

FOLDER is an unpacked Triton package (`pip install --no-deps --target FOLDER triton==...`), which is placed in front of
the installed one. Without --triton the installed one is tested. First the four shapes are timed, each Triton in its own
process, several times in turn. Then pytest runs the tests of TESTS until the budget ends; failures are printed as they
happen. DIR gets toolchain-VERSION.json. The exit status is 1 if a test failed, if tests were left, or if none ran.

Both use a cache of compiled kernels in --cache, so that a second run on the same machine compiles nothing.
"""

import argparse
import collections
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from wyfold.cli import results

TESTS = (
    "tests/accuracy",
    "tests/runtime",
    "tests/kernels",
    *(
        f"tests/ops/test_{name}.py"
        for name in (
            *("delta_rule", "gated_delta_rule", "kda", "delta_call", "delta_dtypes"),
            *("serving_delta", "serving_conv", "serving_ttt", "ttt_linear", "ttt_options"),
            *("conv", "norm", "gates", "solve"),
        )
    ),
)
"""The delta family, serving and TTT on kernels: accuracy, bits, launches, replays and the single stages."""

SHAPES = {
    "gdn": (4, 8192, 32, 32, 128, 128),
    "kda": (4, 8192, 32, 32, 128, 128),
    "delta_rule": (4, 8192, 32, 32, 128, 128),
    "ttt": (16, 4096, 32, 32, 64, 64),
}
"""Operator by its name in `wyfold bench` -> B, T, H, HV, K, V. The GPU bounds the times, not the host."""

TURNS = 2
"""Processes of each Triton that time the shapes, alternately."""
ROUNDS = 8
"""Bursts of calls in each process."""
TOLERANCE = 0.03
"""Relative difference of a time that is reported as one."""
SUMMARY = 10
"""Seconds of the budget that are kept for the end."""


def timed(device: str) -> dict[str, Any]:
    """Median milliseconds of every shape in this process: on the device, and of the host inside the call."""
    import torch

    from wyfold.cli.bench.cases import Case
    from wyfold.cli.bench.implementations import implementations_of, make_call
    from wyfold.cli.bench.timing import Gpu, interleaved
    from wyfold.reference.shapes import Shape

    triton = __import__("triton").__version__
    gpu = Gpu() if device == "cuda" else None
    rows = {}
    for op, sizes in SHAPES.items():
        shape = Shape(*sizes) if gpu else Shape(1, 64, 1, 1, 16, 16)
        gate = "mid" if op in ("gdn", "kda") else "none"
        for mode in ("fwd", "fwdbwd"):
            dtype = "bfloat16" if gpu else "float32"
            case = Case(op, shape, gate, dtype, mode, 0, norm="outside", device=device)
            drawn = case.arguments()
            run = make_call(implementations_of(case, [])[0], case, drawn)
            if gpu:
                (turns,) = gpu.interleaved([run], ROUNDS)
                rows[f"{op} {mode}"] = {key: statistics.median(getattr(turns, key)) for key in ("device", "host")}
            else:
                rows[f"{op} {mode}"] = {"device": statistics.median(interleaved([run], 2)[0]), "host": 0.0}
    return {"triton": triton, "torch": torch.__version__, "rows": rows}


def environment(triton: str, cache: Path) -> dict[str, str]:
    """Environment of a process that uses the Triton in a folder; "" is the installed one."""
    paths = [triton, "src", ".", "tools/proofs"]
    fixed = {
        "PYTHONPATH": ":".join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "TRITON_STORE_BINARY_ONLY": "1",
        "TRITON_CACHE_DIR": str(cache),
    }
    return os.environ | fixed


def compare(args: argparse.Namespace, record: dict[str, Any]) -> None:
    """Time the shapes under both Tritons alternately; the least of the medians counts."""
    found: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for _ in range(TURNS):
        for triton in dict.fromkeys((args.triton, "")):
            command = [sys.executable, __file__, "--time", args.device, "--out", str(args.out)]
            done = subprocess.run(
                command, env=environment(triton, args.cache), stdout=subprocess.PIPE, text=True, check=True
            )
            answer = json.loads(done.stdout.splitlines()[-1])
            found[answer["triton"]].append(answer["rows"])
            record["torch"] = answer["torch"]
    record["milliseconds"] = {
        triton: {row: {key: min(turn[row][key] for turn in turns) for key in turns[0][row]} for row in turns[0]}
        for triton, turns in found.items()
    }


def test(args: argparse.Namespace, record: dict[str, Any], seconds: float) -> None:
    """Run the tests for this many seconds, and count their outcomes."""
    log = args.out / "tests.jsonl"
    log.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "instant", "-p", "no:benchmark", "-p", "no:cacheprovider"]
    command += ["-n", str(args.workers), "--dist", "worksteal", *(args.test or TESTS)]
    running = subprocess.Popen(command, env=environment(args.triton, args.cache) | {"INSTANT_LOG": str(log)})
    try:
        record["status"] = running.wait(seconds)
    except subprocess.TimeoutExpired:
        running.send_signal(signal.SIGINT)  # pytest then ends its workers
        running.wait()
        record["status"] = "out of time"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    record["tests"] = dict(collections.Counter(outcome for _, _, outcome, _ in lines))
    record["failed"] = [name for name, _, outcome, _ in lines if outcome == "failed"]
    record["slowest"] = sorted(((seconds, name) for name, _, _, seconds in lines), reverse=True)[:10]


def report(record: dict[str, Any], tested: bool) -> int:
    times = record.get("milliseconds", {})
    for row in next(iter(times.values()), {}):
        words = [
            f"{triton}: {rows[row]['device']:8.3f} (host {rows[row]['host']:6.3f})" for triton, rows in times.items()
        ]
        theirs = [rows[row]["device"] for rows in times.values()]
        ratio = theirs[0] / theirs[-1]
        print(f"{row:18} {'  '.join(words)}  {ratio:6.3f}{' *' * (abs(ratio - 1) > TOLERANCE)}")
    tests = record.get("tests", {})
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(tests.items()))
    print(
        f"Triton {record['triton']}: {counts or 'no tests'}; pytest: {record.get('status')}; {record['seconds']:.0f} s"
    )
    for name in record.get("failed", ()):
        print(f"    failed: {name}")
    return 0 if not tested or (tests.get("passed") and record["status"] == 0) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("test", nargs="*", help="files or folders of tests (default: those of TESTS)")
    parser.add_argument("--triton", default="", help="folder with an unpacked Triton (default: the installed one)")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=280, help="seconds (default: %(default)s)")
    parser.add_argument("--workers", default="14", help="processes of pytest (default: %(default)s)")
    parser.add_argument(
        "--cache", type=Path, default=Path(tempfile.gettempdir(), "wyfold-toolchain"), help="of compiled kernels"
    )
    parser.add_argument("--only", choices=("times", "tests"), help="one of the two parts")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--time", help=argparse.SUPPRESS)  # internal: the child process that times the shapes
    args = parser.parse_args()
    if args.time:
        print(json.dumps(timed(args.time)))
        return 0
    began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    query = [sys.executable, "-c", "import triton; print(triton.__version__)"]
    used = environment(args.triton, args.cache)
    version = subprocess.run(query, env=used, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    record: dict[str, Any] = {"triton": version, "commit": args.commit}
    if args.only != "tests":
        compare(args, record)
        results.write(args.out, f"toolchain-{version}.json", record)
    if args.only != "times":
        test(args, record, args.budget - SUMMARY - (time.monotonic() - began))
    record["seconds"] = time.monotonic() - began
    results.write(args.out, f"toolchain-{version}.json", record)
    return report(record, args.only != "times")


if __name__ == "__main__":
    sys.exit(main())
