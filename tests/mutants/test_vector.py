"""Every mutant has its place in the source and its killer among the tests; the quick ones are planted.

`python -m tests.mutants` plants all of them.
"""

import ast
from pathlib import Path

import pytest
from tests.mutants.planting import PACKAGE, ROOT, Copy, Mutant
from tests.mutants.vector import MUTANTS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda x: f"{x.file} {x.fault}")
def test_the_text_of_a_mutant_is_in_the_source(mutant: Mutant):
    assert mutant.planted() != (PACKAGE / mutant.file).read_text(encoding="utf-8")


def test_every_killer_is_a_test():
    for mutant in MUTANTS:
        file, _, name = mutant.killer.partition("::")
        functions = {
            node.name
            for node in ast.walk(ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef)
        }
        assert name.partition("[")[0] in functions, f"{mutant.fault}: there is no test {mutant.killer}"


def test_mutants_are_distinct_and_in_every_folder():
    assert len(MUTANTS) >= 40
    assert len({(x.file, x.place, x.old, x.new) for x in MUTANTS}) == len({x.fault for x in MUTANTS}) == len(MUTANTS)
    folders = {x.name for x in PACKAGE.iterdir() if x.is_dir() and x.name != "__pycache__"}
    assert folders == {mutant.file.partition("/")[0] for mutant in MUTANTS}


@pytest.mark.parametrize("old, new", [("x = 2", "x = 3"), ("return", "retur n")], ids=["missing", "not Python"])
def test_a_mutant_that_cannot_be_planted_is_an_error(old: str, new: str):
    with pytest.raises((ValueError, SyntaxError)):
        Mutant("a fault", "tile/norm/eager.py", "l2norm", old, new, "").planted()


@pytest.mark.long
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.release)])
def test_the_quick_mutants_are_killed(part: int, tmp_path: Path):
    """Their killers pass on the unchanged copy, and fail with the faults."""
    quick = [mutant for mutant in MUTANTS if mutant.quick][part::2]
    copy = Copy(tmp_path)
    assert len(quick) >= 3 and not list(copy.broken(quick))
    survivors = [found for found in map(copy.outcome, quick) if not found.killed]
    assert not survivors, "\n".join(f"{x.mutant.file}: {x.mutant.fault}\n{x.message}" for x in survivors)


def test_a_harmless_change_survives(tmp_path: Path):
    """So a mutant is killed by its fault, not by being planted."""
    mutant = Mutant("none", "tile/norm/eager.py", "l2norm", "return x * r, r", "return r * x, r", "tile/test_norm.py")
    found = Copy(tmp_path).outcome(mutant)
    assert not found.killed and "passed" in found.message
