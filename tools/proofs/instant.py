"""pytest plugin for runs that may be interrupted: failures are printed as they happen, and every test is logged.

The file that INSTANT_LOG names gets one JSON line per test. PLUG_GPUS distributes that many GPUs over the workers.

    INSTANT_LOG=tests.jsonl PYTHONPATH=src:.:tools/proofs python -m pytest -p instant -n 14 --dist worksteal tests
"""

import json
import os

import pytest

WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
GPUS = int(os.environ.get("PLUG_GPUS", "1"))
LOG = os.environ.get("INSTANT_LOG")
SHOWN = 2500
"""Last characters of a failure that are printed."""

if WORKER and GPUS > 1:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(int(WORKER[2:]) % GPUS)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if WORKER:
        return
    if report.failed:
        print(f"\nFAILED {report.nodeid} {report.when}\n{str(report.longrepr)[-SHOWN:]}\n", flush=True)
    if LOG and (report.when == "call" or report.outcome != "passed"):
        with open(LOG, "a", encoding="utf-8") as lines:
            lines.write(json.dumps([report.nodeid, report.when, report.outcome, round(report.duration, 2)]) + "\n")
