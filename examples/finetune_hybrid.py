"""Fine-tune a hybrid of transformers on packed documents, with its delta-rule layers on Wyfold.

    python examples/finetune_hybrid.py                    # under a minute on a CPU
    python examples/finetune_hybrid.py --family kimi_linear --steps 200

The model is tiny and built from its configuration, then saved and loaded like a checkpoint. The documents are
docstrings of Python's standard library, byte by byte. Several documents share a row; positions restart at 0 at each.
Finally the script prints the loss of held-out documents, packed and separate, with and without the patch.
"""

from __future__ import annotations

import argparse
import pkgutil
import tempfile
import time
from collections.abc import Iterator, Sequence
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

SIZES = {
    "vocab_size": 256,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "max_position_embeddings": 4096,
    "initializer_range": 0.05,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LINEAR = {
    "head_dim": 32,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}


def tiny(family: str) -> Any:
    """Build a tiny causal language model over bytes."""
    if family == "qwen3_next":
        experts = {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 64}
        return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**SIZES, **LINEAR, **experts))
    if family == "qwen3_5":
        return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**SIZES, **LINEAR))
    if family == "olmo_hybrid":
        widths = {**LINEAR, "linear_key_head_dim": 24, "linear_value_head_dim": 48}  # K != V, as published
        return transformers.OlmoHybridForCausalLM(transformers.OlmoHybridConfig(**SIZES, **widths))
    latent = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
    heads = {"num_local_experts": 4, "linear_head_dim": 32, "linear_num_heads": 3}
    config = transformers.KimiLinearConfig(**SIZES, **EXPERTS, **latent, **heads)
    return transformers.KimiLinearForCausalLM(config)


def documents() -> list[Tensor]:
    """Docstrings of the standard library as bytes, long ones truncated."""
    found = []
    for module in sorted(pkgutil.iter_modules(), key=lambda module: module.name):
        finder: Any = module.module_finder
        spec = finder.find_spec(module.name)
        path = spec.origin if spec else None
        if path and "site-packages" not in path and path.endswith(".py"):
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read()
            parts = text.split('"""')
            found += [torch.tensor(list(part.encode()[:400])) for part in parts[1::2] if len(part) > 60]
    return found


def pack(parts: Sequence[Tensor], tokens: int) -> dict[str, Tensor]:
    """Pack documents into one row: ids, positions that restart per document, and labels without first bytes."""
    parts = [part for part in parts if part.numel() > 1]
    ids = torch.cat(list(parts))[:tokens]
    positions = torch.cat([torch.arange(part.numel()) for part in parts])[:tokens]
    return {
        "input_ids": ids[None],
        "position_ids": positions[None],
        "labels": torch.where(positions == 0, -100, ids)[None],
    }


def rows(found: Sequence[Tensor], tokens: int, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
    """Yield rows of documents in random order, endlessly."""
    while True:
        parts, have = [], 0
        for index in torch.randperm(len(found), generator=generator).tolist():
            parts.append(found[index])
            have += found[index].numel()
            if have >= tokens:
                yield pack(parts, tokens)
                parts, have = [], 0


@torch.no_grad()
def held_out_loss(model: Any, parts: Sequence[Tensor], *, packed: bool) -> float:
    """Held-out loss in nats per byte."""
    batches = [pack(parts, 10**9)] if packed else [pack([part], 10**9) for part in parts]
    total = sum(float(model(**batch, use_cache=False).loss) * (batch["labels"] >= 0).sum().item() for batch in batches)
    return total / sum((batch["labels"] >= 0).sum().item() for batch in batches)


def main(words: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="qwen3_5", choices=("qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=1024, help="per row (default: 1024)")
    args = parser.parse_args(words)
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()

    with tempfile.TemporaryDirectory() as folder:  # loading and saving are unchanged by the patch
        tiny(args.family).save_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    found = documents()
    validation, training = found[::20][:12], [part for index, part in enumerate(found) if index % 20]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = rows(training, args.tokens, torch.Generator().manual_seed(0))

    with patch(model, norm=True) as patched:
        model.train()
        begun = time.perf_counter()
        for step in range(args.steps):
            loss = model(**next(batches)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0 or step == args.steps - 1:
                print(f"step {step:4d}  loss {loss.item():.3f} nats per byte")
        seconds = time.perf_counter() - begun
        model.eval()
        result = {
            "packed": held_out_loss(model, validation, packed=True),
            "alone": held_out_loss(model, validation, packed=False),
        }
    result["stock_packed"] = held_out_loss(model, validation, packed=True)
    print(patched.report)
    print(f"{args.steps} steps of {args.tokens} bytes in {seconds:.1f} s")
    print("held-out loss    packed   each alone")
    print(f"  patched      {result['packed']:.6f}     {result['alone']:.6f}")
    print(f"  stock        {result['stock_packed']:.6f}     {result['alone']:.6f}   documents leak into each other")
    return result


if __name__ == "__main__":
    main()
