"""Every shipped launch configuration, compiled for its architecture without a GPU: it fits; known spills alone."""

import importlib.util

import pytest
from tests.compile import aot

from wyfold.runtime import launch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

ARCHITECTURES = tuple(aot.SHARED)
TWINS = {"sm_86": "sm_89"}  # the same shared memory, the same instructions for matrix products


@pytest.mark.parametrize("one, other", TWINS.items())
def test_twins_have_one_table(one: str, other: str):
    """What is compiled for one is compiled for both; `make compile` does it twice."""
    assert launch.shipped(one) == launch.shipped(other)


@pytest.mark.parametrize(
    "architecture, call",
    [(name, call) for name in ARCHITECTURES if name not in TWINS for call in aot.calls(name)],
    ids=str,
)
def test_a_call_compiles_and_fits(architecture: str, call: aot.Call | aot.Served):
    found = aot.compiled(call, architecture)
    assert found
    assert not aot.complaints(call, architecture, found)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_configuration_is_left_out(architecture: str):
    """A row that no call here takes was never compiled."""
    taken = set().union(*(aot.rows_of(call, architecture) for call in aot.calls(architecture)))
    shipped = {(kernel, row) for kernel, rows in launch._table(architecture).items() for row in rows}
    assert not shipped - taken


@pytest.mark.parametrize("call", [*aot.CALLS, *aot.WIDE], ids=str)
def test_explain_names_the_rows_that_the_call_takes(call: aot.Call):
    assert aot.rows_explained(call, "sm_90") == aot.rows_of(call, "sm_90")


def test_what_is_over_is_told(monkeypatch):
    call, usage = aot.CALLS[0], aot.Usage("wyfold_scan_triton", 100 * aot.KIB, 255, 8, 600, True)
    monkeypatch.setattr(aot, "allowances", dict)
    assert len(aot.complaints(call, "sm_89", [usage])) == 4
    assert len(aot.complaints(call, "sm_90", [usage])) == 3
    minor = ".".join(launch.version().split(".")[:2])
    monkeypatch.setattr(aot, "allowances", lambda: {minor: {"sm_90": {f"{call}: wyfold_scan_triton": 8}}})
    assert len(aot.complaints(call, "sm_90", [usage])) == 2
