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
import shlex
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from wyfold.cli import DONE, INTERRUPTED, Failure, UsageError, results, say
from wyfold.cli.arguments import found_device, use_threads
from wyfold.cli.train import documents, integrity, rundir
from wyfold.cli.train.integrity import DamagedError
from wyfold.cli.train.options import add_arguments, fill_options, option_words, require_possible
from wyfold.cli.train.recipe import Recipe, stored_in, stored_recipe
from wyfold.cli.train.rundir import CHECKPOINTS, CURVE, HISTORY, RESULT
from wyfold.runtime import pattern

if TYPE_CHECKING:
    from wyfold.cli.distributed import World
    from wyfold.cli.train.corpus import Corpus
    from wyfold.cli.train.synthetic import Task
    from wyfold.cli.train.trainer import Trainer

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Train. Returns 0 if finished, 130 if interrupted, with the state saved."""
    folder, kept = resolve_options(args)
    texts = None if args.task else documents.read(args.data)
    results.ready(folder)

    from wyfold.cli.distributed import leave, process_device
    from wyfold.cli.train import mfu
    from wyfold.cli.train.progress import explain_wait
    from wyfold.cli.train.trainer import Trainer
    from wyfold.context_parallel.watchdog import RankLost

    use_threads(args.threads)
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
    from wyfold.cli.train.objectives import objective_of
    from wyfold.cli.train.recipe import build

    resolve_options(args)
    source, digest, _ = _source(args, None)
    recipe = _recipe(args, digest, replicas=1)
    build(recipe, args.backend, objective_of(source, recipe).vocabulary)


def _recipe(args: argparse.Namespace, digest: str, replicas: int) -> Recipe:
    """Recipe of the options, after `resolve_options`."""
    own = ("data", "replicas")
    asked = {name: getattr(args, name) for name in Recipe.__struct_fields__ if name not in own}
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
    found = _newest_checkpoint(args, folder) if args.task is None and args.data is None else None
    if found is not None and integrity.read_record(found)["recipe"]["data"] != digest:
        raise UsageError(
            f"give --data FILE: the run in {folder} learns another text than the default one, and a run does not store "
            "the path of its text; or give another --out"
        )


def _compare(args: argparse.Namespace, recipe: Recipe, folder: Path, world: World) -> None:
    """Refuse processes with different options, or with different contents of the run's folder."""
    asked = {f"--{field.replace('_', '-')}": value for field, value in asdict(recipe).items()}
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
    from wyfold.cli.train import checkpoint

    if args.if_damaged == "stop":
        return
    _newest_checkpoint(args, folder)
    renamed = checkpoint.rename_damaged(folder / rundir.CHECKPOINTS)
    if renamed and args.if_damaged == "restart" and (folder / rundir.HISTORY).exists():
        renamed.append(rundir.rename_with_suffix(folder / rundir.HISTORY, "before-restart"))
    for path in renamed:
        say(f"kept: {path}")


def _source(args: argparse.Namespace, texts: documents.Documents | None) -> tuple[Corpus | Task, str, str]:
    """The text or task to learn, its digest, and a line that describes it.

    Args:
        args: Options after `resolve_options`.
        texts: Documents of --data; None for a task, or to read them here.
    """
    from wyfold.cli.train import corpus, objectives

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
    recipe = asdict(trainer.recipe)
    options = {field: value for field, value in recipe.items() if field not in ("data", "replicas")}
    words = [word for field, value in options.items() for word in option_words(field, value)]
    record = {
        "kind": "task",
        **results.provenance("train", [*words, "--device", trainer.device.type]),
        "recipe": recipe,
        "parameters": parameters,
        "seconds": round(trainer.elapsed, 1),
        **{key: value for key, value in entry.items() if key != "last"},
    }
    return results.write(trainer.folder, RESULT, record)
