"""The command line: `wyfold VERB ...`, the same as `python -m wyfold VERB ...`.

Each verb is one module of this folder with `add_arguments(parser)` and `run(args) -> int`. It is imported on first use,
so `wyfold doctor` never waits for a plotting library.

Exit codes:

- 0: done.
- 1: the work could not be finished, or a check failed.
- 2: the command line is invalid (unknown verb or option, a missing file, a run folder of another configuration).
- 130: interrupted; the state is saved if the verb keeps one.
"""

import argparse
import contextlib
import importlib
import io
import os
import sys
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from wyfold.runtime.extras import EXTRAS, install_command
from wyfold.runtime.unsupported import UnsupportedError

__all__ = ["Failure", "UsageError", "described", "main", "out_of_memory", "printable", "say"]

DONE, FAILED, USAGE, INTERRUPTED, CLOSED_PIPE = 0, 1, 2, 130, 141

VERBS = {
    "doctor": "show hardware, versions, and the backend of each operator",
    "demo": "train a small byte model on Python's own documentation and sample",
    "train": "train a byte model on text, or a model of a known task; resumable",
    "tasks": "train every layer on every known task, and print one table",
    "generate": "stream text from a checkpoint through the recurrent form",
    "bench": "time and memory of every operator, beside installed peers",
    "report": "draw runs and stored results as one offline HTML page",
    "verify": "error of every operator and gradient against the float64 recurrence",
    "tune": "for developers: search launch configurations for this GPU",
}


class UsageError(Exception):
    """An invalid command line or input file. The message says what to change. Exit code 2."""


class Failure(Exception):
    """The work could not be finished, or a check failed. The message says why. Exit code 1."""


class _OneLineParser(argparse.ArgumentParser):
    """Argument parser whose errors are one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _overview() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:<{width}}  {summary}" for verb, summary in VERBS.items())
    return (
        "usage: wyfold VERB [options]\n\n"
        "Delta-rule operators, layers and a small language model, from the command line.\n\n"
        f"verbs:\n{verbs}\n\n"
        "`wyfold VERB --help` lists the options of a verb.\n"
        "`wyfold --version` prints the version.\n"
    )


def _complain(prefix: str, message: str) -> None:
    """Write a line to standard error. A closed or full standard error does not change the exit code."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(f"{prefix}: {printable(message)}", file=sys.stderr)


DIRECTIONAL = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})
"""Bidirectional classes of the characters that change the writing direction of the text after them."""


def printable(text: str) -> str:
    """Escape control characters except newline and tab, unpaired surrogates, and characters that change text direction.

    File names that a message quotes, and text that a model generates, may contain terminal control sequences.

    Examples:
        >>> print(printable("a\\x1b[2J\\ud800b"))
        a\\x1b[2J\\ud800b
    """
    return "".join(
        character.encode("unicode_escape").decode("ascii")
        if character not in "\n\t"
        and (unicodedata.category(character) in ("Cc", "Cs") or unicodedata.bidirectional(character) in DIRECTIONAL)
        else character
        for character in text
    )


def say(text: str, *, flush: bool = False) -> None:
    """Print a line to standard output, escaped by `printable` if that is a terminal."""
    print(printable(text) if sys.stdout is not None and sys.stdout.isatty() else text, flush=flush)


def described(error: BaseException) -> str:
    """Message of an exception in one line; its class name if the message is empty or `str` itself raises."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # `__str__` of a foreign exception may raise anything
        text = ""
    return text or type(error).__name__


def main(argv: Sequence[str] | None = None) -> int:
    """Run `wyfold argv...` and return its exit code; `argv` defaults to the arguments of this process."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without a character of the text shows `?`
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader (`| head`) has exited
        _discard_output()
        return CLOSED_PIPE
    except OSError as error:  # standard output is a file on a full disk
        _discard_output()
        _complain("wyfold", described(error))
        return FAILED


def _discard_output() -> None:
    """Redirect standard output to the null device, so that the flush at interpreter exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview(), end="")
        return DONE if words else USAGE
    if words[0] == "--version":
        import wyfold

        print(f"wyfold {wyfold.__version__}")
        return DONE
    verb = words[0]
    if verb not in VERBS:
        _complain("wyfold", f"unknown verb {verb!r}; there are {', '.join(VERBS)} (see wyfold --help)")
        return USAGE
    return _run(verb, words[1:])


def _run(verb: str, words: list[str]) -> int:
    name = f"wyfold {verb}"
    try:
        module = importlib.import_module(f"wyfold.cli.{verb}")
        parser = _OneLineParser(
            prog=name,
            description=module.__doc__,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(parser)
        return int(module.run(parser.parse_args(words)))
    except SystemExit as stop:  # argparse exits this way after --help and after an error
        if isinstance(stop.code, str):
            _complain(name, stop.code)
            return FAILED
        return int(stop.code or 0)
    except BrokenPipeError:
        raise
    except BaseException as error:
        ending = _ending(error, verb)
        if ending is None:  # a bug: show its traceback
            raise
        _complain(name, ending.message)
        return ending.code


class _Ending(NamedTuple):
    """Exit code and message of a command that failed.

    Attributes:
        code: Exit code.
        message: Text for standard error.
    """

    code: int
    message: str


def _ending(error: BaseException, verb: str) -> _Ending | None:
    """Exit code and message for an exception of a verb; None if the exception is a bug."""
    if isinstance(error, BaseExceptionGroup):
        return _together([_ending(one, verb) for one in error.exceptions])
    if isinstance(error, UnsupportedError):
        return _Ending(FAILED, str(error))  # several lines, one per backend
    text = described(error)
    if isinstance(error, UsageError):
        return _Ending(USAGE, text)
    if isinstance(error, Failure):
        return _Ending(FAILED, text)
    if isinstance(error, KeyboardInterrupt):
        return _Ending(INTERRUPTED, "interrupted")
    if isinstance(error, ModuleNotFoundError):
        missing = (error.name or "").partition(".")[0]
        extra = "report" if verb == "report" else "cli"
        if missing != "torch" and missing not in EXTRAS[extra]:
            return None
        command = "pip install torch" if missing == "torch" else install_command(extra)
        return _Ending(FAILED, f"needs {missing}, which is not installed: {command}")
    if out_of_memory(error):
        reason = "" if text == type(error).__name__ else f": {text.partition(' Exception raised from ')[0]}"
        return _Ending(FAILED, f"not enough memory{reason}")
    if isinstance(error, OSError):  # a full disk, a folder without write permission
        return _Ending(FAILED, text)
    return None


def _together(endings: Sequence[_Ending | None]) -> _Ending | None:
    """Merge the endings of an exception group: the largest code, all messages. None if one of them is a bug."""
    known = [ending for ending in endings if ending is not None]
    if len(known) < len(endings) or not known:
        return None
    return _Ending(max(ending.code for ending in known), "; ".join(dict.fromkeys(ending.message for ending in known)))


def out_of_memory(error: BaseException) -> bool:
    """Whether PyTorch or Python failed to allocate memory, on a GPU or on the CPU."""
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in described(error)
