"""The report has every run and result, and a browser draws it without network or errors."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.cli.test_tasks import TINY, train

from wyfold.cli import main

pytest.importorskip("plotly", reason="plotly is not installed")

from wyfold.cli import figures

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """A run of a task and its table. Session scope, because long tests run first and others much later."""
    folder = tmp_path_factory.mktemp("runs")
    assert train(folder / "parity <&>", "parity", f"{TINY} --length 8 --eval-lengths 12") == 0
    found = json.loads((folder / "parity <&>" / "result.json").read_text())
    (folder / "tasks.json").write_text(json.dumps({"kind": "tasks", "runs": [found]}))
    return folder


@pytest.fixture(scope="session")
def page(runs):
    """Report of the runs, and of all stored results of the repository."""
    file = runs.parent / "report.html"
    assert main(["report", str(runs), str(RESULTS), "--out", str(file), "--title", "A & B"]) == 0
    return file


def test_every_run_and_result_has_its_section(page):
    text = page.read_text()
    titles = re.findall(r"<h2>(.*?)</h2>", text)
    assert len(titles) == 2 + len(list(RESULTS.glob("*.json")))
    assert any("parity &lt;&amp;&gt;" in title for title in titles)
    assert "<title>A &amp; B</title>" in text
    assert "wyfold bench" in text and "NVIDIA H200" in text


def test_a_run_lists_the_layers_that_are_built():
    recipe = {"task": None, "layers": "gdn*3 attention", "depth": 2}
    *_, settings = figures.of_run({"history": [], "recipe": recipe})
    assert "2 layers: gdn*2 (the pattern has 4 layers, a depth of 2 uses the first 2: no attention)" in settings


def test_the_page_fetches_nothing(page):
    """No element of the page or of a chart loads anything: the content security policy forbids it."""
    text = page.read_text()
    own = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"<(link|img|iframe|script)[^>]*(href|src)=", own)
    assert "default-src 'none'" in text and "connect-src" not in text.partition("<script>")[0]


@pytest.mark.long
def test_a_browser_draws_every_chart_without_errors(page, tmp_path):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser is installed: none of {', '.join(BROWSERS)}")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000"]
    said = ["--enable-logging=stderr", f"--user-data-dir={tmp_path}", "--dump-dom", page.as_uri()]
    done = subprocess.run([browser, *options, *said], capture_output=True, text=True, timeout=120, check=True)
    charts = page.read_text().count('class="plotly-graph-div"')
    drawn = re.findall(r'class="plotly-graph-div js-plotly-plot"', done.stdout)
    assert charts > 10 and len(drawn) == charts
    assert done.stdout.count('class="main-svg"') >= charts
    assert "CONSOLE" not in done.stderr, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_files_without_a_result_are_refused(tmp_path, capsys):
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "run.json").write_text('{"kind": "run", "recipe": {}}')
    (tmp_path / "bench.json").write_text('{"rows": [{"contender": "wyfold"}]}')
    (tmp_path / "empty").mkdir()
    for name, complaint in {
        "bad.json": "bad.json is damaged: it is no whole JSON file",
        "list.json": "list.json is damaged: it has another form: Expected `object`, got `array`",
        "run.json": "run.json is damaged: it says to be a run, which is a folder",
        "bench.json": "it has another form: Object missing required field `op` - at `$.rows[0]`",
        "empty": "nothing to report",
        "missing": "no such file or folder",
    }.items():
        assert main(["report", str(tmp_path / name), "--out", str(tmp_path / "x.html")]) == 2
        assert complaint in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()


def test_hardware_may_be_a_name(tmp_path):
    (tmp_path / "one.json").write_text('{"date": "2026-11-23", "hardware": "a card by name", "rows": []}')
    assert main(["report", str(tmp_path / "one.json"), "--out", str(tmp_path / "x.html")]) == 0
    assert "a card by name" in (tmp_path / "x.html").read_text(encoding="utf-8")


def test_an_unwritable_page_is_refused_before_drawing(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(figures, "DRAWN", {})
    file = tmp_path / "file"
    file.touch()
    assert main(["report", str(runs), "--out", str(file / "x.html")]) == 2
    assert f"--out: cannot write into {file}: File exists" in capsys.readouterr().err
    assert main(["report", str(runs), "--out", str(tmp_path)]) == 2
    assert f"--out: cannot write {tmp_path}: it is a folder" in capsys.readouterr().err
