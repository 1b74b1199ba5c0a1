"""Costs of serving: bandwidth and fla, context, host, generate. One process at a time, on an idle GPU."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path as File
from typing import Any

import torch
from tools.proofs.serving_paths import RULES, Case, conv_paths, paths, ttt_path
from tools.proofs.serving_promises import Promise, at, differentiable
from torch import Tensor

import wyfold
from wyfold import serving
from wyfold.cli.bench import timing
from wyfold.cli.bench.cases import GATES
from wyfold.cli.bench.peers import PEERS
from wyfold.cli.generate import Sampling, generate_batch
from wyfold.models import Decoder, DecoderConfig
from wyfold.reference import error
from wyfold.runtime.cuda_graph import Replay

SHARE, OVER_FLA, APART, HOST = 0.80, 1.3, 0.05, 60.0
"""Least share of a copy's bandwidth, least ratio of fla's time to ours, largest relative difference between two
contexts, and most microseconds.
"""

COLD = 2 * 2**30
"""Bytes of states that a graph reads, many times the cache size, so that none is cached."""

D, HV = 128, 32
ROUNDS, REPLAYS = 9, 3
OF_HOST = ("decode", "decode_packed", "verify", "prefill", "prefill, packed", "prefill, packed, states between")

Figures = dict[str, Any]


# --- bandwidth and fla -----------------------------------------------------------------------------------------------


class Decoding:
    """One token of many sequences from each of several pools in turn, ours and fla's; owns all tensors of the
    graphs.
    """

    def __init__(self, case: Case, batch: int, stored: torch.dtype, pools: int | None = None):
        self.case, self.batch = case, batch
        (H, HV), D = case.heads, case.width
        size = batch * HV * D * D * stored.itemsize
        self.bytes = 2 * size
        count = pools or max(2, -(-COLD // size))
        draw = torch.Generator(case.device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, device=case.device)

        self.pools = [(normal(batch, HV, D, D) / D**0.5).to(stored) for _ in range(count)]
        q, k, v = (normal(batch, 1, heads, D).bfloat16() for heads in (H, H, HV))
        self.call: dict[str, Any] = {"q": q, "k": k, "v": v, "g": None, "beta": normal(batch, 1, HV).sigmoid()}
        if case.rule != "delta_rule":
            self.call["g"] = GATES["mid"](normal(batch, 1, HV) if case.rule != "kda" else normal(batch, 1, HV, D))
        self.call["use_qk_l2norm_in_kernel"] = True
        self.slots = torch.randperm(batch, generator=draw, device=case.device).int()
        self.out = torch.empty_like(v)

    def ours(self, pool: Tensor) -> Tensor:
        return serving.decode(
            **self.call, pool=pool, state_indices=self.slots, state_v_first=self.case.v_first, out=self.out,
            backend=self.case.backend,
        )  # fmt: skip

    def fla(self) -> Callable[[Tensor], object]:
        """fla's call on a pool of states, which returns a new one.

        Raises:
            ImportError, NotImplementedError: fla is missing, or does not support this state layout.
        """
        if self.case.v_first and self.case.rule == "delta_rule":
            raise NotImplementedError("fla has no V-first states of DeltaNet")
        call = PEERS["fla"].adapters[f"fused_recurrent_{self.case.rule}"][0].load().call
        given = {name: x for name, x in self.call.items() if x is not None} | {"output_final_state": True}
        if self.case.v_first:
            given["state_v_first"] = True
        return lambda pool: call(given | {"initial_state": pool})

    def error(self) -> float:
        """RMS error of the output against the same token in float64, from the same states."""
        some = slice(0, min(self.batch, 64))
        pool = self.pools[0][some].clone()
        tokens = {name: x[some] if isinstance(x, Tensor) else x for name, x in self.call.items()}
        wide = {name: x.double() if isinstance(x, Tensor) else x for name, x in tokens.items()}
        how: dict[str, Any] = {"state_v_first": self.case.v_first}
        truth = serving.decode(**wide, pool=pool.clone(), backend="eager", **how)
        return error.rms(serving.decode(**tokens, pool=pool, backend=self.case.backend, **how), truth)


def decodings(device: torch.device, backend: str | None) -> Iterator[tuple[Case, torch.dtype]]:
    for stored in (torch.float32, torch.bfloat16):
        for rule in RULES:
            for v_first in (False, True):
                heads = (HV // 2 if rule == "gated_delta_rule" else HV, HV)
                yield Case(rule, v_first, D, device, backend, heads), stored


def warm(device: torch.device, backend: str | None) -> None:
    """Compile the calls that `bandwidth` and `host` will time, into the cache on disk."""
    for case, stored in decodings(device, backend):
        one = Decoding(case, 2, stored, pools=1)
        one.ours(one.pools[0])
        try:
            one.fla()(one.pools[0])
        except Exception:  # reported where it is timed
            continue
    for call in _calls(device, backend).values():
        call()
    for rule in RULES:
        for form in ("chunk", "fused_recurrent"):
            _backward_us(Case(rule, True, 128, device, backend), form, turns=8)


def bandwidth(device: torch.device, backend: str | None, figures: Figures) -> Iterator[Promise]:
    """Time to move the states' bytes, against a copy of as many bytes and against fla."""
    rows: list[dict[str, Any]] = []
    figures["rows"] = rows

    def timed(case: Case, stored: torch.dtype, batch: int) -> dict[str, Any]:
        held = Decoding(case, batch, stored)
        pools = held.pools
        onto = list(zip(pools, [*pools[1:], pools[0]]))
        row: dict[str, Any] = {
            "rule": case.rule, "layout": "VK" if case.v_first else "KV", "states": str(stored).removeprefix("torch."),
            "batch": batch, "heads": case.heads, "D": case.width, "pools": len(pools), "state bytes": held.bytes,
            "error of o": held.error(),
        }  # fmt: skip
        rows.append(row)
        runs: dict[str, Callable[[], object]] = {
            "ours": _graph(lambda: [held.ours(pool) for pool in pools]),
            "copy, graph": _graph(lambda: [to.copy_(x) for x, to in onto]),
            "copy, stream": lambda: [to.copy_(x) for x, to in onto],
            "copy, kernel": _graph(lambda: [torch.neg(x, out=to) for x, to in onto]),
        }
        try:
            theirs = held.fla()
            runs["fla"] = _graph(lambda: [theirs(pool) for pool in pools])
        except Exception as reason:
            row["no fla"] = f"{type(reason).__name__}: {reason}"[:200]
        ms = {name: x / len(pools) for name, x in _medians(runs).items()}
        copy = min(x for name, x in ms.items() if name.startswith("copy"))
        row |= {"ms": ms, "copy TB/s": held.bytes / copy / 1e9, "share of copy": copy / ms["ours"]}
        if "fla" in ms:
            row["fla over ours"] = ms["fla"] / ms["ours"]
        runs.clear()
        torch.cuda.empty_cache()
        return row

    def fast(case: Case, stored: torch.dtype, batch: int) -> str:
        row = timed(case, stored, batch)
        share, far = row["share of copy"], row["error of o"]
        figures["least share of copy"] = min(x["share of copy"] for x in rows if "share of copy" in x)
        if far > 2**-7:
            return f"{_title(row)}: o is {far:.1e} from float64"
        return "" if share >= SHARE else f"{_title(row)}: {share:.3f} of a copy"

    def faster(number: int) -> str:
        if number >= len(rows) or "fla over ours" not in rows[number]:
            return f"{_title(rows[number])}: {rows[number].get('no fla', '')}" if number < len(rows) else "not timed"
        figures["least of fla over ours"] = min(x["fla over ours"] for x in rows if "fla over ours" in x)
        over = rows[number]["fla over ours"]
        return "" if over >= OVER_FLA else f"{_title(rows[number])}: fla takes {over:.2f} of our time"

    number = 0
    for case, stored in decodings(device, backend):
        for batch in (64, 1024):
            name = f"{case.title}, {str(stored).removeprefix('torch.')}, batch {batch}"
            yield Promise("bandwidth", f"{name}: {SHARE:.0%} of a copy",
                lambda case=case, stored=stored, batch=batch: fast(case, stored, batch))  # fmt: skip
            if stored is torch.float32 and not (case.v_first and case.rule == "delta_rule"):
                yield Promise("fla", f"{name}: {OVER_FLA} times fla", lambda number=number: faster(number))
            number += 1


def _title(row: dict[str, Any]) -> str:
    return f"{row['rule']} {row['layout']} {row['states']} {row['batch']}"


def _graph(run: Callable[[], object]) -> Callable[[], object]:
    """`run` as a CUDA graph. The closure keeps `run`, and with it every tensor that the graph reads."""
    home, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(home)
    with torch.cuda.stream(side):
        run()
    home.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()

    def replay(held: object = (run, kept)) -> object:
        graph.replay()
        return held

    return replay


def _medians(runs: dict[str, Callable[[], object]], rounds: int = ROUNDS, replays: int = REPLAYS) -> dict[str, float]:
    """Median milliseconds of each run, in turn; events surround a few replays of each."""
    names = list(runs)
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        runs[name]()
    torch.cuda.synchronize()
    for turn in timing.round_order(len(names), rounds):
        for which in turn:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(replays):
                runs[names[which]]()
            end.record()
            end.synchronize()
            times[names[which]].append(begin.elapsed_time(end) / replays)
    return {name: statistics.median(x) for name, x in times.items()}


# --- context ---------------------------------------------------------------------------------------------------------


def context(device: torch.device, backend: str | None, figures: Figures, longest: int = 2**20) -> Iterator[Promise]:
    """A decoder of delta rules after 1k and after 1M tokens, each prompt read in pieces into a separate pool."""
    on_card = device.type == "cuda"
    heads, width, layers, piece = (8, 128, 6, 16384) if on_card else (2, 16, 3, 1024)

    def tried() -> str:
        torch.manual_seed(0)
        config = DecoderConfig(
            hidden_size=heads * width, num_layers=layers, pattern="gdn kda delta_net", num_heads=heads, head_dim=width
        )
        model = Decoder(config, backend=backend).to(device, torch.bfloat16).eval()
        slots = torch.zeros(1, dtype=torch.int32, device=device)
        token = torch.randint(256, (1, 1), device=device)
        runs: dict[str, Callable[[], object]] = {}
        held = []
        for length in (1024, longest):
            pools = model.new_pools(1)
            began = time.perf_counter()
            with torch.inference_mode():
                for part in torch.randint(256, (1, length), device=device).split(piece, 1):
                    hidden = model._hidden(part, None, pools.at(slots))
            finite = bool(hidden.isfinite().all())  # waits until the prompt is read
            figures[f"{length} tokens"] = {"read in s": round(time.perf_counter() - began, 2), "pools MiB": pools.nbytes / 2**20}  # fmt: skip # noqa: E501
            if not finite or not all(bool(layer.state.isfinite().all()) for layer in pools.layers):
                return f"after {length} tokens a state is not finite"
            held.append(pools)

            def step(x: Tensor, cache: Any = pools.at(slots)) -> Tensor:  # noqa: B008  a separate pool each
                with torch.inference_mode():
                    return model(x, cache=cache)[0]

            run = Replay(step) if on_card else step
            runs[str(length)] = lambda run=run: run(token)
        if not on_card:
            for run in runs.values():
                run()
            return ""
        for run in runs.values():  # the second call captures
            run(), run()
        ms = _medians(runs, rounds=41, replays=20)
        short, long = ms["1024"], ms[str(longest)]
        figures.update({"ms of a token": ms, "long over short": long / short})
        return "" if abs(long / short - 1) <= APART else f"{short:.4f} ms after 1024, {long:.4f} after {longest}"

    yield Promise("context", f"a token takes as long after {longest} tokens as after 1024, within {APART:.0%}", tried)


# --- host ------------------------------------------------------------------------------------------------------------


def _calls(device: torch.device, backend: str | None) -> dict[str, Callable[[], object]]:
    """The calls of docs/log/host.md, by name: N = 4, B1 T256, H 2, HV 4, K = V = 128."""
    calls: dict[str, Callable[[], object]] = {}
    for rule in RULES:
        case = Case(rule, True, 128, device, backend)
        for path in paths(case, rows=4, tokens=256):
            if path.name in OF_HOST:
                path.refill(0)
                calls[f"{path.name} {rule}"] = path.run
        call = case.tokens(1, 256)
        for form in ("chunk", "fused_recurrent"):
            calls[f"{form} {rule}"] = lambda case=case, form=form, call=call: differentiable(case, form, call)
    for path in conv_paths(device, backend, rows=4, tokens=256):
        path.refill(0)
        calls[path.name] = path.run
    x, weight = torch.randn(1, 256, 1024, device=device).bfloat16(), torch.randn(1024, 4, device=device).bfloat16()
    calls["causal_conv1d"] = lambda: wyfold.causal_conv1d(x, weight, activation="silu", backend=backend)
    path = ttt_path(device, backend, 4)
    path.refill(0)
    calls[path.name] = path.run
    return calls


def host(device: torch.device, backend: str | None, figures: Figures) -> Iterator[Promise]:
    """Host microseconds of a call without a graph, from the third call on."""
    us: dict[str, float] = {}
    figures["us"] = us
    state: dict[str, dict[str, Callable[[], object]]] = {}

    def calls() -> dict[str, Callable[[], object]]:
        if not state:
            state["all"] = _calls(device, backend)
        return state["all"]

    names = list(_names())
    for name in names:

        def measured(name: str = name) -> str:
            us[name] = _host_us(calls()[name])
            return "" if us[name] <= HOST else f"{name}: {us[name]:.0f} us"

        yield Promise("host", f"{name}: at most {HOST:.0f} us", measured)
    for rule in RULES:
        for form in ("chunk", "fused_recurrent"):
            name = f"{form} {rule}, its backward"

            def backward(rule: str = rule, form: str = form, name: str = name) -> str:
                case = Case(rule, True, 128, device, backend)
                forward, us[name] = _backward_us(case, form)
                us[f"{form} {rule}, to be differentiated"] = forward
                return "" if us[name] <= HOST else f"{name}: {us[name]:.0f} us"

            yield Promise("host", f"{name}: at most {HOST:.0f} us", backward)

    def nothing() -> str:
        us["a backward that does nothing, in Python"] = _identity_us(device)
        return ""

    yield Promise("host", "for comparison, what PyTorch takes for a backward that does nothing", nothing)


def _names() -> Iterator[str]:
    """Names of the calls of `_calls`, without making tensors."""
    for rule in RULES:
        yield from (f"{name} {rule}" for name in OF_HOST if (name, rule) != ("decode_packed", "delta_rule"))
        yield from (f"{form} {rule}" for form in ("chunk", "fused_recurrent"))
    yield from ("conv1d_update", "conv1d_update, drafts", "conv1d_update, packed", "conv1d_prefill, packed")
    yield from ("causal_conv1d", "ttt_decode")


def _host_us(run: Callable[[], object], calls: int = 50, turns: int = 21) -> float:
    """Median over several rounds of a few calls, queued on an idle device without synchronisation."""
    for _ in range(4):
        run()
    found = []
    for _ in range(turns):
        _settle()
        began = time.perf_counter_ns()
        for _ in range(calls):
            run()
        found.append((time.perf_counter_ns() - began) / calls / 1e3)
    _settle()
    return statistics.median(found)


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _backward_us(case: Case, form: str, turns: int = 200) -> tuple[float, float]:
    """Medians of the differentiated forward and of its `torch.autograd.grad`, one call at a time."""
    call = case.tokens(1, 256)
    leaves = {name: x.requires_grad_() for name, x in at(call, slice(None)).items() if isinstance(x, Tensor) and x.is_floating_point()}  # fmt: skip # noqa: E501
    call |= leaves
    forwards, backwards = [], []
    fed: Tensor | None = None
    for turn in range(turns):
        _settle()
        began = time.perf_counter_ns()
        o = differentiable(case, form, call)[0]
        between = time.perf_counter_ns()
        if fed is None:
            fed = torch.randn_like(o)
        _settle()
        begin_back = time.perf_counter_ns()
        torch.autograd.grad(o, list(leaves.values()), fed)
        ended = time.perf_counter_ns()
        if turn >= 6:
            forwards.append((between - began) / 1e3)
            backwards.append((ended - begin_back) / 1e3)
    return statistics.median(forwards), statistics.median(backwards)


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:  # type: ignore[override]
        return dx


def _identity_us(device: torch.device, turns: int = 200) -> float:
    x, found = torch.randn(8, device=device, requires_grad=True), []
    fed = torch.randn(8, device=device)
    for _ in range(turns):
        y = _Identity.apply(x)
        _settle()
        began = time.perf_counter_ns()
        torch.autograd.grad(y, x, fed)
        found.append((time.perf_counter_ns() - began) / 1e3)
    return statistics.median(found)


# --- generate --------------------------------------------------------------------------------------------------------


def generate(device: torch.device, backend: str | None, figures: Figures, until: float) -> Iterator[Promise]:
    """`wyfold generate` in a process per measurement, for a batch of prompts and two lengths."""
    on_card = device.type == "cuda"
    count, lengths = (64, (256, 2048)) if on_card else (3, (8, 24))
    heads, width, layers = (8, 128, 6) if on_card else (2, 16, 2)

    def tried() -> str:
        torch.manual_seed(0)
        config = DecoderConfig(
            hidden_size=heads * width, num_layers=layers, pattern="gdn*2 kda", num_heads=heads, head_dim=width
        )
        model = Decoder(config, backend=backend).bfloat16()
        prompts = [f"{n} {'wyfold ' * (3 + n % 40)}".encode() for n in range(count)]
        whole = importlib.util.find_spec("safetensors") is not None
        figures["how"] = "a process each" if whole else "its function: safetensors, for checkpoints, is not installed"
        found = {}
        for length in lengths:
            said = _by_command(model, prompts, length, device, backend, until) if whole else _by_function(model, prompts, length, device)  # fmt: skip # noqa: E501
            found[length] = _figures(said)
            figures[f"{count} prompts, {length} bytes each"] = found[length]
        short, long = (found[length] for length in lengths)
        if "MiB" not in short:
            return "" if not on_card else f"no figure of memory in {short}"
        # Drawn tokens are kept until they are written, as tensors of 512 bytes each, PyTorch's smallest allocation.
        kept = (lengths[1] - lengths[0]) * 512 / 2**20
        figures["MiB more, of which tokens"] = [long["MiB"] - short["MiB"], kept]
        return "" if long["MiB"] - short["MiB"] <= kept + 1 else f"{short['MiB']} MiB, then {long['MiB']}"

    yield Promise("generate", f"memory is constant in length, {lengths[0]} and {lengths[1]} bytes", tried)


def _by_command(
    model: Decoder, prompts: list[bytes], length: int, device: torch.device, backend: str | None, until: float
) -> str:
    """Speed and memory as `wyfold generate` reports them."""
    with tempfile.TemporaryDirectory() as folder:
        model.save(folder)
        lines = File(folder, "prompts")
        lines.write_bytes(b"\n".join(prompts))
        command = [
            sys.executable, "-m", "wyfold", "generate", folder, "--prompts", str(lines), "--max-bytes", str(length),
            "--device", str(device), "--out", str(File(folder, "text")), *(["--backend", backend] if backend else []),
        ]  # fmt: skip
        left = max(1.0, until - time.time())
        done = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
    if done.returncode:
        raise RuntimeError(f"wyfold generate ended with {done.returncode}: {done.stderr[-500:]}")
    return done.stderr


def _by_function(model: Decoder, prompts: list[bytes], length: int, device: torch.device) -> str:
    model.to(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        generate_batch(model, prompts, Sampling(length, 0.8, None, None, 0), io.StringIO())
    return said.getvalue()


def _figures(said: str) -> dict[str, float]:
    """Tokens per second and MiB, parsed from the output of `wyfold generate`."""
    found = {}
    for name, pattern in (("tokens/s", r"([\d,]+) tokens/s"), ("MiB", r"at most ([\d,]+) MiB")):
        if match := re.search(pattern, said):
            found[name] = float(match[1].replace(",", ""))
    return found
