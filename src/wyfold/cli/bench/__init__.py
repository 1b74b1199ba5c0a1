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

Under torchrun the processes share the sequence: delta_rule, gdn, kda and ttt
run over 1, 2, 4 .. ranks, beside peers that have context parallelism.
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
from wyfold.cli.bench.peers import PEERS, Peer, dispatch_messages
from wyfold.cli.catalog import BURST, CHUNKED, DECAYS, MODEL, NO_GATE, OPS, OURS, SHAPES, VARIANTS
from wyfold.runtime.choices import CHUNK_SIZES

if TYPE_CHECKING:
    from wyfold.cli.bench.cases import Case
    from wyfold.cli.bench.runner import BenchSession
    from wyfold.cli.distributed import DistributedWorld

COMMON = ("delta_rule", "gdn", "kda", "ttt")
"""Operators that run if none is named."""

DECODED = "token64"
"""Default shape of decoding."""

MODES = ("fwd", "fwdbwd", "graph")
DTYPES = ("float32", "float64", "bfloat16", "float16")
NORMS = ("inside", "outside")


@dataclass(frozen=True)
class DeviceDefaults:
    """Default options for a type of device.

    Attributes:
        shapes: Of `--shapes`.
        dtype: Of `--dtype`.
        norm: Of `--norm`.
        rounds: Of `--rounds`.
    """

    shapes: str
    dtype: str
    norm: str
    rounds: int


DEVICE_DEFAULTS = {
    "cpu": DeviceDefaults("1,2048,4,128", "float32", "inside", 9),
    "cuda": DeviceDefaults("h96,b4t4k", "bfloat16", "outside", 10),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wyfold bench`."""
    usual = DEVICE_DEFAULTS["cpu"], DEVICE_DEFAULTS["cuda"]
    parser.add_argument("op", nargs="*", metavar="OP", help=f"{', '.join(OPS)} (default: {' '.join(COMMON)})")
    parser.add_argument(
        "--shapes",
        action="append",
        type=_shapes,
        metavar="NAMES|B,T,H[,HV],K[,V]",
        help=f"comma-separated names ({', '.join(SHAPES)}), or one shape as numbers. mixed and short are packed; short "
        "also runs dense. Numbers are batch, tokens, heads and width, or 5 with value heads, or 6 with V as well. May "
        f"be repeated (default: {usual[0].shapes}, on a GPU {usual[1].shapes}; for decode_* {DECODED}, one token per "
        "sequence)",
    )
    parser.add_argument(
        "--gates",
        default="mid",
        help="decays of gdn and kda, comma-separated: fast (log decay -2.5 per token on average), mid (-0.8, at least "
        "-5), slow (-0.001), or model (projections as a layer passes them; the operator applies the gate's activation "
        "and beta's sigmoid) (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        help="dtypes of the operators' inputs, comma-separated; decays, beta and states are float32 or wider "
        f"(default: {usual[0].dtype}, on a GPU {usual[1].dtype})",
    )
    parser.add_argument(
        "--gate-dtype", choices=DTYPES, default="float32", help="dtype of the decays (default: %(default)s)"
    )
    parser.add_argument(
        "--norm",
        choices=NORMS,
        help="where the rows of q and k are normalised, inside or outside the operator, for all implementations "
        f"(default: {usual[0].norm}, on a GPU {usual[1].norm})",
    )
    parser.add_argument(
        "--mode",
        default="fwd,fwdbwd",
        help="comma-separated: fwd, fwdbwd (with backward), graph (also times a CUDA graph) (default: %(default)s)",
    )
    parser.add_argument(
        "--chunk", default="64", help="chunk sizes of solve and kkt, comma-separated (default: %(default)s)"
    )
    parser.add_argument(
        "--also", default="", help=f"also time Wyfold with each of these flags, comma-separated: {', '.join(VARIANTS)}"
    )
    parser.add_argument(
        "--peers",
        default="all",
        help="comma-separated names, all, or none; fla:safe_gate selects a variant of a peer (default: all installed)",
    )
    parser.add_argument(
        "--ranks",
        default="",
        help="under torchrun: numbers of ranks that share a sequence, comma-separated (default: 1, 2, 4 .. and all)",
    )
    _add_how(parser)


def _add_how(parser: argparse.ArgumentParser) -> None:
    """Add the options for device, repetitions and output files."""
    usual = DEVICE_DEFAULTS["cpu"], DEVICE_DEFAULTS["cuda"]
    parser.add_argument("--device", type=device, help="PyTorch device (default: a GPU if there is one)")
    add_backend(parser)
    parser.add_argument("--threads", type=whole(1, 1024), help="CPU threads of torch (default: torch's choice)")
    parser.add_argument(
        "--rounds",
        type=whole(1, 100_000),
        help=f"timing rounds; an implementation makes one call per round, on one GPU {BURST} "
        f"(default: {usual[0].rounds}, on a GPU {usual[1].rounds})",
    )
    parser.add_argument(
        "--cold", action="store_true", help="also time a first call of each implementation, in a process without caches"
    )
    parser.add_argument("--seed", type=seed_number, default=0, help="seed of the inputs (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write JSON and a chart into this folder")
    parser.add_argument("--label", default="", help="last word of the file names in --out")
    parser.add_argument(
        "--commit", default="", help="commit to record if git does not know it, or finds the sources changed"
    )
    # Internal: a child process answers this JSON request with one line of JSON.
    parser.add_argument("--measure", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Check, time and measure. Returns 0, or 1 if a result of Wyfold was wrong or a case failed."""
    if not args.measure:
        _parse_lists(args)
        results.ready(args.out)

    import torch

    from wyfold.cli.bench import memory, timing
    from wyfold.cli.bench.runner import BenchSession, error_line, measure, run_cases
    from wyfold.cli.distributed import DistributedWorld, launched

    if args.measure:
        print(json.dumps(measure(json.loads(args.measure))))
        return DONE
    if args.threads:
        torch.set_num_threads(args.threads)
    kind = _resolve_defaults(args)
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
    ops = list(dict.fromkeys(group[0].op for group in cases))
    record = {
        **results.provenance("bench", [*ops, *_command_words(args)]),
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
        record["commit"] = args.commit
    stem = _stem(args, record, cases)
    if world is not None:
        return _over_ranks(args, cases, peers, record, stem, world)
    for group in cases:
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
    tables.report(record["rows"], record["ratios"])
    if args.out:
        results.say(f"wrote {args.out / stem}.json")
        tables.chart(args.out / f"{stem}.png", record["rows"])
    for case in record["lost"]:
        print(f"not measured: {case['case']}: {case['error']}")
    failed = any(row["failed"] for row in record["rows"] if row["contender"] == OURS)
    return FAILED if failed or record["lost"] else DONE


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


def _write_record(folder: Path | None, stem: str, record: dict[str, Any], session: BenchSession) -> None:
    """Write the record after every case, so that a later failure loses nothing."""
    record["ratios"] = tables.against_peers(record["rows"])
    record |= {"copy_bytes_per_second": session.copy_rate, "dispatched": dispatch_messages()}
    if folder:
        results.write(folder, f"{stem}.json", record)


# --- cases and peers -------------------------------------------------------------------------------------------------


def _parse_lists(args: argparse.Namespace) -> None:
    """Parse the comma-separated options in place and refuse invalid combinations, before torch is imported."""
    args.dtype = _names("dtype", args.dtype or "", DTYPES)
    args.gates, args.mode = _names("gates", args.gates, (*DECAYS, MODEL, NO_GATE)), _names("mode", args.mode, MODES)
    args.also = _names("also", args.also, VARIANTS)
    args.chunk = [int(size) for size in _names("chunk", args.chunk, [str(size) for size in CHUNK_SIZES])]
    args.op = _names("OP", ",".join(args.op) or ",".join(COMMON), OPS)
    if MODEL in args.gates and any(op.startswith("decode_") for op in args.op):
        raise UsageError(
            "--gates model: decoding is timed with decays that are given; leave out decode_gdn, decode_kda"
        )
    check_peers(args.peers)


def _resolve_defaults(args: argparse.Namespace) -> str:
    """Fill options that were left out with the defaults of the device. Returns the type of the device."""
    import torch

    from wyfold.cli.distributed import launched, process_device

    name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.device = found_device(process_device(name))
    kind = str(args.device.type)
    usual = DEVICE_DEFAULTS.get(kind, DEVICE_DEFAULTS["cpu"])
    args.default_shapes = not args.shapes
    args.shapes = [named for some in args.shapes or [_shapes(usual.shapes)] for named in some]
    args.dtype, args.norm = args.dtype or _names("dtype", usual.dtype, DTYPES), args.norm or usual.norm
    args.rounds = args.rounds or usual.rounds
    if args.ranks and not launched():
        start = "torchrun --nproc-per-node N -m wyfold bench ..."
        raise UsageError(f"--ranks {args.ranks}: start the processes by {start}")
    if kind != "cuda" and "graph" in args.mode:
        raise UsageError(f"--mode graph: CUDA graphs need a GPU, but the device is {args.device}")
    return kind


def _cases(args: argparse.Namespace) -> Iterator[list[Case]]:
    """Yield groups of cases. The cases of a group, forward and forward with backward, share their tensors.

    Raises:
        UsageError: an operator refuses a shape.
    """
    from wyfold.cli.bench.cases import PINNED, Case, gates_of
    from wyfold.cli.operators import OPERATOR_SPECS
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
            possible = [mode for mode in modes if mode == "fwd" or OPERATOR_SPECS[OPS[op]].backward]
            if possible:
                if reason := first.refusal():
                    raise UsageError(f"--shapes {name or ','.join(map(str, astuple(shape)))}: {op}: {reason}")
                yield [replace(first, mode=mode) for mode in possible]


def check_peers(words: str) -> None:
    """Refuse a list of peers with an unknown name, or an unknown variant of a known name.

    Args:
        words: As `chosen_peers` takes them.

    Raises:
        UsageError: for such a name or variant.
    """
    for word in () if words in ("none", "all") else words.split(","):
        name, _, variant = word.partition(":")
        if name not in PEERS:
            raise UsageError(f"--peers: unknown peer {name!r}; there are {', '.join(PEERS)}, all and none")
        if variant and variant not in PEERS[name].variants:
            raise UsageError(
                f"--peers: {name} has no variant {variant!r}; there are {', '.join(PEERS[name].variants) or 'none'}"
            )


def chosen_peers(words: str, kind: str, *, verbose: bool = True) -> list[Peer]:
    """Return the requested peers that are installed. Prints the names of those that are not.

    Args:
        words: Comma-separated names, "all" or "none". `name:variant` selects one way to call that library.
        kind: Type of the device.
        verbose: Whether to print missing peers; false on all processes but one.
    """
    if words == "none":
        return []
    everyone = ",".join(name for name, peer in PEERS.items() if peer.device == kind)
    chosen = []
    for word in (everyone if words == "all" else words).split(","):
        name, _, variant = word.partition(":")
        if PEERS[name].installed:
            chosen.append(PEERS[name].with_variant(variant))
        elif verbose:
            print(f"{name}: not installed; {PEERS[name].install}")
    return chosen


# --- parsing options ------------------------------------------------------------------------------------------------


def _names(option: str, given: str, known: Sequence[str] | dict[str, Any]) -> list[str]:
    words = [word for word in given.split(",") if word]
    for word in words:
        if word not in known:
            raise UsageError(f"{option}: unknown {word!r}; there are {', '.join(known)}")
    return words


def _shapes(word: str) -> list[tuple[str, tuple[int, ...]]]:
    """Parse `--shapes` into (name, ()) for named shapes, or ("", (B, T, H, HV, K, V))."""
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


def _command_words(args: argparse.Namespace) -> list[str]:
    """Options of a command that repeats this run."""
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
    """File name without extension of the written files."""
    import torch

    kind = args.device.type
    machine = torch.cuda.get_device_name(args.device).split()[-1].lower() if kind == "cuda" else kind
    sizes = dict.fromkeys(group[0].name or f"T{group[0].shape.T}" for group in cases)
    words = [machine, record["date"][:10], "bench", *args.op, *sizes, args.label]
    return "-".join(word for word in words if word)
