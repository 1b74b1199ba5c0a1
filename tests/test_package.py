"""The wheel: its contents, its requirements, and bit-identical rebuilds."""

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from email.parser import Parser
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from tests import processes

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


def described(wheel: Path, file: str) -> str:
    """Contents of a file of the wheel's description."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(f".dist-info/{file}"))
        return archive.read(name).decode()


def test_wheel_requires_torch_alone(wheel: Path):
    metadata = Parser().parsestr(described(wheel, "METADATA"))
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert [re.match(r"[\w.-]+", line).group() for line in required] == ["torch"]
    assert metadata["Version"] == wyfold.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"


def test_programs_that_use_wyfold_are_extras(wheel: Path):
    metadata = Parser().parsestr(described(wheel, "METADATA"))
    wanted = {
        match["extra"]: match["name"]
        for line in metadata.get_all("Requires-Dist")
        if (match := re.fullmatch(r"(?P<name>[\w.-]+).*extra == '(?P<extra>\w+)'", line))
    }
    assert {extra: wanted[extra] for extra in ("fla", "sglang", "transformers", "vllm")} == {
        "fla": "fla-core",
        "sglang": "sglang",
        "transformers": "transformers",
        "vllm": "vllm",
    }


def test_entry_points_of_the_wheel_load_without_the_programs(wheel: Path):
    """The engines load them in each process, and `wyfold` is the command."""
    entries = configparser.ConfigParser()
    entries.read_string(described(wheel, "entry_points.txt"))
    assert set(entries.sections()) == {"console_scripts", "sglang.srt.plugins", "vllm.general_plugins"}
    loaded = [EntryPoint("wyfold", entries[group]["wyfold"], group).load() for group in entries.sections()]
    assert all(callable(function) for function in loaded)


ALONE = """
import json, sys
import torch
sys.path.insert(0, {folder!r})
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is not there", name=name)
sys.meta_path.insert(0, Refuse())
import wyfold
q = torch.randn(1, 70, 2, 16, requires_grad=True)
wyfold.chunk_gated_delta_rule(q, q, q, -torch.rand(1, 70, 2), torch.rand(1, 70, 2))[0].sum().backward()
print(json.dumps([bool(q.grad.isfinite().all()), wyfold.__file__]))
"""


def test_wheel_runs_without_optional_packages(wheel: Path, tmp_path: Path):
    """A first backward from the wheel. numpy may be imported: torch does so."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    lines = Parser().parsestr(described(wheel, "METADATA")).get_all("Requires-Dist")
    optional = {re.match(r"[\w.-]+", line).group() for line in lines if "extra ==" in line} - {"numpy", "wyfold"}
    code = ALONE.format(folder=str(tmp_path), blocked=sorted(optional))
    done = processes.fresh().run(["-c", code], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    finite, file = json.loads(done.stdout.splitlines()[-1])
    assert finite and file.startswith(str(tmp_path))


PROGRAMS = (
    "accelerate", "fla", "flash_linear_attention", "kernels", "megatron", "peft", "sglang", "torchtitan",
    "transformers", "vllm",
)  # fmt: skip


def test_importing_wyfold_imports_no_program_that_uses_it(tmp_path: Path):
    """Packages of these names lie on the path and would end the process; every public module is imported."""
    for program in PROGRAMS:
        (tmp_path / f"{program}.py").write_text("raise SystemExit(f'{__name__} was imported')")
    code = f"""
        import importlib, sys
        sys.path.insert(0, {str(tmp_path)!r})
        import wyfold
        for name in (*wyfold.__all__, *(f"integrations.{{part}}" for part in wyfold.integrations.__all__)):
            found = wyfold
            for part in name.split("."):
                found = getattr(found, part)
        import wyfold.cli, wyfold.cp, wyfold.integrations.transformers.hub_layers
        wyfold.integrations.transformers.write_kernel_repository({str(tmp_path / "hub")!r})
        print(sorted(set({PROGRAMS!r}) & set(sys.modules)))
    """
    done = processes.fresh().run(["-c", textwrap.dedent(code)], cwd=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_wheel_holds_the_package_and_nothing_else(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    tracked = (p for p in (ROOT / "src" / "wyfold").rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    assert inside == {p.relative_to(ROOT / "src").as_posix() for p in tracked}
    assert "wyfold/py.typed" in inside
