"""`wyfold train` and `wyfold tasks` had no option for the bounded gate of the KDA layer."""

import json
from pathlib import Path

import pytest
import torch

from wyfold.cli import main
from wyfold.cli.train import integrity
from wyfold.cli.train.checkpoint import load_model

pytestmark = pytest.mark.usefixtures("undrawn")

TINY = (
    "--depth 1 --width 16 --heads 1 --head-dim 8 --length 8 --batch 2 --eval-bytes 16 --eval-every 1 --eval-lengths 8"
)


def train(out: Path, words: str) -> int:
    return main(["train", "--task", "parity", *TINY.split(), *words.split(), "--out", str(out)])


def checkpoint(out: Path) -> Path:
    return sorted((out / "checkpoint").iterdir())[-1]


@pytest.fixture
def bounded(tmp_path: Path) -> Path:
    """A one-step run of a model with a bounded gate."""
    assert train(tmp_path / "run", "--layers kda --kda-lower-bound -5 --steps 1") == 0
    return tmp_path / "run"


def test_the_bound_reaches_the_layer_the_recipe_and_the_command(bounded: Path):
    (block,) = load_model(bounded, torch.device("cpu"), None).blocks
    assert block.mixer.lower_bound == -5
    record = json.loads((bounded / "result.json").read_text())
    assert record["recipe"]["kda_lower_bound"] == -5
    assert "--kda-lower-bound -5.0" in record["command"]


def test_a_run_is_continued_with_its_bound_and_with_no_other(bounded: Path, capsys):
    assert train(bounded, "--layers kda --steps 1") == 0
    assert "options of this run are kept: --layers kda" not in (said := capsys.readouterr().out)
    assert "options of this run are kept: --kda-lower-bound -5.0" in said and "already finished" in said
    assert train(bounded, "--layers kda --kda-lower-bound -4 --steps 1") == 2
    assert f"--kda-lower-bound is -4.0 here, but the run in {bounded} was started with -5.0" in capsys.readouterr().err


def test_a_run_from_before_the_option_is_continued_without_a_bound(tmp_path: Path, capsys):
    assert train(tmp_path / "run", "--layers kda --steps 1") == 0
    file = checkpoint(tmp_path / "run") / "training.json"
    record = json.loads(file.read_text())
    assert record["recipe"].pop("kda_lower_bound") is None
    file.write_text(json.dumps(record))
    (file.parent / integrity.SUMS).unlink()
    integrity.write_sums(file.parent)
    assert main(["train", "--resume", "--out", str(tmp_path / "run")]) == 0
    assert "already finished" in capsys.readouterr().out
    assert train(tmp_path / "run", "--layers kda --kda-lower-bound -5 --steps 1") == 2
    assert "--kda-lower-bound is -5.0 here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "train --task parity --layers gdn --kda-lower-bound -5",
            "--kda-lower-bound: there is no kda layer in --layers",
        ),
        (
            "tasks --layers gdn delta_net --kda-lower-bound -5",
            "--kda-lower-bound: there is no kda layer in --layers gdn",
        ),
        *(
            (f"{verb} --kda-lower-bound {bound}", "--kda-lower-bound: must be a number of at least -5 and below 0, got")
            for verb in ("train", "tasks")
            for bound in ("0", "-5.1", "1", "nan", "-inf")
        ),
    ],
)
def test_a_bound_that_makes_no_sense_is_refused(words: str, said: str, tmp_path: Path, capsys):
    words = words.replace("--kda-lower-bound -", "--kda-lower-bound=-")
    assert main([*words.split(), "--out", str(tmp_path / "run")]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_table_has_a_bound_where_there_is_kda(tmp_path: Path, capsys):
    words = [
        "tasks",
        "--task",
        "mqar",
        "--layers",
        "kda",
        "delta_net",
        "--kda-lower-bound",
        "-4",
        "--out",
        str(tmp_path),
    ]
    small = TINY.replace("--length 8", "--length 16") + " --steps 1 --pairs 2 --vocabulary 16"
    assert main([*words, f"--train={small}"]) == 0
    table = json.loads((tmp_path / "tasks.json").read_text())
    assert [run["recipe"]["kda_lower_bound"] for run in table["runs"]] == [-4, None]
    assert "--kda-lower-bound -4" in table["command"]
    assert "kda; 16, gate above -4" in capsys.readouterr().out
