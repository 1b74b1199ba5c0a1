"""Options of `wyfold bench`: parsing, and defaults by device."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wyfold.cli import UsageError
from wyfold.cli.arguments import add_backend, add_threads, device, found_device, seed_number, whole
from wyfold.cli.bench.peer import Peer
from wyfold.cli.bench.peers import PEERS
from wyfold.cli.catalog import BOUNDED, BURST, DECAYS, MODEL, NO_GATE, OPS, SHAPES, SUITES, VARIANTS
from wyfold.runtime.choices import CHUNK_SIZES

COMMON = ("delta_rule", "gdn", "kda", "ttt")
"""Operators that run if none is named."""

DECODED = "token64"
"""Default shape of decoding."""

MODES = ("fwd", "fwdbwd", "graph")
DIRECTIONS = "fwd,fwdbwd"
GATE = "mid"
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
        "--suite",
        choices=SUITES,
        help="the operators, shapes, gates and norms of published models, in both directions, on a GPU from graphs as "
        "well: table (heads of 128 on a full GPU), groups (several value heads for each key head), widths (other than "
        "128), prompts (one prompt on few heads), gates (norm, gate and sigmoid given and inside), rules (GLA, "
        "DeltaProduct, DPLR, RWKV-7, GDN-2, Comba, IPLR, PaTH attention), layers. OP restricts it to these operators",
    )
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
        help="decays, comma-separated: fast (log decay -2.5 per token on average), mid (-0.8, at least "
        "-5), slow (-0.001), or model (projections as a layer passes them; the operator applies the gate's activation "
        "and beta's sigmoid; gdn and kda), or bounded (the same, with kda's bounded activation); rwkv7 has its "
        f"layer's (default: {GATE})",
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
        help=f"comma-separated: fwd, fwdbwd (with backward), graph (also times a CUDA graph) (default: {DIRECTIONS})",
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
    _add_how(parser)


def _add_how(parser: argparse.ArgumentParser) -> None:
    """Add the options for ranks, device, repetitions and output files."""
    usual = DEVICE_DEFAULTS["cpu"], DEVICE_DEFAULTS["cuda"]
    parser.add_argument(
        "--ranks",
        default="",
        help="under torchrun: numbers of ranks that share a sequence, comma-separated (default: 1, 2, 4 .. and all)",
    )
    parser.add_argument("--device", type=device, help="PyTorch device (default: a GPU if there is one)")
    add_backend(parser)
    add_threads(parser)
    parser.add_argument(
        "--rounds",
        type=whole(1, 100_000),
        help=f"timing rounds; an implementation makes one call per round, on one GPU {BURST} "
        f"(default: {usual[0].rounds}, on a GPU {usual[1].rounds})",
    )
    parser.add_argument(
        "--cold", action="store_true", help="also time a first call of each implementation, in a process without caches"
    )
    parser.add_argument(
        "--compile",
        type=whole(1, 256),
        metavar="N",
        help="before any timing, compile the kernels of all cases in N processes at once",
    )
    parser.add_argument(
        "--budget",
        type=whole(1),
        metavar="SECONDS",
        help="start no case later than this (default: no limit)",
    )
    parser.add_argument(
        "--compile-budget",
        type=whole(1),
        metavar="SECONDS",
        help="compile for so long at most (default: half of --budget)",
    )
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="keep the rows of this result of the same command, and run the rest"
    )
    parser.add_argument("--seed", type=seed_number, default=0, help="seed of the inputs (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write JSON and a chart into this folder")
    parser.add_argument("--label", default="", help="last word of the file names in --out")
    parser.add_argument(
        "--commit", default="", help="commit to record if git does not know it, or finds the sources changed"
    )
    # Internal: a child process answers this JSON request with one line of JSON.
    parser.add_argument("--measure", help=argparse.SUPPRESS)


def parse_lists(args: argparse.Namespace) -> None:
    """Parse the comma-separated options in place and refuse invalid combinations, before torch is imported."""
    if args.suite:
        _check_suite(args)
    if args.compile_budget and not args.compile:
        raise UsageError("--compile-budget: must come with --compile")
    if not set(args.label).isdisjoint("/\\\0"):
        raise UsageError(f"--label: must be a part of a file name, got {args.label!r}")
    args.dtype = _names("--dtype", args.dtype or "", DTYPES)
    args.gates = _names("--gates", args.gates or GATE, (*DECAYS, MODEL, BOUNDED, NO_GATE))
    args.mode = _names("--mode", args.mode or DIRECTIONS, MODES)
    args.also = _names("--also", args.also, VARIANTS)
    args.chunk = [int(size) for size in _names("--chunk", args.chunk, [str(size) for size in CHUNK_SIZES])]
    args.of_suite = _names("OP", ",".join(args.op), OPS) if args.suite else []
    args.op = _names("OP", ",".join(args.op) or ("" if args.suite else ",".join(COMMON)), OPS)
    inside = [gate for gate in args.gates if gate in (MODEL, BOUNDED)]
    if inside and any(op.startswith("decode_") for op in args.op):
        raise UsageError(f"--gates {inside[0]}: decoding is timed with decays that are given; leave out decode_*")
    check_peers(args.peers)


def _check_suite(args: argparse.Namespace) -> None:
    """Refuse options that a suite decides.

    Raises:
        UsageError: one of them was given.
    """
    decided = {
        "--shapes": args.shapes,
        "--gates": args.gates,
        "--norm": args.norm,
        "--mode": args.mode,
    }
    if given := [option for option, value in decided.items() if value]:
        raise UsageError(f"--suite {args.suite}: decides {', '.join(decided)}; leave out {', '.join(given)}")


def resolve_defaults(args: argparse.Namespace) -> str:
    """Fill options that were left out with the defaults of the device. Returns the type of the device."""
    import torch

    from wyfold.cli.distributed import launched, process_device

    name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.device = found_device(process_device(name))
    kind = str(args.device.type)
    usual = DEVICE_DEFAULTS.get(kind, DEVICE_DEFAULTS["cpu"])
    args.default_shapes = not args.shapes
    args.shapes = [named for some in args.shapes or [_shapes(usual.shapes)] for named in some]
    args.dtype, args.norm = args.dtype or _names("--dtype", usual.dtype, DTYPES), args.norm or usual.norm
    args.rounds = args.rounds or usual.rounds
    if args.ranks and not launched():
        start = "torchrun --nproc-per-node N -m wyfold bench ..."
        raise UsageError(f"--ranks {args.ranks}: start the processes by {start}")
    alone = {
        "suite": args.suite,
        "compile": args.compile,
        "budget": args.budget,
        "compile-budget": args.compile_budget,
        "resume": args.resume,
    }
    if launched() and (given := [f"--{name}" for name, value in alone.items() if value]):
        raise UsageError(f"{', '.join(given)}: for one process, but torchrun started several")
    if args.suite and kind == "cuda":
        args.mode = list(MODES)
    if kind != "cuda" and "graph" in args.mode:
        raise UsageError(f"--mode graph: CUDA graphs need a GPU, but the device is {args.device}")
    return kind


def command_words(args: argparse.Namespace) -> list[str]:
    """Options of a command that repeats this run."""
    import torch

    given = [] if args.default_shapes or args.suite else args.shapes
    shapes = [word for name, sizes in given for word in ("--shapes", name or ",".join(map(str, sizes)))]
    chosen = {
        "gates": ",".join(args.gates),
        "norm": args.norm,
        "mode": ",".join(args.mode),
        "chunk": ",".join(map(str, args.chunk)),
    }
    plain = ({"suite": args.suite} if args.suite else chosen) | {
        "dtype": ",".join(args.dtype),
        "gate-dtype": args.gate_dtype,
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
