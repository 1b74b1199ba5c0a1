"""Measure the error of every operator and gradient on this machine.

On a GPU: every kernel against the eager backend, by the self-check that a
kernel gets at its first use on a card that is not verified. The answers are
remembered, and --out writes a file that can be sent in. On a CPU, and for
operators without a kernel: the relative error of every output and gradient of
the eager backend against the float64 recurrence, per dtype, with its limit.
--device chooses the device; the default is the GPU if there is one. Exit code 1
if an error is over its limit or a check of a kernel fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from wyfold.cli import DONE, FAILED, results
from wyfold.cli.arguments import device, found_device, seed_number

if TYPE_CHECKING:
    import torch

    from wyfold.cli.operators import OperatorSpec
    from wyfold.reference.error import Verdict
    from wyfold.reference.shapes import Shape

Step = TypeVar("Step")

DTYPES = ("float64", "float32", "bfloat16")
SIZES, QUICK_SIZES = (1, 200, 2, 4, 64, 64), (1, 40, 1, 2, 16, 24)
"""Sizes B, T, H, HV, K, V of the measured calls."""


@dataclass(frozen=True)
class OperatorVerdicts:
    """Verdicts on one operator in one dtype.

    Attributes:
        spec: Operator.
        dtype: Name of the dtype.
        backend: Backend that ran.
        verdicts: One per output and gradient.
    """

    spec: OperatorSpec
    dtype: str
    backend: str
    verdicts: tuple[Verdict, ...]

    @property
    def passed(self) -> bool:
        return all(verdict.passed for verdict in self.verdicts)

    def as_dict(self) -> dict[str, Any]:
        """Fields of the JSON result."""
        tensors = {
            v.name: {"value": v.measured.rms, "target": v.limits.rms, "pass": v.passed, "reason": v.reason}
            for v in self.verdicts
        }
        identity = {"operator": self.spec.name, "dtype": self.dtype, "backend": self.backend}
        return {**identity, "pass": self.passed, "tensors": tensors}

    def cells(self) -> list[tuple[str, ...]]:
        """Table rows: one for the outputs, one for the gradients."""
        rows: list[tuple[str, ...]] = []
        for what in ("outputs", "gradients"):
            some = [v for v in self.verdicts if (v.name.startswith("d")) == (what == "gradients")]
            if some:
                errors = "  ".join(f"{v.name} {v.measured.rms:.1e}" for v in some)
                worst = max(some, key=lambda v: v.measured.rms / v.limits.rms if v.limits.rms else v.measured.rms)
                nearest = f"{worst.name} {worst.measured.rms:.1e} of {worst.limits.rms:.1e}"
                verdict = "pass" if all(v.passed for v in some) else "FAIL"
                rows.append((self.spec.name, self.dtype, self.backend, what, errors, nearest, verdict))
        return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wyfold verify`."""
    parser.add_argument("--quick", action="store_true", help="small shapes, one dtype and one width of kernels")
    parser.add_argument(
        "--device",
        type=device,
        default=None,
        help="PyTorch device to measure (default: the GPU if there is one, else cpu)",
    )
    parser.add_argument("--seed", type=seed_number, default=0, help="seed of all random draws (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the results as JSON into this folder")


def run(args: argparse.Namespace) -> int:
    """Measure and report. Returns 0, or 1 if an error is over its limit or a check fails."""
    results.ready(args.out)

    import torch

    from wyfold.kernels.self_check import toolchain
    from wyfold.reference.shapes import Shape

    args.device = found_device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    missing = missing_dtypes(args.device)
    kernels = checked_kernels(args.device, quick=args.quick)
    outcomes = accuracy(Shape(*(QUICK_SIZES if args.quick else SIZES)), args.seed, args.device, missing)
    report_kernels(kernels, args.device)
    report_accuracy(outcomes, args.device, missing)
    if args.out:
        words = [*(["--quick"] if args.quick else []), "--seed", str(args.seed)]
        words += [] if args.device.type == "cpu" else ["--device", str(args.device)]
        record = results.provenance("verify", words) | {
            "seed": args.seed,
            "device": str(args.device),
            "threads": torch.get_num_threads(),
            "operators": [outcome.as_dict() for outcome in outcomes],
            "not_run": missing,
        }
        record |= {"kernels": kernels, "toolchain": dict(toolchain())} if kernels else {}
        file = results.write(args.out, f"{args.device.type}-{record['date'][:10]}-verify-errors.json", record)
        results.say(f"wrote {file}")
    passed = all(outcome.passed for outcome in outcomes) and all(record["passed"] for record in kernels)
    return DONE if passed else FAILED


def missing_dtypes(device: torch.device) -> dict[str, str]:
    """Dtype that the device does not support -> its error message. Some devices have no float64."""
    import torch

    found = {}
    for name in DTYPES:
        try:
            torch.zeros(1, dtype=getattr(torch, name)).to(device)
        except (RuntimeError, TypeError) as error:
            found[name] = str(error).partition("\n")[0]
    return found


def checked_kernels(device: torch.device, *, quick: bool) -> list[dict[str, Any]]:
    """Records of the self-checks of all kernels on a GPU; none on another device, or where kernels are refused."""
    from wyfold.cli.kernel_calls import kernel_calls
    from wyfold.kernels import self_check, table
    from wyfold.runtime.unsupported import UnsupportedError

    reason = table.refusal(device, None)
    if device.type != "cuda":
        results.say(f"no kernels on {device}: the eager backend is compared with the reference")
        return []
    if reason:
        results.say(f"no kernel is checked on {device}: {reason}")
        return []
    calls = kernel_calls(device, quick=quick)
    with self_check.collecting() as collected:
        for name, call in _with_progress("calls of kernels", calls):
            try:
                call()
            except UnsupportedError as refusal:
                results.say(f"{name} not run: {refusal}")
    return list(collected.values())


def report_kernels(kernels: list[dict[str, Any]], device: torch.device) -> None:
    """Print the table of the kernels' errors, and what failed."""
    if not kernels:
        return
    rows = []
    for record in kernels:
        errors = "  ".join(f"{name} {value['error']:.1e}" for name, value in record["tensors"].items())
        rows.append((record["operator"], errors, "pass" if record["passed"] else "FAIL"))
    results.show(f"kernels on {device}, against the eager backend in float64", ("call", "relative error", ""), rows)
    for record in kernels:
        if not record["passed"]:
            print(f"FAIL {record['refusal']}")
    print(f"{sum(record['passed'] for record in kernels)} of {len(kernels)} checks of kernels passed")


def accuracy(shape: Shape, seed: int, device: torch.device, missing: Collection[str]) -> list[OperatorVerdicts]:
    """Verdicts on the eager backend at one shape: operators and dtypes that it serves, without the missing dtypes."""
    import torch

    from wyfold.cli.operators import OPERATOR_SPECS, judged
    from wyfold.reference.shapes import Shape

    outcomes = []
    dtypes = [name for name in DTYPES if name not in missing]
    steps = {f"{name}, {dtype}": (spec, dtype) for name, spec in OPERATOR_SPECS.items() for dtype in dtypes}
    for _, (spec, name) in _with_progress("operators", steps):
        dtype = getattr(torch, name)
        backend = spec.backend(spec.on(device, spec.arguments(Shape(*QUICK_SIZES), dtype, seed)))
        if backend == "eager":
            outcomes.append(OperatorVerdicts(spec, name, backend, tuple(judged(spec, shape, dtype, seed, device))))
    return outcomes


def report_accuracy(outcomes: list[OperatorVerdicts], device: torch.device, missing: Mapping[str, str]) -> None:
    """Print the table of errors, the tensors over their limits, and dtypes that were not run."""
    columns = ("operator", "dtype", "backend", "what", "relative error of each tensor", "nearest its limit", "")
    title = f"error on {device}, against the float64 recurrence"
    results.show(title, columns, [cells for o in outcomes for cells in o.cells()], labels=4)
    failed = [(o, v) for o in outcomes for v in o.verdicts if not v.passed]
    for outcome, verdict in failed:
        print(f"FAIL {outcome.spec.name}, {outcome.dtype}: {verdict}")
    total = sum(len(outcome.verdicts) for outcome in outcomes)
    for dtype, reason in missing.items():
        print(f"{dtype} not run: {device} has none ({reason})")
    print(f"{total - len(failed)} of {total} tensors within their limits")


def _with_progress(what: str, steps: Mapping[str, Step]) -> Iterator[tuple[str, Step]]:
    """Iterate over named steps: a bar on a terminal; log lines elsewhere, or without rich."""
    if importlib.util.find_spec("rich") is not None and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=len(steps))
            for number, (name, step) in enumerate(steps.items()):
                bar.update(task, completed=number, description=name)
                yield name, step
        return
    results.say(f"{len(steps)} {what}")
    for number, (name, step) in enumerate(steps.items(), 1):
        results.say(f"{number}/{len(steps)} {name}")
        yield name, step
