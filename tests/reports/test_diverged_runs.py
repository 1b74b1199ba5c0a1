"""Diverged runs and failing evaluations of `wyfold train`, and control characters on a terminal.

`wyfold train --task parity --lr 1e300` succeeded with a checkpoint of NaN weights: the loss before the update was
finite, and argmax accepts NaN logits. `--eval-lengths` beyond the available memory failed after the last step. Progress
lines wrote control characters of a folder's name to the terminal.
"""

import io
import json
import sys
from pathlib import Path

import pytest
import torch

from wyfold.cli import main, results, say
from wyfold.cli.train import checkpoint
from wyfold.cli.train.trainer import Trainer
from wyfold.models import Decoder

pytestmark = pytest.mark.usefixtures("undrawn")

TINY = "--layers gdn --depth 1 --width 8 --heads 1 --head-dim 8 --batch 1 --length 8 --eval-bytes 16 --warmup 0".split()
ADVICE = "is from before; a smaller --lr may help"


def parity(folder: Path, *words: str) -> int:
    return main(["train", "--task", "parity", "--out", str(folder), *TINY, "--eval-lengths", "8", *words])


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint/*"))


def diverge_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Make a parameter NaN in the update after `step` steps; the losses until then are finite."""
    take = Trainer._take_step

    def diverging(self: Trainer):
        found = take(self)
        if self.step == step:
            with torch.no_grad():
                next(self.model.parameters()).view(-1)[0] = torch.nan
        return found

    monkeypatch.setattr(Trainer, "_take_step", diverging)


ENDS = {"1": "step 1: parameters are infinite or NaN after the update", "3": "step 2: loss nan, gradient norm nan"}


@pytest.mark.parametrize("steps", ENDS)
def test_parameters_that_are_not_finite_end_a_task(tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: str):
    assert parity(tmp_path / "run", "--lr", "1e300", "--steps", steps) == 1
    said = capsys.readouterr().err
    assert ENDS[steps] in said
    assert said.rstrip().endswith(ADVICE)
    assert kept(tmp_path / "run") == []


def test_whole_checkpoints_are_not_replaced(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    """Step 3 is saved between two checks, before the loss of the next step is known."""
    diverge_after(monkeypatch, 3)
    assert parity(tmp_path / "run", "--steps", "6", "--save-every", "1", "--eval-every", "100") == 1
    assert "step 3: parameters are infinite or NaN after the update" in capsys.readouterr().err
    assert kept(tmp_path / "run") == ["step-00000001", "step-00000002"]
    model = checkpoint.load_model(tmp_path / "run", torch.device("cpu"), None)
    assert all(x.isfinite().all() for x in model.parameters())


def test_an_interrupted_run_does_not_save_them(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    diverge_after(monkeypatch, 2)
    take = Trainer._take_step

    def stopping(self: Trainer):
        found = take(self)
        self.stopping = self.step == 2
        return found

    monkeypatch.setattr(Trainer, "_take_step", stopping)
    assert parity(tmp_path / "run", "--steps", "6", "--eval-every", "100") == 1
    assert "step 2: parameters are infinite or NaN" in capsys.readouterr().err
    assert kept(tmp_path / "run") == []


@pytest.mark.parametrize(("length", "name"), [(8, "accuracy"), (16, "accuracy of rows of 16")])
def test_logits_that_are_nan_end_a_task(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch, length: int, name):
    """The parameters and the training losses are finite."""
    forward = Decoder.forward

    def broken(self, ids, labels=None, **where):
        logits, loss = forward(self, ids, labels, **where)
        spoilt = not self.training and ids.shape[1] == length and trained(self)
        return (logits * torch.nan, loss * torch.nan) if spoilt else (logits, loss)

    trained = lambda model: torch.equal(model.norm.weight, torch.ones_like(model.norm.weight)) is False
    monkeypatch.setattr(Decoder, "forward", broken)
    assert parity(tmp_path / "run", "--steps", "1", "--eval-lengths", "16") == 1
    said = capsys.readouterr().err
    assert f"step 1: {name} is nan. What is in " in said and said.rstrip().endswith(ADVICE)
    assert kept(tmp_path / "run") == []


# --- --eval-lengths --------------------------------------------------------------------------------------------------


def test_lengths_beyond_the_limit_of_a_batch_are_refused(tmp_path: Path, capsys):
    assert parity(tmp_path / "run", "--steps", "1", "--eval-lengths", "16", str(2**27 + 1)) == 2
    assert f"--eval-lengths {2**27 + 1}: must be at most {2**27}" in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_lengths_beyond_memory_are_refused(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    forward = Decoder.forward

    def small(self, ids, labels=None, **where):
        if ids.shape[1] > 8:
            torch.empty(2**60, dtype=torch.uint8)
        return forward(self, ids, labels, **where)

    monkeypatch.setattr(Decoder, "forward", small)
    assert parity(tmp_path / "run", "--steps", "1", "--eval-lengths", "16") == 2
    assert "--eval-lengths 16: not enough memory for one row of so many tokens" in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_lengths_are_tried_without_a_change_to_the_run(tmp_path: Path):
    words = "--steps", "2", "--eval-every", "1"
    for folder, lengths in (("short", "8"), ("long", "16")):
        assert parity(tmp_path / folder, *words, "--eval-lengths", lengths) == 0
    losses = [
        [
            entry["loss"]
            for entry in map(json.loads, (tmp_path / folder / "metrics.jsonl").read_text().splitlines())
            if "loss" in entry
        ]
        for folder in ("short", "long")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 2


# --- output on a terminal
# ----------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_control_characters_of_a_folder_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    folder = tmp_path / "run\x1b[2J"
    assert parity(folder, "--steps", "1") == 0
    assert parity(folder, "--steps", "1") == 0  # finished already
    written = sys.stdout.getvalue()
    assert "\x1b" not in written and written.count(r"run\x1b[2J") >= 3


def test_a_pipe_gets_the_characters_themselves(capsys, monkeypatch: pytest.MonkeyPatch):
    say("wrote a\x1b[2J\tb")
    results.say("wrote c\x1b[2J")
    assert capsys.readouterr() == ("wrote a\x1b[2J\tb\n", "wrote c\x1b[2J\n")
    monkeypatch.setattr(sys, "stderr", Terminal())
    results.say("wrote c\x1b[2J")
    assert sys.stderr.getvalue() == "wrote c\\x1b[2J\n"
