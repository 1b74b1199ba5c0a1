"""The wheel: its contents, its requirements, and bit-identical rebuilds."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import wyfold

ROOT = Path(__file__).resolve().parents[1]


def build(source: Path, out: Path) -> Path:
    """Build the wheel of a source tree with the backend that pyproject.toml names."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


def test_wheel_is_the_same_bytes_when_built_elsewhere_and_later(wheel: Path, tmp_path: Path):
    copy = tmp_path / "another place"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "src", copy / "src", copy_function=shutil.copyfile)
    for path in copy.rglob("*"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    again = build(copy, tmp_path / "out")
    assert again.name == wheel.name
    assert again.read_bytes() == wheel.read_bytes()


def test_wheel_requires_torch_alone(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert [re.match(r"[\w.-]+", line).group() for line in required] == ["torch"]
    assert metadata["Version"] == wyfold.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"


def test_wheel_holds_the_package_and_nothing_else(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    tracked = (p for p in (ROOT / "src" / "wyfold").rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    assert inside == {p.relative_to(ROOT / "src").as_posix() for p in tracked}
    assert "wyfold/py.typed" in inside
