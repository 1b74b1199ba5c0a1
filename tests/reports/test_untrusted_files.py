"""A folder from another person runs no code.

The index of a sharded checkpoint was a pickle of `torch.distributed.checkpoint`, and `wyfold generate FOLDER` unpickled
it. A folder that was passed on as a run could execute any command.
"""

import hashlib
import io
import json
import os
import pickle
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.context_parallel.ranks import Case, failures_on_ranks
from tests.extras import need_plotly
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from wyfold.cli import main
from wyfold.cli.train import sharded_checkpoint

TINY = "--depth 1 --width 8 --heads 1 --head-dim 8 --window 8 --batch 1 --length 8 --warmup 1 --eval-bytes 16".split()
TENSORS = {
    "matrix": torch.arange(12.0).view(4, 3),
    "half": torch.arange(5).bfloat16(),
    "number": torch.tensor(3.5),
    "bytes": torch.arange(7, dtype=torch.uint8),
}


class Payload:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run of one process, and the text that it was trained on; to be copied, not changed."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "text").write_text("one two three " * 20)
    assert main(words(folder, "--out", folder / "run")) == 0
    return folder


@pytest.fixture
def run(whole, tmp_path):
    """A copy of the run for one test."""
    return shutil.copytree(whole, tmp_path / "mine")


@pytest.fixture
def mark(tmp_path):
    """The folder that a payload creates."""
    return tmp_path / "the payload ran"


def words(folder, *more):
    data = ["--data", folder / "text", "--layers", "gdn", *TINY, "--steps", 2, "--eval-every", 2]
    return ["train", *map(str, [*data, *more])]


def shard(run, write):
    """Convert a run's checkpoint to one of several processes; `write` stores tensors in a folder."""
    (folder,) = (run / "run" / "checkpoint").glob("step-*")
    tensors = load_file(folder / "model" / "model.safetensors") | load_file(folder / "training.safetensors")
    write(folder / "shards", tensors)
    (folder / "model" / "model.safetensors").unlink()
    (folder / "training.safetensors").unlink()
    seal(folder)
    return folder


def seal(folder):
    """Update the record and the digests of a changed checkpoint, as an attacker would."""
    with suppress(ValueError):
        record = json.loads((folder / "training.json").read_bytes())
        record["files"] = {name: file.stat().st_size for name, file in files_in(folder).items()}
        (folder / "training.json").write_text(json.dumps(record))
    sums = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files_in(folder).items()}
    sums["training.json"] = hashlib.sha256((folder / "training.json").read_bytes()).hexdigest()
    (folder / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()))


def files_in(folder):
    """Files of a checkpoint by name, without its record and its digests."""
    found = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}
    return {name: file for name, file in found.items() if name not in ("training.json", "SHA256SUMS")}


def pickled_index(folder, tensors):
    """The index that Wyfold used to write for shards."""
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(dict(tensors), checkpoint_id=folder, no_dist=True)


def every_verb(folder):
    """Exit statuses of the verbs that load a run: generating from it, and continuing it."""
    yield main(["generate", str(folder / "run"), "--prompt", "o", "--max-bytes", "2"])
    yield main(words(folder, "--out", folder / "run", "--resume"))


def test_a_pickled_index_is_not_read(run, mark, capsys):
    folder = shard(run, pickled_index)
    (folder / "shards" / ".metadata").write_bytes(pickle.dumps(Payload(mark)))
    seal(folder)
    assert list(every_verb(run)) == [2, 2]
    assert not mark.exists()
    said = capsys.readouterr().err
    assert said.count("shards: ") == said.count("(.metadata) is a pickle") == said.count("Train again") == 2


def test_an_earlier_format_is_refused_though_it_is_harmless(run, capsys):
    """Reading the file to find out whether it is harmless would execute it."""
    folder = shard(run, pickled_index)
    assert list(every_verb(run)) == [2, 2]
    assert f"{folder / 'shards'} is of an earlier format" in capsys.readouterr().err


def test_an_index_next_to_current_shards_is_not_read(run, mark):
    folder = shard(run, sharded_checkpoint.write)
    assert main(["generate", str(run / "run"), "--prompt", "o", "--max-bytes", "2"]) == 0
    (folder / "shards" / ".metadata").write_bytes(pickle.dumps(Payload(mark)))
    seal(folder)
    assert main(["generate", str(run / "run"), "--prompt", "o", "--max-bytes", "2"]) == 2
    assert not mark.exists()


STEP = "run/checkpoint/step-00000002"
FILES = [
    "run/metrics.jsonl",
    f"{STEP}/training.json",
    f"{STEP}/training.safetensors",
    f"{STEP}/model/config.json",
    f"{STEP}/model/model.safetensors",
]


def hostile(mark):
    """A payload as a bare pickle, and in the archive format of torch.save."""
    archive = io.BytesIO()
    torch.save(Payload(mark), archive)
    return {"pickle": pickle.dumps(Payload(mark)), "archive": archive.getvalue()}


def test_a_payload_can_run(mark):
    """Shows that the other tests of this file can fail."""
    content = hostile(mark)
    pickle.loads(content["pickle"])
    mark.rmdir()
    torch.load(io.BytesIO(content["archive"]), weights_only=False)
    assert mark.is_dir()


@pytest.mark.parametrize("kind", ["pickle", "archive"])
@pytest.mark.parametrize("file", [*FILES, "every file"])
def test_a_payload_in_the_place_of_a_file_never_runs(run, mark, file, kind):
    for name in FILES if file == "every file" else [file]:
        (run / name).write_bytes(hostile(mark)[kind])
    seal(run / STEP)
    assert set(every_verb(run)) == {0 if file == FILES[0] else 2}  # the history of a finished run is not read
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["pickle", "archive"])
@pytest.mark.parametrize(
    "words",
    [
        ["generate", "run", "--max-bytes", "2", "--prompts", "payload"],
        ["train", "--data", "payload", "--out", "new", "--steps", "1", *TINY],
        ["report", "payload", "--out", "report.html"],
        ["report", "payload.json", "--out", "report.html"],
        ["report", "run", "--out", "report.html"],
    ],
)
def test_a_payload_handed_to_a_verb_never_runs(run, mark, words, kind, monkeypatch):
    monkeypatch.chdir(run)
    if words[0] == "report":
        need_plotly()
    for name in ("payload", "payload.json", "run/result.json"):
        (run / name).write_bytes(hostile(mark)[kind])
    assert main(words) in (0, 2)
    assert not mark.exists()


def one_shard(folder):
    """The only shard file that one process writes."""
    sharded_checkpoint.write(folder, TENSORS)
    (file,) = folder.iterdir()
    return file


def stored(file):
    """Tensors and header of a shard file."""
    with safe_open(file, "pt") as opened:
        return load_file(file), opened.metadata()


def zeros():
    return {name: torch.zeros_like(x) for name, x in TENSORS.items()}


def test_shards_round_trip(tmp_path):
    one_shard(tmp_path)
    found = zeros()
    sharded_checkpoint.read(tmp_path, found)
    assert all(torch.equal(found[name], x) for name, x in TENSORS.items())


def moved(offsets):
    """Change the offsets of the matrix in the header."""

    def change(file):
        tensors, header = stored(file)
        where = json.loads(header["DCP_SHARDING_INFO"])
        where["matrix"]["saved_offsets"] = offsets
        save_file(tensors, file, header | {"DCP_SHARDING_INFO": json.dumps(where)})

    return change


def renamed(file):
    tensors, _ = stored(file)
    save_file({f"my {name}": x for name, x in tensors.items()}, file)


def of_another_dtype(file):
    tensors, header = stored(file)
    save_file({**tensors, "matrix": tensors["matrix"].double()}, file, header)


def halves(*begins):
    """Store the matrix as halves that begin at the given rows."""

    def change(file):
        tensors, header = stored(file)
        for begin, half in zip(begins, tensors.pop("matrix").split(2), strict=True):
            where = json.dumps({"matrix": {"saved_offsets": [begin, 0]}})
            save_file({"matrix": half.clone()}, file.with_name(f"{begin}.safetensors"), {"DCP_SHARDING_INFO": where})
        save_file(tensors, file, header)

    return change


def twice(file):
    shutil.copy(file, file.with_name("again.safetensors"))


def deep(file):
    tensors, header = stored(file)
    save_file(tensors, file, header | {"DCP_SHARDING_INFO": "[" * 100_000})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda file: file.unlink(), "holds no shards"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "safetensors is damaged: "),
        (lambda file: file.write_bytes(pickle.dumps(TENSORS["number"])), "safetensors is damaged: "),
        (lambda file: file.write_bytes(b""), "safetensors is damaged: "),
        (moved([1, 0]), r"matrix must be \[4, 3\] as here, got \[5, 3\]"),
        (moved([0]), r"matrix must be \[4, 3\] as here, got \[4\]"),
        (moved([-1, 0]), r"matrix must be \[4, 3\] as here, got \[3, 3\]"),
        (moved("no"), "the shards' offsets cannot be read"),
        (moved([2**70, 0]), "matrix must be .* got .1180591620717411303428, 3."),
        (deep, r"the shards' offsets cannot be read \(RecursionError"),
        (renamed, "matrix must be in .* got nothing of this name"),
        (of_another_dtype, "matrix must be torch.float32 as here, got torch.float64"),
        (halves(-1, 2), r"matrix must have shards inside of \[4, 3\], got one at \[-1, 0\]"),
        (halves(1, 2), "matrix must have shards that do not overlap"),
        (halves(0, 3), r"matrix must be \[4, 3\] as here, got \[5, 3\]"),
        (twice, "matrix must have shards of 12 numbers in all, got 24"),
    ],
)
def test_damaged_shards_are_refused_and_fill_nothing(tmp_path, change, complaint):
    change(one_shard(tmp_path))
    found = zeros()
    with pytest.raises(ValueError, match=f"^shards: .*{complaint}"):
        sharded_checkpoint.read(tmp_path, found)
    assert not any(x.any() for x in found.values())


def test_shards_that_cannot_be_written_are_an_error_of_the_machine(tmp_path):
    """The command line prints the reason, without a traceback."""
    (tmp_path / "shards").write_text("a file where the folder should be")
    with pytest.raises(OSError, match="rank 0 cannot write its shards into"):
        sharded_checkpoint.write(tmp_path / "shards", TENSORS)


# --- several processes -----------------------------------------------------------------------------------------------


def sharded(world):
    """The tensors as processes of a group hold them: shards, some of them empty, and unsharded tensors."""
    mesh = init_device_mesh("cpu", (world,))
    placed = {"matrix": Shard(0), "half": Shard(0), "bytes": Replicate()}
    return {
        name: distribute_tensor(x.clone(), mesh, [placed[name]]) if name in placed else x.clone()
        for name, x in TENSORS.items()
    }


def filled(folder, world):
    """The unsharded tensors that a group of this size reads."""
    empty = {name: torch.zeros_like(x) for name, x in sharded(world).items()}
    sharded_checkpoint.read(folder, empty)
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in empty.items()}


def write_and_read(folder, group):
    """The shards of this group, and those that groups of other sizes wrote before."""
    world = group.size()
    sharded_checkpoint.write(folder / str(world), sharded(world))
    for written in folder.iterdir():
        found = filled(written, world)
        assert all(torch.equal(found[name], x) for name, x in TENSORS.items()), written
    mine = folder / str(world) if group.rank() else folder / "nowhere"
    with pytest.raises(ValueError, match="nowhere holds no shards"):  # on every rank, though only one reads the folder
        sharded_checkpoint.read(mine, sharded(world))


OF_A_GROUP = {"write and read": Case(lambda: Path(tempfile.mkdtemp(prefix="wyfold-")), write_and_read)}


def test_any_number_of_processes_reads_what_any_number_wrote(tmp_path):
    assert not failures_on_ranks([3, 1, 2], tmp_path, __name__, "OF_A_GROUP")
