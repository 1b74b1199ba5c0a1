"""`bench` where a launcher has started several processes: one sequence over ranks, and over fewer of them.

    torchrun --nproc-per-node 4 -m wyfold bench gdn kda --shapes 1,1048576,8,128 --mode fwd,fwdbwd

Each case runs on the first 1, 2, 4 .. ranks: ours, and the context parallelism of the peers that have one. All ranks
draw the same tensors and keep their shares. What they compute is brought together and judged as `bench` judges one
process; then the contenders take turns. A time is the slowest rank's, from where all have met to the end of its work.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wyfold.cli import DONE, FAILED, Failure, UsageError, results, timing
from wyfold.cli.cases import Case
from wyfold.cli.contenders import OURS, TOKEN_ARGUMENTS, Contender, Judge, contenders, gradients_of, prepared
from wyfold.cli.peers import Peer
from wyfold.cli.race import give_back, said, wait
from wyfold.cli.subjects import Arguments, Named
from wyfold.parallel import exchange
from wyfold.parallel.context import ContextParallel, build_cp_context
from wyfold.parallel.team import Ranks
from wyfold.parallel.watch import RankLost

OPERATORS = ("delta_rule", "gdn", "kda", "ttt")
"""Those with a `cp_context` that hand states from rank to rank."""

HEADS = 2
"""On a GPU: key heads that are judged; sequences are long here, and one rank judges."""

METHOD = (
    "every rank keeps its share of the same tensors; contenders alternate, one warm run each; clock of the host from a "
    "barrier to the end of the device's work, the slowest rank's; medians. sent: bytes that the rank which sends most "
    "contributes to its collectives, and how many there are"
)
KIND = "bench-ranks"

Row = dict[str, Any]


@dataclass
class Side:
    """One contender on some ranks, as one of them sees it.

    Attributes:
        contender: Who runs.
        ranks: How many.
        context: How the buffer is shared, where this rank takes part in it; None on one rank alone.
        arguments: This rank's, with whatever context the contender takes; None where it has no part.
        row: What is found.
    """

    contender: Contender
    ranks: int
    context: ContextParallel | None
    arguments: Arguments | None
    row: Row = field(default_factory=dict)

    def shared(self, x: Tensor) -> Tensor:
        """This rank's share of a tensor of tokens."""
        return x if self.context is None else self.context.shard(x)

    def whole(self, found: Named) -> Named:
        """Results of all ranks: rows of tokens one after another, what belongs to no token added up."""
        if self.context is None:
            return found
        context = self.context
        return {
            name: context.unshard(x) if name.removeprefix("d") in TOKEN_ARGUMENTS else exchange.total(x, context.group)
            for name, x in found.items()
        }


def counts(word: str, world: int) -> list[int]:
    """Numbers of ranks to compare: those that are named, or 1, 2, 4 .. and all."""
    if not word:
        return sorted({*(2**i for i in range(world.bit_length()) if 2**i <= world), world})
    try:
        found = sorted({int(count) for count in word.split(",")})
    except ValueError:
        found = [0]
    if not 1 <= found[0] <= found[-1] <= world:
        raise UsageError(f"--ranks: must be numbers from 1 to {world}, the processes that were started, got {word!r}")
    return found


def run(
    args: argparse.Namespace,
    groups: Sequence[Sequence[Case]],
    peers: Sequence[Peer],
    record: Row,
    stem: str,
    team: Ranks,
) -> int:
    """Check, time and measure on every number of ranks; 0, or 1 if a result of ours was wrong."""
    for case in (group[0] for group in groups):
        if case.op not in OPERATORS:
            raise UsageError(f"OP: over several processes there are {', '.join(OPERATORS)}, got {case.op}")
    if args.cold or args.also or "graph" in args.mode:
        raise UsageError("--cold, --also and --mode graph are of one process")
    record |= {"kind": KIND, "method": METHOD, "processes": team.processes, "rows": []}
    failed = False
    try:
        with team.watched():
            for rows in _race(groups, peers, counts(args.ranks, team.processes), args.rounds, team):
                record["rows"] += rows
                failed |= any(row["failed"] for row in rows if row["contender"] == OURS)
                if team.leads and args.out:
                    results.write(args.out, f"{stem}.json", record)
    except RankLost as lost:
        raise Failure(str(lost)) from lost
    if team.leads:
        show(record["rows"])
        if args.out:
            results.say(f"wrote {args.out / stem}.json")
            chart(args.out / f"{stem}.png", record["rows"])
    return FAILED if failed else DONE


# --- a case on every number of ranks ---------------------------------------------------------------------------------


def _race(
    groups: Sequence[Sequence[Case]], peers: Sequence[Peer], among: Sequence[int], rounds: int, team: Ranks
) -> Iterator[list[Row]]:
    """The rows of each case, one per contender and number of ranks; alike on all ranks but for what rank 0 judges."""
    members = {count: team.first(count) for count in among}
    for group in groups:
        first = replace(group[0], device=str(team.device))
        arguments = first.arguments()
        judge = Judge(first, arguments, HEADS) if team.leads else None
        for case in (replace(case, device=str(team.device)) for case in group):
            sides = [
                _side(case, contender, peer, count, members[count], arguments, team)
                for count in among
                for contender, peer in _who(case, peers, count)
            ]
            for side in sides:
                _say(team, f"checking {case.title} on {side.ranks} by {side.contender.ran}")
                side.row = _row(case, side) | _judged(case, side, judge, arguments, team)
            right = [side for side in sides if side.row["correct"]]
            _say(team, f"timing {case.title}: {len(right)} contenders, {rounds} rounds of turns")
            _time(case, right, rounds, arguments, team)
            yield [side.row for side in sides]


def _who(case: Case, peers: Sequence[Peer], count: int) -> Iterator[tuple[Contender, Peer | None]]:
    """Ours on any number of ranks, peers over several of them where they can."""
    able = [peer for peer in peers if peer.shares is not None] if count > 1 else []
    for contender in contenders(case, able):
        yield contender, next((peer for peer in able if peer.name == contender.name), None)


def _side(
    case: Case, contender: Contender, peer: Peer | None, count: int, group: Any, arguments: Arguments, team: Ranks
) -> Side:
    """A contender with this rank's share of the case's tensors."""
    if team.rank >= count:
        return Side(contender, count, None, None)
    if count == 1:
        return Side(contender, count, None, arguments)
    bounds = arguments.get("cu_seqlens")
    context = build_cp_context(bounds, group, total_tokens=case.shape.T)
    side = Side(contender, count, context, {})
    side.arguments = {
        name: side.shared(x) if isinstance(x, Tensor) and name in TOKEN_ARGUMENTS else x
        for name, x in arguments.items()
        if name != "cu_seqlens"
    }
    side.arguments["cp_context"] = context
    if peer is not None and peer.shares is not None:
        ends = bounds if bounds is not None else torch.tensor([0, case.shape.T], device=team.device)
        shares = peer.shares
        side.contender = replace(
            contender, prepare=lambda given: contender.prepare(given) | {"cp_context": shares(ends, group)}
        )
    return side


def _row(case: Case, side: Side) -> Row:
    """The row of a contender, not yet judged."""
    return {
        **asdict(case),
        "contender": side.contender.name,
        "ran": side.contender.ran,
        "ranks": side.ranks,
        **dict.fromkeys(("errors", "worst_error", "worst_tensor", "milliseconds", "ns_per_token_head")),
        **dict.fromkeys(("times_one_rank", "peak", "sent")),
        "refused": "",
        "judged": "",
        "correct": False,
        "within_limits": False,
        "failed": False,
    }


def _judged(case: Case, side: Side, judge: Judge | None, arguments: Arguments, team: Ranks) -> Row:
    """What became of a contender's results; the same on all ranks."""
    found: Row = {}
    try:
        if side.arguments is not None:
            o, gradients = _results(case, side, judge, arguments)
            if judge is not None:
                found = _verdict(judge, o, gradients, side.contender)
            del o, gradients
    except Exception as error:  # a library says no in its own way; ours fails the run, at its end
        if side.contender.name == OURS:
            results.say(traceback.format_exc())
        found = {"refused": f"rank {team.rank}: {said(error)}", "failed": True}
    give_back(case)
    heard = team.told(found)
    refusals = [other for other in heard if other.get("refused")]
    answer: Row = (refusals or heard)[0]
    return answer


def _results(case: Case, side: Side, judge: Judge | None, arguments: Arguments) -> tuple[Tensor, Named]:
    """Output and gradients of all ranks, for the gradient that the judge feeds; only rank 0's counts."""
    given = side.arguments or {}
    with torch.no_grad():
        o = side.contender(given)
    name = case.subject.outputs[0]
    (o,) = side.whole({name: o}).values()
    if not case.backward:
        return o, {}
    fed = (judge or Judge(case, arguments, HEADS)).fed()
    return o, side.whole(gradients_of(side.contender, given, side.shared(fed)))


def _verdict(judge: Judge, o: Tensor, gradients: Named, contender: Contender) -> Row:
    """What rank 0 finds."""
    finding = judge.judged(o, gradients, ours=contender.name == OURS)
    worst = finding.verdicts[0]
    return {
        "errors": {
            v.name: {"rms": v.measured.rms, "limit": v.limits.rms, "row": v.measured.row, "reason": v.reason}
            for v in finding.verdicts
        },
        "judged": judge.by,
        "worst_error": worst.measured.rms,
        "worst_tensor": worst.name,
        "correct": finding.right,
        "within_limits": finding.within,
        "failed": not finding.within,
    }


# --- time, memory, bytes ---------------------------------------------------------------------------------------------


def _time(case: Case, sides: Sequence[Side], rounds: int, arguments: Arguments, team: Ranks) -> None:
    """Write into the rows what their contenders take, in turns."""
    runs = [_ready(case, side, arguments) for side in sides]
    for side, mine in zip(sides, _interleaved(case, runs, rounds, team), strict=True):
        side.row["milliseconds"] = timing.spread(mine)
        side.row["ns_per_token_head"] = side.row["milliseconds"]["median"] * 1e6 / max(1, case.token_heads)
    alone = next((side.row for side in sides if side.ranks == 1 and side.contender.name == OURS), None)
    for side, run_ in zip(sides, runs, strict=True):
        if alone is not None:
            side.row["times_one_rank"] = alone["milliseconds"]["median"] / side.row["milliseconds"]["median"]
        side.row["peak"], side.row["sent"] = _held_and_sent(case, side, run_, team)


def _ready(case: Case, side: Side, arguments: Arguments) -> Callable[[], object] | None:
    """This rank's part of a run; None where it has none."""
    if side.arguments is None:
        return None
    fed = side.shared(case.incoming(arguments)) if case.backward else None
    return prepared(side.contender, case, side.arguments, fed)


def _interleaved(
    case: Case, runs: Sequence[Callable[[], object] | None], rounds: int, team: Ranks
) -> list[list[float]]:
    """Milliseconds of every run in every round, the slowest rank's."""
    for run_ in runs:
        if run_ is not None:
            run_()
        team.meet()
    times: list[list[float]] = [[] for _ in runs]
    for turn in timing.order(len(runs), rounds):
        for which in turn:
            team.meet()
            wait(case)
            began, run_ = time.perf_counter_ns(), runs[which]
            if run_ is not None:
                run_()
            wait(case)
            times[which].append(team.most((time.perf_counter_ns() - began) / 1e6))
    return times


def _held_and_sent(
    case: Case, side: Side, run_: Callable[[], object] | None, team: Ranks
) -> tuple[Row | None, Row | None]:
    """Most memory of a rank above its inputs, where an allocator counts it; what ours sends."""
    on_gpu, sent = case.on_gpu, [0]
    held = 0.0
    if run_ is not None:
        if on_gpu:
            gc.collect()
            wait(case)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        with exchange.counted() as sent:
            kept = run_()
        wait(case)
        if on_gpu:
            held = (torch.cuda.max_memory_allocated() - before) / 2**20
        del kept
    most, bytes_, collectives = team.most(held), team.most(sum(sent)), team.most(len(sent) if run_ is not None else 0)
    peak = {"above_inputs_mib": most, "of": "the rank that holds most"} if on_gpu else None
    ours = side.contender.name == OURS
    return peak, {"bytes": int(bytes_), "collectives": int(collectives)} if ours else None


def _say(team: Ranks, line: str) -> None:
    if team.leads:
        results.say(line)


# --- what is shown ---------------------------------------------------------------------------------------------------


def show(rows: Sequence[Row]) -> None:
    """The table on the screen."""
    case, found = (
        ("op", "shape", "dtype", "gates", "mode", "ran", "ranks"),
        ("worst error", "median ms", "quartiles ms"),
    )
    columns = (*case, *found, "x one rank", "peak MiB a rank", "MiB sent")
    results.show("over ranks; x one rank: times ours on one", columns, [_cells(row) for row in rows])
    for row in rows:
        what = f"{row['op']} {row['mode']} on {row['ranks']} by {row['ran']}"
        if row["refused"]:
            print(f"refused: {what}: {row['refused']}")
        elif not row["within_limits"]:
            reasons = [f"{name} {e['rms']:.1e} ({e['reason']})" for name, e in row["errors"].items() if e["reason"]]
            verdict = "further from the truth than ours may be" if row["correct"] else "wrong"
            print(f"{verdict}: {what}: {'; '.join(reasons)}")


def _cells(row: Row) -> tuple[str, ...]:
    size = row["name"] or ",".join(map(str, row["shape"].values()))
    head = (row["op"], size, row["dtype"], row["gate"], row["mode"], row["ran"], str(row["ranks"]))
    if not row["milliseconds"]:
        return (*head, "refused" if row["refused"] else "wrong", *[""] * 5)
    ms, peak, sent = row["milliseconds"], row["peak"], row["sent"]
    return (
        *head,
        f"{row['worst_error']:.1e} {row['worst_tensor']}",
        f"{ms['median']:.3f}",
        f"{ms['quartile1']:.3f} - {ms['quartile3']:.3f}",
        "" if row["times_one_rank"] is None else f"{row['times_one_rank']:.2f}",
        f"{peak['above_inputs_mib']:.0f}" if peak else "",
        f"{sent['bytes'] / 2**20:.3f}" if sent else "",
    )


def lines(rows: Sequence[Row]) -> dict[str, list[tuple[int, float]]]:
    """Of each contender and case the points (ranks, times ours on one rank), where there are such times."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["times_one_rank"] is not None:
            size = row["name"] or f"T {row['shape']['T']}"
            name = f"{row['op']} {row['gate']} {row['mode']} {size}: {row['ran']}"
            found.setdefault(name, []).append((row["ranks"], row["times_one_rank"]))
    return found


def chart(file: Path, rows: Sequence[Row]) -> None:
    """Speed over ranks, beside what as many ranks could be at best, as PNG."""
    if importlib.util.find_spec("matplotlib") is None:
        results.say('no chart: matplotlib is not installed; pip install "wyfold[cli]"')
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    drawn = lines(rows)
    for name, points in drawn.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    most = max((row["ranks"] for row in rows), default=1)
    axes.plot([1, most], [1, most], linestyle=":", color="black", label="as many times as ranks")
    axes.set(xlabel="ranks", ylabel="times ours on one rank", xticks=sorted({row["ranks"] for row in rows}))
    axes.legend(fontsize=7)
    figure.savefig(file, format="png")
    results.say(f"wrote {file}")
