"""Show this machine's hardware and versions, and the backend of each operator.

The first line says what runs where. On a GPU the report also says why operators do not run on other backends.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from wyfold.cli import DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wyfold doctor`."""
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="also write the report into this folder, as doctor.json"
    )


def run(args: argparse.Namespace) -> int:
    """Print the report. Returns 0."""
    from wyfold.cli import results
    from wyfold.ops.doctor import doctor

    results.ready(args.out)
    report = doctor()
    print(json.dumps(report.as_dict(), indent=1) if args.json else report)
    if args.out:
        results.say(f"wrote {results.write(args.out, 'doctor.json', report.as_dict())}")
    return DONE
