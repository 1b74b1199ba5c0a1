"""Names and prose use the field's terms (CONTRIBUTING.md, "Writing").

Words that this project once used in a private sense may not come back in docstrings, comments and pages, nor as names
of functions, classes, modules and folders. docs/old_names.md lists what was renamed.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

BANNED_WORDS = (
    "whom", "nobody", "somebody", "who", "told", "tells", "heard", "hears", "listens", "anew", "as ever", "of its own",
    "of their own", "comes to", "came to", "stands beside", "stand beside", "it is where", "walk", "walks", "turned",
    "course", "courses", "room", "rooms", "aside", "nothing but", "askew",
)  # fmt: skip
"""In the text outside backticks, and in the names of functions and classes that are defined here. Other code may be
called what the standard library calls it (`os.walk`)."""

BANNED_MODULES = {
    "aside", "bound", "chains", "contenders", "course", "decisions", "handover", "house", "lessons", "listen", "pace",
    "parallel", "pipelines", "race", "recall", "rehearsal", "share_segments", "shares", "stages", "subjects", "team",
    "told", "turned", "walk",
}  # fmt: skip

PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs")
CODE = ("src", "tests", "tools", "examples")
LEFT_AS_WRITTEN = ("docs/generated", "docs/results", "docs/old_names.md", "tests/test_plain_words.py")

WORDS = re.compile(
    r"(?<![\w`/.-])(" + "|".join(word.replace(" ", r"\s+(?:#\s+)?") for word in BANNED_WORDS) + r")(?![\w`(-])",
    re.IGNORECASE,
)


def files(folders: tuple[str, ...], suffix: str) -> list[Path]:
    """Files with a suffix, relative to the repository, without those whose words are quoted history."""
    found: list[Path] = []
    for folder in folders:
        path = ROOT / folder
        found += [path] if path.is_file() else sorted(path.rglob(f"*{suffix}"))
    relative = [path.relative_to(ROOT) for path in found]
    return [path for path in relative if not path.as_posix().startswith(LEFT_AS_WRITTEN)]


def prose(text: str, suffix: str) -> Iterator[tuple[int, str]]:
    """(first line, text) of each docstring, comment and name of a function or class in a module, or of a page's text.

    A name's words are separated by spaces.
    """
    if suffix == ".md":
        blocks = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=re.S | re.M)
        yield 1, blocks
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, re.sub(r"_+|(?<=[a-z])(?=[A-Z])", " ", node.name)


def banned(text: str, suffix: str) -> list[str]:
    """`line: word` of every banned word."""
    found = []
    for line, piece in prose(text, suffix):
        plain = re.sub(r"`[^`\n]*`", lambda code: " " * len(code[0]), piece)
        found += [f"{line + plain.count(chr(10), 0, m.start())}: {m[1]}" for m in WORDS.finditer(plain)]
    return found


@pytest.mark.parametrize("folder", [*CODE, *PAGES])
def test_no_banned_word(folder: str):
    suffix = ".py" if folder in CODE else ".md"
    found = {}
    for path in files((folder,), suffix):
        if places := banned((ROOT / path).read_text(encoding="utf-8"), suffix):
            found[path.as_posix()] = places
    assert not found


def test_no_module_is_named_after_a_metaphor():
    found = [
        path.as_posix()
        for path in files(("src",), ".py")
        if {path.stem, *path.parent.parts, path.stem.removeprefix("_")} & BANNED_MODULES
    ]
    assert not found


@pytest.mark.parametrize(
    ("text", "suffix", "expected"),
    [
        ('"""Whoever is told."""\n', ".py", ["1: told"]),
        ("x = 1\n\n# Of its\n# own.\ny = 2  # begun anew\n", ".py", ["5: anew"]),
        ('"""One\n\nthat comes\nto two."""\n', ".py", ["3: comes\nto"]),
        ("`os.walk` and `turned`\n\nnobody walks\n", ".md", ["3: nobody", "3: walks"]),
        ("```\nnobody\n```\nwho\n", ".md", ["4: who"]),
        ("told = 'told'\n", ".py", []),
        ("@f\ndef test_a_state_that_nobody_reads(): ...\n", ".py", ["2: nobody"]),
        ("class TurnedState: ...\n\n\ndef returned(): ...\n", ".py", ["1: Turned"]),
    ],
)
def test_banned_words_are_found(text: str, suffix: str, expected: list[str]):
    assert banned(text, suffix) == expected
