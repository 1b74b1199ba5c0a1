"""Checks 39 and 40, in fresh processes: time of the first use, and contents of the installed package."""

from __future__ import annotations

import ast
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import wyfold
from wyfold.cli.scorecard.check import Check, CheckResult, Scope

PACKAGE = Path(wyfold.__file__).parent
SOURCES = PACKAGE.parents[1]

# --- check 39: first use ----------------------------------------------------------------------------------------------

IMPORT_SECONDS = 1.0
FIRST_SECONDS = 20.0

IMPORTING = """
    import json, time, torch
    began = time.perf_counter()
    import wyfold
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "cuda": torch.cuda.is_initialized()}))
"""
FIRST_USE = """
    import json, time, torch
    began = time.perf_counter()
    from wyfold.layers import GatedDeltaNet
    layer = GatedDeltaNet(hidden_size=256, num_heads=2, head_dim=64)
    layer(torch.randn(1, 512, 256)).sum().backward()
    print(json.dumps({"seconds": time.perf_counter() - began}))
"""


def first_use_is_fast(scope: Scope) -> CheckResult:
    """Check 39: seconds of `import wyfold` after torch, and of a layer's first use, in fresh processes."""
    result = CheckResult(scope)
    imports = [_fresh(IMPORTING) for _ in range(1 if scope.quick else 3)]
    seconds = statistics.median(run["seconds"] for run in imports)
    result.case(seconds <= IMPORT_SECONDS, f"import wyfold took {seconds:.2f} s beyond torch")
    result.case(not any(run["cuda"] for run in imports), "import wyfold started CUDA")
    seconds = _fresh(FIRST_USE)["seconds"]
    result.case(seconds <= FIRST_SECONDS, f"the first forward and backward of a layer took {seconds:.1f} s")
    return result


def _fresh(code: str, *options: str, cwd: Path | None = None) -> Any:
    """Run code in a new process of this interpreter and return the JSON of its last output line."""
    command = [sys.executable, *options, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd)
    return json.loads(done.stdout.splitlines()[-1])


# --- check 40: package ------------------------------------------------------------------------------------------------

UNPICKLERS = frozenset({"cloudpickle", "dill", "marshal", "pickle", "shelve"})
TALKERS = frozenset({"ftplib", "http", "httpx", "requests", "smtplib", "socket", "ssl", "urllib"})
LOADERS = frozenset({"FileSystemReader", "FileSystemWriter", "Unpickler"})
"""Classes of PyTorch and Python that unpickle the files they read."""
CALLS = frozenset({"eval", "exec", "__import__", "os.system", "os.popen", "torch.load", "torch.save", "torch.hub.load"})

FROM_WHEEL = """
    import json, sys
    import torch
    sys.path.insert(0, {wheel!r})
    class Refuse:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in {blocked!r}:
                raise ModuleNotFoundError(f"{{name}} is not there", name=name)
    sys.meta_path.insert(0, Refuse())
    import wyfold
    q = torch.randn(1, 70, 2, 16, requires_grad=True)
    wyfold.chunk_gated_delta_rule(q, q, q, -torch.rand(1, 70, 2), torch.rand(1, 70, 2))[0].sum().backward()
    print(json.dumps({{"finite": bool(q.grad.isfinite().all()), "from": wyfold.__file__}}))
"""
"""Code of a first backward from the wheel, with all optional packages blocked."""


def package_is_clean(scope: Scope) -> CheckResult:
    """Check 40: torch is the only dependency, the wheel is reproducible and runs alone, and no code is unsafe."""
    result = CheckResult(scope)
    for file in sorted(PACKAGE.rglob("*.py")):
        found = unsafe(file.read_text(encoding="utf-8"), in_cli="cli" in file.relative_to(PACKAGE).parts)
        result.case(not found, f"{file.relative_to(PACKAGE)}: {', '.join(found)}")
    if not (SOURCES / "pyproject.toml").exists():
        result.skip_reason = "the wheel can be built from a source tree only; its other halves held"
        return result
    if importlib.util.find_spec("hatchling") is None:
        result.skip_reason = "hatchling, which builds the wheel, is not installed; the other halves held"
        return result
    with tempfile.TemporaryDirectory() as scratch:
        _wheel(result, Path(scratch))
    return result


def unsafe(text: str, *, in_cli: bool) -> list[str]:
    """Uses of pickle, eval, shells and network in a source file. Only the command line may start processes."""
    found = []
    for node in ast.walk(ast.parse(text)):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        roots = {module.partition(".")[0] for module in modules}
        found += sorted(roots & (UNPICKLERS | TALKERS | (set() if in_cli else {"subprocess"})))
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if (
                name in CALLS
                or name.rpartition(".")[2] in LOADERS
                or any(keyword.arg == "shell" for keyword in node.keywords)
            ):
                found.append(name)
    return found


def _wheel(result: CheckResult, scratch: Path) -> None:
    first, second = (
        _build(SOURCES, scratch / "first"),
        _build(_copied_sources(scratch / "another place"), scratch / "second"),
    )
    result.case(first.read_bytes() == second.read_bytes(), "two builds of the wheel differ")
    inside = scratch / "installed"
    with zipfile.ZipFile(first) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
        archive.extractall(inside)
    needed = [line for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line]
    result.case([line[:5] for line in needed] == ["torch"], f"the wheel requires {needed}")
    optional = tomllib.loads((SOURCES / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    blocked = sorted(
        {line.partition(">")[0].partition("=")[0].partition("[")[0] for lines in optional.values() for line in lines}
    )
    code = FROM_WHEEL.format(wheel=str(inside), blocked=[name for name in blocked if name not in ("numpy", "wyfold")])
    ran = _fresh(code, "-I", cwd=scratch)
    result.case(ran["finite"] and ran["from"].startswith(str(inside)), f"the wheel by itself: {ran}")


def _copied_sources(place: Path) -> Path:
    """Copy of the source tree with current modification times."""
    place.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        if (SOURCES / name).exists():
            shutil.copyfile(SOURCES / name, place / name)
    shutil.copytree(SOURCES / "src", place / "src", copy_function=shutil.copyfile)
    return place


def _build(source: Path, out: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (wheel,) = out.glob("*.whl")
    return wheel


CHECKS = (
    Check(
        39,
        "first use is fast",
        "layer forward + backward <= 20 s; import <= 1 s over torch; no CUDA start",
        first_use_is_fast,
    ),
    Check(
        40,
        "reproducible, clean package",
        "torch only; byte-identical wheel; 0 pickle, eval, shell, network",
        package_is_clean,
    ),
)
