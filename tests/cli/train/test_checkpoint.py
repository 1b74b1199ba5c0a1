"""Checkpoints are atomic: a process may die at any moment."""

import functools
import json
import os
import stat

import msgspec
import pytest
import torch

from wyfold.cli import Failure, UsageError
from wyfold.cli.train import checkpoint, headers, integrity
from wyfold.cli.train.headers import RECORD, SUMS, TENSORS
from wyfold.cli.train.integrity import DamagedError
from wyfold.cli.train.recipe import Recipe, build

RECIPE = Recipe(
    data="0123456789abcdef", layers="gdn", depth=1, width=16, heads=2, head_dim=8, window=8, packed=False, batch=1,
    length=8, grad_accum=1, steps=9000, minutes=None, lr=1e-3, warmup=0, lr_end=0.0, weight_decay=0.0, clip=1.0,
    held_out=0.1, eval_every=1, eval_bytes=8, seed=0, dtype="float32",
)  # fmt: skip


@functools.cache
def model():
    return build(RECIPE)


def moments():
    found = {headers.RANDOM: torch.get_rng_state()}
    for name, parameter in model().named_parameters():
        found |= {f"{name}/{moment}": torch.zeros_like(parameter) for moment in ("exp_avg", "exp_avg_sq")}
        found[f"{name}/step"] = torch.zeros(())
    return found


def taken(step):
    """History entry of a step."""
    return {"step": step, "loss": 0.1, "gradient_norm": 0.5, "lr": 0.01, "tokens_per_second": 100}


def save(root, step, *, elapsed=1.0, save_model=None, tensors=None):
    record = {
        "recipe": msgspec.structs.asdict(RECIPE),
        "cursor": step,
        "elapsed": elapsed,
        "history": [taken(number + 1) for number in range(step)],
        "torch": torch.__version__,
    }
    return checkpoint.save(root, step, record, tensors or moments(), save_model or model().save)


def test_saved_checkpoints_are_loaded(tmp_path):
    shared = torch.arange(6.0)
    tensors = moments() | {"norm.weight/exp_avg": shared[:3], "norm.weight/exp_avg_sq": shared[1:]}
    record, tensors = checkpoint.load(save(tmp_path, 7, tensors=tensors))
    assert (record["step"], record["history"]) == (7, [taken(number) for number in range(1, 8)])
    assert torch.equal(tensors["norm.weight/exp_avg"], torch.tensor([0.0, 1, 2]))
    assert torch.equal(tensors["norm.weight/exp_avg_sq"], torch.tensor([1.0, 2, 3, 4, 5]))


def test_the_last_two_are_kept(tmp_path):
    for step in (5, 40, 300, 2000):
        save(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000300", "step-00002000"]
    assert integrity.newest(tmp_path).name == "step-00002000"


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 3, elapsed=1.0)
    assert checkpoint.load(save(tmp_path, 3, elapsed=2.0))[0]["elapsed"] == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_a_killed_save_keeps_the_previous_checkpoint(tmp_path):
    save(tmp_path, 1)

    def die(folder):
        model().save(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, save_model=die)
    assert integrity.newest(tmp_path).name == "step-00000001"
    save(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_a_full_disk_is_reported_with_the_intact_checkpoint(tmp_path):
    whole = save(tmp_path, 1)

    def no_space(folder):
        folder.mkdir()
        (folder / "part").write_bytes(b"weights")
        raise OSError(28, os.strerror(28))

    message = f"step 2 could not be written into .*: No space left on device; {whole} is whole. .* the same command"
    with pytest.raises(Failure, match=message):
        save(tmp_path, 2, save_model=no_space)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("damage", [RECORD, SUMS, TENSORS, "model/model.safetensors", "model/config.json"])
@pytest.mark.parametrize("kind", ["missing", "cut short", "longer", "one bit", "empty"])
def test_a_damaged_file_is_named_with_the_intact_checkpoint(tmp_path, damage, kind):
    whole = save(tmp_path, 1)
    file = save(tmp_path, 2) / damage
    content = bytearray(file.read_bytes())
    file.unlink()
    if kind != "missing":
        content[len(content) // 2] ^= 1 if kind == "one bit" else 0
        length = {"cut short": len(content) - 1, "empty": 0}.get(kind, len(content))
        file.write_bytes(content[:length] + (b"\n" if kind == "longer" else b""))
    with pytest.raises(DamagedError, match="is damaged: ") as caught:
        integrity.newest(tmp_path)
    assert caught.value.intact == whole and caught.value.folder == tmp_path / "step-00000002"
    if damage != SUMS:  # a changed digest is reported as a damaged file
        assert caught.value.file == file


def test_an_invalid_record_is_named(tmp_path):
    folder = save(tmp_path, 1)
    for content in ("[]", "null", json.dumps({"files": None}), "{}", "{", "[" * 100_000, '{"step": NaN}'):
        (folder / RECORD).write_text(content)
        with pytest.raises(DamagedError, match=r"training\.json is damaged: ") as caught:
            integrity.newest(tmp_path)
        assert caught.value.intact is None


def test_a_checkpoint_without_digests_is_verified_by_sizes_and_headers(tmp_path):
    """The format of an earlier version."""
    folder = save(tmp_path, 1)
    record = json.loads((folder / RECORD).read_text())
    (folder / SUMS).unlink()
    with pytest.raises(DamagedError, match=f"{SUMS} is damaged: it is missing"):
        integrity.newest(tmp_path)
    names = ("model/config.json", "model/model.safetensors", TENSORS)
    record["files"] = {name: (folder / name).stat().st_size for name in names}
    (folder / RECORD).write_text(json.dumps(record))
    assert integrity.newest(tmp_path) == folder
    with (folder / TENSORS).open("ab") as stream:
        stream.write(b"\0")
    with pytest.raises(DamagedError, match=TENSORS):
        integrity.newest(tmp_path)


def test_damaged_checkpoints_are_renamed_and_none_is_removed(tmp_path):
    for step in (1, 2):
        save(tmp_path, step)
    (tmp_path / "step-00000002" / RECORD).write_text("{}")
    (tmp_path / "step-00000002.damaged").mkdir()
    assert [path.name for path in checkpoint.rename_damaged(tmp_path)] == ["step-00000002.damaged1"]
    assert integrity.newest(tmp_path).name == "step-00000001"
    assert checkpoint.rename_damaged(tmp_path) == []


def test_foreign_folders_are_not_changed(tmp_path):
    for name in ("step-notes", "step-00000001", ".unfinished-notes", "step-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("mine")
    for step in (2, 3, 4):
        save(tmp_path, step)
    checkpoint.remove_all(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".unfinished-notes",
        "step-00000001",
        "step-1",
        "step-notes",
    ]


def test_modes_follow_the_umask_and_links_are_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("outside")
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors", "config.json.part", "model.safetensors.part"):
        (tmp_path / "model" / name).symlink_to(outside)
    before = os.umask(0o027)
    try:
        model().save(tmp_path / "model")
        folder = save(tmp_path / "checkpoint", 1)
    finally:
        os.umask(before)
    assert outside.read_text() == "outside"
    written = [path for path in folder.rglob("*") if path.is_file()]
    written += [tmp_path / "model" / name for name in ("config.json", "model.safetensors")]
    assert {stat.S_IMODE(path.lstat().st_mode) for path in written} == {0o640}


def test_find_model_accepts_run_checkpoints_checkpoint_and_model(tmp_path):
    step = save(tmp_path / "checkpoint", 4)
    for path in (tmp_path, tmp_path / "checkpoint", step):
        assert checkpoint.find_model(path) == step / "model"
    assert checkpoint.find_model(step / "model") == step / "model"


def test_folders_without_a_model_are_refused(tmp_path):
    with pytest.raises(UsageError, match="nowhere: no such folder"):
        checkpoint.find_model(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="no checkpoint and no saved model"):
        checkpoint.find_model(tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UsageError, match=r"notes\.txt: is a file"):
        checkpoint.find_model(tmp_path / "notes.txt")
    step = save(tmp_path, 4)
    (step / TENSORS).unlink()
    for path in (tmp_path, step, step / "model"):
        with pytest.raises(DamagedError, match=f"{TENSORS} is damaged: it is missing"):
            checkpoint.find_model(path)


def test_digests_match_sha256sum(tmp_path):
    folder = save(tmp_path, 1)
    lines = dict(reversed(line.split("  ")) for line in (folder / SUMS).read_text().splitlines())
    assert sorted(lines) == sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and path.name != SUMS
    )
    assert all(integrity.digest(folder / name) == digest for name, digest in lines.items())
