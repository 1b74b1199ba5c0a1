"""Write the performance table of README and its charts, from the stored results of `wyfold bench`.

    python tools/speed.py            # writes docs/charts/speed-{light,dark}.svg, and the table into README.md

A row compares Wyfold with one peer on the same tensors in one run. `tests/test_pages.py` checks that README has the
table of the stored results.
"""

from __future__ import annotations

import json
import re
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

OPERATORS = {"delta_rule": "DeltaNet", "gdn": "GDN", "kda": "KDA", "ttt": "TTT-Linear"}
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

    Where a run has the norm of keys outside and inside, the comparison is outside, as every peer can have it.
    """
    found: dict[tuple[str, ...], Comparison] = {}
    for file in sorted(RESULTS.glob("*-bench-*-peers*.json"), key=lambda file: file.name.split("-", 1)[1]):
        record = json.loads(file.read_text(encoding="utf-8"))
        gpus = record["hardware"].get("gpus") or []
        groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for row in sorted(record["rows"], key=lambda row: row["norm"] == "inside"):
            if row.get("milliseconds") and row["op"] in OPERATORS and row["gate"] in ("mid", "none") and gpus:
                key = (OPERATORS[row["op"]], _shape(row["shape"]), MODES[row["mode"]])
                rows = groups.setdefault(key, [])
                if not rows or rows[0]["norm"] == row["norm"]:
                    rows.append(row)
        for key, rows in groups.items():
            ours = next(row for row in rows if row["contender"] == "wyfold" and "," not in row["ran"])
            for peer in dict.fromkeys(PEERS.values()):
                theirs = [row for row in rows if _peer(row["ran"]) == peer]
                if theirs and not (peer == "fla" and key[0] == "GDN" and _runs_flash_qla(record)):
                    times = _times(ours, theirs)
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


def chart(rows: list[Comparison], theme: str) -> Figure:
    """Bars of the same rows: the ratio to the peer's time, both directions of a shape side by side."""
    text, *colors = COLORS[theme]
    groups = list(dict.fromkeys((row.operator, row.shape, row.peer) for row in rows))
    figure = Figure(figsize=(6.4, 0.52 * len(groups) + 1.2), layout="constrained")
    axes = figure.subplots()
    for offset, mode, color in zip((-0.2, 0.2), MODES.values(), colors, strict=True):
        shown = [row for row in rows if row.mode == mode]
        places = [groups.index((row.operator, row.shape, row.peer)) + offset for row in shown]
        axes.barh(places, [row.ratio for row in shown], color=color, height=0.38, label=mode)
        for place, row in zip(places, shown, strict=True):
            axes.text(max(row.ratio, 1) + 0.05, place, f"{row.ratio:.2f}", va="center", color=text, fontsize=9)
    axes.axvline(1, color=text, linewidth=0.8)
    labels = [f"{operator} vs {peer}\n{shape}" for operator, shape, peer in groups]
    axes.set_yticks(range(len(groups)), labels, fontsize=9, color=text)
    axes.invert_yaxis()
    axes.set_xlim(0, max(row.ratio for row in rows) * 1.15)
    axes.set_xlabel("times as fast as the peer; longer is better", fontsize=9, color=text)
    figure.legend(loc="outside upper right", ncols=2, fontsize=9, frameon=False, labelcolor=text)
    axes.tick_params(colors=text, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(text)
    return figure


def with_table(readme: str, rows: list[Comparison]) -> str:
    """The text of README, with the table between its two marks."""
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{table(rows)}\n{END}", readme, flags=re.DOTALL)


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
    """Both times and their ratio, in bold where the peer is faster."""
    ratio = f"{row.ratio:.2f}"
    return [f"{row.ours:.3f}", f"{row.theirs:.3f}", f"**{ratio}**" if row.ratio < 1 else ratio]


def _runs_flash_qla(record: dict[str, Any]) -> bool:
    """Whether fla ran FlashQLA's kernels for GDN, as it does where FlashQLA is installed."""
    return "flash-qla" in record["peers"]["fla"]


def _times(ours: dict[str, Any], theirs: list[dict[str, Any]]) -> tuple[float, float]:
    """Our time and the fastest of the peer's, measured by the same method."""
    graphs = all((row.get("graph_milliseconds") or {}).get("median") for row in [ours, *theirs])
    kind = "graph_milliseconds" if graphs else "milliseconds"
    return ours[kind]["median"], min(row[kind]["median"] for row in theirs)


if __name__ == "__main__":
    write()
