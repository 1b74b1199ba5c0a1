"""Write the performance table of README and its charts, from the stored results of `wyfold bench`.

    python tools/speed.py            # writes docs/charts/speed-{light,dark}.svg, and the table into README.md

A comparison is one of Wyfold with one peer, on the same tensors in one run. README and the charts have the median and
the range over all shapes of an operator and a peer; the page of times has every shape (`table`). `tests/test_pages.py`
checks that README has the table of the stored results.
"""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
CHARTS = ROOT / "docs" / "charts"
README = ROOT / "README.md"
BEGIN, END = "<!-- speed: begin, written by tools/speed.py -->", "<!-- speed: end -->"

OPERATORS = {
    "delta_rule": "DeltaNet",
    "gdn": "GDN",
    "kda": "KDA",
    "ttt": "TTT-Linear",
    "gla": "GLA",
    "gdp": "DeltaProduct",
    "dplr": "DPLR",
    "rwkv7": "RWKV-7",
    "gdn2": "GDN-2",
    "comba": "Comba",
    "path": "PaTH",
}
GATES = ("mid", "none", "rwkv7", "model")
"""Gates that are compared: medium ones, those of a rule without or with a layer's own, and projections."""
FLASH_QLA = "tilelang_fused_chunk_gdr"
"""First letters of a kernel of FlashQLA."""
PEERS = {
    "fla.": "fla",
    "flash_qla.": "FlashQLA",
    "cudnn.": "cuDNN",
    "flashinfer.": "FlashInfer",
    "flash_kda.": "FlashKDA",
    "attn_gym.": "attention-gym",
}
"""First letters of a peer's function -> its display name."""
MODES = {"fwd": "forward", "fwdbwd": "forward + backward"}
COLORS = {"light": ("#1f2328", "#0969da", "#80b3ec"), "dark": ("#e6edf3", "#4493f8", "#27548c")}
"""Theme -> color of the text, of the forward's bars and of those of both directions."""


@dataclass(frozen=True)
class Comparison:
    """One operator and one peer, in one run.

    Attributes:
        operator, shape, mode: Display names.
        peer: Display name of the peer.
        ours, theirs: Median milliseconds of a call; from CUDA graphs where the run has them.
        file: Name of the result file.
        machine: GPU of the run.
    """

    operator: str
    shape: str
    mode: str
    peer: str
    ours: float
    theirs: float
    file: str
    machine: str

    @property
    def ratio(self) -> float:
        """The peer's time over ours: below 1 where the peer is faster."""
        return self.theirs / self.ours


def comparisons() -> list[Comparison]:
    """The newest comparison of each operator, shape, direction and peer, with medium gates where it has gates.

    Where a run has the norm of keys outside and inside, the comparison is outside, as every peer can have it. Where it
    has gates given and inside, they are given.
    """
    found: dict[tuple[str, ...], Comparison] = {}
    records = [(file, json.loads(file.read_text(encoding="utf-8"))) for file in RESULTS.glob("*-bench-*-peers*.json")]
    for file, record in sorted(records, key=lambda pair: pair[1]["date"]):
        gpus = record["hardware"].get("gpus") or []
        groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for row in sorted(record["rows"], key=lambda row: (row["gate"] == "model", row["norm"] == "inside")):
            if row.get("milliseconds") and row["op"] in OPERATORS and row["gate"] in GATES and gpus:
                key = (OPERATORS[row["op"]], _shape(row["shape"]), MODES[row["mode"]])
                rows = groups.setdefault(key, [])
                if not rows or (rows[0]["norm"], rows[0]["gate"]) == (row["norm"], row["gate"]):
                    rows.append(row)
        for key, rows in groups.items():
            ours = [row for row in rows if row["contender"] == "wyfold" and "," not in row["ran"]]
            for peer in dict.fromkeys(PEERS.values()):
                theirs = [row for row in rows if _peer(row["ran"]) == peer]
                if ours and theirs and not (peer == "fla" and any(map(_runs_flash_qla, theirs))):
                    times = _times(ours[0], theirs)
                    found[*key, peer] = Comparison(*key, peer, *times, file.name, gpus[0]["name"])
    order = list(OPERATORS.values())
    return sorted(found.values(), key=lambda c: (order.index(c.operator), c.shape, c.mode, c.peer))


def table(rows: list[Comparison]) -> str:
    """The Markdown table: one row for each operator, shape and peer, with both directions."""
    directions = list(MODES.values())
    columns = [f"{direction}, ms: Wyfold | peer | times faster" for direction in directions]
    lines = [f"| operator | shape | peer | {' | '.join(columns)} |", "|---|---|---|---|---|---|---|---|---|"]
    for operator, shape, peer in dict.fromkeys((row.operator, row.shape, row.peer) for row in rows):
        cells = [operator, shape, peer]
        for direction in directions:
            key = (operator, shape, direction, peer)
            found = [row for row in rows if (row.operator, row.shape, row.mode, row.peer) == key]
            cells += _cells(found[0]) if found else ["", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(rows: list[Comparison]) -> str:
    """The Markdown table of README: least, median and largest ratio of each operator and peer over all shapes."""
    columns = [f"{direction}: least | median | most" for direction in MODES.values()]
    lines = [f"| operator | peer | shapes | {' | '.join(columns)} |", "|---|---|---|---|---|---|---|---|---|"]
    for operator, peer in _pairs(rows):
        shapes = {row.shape for row in rows if (row.operator, row.peer) == (operator, peer)}
        cells = [operator, peer, str(len(shapes))]
        for direction in MODES.values():
            ratios = _ratios(rows, operator, peer, direction)
            found = (min(ratios), statistics.median(ratios), max(ratios)) if ratios else ()
            cells += [_ratio(x) for x in found] or ["", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def chart(rows: list[Comparison], theme: str) -> Figure:
    """Bars of the same medians, both directions of an operator and a peer side by side, with a line over the range."""
    text, *colors = COLORS[theme]
    pairs = _pairs(rows)
    figure = Figure(figsize=(6.4, 0.52 * len(pairs) + 1.2), layout="constrained")
    axes = figure.subplots()
    for offset, mode, color in zip((-0.2, 0.2), MODES.values(), colors, strict=True):
        found = [(place + offset, _ratios(rows, *pair, mode)) for place, pair in enumerate(pairs)]
        for place, ratios in [(place, ratios) for place, ratios in found if ratios]:
            middle, most = statistics.median(ratios), max(ratios)
            axes.barh(place, middle, color=color, height=0.38, label=mode)
            axes.plot([min(ratios), most], [place, place], color=text, linewidth=1)
            axes.text(max(most, 1) + 0.05, place, f"{middle:.2f}", va="center", color=text, fontsize=9)
    axes.axvline(1, color=text, linewidth=0.8)
    axes.set_yticks(range(len(pairs)), [f"{operator} vs {peer}" for operator, peer in pairs], fontsize=9, color=text)
    axes.invert_yaxis()
    axes.set_xlim(0, max(row.ratio for row in rows) * 1.15)
    axes.set_xlabel("times as fast as the peer: median and range over shapes; longer is better", fontsize=9, color=text)
    handles, labels = axes.get_legend_handles_labels()
    legend = {"ncols": 2, "fontsize": 9, "frameon": False, "labelcolor": text}
    shown = dict(zip(labels, handles, strict=True))
    figure.legend(list(shown.values()), list(shown), loc="outside upper right", **legend)
    axes.tick_params(colors=text, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(text)
    return figure


def with_table(readme: str, rows: list[Comparison]) -> str:
    """The text of README, with the table between its two marks."""
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{summary(rows)}\n{END}", readme, flags=re.DOTALL)


def write() -> None:
    """Write both charts and the table of README."""
    rows = comparisons()
    CHARTS.mkdir(exist_ok=True)
    matplotlib.rcParams["svg.hashsalt"] = "wyfold"  # the same bytes for the same chart
    for theme in COLORS:
        chart(rows, theme).savefig(CHARTS / f"speed-{theme}.svg", metadata={"Date": None}, transparent=True)
    README.write_text(with_table(README.read_text(encoding="utf-8"), rows), encoding="utf-8")


def _shape(shape: dict[str, int]) -> str:
    heads = f"H{shape['H']}" if shape["H"] == shape["HV"] else f"H{shape['H']}/{shape['HV']}"
    width = f"D{shape['K']}" if shape["K"] == shape["V"] else f"K{shape['K']} V{shape['V']}"
    return f"B{shape['B']} T{shape['T']} {heads} {width}"


def _peer(ran: str) -> str | None:
    return next((name for prefix, name in PEERS.items() if ran.startswith(prefix)), None)


def _cells(row: Comparison) -> list[str]:
    """Both times and their ratio."""
    return [f"{row.ours:.3f}", f"{row.theirs:.3f}", _ratio(row.ratio)]


def _ratio(ratio: float) -> str:
    """A ratio, in bold where the peer is faster."""
    return f"**{ratio:.2f}**" if ratio < 1 else f"{ratio:.2f}"


def _pairs(rows: list[Comparison]) -> list[tuple[str, str]]:
    """Operators and peers of the comparisons."""
    return sorted(
        {(row.operator, row.peer) for row in rows}, key=lambda pair: (list(OPERATORS.values()).index(pair[0]), pair[1])
    )


def _ratios(rows: list[Comparison], operator: str, peer: str, mode: str) -> list[float]:
    return [row.ratio for row in rows if (row.operator, row.peer, row.mode) == (operator, peer, mode)]


def _runs_flash_qla(row: dict[str, Any]) -> bool:
    """Whether FlashQLA's kernels ran, as they do for GDN under fla's name where FlashQLA is installed."""
    return any(kernel["name"].startswith(FLASH_QLA) for kernel in row["kernels"] or [])


def _times(ours: dict[str, Any], theirs: list[dict[str, Any]]) -> tuple[float, float]:
    """Our time and the fastest of the peer's, measured by the same method."""
    graphs = all((row.get("graph_milliseconds") or {}).get("median") for row in [ours, *theirs])
    kind = "graph_milliseconds" if graphs else "milliseconds"
    return ours[kind]["median"], min(row[kind]["median"] for row in theirs)


if __name__ == "__main__":
    write()
