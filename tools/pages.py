"""Write the computed parts of the site into docs/generated, before `mkdocs build`.

Plots are computed by the operators in float64 on the CPU. The accuracy and performance tables come from the results of
`wyfold verify` and `wyfold bench` in docs/results. CONTRIBUTING, SECURITY and CHANGELOG are copied, with links that
resolve on the site.
"""

import contextlib
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tools import speed

import wyfold
from wyfold.cli import main

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
OUT = DOCS / "generated"
SIZE = (7, 3.2)
COPIED = ("changelog", "contributing", "security")


def unit(*shape: int) -> torch.Tensor:
    """Random rows of unit length, float64."""
    return wyfold.l2norm(torch.randn(*shape, dtype=torch.float64))


def legend_at_right(axes: Axes) -> None:
    """Put the legend to the right of the plot, where it covers no data."""
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def delta_rule(figure: Figure) -> None:
    """Error of reading back all stored pairs of a random key and value, by their number."""
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
    axes.set(xlabel="pairs stored, K = 64", ylabel="relative error of the values read", ylim=(0, None))
    legend_at_right(axes)


def gated_delta_rule(figure: Figure) -> None:
    """One write, then tokens that write nothing: what is left of it, by decay."""
    axes = figure.subplots()
    T, key = 200, unit(1, 1, 1, 16)
    for g in (0.0, -0.005, -0.02, -0.1):
        beta = torch.zeros(1, T, 1, dtype=torch.float64)
        beta[:, 0] = 1
        gates = torch.full((1, T, 1), g, dtype=torch.float64)
        k = key.expand(1, T, 1, 16)
        o, _ = wyfold.chunk_gated_delta_rule(k, k, torch.ones_like(k), gates, beta, scale=1.0)
        axes.plot(o[0, :, 0, 0], label=f"g = {g:g}")
    axes.set(xlabel="tokens since the write", ylabel="value read with its key")
    legend_at_right(axes)


def kda(figure: Figure) -> None:
    """A write along each of four channels, each with its own decay."""
    axes = figure.subplots()
    T, decays = 200, (-0.002, -0.01, -0.03, -0.1)
    for channel, decay in enumerate(decays):
        k = torch.zeros(1, T, 1, 8, dtype=torch.float64)
        k[..., channel] = 1
        g = torch.zeros(1, T, 1, 8, dtype=torch.float64)
        g[..., :4] = torch.tensor(decays, dtype=torch.float64)
        beta = torch.zeros(1, T, 1, dtype=torch.float64)
        beta[:, 0] = 1
        o, _ = wyfold.chunk_kda(k, k, torch.ones_like(k), g, beta, scale=1.0)
        axes.plot(o[0, :, 0, 0], label=f"channel {channel}: g = {decay:g}")
    axes.set(xlabel="tokens since the write", ylabel="value read with its key")
    legend_at_right(axes)


def low_rank(figure: Figure) -> None:
    """Tokens that move a value from one key to another: a is the first key, b the difference of the two."""
    axes = figure.subplots()
    T, K = 60, 8
    first, second = torch.eye(K, dtype=torch.float64)[:2]
    state = torch.zeros(1, 1, K, K, dtype=torch.float64)
    state[0, 0, 0] = 1  # the value 1 under the first key
    zero = torch.zeros(1, T, 1, K, dtype=torch.float64)
    for rate, style in ((0.02, "-"), (0.1, "--")):
        a, b = first.expand_as(zero), (rate * (second - first)).expand_as(zero)
        for number, key in (("first", first), ("second", second)):
            o, _ = wyfold.chunk_iplr_delta_rule(key.expand_as(zero), zero, zero, a, b, scale=1.0, initial_state=state)
            axes.plot(o[0, :, 0, 0], style, label=f"{number} key, rate {rate:g}")
    axes.set(xlabel="tokens that write nothing", ylabel="value read")
    legend_at_right(axes)


def gated_delta_product(figure: Figure) -> None:
    """A state of two numbers that each token turns by 30 degrees, with two reflections; or reflects, with one."""
    axes = figure.subplots()
    T, half = 24, torch.pi / 12
    first, second = (torch.tensor([math.cos(x), math.sin(x)], dtype=torch.float64) for x in (0.0, half))
    start = torch.zeros(1, 1, 8, 8, dtype=torch.float64)
    start[..., 0, 0] = 1
    query = torch.zeros(1, T, 1, 8, dtype=torch.float64)
    query[..., 0] = 1
    for keys, label in (((first, second), "two updates of beta 2"), ((second,), "one update of beta 2")):
        n = len(keys)
        k = torch.zeros(1, T * n, 1, 8, dtype=torch.float64)
        k[0, :, 0, :2] = torch.stack(keys).repeat(T, 1)
        beta = torch.full((1, T * n, 1), 2.0, dtype=torch.float64)
        zeros = torch.zeros_like(k)
        o, _ = wyfold.chunk_gated_delta_product(query, k, zeros, None, beta, n, scale=1.0, initial_state=start)
        axes.plot(range(1, T + 1), o[0, :, 0, 0], "o-", label=label)
    axes.set(xlabel="tokens", ylabel="first number of the state")
    legend_at_right(axes)


def gla(figure: Figure) -> None:
    """The value 1 written under a key, and at token 40 the value 2 under the same key."""
    axes = figure.subplots()
    T, again = 100, 40
    k = unit(1, 1, 1, 8).expand(1, T, 1, 8)
    writes = torch.zeros(1, T, 1, dtype=torch.float64)
    writes[:, 0], writes[:, again] = 1, 1
    v = torch.ones(1, T, 1, 8, dtype=torch.float64)
    v[:, again] = 2
    gates = torch.full((1, T, 1), -0.01, dtype=torch.float64)
    added, _ = wyfold.chunk_gla(k, k * writes[..., None], v, gates, scale=1.0)
    replaced, _ = wyfold.chunk_gated_delta_rule(k, k, v, gates, writes, scale=1.0)
    for o, label in ((added, "GLA adds"), (replaced, "the delta rule replaces")):
        axes.plot(o[0, :, 0, 0], label=label)
    axes.set(xlabel="tokens", ylabel="value read with the key", ylim=(0, None))
    legend_at_right(axes)


def ttt_linear(figure: Figure) -> None:
    """The inner loss before each step, over 32 pairs that repeat."""
    axes = figure.subplots()
    D, period, rounds = 16, 32, 12
    k = unit(1, period, 1, D).repeat(1, rounds, 1, 1)
    v = k + torch.randn(1, period, 1, D, dtype=torch.float64).repeat(1, rounds, 1, 1)
    w, b = torch.ones(1, D, dtype=torch.float64), torch.zeros(1, D, dtype=torch.float64)
    # The slope of the norm at an input of zero is set by eps, so the weights start random, as in a model.
    first_weights = torch.randn(1, 1, D, D, dtype=torch.float64)
    for eta in (0.02, 0.1, 0.3):
        losses, states = [], {"initial_state": first_weights}
        for begin in range(0, period * rounds, 16):
            rows = slice(begin, begin + 16)
            # Steps of size 0 read the prediction of the state that entered the mini-batch.
            zero = torch.zeros(1, 16, 1, dtype=torch.float64)
            pairs = (k[:, rows], k[:, rows], v[:, rows], w, b)
            o, *_ = wyfold.chunk_ttt_linear(*pairs, zero, scale=1.0, residual="q", **states)
            losses.append(((o - v[:, rows]) ** 2).mean().item())
            step = torch.full((1, 16, 1), eta, dtype=torch.float64)
            _, S, c = wyfold.chunk_ttt_linear(*pairs, step, output_final_state=True, **states)
            states = {"initial_state": S, "initial_state_bias": c}
        axes.plot([16 * n for n in range(len(losses))], losses, label=f"eta = {eta:g}")
    axes.set(xlabel="tokens read; the same 32 repeat", ylabel="mean squared error", ylim=(0, None))
    legend_at_right(axes)


def path_attention(figure: Figure) -> None:
    """Weight of the first token's value under a row of bits, each one of which reflects its key."""
    axes = figure.subplots()
    bits = torch.tensor([0, 1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 1, 0, 0], dtype=torch.float64)
    T = len(bits)
    q, w, k, v = (torch.zeros(1, T, 1, 8, dtype=torch.float64) for _ in range(4))
    q[..., 0] = w[..., 0] = 1
    k[:, 0, :, 0] = v[:, 0] = 1
    for strength, style in ((2.0, "o-"), (0.0, "s--")):
        o, _ = wyfold.parallel_path_attn(q, k, v, w, beta=(strength * bits).view(1, T, 1), scale=3.0)
        axes.step(range(T), o[0, :, 0, 0], style, where="mid", label=f"beta = {strength:g} at a one, 0 at a zero")
    axes.set(
        xticks=range(T), xticklabels=[f"{int(bit)}" for bit in bits], xlabel="input", ylabel="weight of the first token"
    )
    legend_at_right(axes)


def conv(figure: Figure) -> None:
    """An impulse through three filters."""
    axes = figure.subplots()
    x = torch.zeros(1, 12, 3, dtype=torch.float64)
    x[:, 1] = 1
    weight = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0, 0, 0, 1.0], [-0.5, 0, 0, 0.5]], dtype=torch.float64)
    y, _ = wyfold.causal_conv1d(x, weight)
    for channel in range(3):
        axes.plot(y[0, :, channel], "o-", label=f"weight {weight[channel].tolist()}")
    axes.set(xlabel="token; the input is one at token 1", ylabel="output")
    legend_at_right(axes)


def norms_and_gates(figure: Figure) -> None:
    """Decay of both gates, over their raw input."""
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
    legend_at_right(axes)


def triangles(figure: Figure) -> None:
    """The key gram of a chunk, and the inverse of I + L."""
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
    legend_at_right(axes)


PLOTS: tuple[Callable[[Figure], None], ...] = (
    delta_rule,
    gated_delta_rule,
    kda,
    low_rank,
    gated_delta_product,
    gla,
    ttt_linear,
    path_attention,
    conv,
    norms_and_gates,
    triangles,
    parity,
)


def stored(word: str) -> list[tuple[str, dict[str, Any]]]:
    """(file name, record) of the results whose name has a word, newest last."""
    files = sorted((DOCS / "results").glob(f"*{word}*.json"), key=lambda file: (file.name.split("-", 1)[1], file.name))
    return [(file.name, json.loads(file.read_text(encoding="utf-8"))) for file in files]


def machine(record: dict[str, Any]) -> str:
    """The GPUs of a record, such as "2 x NVIDIA H200", or its processor."""
    hardware = record["hardware"]
    gpus = [gpu["name"] if isinstance(gpu, dict) else str(gpu) for gpu in hardware.get("gpus", [])]
    names = [name if gpus.count(name) == 1 else f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    return ", ".join(names) or hardware["processor"]


def support() -> str:
    """The page of errors: every operator in every dtype, from the newest `wyfold verify` of a CPU and of a GPU."""
    lines = [
        "# Accuracy by operator",
        "",
        "`wyfold verify` compares every output and gradient with the token loop in float64. A cell is the largest",
        "error as a percentage of its bound ([the bounds](../numerics.md#the-rule-of-acceptance)): up to 100 % is a",
        "pass. An empty cell was not run.",
        "",
        "Run `wyfold verify` for the same table of your machine, and `wyfold doctor` for the backend of each operator.",
        "",
    ]
    newest = {record["device"].partition(":")[0]: (name, record) for name, record in stored("verify-errors")}
    for name, record in newest.values():
        dtypes = list(dict.fromkeys(row["dtype"] for row in record["operators"]))
        cells: dict[str, dict[str, str]] = {}
        for row in record["operators"]:
            worst = max(float(found["value"]) / found["target"] for found in row["tensors"].values() if found["target"])
            cells.setdefault(row["operator"], {})[row["dtype"]] = f"{'' if row['pass'] else '**fails** '}{worst:.0%}"
        lines += [
            f"## {machine(record)}",
            "",
            f"torch {record['versions']['torch']}, {record['date'][:10]}, commit {str(record['commit'])[:7]}: "
            f"[result file](../results/{name})",
            "",
            f"| operator | {' | '.join(dtypes)} |",
            f"|---|{'---|' * len(dtypes)}",
            *(f"| `{op}` | {' | '.join(row.get(dtype, '') for dtype in dtypes)} |" for op, row in cells.items()),
            "",
        ]
    return "\n".join(lines)


def performance() -> str:
    """The page of times: the chart of README, each comparison, then every stored `wyfold bench`, folded."""
    lines = [
        "# Performance",
        "",
        "![Times of Wyfold and its peers on one H200](../charts/speed-light.svg#only-light)",
        "![Times of Wyfold and its peers on one H200](../charts/speed-dark.svg#only-dark)",
        "",
        "One H200, bfloat16, torch 2.11, medians. Each pair of times is from one run on the same tensors. B, T, H",
        "and D are batch, tokens, heads (key/value) and head width.",
        "",
        speed.table(speed.comparisons()),
        "",
        "## Every stored run",
        "",
        "Medians of `wyfold bench`; the error is that of the same run. A number holds for its machine, versions and",
        "commit. [All results as charts](results.html) opens offline; the [log](../log/index.md) has older numbers.",
        "",
    ]
    for name, record in reversed(stored("bench")):
        subject = name.removesuffix(".json").partition("bench-")[2]
        lines += [
            f'??? note "{record["date"][:10]}, {machine(record)}: {subject}"',
            "",
            f"    Commit {str(record['commit'])[:7]}, [result file](../results/{name}). Command:",
            "",
            "    ```",
            f"    {record['command']}",
            "    ```",
            "",
            "    | operator | gate | direction | B,T,H,HV,K,V | ran | median ms | worst error | MiB above the inputs |",
            "    |---|---|---|---|---|---|---|---|",
        ]
        for row in record["rows"]:
            if row.get("milliseconds"):
                shape = ",".join(map(str, row["shape"].values()))
                peak = (row.get("peak") or {}).get("above_inputs_mib")
                time = f"{row['milliseconds']['median']:.3f}"
                figures = [time, f"{row['worst_error']:.1e}", "" if peak is None else f"{peak:.0f}"]
                cells = [row["op"], row["gate"], row["mode"], shape, f"`{row['ran']}`", *figures]
                lines.append(f"    | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def site_links(text: str) -> str:
    """The text of a file in the repository's root, with links that resolve from docs/generated."""
    for name in COPIED:
        text = text.replace(f"]({name.upper()}.md", f"]({name}.md")
    text = text.replace("](docs/results/)", "](performance.md)").replace("](docs/results)", "](performance.md)")
    return re.sub(r"\]\(docs/", "](../", text)


def build() -> None:
    """Write everything in docs/generated."""
    OUT.mkdir(exist_ok=True)
    matplotlib.rcParams["svg.hashsalt"] = "wyfold"  # the same bytes for the same plot
    torch.set_num_threads(1)
    for plot in PLOTS:
        torch.manual_seed(0)
        figure = Figure(figsize=SIZE, layout="constrained")
        plot(figure)
        figure.savefig(OUT / f"{plot.__name__}.svg", metadata={"Date": None}, transparent=True)
    pages = {"support": support(), "performance": performance()}
    for name in COPIED:
        pages[name] = site_links((ROOT / f"{name.upper()}.md").read_text(encoding="utf-8"))
    for name, text in pages.items():
        (OUT / f"{name}.md").write_text(text, encoding="utf-8")
    with contextlib.chdir(ROOT):  # the report shows paths as they are given
        target = str(OUT.relative_to(ROOT) / "results.html")
        code = main(["report", "docs/results", "--out", target, "--title", "Wyfold: stored results"])
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    build()
