"""Models under generation's caches and searches, offloading, LoRA and the stand-in for fla give the stock results."""

import contextlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.hybrids import FAMILIES, hybrid, skip_older
from torch import Tensor

from wyfold.integrations.transformers import patch

pytest.importorskip("transformers", reason="transformers is not installed")

ROOT = Path(__file__).parents[2]
CLOSE = 1e-5
IDS = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(1))
PADDED = torch.ones(2, 9, dtype=torch.int64)
PADDED[1, :4] = 0
STATIC = {"cache_implementation": "static", "disable_compile": True}
GENERATION = {
    "beams": {"num_beams": 3},
    "several of a beam": {"num_beams": 4, "num_return_sequences": 2},
    "beams, static cache": {**STATIC, "num_beams": 2},
    "prompt in pieces": {"prefill_chunk_size": 4},
    "no cache": {"use_cache": False},
}


def far(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max() / b.detach().abs().max())


@pytest.mark.parametrize("name", FAMILIES)
def test_generation_of_left_padded_prompts_gives_the_stock_tokens(name: str):
    model, options = hybrid(name), {"max_new_tokens": 6, "do_sample": False, "attention_mask": PADDED}
    stock = {how: model.generate(IDS, **options, **chosen) for how, chosen in GENERATION.items()}
    with patch(model) as patched:
        for how, chosen in GENERATION.items():
            assert torch.equal(model.generate(IDS, **options, **chosen), stock[how]), how
    assert patched.report.served and not patched.report.stock


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param("lara_mini", marks=pytest.mark.release), "kimi_linear"])
def test_compiled_decoding_with_a_static_cache_gives_the_stock_tokens(name: str):
    """As `generate` does it on a GPU: the model is compiled as one graph."""
    from transformers import CompileConfig

    config = CompileConfig(backend="eager", fullgraph=True, mode=None)
    config._compile_all_devices = True
    options = {"cache_implementation": "static", "max_new_tokens": 5, "do_sample": False}
    stock = hybrid(name).generate(IDS, attention_mask=PADDED, disable_compile=True, **options)
    torch.compiler.reset()
    model = hybrid(name)
    with patch(model):
        tokens = model.generate(IDS, attention_mask=PADDED, compile_config=config, **options)
    assert model._compiled_call is not None
    torch.compiler.reset()
    assert torch.equal(tokens, stock)


# Of 5.15, which takes the weights' place for the model's device.
@pytest.mark.filterwarnings("ignore:You are calling .generate.. with the `input_ids` being on a device:UserWarning")
@pytest.mark.parametrize("patched_first", [False, True])
@pytest.mark.parametrize("to", ["cpu", "disk"])
@pytest.mark.parametrize("name", ["qwen3_5", "lara_mini", "kimi_linear"])
def test_an_offloaded_model_keeps_documents_apart_and_generates(
    name: str, to: str, patched_first: bool, tmp_path: Path
):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    lengths, options = [3, 6], {"max_new_tokens": 4, "do_sample": False}
    packed = {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
    model = hybrid(name)
    with torch.no_grad(), patch(model):
        alone = torch.cat([model(part).logits for part in IDS[:1].split(lengths, 1)], 1)
        tokens = model.generate(IDS, **options)

    def offload() -> None:
        if to == "cpu":
            accelerate.cpu_offload(model, execution_device="cpu")
        else:
            accelerate.disk_offload(model, tmp_path, execution_device="cpu")

    if not patched_first:
        offload()
    with torch.no_grad(), patch(model, norm=True) as patched:
        if patched_first:
            offload()
        assert far(model(IDS[:1], **packed).logits, alone) < CLOSE
        assert torch.equal(model.generate(IDS, **options), tokens)
    assert patched.report.served and not patched.report.stock


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
@pytest.mark.parametrize("name", ["qwen3_5", "lara_mini", "kimi_linear"])
def test_adapters_on_every_projection_compute_and_learn(name: str):
    """LoRA with random A and B: logits, gradients and tokens of left-padded rows."""
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def results(around: Any) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        model = hybrid(name)
        mixers = [n for n, part in model.named_modules() if isinstance(part, torch.nn.Linear) and "attn" in n]
        torch.manual_seed(3)
        config = peft.LoraConfig(target_modules=mixers, r=4, init_lora_weights=False)
        model = peft.get_peft_model(model, config).eval()
        with around(model):
            out = model(input_ids=IDS, attention_mask=PADDED, labels=IDS)
            out.loss.backward()
            given = {"input_ids": IDS, "attention_mask": PADDED}
            tokens = model.generate(**given, max_new_tokens=4, do_sample=False)
        return out.logits, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, tokens

    logits, gradients, tokens = results(lambda _: contextlib.nullcontext())
    ours, our_gradients, our_tokens = results(patch)
    assert far(ours, logits) < CLOSE and torch.equal(our_tokens, tokens)
    assert our_gradients.keys() == gradients.keys() and any("layers.0." in n and "lora_A" in n for n in gradients)
    largest = max(float(g.abs().max()) for g in gradients.values())
    assert max(float((our_gradients[n] - g).abs().max()) for n, g in gradients.items()) < CLOSE * largest


@pytest.mark.long
def test_models_imported_after_the_stand_in_for_fla_run_on_it(tmp_path: Path):
    """transformers takes the functions of an installed fla when a modelling file is imported, here in a subprocess."""
    names = ("qwen3_5", "kimi_linear")
    for name in names:
        skip_older(name)
    code = """
        import sys, torch
        import wyfold.integrations.fla
        from tests.integrations.hybrids import hybrid
        wyfold.integrations.fla.install()
        ids = torch.arange(24).view(2, 12) % 64
        with torch.no_grad():
            torch.save({name: hybrid(name)(ids).logits for name in sys.argv[2:]}, sys.argv[1])
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), str(tmp_path / "logits"), *names]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "falling back" in done.stderr and "flash-linear-attention" not in done.stderr  # the convolution is not fla's
    ours = torch.load(tmp_path / "logits")
    with torch.no_grad():
        for name in names:
            assert 0 < far(ours[name], hybrid(name)(torch.arange(24).view(2, 12) % 64).logits) < CLOSE
