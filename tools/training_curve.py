"""Write the chart of losses in docs/training.md, from the newest stored result of `tools/proofs/training.py`.

python -m tools.training_curve   # writes docs/charts/training-{light,dark}.svg
"""

from __future__ import annotations

import json
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from tools.speed import CHARTS, COLORS, RESULTS


def curves() -> dict[str, list[float]]:
    """Name of each run -> its losses, for the runs that have the most steps."""
    newest = max(RESULTS.glob("*-training-*.json"), key=lambda file: file.name.split("-", 1)[1])
    rows: list[dict[str, Any]] = json.loads(newest.read_text(encoding="utf-8"))["rows"]
    found = {row["case"]: row["losses"] for row in rows if "losses" in row}
    longest = max(len(losses) for losses in found.values())
    return {case: losses for case, losses in found.items() if len(losses) == longest}


def chart(runs: dict[str, list[float]], theme: str) -> Figure:
    """Above the losses of each run, below their distance from the first run's, in percent."""
    text, *colors = COLORS[theme]
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    losses, apart = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    (_, first), *_ = runs.items()
    for (case, values), color, style in zip(runs.items(), (text, *colors), ("-", "--", ":"), strict=True):
        steps = range(1, len(values) + 1)
        losses.plot(steps, values, color=color, linestyle=style, label=case)
        if values is not first:
            percent = [100 * (value / one - 1) for value, one in zip(values, first, strict=True)]
            apart.plot(steps, percent, color=color, linestyle=style)
    losses.set_ylabel("loss, nats a byte", fontsize=9, color=text)
    apart.set_ylabel("% from one GPU", fontsize=9, color=text)
    apart.set_xlabel("step", fontsize=9, color=text)
    losses.legend(fontsize=9, frameon=False, labelcolor=text)
    for axes in (losses, apart):
        axes.tick_params(colors=text, labelsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(text)
    return figure


def write() -> None:
    """Write the chart in both themes."""
    matplotlib.rcParams["svg.hashsalt"] = "wyfold"  # the same bytes for the same chart
    runs = curves()
    for theme in COLORS:
        chart(runs, theme).savefig(CHARTS / f"training-{theme}.svg", metadata={"Date": None}, transparent=True)


if __name__ == "__main__":
    write()
