"""Runs test cases on the ranks of a gloo group: processes forked from one program, which share its imports.

    python -m tests.context_parallel.ranks FOLDER MODULE CASES WORLD...

imports MODULE and computes the expected results of its table CASES once. For each WORLD, a number of ranks, it then
forks the ranks. They run every case and write their failures to FOLDER. This is a separate program because a test
process may have threads, and then must not fork.
"""

import gc
import importlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.conftest import BOUNDS_WARNING, GC_THRESHOLD, NUMPY_WARNING_MODULES, interpreting, repair_interpreter
from tests.processes import ROOT, with_package

TIMEOUT_S = 40


@dataclass(frozen=True)
class Case:
    """A test case that all ranks run together.

    Attributes:
        prepare: Called once before the ranks are forked; all of them get its result.
        run: Called on each rank with that result and the group; raises on failure.
        most, least: Maximum and minimum number of ranks; other groups skip the case.
    """

    prepare: Callable[[], Any]
    run: Callable[[Any, dist.ProcessGroup], None]
    most: int = 8
    least: int = 1


def failures_on_ranks(worlds: Sequence[int], folder: Path, module: str, cases: str, dying: Sequence[int] = ()) -> str:
    """Run a module's table of cases, and return the failures of all ranks as text; "" if there are none.

    Args:
        worlds: Numbers of ranks, run one after another.
        folder: Empty folder for the ranks' reports.
        module, cases: Module and name of the table.
        dying: Ranks that die in a case and report nothing.
    """
    command = ["-m", "tests.context_parallel.ranks", folder, module, cases, *worlds]
    # Ranks run on CPUs. If a GPU is visible, autograd starts threads for it, which forked processes do not have.
    done = with_package().run(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, cwd=ROOT)
    found = ""
    for world, rank in ((size, rank) for size in worlds for rank in range(size)):
        written = folder / f"{rank} of {world}.json"
        if rank in dying:
            continue
        if not written.exists():
            return f"rank {rank} of {world} ended early\n{done.stdout}\n{done.stderr}"
        for case, report in json.loads(written.read_text()).items():
            if report:
                found += f"\n{case}, rank {rank} of {world}: {report}"
    return found


def main(folder: Path, module: str, table: str, worlds: Sequence[int]) -> None:
    warnings.simplefilter("error")
    if interpreting():
        repair_interpreter()
        for by in NUMPY_WARNING_MODULES:
            warnings.filterwarnings("ignore", category=RuntimeWarning, module=by)
        warnings.filterwarnings("ignore", BOUNDS_WARNING, DeprecationWarning)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # as in every test: uninitialized memory is NaN
    cases: dict[str, Case] = getattr(importlib.import_module(module), table)
    given = {name: case.prepare() for name, case in cases.items()}
    gc.set_threshold(GC_THRESHOLD)
    gc.freeze()  # the collector of a rank must not visit shared objects, which would copy their pages
    for world in worlds:
        children = [pid for rank in range(world) if (pid := _forked(rank, world, folder, cases, given))]
        for pid in children:
            os.waitpid(pid, 0)


def _forked(rank: int, world: int, folder: Path, cases: dict[str, Case], given: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            # PyTorch replaces its thread pool in the first use after a fork. Threads of autograd that come first race
            # for that, and one of them aborts the process.
            torch.set_num_threads(1)
            reports = _run(rank, world, folder, cases, given)
            (folder / f"{rank} of {world}.json").write_text(json.dumps(reports))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)
    return pid


def _run(rank: int, world: int, folder: Path, cases: dict[str, Case], given: dict[str, Any]) -> dict[str, str]:
    store = dist.FileStore(str(folder / f"store of {world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT_S))
    reports = {}
    for name, case in cases.items():
        if not case.least <= world <= case.most:
            continue
        try:
            case.run(given[name], dist.group.WORLD)
            reports[name] = ""
        except Exception:
            reports[name] = traceback.format_exc()
    return reports


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:4], [int(world) for world in sys.argv[4:]])
