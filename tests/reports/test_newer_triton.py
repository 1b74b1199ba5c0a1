"""`pip install .` brought a torch whose Triton is not in the support table, and every GPU kernel was refused.

Such a Triton is accepted, and each kernel is checked at its first use. Without a Triton, the refusal and
`wyfold doctor` name the torch version to install.
"""

import json
import re
from pathlib import Path

import pytest
import torch

import wyfold
from wyfold.kernels import table
from wyfold.runtime import triton_support

ROOT = Path(__file__).resolve().parents[2]
INSTALL = 'pip install "torch>=2.11,<2.16", which brings Triton 3.6 to 3.9'


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch):
    """Pretend that a given version of Triton is installed."""

    def forget() -> None:
        triton_support.support_of.cache_clear()
        table._choose_cached.cache_clear()

    def install(version: str) -> None:
        monkeypatch.setattr(triton_support, "triton_version", lambda: version)
        forget()

    yield install
    forget()  # otherwise later tests on a GPU would see the pretended version


@pytest.mark.parametrize("version", ["3.10.0", "4.0.0", "3.5.1", "3.11.0+git1234"])
def test_a_call_on_a_gpu_gets_the_kernels(version: str, triton, monkeypatch):
    triton(version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(triton_support, "architecture", lambda device: "sm_80")
    found = table.plan("kda", torch.device("cuda"), None, forward=("prepare", "scan"))
    assert found.backend == "triton"


def test_a_call_without_triton_names_the_torch_to_install(triton, monkeypatch):
    triton("")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(triton_support, "architecture", lambda device: "sm_80")
    with pytest.raises(wyfold.UnsupportedError) as refused:
        table.plan("kda", torch.device("cuda"), None, forward=("prepare", "scan"))
    assert f"Triton is not installed; {INSTALL}" in str(refused.value)


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0", "3.9.1", "4.0.0", ""])
def test_doctor_accepts_any_triton_and_none_on_a_cpu(version: str, triton, monkeypatch):
    triton(version)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert wyfold.doctor().known_bad == ()


def test_doctor_reports_a_missing_triton_with_a_torch_for_gpus(triton, monkeypatch):
    triton("")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (reason,) = wyfold.doctor().known_bad
    assert reason == f"every GPU kernel is refused: Triton is not installed; {INSTALL}"


def test_readme_says_which_torch_has_kernels_as_the_table_does():
    known = json.loads((ROOT / "src/wyfold/runtime/configs/support.json").read_text())
    install = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Install")[2].partition("```python")[0]
    rows = re.findall(r"^\| ([\d., ]+?) \| (\d\.\d+) \|", install, re.M)
    assert [triton for _, triton in rows] == list(known["cells"])
    (span,) = set(re.findall(r'"torch>=[\d.]+,<[\d.]+"', install))
    assert span in known["remedy"]
