"""Self-checks of kernels on a card that is treated as not verified: seconds, margins, and that they run once.

    PYTHONPATH=src:. python tools/proofs/self_check.py --commit HASH --out DIR

A first process calls every family of operators, forward and backward, with an empty cache folder. Each call must pass
its self-check and run; the row has the seconds of the check and the error nearest its limit. A second process makes the
same calls and must check nothing. Then a capture of an unchecked call must be refused, and `wyfold verify --quick` must
pass. DIR gets self_check.json.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tools.proofs.ledger import Add, Job, Ledger, add_arguments, row_writer
from torch import Tensor

import wyfold
from wyfold import serving
from wyfold.kernels import self_check
from wyfold.reference import inputs
from wyfold.reference.error import Verdict
from wyfold.reference.shapes import Shape
from wyfold.runtime import triton_support

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RULES = ("gated_delta_rule", "kda", "delta_rule")
LONGEST = 60.0
"""Most seconds of one check."""

checks: list[tuple[str, float, list[Verdict]]] = []
"""Checks of this process: call, seconds, verdicts."""


def treat_as_not_verified() -> None:
    """Let no card be verified in this process, and record every check."""
    support_of, verdicts = triton_support.support_of, self_check.verdicts

    def timed(trial: Any, device: torch.device) -> list[Verdict]:
        began = time.monotonic()
        found: list[Verdict] = verdicts(trial, device)
        checks.append((str(trial), time.monotonic() - began, found))
        return found

    triton_support.support_of = lambda device: support_of(device)._replace(verified=False)
    self_check.verdicts = timed


def delta(rule: str, dtype: torch.dtype, sizes: tuple[int, ...], form: str = "chunk", **more: Any) -> Callable:
    grad = more.pop("grad", True)
    drawing = {name: more.pop(name) for name in ("gate", "beta", "state", "sequences") if name in more}
    a = inputs.draw("random", rule, Shape(*sizes), dtype=dtype, **drawing)
    return lambda: getattr(wyfold, f"{form}_{rule}")(**placed(a, grad=grad), **more)


def placed(arguments: dict[str, Any], *, grad: bool = True) -> dict[str, Any]:
    found = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in arguments.items()}
    for x in found.values():
        if grad and isinstance(x, Tensor) and x.is_floating_point():
            x.requires_grad_()
    return found


def served(name: str, rule: str, dtype: torch.dtype, T: int) -> Callable:
    a = placed(inputs.draw("random", rule, Shape(16, T, 4, 8, 128, 128), dtype=dtype), grad=False)
    pool, slots = torch.zeros(64, 8, 128, 128, device="cuda"), torch.arange(64, device="cuda").view(16, 4)
    tokens = [a[x] for x in ("q", "k", "v", "g", "beta")]
    index = slots if name == "verify" else slots[:, 0].contiguous()
    return lambda: getattr(serving, name)(*tokens, pool, index, state_v_first=True)


def delta_calls() -> Iterator[tuple[str, Callable]]:
    cu = torch.tensor([0, 300, 300, 1000])
    usual = (2, 1024, 4, 8, 128, 128)
    for rule in RULES:
        for dtype in (BF16, FP16, FP32):
            yield f"{rule} {dtype}", delta(rule, dtype, usual)
        yield f"{rule} forward", delta(rule, BF16, usual, grad=False)
        yield f"{rule} few programs", delta(rule, BF16, (1, 1024, 1, 1, 128, 128))
        yield f"{rule} many programs", delta(rule, BF16, (32, 256, 4, 8, 128, 128))
        yield f"{rule} 64", delta(rule, BF16, (2, 512, 4, 8, 64, 64))
        yield f"{rule} 256", delta(rule, BF16, (2, 256, 2, 2, 256, 256))
        yield f"{rule} 40 x 96, norm", delta(rule, BF16, (2, 256, 2, 4, 40, 96), use_qk_l2norm_in_kernel=True)
        yield f"{rule} segments", delta(rule, BF16, (1, 32768, 2, 2, 128, 128))
        packed = {"state": "normal", "sequences": 3, "output_final_state": True, "cu_seqlens": cu.cuda()}
        yield f"{rule} packed", delta(rule, BF16, (1, 1000, 4, 8, 128, 128), **packed)
        yield f"{rule} by token", delta(rule, BF16, (2, 64, 4, 8, 128, 128), "fused_recurrent")
    inside = {"gate": "model", "beta": "logits", "use_qk_l2norm_in_kernel": True}
    for rule in RULES[:2]:
        yield f"{rule} inside", delta(rule, BF16, usual, **inside)
    yield "kda bounded", delta("kda", BF16, usual, gate="model bounded", chunk_size=64, safe_gate=True)
    yield "gated_delta_rule beta 2", delta("gated_delta_rule", BF16, usual, beta="logits", allow_neg_eigval=True)
    kept = {"disable_recompute": True, "state_v_first": True, "return_intermediate_states": True}
    yield "delta_rule kept", delta("delta_rule", BF16, usual, output_final_state=True, **kept)


def other_calls() -> Iterator[tuple[str, Callable]]:
    for dtype in (BF16, FP16, FP32):
        for D in (64, 128):
            a = inputs.draw("random", "ttt_linear", Shape(2, 512, 8, 8, D, D), state="normal", dtype=dtype)
            yield f"ttt {dtype} {D}", lambda a=a: wyfold.chunk_ttt_linear(**placed(a), output_final_state=True)
    beta = torch.rand(2, 512, 8, device="cuda")
    ones = torch.ones(128, device="cuda", requires_grad=True)
    taps, bias = torch.randn(1024, 4, device="cuda", requires_grad=True), torch.randn(1024, device="cuda")
    for dtype in (BF16, FP32):
        x = torch.randn(2, 512, 1024, device="cuda", dtype=dtype, requires_grad=True)
        rows = x.view(2, 512, 8, 128)
        k = torch.nn.functional.normalize(rows.detach(), dim=-1)
        yield f"conv {dtype}", lambda x=x: wyfold.causal_conv1d(x, taps, bias, activation="silu")
        yield f"rms_norm {dtype}", lambda rows=rows: wyfold.rms_norm_gated(rows, rows, ones)
        yield f"l2norm {dtype}", lambda rows=rows: wyfold.l2norm(rows)
        yield f"beta {dtype}", lambda x=x: wyfold.fused_beta_sigmoid(x)
        yield f"kkt channel {dtype}", lambda k=k: wyfold.chunk_scaled_dot_kkt(k, beta, -k.abs())
        yield f"kkt head {dtype}", lambda k=k: wyfold.chunk_scaled_dot_kkt(k, beta, -beta)
        A = torch.zeros(1, 512, 8, 64, device="cuda", dtype=dtype)
        yield f"solve {dtype}", lambda A=A: wyfold.solve_tril(A)
    parameter = torch.zeros(8, device="cuda", requires_grad=True)
    yield "gdn gate", lambda: wyfold.fused_gdn_gate(beta, parameter, parameter)
    yield "kda gate", lambda: wyfold.fused_kda_gate(k, parameter, torch.zeros(8, 128, device="cuda"))
    for rule in RULES[:2]:
        for name, T in (("decode", 1), ("verify", 4), ("prefill", 300)):
            yield f"{name} {rule}", served(name, rule, BF16, T)
    cache, one = torch.zeros(8, 1024, 3, device="cuda"), torch.randn(4, 1024, device="cuda")
    slots = torch.arange(4, device="cuda")
    yield "conv1d_update", lambda: serving.conv1d_update(one, cache, taps.detach(), state_indices=slots)
    q = torch.nn.functional.normalize(torch.randn(3, 96, 2, 72, device="cuda", dtype=BF16), dim=-1)
    compiled = torch.compile(lambda q, g: wyfold.chunk_gated_delta_rule(q, q, q, g)[0], fullgraph=True, dynamic=True)
    yield "torch.compile", lambda: compiled(q, -torch.rand(3, 96, 2, device="cuda"))


def run_calls(add: Add, *, again: bool) -> None:
    """Make every call; `again`: with the cache of an earlier process, so that nothing may be checked."""
    treat_as_not_verified()
    calls = (*delta_calls(), *other_calls())
    for name, call in calls:
        before, began = len(checks), time.monotonic()
        try:
            found = call()
            first = found[0] if isinstance(found, tuple) else found
            if first.requires_grad:
                first.float().sum().backward()
            torch.cuda.synchronize()
            error = ""
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"[:1500]
        new, total = checks[before:], time.monotonic() - began
        seconds = sum(spent for _, spent, _ in new)
        if again:
            add("second process", name, not new and not error, checks=len(new), error=error)
        else:
            held = bool(new) and not error and all(one <= LONGEST for _, one, _ in new)
            add(
                "first process", name, held, checks=len(new), check_s=seconds, call_s=total, error=error, **nearest(new)
            )
    if not again:
        refuse_capture(add)


def nearest(new: list[tuple[str, float, list[Verdict]]]) -> dict[str, Any]:
    """The tensor whose error is nearest its limit, and the ratio."""
    ratios = [
        (getattr(v.measured, measure) / getattr(v.limits, measure), f"{v.name} {measure}")
        for _, _, verdicts in new
        for v in verdicts
        for measure in ("rms", "largest", "row")
    ]
    ratio, name = max(ratios, default=(0.0, ""))
    return {"nearest": name, "of_limit": round(ratio, 2)}


def refuse_capture(add: Add) -> None:
    """A call that was not checked is refused in a capture, and the capture can end."""
    q = torch.nn.functional.normalize(torch.randn(1, 96, 2, 56, device="cuda", dtype=BF16), dim=-1)
    said = ""
    with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        try:
            wyfold.chunk_delta_rule(q, q, q)
        except wyfold.UnsupportedError as refused:
            said = str(refused)
    torch.cuda.synchronize()
    add("capture", "chunk_delta_rule, not checked", "while a CUDA graph is captured" in said, said=said[-200:])
    wyfold.chunk_delta_rule(q, q, q)
    torch.cuda.synchronize()
    add("capture", "the same call afterwards", True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, budget=500)
    args = parser.parse_args()
    if args.job:
        run_calls(row_writer(args.rows), again=args.job == "again")
        return 0
    ledger = Ledger("self_check", args)
    if not torch.cuda.is_available():
        ledger.add("all", "needs a GPU", None, not_run="there is no CUDA device")
        return ledger.close()
    with tempfile.TemporaryDirectory() as folder:
        cache = {"WYFOLD_CACHE": folder}
        for job in ("first", "again"):
            command = [sys.executable, __file__, "--job", job, "--out", str(args.out)]
            with ledger.step(job, "all calls", 30) as enough:
                if enough:
                    running = Job(f"{job} process", [command], [cache], limit_s=ledger.left)
                    running.begin(Path(folder))
                    while not running.over():
                        time.sleep(0.2)
                    running.read(Path(folder), ledger)
        with ledger.step("verify", "wyfold verify --quick", 60) as enough:
            if enough:
                began = time.monotonic()
                words = ["verify", "--quick", "--device", "cuda", "--out", str(args.out)]
                command = [sys.executable, "-m", "wyfold", *words]
                done = subprocess.run(command, capture_output=True, text=True, timeout=ledger.left, check=False)
                said = [line for line in done.stdout.splitlines() if "FAIL" in line or " passed" in line]
                ledger.add("verify", "--quick", done.returncode == 0, seconds=time.monotonic() - began, said=said[:20])
    return ledger.close()


if __name__ == "__main__":
    sys.exit(main())
