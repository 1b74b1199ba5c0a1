"""A checkpoint is whole or not there, whatever moment a process dies at."""

import json

import pytest
import torch

from wyfold.cli import UsageError, checkpoint


def save_model(folder):
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")


def save(root, step, **record):
    shared = torch.arange(6.0)
    return checkpoint.save(root, step, record, {"a/exp": shared[:3], "b/exp": shared[1:]}, save_model)


def test_what_is_saved_is_loaded(tmp_path):
    record, tensors = checkpoint.load(save(tmp_path, 7, history=[{"loss": 0.1}]))
    assert (record["step"], record["history"]) == (7, [{"loss": 0.1}])
    assert torch.equal(tensors["a/exp"], torch.tensor([0.0, 1, 2]))
    assert torch.equal(tensors["b/exp"], torch.tensor([1.0, 2, 3, 4, 5]))


def test_the_last_two_are_kept(tmp_path):
    for step in (5, 40, 300, 2000):
        save(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000300", "step-00002000"]
    assert checkpoint.latest(tmp_path).name == "step-00002000"


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 3, note="first")
    assert checkpoint.load(save(tmp_path, 3, note="second"))[0]["note"] == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_a_save_that_dies_leaves_the_one_before(tmp_path):
    save(tmp_path, 1)

    def die(folder):
        save_model(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 2, {}, {}, die)
    assert checkpoint.latest(tmp_path).name == "step-00000001"
    save(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize("damage", ["training.json", "training.safetensors", "model/model.safetensors"])
@pytest.mark.parametrize("kind", ["missing", "cut short"])
def test_a_damaged_folder_is_ignored(tmp_path, damage, kind):
    save(tmp_path, 1)
    file = save(tmp_path, 2) / damage
    content = file.read_bytes()
    file.unlink()
    if kind == "cut short":
        file.write_bytes(content[:-1])
    assert checkpoint.latest(tmp_path).name == "step-00000001"


def test_a_record_that_is_no_record_is_ignored(tmp_path):
    folder = save(tmp_path, 1)
    for content in ("[]", "null", json.dumps({"files": None}), "{}"):
        (folder / checkpoint.RECORD).write_text(content)
        assert checkpoint.latest(tmp_path) is None


def test_a_run_its_checkpoints_one_checkpoint_and_a_model_all_lead_to_the_model(tmp_path):
    step = save(tmp_path / "checkpoint", 4)
    for path in (tmp_path, tmp_path / "checkpoint", step):
        assert checkpoint.find_model(path) == step / "model"
    assert checkpoint.find_model(step / "model") == step / "model"


def test_folders_that_lead_to_no_model_are_refused(tmp_path):
    with pytest.raises(UsageError, match="nowhere: no such folder"):
        checkpoint.find_model(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="no complete checkpoint and no saved model"):
        checkpoint.find_model(tmp_path)
    step = save(tmp_path, 4)
    (step / checkpoint.TENSORS).unlink()
    with pytest.raises(UsageError, match="damaged"):
        checkpoint.find_model(step)
