"""Where a differentiated call's host time goes on a card: recalled or not, queued and one at a time, by function.

    PYTHONPATH=src:. python tools/experiments/host_backward.py

HOST-2's figures have an empty function for a launch and no thread of autograd's; on a card both directions of a call
took 0.8 to 1.1 ms of the host where those say 0.2.
"""

import argparse
import cProfile
import pstats
import statistics
import threading
import time

import torch

import wyfold
from wyfold.runtime import recall

TURNS, CALLS = 15, 40


def settled(call) -> float:
    """Microseconds of one call on an idle card."""
    torch.cuda.synchronize()
    began = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - began) / 1e3


def queued(call) -> float:
    """Microseconds of a call among many that nobody waits for."""
    torch.cuda.synchronize()
    began = time.perf_counter_ns()
    for _ in range(CALLS):
        call()
    return (time.perf_counter_ns() - began) / 1e3 / CALLS


def profiled(call, rows: int) -> None:
    """By function; autograd's thread for the card has a profile of its own."""
    theirs = []

    def begin(*_) -> None:
        threading.setprofile(None)
        theirs.append(cProfile.Profile())
        theirs[-1].enable()

    threading.setprofile(begin)
    mine = cProfile.Profile()
    mine.enable()
    for _ in range(CALLS):
        call()
    mine.disable()
    threading.setprofile(None)
    torch.cuda.synchronize()
    for profile in [mine, *theirs]:
        pstats.Stats(profile).sort_stats("tottime").print_stats(rows)


def calls_of(rule: str, T: int):
    shape, gate = (1, T, 4, 128), {"gdn": (1, T, 4), "kda": (1, T, 4, 128)}[rule]
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    g, beta = (-torch.rand(n, device="cuda") for n in (gate, (1, T, 4)))
    leaves = [q, k, v, g.requires_grad_(), beta.neg().requires_grad_()]
    op, fed = {"gdn": wyfold.chunk_gdn, "kda": wyfold.chunk_kda}[rule], torch.randn_like(v)

    def plain() -> None:
        with torch.no_grad():
            op(*leaves)

    def forward():
        return op(*leaves)[0]

    def both() -> None:
        torch.autograd.grad(forward(), leaves, fed)

    return {"no gradient": plain, "to be differentiated": forward, "both directions": both}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rows", type=int, default=12, help="functions of a profile")
    args = parser.parse_args()
    for rule in ("gdn", "kda"):
        recall.forget()
        calls = calls_of(rule, args.tokens)
        for name, call in calls.items():
            for _ in range(6):
                call()
            one = statistics.median(settled(call) for _ in range(TURNS * 4))
            many = statistics.median(queued(call) for _ in range(TURNS))
            print(f"{rule} {name}: {one:.0f} us one at a time, {many:.0f} queued")
        print(rule, "remembered:", [c if isinstance(c, str) else "recalled" for c in recall._courses.values()])
        profiled(calls["both directions"], args.rows)


if __name__ == "__main__":
    main()
