"""Seconds of the first forward and the first backward of each operator, in a process without any cache.

    PYTHONPATH=src:. python tools/proofs/first_calls.py --commit HASH --out DIR

Each operator runs in a separate process whose home directory, including every cache of compiled kernels, is empty. The
process imports the library and creates its tensors while others do the same. Then one process at a time makes its
calls, with nothing else running. PyTorch imports sympy for the first backward with an incoming gradient (not for one
from a loss), for any library's operator: this import is done before and reported separately. The last column is the
user's total waiting time. With --profile Triton is imported before, and its compile times of each kernel are recorded.
DIR gets first_calls.json, rewritten after each operator.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from wyfold.cli import results

LIMIT = 5.0
"""Largest seconds in either direction."""
WAITING = 6
"""Processes that prepare in parallel."""
LONGEST = 60
"""Seconds after which a process is killed."""

CHUNK, TOKENS, ONE = (1, 512, 4, 4, 128, 128), (2, 64, 4, 4, 128, 128), (4, 1, 4, 4, 128, 128)
CASES = {
    "gdn": CHUNK,
    "kda": CHUNK,
    "delta_rule": CHUNK,
    "ttt": (1, 512, 4, 4, 64, 64),
    "recurrent_gdn": TOKENS,
    "recurrent_kda": TOKENS,
    "recurrent_delta_rule": TOKENS,
    "decode_gdn": ONE,
    "decode_kda": ONE,
    "solve": CHUNK,
    "kkt": CHUNK,
    "conv": CHUNK,
    "norm": CHUNK,
    "l2norm": CHUNK,
    "gdn_gate": CHUNK,
    "kda_gate": CHUNK,
}
"""Operators by the names of `wyfold bench`, and their sizes."""

SERVED = (
    "serving.prefill gated_delta_rule bfloat16",
    "serving.prefill kda bfloat16",
    "serving.verify kda bfloat16",
    "serving.decode_packed kda",
    "serving.conv1d_update",
    "serving.conv1d_prefill",
    "serving.ttt_decode D64 float32",
)
"""Calls of `memory_calls.py`."""

EMPTY = ("HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")


# --- a process that calls one operator -------------------------------------------------------------------------------


def call(name: str, device: str, profile: bool) -> dict[str, Any]:
    """Import and prepare, wait for the start signal, then call."""
    import torch

    from wyfold.cli.bench.cases import Case, leaves
    from wyfold.cli.bench.implementations import implementations_of
    from wyfold.cli.bench.memory import first_backward
    from wyfold.cli.catalog import OPS
    from wyfold.cli.operators import OPERATOR_SPECS
    from wyfold.reference.shapes import Shape

    place = torch.device(device)

    def finish() -> None:
        if place.type == "cuda":
            torch.cuda.synchronize()

    def timed(what: Any) -> tuple[Any, float]:
        began = time.perf_counter()
        result = what()
        finish()
        return result, time.perf_counter() - began

    _, pytorch = timed(lambda: first_backward(device))
    found: dict[str, Any] = {"op": name, "pytorch_first_backward": pytorch, "forward": None, "backward": None}
    backward = None
    if name in CASES:
        gate = "mid" if name.endswith(("gdn", "kda")) else "none"
        dtype = "bfloat16" if place.type == "cuda" else "float32"
        case = Case(name, Shape(*CASES[name]), gate, dtype, "fwd", 0, norm="outside", device=device)
        drawn = case.arguments()
        ours = implementations_of(case, [])[0]
        asked = leaves(drawn) if OPERATOR_SPECS[OPS[name]].backward and not case.decoding else {}
        ready = drawn | ours.prepare(drawn) | asked
        fed = case.incoming(drawn)

        def forward() -> Any:
            return ours.call(ready)

        if asked:

            def backward(o: Any) -> Any:
                return torch.autograd.grad(o, list(asked.values()), fed)
    else:
        from tools.proofs import memory_calls

        forward = memory_calls.served(place)[name]
    kernels = watched_kernels() if profile else []
    finish()
    print("ready", flush=True)
    sys.stdin.readline()
    began, modules = time.perf_counter(), set(sys.modules)
    o, found["forward"] = timed(forward)
    found["imported"] = _modules_per_package(set(sys.modules) - modules)
    modules = set(sys.modules)
    if backward is not None:
        _, found["backward"] = timed(lambda: backward(o))
        found["imported_backward"] = _modules_per_package(set(sys.modules) - modules)
    if profile:
        found["kernels"] = [kernel | {"done": kernel["done"] - began} for kernel in kernels]
    return found


def watched_kernels() -> list[dict[str, Any]]:
    """A list to which Triton's compile listener appends the seconds of each stage of each kernel; imports Triton."""
    knobs = importlib.import_module("triton").knobs
    found: list[dict[str, Any]] = []

    def listener(src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        stages = {name: us / 1e6 for name, us in times.lowering_stages}
        stages |= {"front end": times.ir_initialization / 1e6, "store": times.store_results / 1e6}
        found.append({"kernel": src.fn.__name__, "done": time.perf_counter(), "cached": cache_hit, **stages})

    knobs.compilation.listener = listener
    return found


def _modules_per_package(modules: set[str]) -> dict[str, int]:
    """Number of imported modules per package."""
    counts: dict[str, int] = {}
    for name in modules:
        package = name.partition(".")[0]
        counts[package] = counts.get(package, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1])[:8])


# --- the parent process
# ------------------------------------------------------------------------------------------------


class Child:
    """One child process with an empty home directory."""

    def __init__(self, name: str, device: str, profile: bool):
        self.name, self.home = name, tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        empty = {variable: str(Path(self.home.name, variable.lower())) for variable in EMPTY}
        for folder in empty.values():
            Path(folder).mkdir()
        command = [sys.executable, "-m", "tools.proofs.first_calls", "--call", name, "--device", device]
        command += ["--out", self.home.name] + ["--profile"] * profile
        self.running = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | empty | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def ready(self) -> bool:
        """Wait until it is ready; False if it ended instead."""
        output = self.running.stdout
        return output is not None and output.readline().strip() == "ready"

    def answer(self) -> dict[str, Any]:
        """Send the start signal and read the result."""
        try:
            output, errors = self.running.communicate("go\n", timeout=LONGEST)
            return json.loads(output.splitlines()[-1])
        except subprocess.TimeoutExpired:
            return {"op": self.name, "failed": f"nothing after {LONGEST} s"}
        except (IndexError, json.JSONDecodeError):
            return {"op": self.name, "failed": errors.strip().splitlines()[-1:] or "it said nothing"}
        finally:
            self.end()

    def end(self) -> None:
        if self.running.poll() is None:
            self.running.kill()
        self.running.wait()
        self.home.cleanup()


def measure(names: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """The record of all operators, written after each result."""
    began = time.time()
    record: dict[str, Any] = {
        "what": "seconds of the first forward and of the first backward, each operator in a process without any cache",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": args.commit,
        **machine(),
        "rows": [],
        "not_run": list(names),
    }
    results.write(args.out, "first_calls.json", record)
    for first in range(0, len(names), WAITING):
        if time.time() - began > args.budget - 40:
            break
        batch = [Child(name, args.device, args.profile) for name in names[first : first + WAITING]]
        try:
            for process in batch:
                process.ready()
            for process in batch:
                if time.time() - began > args.budget - 15:
                    break
                record["rows"].append(process.answer())
                record["not_run"].remove(process.name)
                record["seconds"] = time.time() - began
                results.write(args.out, "first_calls.json", record)
        finally:
            for process in batch:
                process.end()
    return record


def machine() -> dict[str, Any]:
    """Hardware and versions, queried by another process, so that this one does not use the GPU."""
    code = "import json; from wyfold.ops import doctor; print(json.dumps([doctor.hardware(), doctor.versions()]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    hardware, versions = json.loads(done.stdout)
    return {"hardware": hardware, "versions": versions}


def report(record: dict[str, Any]) -> int:
    print(f"{'':44} {'forward':>8} {'backward':>9} {'PyTorch':>8} {'in all':>7}")
    over = list(record["not_run"])
    for row in record["rows"]:
        if "failed" in row:
            print(f"{row['op']:44} {row['failed']}")
            over.append(row["op"])
            continue
        backward = row["backward"]
        parts = [row["forward"], backward or 0, row["pytorch_first_backward"] if backward else 0]
        told = [f"{x:.2f}" if x else "" for x in parts]
        print(f"{row['op']:44} {told[0]:>8} {told[1]:>9} {told[2]:>8} {sum(parts):7.2f}")
        if max(parts[:2]) > LIMIT:
            over.append(row["op"])
        for kernel in row.get("kernels", ()):
            stages = {k: v for k, v in kernel.items() if isinstance(v, float) and k != "done"}
            words = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in stages.items())
            print(f"    {kernel['kernel']:40} at {kernel['done']:.2f}: {words}")
    print(f"not run, or over {LIMIT:g} s: {', '.join(over) or 'none'}; {record.get('seconds', 0):.0f} s")
    return 1 if over else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", nargs="*", help="operators (default: all)")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=200, help="seconds (default: %(default)s)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", action="store_true", help="what Triton takes over each kernel; imports it before")
    parser.add_argument("--call", help=argparse.SUPPRESS)  # internal: the child process of one operator
    args = parser.parse_args()
    if args.call:
        print(json.dumps(call(args.call, args.device, args.profile)))
        return 0
    return report(measure(args.op or [*CASES, *SERVED], args))


if __name__ == "__main__":
    sys.exit(main())
