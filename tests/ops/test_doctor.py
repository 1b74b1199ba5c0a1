"""The doctor's report: every operator, who serves it, why the others do not, and what the machine has."""

import importlib.util
import inspect

import pytest
import torch

import wyfold
from wyfold.stages import table

QUESTIONS = {"checked", "doctor", "explain"}


def operators() -> set[str]:
    """Public operators under their own names; `chunk_gdn` and its kin are second names of the same functions."""
    found = {getattr(wyfold, name) for name in wyfold.__all__ if name not in QUESTIONS}
    return {function.__name__ for function in found if inspect.isfunction(function)}


def test_every_operator_is_there_with_its_backend_and_the_others_reasons():
    services = {s.operator: s for s in wyfold.doctor().services if s.device == "cpu"}
    assert set(services) == operators()
    for service in services.values():
        assert service.backend == "eager"
        assert service.forward
        assert set(service.refused) == {"triton", "gluon"}
        assert all("has no " in reason or "not on CUDA" in reason for reason in service.refused.values())


def test_what_it_says_is_what_runs():
    services = {s.operator: s for s in wyfold.doctor().services if s.device == "cpu"}
    q = torch.empty(1, 16, 1, 16)
    plan = wyfold.explain(wyfold.chunk_delta_rule, q, q, q)
    assert (services["chunk_delta_rule"].forward, services["chunk_delta_rule"].backward) == (
        plan.forward,
        plan.backward,
    )


def test_a_device_nobody_serves_is_refused_with_reasons(monkeypatch):
    monkeypatch.setattr(table, "ROWS", ())
    monkeypatch.setattr(table, "_remembered", table._choose)
    service = next(s for s in wyfold.doctor().services if s.operator == "chunk_kda")
    assert service.backend is None
    assert set(service.refused) == {"eager", "triton", "gluon"}


def test_settings_are_read_when_asked():
    with wyfold.checked():
        assert wyfold.doctor().settings["checked"]
    torch.set_num_threads(2)
    assert wyfold.doctor().settings["threads"] == 2


def test_a_missing_extra_comes_with_the_line_that_installs_it(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "rich" else found(name, *rest))
    assert wyfold.doctor().extras["rich"] == 'not installed; pip install "wyfold[cli]"'
    assert "rich" not in wyfold.doctor().versions


@pytest.mark.parametrize(("version", "bad"), [("2.9.1+cpu", True), ("2.11.0", False), ("3.0.0", False)])
def test_a_torch_older_than_supported_is_named(version: str, bad: bool, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    assert bool(wyfold.doctor().known_bad) == bad
