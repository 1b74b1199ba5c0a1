"""`bench` where a launcher has started several processes: one sequence over ranks, and over fewer of them.

    torchrun --nproc-per-node 4 -m wyfold bench gdn kda --shapes 1,1048576,8,128 --mode fwd,fwdbwd

Each case runs on the first 1, 2, 4 .. ranks: ours, and the context parallelism of the peers that have one. All ranks
draw the same tensors and keep their shares. What they compute is brought together and judged as `bench` judges one
process; then the contenders take turns. A time is the slowest rank's, from where all have met to the end of its work.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from wyfold.cli import DONE, FAILED, Failure, UsageError, results
from wyfold.cli.bench import tables, timing
from wyfold.cli.bench.cases import Case
from wyfold.cli.bench.implementations import TOKEN_ARGUMENTS, Contender, Judge, contenders, gradients_of, prepared
from wyfold.cli.bench.peers import Peer
from wyfold.cli.bench.runner import give_back, said, wait
from wyfold.cli.catalog import OURS, OVER_RANKS
from wyfold.cli.distributed import Ranks
from wyfold.cli.operators import Arguments, Named
from wyfold.context_parallel import collectives
from wyfold.context_parallel.context import ContextParallel, build_cp_context
from wyfold.context_parallel.watchdog import RankLost
from wyfold.runtime.check import UnsupportedError

OPERATORS = ("delta_rule", "gdn", "kda", "ttt")
"""Those with a `cp_context` that hand states from rank to rank."""

MINI_BATCH = 16
"""Tokens of TTT-Linear's, as `bench` runs it."""

HEADS = 2
"""On a GPU: key heads that are judged; sequences are long here, and one rank judges."""

STRAY_S, JUDGING_S = 120.0, 3600.0
"""In which the others come to where a rank is that has failed, if they are to come; and to one that has not."""

METHOD = (
    "every rank keeps its share of the same tensors; contenders alternate, one warm run each; clock of the host from a "
    "barrier to the end of the device's work, the slowest rank's; medians. sent: bytes that the rank which sends most "
    "contributes to its collectives, and how many there are"
)

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
            name: context.unshard(x)
            if name.removeprefix("d") in TOKEN_ARGUMENTS
            else collectives.sum_over_ranks(x, context.group)
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
    record |= {"kind": OVER_RANKS, "method": METHOD, "processes": team.processes, "rows": []}
    record["command"] = f"torchrun --nproc-per-node {team.processes} -m {record['command']}"
    stem = f"{stem}-ranks{team.processes}"
    for peer in peers if team.leads else ():
        if peer.shares is None:
            results.say(f"{peer.name}: shares no sequence among ranks; left out")
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
        tables.report_ranks(record["rows"])
        if args.out:
            results.say(f"wrote {args.out / stem}.json")
            tables.chart_ranks(args.out / f"{stem}.png", record["rows"])
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
        judge = Judge(first, arguments, HEADS, everything=True)
        for case in (replace(case, device=str(team.device)) for case in group):
            sides = [
                _side(case, contender, peer, count, members[count], arguments, team)
                for count in among
                for contender, peer in _who(case, peers, count)
            ]
            for side in sides:
                _say(team, f"checking {case.title} on {side.ranks} by {side.contender.ran}")
                side.row = _row(case, side) | _judged(case, side, judge, team)
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
    context = build_cp_context(bounds, group, total_tokens=case.shape.T, **_cut(case, count))
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


def _cut(case: Case, count: int) -> dict[str, Any]:
    """Even shares; of TTT-Linear between mini-batches, as even as they come."""
    if case.op != "ttt":
        return {}
    T = case.shape.T
    ends = [*(T * rank // count // MINI_BATCH * MINI_BATCH for rank in range(count)), T]
    return {"layout": "fragments", "fragments": [[(start, stop)] for start, stop in pairwise(ends)]}


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


def _judged(case: Case, side: Side, judge: Judge, team: Ranks) -> Row:
    """What became of a contender's results, as rank 0 finds."""

    def found() -> Row:
        if side.arguments is None:
            return {}
        o, gradients = _results(case, side, side.arguments, judge)
        if not team.leads:
            return {}
        return {"judged": judge.by} | judge.judged(o, gradients, ours=side.contender.name == OURS).row

    return _agreed(case, side, team, found)


def _agreed(case: Case, side: Side, team: Ranks, work: Callable[[], Row]) -> Row:
    """What rank 0's work came to, or why some rank's came to nothing; the same on all ranks.

    A rank that fails alone leaves the others in a collective. It waits for them a while, and then fails the run: its
    error is that of the program, and the watch tells the others.
    """
    error: Exception | None = None
    found: Row = {}
    try:
        found = work()
    except RankLost:
        raise
    except UnsupportedError as refusal:
        error, found = refusal, {"refused": said(refusal)}
    except Exception as failure:  # a library says no in its own way; ours fails the run, at its end
        error, found = failure, {"refused": f"rank {team.rank}: {said(failure)}", "failed": True, "correct": False}
        if side.contender.name == OURS:
            results.say(traceback.format_exc())
    if not team.all_here(JUDGING_S if error is None else STRAY_S) and error is not None:
        raise error
    give_back(case)
    heard = team.told(found)
    answer: Row = ([other for other in heard if other.get("refused")] or heard)[0]
    return answer


def _results(case: Case, side: Side, given: Arguments, judge: Judge) -> tuple[Tensor, Named]:
    """Output and gradients of all ranks, for the gradient that the judge feeds."""
    with torch.no_grad():
        o = side.contender(given)
    (o,) = side.whole({case.subject.outputs[0]: o}).values()
    if not case.backward:
        return o, {}
    return o, side.whole(gradients_of(side.contender, given, side.shared(judge.fed())))


# --- time, memory, bytes ---------------------------------------------------------------------------------------------


def _time(case: Case, sides: Sequence[Side], rounds: int, arguments: Arguments, team: Ranks) -> None:
    """Write into the rows what their contenders take, in turns."""
    running = []
    for side in sides:
        run_ = _ready(case, side, arguments)
        side.row |= _agreed(case, side, team, partial(_warmed, run_))
        if side.row["correct"]:  # nor did it fail with nothing else of the judge's about
            running.append((side, run_))
    times = _interleaved(case, [run_ for _, run_ in running], rounds, team)
    for (side, _), mine in zip(running, times, strict=True):
        side.row["milliseconds"] = timing.spread(mine)
        side.row["ns_per_token_head"] = side.row["milliseconds"]["median"] * 1e6 / max(1, case.token_heads)
    alone = next((side.row for side, _ in running if side.ranks == 1 and side.contender.name == OURS), None)
    for side, run_ in running:
        if alone is not None:
            side.row["times_one_rank"] = alone["milliseconds"]["median"] / side.row["milliseconds"]["median"]
        side.row["peak"], side.row["sent"] = _held_and_sent(case, side, run_, team)


def _warmed(run_: Callable[[], object] | None) -> Row:
    """A first run, from which nothing is taken but that it is possible."""
    if run_ is not None:
        run_()
    return {}


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
    held, sent = 0.0, list[int]()
    if run_ is not None:
        with collectives.counted() as sent:
            if case.on_gpu:
                held = timing.Gpu.peak_mib(run_)
            else:
                run_()
    most, bytes_, count = team.most(held), team.most(sum(sent)), team.most(len(sent))
    peak = {"above_inputs_mib": most, "of": "the rank that holds most"} if case.on_gpu else None
    ours = side.contender.name == OURS
    return peak, {"bytes": int(bytes_), "collectives": int(count)} if ours else None


def _say(team: Ranks, line: str) -> None:
    if team.leads:
        results.say(line)
