"""`doctor`: the backend of every operator, the reasons against the others, and the machine's properties."""

import dataclasses
import importlib.util
import inspect
import re
from types import SimpleNamespace

import pytest
import torch

import wyfold
from wyfold.kernels import table
from wyfold.runtime import triton_support

QUESTIONS = {"checked", "doctor", "explain"}


def operators() -> set[str]:
    """Public operators by name, without aliases such as `chunk_gdn`."""
    found = {getattr(wyfold, name) for name in wyfold.__all__ if name not in QUESTIONS}
    return {function.__name__ for function in found if inspect.isfunction(function)}


def test_every_operator_is_listed_with_its_backend_and_reasons():
    services = {s.operator: s for s in wyfold.doctor().services if s.device == "cpu"}
    assert set(services) == operators()
    for service in services.values():
        assert service.backend == "eager"
        assert service.forward
        assert set(service.refused) == {"triton", "gluon"}
        assert "has no " in service.refused["triton"] or "these are on cpu" in service.refused["triton"]
        assert "cannot be chosen" in service.refused["gluon"]


def test_the_reported_backend_runs():
    services = {s.operator: s for s in wyfold.doctor().services if s.device == "cpu"}
    q = torch.empty(1, 16, 1, 16)
    plan = wyfold.explain(wyfold.chunk_delta_rule, q, q, q)
    assert (services["chunk_delta_rule"].forward, services["chunk_delta_rule"].backward) == (
        plan.forward,
        plan.backward,
    )


def test_an_unsupported_device_is_reported_with_reasons(monkeypatch):
    monkeypatch.setattr(table, "ENTRIES", ())
    monkeypatch.setattr(table, "_choose_cached", table._choose)
    service = next(s for s in wyfold.doctor().services if s.operator == "chunk_kda")
    assert service.backend is None
    assert set(service.refused) == {"eager", "triton", "gluon"}


def test_settings_are_read_when_asked():
    with wyfold.checked():
        assert wyfold.doctor().settings["checked"]
    torch.set_num_threads(2)
    assert wyfold.doctor().settings["threads"] == 2


def test_a_missing_extra_comes_with_its_install_command(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "rich" else found(name, *rest))
    assert wyfold.doctor().extras["rich"] == 'not installed; pip install rich, or ".[cli]" in a clone'
    assert {"filelock", "msgspec", "numpy", "plotly"} <= wyfold.doctor().extras.keys()
    assert "rich" not in wyfold.doctor().versions


@pytest.mark.parametrize(("version", "bad"), [("2.9.1+cpu", True), ("2.11.0", False), ("3.0.0", False)])
def test_a_torch_older_than_supported_is_named(version: str, bad: bool, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    assert bool(wyfold.doctor().known_bad) == bad


@pytest.mark.parametrize(
    ("version", "architecture", "said"),
    [
        ("3.6.0", "sm_90", "verified on sm_90 under Triton 3.6.0"),
        ("3.6.0", "sm_103", "not verified on sm_103 under Triton 3.6.0: each kernel is checked at its first use"),
        ("4.0.0", "sm_90", "not verified on sm_90 under Triton 4.0.0: .*`wyfold verify` checks all of them now"),
        ("3.5.0", "sm_90", "refused: Triton 3.5.0 is known to be wrong on sm_90"),
    ],
)
def test_a_card_is_reported_with_the_status_of_its_kernels(version: str, architecture: str, said: str, monkeypatch):
    """Next to its name and architecture, and as the evidence for every stage's kernels."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name="a card", total_memory=2**37)
    )
    monkeypatch.setattr(triton_support, "architecture", lambda device: architecture)
    monkeypatch.setattr(triton_support, "support_of", lambda device: triton_support.support_for(architecture, version))
    report = wyfold.doctor()
    (card,) = report.hardware["gpus"]
    assert (card["name"], card["architecture"]) == ("a card", architecture)
    assert re.match(said, card["triton"])
    kernels = {stage: cell["triton"] for stage, cell in report.cells.items() if "triton" in cell}
    assert {"prepare", "scan", "norm"} <= kernels.keys() and set(kernels.values()) == {card["triton"]}
    assert card["triton"] in str(report)


def test_the_text_groups_operators_with_one_backend_and_one_reason():
    report = wyfold.doctor()
    on_cpu = tuple(service for service in report.services if service.device == "cpu")
    report = dataclasses.replace(report, self_checks=(), services=on_cpu)
    text = str(report)
    assert f"  all {len(on_cpu)} operators" in text and "solve_tril" not in text
    first, *rest = on_cpu
    mixed = str(
        dataclasses.replace(report, self_checks=(), services=(dataclasses.replace(first, backend="triton"), *rest))
    )
    for service in on_cpu:
        assert re.search(rf"^  {service.operator} +cpu ", mixed, re.MULTILINE)
    assert text.count("matplotlib") == 1


def without_a_gpu(monkeypatch) -> str:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return str(dataclasses.replace(wyfold.doctor(), self_checks=()))


def test_without_a_gpu_the_text_says_that_this_is_normal_and_lists_no_other_backend(monkeypatch):
    text = without_a_gpu(monkeypatch)
    first = 'CPU only: every operator runs in PyTorch (backend "eager"); this is normal without a GPU'
    assert text.splitlines()[0] == first
    assert "not triton" not in text and "gluon" not in text
    assert "known bad versions" not in text and "self-checks" not in text
    assert re.search(r"^  gpus +none$", text, re.MULTILINE)


def test_on_a_gpu_the_text_says_what_runs_in_kernels_and_why_the_rest_does_not(monkeypatch):
    """The services of an H100, without one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    report = wyfold.doctor()
    on_cpu = [service for service in report.services if service.device == "cpu"]
    by_request = {"eager": "on request only", "gluon": "cannot be chosen"}
    on_gpu = [
        dataclasses.replace(service, device="cuda", backend="triton", refused=by_request)
        if service.operator != "fused_recurrent_ttt_linear"
        else dataclasses.replace(service, device="cuda", backend=None, refused=by_request | {"triton": "has no kernel"})
        for service in on_cpu
    ]
    text = str(dataclasses.replace(report, self_checks=(), services=(*on_cpu, *on_gpu)))
    some = f'GPU: {len(on_gpu) - 1} of {len(on_gpu)} operators run in kernels (backend "triton"); '
    assert text.splitlines()[0] == some + '1 run on it only with backend="eager", in PyTorch'
    reasons = [
        "not eager",
        "  on request only: all operators",
        "not triton",
        "  has no kernel: fused_recurrent_ttt_linear",
    ]
    assert text.splitlines()[-4:] == reasons
    text = str(dataclasses.replace(report, self_checks=(), services=(*on_cpu, *on_gpu[:2])))
    assert text.splitlines()[0] == 'GPU: 2 of 2 operators run in kernels (backend "triton")'


def test_an_operator_without_a_backend_on_the_cpu_keeps_its_reasons():
    report = wyfold.doctor()
    first, second = (service for service in report.services[:2])
    lost = dataclasses.replace(first, backend=None, refused={"eager": "not here"})
    text = str(dataclasses.replace(report, self_checks=(), services=(lost, second)))
    assert text.startswith("CPU only: not every operator runs; the reasons are below\n")
    assert text.endswith("not eager\n  not here: all operators")


def test_without_a_card_the_kernels_have_no_evidence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(triton_support, "support_of", lambda device: triton_support.Support("", "", False, "no card"))
    assert wyfold.doctor().cells["scan"]["triton"] == "no card"
