"""Time and memory of the operators beside the peers that are installed, after their results have been checked.

Every contender runs on the same tensors in one process: ours and the peers', all operators of a shape, take turns round
by round, and the median of a contender's rounds is its time, with the quartiles beside it. Before that, every output and
gradient is measured against the float64 recurrence; a contender that is wrong gets no time. Memory is the peak of
resident bytes above the inputs, each in a process of its own. Times are of this machine as busy as it was.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import wyfold
from wyfold.cli import DONE, FAILED, UsageError, memory, results
from wyfold.cli.arguments import whole
from wyfold.cli.peers import PEERS, Peer
from wyfold.cli.subjects import FED, GRADIENT_OF, NARROW, PER_TOKEN, SUBJECTS, Arguments, Named, bound, widened
from wyfold.reference import error, inputs
from wyfold.reference.shapes import Shape

OPS = {
    "delta_rule": "chunk_delta_rule",
    "gdn": "chunk_gated_delta_rule",
    "kda": "chunk_kda",
    "ttt": "chunk_ttt_linear",
    "recurrent_delta_rule": "fused_recurrent_delta_rule",
    "recurrent_gdn": "fused_recurrent_gated_delta_rule",
    "recurrent_kda": "fused_recurrent_kda",
    "recurrent_ttt": "fused_recurrent_ttt_linear",
    "solve": "solve_tril",
    "kkt": "chunk_scaled_dot_kkt",
    "conv": "causal_conv1d",
    "norm": "rms_norm_gated",
}
"""What the command line calls an operator -> its public name, also the name of its subject."""

CHUNKED = ("delta_rule", "gdn", "kda", "ttt")
"""What runs when no operator is named."""

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "fast": lambda x: -5 * torch.special.ndtr(x),  # uniform, mean -2.5 per token
    "mid": lambda x: F.logsigmoid(x).clamp(min=-5),
    "slow": lambda x: -2e-3 * torch.special.ndtr(x),  # uniform, mean -0.001
}
"""Standard normal numbers -> natural-log decays per token."""

MODES = ("fwd", "fwdbwd")
DTYPES = ("float32", "float64", "bfloat16", "float16")
OURS = "wyfold"
TOKEN_ARGUMENTS = frozenset({"q", "k", "v", "g", "beta", "eta", "x", "residual", "A"})
CHECKED = 200
"""Tokens whose gradients are compared: the float64 recurrence keeps a state for each."""
CHECKED_FORWARD = 4096
"""Longest sequence whose outputs are compared as a whole."""


@dataclass(frozen=True)
class Case:
    """One operator on one set of tensors."""

    op: str
    shape: Shape
    gate: str
    dtype: str
    mode: str
    seed: int

    @property
    def backward(self) -> bool:
        return self.mode == "fwdbwd"

    def arguments(self) -> Arguments:
        """Keyword arguments of the operator, the same whenever they are drawn."""
        subject = SUBJECTS[OPS[self.op]]
        drawn = subject.arguments(self.shape, getattr(torch, self.dtype), self.seed)
        for name in ("initial_state", "initial_state_bias", "output_final_state"):
            drawn.pop(name, None)
        if "g" in drawn and self.gate != "none":
            noise = torch.randn(drawn["g"].shape, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float64)
            drawn["g"] = GATES[self.gate](noise).to(drawn["g"].dtype)
        if "beta" in drawn and "q" in drawn:
            drawn["use_qk_l2norm_in_kernel"] = True
        return drawn


@dataclass(frozen=True)
class Contender:
    """Who runs a case: `call` takes its arguments and returns the output; `ran` says which code that is."""

    name: str
    ran: str
    call: Callable[[Arguments], Tensor]


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
    parser.add_argument("--gates", default="mid", help="of fast, mid, slow; with commas (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="(default: %(default)s)")
    parser.add_argument("--mode", default="fwd,fwdbwd", help="of fwd, fwdbwd; with commas (default: both)")
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
        words = [*ops, *_given(args, ops)]
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


def contenders(op: str, peers: Sequence[Peer]) -> list[Contender]:
    """Ours first, then every peer that has this operator."""
    subject = SUBJECTS[OPS[op]]
    found = [Contender(OURS, f"wyfold.{subject.operator}", lambda arguments: subject.ours(arguments)[0])]
    for peer in peers:
        if subject.operator in peer.adapters:
            found.append(_theirs(peer, subject.operator))
    return found


def _theirs(peer: Peer, operator: str) -> Contender:
    ran, call = peer.adapters[operator]()
    return Contender(peer.name, ran, lambda arguments: call(*(arguments[name] for name in ("q", "k", "v", "g", "beta"))))


def prepared(contender: Contender, case: Case, arguments: Arguments) -> Callable[[], Tensor | tuple[Tensor, ...]]:
    """One run of a case, ready to be timed: the output, or the gradients of all floating arguments."""
    if not case.backward:

        def forward() -> Tensor:
            with torch.no_grad():
                return contender.call(arguments)

        return forward

    leaves = _leaves(arguments)
    ready = {**arguments, **leaves}
    with torch.no_grad():
        fed = inputs.incoming(contender.call(arguments), FED)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(contender.call(ready), list(leaves.values()), fed)

    return both


def _leaves(arguments: Arguments) -> Named:
    return {
        name: value.detach().requires_grad_()
        for name, value in arguments.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }


# --- is it right -----------------------------------------------------------------------------------------------------


def errors(contender: Contender, case: Case, arguments: Arguments) -> list[error.Verdict]:
    """Verdicts on the very call that will be timed, against the float64 recurrence.

    Outputs are compared over the whole sequence up to `CHECKED_FORWARD` tokens. For the gradients the loss reaches the
    first `CHECKED` tokens only, so that the recurrence need not run further; gradients of later tokens must be zero.
    """
    subject, T = SUBJECTS[OPS[case.op]], case.shape.T
    narrow = getattr(torch, case.dtype) in NARROW
    tokens = min(T, CHECKED)
    shown = T if T <= CHECKED_FORWARD and not narrow else tokens
    with torch.no_grad():
        o = contender.call(arguments)
        truth = {"o": subject.truth(widened(_first(arguments, shown)))[0]}
        got = {"o": o[:, :shown]}
        loop = {"o": subject.truth(_first(arguments, shown))[0]} if narrow else {}
    if case.backward:
        fed = inputs.incoming(o, FED)
        fed[:, tokens:] = 0
        got |= _first(_gradients(contender.call, arguments, fed), tokens, exact=True)
        few, fed = _first(arguments, tokens), fed[:, :tokens]
        truth |= _gradients(lambda a: subject.truth(a)[0], widened(few), fed.double())
        if narrow:
            loop |= _gradients(lambda a: subject.truth(a)[0], few, fed)
    return [
        error.judge(
            x,
            truth[name],
            loop[name] if x.dtype in NARROW else None,
            name=name,
            target=bound(name, x.dtype, subject.family),
            per_token=PER_TOKEN.get(name) == x.ndim,
        )
        for name, x in got.items()
    ]


def _gradients(call: Callable[[Arguments], Tensor], arguments: Arguments, fed: Tensor) -> Named:
    leaves = _leaves(arguments)
    found = torch.autograd.grad(call({**arguments, **leaves}), list(leaves.values()), fed)
    return {GRADIENT_OF.get(name, f"d{name}"): gradient for name, gradient in zip(leaves, found, strict=True)}


def _first(tensors: dict[str, Any], tokens: int, *, exact: bool = False) -> dict[str, Any]:
    """The first tokens of every per-token tensor. `exact`: the rest of a gradient must be zero, else it counts as NaN."""
    cut = dict(tensors)
    for name, x in tensors.items():
        if name.removeprefix("d") in TOKEN_ARGUMENTS and isinstance(x, Tensor):
            cut[name] = x[:, :tokens]
            if exact and bool((x[:, tokens:] != 0).any()):
                cut[name] = torch.full_like(cut[name], torch.nan)
    return cut


# --- how long, how much ----------------------------------------------------------------------------------------------


def race(cases: Sequence[Case], peers: Sequence[Peer], rounds: int) -> list[dict[str, Any]]:
    """One row per case and contender; all of them that are right take turns."""
    rows: list[dict[str, Any]] = []
    runs: list[Callable[[], object] | None] = []
    for case in cases:
        arguments = case.arguments()
        for contender in contenders(case.op, peers):
            results.say(f"checking {_title(case)} by {contender.ran}")
            found = errors(contender, case, arguments)
            rows.append(_row(case, contender, arguments, found))
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


def _row(case: Case, contender: Contender, arguments: Arguments, found: Sequence[error.Verdict]) -> dict[str, Any]:
    launches: dict[str, Any] = {}
    if contender.name == OURS:
        plan = wyfold.explain(getattr(wyfold, OPS[case.op]), **arguments)
        launches = {"backend": plan.backend, "forward": plan.forward, "backward": plan.backward, "chunk": plan.chunk_size}
    worst = max(found, key=lambda verdict: verdict.measured.rms)
    return {
        **asdict(case),
        "contender": contender.name,
        "ran": contender.ran,
        "launches": launches,
        "errors": {v.name: {"rms": v.measured.rms, "limit": v.limits.rms, "reason": v.reason} for v in found},
        "worst_error": worst.measured.rms,
        "worst_tensor": worst.name,
        "correct": all(verdict.passed for verdict in found),
        "milliseconds": None,
        "ns_per_token_head": None,
        "peak": None,
        "peak_missing": "",
    }


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
                    "memory_share": ours["peak"]["above_inputs_mib"] / peer["peak"]["above_inputs_mib"],
                }
            )
    return found


def report(rows: Sequence[dict[str, Any]], ratios: Sequence[dict[str, Any]]) -> None:
    """The tables on the screen."""
    columns = ("op", "shape B,T,H,HV,K,V", "gates", "mode", "ran", "worst error", "median ms", "quartiles ms")
    results.show("time and memory", (*columns, "ns/token-head", "peak MiB above inputs", "process MiB"), [_cells(row) for row in rows])
    if ratios:
        columns = ("op", "gates", "mode", "peer", "times faster", "share of its memory")
        cells = [
            (r["op"], r["gate"], r["mode"], r["peer"], f"{r['times_faster']:.2f}", f"{r['memory_share']:.2f}") for r in ratios
        ]
        results.show("ours beside the peers", columns, cells)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    shape = ",".join(map(str, row["shape"].values()))
    ran = row["ran"] if row["contender"] != OURS else f"{row['ran']} ({row['launches']['backend']})"
    head = (row["op"], shape, row["gate"], row["mode"], ran, f"{row['worst_error']:.1e} {row['worst_tensor']}")
    if not row["correct"]:
        return (*head, "wrong", "", "", "", "")
    ms, peak = row["milliseconds"], row["peak"]
    quartiles = f"{ms['quartile1']:.1f} - {ms['quartile3']:.1f}"
    sizes = (f"{peak['above_inputs_mib']:.0f}", f"{peak['process_mib']:.0f}")
    return (*head, f"{ms['median']:.1f}", quartiles, f"{row['ns_per_token_head']:.0f}", *sizes)


def keep(folder: Path, record: dict[str, Any], ops: Sequence[str]) -> None:
    """JSON and chart in the folder."""
    stem = f"cpu-{record['date'][:10]}-bench-{'-'.join(ops)}"
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
    right.barh(at, [row["peak"]["above_inputs_mib"] for row in timed], color=colours, log=True)
    right.set(xlabel="peak MiB above inputs")
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


def _given(args: argparse.Namespace, ops: Sequence[str]) -> list[str]:
    """The options that repeat this run."""
    shapes = [word for shape in args.shapes or [] for word in ("--shapes", ",".join(map(str, astuple(shape))))]
    plain = {"gates": args.gates, "dtype": args.dtype, "mode": args.mode, "peers": args.peers, "rounds": args.rounds}
    options = [word for name, value in plain.items() for word in (f"--{name}", str(value))]
    return [*shapes, *options, "--threads", str(torch.get_num_threads()), "--seed", str(args.seed)]
