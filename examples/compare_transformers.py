"""Compare transformers models with and without Wyfold's patch: error, time and memory.

    python examples/compare_transformers.py                                    # two minutes on a CPU
    python examples/compare_transformers.py --device cuda --dtype bfloat16 --tokens 8192 --heads 32 --head-dim 128

Each model has two delta-rule layers and little attention, with random parameters. Time is the median of a forward with
backward, with both models alternating. Memory is the peak above model and inputs, in a fresh process. Errors are
relative root mean squares against the unpatched model in float32.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    import transformers
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise SystemExit(f"{error}: pip install '.[bench]' in Wyfold's folder brings the version that is tested") from None

from wyfold.integrations.transformers import patch

FAMILIES = ("qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear")
CALLS = {"patched": patch, "stock": lambda model, **_: contextlib.nullcontext()}


def made(family: str, heads: int, head_dim: int) -> Any:
    """Build a model of two delta-rule layers. OLMo has values twice as wide as keys, and needs an attention layer."""
    hidden = min(heads * head_dim, 2048)
    layers = ["linear_attention", "linear_attention"] + ["full_attention"] * (family == "olmo_hybrid")
    sizes = {
        "vocab_size": 256,
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_hidden_layers": len(layers),
        "layer_types": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1 << 17,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    linear = {
        "head_dim": 32,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": head_dim,
        "linear_value_head_dim": head_dim,
    }
    experts = {"num_experts_per_tok": 1, "moe_intermediate_size": 32}
    if family == "qwen3_next":
        experts |= {"num_experts": 2, "shared_expert_intermediate_size": 32}
        return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**sizes, **linear, **experts))
    if family == "qwen3_5":
        return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**sizes, **linear))
    if family == "olmo_hybrid":
        linear |= {"linear_key_head_dim": head_dim * 3 // 4, "linear_value_head_dim": head_dim * 3 // 2}
        return transformers.OlmoHybridForCausalLM(transformers.OlmoHybridConfig(**sizes, **linear))
    latent = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
    kda = {"num_local_experts": 2, "linear_head_dim": head_dim, "linear_num_heads": heads}
    return transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**sizes, **experts, **latent, **kda))


def setting(args: argparse.Namespace, family: str) -> tuple[Any, Tensor]:
    """The float32 model, whose states decay within tens of tokens, and its input."""
    torch.manual_seed(0)
    model = made(family, args.heads, args.head_dim).to(args.device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-4, -1)
    return model, torch.randint(256, (1, args.tokens), device=args.device)


def learned(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """Logits and all gradients, converted to float64."""
    model.zero_grad()
    out = model(ids, labels=ids, use_cache=False)
    out.loss.backward()
    gradients = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach().double(), **gradients}


def far(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Relative root mean square errors of the logits and of all gradients together."""
    names = [name for name in truth if name != "logits"]
    lost = sum(float((found[name] - truth[name]).square().sum()) for name in names)
    whole = sum(float(truth[name].square().sum()) for name in names)
    logits = float((found["logits"] - truth["logits"]).norm() / truth["logits"].norm())
    return {"logits": logits, "gradients": (lost / whole) ** 0.5}


def errors(args: argparse.Namespace, family: str) -> dict[str, dict[str, float]]:
    model, ids = setting(args, family)
    truth = learned(model, ids)
    low = copy.deepcopy(model).to(getattr(torch, args.dtype))
    found = {}
    for name, call in CALLS.items():
        with call(low, norm=True):
            found[name] = far(learned(low, ids), truth)
    return found


def times(args: argparse.Namespace, family: str) -> dict[str, float]:
    """Median milliseconds of a forward and backward of both models, alternating."""
    model, ids = setting(args, family)
    model.to(getattr(torch, args.dtype))
    found: dict[str, list[float]] = {name: [] for name in CALLS}
    for _ in range(1 + args.rounds):
        for name, call in CALLS.items():
            with call(model, norm=True):
                found[name].append(seconds(lambda: step(model, ids), args.device))
    return {name: 1e3 * statistics.median(taken[1:]) for name, taken in found.items()}


def step(model: Any, ids: Tensor) -> None:
    model(ids, labels=ids, use_cache=False).loss.backward()


def seconds(work: Callable[[], None], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def peak_mib(args: argparse.Namespace, family: str, name: str) -> float:
    """Peak memory of one step above model and inputs; on a CPU the resident memory of this process."""
    model, ids = setting(args, family)
    model.to(getattr(torch, args.dtype))
    with CALLS[name](model, norm=True):
        if args.device == "cuda":
            step(model, ids)  # exclude memory of compilation
            model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step(model, ids)
            return (torch.cuda.max_memory_allocated() - before) / 2**20
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the resident size
        before = status_kib("VmRSS")
        step(model, ids)
        return (status_kib("VmHWM") - before) / 1024


def status_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def peak_mib_alone(args: argparse.Namespace, family: str, name: str) -> float:
    """`peak_mib` in a fresh process with an unused allocator."""
    given = [f"--{key.replace('_', '-')}={getattr(args, key)}" for key in ("tokens", "heads", "head_dim")]
    words = [sys.executable, __file__, *given, f"--device={args.device}", f"--dtype={args.dtype}"]
    words += ["--families", family, "--one", name]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def main(words: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--json", type=Path, help="write the rows there as well")
    parser.add_argument("--one", choices=tuple(CALLS), help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    transformers.utils.logging.set_verbosity_error()
    if args.one:
        print(peak_mib(args, args.families[0], args.one))
        return []
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    print(f"{args.device}, {args.dtype}, B1 T{args.tokens} H{args.heads} D{args.head_dim}, two layers")
    print(f"{'':12} {'':8} {'logits':>9} {'gradients':>10} {'fwd+bwd ms':>11} {'peak MiB':>9}")
    rows = []
    for family in args.families:
        apart, taken = errors(args, family), times(args, family)
        for name in CALLS:
            peak = peak_mib_alone(args, family, name)
            row = {"family": family, "code": name, **apart[name], "ms": taken[name], "peak_mib": peak}
            rows.append(row)
            print(
                f"{family if name == 'patched' else '':12} {name:8} {row['logits']:9.1e} {row['gradients']:10.1e} "
                f"{row['ms']:11.1f} {row['peak_mib']:9.0f}"
            )
    if args.json:
        args.json.write_text(json.dumps({"arguments": vars(args) | {"json": str(args.json)}, "rows": rows}, indent=1))
    return rows


if __name__ == "__main__":
    main()
