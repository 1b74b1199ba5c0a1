"""Output of `bench`: tables on the screen, ratios between implementations, a chart."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wyfold.cli import results
from wyfold.cli.catalog import OURS
from wyfold.runtime import files

ResultRow = dict[str, Any]

LEAST = 1e-3
"""MiB drawn for zero on a logarithmic axis."""

SAME = ("op", "name", "shape", "gate", "dtype", "gate_dtype", "norm", "chunk", "mode", "seed")
"""Fields that are equal in rows whose implementations ran on the same tensors."""


def against_peers(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Ratios of every Wyfold row to every peer row on the same tensors: speed, memory and error.

    Also the ratio of time per token between the packed shape `short` and its dense counterpart.
    """
    timed = [row for row in rows if row["milliseconds"]]
    ours = [row for row in timed if row["contender"] == OURS]
    found = [
        _ratio(mine, theirs)
        for mine in ours
        for theirs in timed
        if theirs["contender"] != OURS and all(mine[key] == theirs[key] for key in SAME)
    ]
    for packed in (row for row in timed if row["name"] == "short"):
        for dense in (row for row in timed if row["name"] == "dense" and row["ran"] == packed["ran"]):
            if all(packed[key] == dense[key] for key in SAME if key not in ("name", "shape")):
                found.append(
                    {key: packed[key] for key in SAME}
                    | {"ran": packed["ran"], "peer": "dense, per token", "memory_share": None, "error_share": None}
                    | {"times_faster": dense["ns_per_token_head"] / packed["ns_per_token_head"], "graph": None}
                )
    return found


def _ratio(mine: ResultRow, theirs: ResultRow) -> ResultRow:
    graphs = mine["graph_milliseconds"], theirs["graph_milliseconds"]
    errors = [
        mine["errors"][name]["rms"] / theirs["errors"][name]["rms"]
        for name in mine["errors"]
        if name in theirs["errors"] and theirs["errors"][name]["rms"]
    ]
    return {key: mine[key] for key in SAME} | {
        "ran": mine["ran"],
        "peer": theirs["ran"],
        "times_faster": theirs["milliseconds"]["median"] / mine["milliseconds"]["median"],
        "graph": graphs[1]["median"] / graphs[0]["median"] if all(graphs) else None,
        "memory_share": _share(mine["peak"], theirs["peak"]),
        "error_share": max(errors, default=None),
    }


def _share(ours: ResultRow | None, theirs: ResultRow | None) -> float | None:
    if not ours or not theirs or theirs["above_inputs_mib"] <= 0:
        return None
    share: float = ours["above_inputs_mib"] / theirs["above_inputs_mib"]
    return share


def report(rows: Sequence[ResultRow], ratios: Sequence[ResultRow]) -> None:
    """Print the tables."""
    on_gpu = any(row["host_milliseconds"] for row in rows)
    figures: tuple[str, ...] = ("median ms", "quartiles ms", "ns/token-head", "peak MiB above inputs", "process MiB")
    if on_gpu:
        figures = ("ms", "graph ms", "kernels ms", "host us", "x floor", "ns/token-head", "peak MiB")
    columns = ("op", "shape", "dtype", "gates", "mode", "ran", "worst error", *figures, "first s")
    results.show("time and memory", columns, [_cells(row, on_gpu, len(columns)) for row in rows], labels=6)
    if ratios:
        shares = ("times faster", "in graphs", "memory", "error")
        pairs = [_pair(ratio) for ratio in ratios]
        title = "Wyfold against peers; memory and error relative to the peer"
        results.show(title, ("op", "shape", "dtype", "gates", "mode", "Wyfold", "peer", *shares), pairs, labels=7)
    for row in rows:
        what = f"{row['op']} {_size(row)} {row['dtype']} {row['mode']} by {row['ran']}"
        if row["refused"]:
            print(f"{row['ran']} refused {row['op']} {_size(row)} {row['mode']}: {row['refused']}")
        elif not row["correct"]:
            print(f"wrong: {what}: {_reasons(row)}")
        elif not row["within_limits"]:
            print(f"over Wyfold's limits: {what}: {_reasons(row)}")
        if row["peak_missing"]:
            print(f"no memory figure for {row['op']} by {row['ran']}: {row['peak_missing']}")
        if row["graph_refused"]:
            print(f"no graph of {what}: {row['graph_refused']}")
        if row["first_call_missing"]:
            print(f"no first call of {what}: {row['first_call_missing']}")


def _reasons(row: ResultRow) -> str:
    found = [f"{name} {e['rms']:.1e} ({e['reason']})" for name, e in row["errors"].items() if e["reason"]]
    nonfinite = [f"{name} not finite outside the compared part" for name in row["not_finite_elsewhere"]]
    return "; ".join(found + nonfinite)


def _size(row: ResultRow) -> str:
    size = row["name"] or ",".join(map(str, row["shape"].values()))
    return f"{size} C{row['chunk']}" if row["op"] in ("solve", "kkt") else size


def _pair(ratio: ResultRow) -> tuple[str, ...]:
    shares = (ratio["times_faster"], ratio["graph"], ratio["memory_share"], ratio["error_share"])
    words = (ratio["op"], _size(ratio), *(ratio[key] for key in ("dtype", "gate", "mode", "ran", "peer")))
    return (*words, *map(_two, shares))


def _two(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _median(figure: ResultRow | None, form: str = ".3f", times: float = 1.0) -> str:
    return format(figure["median"] * times, form) if figure else ""


def _cells(row: ResultRow, on_gpu: bool, width: int) -> tuple[str, ...]:
    ran = row["ran"] if row["contender"] != OURS else f"{row['ran']} ({row['launches'].get('backend', 'none')})"
    head = [row["op"], _size(row), row["dtype"], row["gate"], row["mode"], ran]
    if row["refused"]:
        head += ["", "refused"]
    else:
        head.append(f"{row['worst_error']:.1e} {row['worst_tensor']}")
        head += (_gpu_figures(row) if on_gpu else _cpu_figures(row)) if row["correct"] else ["wrong"]
    return (*head, *[""] * (width - len(head)))


def _gpu_figures(row: ResultRow) -> list[str]:
    launches = sum(kernel["count"] for kernel in row["kernels"])
    return [
        _median(row["milliseconds"]),
        _median(row["graph_milliseconds"]),
        f"{row['kernel_milliseconds']:.3f} ({launches:.0f})",
        _median(row["host_milliseconds"], ".0f", 1e3),
        f"{row['times_floor']:.2f}",
        f"{row['ns_per_token_head']:.3f}",
        f"{row['peak']['above_inputs_mib']:.0f}",
        _first(row),
    ]


def _cpu_figures(row: ResultRow) -> list[str]:
    ms, peak = row["milliseconds"], row["peak"]
    sizes = [f"{peak['above_inputs_mib']:.0f}", f"{peak['process_mib']:.0f}"] if peak else ["", ""]
    quartiles = f"{ms['quartile1']:.1f} - {ms['quartile3']:.1f}"
    return [f"{ms['median']:.1f}", quartiles, f"{row['ns_per_token_head']:.0f}", *sizes, _first(row)]


def _first(row: ResultRow) -> str:
    return "" if row["first_call_seconds"] is None else f"{row['first_call_seconds']:.1f}"


def chart(file: Path, rows: Sequence[ResultRow]) -> None:
    """Write bars of median time, with quartiles, and of peak memory as PNG. Axes are logarithmic."""
    if importlib.util.find_spec("matplotlib") is None:
        results.say("no chart: matplotlib is not installed; pip install matplotlib")
        return
    from matplotlib.figure import Figure

    timed = [row for row in rows if row["milliseconds"]]
    figure = Figure(figsize=(14, 2 + 0.3 * max(1, len(timed))), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    labels = [f"{row['op']} {row['gate']} {row['mode']} {_size(row)} {row['dtype']}: {row['ran']}" for row in timed]
    colours = ["tab:blue" if row["contender"] == OURS else "tab:orange" for row in timed]
    medians = [row["milliseconds"]["median"] for row in timed]
    whiskers = [
        [row["milliseconds"]["median"] - row["milliseconds"]["quartile1"] for row in timed],
        [row["milliseconds"]["quartile3"] - row["milliseconds"]["median"] for row in timed],
    ]
    peaks = [max(LEAST, row["peak"]["above_inputs_mib"]) if row["peak"] else LEAST for row in timed]
    at = range(len(timed))
    left.barh(at, medians, xerr=whiskers, color=colours, log=True)
    left.set(xlabel="median ms, whiskers at the quartiles", yticks=list(at), yticklabels=labels)
    floors = [row["floor"].get("milliseconds") for row in timed]
    for place, floor in zip(at, floors):
        if floor:
            left.plot([floor] * 2, [place - 0.4, place + 0.4], color="black", linewidth=1)
    left.invert_yaxis()
    right.barh(at, peaks, color=colours, log=True)
    right.set(xlabel="peak MiB above inputs")
    for axes, values in ((left, [*medians, *filter(None, floors)]), (right, peaks)):
        # Start the axis low enough that the shortest bar stays visible.
        axes.set_xlim(min([1.0, *values]) / 2, max([1.0, *values]) * 2)
    with files.replacing(file) as unfinished:
        figure.savefig(unfinished, format="png")
    results.say(f"wrote {file}")


# --- over ranks -------------------------------------------------------------------------------------------------------


def report_ranks(rows: Sequence[ResultRow]) -> None:
    """Print the table of `bench` over ranks."""
    case, found = (
        ("op", "shape", "dtype", "gates", "mode", "ran", "ranks"),
        ("worst error", "median ms", "quartiles ms"),
    )
    columns = (*case, *found, "x one rank", "peak MiB a rank", "MiB contributed")
    title = "over ranks; x one rank: speed relative to Wyfold on one rank"
    results.show(title, columns, [_rank_cells(row) for row in rows], labels=7)
    for row in rows:
        what = f"{row['op']} {row['mode']} on {row['ranks']} by {row['ran']}"
        if row["refused"]:
            print(f"refused: {what}: {row['refused']}")
        elif not row["within_limits"]:
            verdict = "over Wyfold's limits" if row["correct"] else "wrong"
            print(f"{verdict}: {what}: {_reasons(row)}")


def _rank_cells(row: ResultRow) -> tuple[str, ...]:
    head = (row["op"], _size(row), row["dtype"], row["gate"], row["mode"], row["ran"], str(row["ranks"]))
    if not row["milliseconds"]:
        return (*head, "refused" if row["refused"] else "wrong", *[""] * 5)
    ms, peak, sent = row["milliseconds"], row["peak"], row["sent"]
    return (
        *head,
        f"{row['worst_error']:.1e} {row['worst_tensor']}",
        _median(ms),
        f"{ms['quartile1']:.3f} - {ms['quartile3']:.3f}",
        _two(row["times_one_rank"]),
        f"{peak['above_inputs_mib']:.0f}" if peak else "",
        f"{sent['bytes'] / 2**20:.3f}" if sent else "",
    )


def over_ranks(rows: Sequence[ResultRow]) -> dict[str, list[tuple[int, float]]]:
    """Implementation and case -> points (ranks, speed relative to Wyfold on one rank)."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["times_one_rank"] is not None:
            name = f"{row['op']} {row['gate']} {row['mode']} {_size(row)} {row['dtype']}: {row['ran']}"
            found.setdefault(name, []).append((row["ranks"], row["times_one_rank"]))
    return found


def chart_ranks(file: Path, rows: Sequence[ResultRow]) -> None:
    """Write the speed over ranks, with the line of perfect scaling, as PNG."""
    if importlib.util.find_spec("matplotlib") is None:
        results.say("no chart: matplotlib is not installed; pip install matplotlib")
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    drawn = over_ranks(rows)
    for name, points in drawn.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    most = max((row["ranks"] for row in rows), default=1)
    axes.plot([1, most], [1, most], linestyle=":", color="black", label="perfect scaling")
    axes.set(
        xlabel="ranks", ylabel="speed relative to Wyfold on one rank", xticks=sorted({row["ranks"] for row in rows})
    )
    axes.legend(fontsize=7)
    with files.replacing(file) as unfinished:
        figure.savefig(unfinished, format="png")
    results.say(f"wrote {file}")
