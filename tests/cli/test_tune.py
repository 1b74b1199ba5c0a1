"""`wyfold tune`: candidates, refusals before timing, and written files."""

import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from wyfold import cli
from wyfold.cli import tuner as tuning
from wyfold.cli.bench.cases import Case
from wyfold.cli.bench.timing import Kernel
from wyfold.cli.tuner import Candidate, Tuner, neighbours
from wyfold.reference.error import judge
from wyfold.reference.shapes import Shape
from wyfold.runtime import kernel_configs, triton_support
from wyfold.runtime.kernel_configs import Config, LaunchKey
from wyfold.runtime.plan import Launch

SHIPPED = Config(4, 2, {"BV": 64})
CASE = Case("gdn", Shape(1, 64, 2, 2, 16, 16), "mid", "float32", "fwdbwd", 0)
LAUNCH = Launch("scan", "fp32 K16 V16 C64 scalar WF", "default")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_tune_says_what_it_needs(capsys):
    assert cli.main(["tune", "scan"]) == cli.FAILED
    assert "needs a CUDA device" in capsys.readouterr().err


def test_an_unknown_stage_is_an_error(capsys):
    assert cli.main(["tune", "skan"]) == cli.USAGE
    assert "invalid choice: 'skan'" in capsys.readouterr().err


def test_the_shipped_configuration_is_tried_first_and_once():
    found = neighbours(SHIPPED)
    assert found[0] == SHIPPED and found.count(SHIPPED) == 1
    assert len({str(config) for config in found}) == len(found)
    assert {config.warps for config in found} == {2, 4, 8}
    assert {config.blocks["BV"] for config in found} == {32, 64, 128}


def test_no_candidate_needs_more_registers_than_exist():
    for config in neighbours(replace(SHIPPED, warps=16)):
        assert 32 * config.warps * (config.registers or 0) <= 65_536


def test_parameters_other_than_tiles_are_not_varied():
    counts = Config(4, 1, {"TILE": 4096, "PROGRAMS": 1056})
    assert {tuple(config.blocks.items()) for config in neighbours(counts)} == {(("TILE", 4096), ("PROGRAMS", 1056))}


class CompileError(Exception):
    """Triton's error for a kernel that does not fit."""


CompileError.__module__ = "triton.runtime.errors"


@pytest.fixture
def tuner(monkeypatch) -> Tuner:
    """A tuner with a fake GPU: the tile of a configuration determines its outcome."""
    made = Tuner(LAUNCH, CASE, torch.device("cpu"), rounds=3)
    trying, variants = [SHIPPED], {}

    def enter(candidate: Candidate):
        trying.append(candidate.config)
        return nullcontext()

    def call() -> None:
        if trying[-1].blocks["BV"] == 256:
            raise CompileError("out of resource: shared memory")
        variants[trying[-1].blocks["BV"]] = SimpleNamespace(n_spills=500 if trying[-1].blocks["BV"] == 128 else 0)

    def measured(*_, **__):
        odd = trying[-1].blocks["BV"] == 16 and len(bits) % 2
        bits.append(odd)
        return {"o": torch.full((1, 4), 2.0 if trying[-1].blocks["BV"] == 32 else 1.0 + odd)}

    bits: list[bool] = []
    truth = torch.ones(1, 4, dtype=torch.float64)
    monkeypatch.setattr(made, "trying", enter)
    monkeypatch.setattr(made, "call", lambda case: call)
    monkeypatch.setattr(made, "compiled", lambda: {"wyfold_scan_triton": variants})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(tuning, "measured", measured)
    monkeypatch.setattr(tuning, "verdicts", lambda spec, drawn, got: [judge(got["o"], truth, name="o", target=1e-3)])

    class Card:
        def kernels(self, run):
            run()
            return [Kernel("wyfold_scan_triton", 1, trying[-1].blocks["BV"] / 10), Kernel("fill", 1, 99.0)]

    monkeypatch.setattr(tuning, "Gpu", Card)
    return made


def test_only_candidates_that_fit_and_are_correct_are_timed(tuner: Tuner, monkeypatch):
    tiles = (64, 8, 16, 32, 128, 256)
    monkeypatch.setattr(tuning, "neighbours", lambda config: [replace(SHIPPED, blocks={"BV": n}) for n in tiles])
    found = {candidate.config.blocks["BV"]: candidate for candidate in tuner.tune()}
    assert found[64].milliseconds == 6.4 and found[8].milliseconds == 0.8
    assert "other bits" in found[16].refusal
    assert found[32].refusal.startswith("wrong: o")
    assert "spills 500 bytes, where 0 will do" in found[128].refusal
    assert found[256].refusal == "does not compile or fit: out of resource: shared memory"
    assert all(found[n].milliseconds == 0 for n in (16, 32, 128, 256))


def test_a_bug_is_not_a_refusal(tuner: Tuner, monkeypatch):
    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(tuner, "call", lambda case: broken)
    with pytest.raises(ZeroDivisionError):
        tuner.tune()


def test_the_fastest_becomes_a_row_of_the_table(monkeypatch, tmp_path):
    config = replace(SHIPPED, registers=255)
    fastest, shipped = Candidate(config, milliseconds=1.0), Candidate(SHIPPED, milliseconds=2.0)
    wrong = Candidate(replace(SHIPPED, warps=8), "wrong: o")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(triton_support, "support_of", lambda device: triton_support.support_for("sm_90", "3.6.0"))
    monkeypatch.setattr(tuning, "launches", lambda stage, case: [LAUNCH])
    words = ["tune", "scan", "--ops", "gdn", "--out", str(tmp_path)]
    for tuned, code, row in (
        ([shipped, fastest, wrong], cli.DONE, {"BV": 64, "warps": 4, "stages": 2, "registers": 255}),
        ([shipped, wrong], cli.DONE, None),
        ([wrong], cli.FAILED, None),
    ):
        monkeypatch.setattr(tuning, "Tuner", lambda *_, tuned=tuned: SimpleNamespace(tune=lambda: tuned))
        assert cli.main(words) == code
        rows = json.loads((tmp_path / "sm_90.json").read_text())["scan.triton"]  # the architecture's own
        report = json.loads((tmp_path / "tune-sm_90-scan.json").read_text())
        assert rows.get(LAUNCH.key) == (row and row | {"proved": "tune-sm_90-scan.json"})
        assert len(report["launches"][f"scan, {LAUNCH.key}"]) == len(tuned)
        assert report["support"]["architecture"] == "sm_90" and report["versions"]["torch"]
    assert cli.main([*words, "--arch", "sm_80"]) == cli.USAGE


def test_the_trial_configuration_is_launched():
    cpu, key = torch.device("cpu"), LaunchKey.parse(LAUNCH.key)
    before, other = kernel_configs.tuned("scan.triton", key, cpu), LaunchKey.parse("fp32 K8 V8 C16 none WF")
    with kernel_configs.override_row("sm_90", "scan.triton", LAUNCH.key, Config(16, 7)):
        assert kernel_configs.tuned("scan.triton", key, cpu) == Config(16, 7)
        assert kernel_configs.tuned("scan.triton", other, cpu) != Config(16, 7)
    assert kernel_configs.tuned("scan.triton", key, cpu) == before
