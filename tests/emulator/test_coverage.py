"""Every Gluon kernel of the package has an emulator test."""

import ast
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src"


def test_every_gluon_kernel_is_imported_by_a_test():
    kernels = {module(path) for path in SOURCES.rglob("*.py") if defines_kernel(path)}
    imported = {
        f"{node.module}.{alias.name}"
        for path in HERE.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert kernels
    assert not {kernel for kernel in kernels if not {kernel, package(kernel)} & imported}


def module(path: Path) -> str:
    return ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__")


def package(module: str) -> str:
    """The package that has a kernel's file. Tests import it, because it has the launch function too."""
    return module.rpartition(".")[0]


def defines_kernel(path: Path) -> bool:
    """Whether a `gluon.jit` function of the file is a kernel: kernels are named `wyfold_...`."""
    return any(
        isinstance(node, ast.FunctionDef)
        and node.name.startswith("wyfold_")
        and any("gluon.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )
