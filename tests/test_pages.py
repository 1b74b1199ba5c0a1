"""The site has a page for every public operator, and its generated parts match their sources."""

import json
import re
from pathlib import Path
from types import ModuleType

import pytest

import wyfold
from wyfold import layers

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

pages = pytest.importorskip("tools.pages", reason="matplotlib is not installed")
speed = pytest.importorskip("tools.speed", reason="matplotlib is not installed")
training_curve = pytest.importorskip("tools.training_curve", reason="matplotlib is not installed")

FACT = re.compile(r"^## <a id=\"([a-z0-9-]+)\"></a>([A-Z0-9-]+): ", re.MULTILINE)
OTHER_NAMES = {"chunk_gdn", "fused_recurrent_gdn", "fused_chunk_ttt_linear"}


def test_every_public_name_is_documented():
    written = "\n".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    documented = set(re.findall(r"^::: wyfold\.([\w.]+)$", written, flags=re.MULTILINE))
    modules = {name for name in wyfold.__all__ if isinstance(getattr(wyfold, name), ModuleType)}
    assert set(wyfold.__all__) - modules - OTHER_NAMES <= documented
    mixers = {f"layers.{name}" for name in layers.__all__}
    assert {"layers.DeltaNet", "layers.GatedDeltaNet", "layers.KimiDeltaAttention", "layers.TTTLinear"} <= mixers
    unknown = {name for name in documented if not name.startswith(("layers.", "models."))} - set(wyfold.__all__)
    assert not unknown


def test_every_page_is_in_the_navigation_and_every_plot_is_drawn():
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:: |- )([\w/]+\.md)$", listed, flags=re.MULTILINE))
    own = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    own = {page for page in own if not page.startswith("generated/")}
    computed = {f"generated/{name}.md" for name in ("support", "performance", *pages.COPIED)}
    assert named == own | computed
    written = "\n".join((DOCS / page).read_text(encoding="utf-8") for page in own)
    assert set(re.findall(r"generated/(\w+)\.svg", written)) == {plot.__name__ for plot in pages.PLOTS}


def test_the_tables_have_the_stored_results():
    support, performance = pages.support(), pages.performance()
    assert "| `chunk_kda` | 0% |" in support and "NVIDIA H200" in support
    assert "fails" not in support
    assert performance.count("| `wyfold.chunk_delta_rule` |") >= 2
    runs = performance.partition("## Every stored run")[2]
    assert all(line.count("|") == 9 for line in runs.splitlines() if line.startswith("    |"))


def test_links_of_copied_files_resolve_on_the_site():
    links = "[a](docs/facts/cpu.md) [b](docs/results/) [c](SECURITY.md#reporting)"
    assert pages.site_links(links) == "[a](../facts/cpu.md) [b](performance.md) [c](security.md#reporting)"


def test_links_between_pages_resolve_in_a_clone():
    broken = []
    for page in [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "examples").glob("*.md")]:
        if "generated" in page.parts:
            continue
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text):
            if "generated/" not in link and not (page.parent / link).exists():
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def test_every_cited_fact_exists_on_the_page_that_is_named():
    found = {page.name: FACT.findall(page.read_text(encoding="utf-8")) for page in (DOCS / "facts").glob("*.md")}
    pages_of = {name: page for page, facts in found.items() for _, name in facts}
    assert len(pages_of) == sum(len(facts) for facts in found.values())
    assert all(anchor == name.lower() for facts in found.values() for anchor, name in facts)
    kinds = "|".join(sorted({name.rpartition("-")[0] for name in pages_of}))
    cited = re.compile(rf"(?:docs/facts/(\w+\.md), )?\b((?:{kinds})-[0-9]+)\b")
    sources = [file for folder in ("src", "tests", "tools", "examples") for file in (ROOT / folder).rglob("*.py")]
    citations = {
        (file.relative_to(ROOT).as_posix(), page, name)
        for file in sources
        for page, name in cited.findall(re.sub(r"\n\s*#? *", " ", file.read_text(encoding="utf-8")))
    }
    assert len(citations) >= 20
    assert {(file, name) for file, page, name in citations if page != pages_of.get(name) and page} == set()
    assert {(file, name) for file, _, name in citations if name not in pages_of} == set()


def test_the_training_page_has_the_losses_that_are_stored():
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (_, first), *others = training_curve.curves().items()
    assert len(others) == 2 and all(len(losses) == len(first) == 200 for _, losses in others)
    ends = [sum(losses[-20:]) / sum(first[-20:]) - 1 for _, losses in others]
    assert " and ".join(f"{abs(100 * end):.2f}" for end in ends) + " % apart" in re.sub(r"\s+", " ", page)
    for theme in speed.COLORS:
        assert f"charts/training-{theme}.svg" in page and (speed.CHARTS / f"training-{theme}.svg").exists()


def test_the_newest_comparison_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of two files of one day the last by name counted, and README had the older times of prompts."""
    shape = {"B": 1, "T": 64, "H": 1, "HV": 1, "K": 128, "V": 128}
    row = {"op": "gdn", "shape": shape, "gate": "mid", "norm": "inside", "mode": "fwd", "kernels": []}
    for name, date, ours in (("prompts", "16:29", 2.0), ("prompts-gdn", "17:57", 1.0)):
        times = {"wyfold": ("wyfold.chunk_gdn", ours), "peer": ("flash_qla.gdn", 4.0)}
        rows = [row | {"contender": c, "ran": ran, "milliseconds": {"median": x}} for c, (ran, x) in times.items()]
        record = {"date": f"2026-11-27T{date}:00+00:00", "hardware": {"gpus": [{"name": "H200"}]}, "rows": rows}
        (tmp_path / f"h200-2026-11-27-bench-{name}-peers-0.json").write_text(json.dumps(record))
    monkeypatch.setattr(speed, "RESULTS", tmp_path)
    assert [found.ratio for found in speed.comparisons()] == [4.0]


def test_the_readme_is_short_and_has_the_times_that_are_stored():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 150
    rows = speed.comparisons()
    assert len(rows) >= 10 and speed.summary(rows) in readme, "python tools/speed.py writes the table"
    for theme in speed.COLORS:
        assert f"docs/charts/speed-{theme}.svg" in readme and (speed.CHARTS / f"speed-{theme}.svg").exists()
    named = re.findall(r"\]\(((?!http|#)[^)#]+)", readme)
    assert len(named) > 20 and [path for path in named if not (ROOT / path).exists()] == []
