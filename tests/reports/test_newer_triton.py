"""`pip install .` brought a torch whose Triton is not in the support table, and every GPU kernel was refused.

The refusal, `wyfold doctor` and README name the torch version to install instead.
"""

import json
import re
from pathlib import Path

import pytest
import torch

import wyfold
from wyfold.cli import main
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
def test_a_call_on_a_gpu_names_the_torch_to_install(version: str, triton, monkeypatch):
    triton(version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(triton_support, "architecture", lambda device: "sm_80")
    with pytest.raises(wyfold.UnsupportedError) as refused:
        table.plan("kda", torch.device("cuda"), None, forward=("prepare", "scan"))
    said = str(refused.value)
    assert f"Triton {version} is not in the table, which has 3.6, 3.7, 3.8 and 3.9" in said
    assert f"(torch here is {torch.__version__})" in said and INSTALL in said


@pytest.mark.parametrize("version", ["3.10.0", "4.0.0"])
def test_doctor_names_the_torch_to_install(version: str, triton, capsys):
    triton(version)
    assert main(["doctor", "--json"]) == 0
    (reason,) = json.loads(capsys.readouterr().out)["known_bad"]
    assert reason.startswith(f"every GPU kernel is refused: Triton {version} is not in the table") and INSTALL in reason


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0", "3.9.1", ""])
def test_doctor_accepts_a_listed_triton_and_none_on_a_cpu(version: str, triton, monkeypatch):
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
