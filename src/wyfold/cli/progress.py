"""Progress of a training run: a live bar on a terminal, occasional lines in a log."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


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
        self.total = total
        self.task = self.bar.add_task("training", total=total, completed=start, figures="")

    def __enter__(self) -> Display:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def step(self, step: int, figures: str) -> None:
        """Show the metrics of the step that was just taken."""
        self.bar.update(self.task, completed=step, figures=figures)
        if not self.live and (step % self.every == 0 or step == self.total):
            self.say(f"step {step}{f'/{self.total}' if self.total else ''}  {figures}")

    def say(self, line: str) -> None:
        self.console.print(line, markup=False, soft_wrap=True)
