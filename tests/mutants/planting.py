"""Plant mutants in a copy of the package, and run the tests that must detect them.

The tests of the repository import the package from the copy, in forks of a process that has imported PyTorch
(`tests/processes.py`). The sources in the repository are only read.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
import shutil
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from tests import processes

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "wyfold"

START = "import sys; sys.path.insert(0, {!r}); import pytest; sys.exit(pytest.main(sys.argv[1:]))"
"""Program of a test process: pytest, with the copy in front of every other package of this name."""

OPTIONS = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=line")


class Mutant(NamedTuple):
    """A planted fault: a text of the source, its replacement, and a test that must fail with it.

    Attributes:
        fault: What is wrong, as a noun phrase.
        file: File below `src/wyfold`.
        place: Dotted name of the class or function whose source holds `old` exactly once; "" for the whole file.
        old, new: The text and its replacement.
        killer: Test that fails with the fault, as pytest names it, below `tests`.
        interpreted: Whether the test runs kernels in Triton's interpreter.
        quick: Whether `make test` or `make compile` plants it.
    """

    fault: str
    file: str
    place: str
    old: str
    new: str
    killer: str
    interpreted: bool = False
    quick: bool = False

    def planted(self) -> str:
        """The file's source with the fault.

        Raises:
            ValueError: The place is missing, or does not hold the text exactly once, or the result is not Python.
        """
        path = PACKAGE / self.file
        if not path.is_file():
            raise ValueError(f"{self.fault}: there is no file src/wyfold/{self.file}")
        source = path.read_text(encoding="utf-8")
        begin, end = _span(source, self.place)
        count = source[begin:end].count(self.old)
        if begin == end or count != 1:
            where = f"src/wyfold/{self.file}" + (f", {self.place}" if self.place else "")
            raise ValueError(
                f"{self.fault}: {where} must hold this text once, found {count}: {self.old!r}. "
                "Where the code was rewritten, give the mutant the new text; it must still be killed"
            )
        changed = source[:begin] + source[begin:end].replace(self.old, self.new) + source[end:]
        compile(changed, str(path), "exec")
        return changed


def _span(source: str, place: str) -> tuple[int, int]:
    """Begin and end of a class or function in a source; (0, 0) if it is missing."""
    if not place:
        return 0, len(source)
    node: ast.AST = ast.parse(source)
    for name in place.split("."):
        found = [x for x in ast.walk(node) if getattr(x, "name", None) == name and hasattr(x, "body")]
        if len(found) != 1:
            return 0, 0
        node = found[0]
    lines = [0, *(match.end() for match in re.finditer("\n", source))]
    first = min(x.lineno for x in (node, *node.decorator_list))
    return lines[first - 1], lines[node.end_lineno] if node.end_lineno < len(lines) else len(source)


class Outcome(NamedTuple):
    """What the killer of a mutant said.

    Attributes:
        mutant: The mutant.
        killed: Whether the killer failed. A test that could not be run does not count.
        seconds: Time of the run.
        message: First line of the failure, or the end of the output.
    """

    mutant: Mutant
    killed: bool
    seconds: float
    message: str


@functools.cache
def _server(interpreted: bool) -> processes.Server:
    """The server of test processes. Those that interpret kernels import Triton themselves, with their environment."""
    return processes.Server("torch", "numpy", "pytest", *(() if interpreted else (processes.COMPILER,)))


class Copy:
    """A copy of the package's sources, in which one mutant at a time is planted.

    Args:
        folder: An empty folder.
    """

    def __init__(self, folder: Path):
        self.sources = folder / "src"
        shutil.copytree(PACKAGE, self.sources / "wyfold")

    def failures(self, tests: Collection[str], *, interpreted: bool) -> tuple[int, str]:
        """Exit status and output of pytest for some tests, stopped at the first failure."""
        env = {**os.environ, "PYTHONPATH": str(self.sources), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        env |= {"TRITON_INTERPRET": "1"} if interpreted else {}
        words = ["-c", START.format(str(self.sources)), *OPTIONS, "-x", *(f"tests/{name}" for name in tests)]
        done = _server(interpreted).run(words, env=env, cwd=ROOT)
        return done.returncode, done.stdout + done.stderr

    def outcome(self, mutant: Mutant) -> Outcome:
        """Plant a mutant, run its killer, and restore the copy."""
        file, changed = self.sources / "wyfold" / mutant.file, mutant.planted()
        bytecode = Path(importlib.util.cache_from_source(str(file)))
        original, begin = file.read_text(encoding="utf-8"), time.monotonic()
        try:
            # Bytecode is looked up by seconds and size, which an older version may share.
            bytecode.unlink(missing_ok=True)
            file.write_text(changed, encoding="utf-8")
            status, output = self.failures([mutant.killer], interpreted=mutant.interpreted)
        finally:
            file.write_text(original, encoding="utf-8")
        failed = re.findall(r"^FAILED (.*)$", output, re.MULTILINE)
        killed = status == 1 and bool(failed)
        message = failed[0] if killed else output.strip()[-2000:]
        return Outcome(mutant, killed, time.monotonic() - begin, message)

    def broken(self, mutants: Collection[Mutant]) -> Iterator[str]:
        """Output of pytest for the killers that do not pass without a mutant."""
        for interpreted in (False, True):
            killers = dict.fromkeys(mutant.killer for mutant in mutants if mutant.interpreted is interpreted)
            status, output = self.failures(killers, interpreted=interpreted) if killers else (0, "")
            if status:
                yield output
