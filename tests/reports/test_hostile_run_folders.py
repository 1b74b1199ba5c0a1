"""A run's folder that contains links, endless files or foreign files is refused before anything is read or written.

A review of the commands found these cases: a planted link had its target truncated; a checkpoint that was a link had
another run's checkpoints removed; an extra name in the digests had an endless file hashed; and a number in
`config.json` caused an allocation of gigabytes.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.reports.test_damaged_files import commands, contents, in_process, newest, sign, train

from wyfold.cli import UsageError, main
from wyfold.cli.train import checkpoint, integrity, rundir, sharded_checkpoint
from wyfold.models import Decoder, DecoderConfig
from wyfold.runtime import files


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with two checkpoints."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text("one two three " * 300)
    assert main(train(folder / "text.txt", folder / "run", "--save-every", 2)) == 0
    return folder / "run"


@pytest.fixture
def copy(run, tmp_path):
    shutil.copytree(run, tmp_path / "copy")
    return tmp_path / "copy"


def test_a_planted_lock_is_not_followed(copy, run, tmp_path, capsys, monkeypatch):
    """Some versions of filelock open and truncate the target of a link."""
    (tmp_path / "victim").write_text("mine")
    (copy / rundir.MARK).unlink()
    (copy / rundir.MARK).symlink_to(tmp_path / "victim")
    monkeypatch.setattr(rundir, "FileLock", lambda *_, **__: pytest.fail("the lock was opened"))
    with pytest.raises(UsageError, match=r"\.wyfold-run is a symbolic link"), rundir.locked(copy):
        pass
    code, said = in_process(commands(run, copy)["train --resume"], capsys)
    assert code == 2 and f"{copy / rundir.MARK} is a symbolic link" in said
    assert (tmp_path / "victim").read_text() == "mine"


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint/step-00000004", "checkpoint/step-00000009"])
def test_checkpoints_of_another_run_are_not_written_through_a_link(copy, run, tmp_path, capsys, name):
    shutil.copytree(run, tmp_path / "other")
    if (copy / name).exists():
        shutil.rmtree(copy / name)
    (copy / name).symlink_to(tmp_path / "other" / "checkpoint", target_is_directory=True)
    before = contents(tmp_path / "other")
    for command in (train(run.parent / "text.txt", copy, "--save-every", 1), ["demo", "--out", str(copy), "--fresh"]):
        code, said = in_process(command, capsys)
        assert code == 2 and f"{copy / name} is a symbolic link" in said
    assert contents(tmp_path / "other") == before


def test_a_file_named_as_a_checkpoint_is_refused_and_stays(copy, run, capsys):
    (copy / "checkpoint" / "step-00000010").write_text("mine")
    code, said = in_process(train(run.parent / "text.txt", copy), capsys)
    assert code == 2 and "step-00000010 must be a folder, got a file" in said
    assert (copy / "checkpoint" / "step-00000010").read_text() == "mine"


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_a_foreign_object_under_a_checkpoints_name_is_kept(copy, run, kind, capsys):
    """It was moved to a hidden name and removed."""
    shutil.rmtree(newest(copy))
    final = copy / "checkpoint" / "step-00000004"
    finish = checkpoint._sync_tree

    def meanwhile(folder):
        finish(folder)
        if kind == "link":
            final.symlink_to("nowhere")
        elif kind == "file":
            final.write_text("mine")
        else:
            final.mkdir()
            (final / "mine").write_text("mine")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_sync_tree", meanwhile)
        code, said = in_process(train(run.parent / "text.txt", copy), capsys)
    kept = final.with_name("step-00000004.kept")
    assert code == 0 and f"{final} is no checkpoint of this run; kept: {kept}" in said
    assert os.path.lexists(kept) and (kind == "link" or (kept / "mine" if kind == "folder" else kept).read_text())
    assert integrity.newest(copy / "checkpoint") == final


def test_sizes_that_the_shards_do_not_have_are_refused_before_a_model_is_built(copy, run, capsys, monkeypatch):
    """A signed configuration with an MLP of 67 million channels allocated 8 GB."""
    folder = newest(copy)
    stored = [folder / "model" / "model.safetensors", folder / "training.safetensors"]
    sharded_checkpoint.write(folder / "shards", load_file(stored[0]) | load_file(stored[1]))
    for file in stored:
        file.unlink()
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps(config | {"mlp_size": 2**26}))
    sign(folder)
    monkeypatch.setattr(Decoder, "to", lambda *_: pytest.fail("a model was built"))
    monkeypatch.setattr(sharded_checkpoint, "read", lambda *_: pytest.fail("a model was filled"))
    built = Decoder.__init__

    def on_meta(self, *arguments, **options):
        built(self, *arguments, **options)
        assert all(x.is_meta for x in self.parameters()), "memory was allocated"

    monkeypatch.setattr(Decoder, "__init__", on_meta)
    code, said = in_process(commands(run, copy)["generate"], capsys)
    assert code == 2 and "mlp.up.weight must be [134217728, 16] as here" in said


def test_shards_are_compared_before_a_run_is_resumed_from_them(copy, run, capsys, monkeypatch):
    folder = newest(copy)
    stored = [folder / "model" / "model.safetensors", folder / "training.safetensors"]
    tensors = load_file(stored[0]) | load_file(stored[1])
    del tensors["blocks.0.mlp.up.weight"]
    sharded_checkpoint.write(folder / "shards", tensors)
    for file in stored:
        file.unlink()
    sign(folder)
    monkeypatch.setattr(Decoder, "to", lambda *_: pytest.fail("a model was built"))
    code, said = in_process(commands(run, copy)["train --resume"], capsys)
    assert code == 2 and "blocks.0.mlp.up.weight must be in " in said


@pytest.mark.parametrize("kind", ["sparse", "link", "regular"])
def test_files_of_unknown_names_are_not_hashed(copy, run, kind, capsys):
    """Hashing a sparse file of terabytes, or a link to a special file of the kernel, did not end."""
    folder = newest(copy)
    if kind == "sparse":
        with (folder / "extra").open("wb") as stream:
            stream.truncate(2**42)
    elif kind == "link":
        (folder / "extra").symlink_to("/proc/self/pagemap")
    else:
        (folder / "extra").write_bytes(b"extra")
    with (folder / "SHA256SUMS").open("a") as stream:
        stream.write(f"{hashlib.sha256(b'extra').hexdigest()}  extra\n")
    for command in ("generate", "train --resume"):
        code, said = in_process(commands(run, copy)[command], capsys)
        assert code == 2 and "SHA256SUMS is damaged: it names 'extra', which is no file of a checkpoint" in said


@pytest.mark.parametrize("name", ["model", "model/config.json", "training.safetensors"])
def test_links_inside_a_checkpoint_are_refused(copy, run, tmp_path, name, capsys):
    """Even if the digests are those of the link targets."""
    (newest(copy) / name).rename(tmp_path / "elsewhere")
    (newest(copy) / name).symlink_to(tmp_path / "elsewhere")
    code, said = in_process(commands(run, copy)["generate"], capsys)
    assert code == 2 and f"{newest(copy) / name} is damaged: it is a symbolic link" in said


@pytest.mark.parametrize("absolute", [False, True])
def test_sizes_are_not_compared_outside_of_the_checkpoint(copy, tmp_path, absolute):
    """In earlier versions the record itself names the files."""
    folder = newest(copy)
    (tmp_path / "outside").write_bytes(b"12345")
    name = str(tmp_path / "outside") if absolute else "../../../outside"
    record = json.loads((folder / "training.json").read_text())
    (folder / "training.json").write_text(json.dumps(record | {"files": {name: 5}}))
    (folder / "SHA256SUMS").unlink()
    with pytest.raises(integrity.DamagedError, match="outside of the checkpoint"):
        integrity.verify(folder)


def test_reads_are_limited_to_the_allowed_size(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert files.read_bytes(file, 5) == b"12345"
    with pytest.raises(ValueError, match="it has 5 bytes or more, at most 4 are read"):
        files.read_bytes(file, 4)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="no regular file"):
        files.read_bytes(tmp_path / "pipe", 4)
    if os.path.exists("/proc/self/maps"):  # files in /proc have size 0
        with pytest.raises(ValueError, match="at most 4 are read"):
            files.read_bytes(Path("/proc/self/maps"), 4)


def test_a_file_that_grows_after_its_size_was_read_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    stat = os.fstat

    def smaller(descriptor):
        found = list(stat(descriptor))
        found[6] = 1
        return os.stat_result(found)

    monkeypatch.setattr(files.os, "fstat", smaller)
    with pytest.raises(ValueError, match="at most 4 are read"):
        files.read_bytes(file, 4)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOTSUP])
def test_a_file_system_without_locks_is_reported(copy, run, code, monkeypatch, capsys):
    """Every resume reported that another process was writing."""

    def missing(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", missing)
    status, said = in_process(commands(run, copy)["train --resume"], capsys)
    assert status == 2 and f"--out {copy}: its file system has no file locks (" in said


def test_a_name_that_is_no_utf_8_is_refused_before_any_work(run, tmp_path, capsys):
    """The run was trained and saved, and then could not be read."""
    folder = tmp_path / os.fsdecode(b"\xff")
    code, said = in_process(train(run.parent / "text.txt", folder), capsys)
    assert code == 2 and "its name must be UTF-8" in said
    assert not folder.exists()


def test_weights_in_a_folder_whose_name_is_no_utf_8_are_a_value_error(tmp_path):
    Decoder(DecoderConfig(hidden_size=16, num_heads=2, head_dim=8, num_layers=1, pattern="gdn")).save(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / os.fsdecode(b"\xff"))
    with pytest.raises(ValueError, match=r"^Decoder.load: "):
        Decoder.load(tmp_path / os.fsdecode(b"\xff"))


def test_hidden_files_do_not_keep_a_checkpoint_from_being_removed(copy, run):
    """A file browser leaves `.DS_Store`, which kept all older checkpoints from being removed."""
    shutil.rmtree(newest(copy))
    (copy / "checkpoint" / "step-00000002" / ".DS_Store").write_text("x")
    assert main(train(run.parent / "text.txt", copy, "--save-every", 1)) == 0
    assert [path.name for path in integrity.step_folders(copy / "checkpoint")] == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "curve.png", "result.json"])
def test_a_folder_in_the_place_of_a_file_is_refused_before_torch_is_needed(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / rundir.MARK).touch()
    with pytest.raises(UsageError, match=f"{name} must be a file, got a folder"):
        rundir.require_run_or_empty(tmp_path)


def test_a_checkpoint_that_may_not_be_read_is_not_called_damaged(copy, run, monkeypatch, capsys):
    opened = os.open
    refused = newest(copy) / "training.json"

    def forbidden(path, *arguments, **options):
        if str(path) == str(refused):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", forbidden)
    for command in ("generate", "train --resume"):
        code, said = in_process(commands(run, copy)[command], capsys)
        assert code == 2 and f"{refused} cannot be read (Permission denied)" in said
        assert "damaged" not in said


def test_missing_digests_can_be_rewritten(copy, run, capsys):
    (newest(copy) / "SHA256SUMS").unlink()
    code, said = in_process(commands(run, copy)["generate"], capsys)
    assert code == 2
    command = said[said.index("cd ") :].partition("SHA256SUMS")[0] + "SHA256SUMS"
    assert os.system(command) == 0
    assert in_process(commands(run, copy)["generate"], capsys)[0] == 0


def test_leftovers_of_a_killed_process_are_removed(copy, run):
    (copy / ".0123456789abcdef.part").write_text("half")
    (copy / ".mine.part").write_text("mine")
    assert main(commands(run, copy)["train --resume"]) == 0
    assert not (copy / ".0123456789abcdef.part").exists() and (copy / ".mine.part").exists()


def test_a_checkpoint_removed_during_its_check_is_searched_again(copy, monkeypatch):
    """For example, `generate` on a run that is still training."""
    listed, step_folders = [], integrity.step_folders

    def then_removed(root):
        found = step_folders(root)
        if not listed:
            shutil.rmtree(found[-1])
        listed.append(found)
        return found

    monkeypatch.setattr(integrity, "step_folders", then_removed)
    assert checkpoint.find_model(copy) == copy / "checkpoint" / "step-00000002" / "model"


def test_a_checkpoint_removed_before_loading_is_searched_again(copy, monkeypatch):
    load = checkpoint._load_folder

    def removed(folder, *arguments):
        if folder.parent.name == "step-00000004":
            shutil.rmtree(folder.parent)
        return load(folder, *arguments)

    monkeypatch.setattr(checkpoint, "_load_folder", removed)
    assert checkpoint.load_model(copy, "cpu", None).config.num_layers == 2


def test_a_record_that_differs_from_its_digest_is_not_reported(copy, run, capsys):
    file = newest(copy) / "training.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps(record | {"elapsed": record["elapsed"] + 1}))
    code, said = in_process(commands(run, copy)["report"], capsys)
    assert code == 2 and f"{file} is damaged: its SHA-256 is " in said


def test_a_moment_that_is_missing_is_named(copy, run, capsys):
    from safetensors.torch import save_file

    file = newest(copy) / "training.safetensors"
    tensors = load_file(file)
    del tensors["norm.weight/exp_avg"]
    save_file(tensors, file)
    sign(newest(copy))
    code, said = in_process(commands(run, copy)["generate"], capsys)
    assert code == 2 and f"{file} is damaged: it has no norm.weight/exp_avg" in said


def test_an_exception_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path):
    file = tmp_path / "file"
    file.write_text("before")

    def half_written():
        with files.replacing(file) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        half_written()
    assert file.read_text() == "before" and [path.name for path in tmp_path.iterdir()] == ["file"]
