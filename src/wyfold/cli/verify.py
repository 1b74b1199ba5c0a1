"""Measure the error of every operator and gradient on this machine.

Without --row and --tier, on a GPU: every kernel against the eager backend, by
the self-check that a kernel gets at its first use on a card that is not
verified. The answers are remembered, and --out writes a file that can be sent
in. On a CPU, and for operators without a kernel: the relative error of every
output and gradient of the eager backend against the float64 recurrence, per
dtype, with its limit. --device chooses the device; the default is the GPU if
there is one.

With --row or --tier: numbered checks of the reliability scorecard, on the CPU.
A check that did not run is "not run", never "pass". Exit code 1 if an error is
over its limit or a check fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wyfold.cli import DONE, FAILED, UsageError, results
from wyfold.cli.arguments import device, found_device, seed_number, whole
from wyfold.cli.catalog import SCORECARD_CHECKS

if TYPE_CHECKING:
    import torch

    from wyfold.cli.operators import OperatorSpec
    from wyfold.cli.scorecard import CheckRecord
    from wyfold.reference.error import Verdict
    from wyfold.reference.shapes import Shape

DTYPES = ("float64", "float32", "bfloat16")
SIZES, QUICK_SIZES = (1, 200, 2, 4, 64, 64), (1, 40, 1, 2, 16, 24)
"""Sizes B, T, H, HV, K, V of the measured calls."""
TIERS = {"cpu": SCORECARD_CHECKS}


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
    parser.add_argument("--tier", choices=tuple(TIERS), help="run all checks of the scorecard for this tier")
    parser.add_argument(
        "--row", type=whole(1), action="append", metavar="N", help="run check N of the scorecard; may be repeated"
    )
    parser.add_argument("--quick", action="store_true", help="small shapes and a tenth of the cases, for a first look")
    parser.add_argument(
        "--device",
        type=device,
        default=None,
        help="PyTorch device to measure (default: the GPU if there is one, else cpu; cpu with --row and --tier)",
    )
    parser.add_argument("--seed", type=seed_number, default=0, help="seed of all random draws (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the results as JSON into this folder")


def run(args: argparse.Namespace) -> int:
    """Measure and report. Returns 0, or 1 if an error is over its limit or a check fails."""
    for number in args.row or ():
        if number not in SCORECARD_CHECKS:
            there = ", ".join(map(str, SCORECARD_CHECKS))
            raise UsageError(f"--row {number}: the scorecard has no check of this number; there are {there}")
    numbers = sorted({*(args.row or ()), *(TIERS[args.tier] if args.tier else ())})
    if numbers and args.device not in (None, "cpu"):
        raise UsageError(
            f"--device {args.device}: checks of the scorecard run on the CPU only; leave out --row and --tier"
        )
    results.ready(args.out)

    import torch

    from wyfold.cli.scorecard import FAIL
    from wyfold.kernels.self_check import toolchain
    from wyfold.reference.shapes import Shape

    if args.device is None:
        args.device = "cuda" if torch.cuda.is_available() and not numbers else "cpu"
    args.device = found_device(args.device)
    words = [word for number in args.row or [] for word in ("--row", str(number))]
    words += (
        (["--tier", args.tier] if args.tier else []) + (["--quick"] if args.quick else []) + ["--seed", str(args.seed)]
    )
    if args.device.type != "cpu":
        words += ["--device", str(args.device)]
    found: dict[str, Any]
    if numbers:
        records = scorecard(numbers, args.seed, args.quick)
        report_rows(records)
        found = {"rows": [record.as_dict() for record in records]}
        name = f"tier-{args.tier}" if args.tier else f"rows-{'-'.join(map(str, numbers))}"
        failed = any(record.outcome == FAIL for record in records)
    else:
        missing = missing_dtypes(args.device)
        kernels = checked_kernels(args.device, quick=args.quick)
        outcomes = accuracy(Shape(*(QUICK_SIZES if args.quick else SIZES)), args.seed, args.device, missing)
        report_kernels(kernels, args.device)
        report_accuracy(outcomes, args.device, missing)
        found, name = {"operators": [outcome.as_dict() for outcome in outcomes], "not_run": missing}, "errors"
        found |= {"kernels": kernels, "toolchain": dict(toolchain())} if kernels else {}
        failed = not all(outcome.passed for outcome in outcomes) or not all(record["passed"] for record in kernels)
    if args.out:
        where = {"device": str(args.device), "threads": torch.get_num_threads()}
        measured = {"seed": args.seed, **where, **found}
        record = results.provenance("verify", words) | measured
        file = results.write(args.out, f"{args.device.type}-{record['date'][:10]}-verify-{name}.json", record)
        results.say(f"wrote {file}")
    return FAILED if failed else DONE


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
    with _progress("calls of kernels", len(calls)) as progress, self_check.collecting() as collected:
        for name, call in calls.items():
            progress.begin(name)
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
    dtypes = {name: getattr(torch, name) for name in DTYPES if name not in missing}
    with _progress("operators", len(OPERATOR_SPECS) * len(dtypes)) as progress:
        for name, spec in OPERATOR_SPECS.items():
            for dtype in dtypes:
                progress.begin(f"{name}, {dtype}")
                backend = spec.backend(spec.on(device, spec.arguments(Shape(*QUICK_SIZES), dtypes[dtype], seed)))
                if backend == "eager":
                    found = tuple(judged(spec, shape, dtypes[dtype], seed, device))
                    outcomes.append(OperatorVerdicts(spec, dtype, backend, found))
    return outcomes


def scorecard(numbers: list[int], seed: int, quick: bool) -> list[CheckRecord]:
    """Run checks of the scorecard, in order."""
    from wyfold.cli.scorecard import run_check
    from wyfold.cli.scorecard.check import Scope

    records = []
    with _progress("checks", len(numbers)) as progress:
        for number in numbers:
            progress.begin(f"check {number}")
            records.append(run_check(number, Scope(seed, quick, progress.tick)))
    return records


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


def report_rows(records: list[CheckRecord]) -> None:
    """Print the table of the scorecard, the failed cases, and why checks were not run."""
    from wyfold.cli.scorecard import FAIL, NOT_RUN, PASS

    columns = ("check", "promise", "target", "outcome", "value", "cases", "seconds")
    cells = [(str(r.row), r.promise, r.target, r.outcome, r.value, str(r.cases), f"{r.seconds:.1f}") for r in records]
    results.show("scorecard", columns, cells, labels=2)
    for record in records:
        for line in record.broken:
            print(f"check {record.row} failed: {line}")
        if record.note:
            print(f"check {record.row} not run: {record.note}")
    counts = {outcome: sum(record.outcome == outcome for record in records) for outcome in (PASS, FAIL, NOT_RUN)}
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))


class _Lines:
    """Progress as log lines, without a terminal or without rich."""

    def __init__(self, total: int):
        self.total, self.number = total, 0

    def begin(self, title: str) -> None:
        self.number += 1
        results.say(f"{self.number}/{self.total} {title}")

    def tick(self) -> None:
        """Count a case of the current step; not logged."""


class _Bar:
    """Progress bar on a terminal."""

    def __init__(self, bar: Any, total: int):
        self.bar, self.task, self.cases, self.begun, self.title = bar, bar.add_task("", total=total), 0, 0, ""

    def begin(self, title: str) -> None:
        self.bar.update(self.task, completed=self.begun, description=title)
        self.title, self.begun, self.cases = title, self.begun + 1, 0

    def tick(self) -> None:
        """Count a case of the current step."""
        self.cases += 1
        self.bar.update(self.task, description=f"{self.title}, {self.cases} cases")


class _Drawn(AbstractContextManager[_Bar]):
    def __init__(self, total: int):
        from rich.console import Console
        from rich.progress import Progress

        self.bar, self.total = Progress(console=Console(stderr=True), transient=True), total

    def __enter__(self) -> _Bar:
        self.bar.start()
        return _Bar(self.bar, self.total)

    def __exit__(self, *_: object) -> None:
        self.bar.stop()


def _progress(what: str, total: int) -> AbstractContextManager[_Lines | _Bar]:
    if importlib.util.find_spec("rich") is not None and sys.stderr.isatty():
        return _Drawn(total)
    results.say(f"{total} {what}")
    return nullcontext(_Lines(total))
