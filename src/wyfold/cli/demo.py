"""Train a small hybrid byte model on real text, sample from it, check its decoding.

The text is the language reference in Python's standard library. The model mixes
Gated DeltaNet layers with softmax attention. Training takes one to two minutes
on one CPU core. After an interruption the same command continues; after the end
it only samples and checks again. The check compares the logits computed byte by
byte, through the recurrent form and its cache, with those of one chunked pass.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wyfold.cli import DONE, FAILED, UsageError
from wyfold.cli.arguments import seed_number
from wyfold.cli.train.settings import TEXT

if TYPE_CHECKING:
    import torch

    from wyfold.models import Decoder

RECIPE: dict[str, Any] = TEXT | {
    "minutes": None,
    "window": 128,
    "steps": 200,
    "lr": 4e-3,
    "warmup": 30,
    "lr_end": 0.02,
    "eval_every": 50,
    "eval_bytes": 32768,
}
SAVE_EVERY = 50

PROMPT = b"The "
SAMPLE_BYTES = 400
CHECKED_BYTES = 300

BOUNDS = {"float32": 1e-4, "float64": 1e-12}
"""Largest difference allowed between a logit decoded byte by byte and the same logit of the chunked pass.

Both compute the same sums in another order, so they differ by rounding through all layers: about 1e-5 and 1e-14 were
measured on logits of about 10. The bounds allow for other machines; a wrong state exceeds both by far.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wyfold demo`."""
    parser.add_argument(
        "--out", type=Path, default=Path("runs", "demo"), metavar="DIR", help="folder of the run (default: %(default)s)"
    )
    parser.add_argument("--fresh", action="store_true", help="delete an earlier demo in that folder and start over")
    parser.add_argument("--seed", type=seed_number, default=0, help="seed of the sampling (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Train or continue, sample, check. Returns 0 if the check holds, 1 if it fails, 130 if interrupted."""
    from wyfold.cli import results
    from wyfold.cli.train import rundir

    rundir.require_run_or_empty(args.out)
    results.ready(args.out)
    with rundir.locked(args.out):
        return _run_alone(args)


def _run_alone(args: argparse.Namespace) -> int:
    """Body of `run`, with the folder locked."""
    import torch

    from wyfold.cli.generate import Sampling, stream_text
    from wyfold.cli.train import checkpoint, corpus, finish
    from wyfold.cli.train.recipe import Recipe
    from wyfold.cli.train.rundir import CHECKPOINTS, CURVE, HISTORY
    from wyfold.cli.train.trainer import Trainer

    # One thread. More would save part of a minute on idle cores. On busy cores threads spin while they wait for each
    # other, and a step takes twenty times as long. Sums split over threads also differ between machines.
    torch.set_num_threads(1)
    if args.fresh:
        checkpoint.remove_all(args.out / CHECKPOINTS)
        for name in (CURVE, HISTORY):
            (args.out / name).unlink(missing_ok=True)
    text = corpus.read(None)
    try:
        trainer = Trainer(Recipe(data=text.digest(), **RECIPE), text, args.out, torch.device("cpu"))
    except UsageError as error:
        raise UsageError(f"{error}; --fresh starts over") from error
    code = finish(trainer, SAVE_EVERY, text.describe())
    if code != DONE:
        return code

    print("\nA sample, drawn byte by byte through the recurrent form:\n")
    stream_text(
        trainer.model,
        PROMPT,
        Sampling(SAMPLE_BYTES, temperature=0.8, top_k=None, top_p=None, seed=args.seed),
        sys.stdout,
    )

    print("\nDecoding byte by byte against one chunked pass, on held-out text:")
    _, held_out = text.split(RECIPE["held_out"], at_document=RECIPE["packed"])
    ids = held_out.text[None, :CHECKED_BYTES].long()
    return check(trainer.model, ids)


def check(model: Decoder, ids: torch.Tensor) -> int:
    """Compare decoded and chunked logits in each dtype, print one line per dtype, and return the exit code."""
    import torch

    code = DONE
    for name, bound in BOUNDS.items():
        apart = decoding_difference(copy.deepcopy(model).to(getattr(torch, name)), ids)
        holds = apart <= bound
        verdict = "pass" if holds else "FAIL"
        print(f"  {name}: {ids.shape[1]} bytes, largest logit difference {apart:.1e}, bound {bound:.0e}: {verdict}")
        if not holds:  # NaN fails too
            code = FAILED
    return code


def decoding_difference(model: Decoder, ids: torch.Tensor) -> float:
    """Largest difference between the logits of one chunked pass over `ids` and those of byte-by-byte decoding.

    Args:
        model: Model in any dtype.
        ids: [1, T] int64.
    """
    import torch

    model.eval()
    with torch.no_grad():
        whole_pass, _ = model(ids)
        cache = model.new_cache(1)
        steps = [model(ids[:, t : t + 1], cache=cache)[0] for t in range(ids.shape[1])]
    return (whole_pass - torch.cat(steps, dim=1)).abs().max().item()
