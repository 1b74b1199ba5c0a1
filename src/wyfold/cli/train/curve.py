"""The loss curve as a PNG and as text."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from wyfold.cli import printable
from wyfold.runtime import files

Points = Sequence[tuple[float, float]]
"""(step, value) pairs, in order of steps."""
History = Sequence[dict[str, Any]]
"""Entries of a run, as `metrics.jsonl` holds them."""


def points(history: History, key: str) -> list[tuple[float, float]]:
    """(step, value) of the entries that have this key."""
    return [(entry["step"], entry[key]) for entry in history if key in entry]


def smooth(points: Points, reach: float = 0.8) -> list[tuple[float, float]]:
    """Exponential moving average with bias correction at the start."""
    total = weight = 0.0
    smoothed = []
    for step, value in points:
        total = reach * total + (1 - reach) * value
        weight = reach * weight + (1 - reach)
        smoothed.append((step, total / weight))
    return smoothed


def draw(file: Path, training: Points, validation: Points, title: str) -> None:
    """Write the curve as PNG: training bits per byte (every step and smoothed) and the validation points."""
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="tight")
    _plot(figure.subplots(), training, validation, title, "bits per byte")
    _write(figure, file)


def draw_task(file: Path, losses: Points, accuracies: Points, title: str) -> None:
    """Write the curves of a task as PNG: training loss in nats above, accuracy on held-out rows below."""
    figure = Figure(figsize=(8, 6), dpi=120, layout="tight")
    above, below = figure.subplots(2, 1, sharex=True)
    _plot(above, losses, (), title, "nats per answer")
    _plot(below, (), accuracies, "", "accuracy")
    below.set_ylim(-0.02, 1.02)
    _write(figure, file)


def _plot(axes: Axes, training: Points, validation: Points, title: str, unit: str) -> None:
    if training:
        axes.plot(*zip(*training, strict=True), color="tab:blue", alpha=0.25, linewidth=0.8)
        axes.plot(*zip(*smooth(training), strict=True), color="tab:blue", label="training")
    if validation:
        axes.plot(*zip(*validation, strict=True), "o-", color="tab:orange", markersize=4, label="validation")
        axes.axhline(validation[-1][1], color="tab:orange", alpha=0.3, linewidth=0.8)
        axes.annotate(f"{validation[-1][1]:.3f}", validation[-1], textcoords="offset points", xytext=(0, 8), ha="right")
    axes.set(xlabel="step", ylabel=unit)
    # The title is a file name: dollar signs are no formula, and control characters are escaped.
    axes.set_title(printable(title).replace("\n", " "), parse_math=False)
    axes.grid(alpha=0.25)
    if training or validation:
        axes.legend()


def _write(figure: Figure, file: Path) -> None:
    with files.replacing(file) as unfinished, warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Glyph .* missing from", UserWarning
        )  # a glyph of the title; a box is drawn instead
        figure.savefig(unfinished, format="png")


def sketch(
    training: Points, validation: Points, width: int = 72, height: int = 12, *, legend: str = "bits per byte"
) -> str:
    """Draw the curve as text: `.` is the smoothed training loss, `o` validation; steps run to the right."""
    curve = [point for point in smooth(training) if math.isfinite(point[1])]
    marks = [point for point in validation if math.isfinite(point[1])]
    everything = curve + marks
    if not everything:
        return "(no points yet)"
    last = max(1.0, *(step for step, _ in everything))
    low, high = min(value for _, value in everything), max(value for _, value in everything)
    if high == low:  # a flat curve is drawn in the middle
        high, low = high + 0.5, low - 0.5
    span = high - low
    grid = [[" "] * width for _ in range(height)]
    for points, sign in ((curve, "."), (marks, "o")):
        for step, value in points:
            row = round((high - value) / span * (height - 1))
            grid[row][round(step / last * (width - 1))] = sign
    lines = [f"{high - row / (height - 1) * span:6.2f} |{''.join(cells)}".rstrip() for row, cells in enumerate(grid)]
    lines.append(f"{'':6} +{'-' * width}")
    lines.append(f"{'':8}0{f'step {last:.0f}':>{width - 1}}")
    dots = "   . training" if training else ""
    return f"{legend}{dots}   o validation\n" + "\n".join(lines)
