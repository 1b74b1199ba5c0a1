"""Ranks of a gloo group: processes that share one import, forked by a program of its own.

    python -m tests.context_parallel.ranks FOLDER MODULE CASES WORLD...

imports MODULE and computes what its table CASES has to compare with, once. For each WORLD, the number of ranks, it then
forks these, which run every case and leave in FOLDER what they had to say. A test process must not fork itself: by
then it may have threads.
"""

import gc
import importlib
import json
import os
import subprocess
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
from tests.conftest import BOUNDS_WARNING, NUMPYS_WARNINGS, YOUNG, interpreting, mend_interpreter

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 40


@dataclass(frozen=True)
class Case:
    """Something that all ranks do together.

    Attributes:
        prepare: Called once, before there are any ranks; what it returns all of them find.
        run: Called on each rank with that and the group; raises what is wrong.
        most, least: Ranks; where there are more, or fewer, it is left out.
    """

    prepare: Callable[[], Any]
    run: Callable[[Any, dist.ProcessGroup], None]
    most: int = 8
    least: int = 1


def refusals(worlds: Sequence[int], folder: Path, module: str, cases: str, dying: Sequence[int] = ()) -> str:
    """What ranks found wrong with the cases of a module's table; empty if nothing.

    Args:
        worlds: Numbers of ranks, one after another.
        folder: Empty.
        module, cases: Where the table is.
        dying: Ranks that are not there to say anything.
    """
    command = [sys.executable, "-m", "tests.context_parallel.ranks", str(folder), module, cases, *map(str, worlds)]
    # Ranks here have CPUs. With a GPU in sight autograd starts threads for it, which those that are forked have not.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    found = ""
    for world, rank in ((size, rank) for size in worlds for rank in range(size)):
        written = folder / f"{rank} of {world}.json"
        if rank in dying:
            continue
        if not written.exists():
            return f"rank {rank} of {world} ended early\n{done.stdout}\n{done.stderr}"
        for case, said in json.loads(written.read_text()).items():
            if said:
                found += f"\n{case}, rank {rank} of {world}: {said}"
    return found


def main(folder: Path, module: str, table: str, worlds: Sequence[int]) -> None:
    warnings.simplefilter("error")
    if interpreting():
        mend_interpreter()
        for by in NUMPYS_WARNINGS:
            warnings.filterwarnings("ignore", category=RuntimeWarning, module=by)
        warnings.filterwarnings("ignore", BOUNDS_WARNING, DeprecationWarning)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # as in every test: memory that nobody wrote is NaN
    cases: dict[str, Case] = getattr(importlib.import_module(module), table)
    given = {name: case.prepare() for name, case in cases.items()}
    gc.set_threshold(YOUNG)
    gc.freeze()  # no rank looks among what it shares for cycles, which would copy it
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
            said = _run(rank, world, folder, cases, given)
            (folder / f"{rank} of {world}.json").write_text(json.dumps(said))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)
    return pid


def _run(rank: int, world: int, folder: Path, cases: dict[str, Case], given: dict[str, Any]) -> dict[str, str]:
    store = dist.FileStore(str(folder / f"store of {world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT_S))
    said = {}
    for name, case in cases.items():
        if not case.least <= world <= case.most:
            continue
        try:
            case.run(given[name], dist.group.WORLD)
            said[name] = ""
        except Exception:
            said[name] = traceback.format_exc()
    return said


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:4], [int(world) for world in sys.argv[4:]])
