"""Progress of a training run: a live bar on a terminal, occasional lines in a log, and the reason of a long wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PATIENCE_S = 4.0
"""Seconds after which a wait is explained."""


@contextmanager
def explain_wait(reason: str, is_main: bool = True) -> Iterator[None]:
    """Print the reason of a wait to standard error if the block takes longer than `PATIENCE_S`.

    Args:
        reason: A clause that follows "please wait: ".
        is_main: Whether this process prints for all.
    """
    console = Console(stderr=True, highlight=False, quiet=not is_main)
    timer = threading.Timer(PATIENCE_S, console.print, [f"please wait: {reason}"], {"markup": False, "soft_wrap": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def reason_to_wait(device: torch.device) -> str:
    """Why a first step or evaluation may take long on a device, as the end of a sentence; empty if unknown."""
    threads = torch.get_num_threads()
    if device.type == "cuda":
        return ", for which kernels are compiled unless they are cached"
    if device.type == "cpu" and threads > 1:
        return (
            f", on {threads} threads. If this machine is busy with other work, --threads 1 is often faster for a small "
            "model; --depth, --width and --batch make a step smaller"
        )
    return ""


class Display:
    """Context manager whose `step` reports a training step and whose `say` prints a line.

    Args:
        total: Steps of the whole run; None if its duration is set.
        start: Steps already taken.
        quiet: Show nothing; used on all processes but one.
    """

    LINES = 20
    """Approximate number of lines in the log of a run of known length."""

    def __init__(self, total: int | None, start: int, *, quiet: bool = False) -> None:
        self.console = Console(stderr=True, highlight=False, quiet=quiet)
        self.live = self.console.is_terminal
        self.every = max(1, total // self.LINES) if total else 50
        self.bar = Progress(
            TextColumn("step"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.live,
        )
        self.total, self.reported = total, False
        self.task = self.bar.add_task("training", total=total, completed=start, figures="")

    def __enter__(self) -> Display:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def step(self, step: int, figures: str) -> None:
        """Show the metrics of the step that was just taken. A log has the first step, and then every n-th."""
        self.bar.update(self.task, completed=step, figures=figures)
        if not self.live and (not self.reported or step % self.every == 0 or step == self.total):
            self.say(f"step {step}{f'/{self.total}' if self.total else ''}  {figures}")
        self.reported = True

    def say(self, line: str) -> None:
        self.console.print(line, markup=False, soft_wrap=True)
