"""Docstrings are executable: operators accept and return the documented shapes, and examples print what they show.

An argument's line begins `name: [B, T, H, K] ...`. Every public operator is called on meta tensors with one size per
letter. Then, one at a time, each dimension whose letter occurs elsewhere gets another size that would be legal by
itself; the operator must refuse it and name itself. Arguments that an operator documents by reference to
`chunk_gated_delta_rule` are read there. Every operator documents its errors, and names a paper with an equation or a
section. `Args:` of every function names arguments of its signature.
"""

import ast
import doctest
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.extras import need_plotly

import wyfold
from wyfold import serving

ROOT = Path(__file__).resolve().parents[1]

# letter: the size in the first call, and another size that is legal by itself.
SIZES = {
    "B": (2, 3),
    "T": (7, 11),
    "TN": (7, 11),
    "N": (2, 3),
    "H": (3, 2),
    "HV": (6, 12),
    "HQ": (6, 12),
    "K": (24, 32),
    "V": (40, 48),
    "C": (16, 32),
    "D": (13, 17),
    "W": (4, 3),
    "S": (5, 6),
}
SQUARE = {"V": SIZES["K"]}  # TTT-Linear's state maps rows of K to rows of K

# Other arguments that an argument requires.
COMPANIONS = {
    "A_log": {"use_gate_in_kernel": True},
    "dt_bias": {"use_gate_in_kernel": True},
}
SHARED = "chunk_gated_delta_rule"
QUESTIONS = {"checked", "doctor", "explain"}
OPERATORS = sorted(
    name for name in wyfold.__all__ if inspect.isfunction(getattr(wyfold, name)) and name not in QUESTIONS
)


def brackets(operator: Callable, section: str) -> dict[str, tuple[str, ...]]:
    """name -> letters of the first bracket, for every line of a section that begins with one."""
    text = inspect.getdoc(operator)
    found = re.search(rf"^{section}:\n((?:    .*\n|\n)*)", text + "\n", re.M)
    shapes = {}
    lines = re.findall(r"^    (?:(\w[\w', ]*): )?\[([^\]]*)\]", found.group(1) if found else "", re.M)
    for names, letters in lines:
        for name in (names or "result").split(", "):
            shapes[name] = tuple(part.strip() for part in letters.split(","))
    return shapes


def uses_shared_docstring(operator: Callable) -> bool:
    return f"Arguments not listed here are those of `{SHARED}`." in inspect.getdoc(operator)


def shapes_of(name: str) -> dict[str, tuple[str, ...]]:
    """Documented shapes of an operator's arguments, including those it takes from the shared docstring."""
    operator = getattr(wyfold, name)
    own = brackets(operator, "Args")
    if uses_shared_docstring(operator):
        own = brackets(getattr(wyfold, SHARED), "Args") | own
    parameters = inspect.signature(operator).parameters
    return {argument: shape for argument, shape in own.items() if argument in parameters and sizable(shape)}


def sizable(shape: tuple[str, ...]) -> bool:
    """Whether every part is a letter, a digit or `...`. `N+1` depends on contents and is tested with them."""
    return all(part in SIZES or part.isdigit() or part == "..." for part in shape)


def size(name: str, letter: str, another: bool = False) -> int:
    """Size of a letter in calls of an operator."""
    sizes = SIZES | SQUARE if "ttt" in name else SIZES
    return int(letter) if letter.isdigit() else sizes[letter][another]


def arguments(name: str, change: tuple[str, int] | None = None) -> dict[str, object]:
    """Meta tensors for every documented argument; `change` = (argument, dimension) gets its letter's other size."""
    call: dict[str, object] = {}
    for argument, shape in shapes_of(name).items():
        dims: list[int] = []
        for position, letter in enumerate(shape):
            if letter == "...":
                dims += [size(name, "B"), size(name, "T")]
            else:
                dims.append(size(name, letter, another=change == (argument, position)))
        call[argument] = torch.empty(dims, device="meta")
        call |= COMPANIONS.get(argument, {})
    parameters = inspect.signature(getattr(wyfold, name)).parameters
    return {argument: value for argument, value in call.items() if argument in parameters}


def bound_twice(name: str) -> list[tuple[str, int]]:
    """(argument, dimension) of every letter that occurs more than once; N stands for B."""
    letters = [
        (a, i, {"N": "B"}.get(part, part)) for a, shape in shapes_of(name).items() for i, part in enumerate(shape)
    ]
    count = Counter(letter for _, _, letter in letters)
    return [(a, i) for a, i, letter in letters if count[letter] > 1 and letter in SIZES]


@pytest.mark.parametrize("name", OPERATORS)
def test_documented_shapes_are_accepted_and_returned(name: str):
    operator = getattr(wyfold, name)
    flags = {"output_final_state": True} if "output_final_state" in inspect.signature(operator).parameters else {}
    result = operator(**arguments(name), **flags)
    results = result if isinstance(result, tuple) else (result,)
    documented = brackets(operator, "Returns")
    assert documented, "no shape under Returns"
    for got, (what, shape) in zip(results, documented.items(), strict=False):
        if sizable(shape) and "..." not in shape:
            assert list(got.shape) == [size(name, letter) for letter in shape], what


@pytest.mark.parametrize(
    ("name", "argument", "dimension"), [(n, *where) for n in OPERATORS for where in bound_twice(n)]
)
def test_a_letter_has_one_size(name: str, argument: str, dimension: int):
    with pytest.raises(ValueError, match=rf"^{getattr(wyfold, name).__name__}: "):
        getattr(wyfold, name)(**arguments(name, change=(argument, dimension)))


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_documents_a_shape(name: str):
    assert shapes_of(name)


# The sections of these papers could not be read, so a number would be a guess.
UNNUMBERED = {"2503.14456"}


def section(operator: Callable, title: str) -> str:
    """Text of a docstring's section; empty if there is none."""
    found = re.search(rf"^{title}:\n((?:    .*\n|\n)*)", inspect.getdoc(operator) + "\n", re.M)
    return found.group(1) if found else ""


@pytest.mark.parametrize(
    "operator",
    [*(getattr(wyfold, name) for name in OPERATORS), *(getattr(serving, name) for name in serving.__all__)],
    ids=lambda operator: operator.__name__,
)
def test_every_operator_documents_its_errors_and_source(operator: Callable):
    for error in ("TypeError", "ValueError", "UnsupportedError"):
        assert f"    {error}: " in section(operator, "Raises")
    source = section(operator, "Source")
    papers = set(re.findall(r"arXiv:(\d{4}\.\d{5})", source))
    assert papers
    assert papers <= UNNUMBERED or re.search(r"Eqs?\. \(\d+\)|sections? \d", source), "no equation and no section"


def documented_arguments(docstring: str) -> list[str]:
    """Names at the beginnings of the lines of `Args:`."""
    found = re.search(r"^Args:\n((?:    .*\n|\n)*)", docstring + "\n", re.M)
    lines = re.findall(r"^    (\*{0,2}\w[\w*, ]*):", found.group(1) if found else "", re.M)
    return [name.strip(" *") for line in lines for name in line.split(",")]


def undeclared(node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    """Documented arguments that are neither in the signature nor, of a record, among its fields."""
    declared = {
        part.target.id for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }
    for function in (node, *node.body):
        if isinstance(function, ast.FunctionDef) and (function is node or function.name == "__init__"):
            declared |= {part.arg for part in ast.walk(function.args) if isinstance(part, ast.arg)}
    return [name for name in documented_arguments(ast.get_docstring(node) or "") if name not in declared]


def test_documented_arguments_are_in_the_signature():
    wrong = []
    for path in sorted((ROOT / "src" / "wyfold").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                wrong += [f"{path.relative_to(ROOT)}: {node.name}: {name}" for name in undeclared(node)]
    assert not wrong


def test_an_undeclared_argument_is_found():
    (node,) = ast.parse(
        'def f(a, *b, c):\n    """Do.\n\n    Args:\n        a, b: one.\n        c, d: two.\n    """'
    ).body
    assert undeclared(node) == ["d"]


# --- examples --------------------------------------------------------------------------------------------------------


def modules() -> list[str]:
    names = [info.name for info in pkgutil.walk_packages(wyfold.__path__, "wyfold.")]
    return ["wyfold", *(n for n in names if not n.endswith(("__main__", ".triton", ".gluon")))]


@pytest.mark.parametrize("module", modules())
def test_examples_print_what_they_say(module: str):
    if module == "wyfold.cli.figures":  # the only module that imports an extra at its top
        need_plotly()
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.testmod(importlib.import_module(module), optionflags=options).failed == 0


def python_of(page: str) -> list[str]:
    """The Python blocks of a page, in order."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)


PAGES = (
    "README.md",
    "docs/check_it_yourself.md",
    "docs/explain.md",
    "docs/first_calls.md",
    "docs/packing.md",
    "docs/serving.md",
    "docs/states.md",
)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_of_examples_runs(page: str):
    left: dict[str, object] = {}
    exec(compile("\n".join(python_of(page)), page, "exec"), left)
    for name, value in left.items():
        for part in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(part, torch.Tensor) and part.is_floating_point():
                assert torch.isfinite(part).all(), name


@pytest.mark.parametrize(
    ("page", "block", "needs"),
    [
        ("docs/migration.md", 0, "torch"),
        ("docs/training.md", 0, "torch"),
        ("docs/transformers.md", 0, "transformers"),
    ],
)
def test_a_block_of_a_page_runs(page: str, block: int, needs: str, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip(needs)
    exec(compile(python_of(page)[block], page, "exec"), {})
    assert capsys.readouterr().out


def test_the_page_has_the_signatures_of_the_reference():
    page = re.sub(r"\s+", " ", (ROOT / "docs" / "check_it_yourself.md").read_text(encoding="utf-8"))
    public = [name for name, value in vars(wyfold.reference).items() if inspect.isfunction(value)]
    assert len(public) == 21
    for name in public:
        signature = inspect.signature(getattr(wyfold.reference, name))
        bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
        assert f"{name}{inspect.Signature(bare)}".replace("'", '"') in page


@pytest.mark.long
def test_the_script_of_two_ranks_runs(tmp_path: Path):
    script = tmp_path / "share.py"
    script.write_text(python_of("docs/context_parallelism.md")[0], encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    said = re.findall(r"rank (\d): \[1, 500, 64\] of \[1, 1000, 64\], ([\d.]+)", done.stdout)
    assert sorted(rank for rank, _ in said) == ["0", "1"]
    assert len({norm for _, norm in said}) == 1 and float(said[0][1]) > 0
