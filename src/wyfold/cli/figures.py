"""Sections of a report: charts and tables of a stored record, in HTML.

A record is a dict of the fields of its schema in `wyfold.cli.records`. Fields with a default are always present.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import plotly.graph_objects as go

from wyfold.cli import records, tasks
from wyfold.cli.bench import tables
from wyfold.cli.train import curve
from wyfold.runtime import pattern

Fields = dict[str, Any]
Part: TypeAlias = Any
"""A plotly Figure, or HTML."""

MARGIN = {"l": 10, "r": 10, "t": 40, "b": 10}
OURS = "wyfold"


def of_run(run: Fields) -> Iterator[Part]:
    """Section of a run of `train`: loss, evaluations, speed, settings."""
    history, recipe = run["history"], run["recipe"]
    unit, nats = ("nats per answer", 1.0) if recipe["task"] else ("bits per byte", math.log(2))
    losses = [(step, loss / nats) for step, loss in curve.points(history, "loss")]
    figure = _figure(f"loss, {unit}", "step")
    _line(figure, "every step", losses, opacity=0.3, width=1)
    _line(figure, "smoothed", curve.smooth(losses))
    _line(figure, "held out", curve.points(history, "validation_bits_per_byte"), markers=True)
    yield figure
    right = curve.points(history, "accuracy")
    if right:
        figure = _figure("answers on held-out rows that are right", "step")
        _line(figure, "answers", right, markers=True)
        _line(figure, "whole rows", curve.points(history, "whole_rows"), markers=True)
        figure.update_yaxes(range=[-0.02, 1.02], tickformat=".0%")
        yield figure
    figure = _figure("tokens per second", "step")
    _line(figure, "tokens/s", curve.points(history, "tokens_per_second"), width=1)
    yield figure
    settings = [(key, _plain(value)) for key, value in recipe.items() if value not in (None, [])]
    built = pattern.describe(recipe["layers"], recipe["depth"])
    yield table(("setting", "value"), [("model", built), *settings])


def of_tasks(record: Fields) -> Iterator[Part]:
    """Section of `tasks`: accuracy over the length of rows, and a table of runs."""
    for task in dict.fromkeys(found["recipe"]["task"] for found in record["runs"]):
        figure = _figure(f"{task}: answers that are right, by length of row", "tokens of a row")
        for found in record["runs"]:
            recipe = found["recipe"]
            if recipe["task"] == task:
                parts = found.get("accuracy_at") or {str(recipe["length"]): found["accuracy"]}
                name = f"{recipe['layers']} {'[-1, 1]' if recipe['neg_eigval'] else '[0, 1]'} seed {recipe['seed']}"
                _line(figure, name, [(int(length), part) for length, part in parts.items()], markers=True)
        figure.update_xaxes(type="log")
        figure.update_yaxes(range=[-0.02, 1.02], tickformat=".0%")
        yield figure
    yield table(tasks.COLUMNS, [tasks.row(found) for found in record["runs"]])


def of_bench(record: Fields) -> Iterator[Part]:
    """Section of `bench`: time, memory and error of each implementation."""
    timed = [row for row in record["rows"] if row["milliseconds"]]
    labels = [_case(row) for row in timed]
    time = _figure("median ms, whiskers at the quartiles", "ms")
    memory = _figure("peak MiB above the inputs", "MiB")
    for implementation in dict.fromkeys(row["contender"] for row in timed):
        own = [(label, row) for label, row in zip(labels, timed, strict=True) if row["contender"] == implementation]
        names = [label for label, _ in own]
        spans = [row["milliseconds"] for _, row in own]
        whiskers = {
            "type": "data",
            "array": [span["quartile3"] - span["median"] for span in spans],
            "arrayminus": [span["median"] - span["quartile1"] for span in spans],
        }
        hover = [f"{row['ran']}: worst error {float(row['worst_error']):.1e} ({row['worst_tensor']})" for _, row in own]
        medians = [span["median"] for span in spans]
        bars = {"orientation": "h", "y": names, "name": implementation}
        time.add_bar(x=medians, error_x=whiskers, hovertext=hover, **bars)
        memory.add_bar(x=[row["peak"] and row["peak"]["above_inputs_mib"] for _, row in own], **bars)
    time.update_xaxes(type="log")  # implementations differ by orders of magnitude
    for figure in (time, memory):
        figure.update_layout(barmode="group", height=max(320, 90 + 34 * len(timed)))
        figure.update_yaxes(autorange="reversed")
        yield figure
    columns = ("case", "ran", "median ms", "quartiles ms", "worst error", "peak MiB above inputs")
    yield table(columns, [_bench_row(row) for row in record["rows"]])


def of_ranks(record: Fields) -> Iterator[Part]:
    """Section of `bench` over ranks: speed relative to Wyfold on one rank, and a table of all results."""
    figure = _figure("speed relative to Wyfold on one rank", "ranks")
    for name, points in tables.over_ranks(record["rows"]).items():
        _line(figure, name, points, markers=True)
    most = max((row["ranks"] for row in record["rows"]), default=1)
    _line(figure, "perfect scaling", [(1, 1.0), (most, float(most))], width=1)
    yield figure
    columns = ("case", "ran", "ranks", "median ms", "x one rank", "worst error", "peak MiB a rank", "bytes sent")
    yield table(columns, [_ranks_row(row) for row in record["rows"]])


def of_errors(record: Fields) -> Iterator[Part]:
    """Section of `verify`: the largest error of each operator relative to its target, and a table of all errors."""
    figure = _figure("largest error of a tensor, as a share of its target", "share of target")
    names = [f"{row['operator']} {row['dtype']}" for row in record["operators"]]
    shares = []
    for row in record["operators"]:
        ends = [float(found["value"]) / float(found["target"]) for found in row["tensors"].values() if found["target"]]
        shares.append(max(ends, default=0.0))
    for state in (True, False):
        own = [place for place, row in enumerate(record["operators"]) if bool(row["pass"]) is state]
        if own:
            x, y = [shares[place] for place in own], [names[place] for place in own]
            figure.add_bar(x=x, y=y, orientation="h", name="within" if state else "beyond")
    figure.add_vline(x=1.0, line_dash="dot")
    figure.update_layout(height=max(320, 90 + 18 * len(names)))
    figure.update_yaxes(autorange="reversed")
    yield figure
    columns = ("operator", "dtype", "tensor", "error", "target", "pass")
    yield table(
        columns,
        [
            (
                row["operator"],
                row["dtype"],
                tensor,
                _plain(found["value"]),
                _plain(found["target"]),
                _plain(found["pass"]),
            )
            for row in record["operators"]
            for tensor, found in row["tensors"].items()
        ],
    )


def of_anything(record: Fields) -> Iterator[Part]:
    """Section of a record without a schema: every list of objects as a table, every other field as text."""
    for key, rows in record.items():
        if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
            columns = list(dict.fromkeys(name for row in rows for name in row))
            yield f"<h3>{html.escape(key)}</h3>"
            yield table(columns, [[_plain(row.get(column, "")) for column in columns] for row in rows])
        elif key not in HEAD:
            yield f"<h3>{html.escape(key)}</h3><p>{html.escape(_plain(rows))}</p>"


HEAD = ("date", "command", "hardware", "versions", "commit", "modified", "gpu", "driver", "torch", "triton", "kind")


DRAWN: dict[type[records.RecordHead], Callable[[Fields], Iterator[Part]]] = {
    records.RunRecord: of_run,
    records.TaskTable: of_tasks,
    records.BenchRanksRecord: of_ranks,
    records.VerifyErrors: of_errors,
    records.BenchRecord: of_bench,
    records.RecordHead: of_anything,
}
"""Schema of a record -> function that draws its section."""


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """HTML table; collapsed if it has more than 12 rows."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    shown = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    return shown if len(rows) <= 12 else f"<details><summary>{len(rows)} rows</summary>{shown}</details>"


def _figure(title: str, below: str) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(title=title, margin=MARGIN, height=320, template="plotly_white")
    figure.update_xaxes(title=below, automargin=True)
    figure.update_yaxes(automargin=True)
    return figure


def _line(
    figure: go.Figure,
    name: str,
    points: Sequence[tuple[float, float]],
    *,
    opacity: float = 1.0,
    width: int = 2,
    markers: bool = False,
) -> None:
    if points:
        x, y = zip(*points, strict=True)
        mode = "lines+markers" if markers else "lines"
        figure.add_scatter(x=list(x), y=list(y), name=name, mode=mode, opacity=opacity, line={"width": width})


def _case(row: Fields) -> str:
    size = row["name"] or ",".join(map(str, row["shape"].values()))
    return " ".join([row["op"], row["gate"], row["mode"], size])


def _bench_row(row: Fields) -> list[str]:
    if not row["milliseconds"]:
        return [_case(row), row["ran"], row["refused"] or "wrong", "", "", ""]
    ms, peak = row["milliseconds"], row["peak"]
    return [
        _case(row),
        row["ran"],
        f"{ms['median']:.3f}",
        f"{ms['quartile1']:.3f} - {ms['quartile3']:.3f}",
        f"{float(row['worst_error']):.1e} {row['worst_tensor']}",
        _plain(peak["above_inputs_mib"]) if peak else "",
    ]


def _ranks_row(row: Fields) -> list[str]:
    head = [_case(row), row["ran"], str(row["ranks"])]
    if not row["milliseconds"]:
        return [*head, row["refused"] or "wrong", *[""] * 4]
    peak, sent = row["peak"], row["sent"]
    found = row["times_one_rank"], peak and peak["above_inputs_mib"], sent and sent["bytes"]
    cells = ["" if value is None else _plain(value) for value in found]
    error = f"{float(row['worst_error']):.1e} {row['worst_tensor']}"
    return [*head, f"{row['milliseconds']['median']:.3f}", cells[0], error, *cells[1:]]


def _plain(value: Any) -> str:
    """Text of a value in a table cell."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
