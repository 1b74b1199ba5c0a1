"""Prints what exceeds its size budget, and the import time of `wyfold` beyond torch. It reports only and never fails.

Where a line budget is exceeded, a tile function, record or file is missing. Denser lines are no remedy
(docs/architecture.md).

One kind of overrun is left, because a remedy would cost more than it does: a combine function of `tl.reduce` has two
parameters for each tile that is reduced. One reduction of eight tiles (`add_eight`) has one exchange between threads;
two of four tiles have two.
"""

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "wyfold"
IMPORT_SECONDS = 1.0


def file_budget(path: Path) -> int:
    """Lines of a file, by its subpackage."""
    subpackage = path.relative_to(PACKAGE).parts[0]
    if {path.stem, path.parent.name} & {"triton", "gluon"}:
        return 300
    if subpackage == "kernels" and path.parent != PACKAGE / "kernels" and path.name in ("__init__.py", "eager.py"):
        return 80
    if subpackage in ("autograd", "context_parallel"):
        return 250
    return 400


def function_budget(path: Path, node: ast.FunctionDef) -> int:
    """Lines of a function's body without its docstring."""
    subpackage = path.relative_to(PACKAGE).parts[0]
    if node.name.startswith("wyfold_"):
        return 120
    if subpackage == "tile":
        return 30
    if subpackage == "ops" and not node.name.startswith("_"):
        return 40
    return 60


def parameter_budget(path: Path, node: ast.FunctionDef) -> int | None:
    """Parameters of a kernel or tile function. Public signatures have no budget: they follow other libraries."""
    if node.name.startswith("wyfold_"):
        return 24
    return 10 if path.relative_to(PACKAGE).parts[0] == "tile" else None


def body_lines(node: ast.FunctionDef) -> int:
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def measured() -> Iterator[tuple[int, int, str]]:
    """(value, budget, description) of every file, function and signature that has a budget."""
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(PACKAGE).as_posix()
        yield len(text.splitlines()), file_budget(path), f"lines      {name}"
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef):
                continue
            yield body_lines(node), function_budget(path, node), f"body       {name}:{node.lineno} {node.name}"
            allowed = parameter_budget(path, node)
            if allowed is not None:
                count = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
                yield count, allowed, f"parameters {name}:{node.lineno} {node.name}"


def import_seconds(repeats: int = 5) -> float:
    """Median seconds that `import wyfold` takes in a fresh process that has already imported torch."""
    code = "import time, torch; t = time.perf_counter(); import wyfold; print(time.perf_counter() - t)"
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(repeats)
    ]
    return statistics.median(float(run.stdout) for run in runs)


def main() -> None:
    found = [(value, budget, what) for value, budget, what in measured() if value > budget]
    for value, budget, what in sorted(found, key=lambda row: row[0] / row[1], reverse=True):
        print(f"over budget: {value:4d} of {budget:3d}  {what}")
    print(f"{len(found)} over budget" if found else "nothing is over its budget")
    seconds = import_seconds()
    remark = "" if seconds <= IMPORT_SECONDS else "  <- over"
    print(f"import wyfold: {seconds:.2f} s beyond torch, of {IMPORT_SECONDS:.0f} s{remark}")


if __name__ == "__main__":
    main()
