"""Every script under examples/ runs for a few steps and prints its result."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested():
    tested = {"compare_transformers", "finetune_hybrid", "switch_fla"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested


def test_a_script_for_fla(capsys: pytest.CaptureFixture[str]):
    result = example("switch_fla").main(["--steps", "3", "--pairs", "4"])
    assert result["difference"] < 1e-5
    assert "recalled" in capsys.readouterr().out


def test_finetuning_on_packed_documents(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("transformers", reason="transformers is not installed")
    result = example("finetune_hybrid").main(["--steps", "3", "--tokens", "256"])
    assert abs(result["packed"] - result["alone"]) < 1e-5
    assert abs(result["stock_packed"] - result["alone"]) > 1e-5, "documents leak no more in the stock code"
    assert "documents leak" in capsys.readouterr().out


def test_patched_beside_stock(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    compare = example("compare_transformers")
    monkeypatch.setattr(compare, "peak_mib_alone", compare.peak_mib)  # a fresh process costs an import
    words = f"--families kimi_linear --tokens 96 --head-dim 16 --rounds 1 --json {tmp_path / 'rows.json'}"
    patched, stock = compare.main(words.split())
    assert patched["logits"] < 1e-5 and patched["gradients"] < 1e-5
    assert stock["logits"] == stock["gradients"] == 0
    assert min(row["ms"] for row in (patched, stock)) > 0 and (tmp_path / "rows.json").exists()
    assert "kimi_linear" in capsys.readouterr().out
