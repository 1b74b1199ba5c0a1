"""`wyfold doctor` prints the report, as text and as JSON."""

import importlib.util
import json
import re

import torch

import wyfold
from wyfold.cli import main
from wyfold.kernels import table


def test_json_has_every_field_of_the_report(capsys, tmp_path):
    assert main(["doctor", "--json", "--out", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {
        "hardware",
        "versions",
        "known_bad",
        "services",
        "cells",
        "extras",
        "settings",
        "self_checks",
    }
    assert {"processor", "cores", "memory_gib", "gpus"} <= set(report["hardware"])
    assert report["versions"]["torch"] == torch.__version__
    assert report["versions"]["wyfold"] == wyfold.__version__
    assert report["settings"]["threads"] == torch.get_num_threads()
    assert "WYFOLD_CACHE" in report["settings"]["environment_variables"]
    assert set(report["cells"]) == {row.stage for row in table.ENTRIES}
    assert json.loads((tmp_path / "doctor.json").read_text()) == report


def test_the_text_says_how_to_install_missing_packages(monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "rich" else found(name, *rest))
    assert main(["doctor"]) == 0
    assert 'not installed; pip install rich, or ".[cli]" in a clone' in capsys.readouterr().out


def test_the_text_begins_with_what_runs(capsys):
    assert main(["doctor"]) == 0
    assert re.match(r"CPU only: every operator|GPU: \d+ of \d+ operators", capsys.readouterr().out)


def test_a_folder_that_cannot_be_written_is_refused_before_the_report(capsys, tmp_path):
    (tmp_path / "file").touch()
    assert main(["doctor", "--out", str(tmp_path / "file" / "folder")]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "--out: cannot write into" in printed.err
