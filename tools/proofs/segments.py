"""Sequences cut into segments, on one GPU: errors, bits, times and launches.

    PYTHONPATH=src:. python tools/proofs/segments.py --commit HASH --out DIR [--only PARTS] [--peers FOLDER]

The parts errors (forced counts against the float64 token loop), long (counts chosen by the rule, against float64),
threshold and bits run in parallel, since they compile. Times and launches run alone afterwards. `--peers FOLDER` is a
folder where fla, FlashQLA and others are installed; they autotune at their first call, which needs a budget of 300.
Without a GPU everything is tiny and on the eager backend, which only tests this file.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from ledger import Add, Job, Ledger, add_arguments, job_command, row_writer, run_parallel
from torch import Tensor

import wyfold
from wyfold import reference
from wyfold.autograd import workspace
from wyfold.cli.bench import timing
from wyfold.cli.bench.cases import MIXED_LENGTHS, PINNED, Case
from wyfold.cli.bench.implementations import AccuracyCheck, BenchImplementation, implementations_of, make_call
from wyfold.cli.bench.peers import PEERS
from wyfold.cli.catalog import OPS
from wyfold.cli.operators import PER_TOKEN, incoming, measured, widened
from wyfold.reference import inputs
from wyfold.reference.error import Verdict, judge
from wyfold.reference.rounded import chunked
from wyfold.reference.shapes import Shape
from wyfold.reference.targets import target
from wyfold.runtime import segment_rule

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TINY = DEVICE.type == "cpu"
C, D = (16, 16) if TINY else (64, 128)
BF16 = torch.bfloat16

COUNTS = (1, 2, 3, 4, 8, 16)
GATED = (("delta_rule", None), ("gated_delta_rule", "model"), ("kda", "model"), ("kda", "model bounded"))
RULES = ("gdn", "kda")
FEW = 64
"""Number of elements, as of a gate parameter's gradient, below which an error varies by chance: only the target
applies.
"""
REPEATS = 20
SAME = 1.02
"""Ratio of times that counts as equal."""

Arguments = dict[str, Any]
Named = dict[str, Tensor]


# --- errors of forced segment counts
# -----------------------------------------------------------------------------------


def errors(add: Add, rule: str, gate: str | None, packing: str) -> None:
    """Forced segment counts of one call: norm, gate and sigmoid inside, grouped heads, states, and all gradients.

    The truth is the token loop in float64, on the GPU because it is long. The yardstick, as in tests/accuracy, is the
    chunk form with the roundings of 16-bit kernels, on the CPU.
    """
    lengths = (0, 1, 9 * C, C, 0, 17 * C + 3, 4 * C - 1, 4 * C, 0)
    shape = Shape(1, sum(lengths) + 7, 2, 4, D, D) if packing == "packed" else Shape(2, 16 * C + 5, 2, 4, D, D)
    N = len(lengths) if packing == "packed" else None
    a: Arguments = inputs.draw("random", rule, shape, gate=gate, beta="logits", state="normal", sequences=N, dtype=BF16)
    a |= {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    if N is not None:
        a["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(lengths)])
    names = ("o", "state")
    fed = incoming({"o": a["v"], "state": a["initial_state"]}, 0)
    op = getattr(wyfold, f"chunk_{rule}")
    on = {name: _moved(x) for name, x in a.items()}
    exact = {name: _moved(x).double() for name, x in fed.items()}
    loop = measured(lambda x: getattr(reference, rule)(**x), widened(on), names, fed=exact)
    truth = {name: x.cpu() for name, x in loop.items()}
    more = {"chunk_size": C} if TINY else {}
    rows = wyfold.explain(op, **on, **more).chunk_size
    yardstick = measured(lambda x: chunked(**x, chunk_size=rows), a, names, fed=fed)
    fed = {name: _moved(x) for name, x in fed.items()}
    for count in COUNTS:
        how = nullcontext() if count == 1 else segment_rule.forced(count)
        with how:
            said = wyfold.explain(op, **on, **more, max_splits=count).segments
            got = measured(lambda x, count=count: op(**x, **more, max_splits=count), on, names, fed=fed)
        verdicts = [_verdict(name, x.cpu(), truth[name], yardstick[name]) for name, x in got.items()]
        add("errors", f"{rule}, {gate} gate, {packing}, {count} segments", **_judged(verdicts), most=said)


def _verdict(name: str, got: Tensor, truth: Tensor, yardstick: Tensor) -> Verdict:
    few = truth.numel() < FEW
    bound, beside = (target(name, BF16), None) if few else (None, yardstick)
    return judge(got, truth, beside, name=name, target=bound, per_token=PER_TOKEN.get(name) == got.ndim)


def _judged(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Fields of a row: whether all passed, every error and every limit."""
    return {
        "held": all(verdict.passed for verdict in verdicts),
        "rms": {verdict.name: verdict.measured.rms for verdict in verdicts},
        "limit": {verdict.name: verdict.limits.rms for verdict in verdicts},
        "over": {verdict.name: verdict.reason for verdict in verdicts if not verdict.passed},
    }


def _moved(x: Any) -> Any:
    return x.to(DEVICE) if isinstance(x, Tensor) else x


# --- segment counts chosen by the rule -------------------------------------------------------------------------------


def case(op: str, shape: Shape | str, gate: str = "mid", mode: str = "fwdbwd", norm: str = "inside") -> Case:
    """A case of `wyfold bench`, of a small shape without a GPU."""
    name = shape if isinstance(shape, str) else ""
    if TINY:
        T = 8 * C if isinstance(shape, str) else min(shape.T, 8 * C)
        return Case(op, Shape(1, T, 2, 2, D, D), gate, "bfloat16", mode, 0, norm=norm)
    sizes = PINNED[shape] if isinstance(shape, str) else shape
    return Case(op, sizes, gate, "bfloat16", mode, 0, name=name, norm=norm, device="cuda")


def ours(one: Case, **options: Any) -> BenchImplementation:
    first: BenchImplementation = implementations_of(one, [])[0]
    return replace(first, call=lambda arguments: one.spec.ours(arguments | options)[0])


def judged_long(add: Add, part: str, one: Case, arguments: Arguments, heads: int) -> None:
    """Cut by the rule and uncut: both against the eager backend in float64, for some of the heads."""
    workspace.WORKSPACE_BYTES = 512 << 20  # for the truth; the default size is tuned for caches
    judge_of = AccuracyCheck(one, arguments, heads=heads)
    for how, options in (("cut", {}), ("whole", {"max_splits": 1})):
        found = judge_of.check_call(ours(one, **options), True, ours=True)
        said = wyfold.explain(getattr(wyfold, OPS[one.op]), **arguments, **options).segments
        row = _judged(found.verdicts)
        row["held"] = found.within_limits
        add(part, f"{one.op}, {one.gate} gate, T {one.shape.T} H {one.shape.H}, {how}", **row, most=said)


def long(add: Add, op: str, gate: str) -> None:
    one = case(op, "t64kh8", gate)
    judged_long(add, "long", one, one.arguments(), 2)


def threshold(add: Add, op: str) -> None:
    """Lengths around the shortest sequence that is cut; a partial last chunk counts as a full one."""
    for T in (
        segment_rule.SHORTEST - C,
        segment_rule.SHORTEST - C + 1,
        segment_rule.SHORTEST,
        segment_rule.SHORTEST + 1,
    ):
        one = case(op, Shape(1, T, 4, 4, 128, 128), "slow")  # fast decays hide the cut
        a = one.arguments()
        cut_here = T > segment_rule.SHORTEST - C
        found, whole = (_forward(one, a, **options) for options in ({}, {"max_splits": 1}))
        same, said = torch.equal(found, whole), wyfold.explain(getattr(wyfold, OPS[op]), **a).segments
        held = None if TINY else (said >= 4 and not same) == cut_here and (said == 1 and same) != cut_here
        add("threshold", f"{op}, T {T}", held, segments=said, bits_of_whole=same)
        judged_long(add, "threshold", one, a, 2)


def _forward(one: Case, a: Arguments, **options: Any) -> Tensor:
    with torch.no_grad():
        return one.spec.ours(a | options)[0]


# --- bits ------------------------------------------------------------------------------------------------------------


def bits(add: Add, rule: str) -> None:
    """All results of a call, gradients included: alone and among neighbours, and with settings that forbid segments."""
    lengths = [C + 3, 9 * C, 0, 5] if TINY else [1500, 65536, 2048, 1, 0, 16384, 1024]
    H, N, T = (2 if TINY else 4), len(lengths), sum(lengths)
    gate = None if rule == "delta_rule" else "-1e-3"
    a: Arguments = inputs.draw(
        "random", rule, Shape(1, T, H, H, D, D), gate=gate, state="normal", sequences=N, dtype=BF16
    )
    a = {name: _moved(x) for name, x in a.items()}
    a |= {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    fed = {name: _moved(x) for name, x in incoming({"o": a["v"], "state": a["initial_state"]}, 0).items()}
    op = getattr(wyfold, f"chunk_{rule}")

    def call(arguments: Arguments, fed: Named = fed, **options: Any) -> Named:
        return measured(lambda x: op(**x, **options), arguments, ("o", "state"), fed=fed)

    borders = [0, *itertools.accumulate(lengths)]
    all_of_them = a | {"cu_seqlens": torch.tensor(borders, device=DEVICE)}
    with segment_rule.forced(4, 2) if TINY else nullcontext():
        packed = call(all_of_them)
        for n, (begin, end) in enumerate(itertools.pairwise(borders)):
            if begin == end:
                continue

            def own(name: str, x: Any, n: int = n, begin: int = begin, end: int = end) -> Any:
                if not isinstance(x, Tensor):
                    return x
                return x[n : n + 1] if name in ("initial_state", "state", "dh0") else x[:, begin:end]

            alone = call({k: own(k, x) for k, x in a.items()}, {k: own(k, x) for k, x in fed.items()})
            other = [k for k, x in alone.items() if not torch.equal(x, own(k, packed[k]))]
            add("bits", f"{rule}, sequence of {end - begin} alone and among {N}", not other, differ=other)
        differ: set[str] = set()
        for _ in range(2 if TINY else REPEATS):
            differ |= {k for k, x in call(all_of_them).items() if not torch.equal(x, packed[k])}
        add("bits", f"{rule}, {REPEATS} repeats", not differ, differ=sorted(differ))
        whole = call(all_of_them, max_splits=1)
        for option in ({"batch_invariant": True}, {"max_splits": 2}, {"max_splits": 3}):
            if TINY and "max_splits" in option:
                continue  # a forced count may be 2
            other = [k for k, x in call(all_of_them, **option).items() if not torch.equal(x, whole[k])]
            add("bits", f"{rule}, {option} and whole", not other, differ=other)
        other = [k for k, x in packed.items() if not torch.equal(x, whole[k])]
        add("bits", f"{rule}, something was cut", bool(other), differ=other)


def rows_of_a_batch(add: Add, rule: str) -> None:
    """Each row of a dense batch against a call with that row alone, without segments and with as many."""
    B, T, H = (2, 9 * C, 2) if TINY else (4, 16384, 4)
    one = replace(case(OPS_SHORT[rule], "b4t16kh4"), shape=Shape(B, T, H, H, D, D))
    a = one.arguments()
    with segment_rule.forced(4) if TINY else nullcontext():
        count = wyfold.explain(getattr(wyfold, f"chunk_{rule}"), **a).segments
        rows = [{k: x[b : b + 1] if isinstance(x, Tensor) else x for k, x in a.items()} for b in range(B)]
        for options in ({"batch_invariant": True}, {"max_splits": count}):
            together = _forward(one, a, **options)
            alone = torch.cat([_forward(one, row, **options) for row in rows])
            add("bits", f"{rule}, rows of B {B} T {T} H {H} alone, {options}", torch.equal(alone, together))


OPS_SHORT = {"gated_delta_rule": "gdn", "kda": "kda"}


# --- times -----------------------------------------------------------------------------------------------------------

TIMED = (  # operator, shape, gate, mode, norm, largest ms of the cut call, largest ratio of cut to uncut
    ("gdn", "t64kh8", "mid", "fwd", "inside", 0.41, 1.0),
    ("gdn", "t64kh8", "mid", "fwd", "outside", 0.41, 1.0),
    ("gdn", "t64kh8", "mid", "fwdbwd", "inside", 2.36, 1.0),
    ("kda", "t64kh8", "mid", "fwd", "inside", 0.50, 1.0),
    ("kda", "t64kh8", "mid", "fwd", "outside", 0.50, 1.0),
    ("kda", "t64kh8", "slow", "fwd", "inside", None, 1.0),
    ("kda", "t64kh8", "slow", "fwd", "outside", None, 1.0),
    ("kda", "t64kh8", "mid", "fwdbwd", "inside", None, 1.0),
    ("gdn", "b4t16kh4", "mid", "fwd", "inside", None, 1.0),
    ("gdn", "b4t16kh4", "mid", "fwdbwd", "inside", None, 1.0),
    ("kda", "b4t16kh4", "mid", "fwd", "inside", None, 1.0),
    ("kda", "b4t16kh4", "mid", "fwdbwd", "inside", None, 1.0),
    ("gdn", "mixed", "mid", "fwd", "inside", None, 1.0),
    ("gdn", "mixed", "mid", "fwdbwd", "inside", None, 1.0),
    ("kda", "mixed", "mid", "fwd", "inside", None, 1.0),
    ("kda", "mixed", "mid", "fwdbwd", "inside", None, 1.0),
    ("gdn", "h96", "mid", "fwd", "inside", None, SAME),
    ("gdn", "h96", "mid", "fwdbwd", "inside", None, SAME),
)
WARMING = 7
"""Processes that compile for the timed rows."""
SLOW_BY_MID = 1.2
FLA_BY_OURS = {"fwd": 4.0, "fwdbwd": 3.0}
"""Least ratio of fla's time to ours for one long sequence: GDN forward, and both rules with the backward."""


def measure(runs: Sequence[Callable[[], object]], rounds: int) -> list[dict[str, float]]:
    """Median milliseconds of runs in turn, on the device and on the host."""
    if TINY:
        found = [statistics.median(times) for times in timing.interleaved(runs, rounds)]
        return [{"device": ms, "host": ms} for ms in found]
    turns = _gpu().interleaved(runs, rounds)
    return [{"device": statistics.median(t.device), "host": statistics.median(t.host)} for t in turns]


def captured(run: Callable[[], object]) -> Callable[[], object]:
    return run if TINY else _gpu().captured(run)


@functools.cache
def _gpu() -> timing.Gpu:
    return timing.Gpu()


def warm(add: Add, first: str) -> None:
    """Compile the calls of every n-th timed row."""
    for op, shape, gate, mode, norm, *_ in TIMED[int(first) :: WARMING]:
        one = case(op, shape, gate, mode, norm)
        a = one.arguments()
        for options in ({}, {"max_splits": 1}):
            make_call(ours(one, **options), one, a)()


def times(ledger: Ledger, words: str) -> None:
    """Cut and uncut, as calls and from CUDA graphs, and peers as calls; medians, in turn."""
    peers = [PEERS[name] for name in words.split(",") if name and PEERS[name].installed]
    rounds, mid = (2, {}) if TINY else (12, {})
    for op, shape, gate, mode, norm, most, by_whole in TIMED:
        title = f"{op} {shape}, {gate} gate, {mode}, norm {norm}"
        with ledger.step("times", title, 3) as go:
            if not go:
                continue
            one = case(op, shape, gate, mode, norm)
            a = one.arguments()
            cut, whole = (make_call(ours(one, **options), one, a) for options in ({}, {"max_splits": 1}))
            runs = {"cut": cut, "whole": whole, "cut, graph": captured(cut), "whole, graph": captured(whole)}
            theirs = implementations_of(one, peers)[1:] if shape == "t64kh8" else []
            failed = {}
            for contender in theirs:
                try:
                    run = make_call(contender, one, a)
                    run()
                    runs[contender.ran] = run
                except Exception as error:
                    failed[contender.ran] = f"{type(error).__name__}: {error}"[:200]
            found = dict(zip(runs, measure(list(runs.values()), rounds)))
            ms = {name: turn["device"] for name, turn in found.items()}
            best = min(ms["cut"], ms["cut, graph"])
            against = ms["cut, graph"] / ms["whole, graph"]
            wanted = {"by whole": (against, by_whole)}
            if most is not None:
                wanted["ms"] = (best, most)
            if (op, gate, mode, shape) == ("kda", "mid", "fwd", "t64kh8"):
                mid[norm] = best
            if (op, gate, mode, shape) == ("kda", "slow", "fwd", "t64kh8") and norm in mid:
                wanted["by mid gates"] = (best / mid[norm], SLOW_BY_MID)
            fla = [ms[name] for name in ms if name.startswith("fla.")]
            if fla and (op, mode) != ("kda", "fwd"):
                wanted["ours by fla"] = (best / min(fla), 1 / FLA_BY_OURS[mode])
            held = None if TINY else all(got <= limit for got, limit in wanted.values())
            host = {name: turn["host"] for name, turn in found.items() if name in ("cut", "whole")}
            limits = {name: f"{got:.3f} <= {limit:.3f}" for name, (got, limit) in wanted.items()}
            ledger.add("times", title, held, ms=ms, host_ms=host, wanted=limits, failed=failed)
            if shape == "mixed" and not TINY:
                neighbours(ledger, one, a, ms["cut, graph"])
        if not TINY:
            torch.cuda.empty_cache()


def neighbours(ledger: Ledger, one: Case, a: Arguments, together: float) -> None:
    """The long sequence of the mixed packing alone, and the short ones without it: their slowdown by each other."""
    alone: Case = replace(one, name="")
    T = MIXED_LENGTHS[0]

    def part(tokens: slice, more: Arguments) -> Arguments:
        kept = {k: x[:, tokens].contiguous() if isinstance(x, Tensor) else x for k, x in a.items() if k != "cu_seqlens"}
        return kept | more

    long_one = part(slice(None, T), {})
    short = part(slice(T, None), {"cu_seqlens": a["cu_seqlens"][1:] - T})
    runs = {
        "long alone": make_call(ours(alone), alone, long_one),
        "short alone": make_call(ours(alone), alone, short),
        "short alone, whole": make_call(ours(alone, max_splits=1), alone, short),
    }
    found = measure([captured(run) for run in runs.values()], 12)
    ms = {name: turn["device"] for name, turn in zip(runs, found)} | {"together": together}
    wanted = {
        "short ones cut by whole": (ms["short alone"] / ms["short alone, whole"], SAME),
        "together by one after another": (together / (ms["long alone"] + ms["short alone"]), SAME),
    }
    limits = {name: f"{got:.3f} <= {limit:.3f}" for name, (got, limit) in wanted.items()}
    held = all(got <= limit for got, limit in wanted.values())
    ledger.add("times", f"{one.op} mixed, {one.mode}, neighbours", held, ms=ms, wanted=limits)


def launches(ledger: Ledger) -> None:
    """Microseconds of each launch of one long sequence."""
    for op, mode in itertools.product(RULES, ("fwd", "fwdbwd")):
        for how, options in (("cut", {}), ("whole", {"max_splits": 1})):
            with ledger.step("launches", f"{op} {mode} {how}", 2) as go:
                if not go or TINY:
                    continue
                one = case(op, "t64kh8", mode=mode)
                run = make_call(ours(one, **options), one, one.arguments())
                found = _gpu().kernels(run)
                us = {f"{kernel.count:.0f} x {kernel.name[:60]}": 1e3 * kernel.milliseconds for kernel in found}
                ledger.add("launches", f"{op} {mode} {how}", None, us=us, sum_us=sum(us.values()))


# --- main ------------------------------------------------------------------------------------------------------------


JOBS: dict[str, Callable[..., None]] = {
    "errors": errors,
    "long": long,
    "threshold": threshold,
    "bits": bits,
    "rows": rows_of_a_batch,
    "warm": warm,
}
PARTS = {"rows": "bits", "warm": "times"}
"""Jobs that belong to a part of another name."""


def jobs(ledger: Ledger) -> list[Job]:
    """The parallel jobs, longest compilations first."""
    found = [f"long:{op}:{gate}" for op in reversed(RULES) for gate in ("mid", "slow")]
    found += [f"errors:{rule}:{gate}:{packing}" for rule, gate in reversed(GATED) for packing in ("packed", "dense")]
    found += [f"{part}:{rule}" for rule in ("kda", "gated_delta_rule") for part in ("bits", "rows")]
    found += ["bits:delta_rule", *(f"threshold:{op}" for op in RULES)]
    found += [f"warm:{index}" for index in range(WARMING)]
    wanted = [name for name in found if ledger.wants(PARTS.get(name.partition(":")[0], name.partition(":")[0]))]
    return [Job(name, [job_command(__file__, name)]) for name in wanted]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_arguments(parser, budget=110)
    parser.add_argument("--peers", default="", help="folder with other libraries, put in front of Python's path")
    parser.add_argument("--against", default="fla,flash-qla,cudnn", help="which of them (default: %(default)s)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if args.job:
        name, *words = args.job.split(":")
        JOBS[name](row_writer(args.rows), *(None if word == "None" else word for word in words))
        return 0
    ledger = Ledger("segments", args)
    run_parallel(ledger, jobs(ledger), args.at_once)
    if args.peers:
        sys.path.insert(0, args.peers)
    if ledger.wants("times"):
        times(ledger, args.against if args.peers else "")
    if ledger.wants("launches"):
        launches(ledger)
    return ledger.close()


if __name__ == "__main__":
    sys.exit(main())
