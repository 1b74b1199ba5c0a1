"""Variants of `prepare` in Gluon, alone on one card: bits beside the shipped one, us in CUDA graphs, times its bytes.

    PYTHONPATH=src:. python tools/experiments/prepare_variants.py --commit HASH --out DIR --budget 60
    PYTHONPATH=src:. python tools/experiments/prepare_variants.py --cases "scalar" --names "r128" --against FILE

bfloat16, K = V = 128, chunks of 64, whole chunks, no norm inside, q and k of as many heads as v. A variant is a row of
the kernel's table, or its source with lines added (docs/facts.md, SASS-6), or both. Every variant is compiled first, by
JOBS processes into one cache on disk. `prepare-variants.json` is written after every case; nothing new is begun when
the budget is spent. --against: such a file of another commit, whose fingerprints are compared; the script runs on any
commit since prepare is in Gluon, if PYTHONPATH says so. With --device cpu kernels are compiled for sm_90, and told.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from tools.proofs.serving_times import _graph, _medians

from wyfold.runtime import launch
from wyfold.runtime.launch import Config
from wyfold.runtime.options import DeltaOptions
from wyfold.stages.chunk_grid import eager as chunk_grid
from wyfold.stages.prepare.gluon import channel, scalar

JOBS = 12
ROUNDS, REPLAYS, CALLS = 7, 3, 4
SHAPES = {"64k": (65536, 8), "h96": (8192, 96)}
GATES = ("none", "scalar", "channel")
NAMES = {
    "none": ("shipped", "r128", "ahead", "ahead r128"),
    "scalar": ("shipped", "r128", "ahead", "ahead r128"),
    "channel": ("shipped", "r168", "ahead", "ahead r168"),
}
RESIDENT = 528
"""Programs of a scalar gate on a card at a time, about: as many tiles ahead is a tile asked for."""

ASK = (
    "{{ .reg .pred p; .reg .b32 t; .reg .b64 m; mov.u32 t, %tid.x; setp.eq.u32 p, t, {thread}; "
    "mov.b64 m, {kernel}_param_{place}; cvta.param.u64 m, m; "
    "@p cp.async.bulk.prefetch.tensor.2d.L2.global.tile [m, {{$1, $2}}]; mov.u32 $0, 0; }}"
)
"""One thread asks for a box in the second-level cache. Where a box's map lies is only known by the parameter's name,
as Triton has no such copy: good for an experiment."""

BEFORE = {
    scalar: "    if BOXED:\n        mbarrier.wait(come_k, 0)\n",
    channel: "    if BOXED:\n        mbarrier.wait(come_g, 0)\n",
}
"""Where the first copy is waited for: what is asked for ahead is so behind what is asked for now."""


def asked(module):
    """Lines that ask for the boxes of a later tile: each of q's, of k's, and of the gate's."""
    kernel = "wyfold_prepare_gluon" if module is scalar else "wyfold_prepare_channel_gluon"
    columns = {"q": 64, "k": 64} if module is scalar else {"q": 32, "k": 32, "g": 32}
    lines, thread = [f"    later = token + BT * (({RESIDENT} + HV - 1) // HV)\n"], 64
    for place, (x, width) in enumerate(columns.items()):
        head = "i_hv" if x == "g" else "i_h"
        for column in range(0, 128, width):
            text = ASK.format(thread=thread, kernel=kernel, place=5 * place)
            at = f"({head} * s_{x}[2]).to(gl.int32) + {column}"
            lines.append(f'    gl.inline_asm_elementwise("{text}", "=r,r,r", [{at}, later], gl.int32, False, 1)\n')
            thread = thread + 1 if thread < 127 else 64
    return "".join(lines)


def variant(gate, name, out):
    """The module of a variant, and its row if it has one of its own."""
    module = channel if gate == "channel" else scalar
    registers = re.search(r"r(\d+)", name)
    row = Config(4, 1, {}, int(registers[1])) if registers else None
    if "ahead" not in name:
        return module, row
    text, before = Path(module.__file__).read_text(), BEFORE[module]
    if text.count(before) != 1:
        raise ValueError("copies are waited for otherwise here")
    file = out / f"{module.__name__.rpartition('.')[2]}_ahead_{os.getpid()}.py"
    file.write_text(text.replace(before, asked(module) + before))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    made = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = made
    spec.loader.exec_module(made)
    return made, row


def drawn(gate, shape, device, tokens=None):
    T, H = SHAPES[shape]
    T = tokens or T
    draw = torch.Generator(device).manual_seed(0)
    q, k = (torch.randn(1, T, H, 128, device=device, generator=draw) for _ in range(2))
    q, k = (torch.nn.functional.normalize(x, dim=-1).bfloat16() for x in (q, k))
    beta = torch.rand(1, T, H, device=device, generator=draw)
    channels = {"none": None, "scalar": (), "channel": (128,)}[gate]
    g = None if channels is None else -torch.rand(1, T, H, *channels, device=device, generator=draw) / 16
    return q, k, g, beta.bfloat16(), torch.empty_like(q)


def factors(gate, name, given, out):
    """What a variant leaves."""
    q, k, g, beta, o = given
    module, row = variant(gate, name, out) if isinstance(name, str) else name
    options = DeltaOptions(
        "chunk_kda", False, 1.0, False, "given", 0.0, 0.0, False, 1.0, False, torch.float32, True, 64, 0, True, True,
        "triton",
    )  # fmt: skip
    grid, trying = chunk_grid.chunk_grid(1, q.shape[1], 64, None), contextlib.nullcontext()
    if row is not None:
        form = f"bf16 K128 C64 {gate} {'EF' if gate == 'channel' else 'WF'}"
        trying = launch.trying(launch.architecture(q.device), "prepare.gluon", form, row)
    with trying:
        return module.prepare(
            q, k, g, beta, None, None, grid, options, o, folded=gate == "channel", backward=gate != "channel"
        )


def compile_one(job):
    """Put a variant's kernels into the cache; a refusal is told where it is timed."""
    (gate, name), out = job
    try:
        for shape in SHAPES:
            factors(gate, name, drawn(gate, shape, torch.device("cuda"), 128), out)
        torch.cuda.synchronize()
    except Exception as reason:
        return f"{gate} {name}: {type(reason).__name__}: {reason}"[:300]
    return ""


def fingerprint(found):
    """A number for all bits of what was left, made on the card."""
    total = 0
    for x in found:
        if x is not None:
            words = x.reshape(-1).view(torch.int32)
            for piece in words.split(1 << 24):
                at = torch.arange(piece.numel(), device=x.device) % 65521 + 1
                total = total * 31 + int((piece * at).sum().item())
    return f"{total & (1 << 64) - 1:016x}"


def repeatedly(gate, made, given):
    for _ in range(CALLS):
        found = factors(gate, made, given, None)
    return found


def compared(gate, shape, names, out):
    given = drawn(gate, shape, torch.device("cuda"))
    row, runs, first = {"case": f"{gate} {shape}", "bits": {}, "refused": {}}, {}, None
    for name in names:
        try:
            made = variant(gate, name, out)
            found = [factors(gate, made, given, out) for _ in range(2)]
            prints = [fingerprint(x) for x in found]
            first = first or prints[0]
            row["bits"][name] = {"print": prints[0], "first's": prints[0] == first, "repeats": prints[0] == prints[1]}
            runs[name] = partial(repeatedly, gate, made, given)
        except Exception as reason:
            row["refused"][name] = f"{type(reason).__name__}: {reason}"[:200]
    if not runs:
        return row | {"us": {}, "bytes": 0}
    moved = sum(x.numel() * x.element_size() for x in (*given[:4], *found[0]) if x is not None)
    taken = _medians({name: _graph(run) for name, run in runs.items()}, ROUNDS, REPLAYS)
    return row | {"us": {name: ms / CALLS * 1e3 for name, ms in taken.items()}, "bytes": moved}


def copied():
    """Bytes a second of a copy of half a GiB."""
    x = torch.zeros(1 << 27, device="cuda")
    to = torch.empty_like(x)
    ms = _medians({"": _graph(lambda: [torch.neg(x, out=to) for _ in range(CALLS)])}, ROUNDS, REPLAYS)[""] / CALLS
    return 2 * x.numel() * 4 / ms * 1e3


def told(row, speed, against):
    yield f"{row['case']:13} bytes alone {row['bytes'] / speed * 1e6:6.1f} us"
    before = against.get(row["case"], {})
    for name, us in row["us"].items():
        bits = row["bits"][name]
        words = f"    {name:11} {us:7.1f} us {us * speed / row['bytes'] / 1e6:5.2f} x bytes  {bits['print']}"
        words += "" if bits["repeats"] else "  NO REPEAT"
        words += "" if bits["first's"] else "  OTHER BITS than the first"
        if "shipped" in before:
            words += "  bits of before" if before["shipped"]["print"] == bits["print"] else "  OTHER BITS than before"
        yield words
    for name, reason in row["refused"].items():
        yield f"    {name:11} refused: {reason[:90]}"


def only_compiled(work, out):
    """Without a card: what the assembler makes of every variant for sm_90."""
    from tests.compile import aot

    for gate, names in work.items():
        for name in names:
            seen = []

            def look(kernel, *arguments, seen=seen, **options):
                seen.append(aot.usage(*aot.code(kernel, *arguments, **options)))

            with aot.pretending("sm_90", look):
                factors(gate, name, drawn(gate, "h96", torch.device("cpu"), 128), out)
            u = seen[0]
            print(f"{gate:8} {name:11} {u.registers:3} registers {u.shared:6} shared {u.spilled:4} spilled", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=Path("variants"))
    parser.add_argument("--budget", type=float, default=60.0, help="seconds")
    parser.add_argument("--cases", default="", help="an expression found in 'GATE SHAPE', such as 'scalar|channel 64k'")
    parser.add_argument("--names", default="", help="an expression found in a variant's; the shipped one stays")
    parser.add_argument("--against", type=Path, help="a file of another run, whose fingerprints are compared")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    ends = time.monotonic() + args.budget
    args.out.mkdir(parents=True, exist_ok=True)
    against = {}
    if args.against:
        against = {row["case"]: row["bits"] for row in json.loads(args.against.read_text())["rows"]}
    cases = [(gate, shape) for gate in GATES for shape in SHAPES if re.search(args.cases, f"{gate} {shape}")]
    work = {
        gate: [name for name in NAMES[gate] if name == "shipped" or re.search(args.names, name)]
        for gate in dict.fromkeys(gate for gate, _ in cases)
    }
    if args.device == "cpu":
        only_compiled(work, args.out)
        return 0
    found = {"commit": args.commit, "torch": torch.__version__, "seconds": {}, "not compiled": [], "rows": []}

    def keep():
        (args.out / "prepare-variants.json").write_text(json.dumps(found, indent=1) + "\n")

    began = time.monotonic()
    jobs = [((gate, name), args.out) for gate, names in work.items() for name in names]
    with ProcessPoolExecutor(min(JOBS, os.cpu_count() or 1), mp_context=get_context("spawn")) as workers:
        found["not compiled"] = [text for text in workers.map(compile_one, jobs) if text]
    found["seconds"]["compiling"] = time.monotonic() - began
    keep()
    found["bytes a second"] = copied()
    for gate, shape in cases:
        if time.monotonic() > ends:
            found["cut off"] = f"before {gate} {shape}"
            break
        began = time.monotonic()
        row = compared(gate, shape, work[gate], args.out)
        found["rows"].append(row | {"seconds": time.monotonic() - began})
        keep()
        torch.cuda.empty_cache()
    keep()
    for row in found["rows"]:
        print(*told(row, found["bytes a second"], against), sep="\n")
    print(f"a copy: {found['bytes a second'] / 1e12:.2f} TB/s", found.get("cut off", "whole"), found["seconds"])
    print(*found["not compiled"], sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
