"""What a person sees of a run: the first step in a log, and the reason of a long wait."""

import time

import pytest

from wyfold.cli import progress
from wyfold.cli.progress import Display, explain_wait


@pytest.mark.parametrize("start", [0, 60])
def test_a_log_has_the_first_step_then_every_nth(capsys, start):
    with Display(100, start) as display:
        for step in range(start + 1, 101):
            display.step(step, "loss 1.0")
    steps = [int(line.split()[1].split("/")[0]) for line in capsys.readouterr().err.splitlines()]
    assert steps == [start + 1, *(step for step in range(start + 2, 101) if step % 5 == 0)]


@pytest.mark.parametrize(
    "seconds, is_main, expected",
    [(0.3, True, "please wait: the model is built\n"), (0.3, False, ""), (0.0, True, "")],
    ids=["a long wait", "another process", "a short one"],
)
def test_a_long_wait_is_explained(capsys, monkeypatch, seconds, is_main, expected):
    monkeypatch.setattr(progress, "PATIENCE_S", 0.1)
    with explain_wait("the model is built", is_main):
        time.sleep(seconds)
    time.sleep(0.2)
    assert capsys.readouterr().err == expected
