"""`bench` under a launcher: one sequence shared over different numbers of ranks.

    torchrun --nproc-per-node 4 -m wyfold bench gdn kda --shapes 1,1048576,8,128 --mode fwd,fwdbwd

Each case runs on the first 1, 2, 4 .. ranks, by Wyfold and by the peers that have context parallelism. All ranks draw
the same tensors and keep their shard. The shards of the results are gathered and checked as in one process; then the
implementations are timed interleaved. A time is that of the slowest rank, from a barrier to the end of its work.
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
from wyfold.cli.bench.implementations import (
    AccuracyCheck,
    BenchImplementation,
    gradients_of,
    implementations_of,
    make_call,
    of_tokens,
)
from wyfold.cli.bench.peer import Peer
from wyfold.cli.bench.runner import error_line, release_memory, wait
from wyfold.cli.catalog import OURS, OVER_RANKS
from wyfold.cli.distributed import DistributedWorld
from wyfold.cli.operators import Arguments, Named
from wyfold.context_parallel import collectives
from wyfold.context_parallel.build_context import build_cp_context
from wyfold.context_parallel.context import ContextParallel
from wyfold.context_parallel.watchdog import RankLost
from wyfold.runtime.check import UnsupportedError

OPERATORS = ("delta_rule", "gdn", "kda", "ttt")
"""Operators with a `cp_context`, which pass states from rank to rank."""

MINI_BATCH = 16
"""Tokens of a mini-batch of TTT-Linear."""

HEADS = 2
"""On a GPU: key heads that are checked. Sequences are long here, and one rank checks alone."""

FAILED_WAIT_S, CHECK_WAIT_S = 120.0, 3600.0
"""Seconds in which all ranks must arrive after this rank failed, or after it succeeded (rank 0 checks results)."""

METHOD = (
    "every rank has its shard of the same tensors; implementations alternate after one warm-up run each; host clock "
    "from a barrier to the end of the device's work, on the slowest rank; medians. sent: bytes that the rank that "
    "sends most contributes to its collectives, and their number"
)

ResultRow = dict[str, Any]


@dataclass
class RankedImplementation:
    """An implementation on some of the ranks, as seen by one process.

    Attributes:
        case: Case that it runs.
        implementation: Implementation to run.
        ranks: Number of ranks it runs on.
        context: Partition of the tokens; None on one rank, or if this process does not take part.
        arguments: Arguments of this rank, `cp_context` included; None if this process does not take part.
        row: Result row.
    """

    case: Case
    implementation: BenchImplementation
    ranks: int
    context: ContextParallel | None
    arguments: Arguments | None
    row: ResultRow = field(default_factory=dict)

    def shared(self, x: Tensor) -> Tensor:
        """This rank's shard of a tensor of tokens."""
        return x if self.context is None else self.context.shard(x)

    def whole(self, found: Named) -> Named:
        """Combine the results of all ranks: tensors of tokens are gathered, all others are summed."""
        if self.context is None:
            return found
        context = self.context
        return {
            name: context.unshard(x)
            if of_tokens(self.case, name.removeprefix("d"))
            else collectives.sum_over_ranks(x, context.group)
            for name, x in found.items()
        }


def counts(word: str, world: int) -> list[int]:
    """Numbers of ranks to compare: those in `word`, or 1, 2, 4 .. and `world` if it is empty."""
    if not word:
        return sorted({*(2**i for i in range(world.bit_length()) if 2**i <= world), world})
    try:
        found = sorted({int(count) for count in word.split(",")})
    except ValueError:
        found = [0]
    if not 1 <= found[0] <= found[-1] <= world:
        raise UsageError(f"--ranks: must be numbers from 1 to {world}, the number of processes, got {word!r}")
    return found


def run(
    args: argparse.Namespace,
    groups: Sequence[Sequence[Case]],
    peers: Sequence[Peer],
    record: ResultRow,
    stem: str,
    world: DistributedWorld,
) -> int:
    """Check, time and measure on every number of ranks. Returns 0, or 1 if a result of Wyfold was wrong."""
    for case in (group[0] for group in groups):
        if case.op not in OPERATORS:
            raise UsageError(f"OP: several processes run {', '.join(OPERATORS)} only, got {case.op}")
    if args.cold or args.also or "graph" in args.mode:
        raise UsageError("--cold, --also and --mode graph need a single process")
    record |= {"kind": OVER_RANKS, "method": METHOD, "processes": world.processes, "rows": []}
    record["command"] = f"torchrun --nproc-per-node {world.processes} -m {record['command']}"
    stem = f"{stem}-ranks{world.processes}"
    for peer in peers if world.is_main else ():
        if peer.make_cp_context is None:
            results.say(f"{peer.name}: has no context parallelism; left out")
    failed = False
    try:
        with world.watch():
            for rows in _run_cases(groups, peers, counts(args.ranks, world.processes), args.rounds, world):
                record["rows"] += rows
                failed |= any(row["failed"] for row in rows if row["contender"] == OURS)
                if world.is_main and args.out:
                    results.write(args.out, f"{stem}.json", record)
    except RankLost as lost:
        raise Failure(str(lost)) from lost
    if world.is_main:
        tables.report_ranks(record["rows"])
        if args.out:
            results.say(f"wrote {args.out / stem}.json")
            tables.chart_ranks(args.out / f"{stem}.png", record["rows"])
    return FAILED if failed else DONE


# --- a case on every number of ranks ---------------------------------------------------------------------------------


def _run_cases(
    groups: Sequence[Sequence[Case]], peers: Sequence[Peer], among: Sequence[int], rounds: int, world: DistributedWorld
) -> Iterator[list[ResultRow]]:
    """Yield the rows of each case, one per implementation and number of ranks. Only rank 0 fills in the accuracy."""
    members = {count: world.group_of_first(count) for count in among}
    for group in groups:
        first = replace(group[0], device=str(world.device))
        arguments = first.arguments()
        checker = AccuracyCheck(first, arguments, HEADS, everything=True)
        for case in (replace(case, device=str(world.device)) for case in group):
            entries = [
                _on_ranks(case, implementation, peer, count, members[count], arguments, world)
                for count in among
                for implementation, peer in _implementations_on(case, peers, count)
            ]
            for entry in entries:
                _log(world, f"checking {case.title} on {entry.ranks} by {entry.implementation.ran}")
                entry.row = _row(case, entry) | _checked(case, entry, checker, world)
            right = [entry for entry in entries if entry.row["correct"]]
            _log(world, f"timing {case.title}: {len(right)} implementations, {rounds} rounds")
            _time(case, right, rounds, arguments, world)
            yield [entry.row for entry in entries]


def _implementations_on(
    case: Case, peers: Sequence[Peer], count: int
) -> Iterator[tuple[BenchImplementation, Peer | None]]:
    """Wyfold on any number of ranks; peers with context parallelism on more than one."""
    able = [peer for peer in peers if peer.make_cp_context is not None] if count > 1 else []
    for implementation in implementations_of(case, able):
        yield implementation, next((peer for peer in able if peer.name == implementation.name), None)


def _on_ranks(
    case: Case,
    implementation: BenchImplementation,
    peer: Peer | None,
    count: int,
    group: Any,
    arguments: Arguments,
    world: DistributedWorld,
) -> RankedImplementation:
    """An implementation with this rank's shard of the case's tensors."""
    if world.rank >= count:
        return RankedImplementation(case, implementation, count, None, None)
    if count == 1:
        return RankedImplementation(case, implementation, count, None, arguments)
    bounds = arguments.get("cu_seqlens")
    context = build_cp_context(bounds, group, total_tokens=case.shape.T, **_partition(case, count))
    entry = RankedImplementation(case, implementation, count, context, {})
    entry.arguments = {
        name: entry.shared(x) if isinstance(x, Tensor) and of_tokens(case, name) else x
        for name, x in arguments.items()
        if name != "cu_seqlens"
    }
    entry.arguments["cp_context"] = context
    if peer is not None and peer.make_cp_context is not None:
        ends = bounds if bounds is not None else torch.tensor([0, case.shape.T], device=world.device)
        make_cp_context = peer.make_cp_context
        entry.implementation = replace(
            implementation,
            prepare=lambda given: implementation.prepare(given) | {"cp_context": make_cp_context(ends, group)},
        )
    return entry


def _partition(case: Case, count: int) -> dict[str, Any]:
    """Layout keywords of `build_cp_context`. TTT-Linear is split between mini-batches, as evenly as possible."""
    if case.op != "ttt":
        return {}
    T = case.shape.T
    ends = [*(T * rank // count // MINI_BATCH * MINI_BATCH for rank in range(count)), T]
    return {"layout": "fragments", "fragments": [[(start, stop)] for start, stop in pairwise(ends)]}


def _row(case: Case, entry: RankedImplementation) -> ResultRow:
    """Result row of an implementation before its check."""
    return {
        **asdict(case),
        "contender": entry.implementation.name,
        "ran": entry.implementation.ran,
        "ranks": entry.ranks,
        **dict.fromkeys(("errors", "worst_error", "worst_tensor", "milliseconds", "ns_per_token_head")),
        **dict.fromkeys(("times_one_rank", "peak", "sent")),
        "refused": "",
        "judged": "",
        "correct": False,
        "within_limits": False,
        "failed": False,
    }


def _checked(case: Case, entry: RankedImplementation, checker: AccuracyCheck, world: DistributedWorld) -> ResultRow:
    """Run an implementation and check its results on rank 0. Returns fields of the row."""

    def found() -> ResultRow:
        if entry.arguments is None:
            return {}
        o, gradients = _results(case, entry, entry.arguments, checker)
        if not world.is_main:
            return {}
        return {"judged": checker.method} | checker.check_tensors(
            o, gradients, ours=entry.implementation.name == OURS
        ).row

    return _on_every_rank(case, entry, world, found)


def _on_every_rank(
    case: Case, entry: RankedImplementation, world: DistributedWorld, work: Callable[[], ResultRow]
) -> ResultRow:
    """Run `work` on every rank, and return the answer of rank 0, or that of the first rank that refused.

    The answer is the same on all ranks. A rank that fails alone leaves the others in a collective. It waits
    `FAILED_WAIT_S` for them and then raises its error, which ends the program; the watchdog informs the other ranks.
    """
    error: Exception | None = None
    found: ResultRow = {}
    try:
        found = work()
    except RankLost:
        raise
    except UnsupportedError as refusal:
        error, found = refusal, {"refused": error_line(refusal)}
    except Exception as failure:  # a peer may refuse with any exception; a bug of Wyfold fails the run at its end
        error, found = (
            failure,
            {"refused": f"rank {world.rank}: {error_line(failure)}", "failed": True, "correct": False},
        )
        if entry.implementation.name == OURS:
            results.say(traceback.format_exc())
    if not world.all_arrived(CHECK_WAIT_S if error is None else FAILED_WAIT_S) and error is not None:
        raise error
    release_memory(case)
    gathered = world.gather_objects(found)
    answer: ResultRow = ([other for other in gathered if other.get("refused")] or gathered)[0]
    return answer


def _results(case: Case, entry: RankedImplementation, given: Arguments, checker: AccuracyCheck) -> tuple[Tensor, Named]:
    """Output and gradients of all ranks, for the checker's output gradient."""
    with torch.no_grad():
        o = entry.implementation(given)
    (o,) = entry.whole({case.spec.outputs[0]: o}).values()
    if not case.backward:
        return o, {}
    return o, entry.whole(gradients_of(entry.implementation, given, entry.shared(checker.fed())))


# --- time, memory, bytes ---------------------------------------------------------------------------------------------


def _time(
    case: Case, entries: Sequence[RankedImplementation], rounds: int, arguments: Arguments, world: DistributedWorld
) -> None:
    """Time the implementations interleaved, and write times, memory and traffic into their rows."""
    running = []
    for entry in entries:
        run_ = _local_call(case, entry, arguments)
        entry.row |= _on_every_rank(case, entry, world, partial(_warm_up, run_))
        if entry.row["correct"]:  # the plain call did not fail either
            running.append((entry, run_))
    times = _interleaved(case, [run_ for _, run_ in running], rounds, world)
    for (entry, _), mine in zip(running, times, strict=True):
        entry.row["milliseconds"] = timing.spread(mine)
        entry.row["ns_per_token_head"] = entry.row["milliseconds"]["median"] * 1e6 / max(1, case.token_heads)
    alone = next((entry.row for entry, _ in running if entry.ranks == 1 and entry.implementation.name == OURS), None)
    for entry, run_ in running:
        if alone is not None:
            entry.row["times_one_rank"] = alone["milliseconds"]["median"] / entry.row["milliseconds"]["median"]
        entry.row["peak"], entry.row["sent"] = _memory_and_traffic(case, entry, run_, world)


def _warm_up(run_: Callable[[], object] | None) -> ResultRow:
    """Run once, to find out whether the call fails."""
    if run_ is not None:
        run_()
    return {}


def _local_call(case: Case, entry: RankedImplementation, arguments: Arguments) -> Callable[[], object] | None:
    """This rank's part of a timed call; None if the rank does not take part."""
    if entry.arguments is None:
        return None
    fed = entry.shared(case.incoming(arguments)) if case.backward else None
    return make_call(entry.implementation, case, entry.arguments, fed)


def _interleaved(
    case: Case, runs: Sequence[Callable[[], object] | None], rounds: int, world: DistributedWorld
) -> list[list[float]]:
    """Milliseconds of every run in every round, on the slowest rank."""
    times: list[list[float]] = [[] for _ in runs]
    for turn in timing.round_order(len(runs), rounds):
        for which in turn:
            world.barrier()
            wait(case)
            began, run_ = time.perf_counter_ns(), runs[which]
            if run_ is not None:
                run_()
            wait(case)
            times[which].append(world.all_reduce_max((time.perf_counter_ns() - began) / 1e6))
    return times


def _memory_and_traffic(
    case: Case, entry: RankedImplementation, run_: Callable[[], object] | None, world: DistributedWorld
) -> tuple[ResultRow | None, ResultRow | None]:
    """Peak memory above inputs of the worst rank (on a GPU), and bytes that Wyfold sends."""
    held, sent = 0.0, list[int]()
    if run_ is not None:
        with collectives.count_sent_bytes() as sent:
            if case.on_gpu:
                held = timing.Gpu.peak_mib(run_)
            else:
                run_()
    most, bytes_, count = world.all_reduce_max(held), world.all_reduce_max(sum(sent)), world.all_reduce_max(len(sent))
    peak = {"above_inputs_mib": most, "of": "the rank that holds most"} if case.on_gpu else None
    ours = entry.implementation.name == OURS
    return peak, {"bytes": int(bytes_), "collectives": int(count)} if ours else None


def _log(world: DistributedWorld, line: str) -> None:
    if world.is_main:
        results.say(line)
