"""What a person sees of a run: the first step in a log, and the reason of a long wait."""

import time

import pytest

from wyfold.cli.train import progress
from wyfold.cli.train.progress import Display, explain_wait


@pytest.mark.parametrize("start", [0, 60])
def test_a_log_has_the_first_step_then_every_nth(capsys, start):
    with Display(100, start) as display:
        for step in range(start + 1, 101):
            display.step(step, "loss 1.0")
    steps = [int(line.split()[1].split("/")[0]) for line in capsys.readouterr().err.splitlines()]
    assert steps == [start + 1, *(step for step in range(start + 2, 101) if step % 5 == 0)]


def test_a_long_wait_is_explained(capsys, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE_S", 0.01)
    printed, until = "", time.monotonic() + 30
    with explain_wait("the model is built"):
        while not printed and time.monotonic() < until:
            time.sleep(0.01)
            printed = capsys.readouterr().err
    assert printed == "please wait: the model is built\n"


@pytest.mark.parametrize("patience, is_main", [(0.01, False), (60, True)], ids=["another process", "a short wait"])
def test_nothing_is_explained(capsys, monkeypatch, patience, is_main):
    monkeypatch.setattr(progress, "PATIENCE_S", patience)
    with explain_wait("the model is built", is_main):
        time.sleep(0.1)
    assert capsys.readouterr().err == ""
