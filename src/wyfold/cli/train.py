"""Train a byte-level model on text files.

The text is read as bytes, part of it is held out, and the model, a pattern of delta-rule and attention layers, learns
to predict each next byte. The run's folder keeps the last two checkpoints, the loss curve as PNG and every number as
JSON lines. The same command run again continues an interrupted run where it stopped; on the CPU with the very losses it
would have had.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from wyfold.cli import DONE, INTERRUPTED, UsageError
from wyfold.cli.arguments import add_backend, at_least, between, device, whole
from wyfold.parallel.team import Ranks, Team, launched, leave

if TYPE_CHECKING:
    from wyfold.cli.trainer import Trainer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `wyfold train`."""
    run = parser.add_argument_group("run")
    run.add_argument(
        "--data",
        type=Path,
        metavar="FILE|DIR",
        help="text to learn; a folder stands for the text files below it "
        "(default: the language reference inside Python's own standard library)",
    )
    run.add_argument("--out", type=Path, metavar="DIR", help="folder of the run (default: runs/NAME, after the data)")
    run.add_argument("--resume", action="store_true", help="start nothing new: there must be a run to continue")
    run.add_argument("--device", type=device, default="cpu", help="PyTorch device (default: %(default)s)")
    add_backend(run)
    run.add_argument(
        "--cp",
        type=whole(1),
        default=1,
        metavar="C",
        help="under torchrun: processes that share the bytes of a row; the others are replicas with batches of their "
        "own, and parameters are sharded over all (default: %(default)s)",
    )
    run.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="bfloat16 computes under autocast; parameters stay float32 (default: %(default)s)",
    )
    run.add_argument("--seed", type=whole(0), default=0, help="of first parameters and batches (default: %(default)s)")
    run.add_argument(
        "--save-every",
        type=whole(1),
        default=200,
        metavar="STEPS",
        help="steps between checkpoints; the end and an interruption save too (default: %(default)s)",
    )
    run.add_argument(
        "--eval-every",
        type=whole(1),
        default=100,
        metavar="STEPS",
        help="steps between measurements of the loss on the validation bytes (default: %(default)s)",
    )
    run.add_argument(
        "--eval-bytes",
        type=whole(1),
        default=65536,
        metavar="N",
        help="most validation bytes read each time (default: %(default)s)",
    )

    model = parser.add_argument_group("model")
    model.add_argument(
        "--layers",
        default="gdn*3 attention",
        metavar="PATTERN",
        help='mixers, repeated to the depth, such as "kda*3 attention" (default: "%(default)s")',
    )
    model.add_argument("--depth", type=whole(1), default=4, help="layers (default: %(default)s)")
    model.add_argument("--width", type=whole(1), default=128, help="channels (default: %(default)s)")
    model.add_argument("--heads", type=whole(1), default=4, help="heads of every mixer (default: %(default)s)")
    model.add_argument("--head-dim", type=whole(1), default=32, help="channels of a head (default: %(default)s)")
    model.add_argument(
        "--window",
        type=whole(1),
        default=256,
        help="bytes an attention layer looks back, all that its cache keeps (default: %(default)s)",
    )

    learning = parser.add_argument_group("learning")
    duration = learning.add_mutually_exclusive_group()
    duration.add_argument("--steps", type=whole(1), help="optimizer steps in all (default: 1000)")
    duration.add_argument(
        "--minutes",
        type=at_least(0, above=True),
        help="follow the clock instead of a number of steps; such a run is not repeatable",
    )
    learning.add_argument("--batch", type=whole(1), default=8, help="rows of a batch (default: %(default)s)")
    learning.add_argument("--length", type=whole(1), default=256, help="bytes of a row (default: %(default)s)")
    learning.add_argument(
        "--grad-accum",
        type=whole(1),
        default=1,
        metavar="N",
        help="batches whose gradients make one step (default: %(default)s)",
    )
    learning.add_argument(
        "--packed",
        action="store_true",
        help="lay whole documents (files, topics), or pieces of --length, end to end in one row of "
        "batch x length bytes; no document sees another",
    )
    learning.add_argument(
        "--held-out",
        type=between(0, 1),
        default=0.1,
        metavar="PART",
        help="part of the text kept for validation, from its end (default: %(default)s)",
    )
    learning.add_argument(
        "--lr", type=at_least(0, above=True), default=3e-3, help="peak learning rate (default: %(default)s)"
    )
    learning.add_argument(
        "--warmup",
        type=whole(0),
        default=50,
        metavar="STEPS",
        help="steps of linear warm-up; a cosine follows (default: %(default)s)",
    )
    learning.add_argument(
        "--lr-end",
        type=at_least(0),
        default=0.1,
        metavar="PART",
        help="part of --lr that the cosine ends on (default: %(default)s)",
    )
    learning.add_argument(
        "--weight-decay",
        type=at_least(0),
        default=0.1,
        help="of the matrices; norms and decay parameters have none (default: %(default)s)",
    )
    learning.add_argument(
        "--clip", type=at_least(0, above=True), default=1.0, help="largest gradient norm (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Train as asked; 0 when finished, 130 when interrupted with the state saved."""
    from wyfold.cli import checkpoint, corpus
    from wyfold.cli.trainer import CHECKPOINTS, Recipe, Trainer

    if args.steps is None and args.minutes is None:
        args.steps = 1000
    folder = args.out or Path("runs", args.data.resolve().stem if args.data else "python-prose")
    if args.resume and checkpoint.latest(folder / CHECKPOINTS) is None:
        raise UsageError(f"--resume: no complete checkpoint in {folder}")

    text = corpus.read(args.data)
    team = _team(args)
    own = ("data", "replicas")
    asked = {field.name: getattr(args, field.name) for field in dataclasses.fields(Recipe) if field.name not in own}
    recipe = Recipe(data=text.digest(), replicas=team.replicas, **asked)
    trainer = Trainer(recipe, text, folder, args.device, args.backend, team)
    about = f"{text.name}: {len(text.text):,} bytes in {text.documents} documents"
    if team.cp * team.replicas > 1:
        about += f"; {team.replicas} x {team.cp} processes, replicas by those that share their rows"
    try:
        if team.leads:
            return finish(trainer, args.save_every, about)
        return DONE if trainer.complete or trainer.train(args.save_every) else INTERRUPTED
    finally:
        leave()


def _team(args: argparse.Namespace) -> Team:
    """The processes of the run."""
    if not launched():
        if args.cp > 1:
            raise UsageError(f"--cp {args.cp}: start the processes by torchrun --nproc-per-node N -m wyfold train ...")
        return Team(args.device)
    try:
        return Ranks(args.device, args.cp)
    except ValueError as error:
        raise UsageError(f"--cp: {error}") from error


def finish(trainer: Trainer, save_every: int, about: str) -> int:
    """Train to the end or to the first interruption, and say what became of it."""
    from wyfold.cli import curve
    from wyfold.cli.trainer import CURVE

    size = sum(parameter.numel() for parameter in trainer.model.parameters())
    recipe = trainer.recipe
    print(f"{about}; a model of {size:,} parameters ({recipe.layers}, repeated to {recipe.depth} layers)")
    if trainer.complete:
        print(f"{trainer.folder}: this run is already finished, at step {trainer.step}")
        return DONE
    if trainer.step:
        print(f"continuing {trainer.folder} from step {trainer.step}")
    finished = trainer.train(save_every)
    if not finished:
        print(f"\nstopped after step {trainer.step}; all of it is saved in {trainer.folder}")
        print("to continue, give the same command again")
        return INTERRUPTED
    validation = trainer.validation_curve()
    print(curve.sketch(trainer.training_curve(), validation))
    print(
        f"validation: {validation[0][1]:.3f} bits per byte at step {validation[0][0]}, "
        f"{validation[-1][1]:.3f} at step {validation[-1][0]}, after {trainer.elapsed:.0f} s of training"
    )
    print(f"curve: {trainer.folder / CURVE}")
    print(f'sample from it: wyfold generate {trainer.folder} --prompt "The"')
    return DONE
