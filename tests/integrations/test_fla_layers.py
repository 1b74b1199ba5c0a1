"""fla's layers and models of the stand-in: fla's parameters, fla's outputs, caches, packing, checkpoints."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations import fla_cases as cases
from torch import Tensor, nn

from wyfold import UnsupportedError
from wyfold.integrations.fla import layers, padding

RECORDED = json.loads((Path(__file__).parent / "fla_recorded.json").read_text(encoding="utf-8"))
NEEDS_TRANSFORMERS = "transformers, of which fla's models are models, is not installed"


class ListCache(list[dict[str, Any]]):
    """The part of fla's cache that a layer needs."""

    def update(self, layer_idx: int, offset: int, **states: Any) -> dict[str, Any]:
        if len(self) <= layer_idx:
            self.append({})
        self[layer_idx].update(states)
        return self[layer_idx]


def agrees(found: Tensor, recorded: list[float]) -> None:
    """Every seventh number was recorded, with six digits."""
    expected = torch.tensor(recorded)
    found = found.float().flatten()[::7]
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < 2e-5 * max(1, float(expected.abs().max()))


def made(name: str) -> nn.Module:
    class_name, options = (cases.LAYERS | cases.ADDED)[name]
    layer: nn.Module = getattr(layers, class_name)(**options)
    return layer


@pytest.mark.filterwarnings("ignore:ShortConvolution")
@pytest.mark.parametrize("name", cases.LAYERS)
def test_layers_have_flas_parameters_and_outputs(name: str):
    layer, recorded = made(name), RECORDED["layers"][name]
    assert cases.fill(layer) == recorded["shapes"]
    found = cases.run_layer(layer, ListCache())
    agrees(found["y"], recorded["y"])
    agrees(found["state"], recorded["state"])


@pytest.mark.parametrize("name", cases.LAYERS | cases.ADDED)
def test_both_forms_packing_and_gradients_agree(name: str):
    layer = made(name).eval()
    cases.fill(layer)
    x = cases.wave((1, 70, cases.WIDTH), 0.9).requires_grad_()
    y, none, no_cache = layer(x)
    assert none is None and no_cache is None
    y.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in layer.parameters())
    with torch.no_grad():
        assert float((layer(x)[0] - y).abs().max()) < 1e-5 * float(y.abs().max())
        layer.mode = "fused_recurrent"
        assert float((layer(x)[0] - y).abs().max()) < 1e-4 * float(y.abs().max())
        packed = layer(x, cu_seqlens=torch.tensor([0, 30, 70], dtype=torch.int32))[0]
        apart = torch.cat([layer(part)[0] for part in (x[:, :30], x[:, 30:])], 1)
        assert float((packed - apart).abs().max()) < 1e-4 * float(y.abs().max())


def test_flas_default_widths_run():
    """head_dim 256 and expand_v 2, the defaults of fla's GatedDeltaNet: V is 512."""
    layer = layers.GatedDeltaNet(hidden_size=32, num_heads=1)
    assert (layer.head_k_dim, layer.head_v_dim) == (256, 512)
    x = torch.randn(1, 9, 32)
    y = layer(x)[0]
    y.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in layer.parameters())


@pytest.mark.parametrize("name", cases.LAYERS | cases.ADDED)
def test_layers_run_under_autocast(name: str):
    layer = made(name).train()
    cases.fill(layer)
    x = cases.wave((1, 20, cases.WIDTH), 0.9)
    expected = layer(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)[0]
        assert y.dtype == torch.bfloat16
        y.float().square().sum().backward()
    error = (y.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert 0 < error.item() < 0.03
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in layer.parameters())


@pytest.mark.parametrize(
    "name", [pytest.param("delta", marks=pytest.mark.release), pytest.param("gdn", marks=pytest.mark.release), "kda"]
)
def test_layers_compile_as_one_graph(name: str):
    layer = made(name).train()
    cases.fill(layer)
    x = cases.wave((2, 20, cases.WIDTH), 0.9)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)  # the operators inside are lowered in other tests
    assert torch.equal(compiled(x)[0], layer(x)[0])


def test_wrong_layers_are_refused():
    refused: list[tuple[str, str, dict[str, Any]]] = [
        ("DeltaNet", "mode must be one of", {"mode": "fused_chunk"}),
        ("DeltaNet", "qk_norm must be one of", {"qk_norm": "l1"}),
        ("DeltaNet", "must be a whole number, got", {"hidden_size": 32, "num_heads": 3}),
        ("GatedDeltaNet", r"head_dim \* expand_v must be a whole number", {"head_dim": 5, "expand_v": 1.5}),
        ("GatedDeltaNet", r"head_dim \* expand_v, the width V of a head, .* 1 to 512, got 768", {"expand_v": 3}),
        ("GatedDeltaNet", "head_dim, the width K of a head, .* got 264", {"head_dim": 264}),
        ("DeltaNet", r"hidden_size \* expand_v / num_heads, the width V of a head, .* got 768", {"expand_v": 3}),
        ("DeltaNet", r"hidden_size \* expand_k / num_heads, the width K of a head, .* got 512", {"expand_k": 2}),
        ("KimiDeltaAttention", r"head_dim \* expand_v, the width V of a head, .* got 640", {"expand_v": 5}),
        ("GatedDeltaNet", "num_v_heads must have a multiple", {"num_heads": 4, "num_v_heads": 6}),
        ("GatedDeltaNet", "output_gate_activation must be one of", {"output_gate_activation": "gelu"}),
        ("KimiDeltaAttention", "lower_bound must be given", {"safe_gate": True}),
    ]
    for name, message, options in refused:
        with pytest.raises(ValueError, match=message):
            getattr(layers, name)(**options)
    layer = layers.DeltaNet(hidden_size=32, num_heads=2)
    with pytest.raises(ValueError, match="layer_idx must be given with past_key_values"):
        layer(torch.zeros(1, 3, 32), past_key_values=ListCache())
    with pytest.raises(ValueError, match=r"attention_mask must be \[B, S\]"):
        layer(torch.zeros(1, 3, 32), attention_mask=torch.ones(1, 3, 3))
    with pytest.raises(TypeError, match="must be given as past_key_values"):
        layer(torch.zeros(1, 3, 32), cache=ListCache())
    with pytest.raises(TypeError, match="head_count"):
        layers.DeltaNet(head_count=2)  # type: ignore[call-arg]


def small(name: str) -> nn.Module:
    """A layer of width 32 with two heads."""
    widths = {"head_dim": 16} if name.startswith(("Gated", "Kimi", "RWKV")) and name != "GatedLinearAttention" else {}
    layer: nn.Module = getattr(layers, name)(hidden_size=32, num_heads=2, layer_idx=0, **widths)
    return layer


@pytest.mark.parametrize("name", layers.NAMES)
def test_wrong_calls_of_layers_are_refused(name: str):
    """A mask of fewer columns or rows used to place tokens in other rows, without an error."""
    layer, x = small(name), torch.zeros(2, 9, 32)
    for message, call in (
        (r"attention_mask must be \[B, S\], B = 2, S >= 9, got \[2, 8\]", {"attention_mask": torch.ones(2, 8)}),
        (r"attention_mask must be \[B, S\], B = 2, S >= 9, got \[1, 9\]", {"attention_mask": torch.ones(1, 9)}),
        ("attention_mask must have the device of", {"attention_mask": torch.ones(2, 9, device="meta")}),
        ("attention_mask must be a torch.Tensor, got list", {"attention_mask": [[1] * 9] * 2}),
        ("past_key_values must be a cache, got dict", {"past_key_values": {}}),
        ("past_key_values must be a cache, got int", {"past_key_values": 1}),
        ("cu_seqlens must come with a batch of B = 1", {"cu_seqlens": torch.tensor([0, 9])}),
        ("cu_seqlens must be a torch.Tensor, got list", {"cu_seqlens": [0, 9]}),
        ("hidden_states must be float32, as the layer", {"hidden_states": x.bfloat16()}),
        ("hidden_states must be float", {"hidden_states": x.int()}),
        ("hidden_states must be on cpu, as the layer", {"hidden_states": x.to("meta")}),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{name}: {message}"):
            layer(**{"hidden_states": x} | call)


@pytest.mark.parametrize("name", layers.NAMES)
@pytest.mark.parametrize("argument", ["hidden_size", "num_heads"])
@pytest.mark.parametrize("value", ["32", 0, 2.0])
def test_wrong_sizes_of_layers_are_named(name: str, argument: str, value: Any):
    if (name, argument) == ("RWKV7Attention", "num_heads"):
        return  # read without head_dim alone
    with pytest.raises((TypeError, ValueError), match=f"^{name}: {argument} must be "):
        getattr(layers, name)(**{"hidden_size": 32, "num_heads": 2, "layer_idx": 0} | {argument: value})


def test_padding_goes_and_comes_back():
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    x = torch.randn(3, 4, 5, requires_grad=True)
    indices, cu_seqlens, longest = padding.get_unpad_data(mask)
    assert indices.tolist() == [1, 2, 3, 4, 5] and cu_seqlens.tolist() == [0, 3, 5, 5] and longest == 3
    assert cu_seqlens.dtype == torch.int32
    packed = padding.index_first_axis(x.flatten(0, 1), indices)
    back = padding.pad_input(packed, indices, 3, 4)
    assert torch.equal(back, x * mask[..., None])
    (back**2).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach() * mask[..., None])  # type: ignore[arg-type]
    q, states, places, bounds, most = padding.unpad_input(x[:, -1:], (x, 2 * x), mask, 1, keepdim=True)
    assert q.shape == (1, 3, 5) and places.tolist() == [0, 1, 2]
    assert torch.equal(states[1], 2 * packed[None]) and most == (1, 3)
    assert bounds[0].tolist() == [0, 1, 2, 3] and bounds[1].tolist() == [0, 3, 5, 5]
    (same,) = padding.unpad_input((x,), (x,), mask, 4)[0]
    assert torch.equal(same, packed)
    with pytest.raises(NotImplementedError, match="q_len must be 1 or"):
        padding.unpad_input(x, (x,), mask, 2)


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def models() -> Any:
    pytest.importorskip("transformers", reason=NEEDS_TRANSFORMERS)
    return importlib.import_module("wyfold.integrations.fla.models")


def causal(models: Any, family: str, **options: Any) -> Any:
    _, given = cases.MODELS[family]
    torch.manual_seed(0)
    config = getattr(models, f"{family}Config")(**{**given, **options})
    return getattr(models, f"{family}ForCausalLM")(config)


@pytest.mark.parametrize("family", cases.MODELS)
def test_models_have_flas_parameters_and_outputs(models: Any, family: str):
    model, recorded = causal(models, family), RECORDED["models"][family]
    assert cases.fill(model) == recorded["shapes"]
    found = cases.run_model(model)
    for name in ("logits", "loss", "packed"):
        agrees(found[name], recorded[name])


@pytest.mark.parametrize("family", cases.MODELS)
def test_models_generate_what_one_pass_predicts(models: Any, family: str):
    model = causal(models, family).eval()
    ids = torch.randint(cases.VOCAB, (2, 9), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = model.generate(ids, attention_mask=mask, **options)
    whole = model(found[1:, :-1]).logits[:, 8:].argmax(-1)
    assert torch.equal(found[1:, 9:], whole)
    alone = model.generate(ids[:1, 4:], attention_mask=mask[:1, 4:], **options)
    assert torch.equal(found[0, 9:], alone[0, 5:])
    beams = model.generate(ids, attention_mask=mask, num_beams=3, num_return_sequences=3, **options)
    for row in beams.unflatten(0, (2, 3))[1]:
        assert _score(model, row, 9) <= _score(model, beams[3], 9) + 1e-5


@torch.no_grad()
def _score(model: Any, row: Tensor, start: int) -> float:
    """Log probability of the tokens from `start` on, in one pass."""
    logits = model(row[None, :-1]).logits.log_softmax(-1)
    return float(logits[0, start - 1 :].gather(-1, row[start:, None]).sum())


@pytest.mark.parametrize("family", cases.MODELS)
def test_checkpoints_load_by_the_auto_classes(models: Any, family: str, tmp_path: Path):
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    model = causal(models, family).eval()
    model.save_pretrained(tmp_path)
    ids = torch.arange(9)[None] % cases.VOCAB
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is type(model) and torch.equal(loaded(ids).logits, model(ids).logits)
    assert AutoConfig.from_pretrained(tmp_path).model_type == cases.MODELS[family][0]
    assert type(AutoModel.from_config(model.config)).__name__ == f"{family}Model"


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_the_cache_has_two_names(models: Any, name: str):
    """transformers renamed it in 5.24; a cache that is not read would be wrong without an error."""
    model = causal(models, "KDA").eval()
    ids = torch.arange(9)[None] % cases.VOCAB
    cache = model(ids[:, :6], use_cache=True).past_key_values
    continued = model(ids[:, 6:], use_cache=True, **{name: cache}).logits
    expected = model(ids).logits[:, 6:]
    assert float((continued - expected).detach().abs().max()) < 1e-5 * float(expected.detach().abs().max())


def test_models_train(models: Any):
    model = causal(models, "KDA").train()
    ids = torch.arange(24).reshape(2, 12) % cases.VOCAB
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(8):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    again = model(ids, labels=ids)
    again.loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(ValueError, match="use_cache must be False with gradient checkpointing"):
        model(ids, use_cache=True)
    model.eval()
    half = model(ids, labels=ids, num_items_in_batch=11).loss
    assert abs(half.item() / model(ids, labels=ids).loss.item() - 2) < 1e-5


def test_what_models_do_not_have_is_refused(models: Any):
    for options in ({"attn": {"layers": [0], "num_heads": 2}}, {"attnres_block_size": 2}, {"use_l2warp": True}):
        with pytest.raises(UnsupportedError, match=rf"{next(iter(options))}=.* is not offered"):
            causal(models, "GatedDeltaNet", **options)
    with pytest.raises(UnsupportedError, match="hidden_act='powlu'"):
        causal(models, "GatedDeltaNet", hidden_act="powlu")
    model = causal(models, "DeltaNet")
    with pytest.raises(ValueError, match="one of input_ids and inputs_embeds"):
        model()
    cache = model(torch.tensor([[1, 2]]), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="must come without its new name cache"):
        model(torch.tensor([[3]]), past_key_values=cache, cache=cache)


def test_the_cache_keeps_states(models: Any):
    cache_class = importlib.import_module("wyfold.integrations.fla.cache").Cache
    cache = cache_class()
    assert len(cache) == 0 and cache.get_seq_length() == 0
    state, conv = torch.arange(4.0).reshape(2, 1, 1, 2), (torch.arange(2.0).reshape(2, 1, 1), None)
    cache.update(recurrent_state=state, conv_state=conv, layer_idx=0, offset=5)
    cache.update(conv_state=conv, layer_idx=0, offset=1)
    assert cache.get_seq_length() == 6 and cache[0]["recurrent_state"] is state
    assert cache.get_mask_sizes(2, 0) == (8, 0)
    with pytest.raises(KeyError, match="layer 1 has no entry yet"):
        cache[1]
    cache.reorder_cache(torch.tensor([1, 1]))
    assert torch.equal(cache[0]["recurrent_state"], state[[1, 1]]) and cache[0]["conv_state"][1] is None
    cache.batch_repeat_interleave(2)
    assert cache[0]["recurrent_state"].shape[0] == 4
    copy = cache_class.from_legacy_cache(cache.to_legacy_cache(), seen_tokens=6)
    assert copy.get_seq_length() == 6 and torch.equal(copy[0]["recurrent_state"], cache[0]["recurrent_state"])
    assert cache_class.from_legacy_cache(cache) is cache
    with pytest.raises(NotImplementedError, match="none can be taken back"):
        cache.crop(3)
    cache.crop(6)
    with pytest.raises(UnsupportedError, match="attn_state"):
        cache.update(attn_state=(state, state))
    cache.reset()
    assert cache.get_seq_length() == 0
