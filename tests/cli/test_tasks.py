"""Runs of known tasks learn what their layers can learn, and the table has the command of every run."""

import argparse
import json
import shlex

import pytest
from tests.cli.train.test_train import history, stop_after, weights

from wyfold.cli import main
from wyfold.cli import tasks as tasks_verb
from wyfold.cli.train import add_arguments, fill_options, integrity
from wyfold.cli.train.trainer import Trainer
from wyfold.models import Decoder

pytestmark = pytest.mark.usefixtures("undrawn")

PARITY = "--length 8 --batch 32 --width 32 --heads 1 --steps 120 --eval-every 120 --eval-bytes 4096 --eval-lengths 12"
TINY = "--depth 1 --width 16 --heads 1 --head-dim 8 --batch 2 --steps 3 --eval-every 2 --eval-bytes 64 --warmup 1"


def train(out, task, words):
    return main(["train", "--task", task, "--out", str(out), *words.split()])


def result(out):
    return json.loads((out / "result.json").read_text())


@pytest.mark.long
def test_parity_needs_and_gets_negative_eigenvalues(tmp_path, capsys, drawn):
    found = {}
    for words in ("", "--neg-eigval"):
        assert train(tmp_path / f"run{words}", "parity", f"{PARITY} {words}") == 0
        found[words] = result(tmp_path / f"run{words}")
    assert found["--neg-eigval"]["accuracy"] > 0.99
    assert found[""]["accuracy"] < 0.9
    assert found["--neg-eigval"]["accuracy_at"]["12"] > found[""]["accuracy_at"]["12"] + 0.2
    said = capsys.readouterr().out
    assert "answers that are right" in said and "by length" in said
    assert (tmp_path / "run" / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_task_continues_with_equal_numbers(tmp_path, monkeypatch):
    words = f"{TINY} --length 32 --pairs 4 --vocabulary 64 --eval-lengths 40 --curriculum 2"
    assert train(tmp_path / "whole", "mqar", words) == 0
    with monkeypatch.context() as patched:
        stop_after(patched, step=2)
        assert train(tmp_path / "parts", "mqar", words) == 130
    assert not (tmp_path / "parts" / "result.json").exists()
    assert train(tmp_path / "parts", "mqar", words) == 0
    assert history(tmp_path / "parts") == history(tmp_path / "whole")
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    assert result(tmp_path / "parts")["accuracy_at"] == result(tmp_path / "whole")["accuracy_at"]


def test_stop_at_ends_the_run(tmp_path):
    words = PARITY.replace("--eval-every 120", "--eval-every 5")
    assert train(tmp_path / "run", "parity", f"{words} --stop-at 0.5") == 0
    found = result(tmp_path / "run")
    assert 0 < found["step"] < 120 and found["accuracy"] >= 0.5
    assert set(found["accuracy_at"]) == {"8", "12"}
    assert train(tmp_path / "run", "parity", f"{words} --stop-at 0.5") == 0  # it stays finished
    assert result(tmp_path / "run") == found


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--task parity --pairs 3", "--pairs: the definition of parity has no such choice"),
        ("--task s_niah --pairs 3", "--pairs: the definition of s_niah has no such choice"),
        ("--task mqar --pairs 64 --length 100", "mqar: 64 --pairs take rows of at least 256 tokens"),
        ("--task s_niah --length 8", "s_niah: takes rows of at least 9 tokens (--length)"),
        ("--task mqar --length 3", "mqar: 1 --pairs take rows of at least 4 tokens"),
        ("--task mqar --vocabulary 3", "a --vocabulary of at least 4"),
        ("--task mqar --pairs 64 --vocabulary 129", "a --vocabulary of at least 130"),
        ("--task mqar --length 24 --curriculum 4", "--curriculum: rows begin at an eighth of --length"),
        ("--task mqar --steps 3 --curriculum 3", "--curriculum 3: must be less than --steps 3"),
        (
            "--task mqar --length 64 --eval-lengths 64 20",
            "--eval-lengths 64 20: mqar: 16 --pairs take rows of at least 64",
        ),
        ("--task s_niah --eval-lengths 4", "--eval-lengths 4: s_niah: takes rows of at least 9 tokens"),
        ("--task parity --curriculum 9", "--curriculum: is for --task mqar, got parity"),
        ("--curriculum 9", "--curriculum: is for a --task"),
        ("--task mqar --curriculum 7 --steps 7", "--curriculum 7: must be less than --steps 7"),
        ("--task mqar --curriculum 4001", "--curriculum 4001: must be less than --steps 4000"),
        ("--task parity --packed", "--packed: rows of a task are independent already"),
        ("--task parity --layers attention --neg-eigval", "--neg-eigval: there is no delta-rule layer"),
        ("--pairs 3", "--pairs: is for a --task"),
        ("--task parity --data x", "not allowed with argument"),
    ],
)
def test_meaningless_options_are_refused(tmp_path, capsys, words, complaint):
    assert main(["train", "--out", str(tmp_path / "run"), *words.split()]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "curriculum"),
    [("", 1200), ("--steps 4001", 1200), ("--steps 1200", 360), ("--steps 9", 2), ("--steps 3", 0)]
    + [("--steps 1200 --curriculum 1199", 1199), ("--curriculum 0", 0), ("--minutes 1", 1200)],
)
def test_recall_always_has_steps_with_full_rows(words, curriculum):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--task", "mqar", *words.split()])
    fill_options(args)
    assert args.curriculum == curriculum
    assert args.minutes or args.curriculum < args.steps


@pytest.mark.parametrize(
    ("words", "pairs", "curriculum"),
    [
        ("--length 24 --steps 4", 6, 0),
        ("--length 4 --steps 4", 1, 0),
        ("--length 32 --steps 4", 8, 1),
        ("--length 255 --steps 4", 63, 1),
        ("--length 256 --steps 4", 64, 1),
        ("--length 24 --steps 4 --pairs 3", 3, 0),
        ("--vocabulary 20 --length 64 --steps 4", 9, 1),
    ],
)
def test_defaults_of_a_small_recall_fit_it(tmp_path, words, pairs, curriculum):
    small = "--depth 1 --width 16 --heads 1 --head-dim 8 --batch 2 --eval-every 4 --eval-bytes 64"
    assert train(tmp_path, "mqar", f"{small} {words}") == 0
    recipe = result(tmp_path)["recipe"]
    assert (recipe["pairs"], recipe["curriculum"]) == (pairs, curriculum)


def begin(out, monkeypatch, words):
    """Start a run of a task and interrupt it after its first step."""
    with monkeypatch.context() as patched:
        stop_after(patched, step=1)
        assert train(out, words.split()[0], words.partition(" ")[2]) == 130


def test_a_run_started_under_other_defaults_keeps_its_settings(tmp_path, monkeypatch, capsys):
    """A run of a version whose default curriculum was the whole run is continued by the same command."""
    words = f"{TINY} --length 32 --pairs 4 --vocabulary 64"
    begin(tmp_path, monkeypatch, f"mqar {words} --curriculum 2")
    file = next((tmp_path / "checkpoint").iterdir()) / "training.json"
    file.write_text(file.read_text().replace('"curriculum": 2', '"curriculum": 3'))
    (file.parent / integrity.SUMS).unlink()
    integrity.write_sums(file.parent)
    capsys.readouterr()
    for other in (2, 0):
        assert train(tmp_path, "mqar", f"{words} --curriculum {other}") == 2
        said = capsys.readouterr().err
        assert f"--curriculum is {other} here, but the run in {tmp_path} was started with 3: leave it out" in said
    assert train(tmp_path, "mqar", words) == 0
    said = capsys.readouterr().out
    assert f"{tmp_path}: options of this run are kept: --curriculum 3\n" in said and "continuing" in said
    assert result(tmp_path)["recipe"]["curriculum"] == 3
    assert train(tmp_path, "mqar", f"{words} --curriculum 3") == 0


def test_options_left_out_keep_the_values_of_the_run(tmp_path, monkeypatch, capsys):
    words = f"{TINY} --length 32 --eval-lengths 40 48 --neg-eigval --seed 7 --lr 0.01 --clip 2"
    assert train(tmp_path / "whole", "parity", words) == 0
    begin(tmp_path / "parts", monkeypatch, f"parity {words}")
    capsys.readouterr()
    assert main(["train", "--out", str(tmp_path / "parts"), "--resume"]) == 0
    said = capsys.readouterr().out
    assert "options of this run are kept" in said
    assert all(word in said for word in ("--neg-eigval", "--seed 7", "--lr 0.01", "--clip 2", "--eval-lengths 40 48"))
    assert result(tmp_path / "parts")["recipe"] == result(tmp_path / "whole")["recipe"]
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    assert main(["train", "--task", "parity", "--out", str(tmp_path / "parts")]) == 0
    assert "already finished, at step 3; another --out starts a new run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("begun", "words", "complaint"),
    [
        ("mqar --length 32 --pairs 4", "mqar --length 12", "--length is 12 here, but {} was started with 32:"),
        ("mqar --length 32 --pairs 4", "mqar --pairs 5", "--pairs is 5 here, but {} was started with 4:"),
        ("mqar --length 32", "mqar --steps 1", "--steps 1 here, but {} was started with --steps 3:"),
        ("parity --length 8", "parity --minutes 1", "--minutes 1 here, but {} was started with --steps 3:"),
        ("parity --length 8", "parity --neg-eigval", "--neg-eigval is True here, but {} was started with False:"),
    ],
)
def test_options_that_differ_from_a_run_are_refused_by_name(tmp_path, monkeypatch, capsys, begun, words, complaint):
    begin(tmp_path, monkeypatch, f"{begun} {TINY}")
    capsys.readouterr()
    assert main(["train", "--out", str(tmp_path), "--task", *words.split()]) == 2
    assert complaint.format(f"the run in {tmp_path}") in capsys.readouterr().err


def test_a_run_prints_its_curriculum_and_its_command_repeats_it(tmp_path, capsys):
    tiny = f"{TINY} --length 32 --pairs 4 --vocabulary 64"
    assert train(tmp_path / "some", "mqar", tiny.replace("--steps 3", "--steps 4")) == 0
    assert "curriculum: the first 1 of 4 steps have shorter rows" in capsys.readouterr().out
    assert result(tmp_path / "some")["recipe"]["curriculum"] == 1
    assert "--curriculum 1" in result(tmp_path / "some")["command"]
    assert train(tmp_path / "none", "mqar", f"{tiny} --curriculum 0 --lr-end 0") == 0
    assert "shorter rows" not in capsys.readouterr().out
    command = result(tmp_path / "none")["command"]
    assert "--curriculum 0" in command and "--lr-end 0" in command and "--neg-eigval" not in command


def test_a_timed_run_that_ends_in_its_curriculum_says_so(tmp_path, capsys):
    words = f"{TINY} --length 32 --pairs 4 --vocabulary 64".replace("--steps 3", "--minutes 1e-9")
    assert train(tmp_path / "run", "mqar", words) == 0
    said = capsys.readouterr().out
    assert "curriculum: the first 1,200 steps have shorter rows" in said
    assert "curriculum: the run ended within it, at step 1: it was trained on no whole row" in said


def test_a_run_of_a_task_is_neither_another_task_nor_a_text_model(tmp_path, capsys):
    assert train(tmp_path / "run", "parity", f"{TINY} --length 8") == 0
    assert train(tmp_path / "run", "s5", f"{TINY} --length 8") == 2
    assert "--task is 's5' here, but the run in" in capsys.readouterr().err
    assert main(["generate", str(tmp_path / "run"), "--prompt", "x"]) == 2
    assert "its 4 tokens are not the bytes of a text" in capsys.readouterr().err


def tasks(out, *words):
    further = f"--train={TINY} --length 8 --eval-lengths 16"
    return main(["tasks", "--out", str(out), "--task", "parity", "--layers", "delta_net", *words, further])


def test_the_table_has_every_run_and_repeats_none(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patched:
        stop_after(patched, step=2)
        assert tasks(tmp_path) == 130
    assert tasks(tmp_path) == 0
    said = capsys.readouterr().out
    assert "[-1, 1]" in said and "[0, 1]" in said and "[2/2] wyfold train --task parity" in said
    table = json.loads((tmp_path / "tasks.json").read_text())
    assert table["kind"] == "tasks" and table["command"].startswith("wyfold tasks ")
    assert [run["recipe"]["neg_eigval"] for run in table["runs"]] == [True, False]
    assert all(set(run["accuracy_at"]) == {"8", "16"} for run in table["runs"])

    def none(self):
        raise AssertionError("a finished run was run again")

    monkeypatch.setattr(Trainer, "_take_step", none)
    assert tasks(tmp_path) == 0
    assert json.loads((tmp_path / "tasks.json").read_text())["runs"] == table["runs"]


def test_the_range_of_eigenvalues_is_that_of_the_option(tmp_path):
    """Also of DeltaProduct, whose layer has [-1, 1] by default. GLA erases nothing, and has one run."""
    further = f"--train={TINY} --length 8 --eval-lengths 16 --steps 1"
    layers = ("gla", "gdp", "rwkv7", "gdn2")
    assert main(["tasks", "--out", str(tmp_path), "--task", "parity", "--layers", *layers, further]) == 0
    runs = json.loads((tmp_path / "tasks.json").read_text())["runs"]
    assert [run["recipe"]["layers"] for run in runs] == ["gla", *(name for name in layers[1:] for _ in range(2))]
    found = {}
    for folder in tmp_path.glob("parity-*/checkpoint/*/model"):
        (block,) = Decoder.load(folder).blocks
        found[folder.parents[2].name.split("-")[1], "-neg-" in str(folder)] = getattr(
            block.mixer, "allow_neg_eigval", None
        )
    assert found == {("gla", False): None} | {(name, sign): sign for name in layers[1:] for sign in (True, False)}


def test_a_row_lists_the_layers_that_are_built(tmp_path):
    """It was the pattern, times the depth: "gdn*3 attention x 2" for two layers without attention."""
    words = f"{TINY} --length 8 --eval-lengths 12 --layers 'gdn*3 attention' --depth 2"
    assert main(["train", "--out", str(tmp_path), "--task", "parity", *shlex.split(words)]) == 0
    assert tasks_verb.row(tasks_verb._result(tmp_path / "result.json"))[1].startswith("gdn*2; ")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--task", "parity", "--train=--widht 3"], "--train: unrecognized arguments: --widht 3"),
        (["--task", "parity", "--train='"], "--train: No closing quotation"),
        (["--task", "mqar", "parity", "--train=--pairs 4"], "--pairs: the definition of parity has no such choice"),
        (["--task", "parity", "--layers", "kda", "gru"], "no model can be built so: "),
        (["--task", "parity", "s_niah", "--train=--length 4"], "s_niah: takes rows of at least 9 tokens"),
    ],
)
def test_invalid_options_of_any_run_are_refused_first(tmp_path, capsys, words, complaint):
    assert main(["tasks", "--out", str(tmp_path / "out"), *words]) == 2
    told = capsys.readouterr()
    assert told.err.count("\n") == 1 and complaint in told.err and not told.out
    assert not list(tmp_path.iterdir())
