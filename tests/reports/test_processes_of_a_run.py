"""The processes of `wyfold train` compare their commands and folders before they begin.

Each process trusted its own command line: with another learning rate on one of them, the run continued and was wrong
without an error. Without a shared folder, a checkpoint contained only the shards of the processes that see the folder,
counted as complete, and could not be loaded.
"""

import contextlib
import io
import tempfile
from pathlib import Path

import pytest
import torch
from tests.context_parallel.ranks import Case, failures_on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from wyfold.cli import main
from wyfold.cli.train import sharded_checkpoint
from wyfold.context_parallel.agreement import check_agreement

TINY = "--depth 1 --width 8 --heads 1 --head-dim 8 --window 8 --batch 1 --length 16 --warmup 1 --eval-bytes 32".split()


def folder():
    made = Path(tempfile.mkdtemp(prefix="wyfold-"))
    (made / "text").write_text("one two three " * 40)
    return made


def folder_with_a_run():
    made = folder()
    assert main(command(made, "run 0")) == 0
    return made


def command(folder, out, *words):
    data = ["--data", folder / "text", "--out", folder / out, "--layers", "gdn"]
    return ["train", *map(str, [*data, *TINY, "--steps", 2, *words])]


def train(folder, out, *words):
    """Exit status and errors of a process that is started as by torchrun."""
    pytest.MonkeyPatch().setenv("TORCHELASTIC_RUN_ID", "one")
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        status = main(command(folder, out, *words))
    return status, errors.getvalue()


def other_learning_rate(given, group):
    status, said = train(given, "run", "--lr", 0.01 * (1 + group.rank()))
    assert status == 2, said
    assert "--lr must be the same on all ranks, got 0.01 on rank 0; 0.02 on rank 1; start every process by" in said
    assert not list(given.glob("run/*"))


def other_cp_size(given, group):
    status, said = train(given, "run", "--cp", 1 + group.rank())
    assert status == 2 and "--cp: processes: cp must be the same on all ranks, got 1 on rank 0; 2 on rank 1" in said


def checkpoint_on_one_host(given, group):
    """Only one process sees a checkpoint, as with a separate folder on each host."""
    status, said = train(given, f"run {group.rank()}")
    assert status == 2, said
    assert "the newest checkpoint must be the same on all ranks, got step-00000002 on rank 0; none on rank 1" in said


def separate_folders(given, group):
    tensors = {"x": distribute_tensor(torch.arange(6.0), init_device_mesh("cpu", (group.size(),)), [Shard(0)])}
    sharded_checkpoint.write(given / "shared", tensors)
    with pytest.raises(OSError, match=r"does not see shard-0000.* all processes of a run must share its folder"):
        sharded_checkpoint.write(given / str(group.rank()), tensors)


def long_values(given, group):
    """Values that are too long for a comparison are compared by digest, and not refused."""
    alike = {f"name {number}": "x" * 5000 for number in range(20)}
    check_agreement("op", alike, torch.device("cpu"), group)
    with pytest.raises(ValueError, match="op: what was asked must be the same on all ranks"):
        check_agreement("op", alike | {"last": group.rank()}, torch.device("cpu"), group)


def table(*runs, prepare=folder):
    return {run.__name__: Case(prepare, run) for run in runs}


# A run destroys its process group, so each case creates one.
RATE, CHECKPOINT, OTHERS = (
    table(other_learning_rate),
    table(checkpoint_on_one_host, prepare=folder_with_a_run),
    table(separate_folders, long_values, other_cp_size),
)


@pytest.mark.long
@pytest.mark.parametrize("cases", ["RATE", "CHECKPOINT", "OTHERS"])
def test_processes_compare_their_commands(cases, tmp_path):
    assert not failures_on_ranks([2], tmp_path, __name__, cases)
