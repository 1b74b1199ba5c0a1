"""Train a small hybrid byte model on real text, sample from it, and check how it decodes.

The text is the language reference inside Python's own standard library; the model mixes Gated DeltaNet layers with
softmax attention. It takes one to two minutes on one CPU core. Interrupted, the same command continues; finished, it
samples and checks again. The check: logits computed byte by byte, through the recurrent form and its cache, are the
logits of one chunked pass.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wyfold.cli import DONE, FAILED, UsageError
from wyfold.cli.arguments import seed_number

if TYPE_CHECKING:
    import torch

    from wyfold.models import Decoder

RECIPE: dict[str, Any] = {
    "layers": "gdn*3 attention",
    "depth": 4,
    "width": 128,
    "heads": 4,
    "head_dim": 32,
    "window": 128,
    "packed": False,
    "batch": 8,
    "length": 256,
    "grad_accum": 1,
    "steps": 200,
    "minutes": None,
    "lr": 4e-3,
    "warmup": 30,
    "lr_end": 0.02,
    "weight_decay": 0.1,
    "clip": 1.0,
    "held_out": 0.1,
    "eval_every": 50,
    "eval_bytes": 32768,
    "seed": 0,
    "dtype": "float32",
}
SAVE_EVERY = 50

PROMPT = b"The "
SAMPLE_BYTES = 400
CHECKED_BYTES = 300

BOUNDS = {"float32": 1e-4, "float64": 1e-12}
"""Largest difference allowed between a logit decoded byte by byte and the same logit of the chunked pass.

Both are the same sums in another order, so what separates them is rounding, carried through every layer: measured near
1e-5 and 1e-14 on logits of about 10. The bounds leave room for other machines; a wrong state misses both by far.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `wyfold demo`."""
    parser.add_argument(
        "--out", type=Path, default=Path("runs", "demo"), metavar="DIR", help="folder of the run (default: %(default)s)"
    )
    parser.add_argument("--fresh", action="store_true", help="forget an earlier demo in that folder and start over")
    parser.add_argument("--seed", type=seed_number, default=0, help="of the sample's draws (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Train or continue, sample, check; 0 when the check holds, 1 when it does not, 130 when interrupted."""
    from wyfold.cli import results, rundir

    rundir.require_run_or_empty(args.out)
    results.ready(args.out)
    with rundir.locked(args.out):
        return _run_alone(args)


def _run_alone(args: argparse.Namespace) -> int:
    """`run`, in a folder that no other process writes into."""
    import torch

    from wyfold.cli import checkpoint, corpus
    from wyfold.cli.generate import Sampling, speak
    from wyfold.cli.recipe import Recipe
    from wyfold.cli.rundir import CHECKPOINTS, CURVE, HISTORY
    from wyfold.cli.train import finish
    from wyfold.cli.trainer import Trainer

    # Threads would save part of the minute on idle cores. On busy ones they spin while they wait for each other, and
    # a step takes twenty times as long; and sums cut among threads differ from machine to machine. So one.
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
    code = finish(trainer, SAVE_EVERY, f"{text.name}: {len(text.text):,} bytes in {text.documents} documents")
    if code != DONE:
        return code

    print("\nA sample, drawn byte by byte through the recurrent form:\n")
    speak(
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
    """Exit code, and a line per dtype: how far the two ways to the same logits lie apart."""
    import torch

    code = DONE
    for name, bound in BOUNDS.items():
        apart = decoding_difference(copy.deepcopy(model).to(getattr(torch, name)), ids)
        holds = apart <= bound
        verdict = "as promised" if holds else "NOT as promised"
        print(
            f"  {name}: {ids.shape[1]} bytes, largest difference of a logit {apart:.1e}, bound {bound:.0e}: {verdict}"
        )
        if not holds:  # also when it is NaN
            code = FAILED
    return code


def decoding_difference(model: Decoder, ids: torch.Tensor) -> float:
    """Largest difference between the logits of one chunked pass over `ids` and of the bytes fed one at a time.

    Args:
        model: any dtype.
        ids: [1, T] int64.
    """
    import torch

    model.eval()
    with torch.no_grad():
        whole_pass, _ = model(ids)
        cache = model.new_cache(1)
        steps = [model(ids[:, t : t + 1], cache=cache)[0] for t in range(ids.shape[1])]
    return (whole_pass - torch.cat(steps, dim=1)).abs().max().item()
