"""Train a byte-level model on text files, or a model of a known task.

The text is read as bytes, and part of it is held out. The model, a pattern of
delta-rule and attention layers, learns to predict the next byte. With --task it
learns a synthetic task instead: mqar (multi-query associative recall), s_niah
(a single needle in a haystack), parity, or s5 (products of transpositions of
five elements). Each task has its defaults, which options override.

The folder of the run keeps the last two checkpoints, the curve as PNG and every
number as JSON lines. A task adds the result as JSON. The same command
continues an interrupted run, on the CPU with exactly the losses of an
uninterrupted one. Options that are left out then keep the values of the run;
for a task, --resume --out DIR is enough. A finished run is not trained further,
because its learning rate has fallen to the end: a longer one needs another
--out. A run whose newest checkpoint is damaged is not changed unless
--if-damaged says how to continue.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import statistics
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wyfold.cli import DONE, INTERRUPTED, Failure, UsageError, documents, results, rundir, say
from wyfold.cli.arguments import add_backend, at_least, between, device, found_device, gate_bound, seed_number, whole
from wyfold.cli.rundir import CHECKPOINTS, CURVE, HISTORY, RESULT
from wyfold.cli.settings import CHOICES, LEAST_WHOLE, TASKS, TEXT, defaults
from wyfold.runtime import pattern
from wyfold.runtime.choices import RECOMPUTED

if TYPE_CHECKING:
    from wyfold.cli.corpus import Corpus
    from wyfold.cli.distributed import World
    from wyfold.cli.recipe import Recipe
    from wyfold.cli.synthetic import Task
    from wyfold.cli.trainer import Trainer

MOST_TOKENS = 2**27
"""Largest number of tokens of a batch, which is built in host memory before it is used."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wyfold train`."""
    _run_options(parser.add_argument_group("run"))
    _task_options(parser.add_argument_group("task"))
    _model_options(parser.add_argument_group("model"))
    _learning_options(parser.add_argument_group("learning"))


def _default(setting: str) -> str:
    """Default of an option for its help. argparse does not know it, because tasks have other defaults."""
    return f'(default: "{TEXT[setting]}")' if isinstance(TEXT[setting], str) else f"(default: {TEXT[setting]})"


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
    run.add_argument("--device", type=device, default="cpu", help="PyTorch device (default: %(default)s)")
    add_backend(run)
    run.add_argument(
        "--cp",
        type=whole(1),
        default=1,
        metavar="C",
        help="under torchrun: number of processes that share a row; W processes make W / C replicas with separate "
        "batches. Parameters are sharded over all processes (default: %(default)s)",
    )
    run.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help=f"bfloat16 computes under autocast; parameters stay float32 {_default('dtype')}",
    )
    run.add_argument(
        "--recompute",
        choices=RECOMPUTED,
        help="save less for the backward and recompute it, with equal bits: selective saves the outputs of recurrences "
        "and attention, blocks only the input of each block (default: save everything)",
    )
    run.add_argument(
        "--peak-tflops",
        type=between(1e-6, 1e9),
        metavar="X",
        help="peak of one device in --dtype, in 10^12 operations per second, for the MFU "
        "(default: published values of NVIDIA A100, H100, H200 and B200)",
    )
    run.add_argument("--seed", type=seed_number, help=f"seed of initial parameters and batches {_default('seed')}")
    run.add_argument(
        "--save-every",
        type=whole(1),
        default=200,
        metavar="STEPS",
        help="steps between checkpoints; the end and an interruption also save (default: %(default)s)",
    )
    run.add_argument(
        "--eval-every",
        type=whole(1),
        metavar="STEPS",
        help=f"steps between evaluations on held-out data {_default('eval_every')}",
    )
    run.add_argument(
        "--eval-bytes",
        type=whole(1),
        metavar="N",
        help=f"largest evaluation, in bytes, or in tokens of a task {_default('eval_bytes')}",
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
    model.add_argument(
        "--layers",
        metavar="PATTERN",
        help=f'pattern of layers, repeated to --depth, such as "kda*3 attention" {_default("layers")}',
    )
    model.add_argument("--depth", type=whole(1, 10_000), help=f"number of layers {_default('depth')}")
    model.add_argument("--width", type=whole(1), help=f"channels of the model {_default('width')}")
    model.add_argument("--heads", type=whole(1), help=f"heads of every mixer {_default('heads')}")
    model.add_argument("--head-dim", type=whole(1), help=f"channels of a head {_default('head_dim')}")
    model.add_argument(
        "--window",
        type=whole(1),
        help=f"positions that attention looks back, and that its cache keeps {_default('window')}",
    )
    model.add_argument(
        "--neg-eigval",
        action="store_true",
        default=None,
        help="allow negative eigenvalues in delta-rule layers: beta in [0, 2] (default: no, for tasks too)",
    )
    model.add_argument(
        "--kda-lower-bound",
        type=gate_bound,
        metavar="X",
        help="use KDA's bounded gate, whose log decays stay above X in [-5, 0); published models have -5 "
        "(default: no bound, for tasks too)",
    )


def _learning_options(learning: argparse._ActionsContainer) -> None:
    duration = learning.add_mutually_exclusive_group()
    duration.add_argument("--steps", type=whole(1), help=f"total optimizer steps {_default('steps')}")
    duration.add_argument(
        "--minutes",
        type=at_least(0, above=True),
        help="train for at most this time, or one step, instead of --steps; start-up and evaluation are not counted; "
        "not repeatable",
    )
    learning.add_argument("--batch", type=whole(1), help=f"rows of a batch {_default('batch')}")
    learning.add_argument("--length", type=whole(1), help=f"bytes of a row {_default('length')}")
    learning.add_argument(
        "--grad-accum",
        type=whole(1),
        metavar="N",
        help=f"batches per optimizer step {_default('grad_accum')}",
    )
    learning.add_argument(
        "--packed",
        action="store_true",
        default=None,
        help="pack documents (files, topics), in pieces of at most --length, into one row of batch x length bytes; "
        "no document sees another",
    )
    learning.add_argument(
        "--held-out",
        type=between(0, 1),
        metavar="PART",
        help=f"fraction of the text, from its end, kept for validation {_default('held_out')}",
    )
    learning.add_argument("--lr", type=at_least(0, above=True), help=f"peak learning rate {_default('lr')}")
    learning.add_argument(
        "--warmup",
        type=whole(0),
        metavar="STEPS",
        help=f"steps of linear warm-up, followed by a cosine {_default('warmup')}",
    )
    learning.add_argument(
        "--lr-end",
        type=at_least(0, most=1),
        metavar="PART",
        help=f"fraction of --lr at the end of the cosine {_default('lr_end')}",
    )
    learning.add_argument(
        "--weight-decay",
        type=at_least(0),
        help=f"weight decay of matrices; none for norms and decay parameters {_default('weight_decay')}",
    )
    learning.add_argument("--clip", type=at_least(0, above=True), help=f"largest gradient norm {_default('clip')}")


def run(args: argparse.Namespace) -> int:
    """Train. Returns 0 if finished, 130 if interrupted, with the state saved."""
    folder, kept = resolve_options(args)
    texts = None if args.task else documents.read(args.data)
    results.ready(folder)

    from wyfold.cli import integrity, mfu
    from wyfold.cli.distributed import leave, process_device
    from wyfold.cli.progress import explain_wait
    from wyfold.cli.trainer import Trainer
    from wyfold.context_parallel.watchdog import RankLost

    args.device = found_device(process_device(args.device))
    source, digest, about = _source(args, texts)
    _require_text(args, digest, folder)
    with explain_wait("all processes of this run must join it"):  # by every process: none knows its rank yet
        world = _world(args)
    recipe = _recipe(args, digest, world.replicas)
    peak = mfu.peak(world.device, args.dtype) if args.peak_tflops is None else args.peak_tflops * 1e12
    options: dict[str, Any] = {"recompute": args.recompute, "peak": peak}
    watch = world.watch()
    try:
        with watch, _writing(args, folder, world):
            _compare(args, recipe, folder, world)
            with explain_wait("the model is built, or read from its checkpoint", world.is_main):
                trainer = Trainer(recipe, source, folder, args.device, args.backend, world, **options)
            if world.cp * world.replicas > 1:
                about += f"; {world.replicas} x {world.cp} processes, replicas times ranks of a replica"
            if world.is_main and kept:
                say(f"{folder}: options of this run are kept: {shlex.join(kept)}")
            if world.is_main:
                code = finish(trainer, args.save_every, about)
            else:
                code = DONE if trainer.complete or trainer.train(args.save_every) else INTERRUPTED
    except RankLost as lost:
        # The process groups are aborted already; do not destroy them.
        found = integrity.newest_intact(folder / CHECKPOINTS)
        after = "there is no checkpoint yet" if found is None else f"the same command continues from {found}"
        raise Failure(f"{lost}; {after}") from lost
    except BaseException:
        if not getattr(watch, "lost", ""):
            leave()
        raise
    leave()
    return code


def check_run(args: argparse.Namespace) -> None:
    """Refuse a run of a task as `run` would before its first step. Writes nothing.

    Args:
        args: Changed in place.
    """
    from wyfold.cli.objectives import objective_of
    from wyfold.cli.recipe import build

    resolve_options(args)
    source, digest, _ = _source(args, None)
    recipe = _recipe(args, digest, replicas=1)
    build(recipe, args.backend, objective_of(source, recipe).vocabulary)


def _recipe(args: argparse.Namespace, digest: str, replicas: int) -> Recipe:
    """Recipe of the options, after `resolve_options`."""
    from wyfold.cli.recipe import Recipe

    own = ("data", "replicas")
    asked = {field.name: getattr(args, field.name) for field in dataclasses.fields(Recipe) if field.name not in own}
    return Recipe(data=digest, replicas=replicas, **asked | {"eval_lengths": tuple(args.eval_lengths)})


def resolve_options(args: argparse.Namespace) -> tuple[Path, list[str]]:
    """Fill options that were left out, from the run in the folder or with the defaults of a new run.

    Args:
        args: Changed in place.

    Returns:
        Folder of the run, and the options of an existing run that differ from the defaults of a new one.

    Raises:
        UsageError: the folder is not a run; its newest checkpoint is damaged; there is no run to resume; an option does
            not apply to the text or the task; or the curriculum leaves no step with full rows.
    """
    from wyfold.cli import integrity
    from wyfold.cli.recipe import stored_in, stored_recipe

    folder = args.out or Path("runs", args.task or (args.data.resolve().stem if args.data else "python-prose"))
    rundir.require_run_or_empty(folder)
    found = _newest_checkpoint(args, folder)
    if found is None and args.resume:
        raise UsageError(f"--resume: no complete checkpoint in {folder}")
    before = None if found is None else stored_recipe(integrity.read_record(found)["recipe"])
    if before and args.resume and args.task is None and args.data is None:
        args.task = before["task"]
    kept = fill_options(args, before if before and before["task"] == args.task else None)
    if before:
        # The text and the replicas need torch, and are compared later.
        _recipe(args, before["data"], before["replicas"]).check_same(before, folder)
        with stored_in(folder):
            require_possible(args)
    return folder, kept


def _newest_checkpoint(args: argparse.Namespace, folder: Path) -> Path | None:
    """Checkpoint to continue from; None for a new run. Damaged ones are skipped only with --if-damaged."""
    from wyfold.cli import integrity
    from wyfold.cli.integrity import DamagedError

    if args.resume and args.if_damaged == "restart":
        raise UsageError("--resume: starts nothing new, and --if-damaged restart does: give one of them")
    try:
        return integrity.newest(folder / CHECKPOINTS)
    except DamagedError as damage:
        if args.if_damaged == ("restart" if damage.intact is None else "older"):
            return damage.intact
        raise damage.advice(
            whole="give --if-damaged older to continue from it; what is damaged is kept as step-N.damaged",
            otherwise="put the file back if there is a copy, or give --if-damaged restart to begin again at step 0 "
            f"(what is damaged, and {HISTORY}, are kept under other names), or give another --out",
        ) from damage


def _require_text(args: argparse.Namespace, digest: str, folder: Path) -> None:
    """Refuse to continue a run of another text with the default one, because --data was left out."""
    from wyfold.cli import integrity

    found = _newest_checkpoint(args, folder) if args.task is None and args.data is None else None
    if found is not None and integrity.read_record(found)["recipe"]["data"] != digest:
        raise UsageError(
            f"give --data FILE: the run in {folder} learns another text than the default one, and a run does not store "
            "the path of its text; or give another --out"
        )


def _compare(args: argparse.Namespace, recipe: Recipe, folder: Path, world: World) -> None:
    """Refuse processes with different options, or with different contents of the run's folder."""
    from wyfold.cli import integrity

    asked = {f"--{field.replace('_', '-')}": value for field, value in dataclasses.asdict(recipe).items()}
    options = {f"--{name.replace('_', '-')}": getattr(args, name) for name in ("recompute", "backend", "save_every")}
    newest = [path.name for path in integrity.step_folders(folder / CHECKPOINTS)][-1:]
    try:
        world.require_equal(asked | options | {"the newest checkpoint": newest[0] if newest else "none"})
    except ValueError as error:
        raise UsageError(
            f"{error}; start every process by the same command, with an --out that all of them share"
        ) from error


@contextmanager
def _writing(args: argparse.Namespace, folder: Path, world: World) -> Iterator[None]:
    """Lock the run's folder for the processes of this run, and rename damaged checkpoints if requested."""
    refusal = None
    with ExitStack() as stack:
        if world.is_main:
            try:
                stack.enter_context(rundir.locked(folder))
                _rename_damaged(args, folder)
            except UsageError as error:
                refusal = error
        if world.all_reduce_max(refusal is not None) > 0:
            raise refusal or UsageError(f"--out {folder}: the first process of this run was refused")
        yield


def _rename_damaged(args: argparse.Namespace, folder: Path) -> None:
    """Rename damaged checkpoints; the folder must be locked."""
    from wyfold.cli import checkpoint

    if args.if_damaged == "stop":
        return
    _newest_checkpoint(args, folder)
    renamed = checkpoint.rename_damaged(folder / rundir.CHECKPOINTS)
    if renamed and args.if_damaged == "restart" and (folder / rundir.HISTORY).exists():
        renamed.append(rundir.rename_with_suffix(folder / rundir.HISTORY, "before-restart"))
    for path in renamed:
        say(f"kept: {path}")


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
    return [word for setting, value in taken.items() if value != own[setting] for word in _words(setting, value)]


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


def _words(setting: str, value: Any) -> list[str]:
    """Words of an option of a recipe; empty if it has no value."""
    # Zero may be a valid value, but means "not applicable" for pairs and vocabulary.
    chosen = value != 0 if setting in ("pairs", "vocabulary") else value not in (None, ()) and value is not False
    given = [] if value is True else value if isinstance(value, tuple) else [value]
    return [f"--{setting.replace('_', '-')}", *map(str, given)] if chosen else []


def _source(args: argparse.Namespace, texts: documents.Documents | None) -> tuple[Corpus | Task, str, str]:
    """The text or task to learn, its digest, and a line that describes it.

    Args:
        args: Options after `resolve_options`.
        texts: Documents of --data; None for a task, or to read them here.
    """
    from wyfold.cli import corpus, objectives

    if args.task is None:
        text = corpus.read(args.data) if texts is None else corpus.Corpus.of(*texts)
        return text, text.digest(), text.describe()
    task = objectives.task_of(args.task, pairs=args.pairs, vocabulary=args.vocabulary)
    return task, repr(task), f"{args.task}: {task}"


def _world(args: argparse.Namespace) -> World:
    """Processes of the run, or the single process."""
    from wyfold.cli.distributed import DistributedWorld, World, launched

    if not launched():
        if args.cp > 1:
            raise UsageError(f"--cp {args.cp}: start the processes by torchrun --nproc-per-node N -m wyfold train ...")
        return World(args.device)
    try:
        return DistributedWorld(args.device, args.cp)
    except ValueError as error:
        raise UsageError(f"--cp: {error}") from error


def finish(trainer: Trainer, save_every: int, about: str) -> int:
    """Train to the end or until interrupted, and print the result. Returns the exit code."""
    size = sum(parameter.numel() for parameter in trainer.model.parameters())
    recipe = trainer.recipe
    say(about)
    say(f"model: {size:,} parameters, {pattern.describe(recipe.layers, recipe.depth)}")
    if recipe.curriculum:
        of = "" if recipe.steps is None else f" of {recipe.steps:,}"
        say(f"curriculum: the first {recipe.curriculum:,}{of} steps have shorter rows")
    if trainer.complete:
        say(f"{trainer.folder}: already finished, at step {trainer.step}; another --out starts a new run")
        if recipe.task is not None and not (trainer.folder / RESULT).exists():
            evaluations = [entry for entry in trainer.history if trainer.objective.metric in entry]
            say(f"result: {_write_result(trainer, size, evaluations[-1])}")
        return DONE
    if trainer.step:
        say(f"continuing {trainer.folder} from step {trainer.step}")
    finished = trainer.train(save_every)
    if not finished:
        say(f"\nstopped after step {trainer.step}; saved in {trainer.folder}")
        say("to continue, give the same command again")
        return INTERRUPTED
    evaluations = [entry for entry in trainer.history if trainer.objective.metric in entry]
    say(trainer.objective.sketch(trainer.history))
    first, last = (
        f"{trainer.objective.describe_evaluation(evaluation)} at step {evaluation['step']}"
        for evaluation in (evaluations[0], evaluations[-1])
    )
    say(f"validation: {first}, {last}")
    say(f"time: {trainer.elapsed:.{0 if trainer.elapsed >= 10 else 1}f} s of training")
    if recipe.curriculum and trainer.step <= recipe.curriculum:
        say(f"curriculum: the run ended within it, at step {trainer.step}: it was trained on no whole row")
    steps = [entry for entry in trainer.history if "loss" in entry]
    speed = f"speed: {statistics.median(entry['tokens_per_second'] for entry in steps):,.0f} tokens/s"
    shares = [entry["mfu"] for entry in steps if "mfu" in entry]
    say(f"{speed}{f', MFU {statistics.median(shares):.1%}' if shares else ''}, medians of the steps")
    if trainer.device.type == "cuda":
        say(f"memory: {trainer.peak_memory / 2**30:.2f} GiB, the peak of one device")
    say(f"curve: {trainer.folder / CURVE}")
    if recipe.task is None:
        say(f'sample from it: wyfold generate {trainer.folder} --prompt "The"')
    else:
        say(f"result: {_write_result(trainer, size, evaluations[-1])}")
    return DONE


def _write_result(trainer: Trainer, parameters: int, entry: dict[str, Any]) -> Path:
    """Write `result.json` of a run of a task."""
    recipe = dataclasses.asdict(trainer.recipe)
    options = {field: value for field, value in recipe.items() if field not in ("data", "replicas")}
    words = [word for field, value in options.items() for word in _words(field, value)]
    record = {
        "kind": "task",
        **results.provenance("train", [*words, "--device", trainer.device.type]),
        "recipe": recipe,
        "parameters": parameters,
        "seconds": round(trainer.elapsed, 1),
        **{key: value for key, value in entry.items() if key != "last"},
    }
    return results.write(trainer.folder, RESULT, record)
