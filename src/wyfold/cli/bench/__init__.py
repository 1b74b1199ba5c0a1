"""Time and memory of the operators beside the peers that are installed, after their results have been checked.

Every contender runs on the same tensors in one process: ours and the peers' take turns round by round, and the median
of a contender's calls is its time, with the quartiles beside it. Before that, every output and gradient is measured
against the float64 recurrence; a contender that is wrong gets no time. On a GPU a call is timed by events with the
cache flushed before it, kernel by kernel under the profiler, and from a CUDA graph (--mode graph), the host apart; its
time also stands as a multiple of what its bytes alone would take. A peer that fails has a row that says how. Times are
of this machine as busy as it was.

Where torchrun has started several processes they share the sequence: delta_rule, gdn, kda and ttt over 1, 2, 4 ..
ranks, beside the peers whose context parallelism is installed.
"""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wyfold.cli import DONE, FAILED, UsageError, results
from wyfold.cli.arguments import add_backend, device, found_device, seed_number, whole
from wyfold.cli.bench import tables
from wyfold.cli.bench.peers import PEERS, Peer, dispatched
from wyfold.cli.catalog import BURST, CHUNKED, DECAYS, MODEL, NO_GATE, OPS, OURS, SHAPES, VARIANTS
from wyfold.runtime.choices import CHUNK_SIZES

if TYPE_CHECKING:
    from wyfold.cli.bench.cases import Case
    from wyfold.cli.bench.runner import Track
    from wyfold.cli.distributed import Ranks

COMMON = ("delta_rule", "gdn", "kda", "ttt")
"""What runs when no operator is named."""

DECODED = "token64"
"""The shape that decoding has by default."""

MODES = ("fwd", "fwdbwd", "graph")
DTYPES = ("float32", "float64", "bfloat16", "float16")
NORMS = ("inside", "outside")


@dataclass(frozen=True)
class Habits:
    """What is usual on a kind of device, unless the command line says otherwise."""

    shapes: str
    dtype: str
    norm: str
    rounds: int


HABITS = {
    "cpu": Habits("1,2048,4,128", "float32", "inside", 9),
    "cuda": Habits("h96,b4t4k", "bfloat16", "outside", 10),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `wyfold bench`."""
    usual = HABITS["cpu"], HABITS["cuda"]
    parser.add_argument("op", nargs="*", metavar="OP", help=f"{', '.join(OPS)} (default: {' '.join(COMMON)})")
    parser.add_argument(
        "--shapes",
        action="append",
        type=_shapes,
        metavar="NAMES|B,T,H[,HV],K[,V]",
        help=f"names with commas ({', '.join(SHAPES)}; mixed and short are packed, short brings dense), or batch, "
        "tokens, heads, value heads, widths: 4 numbers, 5 with HV, 6 with HV and V; repeat for more "
        f"(default: {usual[0].shapes}, on a GPU {usual[1].shapes}; of decode_*, one token of each sequence, {DECODED})",
    )
    parser.add_argument(
        "--gates",
        default="mid",
        help="how fast gdn and kda forget: fast (log decay -2.5 per token on average), mid (-0.8, none under -5), "
        "slow (-0.001), or model: as a layer calls, a projection in the tokens' dtype that is activated inside, and "
        "beta's sigmoid too; several with commas (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        help="of the tensors given to the operators; decays, beta and states are float32 or wider; several with commas "
        f"(default: {usual[0].dtype}, on a GPU {usual[1].dtype})",
    )
    parser.add_argument("--gate-dtype", choices=DTYPES, default="float32", help="of the decays (default: %(default)s)")
    parser.add_argument(
        "--norm",
        choices=NORMS,
        help="where the rows of q and k come to unit length, for all contenders alike "
        f"(default: {usual[0].norm} the operator, on a GPU {usual[1].norm})",
    )
    parser.add_argument(
        "--mode",
        default="fwd,fwdbwd",
        help="fwd, fwdbwd with its backward, graph for times from a CUDA graph as well; with commas (default: "
        "%(default)s)",
    )
    parser.add_argument("--chunk", default="64", help="rows of a chunk for solve and kkt, with commas")
    parser.add_argument(
        "--also", default="", help=f"time ours once more with each of these flags: {', '.join(VARIANTS)}; with commas"
    )
    parser.add_argument(
        "--peers",
        default="all",
        help="names with commas, all, or none; fla:safe_gate is one way of calling it (default: all installed)",
    )
    parser.add_argument(
        "--ranks",
        default="",
        help="where torchrun started several processes: over how many of them a sequence is shared, with commas "
        "(default: 1, 2, 4 .. and all)",
    )
    _add_how(parser)


def _add_how(parser: argparse.ArgumentParser) -> None:
    """Where, how often, and what is kept."""
    usual = HABITS["cpu"], HABITS["cuda"]
    parser.add_argument("--device", type=device, help="PyTorch device (default: a GPU if there is one)")
    add_backend(parser)
    parser.add_argument("--threads", type=whole(1, 1024), help="of torch (default: torch's own choice)")
    parser.add_argument(
        "--rounds",
        type=whole(1, 100_000),
        help=f"each contender's turns; on a GPU a turn is {BURST} calls, over ranks one (default: "
        f"{usual[0].rounds}, on a GPU {usual[1].rounds})",
    )
    parser.add_argument(
        "--cold", action="store_true", help="also the first call of each contender, in a process without caches"
    )
    parser.add_argument("--seed", type=seed_number, default=0, help="of the inputs (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write JSON, and a chart, into this folder")
    parser.add_argument("--label", default="", help="last word of the file names in --out")
    parser.add_argument(
        "--commit", default="", help="that the sources are of, where git cannot tell or finds them changed"
    )
    # How a child of this command is asked for a figure; a JSON request, answered by one line of JSON.
    parser.add_argument("--measure", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Check, time and measure; 0, or 1 if a result of ours was wrong."""
    if not args.measure:
        _read_words(args)
        results.ready(args.out)

    import torch

    from wyfold.cli.bench import memory, timing
    from wyfold.cli.bench.runner import Track, measure, race, said
    from wyfold.cli.distributed import Ranks, launched

    if args.measure:
        print(json.dumps(measure(json.loads(args.measure))))
        return DONE
    if args.threads:
        torch.set_num_threads(args.threads)
    kind = _settled(args)
    if not (cases := list(_cases(args))):
        raise UsageError(
            f"nothing to run: none of {', '.join(args.op)} has --gates {','.join(args.gates)} and "
            f"--mode {','.join(args.mode)}"
        )
    team = Ranks(args.device, None) if launched() else None
    peers = chosen_peers(args.peers, kind, tell=team is None or team.leads)
    track = Track(sum(len(group) for group in cases), args.rounds, kind == "cuda" and "graph" in args.mode, args.cold)
    ops = list(dict.fromkeys(group[0].op for group in cases))
    record = {
        **results.provenance("bench", [*ops, *_given(args)]),
        "threads": torch.get_num_threads(),
        "peers": {
            name: peer.versions or "installed"
            if name in {one.name for one in peers}
            else "not installed or not asked for"
            for name, peer in PEERS.items()
        },
        "method": timing.METHOD_GPU if kind == "cuda" else timing.METHOD_CPU,
        "memory": memory.METHOD_GPU if kind == "cuda" else "see each row",
        "rows": [],
        "ratios": [],
        "lost": [],
    }
    if args.commit and record["modified"] is not False:
        record["commit"], record["modified"] = args.commit, None
    stem = _stem(args, record, cases)
    if team is not None:
        return _over_ranks(args, cases, peers, record, stem, team)
    for group in cases:
        ended = track.done + len(group)
        try:
            for rows in race(group, peers, args.also, track):
                record["rows"] += rows
                _keep(args.out, stem, record, track)
        except RuntimeError as error:  # no memory left, or a device that fell over: the other cases may still run
            results.say(traceback.format_exc())
            failing, *behind = group[track.done - ended :]
            record["lost"].append({"case": failing.title, "error": said(error)})
            record["lost"] += [{"case": case.title, "error": f"not run after {failing.title}"} for case in behind]
            track.done = ended
            _keep(args.out, stem, record, track)
    tables.report(record["rows"], record["ratios"])
    if args.out:
        results.say(f"wrote {args.out / stem}.json")
        tables.chart(args.out / f"{stem}.png", record["rows"])
    for case in record["lost"]:
        print(f"lost: {case['case']}: {case['error']}")
    failed = any(row["failed"] for row in record["rows"] if row["contender"] == OURS)
    return FAILED if failed or record["lost"] else DONE


def _over_ranks(
    args: argparse.Namespace,
    cases: list[list[Case]],
    peers: list[Peer],
    record: dict[str, Any],
    stem: str,
    team: Ranks,
) -> int:
    """The same cases by all processes of a launcher together."""
    from wyfold.cli.bench import scaling
    from wyfold.cli.distributed import leave

    code = scaling.run(args, cases, peers, record, stem, team)
    leave()
    return code


def _keep(folder: Path | None, stem: str, record: dict[str, Any], track: Track) -> None:
    """Write what is measured so far, whatever happens to the rest."""
    record["ratios"] = tables.against_peers(record["rows"])
    record |= {"copy_bytes_per_second": track.copy_rate, "dispatched": dispatched()}
    if folder:
        results.write(folder, f"{stem}.json", record)


# --- what runs -------------------------------------------------------------------------------------------------------


def _read_words(args: argparse.Namespace) -> None:
    """Replace lists of names by what they name, and refuse combinations that cannot run, before torch is imported."""
    args.dtype = _words("dtype", args.dtype or "", DTYPES)
    args.gates, args.mode = _words("gates", args.gates, (*DECAYS, MODEL, NO_GATE)), _words("mode", args.mode, MODES)
    args.also = _words("also", args.also, VARIANTS)
    args.chunk = [int(size) for size in _words("chunk", args.chunk, [str(size) for size in CHUNK_SIZES])]
    args.op = _words("OP", ",".join(args.op) or ",".join(COMMON), OPS)
    if MODEL in args.gates and any(op.startswith("decode_") for op in args.op):
        raise UsageError(
            "--gates model: decoding is timed with decays that are given; leave out decode_gdn, decode_kda"
        )
    check_peers(args.peers)


def _settled(args: argparse.Namespace) -> str:
    """Type of the device; what the command line leaves open gets what is usual there."""
    import torch

    from wyfold.cli.distributed import launched

    args.device = found_device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    kind = str(args.device.type)
    usual = HABITS.get(kind, HABITS["cpu"])
    args.default_shapes = not args.shapes
    args.shapes = [named for some in args.shapes or [_shapes(usual.shapes)] for named in some]
    args.dtype, args.norm = args.dtype or _words("dtype", usual.dtype, DTYPES), args.norm or usual.norm
    args.rounds = args.rounds or usual.rounds
    if args.ranks and not launched():
        start = "torchrun --nproc-per-node N -m wyfold bench ..."
        raise UsageError(f"--ranks {args.ranks}: start the processes by {start}")
    if kind != "cuda" and "graph" in args.mode:
        raise UsageError(f"--mode graph: CUDA graphs are of a GPU, and the device is {args.device}")
    return kind


def _cases(args: argparse.Namespace) -> Iterator[list[Case]]:
    """Cases on the same tensors, the forward and the whole step, group by group.

    Raises:
        UsageError: an operator refuses a shape.
    """
    from wyfold.cli.bench.cases import PINNED, Case, gates_of
    from wyfold.cli.operators import SUBJECTS
    from wyfold.reference.shapes import Shape

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
            possible = [mode for mode in modes if mode == "fwd" or SUBJECTS[OPS[op]].backward]
            if possible:
                if reason := first.refusal():
                    raise UsageError(f"--shapes {name or ','.join(map(str, astuple(shape)))}: {op}: {reason}")
                yield [replace(first, mode=mode) for mode in possible]


def check_peers(words: str) -> None:
    """Refuse a list of peers with a name that no peer has, or a way that the peer lacks.

    Args:
        words: As `chosen_peers` takes them.

    Raises:
        UsageError: such a name or way.
    """
    for word in () if words in ("none", "all") else words.split(","):
        name, _, way = word.partition(":")
        if name not in PEERS:
            raise UsageError(f"--peers: unknown peer {name!r}; there are {', '.join(PEERS)}, all and none")
        if way and way not in PEERS[name].ways:
            raise UsageError(f"--peers: {name} has no way {way!r}; there are {', '.join(PEERS[name].ways) or 'none'}")


def chosen_peers(words: str, kind: str, *, tell: bool = True) -> list[Peer]:
    """Installed peers for a type of device among those asked for; says which ones are not installed.

    Args:
        words: Names with commas, "all" or "none"; behind a name and a colon one way of calling that library.
        kind: Type of the device.
        tell: Whether to say anything: of several processes one does.
    """
    if words == "none":
        return []
    everyone = ",".join(name for name, peer in PEERS.items() if peer.device == kind)
    chosen = []
    for word in (everyone if words == "all" else words).split(","):
        name, _, way = word.partition(":")
        if PEERS[name].installed:
            chosen.append(PEERS[name].narrowed(way))
        elif tell:
            print(f"{name}: not installed; {PEERS[name].install}")
    return chosen


# --- the command line's words ----------------------------------------------------------------------------------------


def _words(option: str, given: str, known: Sequence[str] | dict[str, Any]) -> list[str]:
    words = [word for word in given.split(",") if word]
    for word in words:
        if word not in known:
            raise UsageError(f"{option}: unknown {word!r}; there are {', '.join(known)}")
    return words


def _shapes(word: str) -> list[tuple[str, tuple[int, ...]]]:
    """Names without sizes, or sizes B, T, H, HV, K, V without a name."""
    names = [name for name in word.split(",") if name]
    if names and all(name in SHAPES for name in names):
        if "short" in names and "dense" not in names:
            names.append("dense")
        return [(name, ()) for name in names]
    try:
        sizes = [int(size) for size in word.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) not in (4, 5, 6) or min(sizes) < 1:
        raise argparse.ArgumentTypeError(
            f"must be of {', '.join(SHAPES)}, or B,T,H,K or B,T,H,HV,K or B,T,H,HV,K,V, whole numbers, got {word!r}"
        )
    B, T, H, *rest = sizes
    HV = rest.pop(0) if len(rest) > 1 else H
    return [("", (B, T, H, HV, rest[0], rest[-1]))]


def _given(args: argparse.Namespace) -> list[str]:
    """The options that repeat this run."""
    import torch

    given = [] if args.default_shapes else args.shapes
    shapes = [word for name, sizes in given for word in ("--shapes", name or ",".join(map(str, sizes)))]
    plain = {
        "gates": ",".join(args.gates),
        "dtype": ",".join(args.dtype),
        "gate-dtype": args.gate_dtype,
        "norm": args.norm,
        "mode": ",".join(args.mode),
        "chunk": ",".join(map(str, args.chunk)),
        "also": ",".join(args.also),
        "peers": args.peers,
        "ranks": args.ranks,
        "device": args.device,
        "backend": args.backend or "",
        "rounds": args.rounds,
        "label": args.label,
        "commit": args.commit,
    }
    options = [word for name, value in plain.items() if str(value) for word in (f"--{name}", str(value))]
    cold = ["--cold"] if args.cold else []
    return [*shapes, *options, *cold, "--threads", str(torch.get_num_threads()), "--seed", str(args.seed)]


def _stem(args: argparse.Namespace, record: dict[str, Any], cases: Sequence[Sequence[Case]]) -> str:
    """First part of the names of the files that are written."""
    import torch

    kind = args.device.type
    machine = torch.cuda.get_device_name(args.device).split()[-1].lower() if kind == "cuda" else kind
    sizes = dict.fromkeys(group[0].name or f"T{group[0].shape.T}" for group in cases)
    words = [machine, record["date"][:10], "bench", *args.op, *sizes, args.label]
    return "-".join(word for word in words if word)
