"""Entry point: help of every verb, one-line errors, and exit codes."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests import processes

from wyfold import cli
from wyfold.runtime.extras import install_command

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_has_help(verb, capsys):
    assert cli.main([verb, "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: wyfold {verb}")
    assert "--out" in said


def test_the_overview_names_every_verb(capsys):
    assert cli.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"  {verb} " in said for verb in cli.VERBS)
    assert cli.main([]) == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["polish"], "wyfold: unknown verb 'polish'; there are doctor, demo"),
        (["train", "--stepz", "3"], "wyfold train: unrecognized arguments: --stepz 3"),
        (["train", "--step", "3"], "wyfold train: unrecognized arguments: --step 3"),
        (["train", "--steps", "0"], "wyfold train: argument --steps: must be a whole number of at least 1, got '0'"),
        (["train", "--steps", "3", "--minutes", "1"], "not allowed with argument --steps"),
        (["train", "--minutes", "nan"], "--minutes: must be a number above 0, got 'nan'"),
        (["train", "--held-out", "1"], "--held-out: must be a number above 0 and below 1, got '1'"),
        (["train", "--device", "warp9"], "wyfold train: argument --device: 'warp9' is not a device of this machine: "),
        (["train", "--device", "meta"], "wyfold train: argument --device: 'meta' is not a device of this machine: "),
        (["train", "--backend", "cuda"], "wyfold train: argument --backend: invalid choice: 'cuda'"),
        (["train", "--data", "/nowhere/at/all"], "wyfold train: --data /nowhere/at/all: no such file or folder"),
        (["train", "--data", "/dev/null"], "wyfold train: --data /dev/null: is neither a file nor a folder"),
        (["train", "--resume", "--out", "/nowhere/at/all"], "--resume: no complete checkpoint in /nowhere/at/all"),
        (["train", "--out", "/nowhere/x", "--layers", "gru"], "wyfold train: no model can be built so: "),
        (["generate"], "wyfold generate: the following arguments are required: DIR"),
        (["generate", "/nowhere/at/all"], "wyfold generate: /nowhere/at/all: no such folder"),
        (["generate", ".", "--top-p", "1.5"], "--top-p: must be a number above 0 and at most 1, got '1.5'"),
        (["generate", ".", "--temperature", "-1"], "--temperature: must be a number of at least 0, got '-1'"),
    ],
)
def test_an_invalid_command_line_is_one_line_and_exit_code_2(words, expected, capsys):
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert expected in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (cli.UsageError("give it a file"), 2, "wyfold generate: give it a file"),
        (cli.Failure("it did not work"), 1, "wyfold generate: it did not work"),
        (OSError(28, "No space left on device", "x"), 1, "wyfold generate: [Errno 28] No space left on device: 'x'"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
            1,
            "wyfold generate: not enough memory: [enforce fail] DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate 9 bytes.",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory."),
            1,
            "wyfold generate: not enough memory: CUDA out of memory.",
        ),
        (KeyboardInterrupt(), 130, "wyfold generate: interrupted"),
        (
            ModuleNotFoundError("No module named 'rich.console'", name="rich.console"),
            1,
            'wyfold generate: needs rich, which is not installed: pip install ".[cli]" in a clone of Wyfold, or '
            "pip install filelock matplotlib msgspec numpy rich safetensors",
        ),
    ],
)
def test_exit_codes_of_exceptions(raised, code, said, monkeypatch, capsys):
    def run(args):
        raise raised

    monkeypatch.setattr(importlib.import_module("wyfold.cli.generate"), "run", run)
    assert cli.main(["generate", "."]) == code
    assert capsys.readouterr().err == f"{said}\n"


def test_a_bug_keeps_its_traceback(monkeypatch):
    def run(args):
        raise ModuleNotFoundError("No module named 'wyfold.missing'", name="wyfold.missing")

    monkeypatch.setattr(importlib.import_module("wyfold.cli.generate"), "run", run)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["generate", "."])


@pytest.mark.parametrize("missing", ["matplotlib", "rich", "safetensors"])
def test_without_an_extra_train_says_what_to_install(missing):
    blocked = f"import sys; sys.modules[{missing!r}] = None; from wyfold.cli import main; sys.exit(main(['train']))"
    ended = processes.fresh().run(["-c", blocked])
    assert (ended.returncode, ended.stdout) == (1, "")
    command = install_command("cli")
    assert ended.stderr == f"wyfold train: needs {missing}, which is not installed: {command}\n"


@pytest.mark.parametrize("missing", ["msgspec", "plotly"])
def test_report_names_its_own_extra_whichever_package_is_missing(missing):
    blocked = f"import sys; sys.modules[{missing!r}] = None; from wyfold.cli import main; sys.exit(main(sys.argv[1:]))"
    ended = processes.fresh().run(["-c", blocked, "report", str(ROOT / "docs" / "results")])
    command = install_command("report")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"wyfold report: needs {missing}, which is not installed: {command}\n"


def test_python_m_wyfold_runs_and_a_closed_pipe_is_no_error():
    # The reader of the pipe exits before the first write.
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        ended = subprocess.run([sys.executable, "-m", "wyfold", "--help"], stdout=pipe, stderr=subprocess.PIPE)
    assert ended.stderr == b""
    assert ended.returncode == 141
    ended = subprocess.run([sys.executable, "-m", "wyfold", "nonsense"], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "unknown verb 'nonsense'" in ended.stderr


@pytest.mark.parametrize(
    "words",
    [
        "train --layers gru",
        "train --window 0",
        "train --cp 2",
        "train --length 999999999",
        "train --task mqar --curriculum 9 --steps 9",
        "train --task s_niah --length 3",
        "train --backend triton --device cpu",
        "tasks --train=--widht=3",
    ],
)
def test_refusals_leave_no_folder(words, tmp_path, capsys):
    assert cli.main([*words.split(), "--out", str(tmp_path / "runs" / "one")]) in (1, 2)
    assert capsys.readouterr().err.startswith("wyfold ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("out", ["file/run/one", "link/run"])
def test_a_folder_that_cannot_be_created_is_refused_before_any_work(out, tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert cli.main(["train", "--task", "parity", "--out", str(tmp_path / out)]) == 2
    told = capsys.readouterr()
    assert f"--out: cannot write into {tmp_path / out}: " in told.err and not told.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


@pytest.mark.parametrize(
    "words", ["bench gdn", "verify", "train --task parity", "train", "tasks", "demo", "demo --fresh"]
)
def test_a_folder_that_cannot_be_written_is_refused_before_any_work(words, tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    assert cli.main([*words.split(), "--out", str(file)]) == 2
    told = capsys.readouterr()
    assert f"--out: cannot write into {file}: File exists" in told.err and not told.out
