"""Patched models agree with stock ones, packed documents with separate ones, and `undo` restores everything."""

import copy
import sys
from typing import Any

import pytest
import torch
from tests.integrations.hybrids import CACHE, FAMILIES, PICKING, hybrid
from torch import Tensor, nn

from wyfold import UnsupportedError
from wyfold.integrations.transformers import families, patch

pytest.importorskip("transformers", reason="transformers is not installed")

# Float32 tolerances, relative to the largest logit and to a gradient's largest entry.
STOCK = 1e-5  # patched against stock
SEPARATE = 1e-6  # packed against separate documents
LENGTHS = [3, 1, 37, 29]
T = sum(LENGTHS)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return hybrid(request.param)


@pytest.fixture(scope="module")
def qwen() -> Any:
    return hybrid("qwen3_5")


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(64, (2, T), generator=torch.Generator().manual_seed(1))


def positions(lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


def boundaries(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def far(a: Tensor, b: Tensor) -> float:
    """Largest difference relative to the largest entry of b."""
    return float((a - b).detach().abs().max() / b.detach().abs().max())


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Largest relative difference over gradients; tiny gradients count as a thousandth of the largest."""
    assert found.keys() == expected.keys()
    floor = max(float(g.abs().max()) for g in expected.values()) / 1000
    return {
        name: float((found[name] - g).abs().max()) / max(floor, float(g.abs().max())) for name, g in expected.items()
    }


def learned(model: Any, ids: Tensor, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and gradients of the next-token loss."""
    model.zero_grad()
    out = model(ids, labels=ids, **inputs)
    out.loss.backward()
    return out.logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def apart(model: Any, ids: Tensor, lengths: list[int]) -> Tensor:
    """Logits of the documents of a row, each run separately."""
    return torch.cat([model(part).logits for part in ids.split(lengths, 1)], 1)


# --- agreement with stock---------------------------------------------------------------------------------------------


def test_logits_and_gradients_are_the_stock_ones(model: Any, ids: Tensor):
    logits, gradients = learned(model, ids)
    with patch(model, norm=True) as patched:
        ours, our_gradients = learned(model, ids)
    assert far(ours, logits) < STOCK
    differences = worst(our_gradients, gradients)
    assert max(differences.values()) < STOCK, differences
    family = model.config.model_type.removesuffix("_text")
    served = {name for (of, name, outcome) in patched.report.calls if of == family and outcome == "wyfold"}
    assert served == {"chunk", "conv", "norm"}
    assert not patched.report.stock


def test_greedy_tokens_are_the_stock_ones(model: Any, ids: Tensor):
    """One prompt, and two prompts of different lengths with left padding."""
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, :4] = 0
    options = {"max_new_tokens": 6, "do_sample": False}
    stock = [model.generate(ids[:1, :9], **options), model.generate(ids[:, :9], attention_mask=mask, **options)]
    with patch(model) as patched:
        ours = [model.generate(ids[:1, :9], **options), model.generate(ids[:, :9], attention_mask=mask, **options)]
    assert all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True))
    assert {name for (_, name, _) in patched.report.calls} == {"chunk", "recurrent", "conv", "conv_update"}
    assert not patched.report.stock


def test_a_prompt_may_come_in_pieces(model: Any, ids: Tensor):
    """Several tokens after a cache: the convolution also receives the stored columns.

    In float64 where PyTorch supports it, which excludes experts. Float32 rounding varies by processor, up to 1.2e-6.
    """
    if not any("experts" in name for name, _ in model.named_modules()):
        model = copy.deepcopy(model).double()
    with patch(model), torch.no_grad():
        whole = model(ids).logits
        cache, pieces = None, []
        for part in ids.split([2, 20, 1, T - 23], 1):
            out = model(part, use_cache=True, **{CACHE: cache})
            cache = out[CACHE]
            pieces.append(out.logits)
    assert far(torch.cat(pieces, 1), whole) < SEPARATE


def test_16_bit_errors_are_those_of_the_stock_code(model: Any, ids: Tensor):
    """Errors against float32, with a factor of 1.5, because the two round at different places."""
    with torch.no_grad():
        exact = model(ids).logits
        model.bfloat16()
        try:
            stock = model(ids).logits.float()
            with patch(model, norm=True):
                ours = model(ids).logits.float()
        finally:
            model.float()
            model.load_state_dict(hybrid(model.config.model_type.removesuffix("_text")).state_dict())
    assert (ours - exact).norm() < 1.5 * (stock - exact).norm()


@pytest.mark.parametrize("family", PICKING)
def test_models_that_select_tokens(family: str, ids: Tensor):
    """Their delta-rule layers run on Wyfold; packed documents are refused, however they are given."""
    model = hybrid(family)

    def states() -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        last = model(ids, use_cache=False)[0]
        (last * weights[ids][..., : last.shape[-1]]).sum().backward()
        return last.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    weights = torch.randn(64, 64)
    stock, gradients = states()
    with patch(model, norm=True) as patched:
        ours, our_gradients = states()
        for inputs in ({"position_ids": positions(LENGTHS)}, {"cu_seq_lens_q": boundaries(LENGTHS)}):
            with pytest.raises(ValueError, match="documents must come in separate rows"):
                model(ids[:1], **inputs)
    assert far(ours, stock) < STOCK
    differences = worst(our_gradients, gradients)
    assert max(differences.values()) < STOCK, differences
    assert {name for (_, name, _) in patched.report.calls} == {"chunk", "conv", "norm"} and not patched.report.stock


# --- packed documents ------------------------------------------------------------------------------------------------


def test_documents_packed_by_position_are_separate(model: Any, ids: Tensor):
    with torch.no_grad(), patch(model):
        packed = model(ids[:1], position_ids=positions(LENGTHS))
        alone = apart(model, ids[:1], LENGTHS)
    assert far(packed.logits, alone) < SEPARATE
    assert packed.get(CACHE) is None
    with torch.no_grad():
        leaks = model(ids[:1], position_ids=positions(LENGTHS), use_cache=False).logits
    assert far(leaks, alone) > 1e-2, "the stock code keeps documents apart now; say so in docs/migration.md"


def test_documents_packed_by_boundaries_are_separate(model: Any, ids: Tensor):
    """By flash attention's keywords and by seq_idx; positions are created if missing."""
    cu = boundaries(LENGTHS)
    flash = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}
    numbers = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]
    with torch.no_grad(), patch(model):
        alone = apart(model, ids[:1], LENGTHS)
        for inputs in (flash, {**flash, "position_ids": positions(LENGTHS)}, {"seq_idx": numbers}):
            assert far(model(ids[:1], **inputs).logits, alone) < SEPARATE, inputs


def test_the_flattening_collators_output_is_accepted(qwen: Any, ids: Tensor):
    """All of its keywords at once; the loss is the mean over the labels of the separate documents."""
    from transformers import DataCollatorWithFlattening

    parts = ids[0].split([20, 15, T - 35])
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = collate([{"input_ids": part.tolist()} for part in parts])
    with torch.no_grad(), patch(qwen):
        loss = qwen(**batch).loss
        alone = [(qwen(part[None], labels=part[None]).loss, part.numel() - 1) for part in parts]
    mean = sum(loss * n for loss, n in alone) / sum(n for _, n in alone)
    assert far(loss, mean) < SEPARATE


def test_every_row_of_a_batch_may_be_packed(qwen: Any, ids: Tensor):
    other = [T - 20, 20]
    rows = torch.cat([positions(LENGTHS), positions(other)])
    with torch.no_grad(), patch(qwen):
        packed = qwen(ids, position_ids=rows, attention_mask=torch.ones_like(ids)).logits
        alone = torch.cat([apart(qwen, ids[:1], LENGTHS), apart(qwen, ids[1:], other)])
    assert far(packed, alone) < SEPARATE


def test_gradients_of_packed_documents_are_the_sum_of_separate_ones(model: Any, ids: Tensor):
    """Also with gradient checkpointing."""
    lengths = [24, T - 24]

    def gradients(*calls: tuple[Tensor, dict[str, Any]]) -> dict[str, Tensor]:
        model.zero_grad()
        for tokens, inputs in calls:
            (model(tokens, **inputs).logits * weights[tokens]).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    weights = torch.randn(64, 64)
    row = (ids[:1], {"position_ids": positions(lengths)})
    with patch(model):
        alone = gradients(*((part, {}) for part in ids[:1].split(lengths, 1)))
        together = gradients(row)
        model.train()
        # Before 5.23 the name referred to gradients.
        word = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
        getattr(model, f"{word}_checkpointing_enable")()
        try:
            again = gradients(row)
        finally:
            getattr(model, f"{word}_checkpointing_disable")()
            model.eval()
    for found in (together, again):
        differences = worst(found, alone)
        assert max(differences.values()) < STOCK, differences


def test_inseparable_documents_are_refused(qwen: Any, ids: Tensor):
    from transformers import DynamicCache

    row, packed = ids[:1], {"position_ids": positions(LENGTHS)}
    padded = torch.ones(1, T, dtype=torch.int64)
    padded[:, -2:] = 0
    with patch(qwen):
        for message, inputs in {
            "use_cache must be False with packed documents, got True": {**packed, "use_cache": True},
            "got a cache": {**packed, CACHE: DynamicCache(config=qwen.config)},
            "attention_mask must be None or all ones": {**packed, "attention_mask": padded},
            "must begin again where": {**packed, "cu_seq_lens_q": boundaries([40, 30])},
            "must end at B [*] T = 70": {"cu_seq_lens_q": boundaries([40, 20])},
            "padding on the right": {"attention_mask": padded, CACHE: DynamicCache(config=qwen.config)},
            "seq_idx must be": {"seq_idx": torch.zeros(1, 3)},
        }.items():
            with pytest.raises(ValueError, match=message):
                qwen(row, **inputs)
        with pytest.raises(ValueError, match="boundary where a row of the batch begins"):
            qwen(ids, cu_seq_lens_q=boundaries([100, 40]))


def test_positions_that_do_not_restart_are_unchanged(qwen: Any, ids: Tensor):
    """Neither padding nor image positions that go on are documents, and the cache is kept."""
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    counted = (mask.cumsum(1) - 1).clamp(min=0)
    pictures = torch.arange(T).expand(3, 2, T)
    with torch.no_grad(), patch(qwen) as patched:
        for inputs in (
            {"attention_mask": mask, "position_ids": counted},
            {"position_ids": torch.arange(5, 5 + T)[None]},
            {"position_ids": pictures},
        ):
            assert qwen(ids, **inputs)[CACHE] is not None
    assert patched.report.served


def test_one_graph_of_everything(qwen: Any, ids: Tensor):
    """Boundaries compile with the model; positions alone must be read on the host, which breaks the graph."""
    torch.compiler.reset()
    with torch.no_grad(), patch(qwen, norm=True) as patched:
        for inputs in ({}, {"cu_seq_lens_q": boundaries(LENGTHS)}):
            whole = torch.compile(qwen, backend="eager", fullgraph=True)
            expected = qwen(ids[:1], use_cache=False, **inputs).logits
            counted = dict(patched.report.calls)
            assert far(whole(ids[:1], use_cache=False, **inputs).logits, expected) < SEPARATE
            assert dict(patched.report.calls) == counted
    torch.compiler.reset()


def test_without_packing_only_functions_are_replaced(qwen: Any, ids: Tensor):
    with torch.no_grad(), patch(qwen, packing=False) as patched:
        assert not any(name == "forward" for *_, name, _ in patched.report.replaced)
        with pytest.raises(ValueError, match="use_cache=False"):
            qwen(ids[:1], cu_seq_lens_q=boundaries(LENGTHS))
        with pytest.raises(ValueError, match="packing=True"):
            qwen(ids[:1], seq_idx=torch.zeros(1, T, dtype=torch.int64))


# --- unsupported calls ------------------------------------------------------------------------------------------------


def test_an_unsupported_call_gives_the_reason(ids: Tensor):
    """Heads of 264 channels: refused by default; "stock" runs the model's code and counts it; packed calls raise."""
    odd = hybrid("qwen3_next", linear_key_head_dim=264)
    with torch.no_grad():
        stock = odd(ids).logits
        with patch(odd), pytest.raises(ValueError, match="width K from 1 to 256"):
            odd(ids)
        with patch(odd, on_unsupported="stock") as patched:
            assert far(odd(ids).logits, stock) < SEPARATE
            with pytest.raises(ValueError, match="width K from 1 to 256"):
                odd(ids[:1], position_ids=positions(LENGTHS))
    ((reason, times),) = patched.report.stock.items()
    assert "width K from 1 to 256" in reason and times == 2
    assert reason in str(patched.report)
    assert patched.report.calls["qwen3_next", "conv", "wyfold"] == 3


def test_another_activation_runs_the_stock_convolution(ids: Tensor):
    gelu = hybrid("qwen3_5", hidden_act="gelu")
    with torch.no_grad():
        stock, tokens = gelu(ids).logits, gelu.generate(ids[:1, :4], max_new_tokens=3, do_sample=False)
        with patch("qwen3_5", on_unsupported="stock") as patched:
            assert far(gelu(ids).logits, stock) < SEPARATE
            assert torch.equal(gelu.generate(ids[:1, :4], max_new_tokens=3, do_sample=False), tokens)
    names = {name for (_, name, outcome) in patched.report.calls if "activation" in outcome}
    assert names == {"conv", "conv_update"}


# --- undo and failures -----------------------------------------------------------------------------------------------


def test_undo_puts_everything_back(qwen: Any):
    from transformers.models.qwen3_5 import modeling_qwen3_5 as module

    owners = {module.__name__: module, "Qwen3_5TextModel": module.Qwen3_5TextModel, "norm": module.Qwen3_5RMSNormGated}
    before = {name: dict(vars(owner)) for name, owner in owners.items()}
    patched = patch(qwen, norm=True)
    during = {name: dict(vars(owner)) for name, owner in owners.items()}
    assert sum(during[name][key] is not value for name in owners for key, value in before[name].items()) == 6
    assert len(patched.report.replaced) == 6
    assert patched.undo() is patched.report
    patched.undo()
    assert {name: dict(vars(owner)) for name, owner in owners.items()} == before


def test_a_failed_patch_changes_nothing(qwen: Any):
    with patch("qwen3_next", norm=True):
        with pytest.raises(ValueError, match="norm must be True for qwen3_next"):
            patch(["qwen3_5", "qwen3_next"])
        patch("qwen3_5", on_unsupported="stock").undo()


def test_a_version_that_keeps_its_functions_elsewhere_is_refused(qwen: Any, monkeypatch: pytest.MonkeyPatch):
    from transformers.models.qwen3_5 import modeling_qwen3_5 as module

    monkeypatch.delattr(module, "torch_chunk_gated_delta_rule")
    before = module.causal_conv1d_fn
    with pytest.raises(UnsupportedError, match="has no torch_chunk_gated_delta_rule; known are"):
        patch(qwen)
    assert module.causal_conv1d_fn is before


@pytest.mark.parametrize("version", ["4.57.1", "5.2.0", "5.14.1"])
def test_a_version_before_5_15_is_refused(qwen: Any, version: str, monkeypatch: pytest.MonkeyPatch):
    import transformers
    from transformers.models.qwen3_5 import modeling_qwen3_5 as module

    before = module.causal_conv1d_fn
    monkeypatch.setattr(transformers, "__version__", version)
    with pytest.raises(UnsupportedError, match=rf"transformers {version}: .*; known are 5\.15 to 5\.24"):
        patch(qwen)
    assert module.causal_conv1d_fn is before


def test_a_model_type_that_the_version_lacks_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(families.FAMILIES, "later", families.Family("later", "LaterModel", "LaterNorm"))
    with pytest.raises(UnsupportedError, match="it has no model type later; known are"):
        patch("later")


def test_saving_and_loading_are_unchanged(qwen: Any, ids: Tensor, tmp_path: Any):
    import transformers

    with torch.no_grad(), patch(qwen):
        logits = qwen(ids).logits
        qwen.save_pretrained(tmp_path / "patched")
        loaded = transformers.Qwen3_5ForCausalLM.from_pretrained(tmp_path / "patched").eval()
        assert torch.equal(loaded(ids).logits, logits)
    qwen.save_pretrained(tmp_path / "stock")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "patched" / name).read_bytes() == (tmp_path / "stock" / name).read_bytes()


def test_targets(qwen: Any, monkeypatch: pytest.MonkeyPatch):
    with patch() as everything:
        assert "qwen3_5" in {family for family, *_ in everything.report.replaced}
    for error, target in ((ValueError, "gpt2"), (ValueError, nn.Linear(2, 2)), (TypeError, 3), (TypeError, [3])):
        with pytest.raises(error, match="patch: target must be"):
            patch(target)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_unsupported must be one of"):
        patch(qwen, on_unsupported="ignore")
    with pytest.raises(TypeError, match="norm must be True or False"):
        patch(qwen, norm=1)  # type: ignore[arg-type]
    monkeypatch.setattr(families, "FAMILIES", {})
    with pytest.raises(ValueError, match="as long as no model type is loaded"):
        patch()


def test_without_transformers_the_error_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"^patch: needs transformers, .*: pip install transformers$"):
        patch("qwen3_next")
