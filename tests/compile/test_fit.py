"""`tools.fit` starts the rows of a new architecture from the measured card's, without those of Gluon kernels."""

import importlib.util
import json

import pytest

from wyfold.runtime import kernel_configs

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from tools import fit


def test_a_new_architecture_starts_without_gluon_rows(monkeypatch, tmp_path):
    monkeypatch.setattr(fit, "CONFIGS", tmp_path)
    card = fit.Card("sm_103")
    measured = kernel_configs.overrides("sm_90")
    assert card.table == {kernel: rows for kernel, rows in measured.items() if not kernel.endswith(".gluon")}
    assert json.loads((tmp_path / "sm_103.json").read_text()) == card.table
    assert any(kernel.endswith(".gluon") for kernel in measured)


def test_a_known_architecture_starts_from_its_rows(monkeypatch):
    monkeypatch.setattr(fit.Card, "write", lambda card: pytest.fail("nothing was fitted"))
    assert fit.Card("sm_80").table == kernel_configs.overrides("sm_80") != {}
