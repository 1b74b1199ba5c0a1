"""Optional packages: what the code knows of the extras is what pyproject.toml says."""

import re
import tomllib
from pathlib import Path

import pytest

from wyfold.runtime.extras import EXTRAS, install_command

ROOT = Path(__file__).resolve().parents[2]
DECLARED: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]


def brought(extra: str) -> set[str]:
    """Names of the packages that an extra brings, those of the extras it includes too."""
    found = set()
    for requirement in DECLARED[extra]:
        included = re.match(r"wyfold\[(\w+)\]", requirement)
        name = re.match(r"[\w.-]+", requirement)
        assert name
        found |= brought(included[1]) if included else {name[0]}
    return found


@pytest.mark.parametrize("extra", EXTRAS)
def test_extras_bring_what_pyproject_declares(extra: str):
    assert set(EXTRAS[extra]) == brought(extra)
    assert install_command(extra).endswith("pip install " + " ".join(EXTRAS[extra]))


@pytest.mark.parametrize("extra", DECLARED)
def test_the_page_lists_every_extra_with_its_packages(extra: str):
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| `{extra}` \| (.*?) \|", page, re.M)
    words = set(re.findall(r"[\w.-]+", row))
    own = {re.match(r"[\w.-]+", line)[0] for line in DECLARED[extra] if not line.startswith("wyfold[")}  # type: ignore[index]
    assert {name.lower() for name in own} <= {word.lower() for word in words}
    for included in re.findall(r"wyfold\[(\w+)\]", " ".join(DECLARED[extra])):
        assert f"`{included}`" in row
