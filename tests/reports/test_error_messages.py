"""An exception without arguments made the command line's error printer raise IndexError.

For any exception the user gets one line and the exit code; for a bug, its own traceback.
"""

import importlib
import io
import os
import subprocess
import sys

import pytest
import torch

from wyfold import cli
from wyfold.cli.bench.runner import error_line


class Unprintable(OSError):
    """An exception whose `__str__` raises."""

    def __str__(self) -> str:
        raise ValueError("no text")


ENDINGS = [
    (MemoryError(), 1, "not enough memory"),
    (torch.OutOfMemoryError(), 1, "not enough memory"),
    (MemoryError("\n\n"), 1, "not enough memory"),
    (MemoryError("first\nsecond"), 1, "not enough memory: first second"),
    (OSError(), 1, "OSError"),
    (PermissionError(13, "Permission denied", "a\nb\x1b[2J\ud800"), 1, None),
    (Unprintable(), 1, "Unprintable"),
    (cli.UsageError(), 2, "UsageError"),
    (cli.Failure(""), 1, "Failure"),
    (cli.UsageError("a name with\na line end"), 2, "a name with a line end"),
    (cli.UsageError("a\x1b]0;title\x07b\ud800c\u202ed"), 2, r"a\x1b]0;title\x07b\ud800c\u202ed"),
    (cli.UsageError(7), 2, "7"),
    (KeyboardInterrupt(), 130, "interrupted"),
    (SystemExit("left with words"), 1, "left with words"),
    (SystemExit(), 0, ""),
    (ExceptionGroup("two", [cli.UsageError("one"), cli.UsageError("one"), cli.Failure("other")]), 2, "one; other"),
    (BaseExceptionGroup("stopped", [KeyboardInterrupt()]), 130, "interrupted"),
    (ModuleNotFoundError("No module named 'torch'", name="torch"), 1, None),
]


def ended(raised: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    def run(args):
        raise raised

    monkeypatch.setattr(importlib.import_module("wyfold.cli.doctor"), "run", run)
    return cli.main(["doctor"])


@pytest.mark.parametrize(("raised", "code", "message"), ENDINGS, ids=lambda value: repr(value)[:40])
def test_any_exception_is_reported_in_one_line(raised, code, message, monkeypatch, capsys):
    assert ended(raised, monkeypatch) == code
    printed = capsys.readouterr().err
    if message is None:
        assert printed.startswith("wyfold doctor: ") and printed.count("\n") == 1
        assert "\x1b" not in printed and "\ud800" not in printed
    else:
        assert printed == (f"wyfold doctor: {message}\n" if message else "")


@pytest.mark.parametrize(
    "bug",
    [
        ModuleNotFoundError(),
        RuntimeError(),
        RecursionError(),
        ExceptionGroup("with a bug", [cli.UsageError("one"), ZeroDivisionError()]),
        ExceptionGroup("two", [ExceptionGroup("one", [ValueError()]), OSError()]),
    ],
    ids=repr,
)
def test_a_bug_keeps_its_own_traceback(bug, monkeypatch):
    with pytest.raises(type(bug)) as raised:
        ended(bug, monkeypatch)
    assert raised.value is bug


def test_a_closed_standard_error_changes_no_exit_code(monkeypatch):
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr(sys, "stderr", stream)
        assert cli.main(["polish"]) == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize("words", [["--help"], ["--version"]])
def test_standard_output_on_a_full_disk_is_one_line_and_exit_code_1(words):
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-m", "wyfold", *words], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "No space left on device" in done.stderr


def test_without_standard_output_help_is_silent():
    code = "import sys; sys.stdout = None; from wyfold.cli import main; sys.exit(main(['--help']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_row_of_bench_quotes_any_exception():
    assert error_line(RuntimeError()) == "RuntimeError: RuntimeError"
    assert error_line(Unprintable()) == "Unprintable: Unprintable"
