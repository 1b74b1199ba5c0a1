"""The demo end to end on a tiny recipe, and a decoding check that fails."""

import os
import signal

import pytest
import torch

from wyfold.cli import demo, main
from wyfold.cli.train.trainer import Trainer
from wyfold.models import Decoder, DecoderConfig

TINY = {
    "depth": 2, "layers": "gdn attention", "width": 16, "heads": 2, "head_dim": 8, "window": 16, "batch": 2,
    "length": 32, "steps": 4, "warmup": 1, "eval_every": 2, "eval_bytes": 256,
}  # fmt: skip


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(demo, "RECIPE", {**demo.RECIPE, **TINY})
    monkeypatch.setattr(demo, "SAMPLE_BYTES", 20)
    monkeypatch.setattr(demo, "CHECKED_BYTES", 70)


def run(out, *words):
    return main(["demo", "--out", str(out), *words])


def test_demo_trains_samples_and_checks_and_then_only_samples_and_checks(tiny, tmp_path, capsys):
    assert run(tmp_path) == 0
    said = capsys.readouterr().out
    assert "bits per byte   . training" in said
    assert said.count(": pass") == 2
    assert (tmp_path / "curve.png").exists()
    first = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    assert first[-1] == "step-00000004"

    assert run(tmp_path) == 0
    again = capsys.readouterr().out
    assert "already finished, at step 4" in again
    assert again.split("A sample")[1] == said.split("A sample")[1]

    assert run(tmp_path, "--fresh") == 0
    assert "bits per byte   . training" in capsys.readouterr().out


def test_an_interrupted_demo_continues(tiny, tmp_path, monkeypatch, capsys):
    take = Trainer._take_step

    def interrupted(self):
        os.kill(os.getpid(), signal.SIGINT)
        return take(self)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_take_step", interrupted)
        assert run(tmp_path) == 130
    assert "stopped after step 1" in capsys.readouterr().out
    assert run(tmp_path) == 0
    assert "from step 1" in capsys.readouterr().out


def test_another_recipe_in_the_folder_is_refused_with_advice(tiny, tmp_path, monkeypatch, capsys):
    assert run(tmp_path) == 0
    monkeypatch.setitem(demo.RECIPE, "lr", 1e-4)
    assert run(tmp_path) == 2
    assert "--lr is 0.0001 here" in (said := capsys.readouterr().err)
    assert "--fresh starts over" in said


def test_the_check_is_longer_than_window_and_chunks_of_the_recipe():
    config = DecoderConfig(pattern=demo.RECIPE["layers"], num_layers=demo.RECIPE["depth"])
    attention = config.layers.count("attention")
    assert 1 <= attention <= config.layers.count("gated_delta_net") + config.layers.count("kda")
    assert demo.CHECKED_BYTES > 2 * demo.RECIPE["window"]
    assert demo.CHECKED_BYTES % 16 != 0


class Forgetful(Decoder):
    """A decoder whose cache loses a little of its first state."""

    def forward(self, ids, labels=None, *, layout=None, cache=None):
        if cache is not None and "state" in cache.layers[0]:
            cache.layers[0]["state"] = cache.layers[0]["state"] * 0.5
        return super().forward(ids, labels, layout=layout, cache=cache)


@pytest.mark.parametrize(("kind", "code", "verdict"), [(Decoder, 0, ": pass"), (Forgetful, 1, ": FAIL")])
def test_the_check_detects_a_wrong_cache(kind, code, verdict, capsys):
    config = DecoderConfig(pattern="gdn attention", hidden_size=16, num_layers=2, num_heads=2, head_dim=8)
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    assert demo.check(model, torch.randint(256, (1, 70))) == code
    assert capsys.readouterr().out.count(verdict) == 2
