"""Models of transformers on a GPU, patched and stock: `python tools/proofs/stack.py --out DIR [--commit HASH]`.

The models are Qwen3-Next, Qwen3.5, OLMo-Hybrid (K != V) and Kimi-Linear with random weights, tiny and with their
published widths (two delta-rule layers and an attention layer). Checks of each:

- bfloat16: logits and gradients of both against the stock model in float64, over several seeds, as relative RMS. The
  patched model's error may be 1.5 times that of the stock model, since the two round at different places.
- Greedy tokens of both. Where they differ, the two picks must be as close in float64 as the stock model's error.
- Documents packed by position against each document alone; the error of stock code on the same row is reported.
- Tiny in float32 as well: patched within 1e-5 of stock, the same tokens, packed within 1e-6 of separate.

These checks run in parallel, one process each, since they compile. Afterwards, alone on the GPU: time and memory of a
training step of both, and of the two fallback functions at published sizes (GDN T8192 H96 forward and backward, KDA
T8192 H32 forward). Every finding is in DIR/stack.json at once; a table comes last, and the exit status is 1 if a check
failed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import wyfold
from wyfold.integrations.transformers import patch

FAMILIES = ("qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear")
SIZES = ("tiny", "published")
CODES = {"patched": patch, "stock": lambda model, **_: contextlib.nullcontext()}

PATCHED_ERROR = 1.5  # as in tests/integrations/test_transformers.py
STOCK, SEPARATE = 1e-5, 1e-6  # float32: the promises of the test suite on a CPU
SEEDS = (0, 1, 2)
NEW_TOKENS = 24

Row = dict[str, Any]


# --- models ----------------------------------------------------------------------------------------------------------


def made(family: str, size: str, device: str, seed: int = 0) -> Any:
    """A float32 model of delta rule, attention, delta rule, whose states decay within tens of tokens.

    Every token is routed to every expert: a choice among experts is a discontinuity, which no error measure tolerates.
    """
    torch.manual_seed(seed)
    with torch.device(device):
        model = _made(family, *(_tiny(family) if size == "tiny" else _published(family)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-4, -1)
    return model.eval()


SHARED = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "max_position_embeddings": 1 << 14,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _tiny(family: str) -> tuple[Row, Row]:
    """Sizes of the model, and of its delta rule."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.05}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "moe_intermediate_size": 16, "experts": 2}
    if family == "kimi_linear":
        latent = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
        return sizes | latent, {"linear_head_dim": 16, "linear_num_heads": 2}
    heads, width = (2, 32) if family == "olmo_hybrid" else (4, 16)
    return sizes | {"head_dim": 16}, _gdn(2, heads, 16, width)


def _published(family: str) -> tuple[Row, Row]:
    """Widths of the published checkpoints; vocabulary and number of experts are smaller."""
    sizes = {"vocab_size": 4096, "hidden_size": 2048, "intermediate_size": 4096, "initializer_range": 0.02}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 2, "moe_intermediate_size": 512, "experts": 4}
    if family == "kimi_linear":
        latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
        sizes |= {"hidden_size": 2304, "num_attention_heads": 32, "num_key_value_heads": 32}
        return sizes | latent, {"linear_head_dim": 128, "linear_num_heads": 32}
    if family == "olmo_hybrid":
        sizes |= {"hidden_size": 3840, "num_attention_heads": 30, "num_key_value_heads": 30}
        return sizes | {"head_dim": 128}, _gdn(30, 30, 96, 192)
    return sizes | {"head_dim": 256}, _gdn(16, 32, 128, 128)


def _gdn(key_heads: int, value_heads: int, key: int, value: int) -> Row:
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": key,
        "linear_value_head_dim": value,
    }


def _made(family: str, sizes: Row, rule: Row) -> Any:
    experts, inner = sizes.pop("experts"), sizes.pop("moe_intermediate_size")
    sizes = {**SHARED, **sizes, **rule}
    mixture = {"num_experts_per_tok": experts, "moe_intermediate_size": inner}
    if family == "qwen3_next":
        mixture |= {"num_experts": experts, "shared_expert_intermediate_size": inner}
        config = transformers.Qwen3NextConfig(**sizes, **mixture, experts_implementation="eager")
        return transformers.Qwen3NextForCausalLM(config)
    if family == "qwen3_5":
        return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**sizes))
    if family == "olmo_hybrid":
        return transformers.OlmoHybridForCausalLM(transformers.OlmoHybridConfig(**sizes))
    mixture |= {"num_local_experts": experts, "experts_implementation": "eager"}
    return transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**sizes, **mixture))


# --- measurements of a model
# -------------------------------------------------------------------------------------------


def logits_and_gradients(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """Logits, and every gradient of the next-token loss, in float64."""
    model.zero_grad()
    out = model(ids, labels=ids, use_cache=False)
    out.loss.backward()
    found = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"logits": out.logits.detach().double(), **found}


def relative_errors(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Relative RMS error of the logits, of all gradients together, and of each gradient."""
    squares = {name: float((found[name] - truth[name]).square().sum()) for name in truth}
    whole = {name: float(x.square().sum()) for name, x in truth.items()}
    gradients = [name for name in truth if name != "logits"]
    each = {name: (squares[name] / max(whole[name], 1e-300)) ** 0.5 for name in truth}
    together = sum(squares[name] for name in gradients) / sum(whole[name] for name in gradients)
    return {**each, "gradients": together**0.5}


def max_difference(a: Tensor, b: Tensor) -> float:
    """Largest difference relative to the largest element of b."""
    return float((a - b).abs().max() / b.abs().max())


def documents(tokens: int) -> list[int]:
    """Uneven lengths with the sum `tokens`, one of them a single token."""
    first = [tokens // 20 or 1, 1, tokens // 2 + 1]
    return [*first, tokens - sum(first)]


def positions(lengths: list[int], device: str) -> Tensor:
    return torch.cat([torch.arange(n, device=device) for n in lengths])[None]


@torch.no_grad()
def apart(model: Any, ids: Tensor, lengths: list[int]) -> Tensor:
    """Logits of the documents of a row, each run alone."""
    return torch.cat([model(part, use_cache=False).logits for part in ids.split(lengths, 1)], 1).double()


@torch.no_grad()
def together(model: Any, ids: Tensor, lengths: list[int]) -> Tensor:
    packed = model(ids, position_ids=positions(lengths, str(ids.device)), use_cache=False)
    return packed.logits.double()


def greedy(model: Any, ids: Tensor) -> Tensor:
    made: Tensor = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    return made[:, ids.shape[1] :]


# --- checks ----------------------------------------------------------------------------------------------------------


def in_single(family: str, device: str, tokens: int) -> Row:
    """Tiny, float32: the promises of the test suite, on this device."""
    model = made(family, "tiny", device)
    ids = torch.randint(64, (1, tokens), device=device, generator=torch.Generator(device).manual_seed(1))
    lengths = documents(tokens)
    stock, tokens_stock = logits_and_gradients(model, ids), greedy(model, ids[:, :9])
    leak = max_difference(together(model, ids, lengths), apart(model, ids, lengths))
    with patch(model, norm=True) as patched:
        ours, tokens_ours = logits_and_gradients(model, ids), greedy(model, ids[:, :9])
        packed = max_difference(together(model, ids, lengths), apart(model, ids, lengths))
    floor = max(float(g.abs().max()) for name, g in stock.items() if name != "logits") / 1000
    gradients = {
        name: float((ours[name] - g).abs().max()) / max(floor, float(g.abs().max()))
        for name, g in stock.items()
        if name != "logits"
    }
    worst = max(gradients, key=lambda name: gradients[name])
    found: Row = {
        "logits": max_difference(ours["logits"], stock["logits"]),
        "gradients": gradients[worst],
        "worst_gradient": worst,
        "greedy_same": bool(torch.equal(tokens_ours, tokens_stock)),
        "packed": packed,
        "stock_packed": leak,
        "left_to_stock": patched.report.stock,
    }
    found["failed"] = [name for name in ("logits", "gradients") if found[name] > STOCK]
    found["failed"] += ["packed"] * (packed > SEPARATE) + ["greedy"] * (not found["greedy_same"])
    return found


def in_sixteen(family: str, size: str, device: str, tokens: int) -> Row:
    """bfloat16: patched and stock against float64."""
    sums = {code: {"logits": 0.0, "gradients": 0.0} for code in CODES}
    ratios: dict[str, float] = {}
    lengths = documents(tokens)
    for seed in SEEDS:
        wide = made(family, size, device, seed)
        low = copy.deepcopy(wide).bfloat16()
        wide.load_state_dict(low.state_dict())  # the same model: rounding its parameters counts as no error
        wide.double()
        ids = torch.randint(
            low.config.vocab_size, (1, tokens), device=device, generator=torch.Generator(device).manual_seed(seed)
        )
        truth = logits_and_gradients(wide, ids)
        errors = {}
        for code, call in CODES.items():
            with call(low, norm=True) as patched:
                errors[code] = relative_errors(logits_and_gradients(low, ids), truth)
            for name, total in sums[code].items():
                sums[code][name] = total + errors[code][name] ** 2 / len(SEEDS)
        for name in truth:
            ratios[name] = max(ratios.get(name, 0.0), errors["patched"][name] / max(errors["stock"][name], 1e-12))
        del truth
    worst = max(ratios, key=lambda name: ratios[name])
    found: Row = {code: {name: total**0.5 for name, total in sums[code].items()} for code in CODES}
    found["ratio"] = {name: found["patched"][name] / found["stock"][name] for name in ("logits", "gradients")}
    found["worst_single_ratio"] = {"of": worst, "ratio": ratios[worst]}
    found["greedy"] = picks(low, wide, ids[:, : min(tokens, 64)])
    found["packed"] = packing(low, wide, ids, lengths)
    with patch(low, norm=True) as patched:
        logits_and_gradients(low, ids)
    found["left_to_stock"] = patched.report.stock
    found["failed"] = [name for name, ratio in found["ratio"].items() if ratio > PATCHED_ERROR]
    found["failed"] += ["greedy"] * (not found["greedy"]["explained"])
    packed = found["packed"]
    found["failed"] += ["packed"] * (packed["patched"] > PATCHED_ERROR * packed["alone"] or packed["notices"] > 0)
    found["failed"] += ["left to stock"] * bool(found["left_to_stock"])
    return found


@torch.no_grad()
def picks(low: Any, wide: Any, prompt: Tensor) -> Row:
    """Greedy tokens of both. Where they differ, the picks must be as close in float64 as the stock model's error."""
    stock = greedy(low, prompt)
    with patch(low, norm=True):
        ours = greedy(low, prompt)
    differ = (ours != stock)[0].nonzero()
    if not len(differ):
        return {"same": NEW_TOKENS, "explained": True}
    place = int(differ[0])
    before = torch.cat([prompt, stock[:, :place]], 1)
    exact = wide(before, use_cache=False).logits[0, -1]
    error = float((low(before, use_cache=False).logits[0, -1].double() - exact).abs().max())
    gap = float((exact[stock[0, place]] - exact[ours[0, place]]).abs())
    # Each of the two logits may have the error.
    return {"same": place, "gap": gap, "stock_error": error, "explained": gap <= 2 * error}


def packing(low: Any, wide: Any, ids: Tensor, lengths: list[int]) -> Row:
    """Documents in one row against each alone in float64, and the influence of the first one's tokens on the others."""
    truth = apart(wide, ids, lengths)

    def error(logits: Tensor) -> float:
        return float((logits - truth).norm() / truth.norm())

    found = {"alone": error(apart(low, ids, lengths)), "stock": error(together(low, ids, lengths))}
    with patch(low, norm=True):
        packed = together(low, ids, lengths)
        other = ids.clone()
        other[:, : lengths[0]] = (ids[:, : lengths[0]] + 1) % low.config.vocab_size
        changed = together(low, other, lengths)
    found["patched"] = error(packed)
    found["notices"] = float((packed - changed)[:, lengths[0] :].abs().max())
    return found


# --- time and memory, alone on the card ------------------------------------------------------------------------------


def timed(work: dict[str, Callable[[], Any]], device: str, rounds: int, until: float) -> dict[str, Row]:
    """Median milliseconds of functions in turn, and their peak memory above the memory in use before."""
    found: dict[str, Row] = {}
    taken: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(1 + rounds):
        for name, call in work.items():
            if turn > 1 and time.monotonic() > until:
                continue
            before = _reset_peak(device)
            begun = time.perf_counter()
            call()
            peak = _peak(device)
            milliseconds = 1e3 * (time.perf_counter() - begun)
            if turn:  # the first one compiles
                taken[name].append(milliseconds)
                found[name] = {"gib": (peak - before) / 2**30}
    return {name: {**row, "ms": statistics.median(taken[name])} for name, row in found.items()}


def _reset_peak(device: str) -> int:
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(device: str) -> int:
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def training_step(family: str, device: str, tokens: int, until: float) -> Row:
    model = made(family, "published" if device == "cuda" else "tiny", device).bfloat16()
    ids = torch.randint(model.config.vocab_size, (1, tokens), device=device)

    def step(call: Callable[..., Any]) -> None:
        with call(model, norm=True):
            model(ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    return timed({code: lambda call=call: step(call) for code, call in CODES.items()}, device, 5, until)


def fallbacks(device: str, until: float) -> Row:
    """The stock functions and the operators that replace them: GDN with its backward, KDA without."""
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    card = device == "cuda"
    tokens, width = (8192, 128) if card else (128, 16)
    found: Row = {}

    def drawn(heads: int, channels: bool) -> dict[str, Tensor]:
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(1, tokens, heads, *shape, device=device, generator=generator)

        gate = torch.nn.functional.logsigmoid(normal(*([width] if channels else [])) + 4)
        x = {name: normal(width).bfloat16() for name in ("query", "key", "value")}
        return {**x, "g": gate, "beta": normal().sigmoid().bfloat16()}

    def both_ways(rule: Callable[..., Any], x: dict[str, Tensor], incoming: Tensor) -> None:
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in x.items()}
        o, _ = rule(*(leaves[n] for n in ("query", "key", "value")), g=leaves["g"], beta=leaves["beta"], **L2)
        torch.autograd.grad(o, list(leaves.values()), incoming)

    @torch.no_grad()
    def forward(rule: Callable[..., Any], x: dict[str, Tensor]) -> None:
        rule(*(x[n] for n in ("query", "key", "value")), g=x["g"], beta=x["beta"], **L2)

    heads = (96, 32) if card else (2, 2)
    x = drawn(heads[0], channels=False)
    incoming = torch.randn_like(x["value"])
    rules = {"patched": wyfold.chunk_gated_delta_rule, "stock": torch_chunk_gated_delta_rule}
    work = {code: lambda rule=rule: both_ways(rule, x, incoming) for code, rule in rules.items()}
    found[f"GDN T{tokens} H{heads[0]} D{width} forward + backward"] = timed(work, device, 5, until)
    y = drawn(heads[1], channels=True)
    rules = {"patched": wyfold.chunk_kda, "stock": chunk_kimi_delta_attention}
    work = {code: lambda rule=rule: forward(rule, y) for code, rule in rules.items()}
    found[f"KDA T{tokens} H{heads[1]} D{width} forward"] = timed(work, device, 5, until)
    return found


L2 = {"use_qk_l2norm_in_kernel": True}


# --- main ------------------------------------------------------------------------------------------------------------


def check(family: str, size: str, device: str) -> Row:
    """The check of one process."""
    card = device == "cuda"
    found: Row = {}
    if size == "tiny":
        found["float32"] = in_single(family, device, 200 if card else 70)
    found["bfloat16"] = in_sixteen(family, size, device, 200 if size == "tiny" else 1024)
    return found


def run_parallel(args: argparse.Namespace, keep: Callable[[str, Row], None], until: float) -> None:
    """Every check in a separate process, with as many in parallel as requested."""
    waiting = [(family, size) for size in reversed(args.sizes) for family in args.families]
    running: dict[str, subprocess.Popen[str]] = {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    while waiting or running:
        while waiting and len(running) < args.workers:
            family, size = waiting.pop(0)
            words = [sys.executable, __file__, "--out", str(args.out), "--device", args.device]
            running[f"{family} {size}"] = subprocess.Popen(
                [*words, "--check", family, size],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
        for name, process in list(running.items()):
            late = time.monotonic() > until
            if process.poll() is None and not late:
                continue
            if process.poll() is None:
                process.kill()
            said, complained = process.communicate()
            del running[name]
            lines = said.strip().splitlines()
            good = process.returncode == 0 and lines
            reason = f"cut off by the budget: {complained[-300:]}" if late else complained[-1500:]
            keep(name, json.loads(lines[-1]) if good else {"refused": reason})
        if time.monotonic() > until:
            for family, size in waiting:
                keep(f"{family} {size}", {"refused": "not begun within the budget"})
            waiting.clear()
        time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of stack.json")
    parser.add_argument("--commit", help="what is being run, for the record")
    parser.add_argument("--budget", type=float, default=120, help="seconds (default: %(default)s)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--workers", type=int, default=8, help="checks at a time (default: %(default)s)")
    parser.add_argument("--check", nargs=2, help=argparse.SUPPRESS)  # internal: run one check, in a child process
    args = parser.parse_args()
    begun = time.monotonic()
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    torch.backends.cudnn.allow_tf32 = False
    if args.check:
        print(json.dumps(check(*args.check, args.device)))
        return 0

    args.out.mkdir(parents=True, exist_ok=True)
    found: Row = {
        "commit": args.commit,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "checks": {},
        "training_step": {},
        "fallbacks": {},
    }

    def keep(name: str, row: Row, kind: str = "checks") -> None:
        found[kind][name] = row
        found["seconds"] = round(time.monotonic() - begun, 1)
        (args.out / "stack.json").write_text(json.dumps(found, indent=1))
        print(f"{found['seconds']:6.1f} s  {name}: {_failed(row) or 'ok'}", flush=True)

    # A quarter of the budget is left for the timed part.
    run_parallel(args, keep, begun + 0.72 * args.budget)
    until = begun + 0.9 * args.budget
    tokens = 2048 if args.device == "cuda" else 96
    try:
        for name, row in fallbacks(args.device, until).items():
            keep(name, row, "fallbacks")
        for family in args.families:
            if time.monotonic() < until:
                keep(family, training_step(family, args.device, tokens, until), "training_step")
    except torch.OutOfMemoryError as error:  # the results so far are still reported
        keep("memory", {"refused": str(error)[:300]}, "training_step")
    show(found, tokens)
    return int(any(_failed(row) for kind in ("checks", "training_step") for row in found[kind].values()))


def _failed(row: Row) -> list[str]:
    failed = [f"{name}, {part}" for part in ("float32", "bfloat16") for name in row.get(part, {}).get("failed", [])]
    return failed + ([row["refused"]] if "refused" in row else [])


def show(found: Row, tokens: int) -> None:
    """Print the tables."""
    print(f"\n{found['device']}, torch {found['versions']['torch']}, transformers {found['versions']['transformers']}")
    print(
        "bfloat16 against float64: relative RMS of stock and patched, and their ratio; greedy: number of equal tokens"
    )
    print(f"{'':23} {'logits':>25} {'gradients':>25} {'greedy':>7} {'packed: alone, patched, stock':>31}")
    for name, row in found["checks"].items():
        if "bfloat16" not in row:
            continue
        x = row["bfloat16"]
        cells = "".join(
            f" {x['stock'][k]:8.1e} {x['patched'][k]:8.1e} {x['ratio'][k]:6.2f}x" for k in ("logits", "gradients")
        )
        packed = " ".join(f"{x['packed'][k]:9.1e}" for k in ("alone", "patched", "stock"))
        print(f"{name:23}{cells} {x['greedy']['same']:4}/{NEW_TOKENS} {packed:>31}")
    print("float32, tiny, patched against stock: largest difference relative to the largest entry")
    for name, row in found["checks"].items():
        if "float32" in row:
            x = row["float32"]
            same = "same tokens" if x["greedy_same"] else "OTHER TOKENS"
            print(
                f"{name:23} logits {x['logits']:.1e}, gradients {x['gradients']:.1e}, {same}, packed {x['packed']:.1e} "
                f"(stock {x['stock_packed']:.1e})"
            )
    print(f"{'':45} {'stock ms':>9} {'patched':>9} {'stock GiB':>10} {'patched':>9}")
    steps = {f"{name}, a training step, T{tokens}": row for name, row in found["training_step"].items()}
    for name, row in {**steps, **found["fallbacks"]}.items():
        if "stock" in row:
            ours, theirs = row["patched"], row["stock"]
            print(f"{name:45} {theirs['ms']:9.1f} {ours['ms']:9.1f} {theirs['gib']:10.2f} {ours['gib']:9.2f}")
    for name, row in {**found["checks"], **found["training_step"]}.items():
        for reason in _failed(row):
            print(f"FAILED {name}: {reason}")


if __name__ == "__main__":
    sys.exit(main())
