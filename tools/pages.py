"""Writes the parts of the site that are computed: docs/generated, before `mkdocs build`.

Plots come from the operators themselves, in float64 on the CPU; tables of support and performance from the results
that `wyfold verify` and `wyfold bench` have stored in docs/results; CONTRIBUTING and CHANGELOG are copied with their
links turned to the site's.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure

import wyfold
from wyfold.cli import main

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
OUT = DOCS / "generated"
SIZE = (7, 3.2)


def unit(*shape: int) -> torch.Tensor:
    return wyfold.l2norm(torch.randn(*shape, dtype=torch.float64))


def delta_rule(figure: Figure) -> None:
    """Pairs of a random key and value are stored and all read back."""
    K, V, counts = 64, 16, list(range(4, 129, 4))
    errors: dict[str, list[float]] = {"delta rule": [], "outer products alone": []}
    for count in counts:
        k, v = unit(1, count, 1, K), torch.randn(1, count, 1, V, dtype=torch.float64)
        _, S = wyfold.chunk_delta_rule(k, k, v, output_final_state=True)
        sums = k[0, :, 0].T @ v[0, :, 0]
        for name, state in zip(errors, (S[0, 0], sums), strict=True):
            read = k[0, :, 0] @ state
            errors[name].append(((read - v[0, :, 0]).norm() / v.norm()).item())
    axes = figure.subplots()
    for name, values in errors.items():
        axes.plot(counts, values, label=name)
    axes.set(xlabel="pairs stored, K = 64", ylabel="relative error of all that are read back", ylim=(0, None))
    axes.legend()


def gated_delta_rule(figure: Figure) -> None:
    """One write, then tokens with nothing to write."""
    axes = figure.subplots()
    T, key = 200, unit(1, 1, 1, 16)
    for g in (0.0, -0.005, -0.02, -0.1):
        beta = torch.zeros(1, T, 1, dtype=torch.float64)
        beta[:, 0] = 1
        gates = torch.full((1, T, 1), g, dtype=torch.float64)
        k = key.expand(1, T, 1, 16)
        o, _ = wyfold.chunk_gated_delta_rule(k, k, torch.ones_like(k), gates, beta, scale=1.0)
        axes.plot(o[0, :, 0, 0], label=f"g = {g:g}")
    axes.set(xlabel="tokens since the write", ylabel="what its key reads")
    axes.legend()


def kda(figure: Figure) -> None:
    """A write along each of four channels, each with its own decay."""
    axes = figure.subplots()
    T, paces = 200, (-0.002, -0.01, -0.03, -0.1)
    for channel, pace in enumerate(paces):
        k = torch.zeros(1, T, 1, 8, dtype=torch.float64)
        k[..., channel] = 1
        g = torch.zeros(1, T, 1, 8, dtype=torch.float64)
        g[..., :4] = torch.tensor(paces, dtype=torch.float64)
        beta = torch.zeros(1, T, 1, dtype=torch.float64)
        beta[:, 0] = 1
        o, _ = wyfold.chunk_kda(k, k, torch.ones_like(k), g, beta, scale=1.0)
        axes.plot(o[0, :, 0, 0], label=f"channel {channel}: g = {pace:g}")
    axes.set(xlabel="tokens since the write", ylabel="what its key reads")
    axes.legend()


def ttt_linear(figure: Figure) -> None:
    """The inner loss, before each step, over 32 pairs that come again and again."""
    axes = figure.subplots()
    D, period, rounds = 16, 32, 12
    k = unit(1, period, 1, D).repeat(1, rounds, 1, 1)
    v = k + torch.randn(1, period, 1, D, dtype=torch.float64).repeat(1, rounds, 1, 1)
    w, b = torch.ones(1, D, dtype=torch.float64), torch.zeros(1, D, dtype=torch.float64)
    # Where the norm's input is zero its slope is that of eps: weights begin random, as a model's do.
    first_weights = torch.randn(1, 1, D, D, dtype=torch.float64)
    for eta in (0.02, 0.1, 0.3):
        losses, states = [], {"initial_state": first_weights}
        for begin in range(0, period * rounds, 16):
            rows = slice(begin, begin + 16)
            # Read with k, of size 0 steps: what the state of the mini-batch's start predicts.
            zero = torch.zeros(1, 16, 1, dtype=torch.float64)
            pairs = (k[:, rows], k[:, rows], v[:, rows], w, b)
            o, *_ = wyfold.chunk_ttt_linear(*pairs, zero, scale=1.0, residual="q", **states)
            losses.append(((o - v[:, rows]) ** 2).mean().item())
            step = torch.full((1, 16, 1), eta, dtype=torch.float64)
            _, S, c = wyfold.chunk_ttt_linear(*pairs, step, output_final_state=True, **states)
            states = {"initial_state": S, "initial_state_bias": c}
        axes.plot([16 * n for n in range(len(losses))], losses, label=f"eta = {eta:g}")
    axes.set(xlabel="tokens read; the same 32 again and again", ylabel="mean squared error", ylim=(0, None))
    axes.legend()


def conv(figure: Figure) -> None:
    """An impulse through four filters."""
    axes = figure.subplots()
    x = torch.zeros(1, 12, 3, dtype=torch.float64)
    x[:, 1] = 1
    weight = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0, 0, 0, 1.0], [-0.5, 0, 0, 0.5]], dtype=torch.float64)
    y, _ = wyfold.causal_conv1d(x, weight)
    for channel in range(3):
        axes.plot(y[0, :, channel], "o-", label=f"weight {weight[channel].tolist()}")
    axes.set(xlabel="token; the input is one at token 1", ylabel="output")
    axes.legend()


def norms_and_gates(figure: Figure) -> None:
    """Both gates over their raw input."""
    axes = figure.subplots()
    raw = torch.linspace(-8, 8, 200, dtype=torch.float64)
    for rate in (1.0, 4.0):
        A_log = torch.tensor([rate], dtype=torch.float64).log()
        axes.plot(
            raw, wyfold.fused_gdn_gate(raw.view(1, -1, 1), A_log).exp().flatten(), label=f"generic, rate {rate:g}"
        )
    bounded = wyfold.fused_kda_gate(raw.view(1, -1, 1, 1).expand(1, 200, 1, 8).contiguous(), lower_bound=-5.0)
    axes.plot(raw, bounded[0, :, 0, 0].exp(), label="bounded by -5")
    axes.set(xlabel="raw projection", ylabel="decay exp(g) of one token")
    axes.legend()


def triangles(figure: Figure) -> None:
    """A gram and its inverse."""
    left, right = figure.subplots(1, 2)
    shared = unit(1, 1, 1, 32)
    k = wyfold.l2norm(unit(1, 32, 1, 32) + 0.7 * shared)
    L = wyfold.chunk_scaled_dot_kkt(k, torch.full((1, 32, 1), 0.9, dtype=torch.float64), chunk_size=32)
    for axes, matrix, title in ((left, L, "L: gram of keys"), (right, wyfold.solve_tril(L), "(I + L)^-1")):
        shown = axes.imshow(matrix[0, :, 0], cmap="RdBu", vmin=-1, vmax=1)
        axes.set(title=title)
    figure.colorbar(shown, ax=[left, right])


def parity(figure: Figure) -> None:
    """The state of one bit under a row of ones and zeros."""
    axes = figure.subplots()
    bits = torch.tensor([1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 1, 0, 0, 1], dtype=torch.float64)
    T, k = len(bits), torch.zeros(1, len(bits), 1, 8, dtype=torch.float64)
    k[..., 0] = 1
    for beta, style in ((2.0, "o-"), (1.0, "s--")):
        v = torch.full((1, T, 1, 8), 0.5, dtype=torch.float64)
        o, _ = wyfold.chunk_delta_rule(k, k, v, beta=(beta * bits).view(1, T, 1), scale=1.0)
        axes.step(range(T), o[0, :, 0, 0], style, where="mid", label=f"beta = {beta:g} at a one, 0 at a zero")
    axes.set(
        xticks=range(T), xticklabels=[f"{int(bit)}" for bit in bits], xlabel="input", ylabel="state", ylim=(-0.1, 1.1)
    )
    axes.legend()


PLOTS: tuple[Callable[[Figure], None], ...] = (
    delta_rule,
    gated_delta_rule,
    kda,
    ttt_linear,
    conv,
    norms_and_gates,
    triangles,
    parity,
)


def stored(word: str) -> list[tuple[str, dict[str, Any]]]:
    """Results whose name has that word, newest last."""
    files = sorted((DOCS / "results").glob(f"*{word}*.json"), key=lambda file: (file.name.split("-", 1)[1], file.name))
    return [(file.name, json.loads(file.read_text(encoding="utf-8"))) for file in files]


def machine(record: dict[str, Any]) -> str:
    hardware = record["hardware"]
    gpus = [gpu["name"] if isinstance(gpu, dict) else str(gpu) for gpu in hardware.get("gpus", [])]
    return ", ".join(gpus) or hardware["processor"]


def support() -> str:
    """Every operator in every dtype, as the last stored run of `wyfold verify` found it on a CPU and on a GPU."""
    lines = [
        "# Support",
        "",
        "What `wyfold verify` found: the worst error of an output or gradient against the float64 recurrence, as a",
        "share of what it may be. An empty cell was not run. `wyfold doctor` says what holds on another machine.",
        "",
    ]
    newest = {record["device"].partition(":")[0]: (name, record) for name, record in stored("verify-errors")}
    for name, record in newest.values():
        dtypes = list(dict.fromkeys(row["dtype"] for row in record["operators"]))
        cells: dict[str, dict[str, str]] = {}
        for row in record["operators"]:
            worst = max(float(found["value"]) / found["target"] for found in row["tensors"].values() if found["target"])
            cells.setdefault(row["operator"], {})[row["dtype"]] = f"{'' if row['pass'] else '**fails** '}{worst:.2f}"
        lines += [
            f"## {machine(record)}",
            "",
            f"torch {record['versions']['torch']}, {record['date'][:10]}, commit {str(record['commit'])[:7]}: "
            f"[the file](../results/{name})",
            "",
            f"| operator | {' | '.join(dtypes)} |",
            f"|---|{'---|' * len(dtypes)}",
            *(f"| `{op}` | {' | '.join(row.get(dtype, '') for dtype in dtypes)} |" for op, row in cells.items()),
            "",
        ]
    return "\n".join(lines)


def performance() -> str:
    """Tables of every stored `wyfold bench`."""
    lines = [
        "# Performance",
        "",
        "Stored results of `wyfold bench`: medians, the error of the same run beside each time. A number holds for its",
        "machine, versions and commit. [All results as charts](results.html); [how they came about](../log/index.md).",
        "",
    ]
    for name, record in reversed(stored("bench")):
        lines += [
            f"## {machine(record)}, {record['date'][:10]}: {name.removesuffix('.json').partition('bench-')[2]}",
            "",
            f"`{record['command']}`, commit {str(record['commit'])[:7]}: [the file](../results/{name})",
            "",
            "| operator | gate | direction | B,T,H,HV,K,V | ran | median ms | worst error | MiB above the inputs |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in record["rows"]:
            if row.get("milliseconds"):
                shape = ",".join(map(str, row["shape"].values()))
                peak = (row.get("peak") or {}).get("above_inputs_mib")
                time = f"{row['milliseconds']['median']:.3f}"
                figures = [time, f"{row['worst_error']:.1e}", "" if peak is None else f"{peak:.0f}"]
                cells = [row["op"], row["gate"], row["mode"], shape, f"`{row['ran']}`", *figures]
                lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def turned(text: str) -> str:
    """A file of the repository's root with the site's links."""
    text = text.replace("](docs/results/)", "](performance.md)")
    return re.sub(r"\]\(docs/", "](../", text)


def build() -> None:
    """Everything below docs/generated."""
    OUT.mkdir(exist_ok=True)
    matplotlib.rcParams["svg.hashsalt"] = "wyfold"  # the same bytes for the same plot
    torch.set_num_threads(1)
    for plot in PLOTS:
        torch.manual_seed(0)
        figure = Figure(figsize=SIZE, layout="constrained")
        plot(figure)
        figure.savefig(OUT / f"{plot.__name__}.svg", metadata={"Date": None})
    pages = {"support": support(), "performance": performance()}
    for name in ("contributing", "changelog"):
        pages[name] = turned((ROOT / f"{name.upper()}.md").read_text(encoding="utf-8"))
    for name, text in pages.items():
        (OUT / f"{name}.md").write_text(text, encoding="utf-8")
    code = main(
        ["report", str(DOCS / "results"), "--out", str(OUT / "results.html"), "--title", "Wyfold: stored results"]
    )
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    build()
