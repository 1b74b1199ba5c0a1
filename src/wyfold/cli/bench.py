"""Time and memory of the operators beside the peers that are installed, after their results have been checked.

Every contender runs on the same tensors in one process: ours and the peers', all operators of a shape, take turns round
by round, and the median of a contender's rounds is its time, with the quartiles beside it. Before that, every output
and gradient is measured against the float64 recurrence; a contender that is wrong gets no time. Memory is the peak of
resident bytes above the inputs, each in a process of its own. Times are of this machine as busy as it was.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

import torch

import wyfold
from wyfold.cli import DONE, FAILED, UsageError, memory, results
from wyfold.cli.arguments import whole
from wyfold.cli.contenders import GATES, OPS, OURS, Case, Contender, contenders, errors, prepared
from wyfold.cli.peers import PEERS, Peer
from wyfold.cli.subjects import SUBJECTS, Arguments
from wyfold.reference import error
from wyfold.reference.shapes import Shape

CHUNKED = ("delta_rule", "gdn", "kda", "ttt")
"""What runs when no operator is named."""

MODES = ("fwd", "fwdbwd")
DTYPES = ("float32", "float64", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `wyfold bench`."""
    parser.add_argument("op", nargs="*", metavar="OP", help=f"{', '.join(OPS)} (default: {' '.join(CHUNKED)})")
    parser.add_argument(
        "--shapes",
        action="append",
        type=_shape,
        metavar="B,T,H[,HV],K[,V]",
        help="batch, tokens, heads, value heads, widths: 4 numbers, 5 with HV, 6 with HV and V; repeat for more "
        "(default: 1,2048,4,128)",
    )
    parser.add_argument(
        "--gates",
        default="mid",
        help="how fast gdn and kda forget: fast (log decay -2.5 per token on average), mid (-0.8, none under -5), "
        "slow (-0.001); several with commas (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of the tensors given to the operators; gates and states stay float32 or wider (default: %(default)s)",
    )
    parser.add_argument(
        "--mode", default="fwd,fwdbwd", help="fwd, or fwdbwd with its backward; with commas (default: both)"
    )
    parser.add_argument("--peers", default="all", help="names with commas, all, or none (default: all installed)")
    parser.add_argument("--threads", type=whole(1), help="of torch (default: torch's own choice)")
    parser.add_argument("--rounds", type=whole(1), default=9, help="each contender's timed runs (default: %(default)s)")
    parser.add_argument("--seed", type=whole(0), default=0, help="of the inputs (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write JSON, and a chart, into this folder")
    # How a child of this command is asked to measure memory; a JSON request, answered by one line of JSON.
    parser.add_argument("--measure", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Check, time and measure; 0, or 1 if a result of ours was wrong."""
    if args.measure:
        print(json.dumps(measure(json.loads(args.measure))))
        return DONE
    if args.threads:
        torch.set_num_threads(args.threads)
    gates, modes = _words("gates", args.gates, GATES), _words("mode", args.mode, MODES)
    ops = _words("OP", ",".join(args.op) or ",".join(CHUNKED), OPS)
    peers = chosen_peers(args.peers)
    rows: list[dict[str, Any]] = []
    for shape in args.shapes or [Shape(1, 2048, 4, 4, 128, 128)]:
        for mode in modes:
            cases = [
                Case(op, shape, gate, args.dtype, mode, args.seed)
                for op in ops
                if mode == "fwd" or SUBJECTS[OPS[op]].backward
                for gate in (gates if _gated(op) else ("none",))
            ]
            rows += race(cases, peers, args.rounds)
    ratios = against_peers(rows)
    report(rows, ratios)
    if args.out:
        words = [*ops, *_given(args)]
        record = {
            **results.provenance("bench", words),
            "threads": torch.get_num_threads(),
            "peers": {peer.name: "installed" if peer.installed else "not installed" for peer in PEERS.values()},
            "method": "time: contenders alternate in one process, one warm run each, medians; memory: see each row",
            "rows": rows,
            "ratios": ratios,
        }
        keep(args.out, record, ops)
    return DONE if all(row["correct"] for row in rows if row["contender"] == OURS) else FAILED


# --- who runs --------------------------------------------------------------------------------------------------------


def chosen_peers(words: str) -> list[Peer]:
    """Installed peers among those asked for; says which ones are not installed.

    Raises:
        UsageError: a name that no peer has.
    """
    names = list(PEERS) if words == "all" else [] if words == "none" else [word for word in words.split(",") if word]
    for name in names:
        if name not in PEERS:
            raise UsageError(f"--peers: unknown peer {name!r}; there are {', '.join(PEERS)}, all and none")
        if not PEERS[name].installed:
            print(f"{name}: not installed; {PEERS[name].install}")
    return [PEERS[name] for name in names if PEERS[name].installed]


# --- how long, how much ----------------------------------------------------------------------------------------------


def race(cases: Sequence[Case], peers: Sequence[Peer], rounds: int) -> list[dict[str, Any]]:
    """One row per case and contender; all of them that are right take turns."""
    rows: list[dict[str, Any]] = []
    runs: list[Callable[[], object] | None] = []
    for case in cases:
        arguments = case.arguments()
        for contender in contenders(case.op, peers):
            results.say(f"checking {_title(case)} by {contender.ran}")
            rows.append(_row(case, contender, arguments))
            runs.append(prepared(contender, case, arguments) if rows[-1]["correct"] else None)
    right = [run for run in runs if run is not None]
    results.say(f"timing {len(right)} contenders, {rounds} rounds of turns")
    times = iter(interleaved(right, rounds))
    for row, run in zip(rows, runs, strict=True):
        if run is not None:
            row["milliseconds"] = spread(next(times))
            tokens = row["shape"]["B"] * row["shape"]["T"] * row["shape"]["HV"]
            row["ns_per_token_head"] = row["milliseconds"]["median"] * 1e6 / max(1, tokens)
    del runs, right, times
    measured = [(case, contender) for case in cases for contender in contenders(case.op, peers)]
    for row, (case, contender) in zip(rows, measured, strict=True):
        if row["correct"]:
            results.say(f"measuring memory of {_title(case)} by {contender.ran}")
            try:
                row["peak"] = memory.in_fresh_process(_request(case, contender))
            except RuntimeError as failure:  # killed for memory, say: the row stays, without the figure
                row["peak_missing"] = str(failure)
    return rows


def interleaved(runs: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Milliseconds of every run in every round; each round starts with another one."""
    for run in runs:
        run()
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(rounds):
        for i in range(len(runs)):
            which = (i + turn) % len(runs)
            began = time.perf_counter_ns()
            runs[which]()
            times[which].append((time.perf_counter_ns() - began) / 1e6)
    return times


def spread(times: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles and extremes."""
    low, _, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else (times[0],) * 3
    return {
        "median": statistics.median(times),
        "quartile1": low,
        "quartile3": high,
        "least": min(times),
        "most": max(times),
        "rounds": len(times),
    }


def _row(case: Case, contender: Contender, arguments: Arguments) -> dict[str, Any]:
    """The row of one contender, checked but not yet timed."""
    launches: dict[str, Any] = {}
    found, refused = _checked(contender, case, arguments)
    if contender.name == OURS:
        plan = wyfold.explain(getattr(wyfold, OPS[case.op]), **arguments)
        launches = {
            "backend": plan.backend,
            "forward": plan.forward,
            "backward": plan.backward,
            "chunk": plan.chunk_size,
        }
    return {
        **asdict(case),
        "contender": contender.name,
        "ran": contender.ran,
        "launches": launches,
        "errors": {v.name: {"rms": v.measured.rms, "limit": v.limits.rms, "reason": v.reason} for v in found},
        "worst_error": found[0].measured.rms if found else None,
        "worst_tensor": found[0].name if found else None,
        "correct": bool(found) and all(verdict.passed for verdict in found),
        "refused": refused,
        "milliseconds": None,
        "ns_per_token_head": None,
        "peak": None,
        "peak_missing": "",
    }


def _checked(contender: Contender, case: Case, arguments: Arguments) -> tuple[list[error.Verdict], str]:
    """Verdicts, the worst first; or none, and why a peer does not take these arguments."""
    try:
        found = errors(contender, case, arguments)
    except Exception as refusal:  # another library's way to say no is its own; ours is a bug and goes on
        if contender.name == OURS:
            raise
        return [], f"{type(refusal).__name__}: {refusal}"
    return sorted(found, key=lambda verdict: verdict.measured.rms, reverse=True), ""


def _request(case: Case, contender: Contender) -> dict[str, Any]:
    return {**asdict(case), "contender": contender.name, "threads": torch.get_num_threads()}


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Peak memory of the request's case, in this process, which should be fresh."""
    torch.set_num_threads(request.pop("threads"))
    name = request.pop("contender")
    case = Case(**{**request, "shape": Shape(**request["shape"])})
    (contender,) = (c for c in contenders(case.op, list(PEERS.values()) if name != OURS else []) if c.name == name)
    few = replace(case, shape=replace(case.shape, B=1, T=min(case.shape.T, 64)))
    call = prepared(contender, case, case.arguments())
    return memory.peak(prepared(contender, few, few.arguments()), call)


# --- what is shown ---------------------------------------------------------------------------------------------------


def against_peers(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours beside each peer on the same tensors: how many times faster, and which share of its memory."""
    keys = ("op", "shape", "gate", "dtype", "mode")
    found = []
    for ours in (row for row in rows if row["contender"] == OURS and row["correct"]):
        for peer in rows:
            if peer["contender"] == OURS or not peer["correct"] or any(peer[key] != ours[key] for key in keys):
                continue
            found.append(
                {key: ours[key] for key in keys}
                | {
                    "peer": peer["ran"],
                    "times_faster": peer["milliseconds"]["median"] / ours["milliseconds"]["median"],
                    "memory_share": _share(ours["peak"], peer["peak"]),
                }
            )
    return found


def _share(ours: dict[str, Any] | None, theirs: dict[str, Any] | None) -> float | None:
    if not ours or not theirs or theirs["above_inputs_mib"] <= 0:
        return None
    return ours["above_inputs_mib"] / theirs["above_inputs_mib"]


def report(rows: Sequence[dict[str, Any]], ratios: Sequence[dict[str, Any]]) -> None:
    """The tables on the screen."""
    columns = ("op", "shape B,T,H,HV,K,V", "gates", "mode", "ran", "worst error", "median ms", "quartiles ms")
    results.show(
        "time and memory",
        (*columns, "ns/token-head", "peak MiB above inputs", "process MiB"),
        [_cells(row) for row in rows],
    )
    if ratios:
        keys = ("op", "gate", "mode", "peer")
        results.show(
            "ours beside the peers",
            (*keys, "times faster", "share of its memory"),
            [
                (r["op"], r["gate"], r["mode"], r["peer"], _two(r["times_faster"]), _two(r["memory_share"]))
                for r in ratios
            ],
        )
    for row in rows:
        if row["refused"]:
            print(f"{row['ran']} refused {row['op']}: {row['refused']}")
        if row["peak_missing"]:
            print(f"no memory figure for {row['op']} by {row['ran']}: {row['peak_missing']}")


def _two(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    shape = ",".join(map(str, row["shape"].values()))
    ran = row["ran"] if row["contender"] != OURS else f"{row['ran']} ({row['launches']['backend']})"
    head: tuple[str, ...] = (row["op"], shape, row["gate"], row["mode"], ran)
    if row["refused"]:
        return (*head, "", "refused", "", "", "", "")
    head = (*head, f"{row['worst_error']:.1e} {row['worst_tensor']}")
    if not row["correct"]:
        return (*head, "wrong", "", "", "", "")
    ms, peak = row["milliseconds"], row["peak"]
    quartiles = f"{ms['quartile1']:.1f} - {ms['quartile3']:.1f}"
    sizes = (f"{peak['above_inputs_mib']:.0f}", f"{peak['process_mib']:.0f}") if peak else ("", "")
    return (*head, f"{ms['median']:.1f}", quartiles, f"{row['ns_per_token_head']:.0f}", *sizes)


def keep(folder: Path, record: dict[str, Any], ops: Sequence[str]) -> None:
    """JSON and chart in the folder."""
    lengths = dict.fromkeys(f"T{row['shape']['T']}" for row in record["rows"])
    stem = "-".join(["cpu", record["date"][:10], "bench", *ops, *lengths])
    results.say(f"wrote {results.write(folder, f'{stem}.json', record)}")
    if importlib.util.find_spec("matplotlib") is None:
        results.say('no chart: matplotlib is not installed; pip install "wyfold[cli]"')
        return
    chart(folder / f"{stem}.png", record["rows"])
    results.say(f"wrote {folder / f'{stem}.png'}")


def chart(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Bars of median time, with quartiles, and of peak memory; logarithmic, since contenders differ by orders."""
    from matplotlib.figure import Figure

    timed = [row for row in rows if row["correct"]]
    figure = Figure(figsize=(10, 1.2 + 0.35 * max(1, len(timed))), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    labels = [f"{row['op']} {row['gate']} {row['mode']} T={row['shape']['T']}: {row['contender']}" for row in timed]
    colours = ["tab:blue" if row["contender"] == OURS else "tab:orange" for row in timed]
    medians = [row["milliseconds"]["median"] for row in timed]
    whiskers = [
        [row["milliseconds"]["median"] - row["milliseconds"]["quartile1"] for row in timed],
        [row["milliseconds"]["quartile3"] - row["milliseconds"]["median"] for row in timed],
    ]
    at = range(len(timed))
    left.barh(at, medians, xerr=whiskers, color=colours, log=True)
    left.set(xlabel="median ms, whiskers at the quartiles", yticks=list(at), yticklabels=labels)
    left.invert_yaxis()
    right.barh(at, [row["peak"]["above_inputs_mib"] if row["peak"] else 0 for row in timed], color=colours, log=True)
    right.set(xlabel="peak MiB above inputs")
    for axes in (left, right):
        axes.set_xlim(left=min(1.0, axes.get_xlim()[0]))  # else the shortest bar would look like nothing
    figure.savefig(file, format="png")


# --- the command line's words ----------------------------------------------------------------------------------------


def _words(option: str, given: str, known: Sequence[str] | dict[str, Any]) -> list[str]:
    words = [word for word in given.split(",") if word]
    for word in words:
        if word not in known:
            raise UsageError(f"{option}: unknown {word!r}; there are {', '.join(known)}")
    return words


def _shape(word: str) -> Shape:
    try:
        sizes = [int(size) for size in word.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) not in (4, 5, 6) or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"must be B,T,H,K or B,T,H,HV,K or B,T,H,HV,K,V, whole numbers, got {word!r}")
    B, T, H, *rest = sizes
    HV = rest.pop(0) if len(rest) > 1 else H
    return Shape(B, T, H, HV, rest[0], rest[-1])


def _gated(op: str) -> bool:
    return op.endswith(("gdn", "kda", "kkt"))


def _title(case: Case) -> str:
    return f"{case.op} {case.mode}, {case.gate} gate, {case.dtype}, {','.join(map(str, astuple(case.shape)))}"


def _given(args: argparse.Namespace) -> list[str]:
    """The options that repeat this run."""
    shapes = [word for shape in args.shapes or [] for word in ("--shapes", ",".join(map(str, astuple(shape))))]
    plain = {"gates": args.gates, "dtype": args.dtype, "mode": args.mode, "peers": args.peers, "rounds": args.rounds}
    options = [word for name, value in plain.items() for word in (f"--{name}", str(value))]
    return [*shapes, *options, "--threads", str(torch.get_num_threads()), "--seed", str(args.seed)]
