"""A null or missing field of a stored file is reported by name; a field that older versions lack has its default.

Files were checked against a schema and then read again without it. Defaults were lost, and a null that the schema
allowed reached the drawing code: `report` and `train --resume` ended in a traceback. Escape sequences in names stored
in a file reached the terminal.
"""

import json
import shutil

import pytest
from tests.extras import need_plotly

from wyfold.cli import main, results
from wyfold.cli.train import integrity

TINY = "--depth 1 --width 16 --heads 2 --head-dim 8 --batch 2 --length 8 --eval-bytes 64".split()
ESCAPES = "\x1b]0;pwned\x07\x1b[2J"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of a task with two checkpoints."""
    folder = tmp_path_factory.mktemp("task") / "run"
    assert main(words(folder)) == 0
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """A copy of the run, interrupted after its first checkpoint."""
    shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(newest(tmp_path / "run"))
    (tmp_path / "run" / "result.json").unlink()
    return tmp_path / "run"


def words(folder, *more):
    settings = ["--steps", 4, "--eval-every", 2, "--save-every", 2, "--eval-lengths", 12, "--stop-at", 1]
    return ["train", *map(str, ["--task", "parity", "--layers", "gdn", *TINY, *settings, "--out", folder, *more])]


def newest(run):
    return integrity.step_folders(run / "checkpoint")[-1]


def change_history(run, change):
    """Change the newest checkpoint's history and update its digest."""
    file = newest(run) / "training.json"
    record = json.loads(file.read_text())
    change(record["history"])
    file.write_text(json.dumps(record))
    (newest(run) / integrity.SUMS).unlink()
    integrity.write_sums(newest(run))
    return file


def first(history, measure):
    return next(entry for entry in history if measure in entry)


MISSING = [("accuracy", "whole_rows"), ("loss", "tokens_per_second"), ("loss", "lr"), ("loss", "gradient_norm")]


@pytest.mark.parametrize(("measure", "field"), MISSING)
def test_a_field_that_every_entry_has_is_named_where_it_is_missing(measure, field, run, capsys):
    file = change_history(run, lambda history: first(history, measure).pop(field))
    assert main(words(run, "--resume")) == 2
    said = capsys.readouterr().err
    assert f"{file} is damaged: it has another form: an entry with {measure} must have {field} - at `$.history" in said


@pytest.mark.parametrize(("measure", "field"), [("accuracy", "accuracy_at"), ("loss", "mfu"), ("accuracy", "last")])
def test_a_null_in_the_place_of_an_optional_field_is_named(measure, field, run, capsys):
    file = change_history(run, lambda history: first(history, measure).update({field: None}))
    assert main(words(run, "--resume")) == 2
    said = capsys.readouterr().err
    assert f"{file} is damaged: it has another form: Expected `" in said
    assert "got `null` - at `$.history[" in said and f"].{field}`" in said


def test_a_history_without_its_steps_is_named(run, capsys):
    file = change_history(run, list.clear)
    assert main(words(run, "--resume")) == 2
    assert f"{file} is damaged: the history ends at step 0, the checkpoint is of step 2" in capsys.readouterr().err


def test_an_entry_of_two_kinds_is_named_though_one_is_null(finished, tmp_path, capsys):
    """This file has no digest."""
    run = shutil.copytree(finished, tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 10, "loss": null, "validation_bits_per_byte": 7.0}\n')
    assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 2
    assert f"{run / 'metrics.jsonl'} is damaged: line " in capsys.readouterr().err


def test_lengths_of_rows_are_numbers(run, capsys):
    file = change_history(run, lambda history: first(history, "accuracy").update({"accuracy_at": {ESCAPES: 0.5}}))
    assert main(words(run, "--resume")) == 2
    said = capsys.readouterr()
    assert f"{file} is damaged: it has another form: Expected `int`" in said.err
    assert "\x1b" not in said.out + said.err


def test_an_undamaged_run_is_resumed_and_reports_every_length(run, capsys):
    assert main(words(run, "--resume")) == 0
    assert " at 8, " in capsys.readouterr().out
    assert json.loads((run / "result.json").read_text())["accuracy_at"].keys() == {"8", "12"}


def report(record, folder):
    (folder / "record.json").write_text(json.dumps(record))
    return main(["report", str(folder / "record.json"), "--out", str(folder / "page.html")])


@pytest.mark.parametrize("field", ["accuracy_at", "recipe.task", "recipe.neg_eigval", "recipe.layers"])
def test_a_null_in_a_table_of_tasks_is_named(field, finished, tmp_path, capsys):
    found = json.loads((finished / "result.json").read_text())
    holder = found["recipe"] if field.startswith("recipe") else found
    holder[field.rpartition(".")[2]] = None
    assert report({"kind": "tasks", "runs": [found]}, tmp_path) == 2
    assert f"{tmp_path / 'record.json'} is damaged: it has another form: " in capsys.readouterr().err


def test_fields_that_older_versions_did_not_write_have_defaults(finished, tmp_path):
    need_plotly()
    found = json.loads((finished / "result.json").read_text())
    del found["accuracy_at"], found["recipe"]["neg_eigval"], found["recipe"]["kda_lower_bound"]
    del found["recipe"]["gla_conv"]
    assert report({"kind": "tasks", "runs": [found]}, tmp_path) == 0
    assert "[0, 1]" in (tmp_path / "page.html").read_text()


CASE = {"contender": "wyfold", "op": "solve", "shape": {"B": 1}, "gate": "g", "mode": "fwd", "ran": "x"}
CASE |= {"dtype": "float32", "ranks": 2, "times_one_rank": 1.5, "sent": None}
TIMES = {"milliseconds": {"median": 1.0, "quartile1": 0.9, "quartile3": 1.1}, "worst_error": 0.1, "worst_tensor": "o"}


@pytest.mark.parametrize("row", [CASE, CASE | TIMES])
def test_rows_over_ranks_may_lack_fields_with_defaults(row, tmp_path):
    need_plotly()
    assert report({"kind": "bench-ranks", "rows": [row]}, tmp_path) == 0


@pytest.mark.parametrize("field", ["peak", "sent"])
def test_an_amount_without_its_number_is_named(field, tmp_path, capsys):
    assert report({"kind": "bench-ranks", "rows": [CASE | TIMES | {field: {}}]}, tmp_path) == 2
    assert "missing required field" in capsys.readouterr().err


def test_layers_of_a_result_are_a_pattern(finished, tmp_path, capsys):
    found = json.loads((finished / "result.json").read_text())
    found["recipe"]["layers"] = f"gdn {ESCAPES}"
    assert report({"kind": "tasks", "runs": [found]}, tmp_path) == 2
    said = capsys.readouterr().err
    assert "pattern must name " in said and "$.runs[0].recipe" in said and "\x1b" not in said


def test_table_cells_escape_control_characters(capsys, monkeypatch):
    for terminal in (False, True):
        monkeypatch.setattr("sys.stdout.isatty", lambda terminal=terminal: terminal, raising=False)
        results.show("table", ("name",), [[f"a{ESCAPES}"], ["b\tc\nd"]])
        shown = capsys.readouterr().out
        assert r"a\x1b]0;pwned\x07\x1b[2J" in shown and r"b\tc\nd" in shown


def test_a_table_wider_than_the_terminal_becomes_lines(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    results.show(
        "table", ("op", "mode", "ms", "peak MiB"), [["gdn", "fwd", "1.5", "a " * 20], ["kda", "", "2", ""]], labels=2
    )
    title, first, *details, last, number = capsys.readouterr().out.strip().split("\n")
    assert (title, first, last, number.strip()) == ("table", "gdn, fwd", "kda", "ms 2")
    assert details[0].startswith("    ms 1.5; peak MiB a a") and max(map(len, details)) <= 40
