"""Options of `wyfold train`, and their values where they are left out. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wyfold.cli import UsageError
from wyfold.cli.arguments import add_backend, add_threads, at_least, between, device, gate_bound, seed_number, whole
from wyfold.cli.train.settings import CHOICES, LEAST_WHOLE, TASKS, TEXT, defaults
from wyfold.runtime.choices import RECOMPUTED

MOST_TOKENS = 2**27
"""Largest number of tokens of a batch, which is built in host memory before it is used."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wyfold train`."""
    _run_options(parser.add_argument_group("run"))
    _machine_options(parser.add_argument_group("machine"))
    _task_options(parser.add_argument_group("task"))
    _model_options(parser.add_argument_group("model"))
    _learning_options(parser.add_argument_group("learning"))


def _add_setting(group: argparse._ActionsContainer, option: str, what: str, **options: Any) -> None:
    """Add an option whose help ends with its default. argparse does not know it, because tasks have other defaults."""
    value = TEXT[option.removeprefix("--").replace("-", "_")]
    default = f'"{value}"' if isinstance(value, str) else value
    group.add_argument(option, help=f"{what} (default: {default})", **options)


def _run_options(run: argparse._ActionsContainer) -> None:
    source = run.add_mutually_exclusive_group()
    source.add_argument(
        "--data",
        type=Path,
        metavar="FILE|DIR",
        help="text to learn: a file, or all text files below a folder "
        "(default: the language reference in Python's standard library)",
    )
    source.add_argument("--task", choices=TASKS, help="learn this known task, which changes defaults of other options")
    run.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the run (default: runs/NAME, by the text or task)"
    )
    run.add_argument(
        "--resume",
        action="store_true",
        help="continue an existing run; start no new one. A run of a text needs the same --data again",
    )
    run.add_argument(
        "--if-damaged",
        choices=("stop", "older", "restart"),
        default="stop",
        help="if the newest checkpoint is damaged: stop; continue from an older intact one; or restart at step 0 if "
        "none is intact. Damaged checkpoints are kept as step-N.damaged (default: %(default)s)",
    )
    run.add_argument(
        "--save-every",
        type=whole(1),
        default=200,
        metavar="STEPS",
        help="steps between checkpoints; the end and an interruption also save (default: %(default)s)",
    )
    every = {"type": whole(1), "metavar": "STEPS"}
    _add_setting(run, "--eval-every", "steps between evaluations on held-out data", **every)
    most = {"type": whole(1), "metavar": "N"}
    _add_setting(run, "--eval-bytes", "largest evaluation, in bytes, or in tokens of a task", **most)
    _add_setting(run, "--seed", "seed of initial parameters and batches", type=seed_number)


def _machine_options(machine: argparse._ActionsContainer) -> None:
    machine.add_argument("--device", type=device, default="cpu", help="PyTorch device (default: %(default)s)")
    add_backend(machine)
    add_threads(machine)
    machine.add_argument(
        "--cp",
        type=whole(1),
        default=1,
        metavar="C",
        help="under torchrun: number of processes that share a row; W processes make W / C replicas with separate "
        "batches. Parameters are sharded over all processes (default: %(default)s)",
    )
    dtypes = ("float32", "bfloat16")
    _add_setting(machine, "--dtype", "bfloat16 computes under autocast; parameters stay float32", choices=dtypes)
    machine.add_argument(
        "--recompute",
        choices=RECOMPUTED,
        help="save less for the backward and recompute it, with equal bits: selective saves the outputs of recurrences "
        "and attention, blocks only the input of each block (default: save everything)",
    )
    machine.add_argument(
        "--peak-tflops",
        type=between(1e-6, 1e9),
        metavar="X",
        help="peak of one device in --dtype, in 10^12 operations per second, for the MFU "
        "(default: published values of NVIDIA A100, H100, H200 and B200)",
    )


def _task_options(task: argparse._ActionsContainer) -> None:
    task.add_argument(
        "--pairs",
        type=whole(1),
        help="for mqar: key-value pairs (default: 64, or as many as fit --length and --vocabulary)",
    )
    task.add_argument(
        "--vocabulary", type=whole(1), metavar="N", help="for mqar and s_niah: number of tokens (default: 8192 and 256)"
    )
    task.add_argument(
        "--curriculum",
        type=whole(0),
        metavar="STEPS",
        help="for mqar: number of first steps with shorter rows. In thirds of them, rows have 1/8, 1/4 and 1/2 of "
        "--length and --pairs, and batches have 8, 4 and 2 times as many rows (default: 30 %% of --steps, "
        f"at most 1200; 0 if --length is below {LEAST_WHOLE})",
    )
    task.add_argument(
        "--eval-lengths",
        type=whole(1),
        nargs="+",
        metavar="N",
        help="further lengths of row for the final evaluation (default: the task's)",
    )
    task.add_argument(
        "--stop-at",
        type=between(0, 1, closed_above=True),
        metavar="PART",
        help="accuracy on held-out rows at which the run ends early (default: the task's)",
    )


def _model_options(model: argparse._ActionsContainer) -> None:
    pattern = 'pattern of layers, repeated to --depth, such as "kda*3 attention"'
    _add_setting(model, "--layers", pattern, metavar="PATTERN")
    _add_setting(model, "--depth", "number of layers", type=whole(1, 10_000))
    _add_setting(model, "--width", "channels of the model", type=whole(1))
    _add_setting(model, "--heads", "heads of every mixer", type=whole(1))
    _add_setting(model, "--head-dim", "channels of a head", type=whole(1))
    _add_setting(model, "--window", "positions that attention looks back, and that its cache keeps", type=whole(1))
    model.add_argument(
        "--neg-eigval",
        action="store_true",
        default=None,
        help="allow eigenvalues down to -1 in delta-rule layers: beta in [0, 2], or rates of rwkv7 up to 1 + decay "
        "(default: no, for tasks too)",
    )
    model.add_argument(
        "--kda-lower-bound",
        type=gate_bound,
        metavar="X",
        help="use KDA's bounded gate, whose log decays stay above X in [-5, 0); published models have -5 "
        "(default: no bound, for tasks too)",
    )
    model.add_argument(
        "--gla-conv",
        action="store_true",
        default=None,
        help="give gla layers a short convolution, as the delta rules have (default: no, as published, for tasks too)",
    )


def _learning_options(learning: argparse._ActionsContainer) -> None:
    positive, part = at_least(0, above=True), {"metavar": "PART"}
    duration = learning.add_mutually_exclusive_group()
    _add_setting(duration, "--steps", "total optimizer steps", type=whole(1))
    duration.add_argument(
        "--minutes",
        type=positive,
        help="train for at most this time, or one step, instead of --steps; start-up and evaluation are not counted; "
        "not repeatable",
    )
    _add_setting(learning, "--batch", "rows of a batch", type=whole(1))
    _add_setting(learning, "--length", "bytes of a row", type=whole(1))
    _add_setting(learning, "--grad-accum", "batches per optimizer step", type=whole(1), metavar="N")
    learning.add_argument(
        "--packed",
        action="store_true",
        default=None,
        help="pack documents (files, topics), in pieces of at most --length, into one row of batch x length bytes; "
        "no document sees another",
    )
    held_out = "fraction of the text, from its end, kept for validation"
    _add_setting(learning, "--held-out", held_out, type=between(0, 1), **part)
    _add_setting(learning, "--lr", "peak learning rate", type=positive)
    warmup = "steps of linear warm-up, followed by a cosine"
    _add_setting(learning, "--warmup", warmup, type=whole(0), metavar="STEPS")
    _add_setting(learning, "--lr-end", "fraction of --lr at the end of the cosine", type=at_least(0, most=1), **part)
    decay = "weight decay of matrices; none for norms and decay parameters"
    _add_setting(learning, "--weight-decay", decay, type=at_least(0))
    _add_setting(learning, "--clip", "largest gradient norm", type=positive)


def fill_options(args: argparse.Namespace, before: Mapping[str, Any] | None = None) -> list[str]:
    """Fill options that were left out, from the recipe of the run to continue, or with the defaults of text or task.

    Args:
        args: Changed in place.
        before: Recipe of the run to continue, or None. Given options are kept; `Recipe.check_same` compares them.

    Returns:
        Words of the options that the run has and a new one would not have.
    """
    for option in ("pairs", "vocabulary", "curriculum", "eval_lengths", "stop_at") if args.task is None else ():
        if getattr(args, option) is not None:
            raise UsageError(f"--{option.replace('_', '-')}: is for a --task")
    if args.task is not None and args.packed:
        raise UsageError("--packed: rows of a task are independent already")
    own = {"minutes": None, **defaults(args.task, vars(args))}
    if args.minutes is not None or args.steps is not None:
        del own["minutes" if args.steps is not None else "steps"]  # one excludes the other
    left_out = [setting for setting in own if getattr(args, setting) is None]
    taken = {setting: (before or own)[setting] for setting in left_out}
    vars(args).update(taken)
    if before is None:
        require_possible(args)
    if before is None and args.task == "mqar" and args.steps is not None and args.curriculum >= args.steps:
        raise UsageError(
            f"--curriculum {args.curriculum}: must be less than --steps {args.steps}, or no step has whole rows"
        )
    return [word for setting, value in taken.items() if value != own[setting] for word in option_words(setting, value)]


def require_possible(args: argparse.Namespace) -> None:
    """Refuse options that the task's definition does not have, and batches of too many tokens.

    Args:
        args: Options after defaults were filled in.
    """
    for option in CHOICES if args.task is not None else ():
        if getattr(args, option) and args.task not in CHOICES[option]:
            raise UsageError(f"--{option}: the definition of {args.task} has no such choice")
    if args.curriculum and args.task != "mqar":
        raise UsageError(f"--curriculum: is for --task mqar, got {args.task}")
    if args.batch * args.length > MOST_TOKENS:
        raise UsageError(
            f"--batch {args.batch} x --length {args.length}: must be at most {MOST_TOKENS} together; "
            "--grad-accum makes steps of several batches"
        )
    for length in args.eval_lengths:
        if length > MOST_TOKENS:
            raise UsageError(f"--eval-lengths {length}: must be at most {MOST_TOKENS}")


def option_words(setting: str, value: Any) -> list[str]:
    """Words of an option of a recipe; empty if it has no value."""
    # Zero may be a valid value, but means "not applicable" for pairs and vocabulary.
    chosen = value != 0 if setting in ("pairs", "vocabulary") else value not in (None, ()) and value is not False
    given = [] if value is True else value if isinstance(value, tuple) else [value]
    return [f"--{setting.replace('_', '-')}", *map(str, given)] if chosen else []
