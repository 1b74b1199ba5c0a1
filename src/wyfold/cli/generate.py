"""Stream text from a checkpoint through the recurrent form.

The chunk forms read the prompt in pieces of 2,048 bytes. After that each byte
is one step of the recurrence. The cache has a fixed size: a state per
delta-rule or TTT layer, a window of keys per attention layer. `wyfold train`
always gives attention a window. A model without one keeps every key, and its
memory grows with the text.

The lines of a file of prompts are continued together. On a GPU, a model with
delta-rule layers only keeps its states in pools and replays each step as a CUDA
graph. Text goes to standard output, the speed to standard error.
"""

from __future__ import annotations

import argparse
import codecs
import errno
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from wyfold.cli import DONE, UsageError, printable
from wyfold.cli.arguments import (
    add_backend,
    add_threads,
    at_least,
    between,
    device,
    found_device,
    seed_number,
    use_threads,
    whole,
)

if TYPE_CHECKING:
    import torch

    from wyfold.models import Decoder

START = b"\n"
"""Replacement for an empty prompt: the model needs at least one byte."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wyfold generate`."""
    parser.add_argument("checkpoint", type=Path, metavar="DIR", help="a run of `wyfold train`, or a checkpoint in it")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", help="text to continue (default: standard input)")
    prompts.add_argument("--prompts", type=Path, metavar="FILE", help="continue each line of this file")
    parser.add_argument(
        "--batch", type=whole(1), default=64, help="lines of --prompts continued together (default: %(default)s)"
    )
    parser.add_argument("--max-bytes", type=whole(0), default=400, help="bytes to add (default: %(default)s)")
    parser.add_argument(
        "--temperature",
        type=at_least(0),
        default=0.8,
        help="0 always takes the most likely byte (default: %(default)s)",
    )
    parser.add_argument("--top-k", type=whole(1), help="sample from this many most likely bytes only")
    parser.add_argument(
        "--top-p",
        type=between(0, 1, closed_above=True),
        help="sample from the most likely bytes of this total probability",
    )
    parser.add_argument("--seed", type=seed_number, default=0, help="seed of the sampling (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the text to FILE (default: standard output)")
    parser.add_argument("--device", type=device, default="cpu", help="PyTorch device (default: %(default)s)")
    add_backend(parser)
    add_threads(parser)


@dataclass(frozen=True)
class Sampling:
    """Sampling options.

    Args:
        max_bytes: Bytes to add.
        temperature: Temperature of the softmax; 0 takes the most likely byte.
        top_k, top_p: Sample from the k most likely bytes, or the most likely bytes of total probability p; None: all.
        seed: Seed of the sampling.
    """

    max_bytes: int
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int


def run(args: argparse.Namespace) -> int:
    """Continue the prompt, or every line of the file of prompts. Returns 0."""
    from wyfold.cli.train.checkpoint import find_model, load_model
    from wyfold.cli.train.integrity import DamagedError

    try:
        find_model(args.checkpoint)
    except DamagedError as damage:
        raise damage.advice("give that folder to generate from it", "put the file back if there is a copy") from damage
    # Standard input is read after the model is loaded, so that a load error does not lose what a user typed.
    given = _prompts(args)
    if args.out is not None:
        _check_out(args.out)
    use_threads(args.threads)
    try:
        model = load_model(args.checkpoint, found_device(args.device), args.backend)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if model.config.vocab_size != 256:
        raise UsageError(f"{args.checkpoint}: its {model.config.vocab_size} tokens are not the bytes of a text")
    sampling = Sampling(args.max_bytes, args.temperature, args.top_k, args.top_p, args.seed)
    prompts = given or [_standard_input()]
    with _destination(args.out) as out:
        if len(prompts) == 1:
            stream_text(model, prompts[0], sampling, out)
        else:
            for first in range(0, len(prompts), args.batch):
                generate_batch(model, prompts[first : first + args.batch], sampling, out)
    return DONE


def _check_out(file: Path) -> None:
    """Refuse an output file that cannot be written, before a model is loaded. The file itself is not touched."""
    reason = None
    if file.is_dir():
        reason = errno.EISDIR
    elif not file.parent.is_dir():
        reason = errno.ENOENT
    elif not os.access(file if file.exists() else file.parent, os.W_OK):
        reason = errno.EACCES
    if reason is not None:
        raise UsageError(f"--out {file}: cannot be written ({os.strerror(reason)})")


def _destination(file: Path | None) -> AbstractContextManager[TextIO]:
    if file is None:
        return nullcontext(sys.stdout)
    try:
        return file.open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out {file}: cannot be written ({error.strerror})") from error


def stream_text(model: Decoder, prompt: bytes, sampling: Sampling, out: TextIO) -> None:
    """Stream the prompt and its continuation to `out`, and write the speed to standard error."""
    import torch

    shown = printable if out.isatty() else str  # a file or a pipe gets unescaped text
    # A character may have several bytes: the decoder buffers an incomplete one.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    out.write(shown(decoder.decode(prompt)))
    out.flush()
    ids = torch.tensor([list(prompt or START)], device=model.embedding.weight.device)
    count, start = 0, time.perf_counter()
    first = start
    for token in model.stream(
        ids,
        sampling.max_bytes,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
    ):
        out.write(shown(decoder.decode(bytes([int(token)]))))
        out.flush()
        if count == 0:
            first = time.perf_counter()
        count += 1
    seconds = time.perf_counter() - first
    out.write(shown(decoder.decode(b"", final=True)) + "\n")
    out.flush()
    rate = f", the first in {first - start:.2f} s, then {(count - 1) / seconds:,.0f} bytes/s" if count > 1 else ""
    print(f"{count} {'byte' if count == 1 else 'bytes'} after a prompt of {ids.shape[1]}{rate}", file=sys.stderr)


def generate_batch(model: Decoder, prompts: list[bytes], sampling: Sampling, out: TextIO) -> None:
    """Write every prompt and its continuation to `out` when all are finished, and the speed to standard error.

    All rows share the same random numbers, so the text of a prompt is the same as if it ran alone.
    """
    import torch

    from wyfold import SequenceLayout

    device = model.embedding.weight.device
    ids = torch.tensor([list(b"".join(prompts))], device=device)
    layout = SequenceLayout.from_lengths([len(prompt) for prompt in prompts], device=device)
    start = first = time.perf_counter()
    drawn = []
    for token in model.stream(
        ids,
        sampling.max_bytes,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        layout=layout,
        shared_draws=True,
    ):
        drawn.append(token)
        if len(drawn) == 1:
            token.cpu()  # waits for the first token
            first = time.perf_counter()
    shown = printable if out.isatty() else str  # a file or a pipe gets unescaped text
    rows = torch.stack(drawn, 1).tolist() if drawn else [[] for _ in prompts]
    seconds = time.perf_counter() - first
    for prompt, row in zip(prompts, rows, strict=True):
        out.write(shown((prompt + bytes(row)).decode("utf-8", "replace")) + "\n")
    out.flush()
    count = len(prompts) * (len(drawn) - 1)
    rate = f", the first in {first - start:.2f} s, then {count / seconds:,.0f} bytes/s" if count > 0 else ""
    print(
        f"{len(prompts)} prompts, {len(drawn)} {'byte' if len(drawn) == 1 else 'bytes'} each{rate}{_memory(device)}",
        file=sys.stderr,
    )


def _memory(device: torch.device) -> str:
    """Peak of PyTorch's allocator on a GPU, as text; empty on other devices."""
    import torch

    return f"; at most {torch.cuda.max_memory_allocated(device) / 2**20:,.0f} MiB" if device.type == "cuda" else ""


def _prompts(args: argparse.Namespace) -> list[bytes]:
    """Prompts of the command line; empty if standard input is the prompt."""
    from wyfold.cli.train.documents import is_binary

    if args.prompts is not None:
        try:
            content = args.prompts.read_bytes()
        except OSError as error:
            raise UsageError(f"--prompts {args.prompts}: cannot be read ({error.strerror})") from error
        if is_binary(content):
            raise UsageError(f"--prompts {args.prompts}: is no text, it has a NUL byte: give a text file in UTF-8")
        lines = content.splitlines()
        if not any(lines):
            raise UsageError(f"--prompts {args.prompts}: no line to continue")
        return [line for line in lines if line]
    if args.prompt is not None:
        return [os.fsencode(args.prompt)]
    return []


def _standard_input() -> bytes:
    if sys.stdin.isatty():
        print("reading the prompt from the terminal; Ctrl-D ends it", file=sys.stderr)
    return sys.stdin.buffer.read()
