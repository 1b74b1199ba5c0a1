"""Time and memory of every operator, beside installed peers.

All implementations run on the same tensors in one process. Every output and
gradient is first compared with the float64 recurrence; an implementation that
is wrong gets no time. Then the implementations alternate in rounds, and the
table has the median and quartiles of their calls.

On a GPU the L2 cache is flushed before each call. A call is timed by CUDA
events, on the host, kernel by kernel under the profiler, and from a CUDA graph
(--mode graph). Its time is also given as a multiple of the time its bytes alone
need. A peer that fails has a row with its error. Other load on the machine
affects times.

--suite runs the shapes of published models, one stored result each. --compile
compiles their kernels in parallel first. A run that --budget ended goes on with
--resume and the file that it wrote.

Under torchrun the processes share the sequence: delta_rule, gdn, kda and ttt
run over 1, 2, 4 .. ranks, beside peers that have context parallelism.
"""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import astuple, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wyfold.cli import DONE, FAILED, UsageError, results
from wyfold.cli.arguments import use_threads
from wyfold.cli.bench import tables
from wyfold.cli.bench.options import DECODED, add_arguments, chosen_peers, command_words, parse_lists, resolve_defaults
from wyfold.cli.bench.peer import Peer
from wyfold.cli.bench.peers import PEERS, dispatch_messages
from wyfold.cli.bench.tuning import QUICK, quick_choice
from wyfold.cli.catalog import CHUNKED, OPS, OURS

if TYPE_CHECKING:
    from wyfold.cli.bench.cases import Case
    from wyfold.cli.bench.runner import BenchSession
    from wyfold.cli.distributed import DistributedWorld

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Check, time and measure. Returns 0, or 1 if a result of Wyfold was wrong or a case failed."""
    if not args.measure:
        parse_lists(args)
        results.ready(args.out)

    from wyfold.cli.bench.precompile import compile_here
    from wyfold.cli.bench.resume import resumed
    from wyfold.cli.bench.runner import BenchSession, measure
    from wyfold.cli.distributed import DistributedWorld, launched

    if args.measure:
        request = json.loads(args.measure)
        print(json.dumps((compile_here if request.get("what") == "compile" else measure)(request)))
        return DONE
    use_threads(args.threads)
    kind = resolve_defaults(args)
    if not (cases := list(_cases(args))):
        raise UsageError(
            f"nothing to run: none of {', '.join(args.op)} has --gates {','.join(args.gates)} and "
            f"--mode {','.join(args.mode)}"
        )
    world = DistributedWorld(args.device, None) if launched() else None
    peers = chosen_peers(args.peers, kind, verbose=world is None or world.is_main)
    session = BenchSession(
        sum(len(group) for group in cases), args.rounds, kind == "cuda" and "graph" in args.mode, args.cold
    )
    record = _record(args, cases, peers, kind)
    stem = _stem(args, record, cases)
    if args.resume:
        record["rows"], cases = resumed(args.resume, record, cases)
        session.cases = sum(len(group) for group in cases)
    if world is not None:
        return _over_ranks(args, cases, peers, record, stem, world)
    with quick_choice() if args.budget and kind == "cuda" else nullcontext():
        _run_all(args, cases, peers, record, stem, session)
    tables.report(record["rows"], record["ratios"])
    if args.out:
        results.say(f"wrote {args.out / stem}.json")
        tables.chart(args.out / f"{stem}.png", record["rows"])
    for case in record["lost"]:
        print(f"not measured: {case['case']}: {case['error']}")
    failed = any(row["failed"] for row in record["rows"] if row["contender"] == OURS)
    return FAILED if failed or record["lost"] else DONE


def _record(args: argparse.Namespace, cases: list[list[Case]], peers: list[Peer], kind: str) -> dict[str, Any]:
    """The report of a run that has measured nothing yet: where it runs, with what, and by which method."""
    import torch

    from wyfold.cli.bench import memory, timing

    ops = args.of_suite if args.suite else list(dict.fromkeys(group[0].op for group in cases))
    record = {
        **results.provenance("bench", [*ops, *command_words(args)]),
        "threads": torch.get_num_threads(),
        "peers": {
            name: peer.versions or "installed"
            if name in {one.name for one in peers}
            else "not installed or not asked for"
            for name, peer in PEERS.items()
        },
        "method": timing.METHOD_CPU if kind == "cpu" else timing.METHOD_GPU + (QUICK if args.budget else ""),
        "memory": memory.METHOD_GPU if kind == "cuda" else "see each row",
        "rows": [],
        "ratios": [],
        "lost": [],
    }
    if args.commit and record["modified"] is not False:
        record["commit"] = args.commit
    return record


def _over_ranks(
    args: argparse.Namespace,
    cases: list[list[Case]],
    peers: list[Peer],
    record: dict[str, Any],
    stem: str,
    world: DistributedWorld,
) -> int:
    """Run the cases on all processes that the launcher started."""
    from wyfold.cli.bench import scaling
    from wyfold.cli.distributed import leave

    code = scaling.run(args, cases, peers, record, stem, world)
    leave()
    return code


def _run_all(
    args: argparse.Namespace,
    cases: Sequence[list[Case]],
    peers: Sequence[Peer],
    record: dict[str, Any],
    stem: str,
    session: BenchSession,
) -> None:
    """Run the cases in this process, and write the record after each of them."""
    from wyfold.cli.bench.runner import error_line, run_cases

    if args.compile:
        _compile(args, cases, peers, session)
    for group in cases:
        if args.budget and session.spent > args.budget:
            why = f"not started within --budget {args.budget}; --resume runs it"
            record["lost"] += [{"case": case.title, "error": why} for case in group]
            session.done += len(group)
            _write_record(args.out, stem, record, session)
            continue
        ended = session.done + len(group)
        try:
            for rows in run_cases(group, peers, args.also, session):
                record["rows"] += rows
                _write_record(args.out, stem, record, session)
        except RuntimeError as error:  # out of memory, or a device error: other cases may still run
            results.say(traceback.format_exc())
            failing, *behind = group[session.done - ended :]
            record["lost"].append({"case": failing.title, "error": error_line(error)})
            record["lost"] += [{"case": case.title, "error": f"not run after {failing.title}"} for case in behind]
            session.done = ended
            _write_record(args.out, stem, record, session)
    if not cases:  # all rows are an earlier result's
        _write_record(args.out, stem, record, session)


def _compile(
    args: argparse.Namespace, cases: Sequence[list[Case]], peers: Sequence[Peer], session: BenchSession
) -> None:
    """Compile the kernels of all cases in parallel, for as long as the budgets allow."""
    from wyfold.cli.bench.precompile import compile_all

    seconds, budget = args.compile_budget, "--compile-budget"
    if not seconds and args.budget:
        seconds, budget = args.budget / 2, "half of --budget"
    deadline = session.began + seconds if seconds else None
    every = [case for group in cases for case in group]
    for job in compile_all(every, peers, args.also, args.compile, deadline):
        if job.contender != OURS:  # a run has times of Wyfold, whatever a peer's compilation took
            session.uncompiled |= {(case, job.ran): f"not compiled within {budget}" for case in job.cases}


def _write_record(folder: Path | None, stem: str, record: dict[str, Any], session: BenchSession) -> None:
    """Write the record after every case, so that a later failure loses nothing."""
    record["ratios"] = tables.against_peers(record["rows"])
    record |= {"copy_bytes_per_second": session.copy_rate, "dispatched": dispatch_messages()}
    if folder:
        results.write(folder, f"{stem}.json", record)


def _cases(args: argparse.Namespace) -> Iterator[list[Case]]:
    """Yield groups of cases. The cases of a group, forward and forward with backward, share their tensors.

    Raises:
        UsageError: an operator refuses a shape.
    """
    from wyfold.cli.bench.cases import PINNED, Case, gates_of
    from wyfold.cli.operators import OPERATOR_SPECS
    from wyfold.reference.shapes import Shape

    if args.suite:
        yield from _suite_cases(args)
        return
    modes = [mode for mode in args.mode if mode != "graph"] or ["fwd"]
    sized = [(name, Shape(*sizes) if sizes else PINNED[name]) for name, sizes in args.shapes]
    for (name, shape), op, dtype in product(sized, args.op, args.dtype):
        if args.default_shapes and op.startswith("decode_"):
            name, shape = DECODED, PINNED[DECODED]
        for chunk, gate in product(args.chunk if op in CHUNKED else [64], gates_of(op, args.gates)):
            first = Case(
                op,
                shape,
                gate,
                dtype,
                modes[0],
                args.seed,
                name=name,
                norm=args.norm,
                chunk=chunk,
                gate_dtype=args.gate_dtype,
                device=str(args.device),
                backend=args.backend or "",
            )
            possible = [mode for mode in modes if mode == "fwd" or OPERATOR_SPECS[OPS[op]].backward]
            if possible:
                if reason := first.refusal():
                    raise UsageError(f"--shapes {name or ','.join(map(str, astuple(shape)))}: {op}: {reason}")
                yield [replace(first, mode=mode) for mode in possible]


def _suite_cases(args: argparse.Namespace) -> Iterator[list[Case]]:
    """Yield the groups of cases of a suite, or of the operators that were named.

    Raises:
        UsageError: the suite has no row of an operator that was named.
    """
    from wyfold.cli.bench.cases import Case
    from wyfold.cli.bench.suites import SUITES

    rows = SUITES[args.suite]
    if missing := [op for op in args.of_suite if not any(row.op == op for row in rows)]:
        raise UsageError(f"--suite {args.suite} has no {', '.join(missing)}")
    for row, dtype in product([row for row in rows if not args.op or row.op in args.op], args.dtype):
        first = Case(
            row.op,
            row.shape,
            row.gate,
            dtype,
            row.modes[0],
            args.seed,
            norm=row.norm,
            gate_dtype=args.gate_dtype,
            device=str(args.device),
            backend=args.backend or "",
        )
        yield [replace(first, mode=mode) for mode in row.modes]


def _stem(args: argparse.Namespace, record: dict[str, Any], cases: Sequence[Sequence[Case]]) -> str:
    """File name without extension of the written files."""
    import torch

    kind = args.device.type
    machine = torch.cuda.get_device_name(args.device).split()[-1].lower() if kind == "cuda" else kind
    sizes = dict.fromkeys(group[0].name or f"T{group[0].shape.T}" for group in cases)
    subject = [args.suite, *args.of_suite] if args.suite else [*args.op, *sizes]
    words = [machine, record["date"][:10], "bench", *subject, args.label]
    return "-".join(word for word in words if word)
