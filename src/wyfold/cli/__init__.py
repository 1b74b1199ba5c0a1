"""The command line: `wyfold VERB ...`, the same as `python -m wyfold VERB ...`.

Each verb is one module of this folder with `add_arguments(parser)` and `run(args) -> int`, imported when it is called
for, so that `wyfold doctor` never waits for a plotting library.

Exit codes: 0 done; 1 it could not be done, or a check did not hold; 2 the command line cannot be used as it stands
(unknown verb or option, a missing file, a run folder of another configuration); 130 interrupted, state saved where the
verb keeps one.
"""

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["Failure", "UsageError", "main"]

DONE, FAILED, USAGE, INTERRUPTED, CLOSED_PIPE = 0, 1, 2, 130, 141

VERBS = {
    "doctor": "what this machine has, and which backend serves each operator",
    "demo": "train a small hybrid byte model on the standard library's prose, sample from it, check its decoding",
    "train": "train a byte model on text files, or a model of a known task, with resumable checkpoints",
    "tasks": "train every layer on every known task: one table",
    "generate": "stream text from a checkpoint through the recurrent form",
    "bench": "time and memory of every operator, beside installed peers",
    "report": "draw runs and stored results as one HTML page that opens offline",
    "verify": "error of every operator and gradient on this machine against the float64 recurrence",
    "tune": "for developers: launch configurations for this GPU, proved before they are timed",
}

EXTRAS = {"filelock": "cli", "matplotlib": "cli", "msgspec": "cli", "rich": "cli", "safetensors": "cli", "plotly": "report"}
"""What the verbs need beyond torch, and the extra that brings it: `pip install "wyfold[cli]"`."""


class UsageError(Exception):
    """The command line asks for what cannot be done as asked; the text says what to change. Exit code 2."""


class Failure(Exception):
    """The work could not be finished, or a check did not hold; the text says why. Exit code 1."""


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are one line instead of the whole usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _overview() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:<{width}}  {summary}" for verb, summary in VERBS.items())
    return (
        "usage: wyfold VERB [options]\n\n"
        "Delta-rule operators, layers and a small language model, from the command line.\n\n"
        f"verbs:\n{verbs}\n\n"
        "`wyfold VERB --help` lists the options of a verb; `wyfold --version` prints the version.\n"
    )


def _complain(prefix: str, message: object) -> None:
    print(f"{prefix}: {message}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of `wyfold argv...`; `argv` is the process's own arguments unless given."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character of the text shows a mark
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader (`| head`) has left. What is still buffered must not fail again when the interpreter flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE


def _out_of_memory(error: Exception) -> bool:
    """Whether that is what PyTorch says of a tensor that finds no room, on a GPU or on the CPU."""
    import torch

    words = "can't allocate memory" in str(error)
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or words


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
    from wyfold.runtime.check import UnsupportedError

    name = f"wyfold {verb}"
    try:
        module = importlib.import_module(f"wyfold.cli.{verb}")
        parser = _Parser(
            prog=name,
            description=module.__doc__,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(parser)
        return int(module.run(parser.parse_args(words)))
    except SystemExit as stop:  # how argparse leaves after --help and after an error
        return int(stop.code or 0)
    except UsageError as error:
        _complain(name, error)
        return USAGE
    except (Failure, UnsupportedError) as error:
        _complain(name, error)
        return FAILED
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        _complain(name, f'needs {missing}, which is not installed: pip install "wyfold[{EXTRAS[missing]}]"')
        return FAILED
    except BrokenPipeError:
        raise
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        _complain(name, f"not enough memory for what was asked: {str(error).strip().splitlines()[0]}")
        return FAILED
    except OSError as error:  # a full disk, a folder that may not be written: the machine's matter, told by its name
        _complain(name, error)
        return FAILED
    except KeyboardInterrupt:
        _complain(name, "interrupted")
        return INTERRUPTED
