"""fla's layers, models and folders load into Wyfold's with equal outputs, and go back bit for bit."""

import ast
import copy
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.extras import need_fla
from torch import Tensor, nn

from wyfold import UnsupportedError
from wyfold.integrations.fla import FlaCheckpoint, accelerate, from_fla, layers, to_fla
from wyfold.integrations.fla.calls import OPERATORS
from wyfold.integrations.fla.checkpoint_files import INDEX_FILE
from wyfold.integrations.fla.checkpoints import DEFAULTS, WITHOUT_EFFECT
from wyfold.layers import DeltaNet, GatedDeltaNet, SoftmaxAttention
from wyfold.models import Decoder, DecoderConfig
from wyfold.reference import error

WIDTH, VOCAB = 32, 50
_GDN = {"hidden_size": WIDTH, "head_dim": 16, "num_heads": 2}

LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "delta": ("DeltaNet", {"hidden_size": WIDTH, "num_heads": 2}),
    "delta, other widths": (
        "DeltaNet",
        {"hidden_size": 48, "num_heads": 2, "expand_k": 2 / 3, "expand_v": 2, "conv_size": 3, "allow_neg_eigval": True},
    ),
    "gdn": ("GatedDeltaNet", {**_GDN, "expand_v": 1.5, "norm_eps": 1e-3}),
    "gdn, groups": ("GatedDeltaNet", {**_GDN, "expand_v": 1, "num_v_heads": 4, "allow_neg_eigval": True}),
    "kda": ("KimiDeltaAttention", _GDN),
    "kda, groups": ("KimiDeltaAttention", {**_GDN, "num_v_heads": 4, "allow_neg_eigval": True}),
    "kda, safe": ("KimiDeltaAttention", {**_GDN, "safe_gate": True, "lower_bound": -5.0}),
    "kda, steep": ("KimiDeltaAttention", {**_GDN, "lower_bound": -20.0}),
}

ADDED: dict[str, tuple[str, dict[str, Any]]] = {
    "gdn2": ("GatedDeltaNet2", {**_GDN, "allow_neg_eigval": True}),
    "gdp": ("GatedDeltaProduct", {**_GDN, "expand_v": 1}),
    "gdp, three updates, no forget gate": (
        "GatedDeltaProduct",
        {**_GDN, "expand_v": 1.5, "num_v_heads": 4, "num_householder": 3, "use_forget_gate": False},
    ),
    "gla": ("GatedLinearAttention", {"hidden_size": WIDTH, "num_heads": 2}),
    "gla, other decays": (
        "GatedLinearAttention",
        {"hidden_size": 48, "num_heads": 2, "expand_k": 1, "expand_v": 2, "gate_low_rank_dim": 8, "norm_eps": 1e-3},
    ),
    "gla, convolutions": (
        "GatedLinearAttention",
        {"hidden_size": WIDTH, "num_heads": 2, "use_short_conv": True, "conv_size": 3},
    ),
}
"""Layers that `accelerate` does not run."""

_MODEL = {"hidden_size": WIDTH, "num_hidden_layers": 2, "vocab_size": VOCAB, "num_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "delta": ("DeltaNet", _MODEL),
    "gdn": ("GatedDeltaNet", {**_MODEL, "head_dim": 16, "expand_v": 1.0, "tie_word_embeddings": True}),
    "kda": ("KDA", {**_MODEL, "head_dim": 16, "safe_gate": True, "lower_bound": -5.0, "intermediate_size": 40}),
}


def close(found: Tensor, exact: Tensor, theirs: Tensor) -> None:
    """`found` is as near to the exact numbers as fla's own."""
    error.require(error.judge(found, exact, theirs, name="y"))


def models() -> Any:
    """The stand-in's models, which are models of transformers."""
    pytest.importorskip("transformers", reason="transformers, of which fla's models are models, is not installed")
    from wyfold.integrations.fla import models

    return models


def model(case: str) -> Any:
    name, sizes = MODELS[case]
    found = models()
    return getattr(found, f"{name}ForCausalLM")(getattr(found, f"{name}Config")(**sizes)).eval()


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (2, 70))


# --- layers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", LAYERS | ADDED)
def test_layers_have_equal_outputs_and_go_back(case: str):
    name, arguments = (LAYERS | ADDED)[case]
    theirs = getattr(layers, name)(**arguments)
    ours = from_fla(theirs)
    assert type(ours).__name__ == name
    x = torch.randn(2, 70, arguments["hidden_size"])
    close(ours(x), copy.deepcopy(theirs).double()(x.double())[0], theirs(x)[0])
    config, weights = to_fla(ours)
    back = getattr(layers, name)(**config)
    back.load_state_dict(weights)
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[key], tensor), key
    assert torch.equal(back(x)[0], theirs(x)[0])


def test_grouped_heads_of_gdn2_are_repeated_and_do_not_go_back():
    """fla has a decay and an erase gate for each key head, Wyfold for each value head."""
    theirs = layers.GatedDeltaNet2(**_GDN, num_v_heads=4)
    ours, x = from_fla(theirs), torch.randn(2, 70, WIDTH)
    close(ours(x), copy.deepcopy(theirs).double()(x.double())[0], theirs(x)[0])
    with pytest.raises(UnsupportedError, match=r"^fla's GatedDeltaNet2 has no option decays and erase gates"):
        to_fla(ours)
    config = DecoderConfig(hidden_size=WIDTH, num_layers=1, pattern="gdn2", num_heads=2, head_dim=16)
    with pytest.raises(UnsupportedError, match="a model of fla has layers of one kind"):
        to_fla(Decoder(config))


def test_sources_are_copied_and_keep_dtype_and_mode():
    theirs = layers.DeltaNet(hidden_size=WIDTH, num_heads=2).bfloat16().eval()
    theirs.o_norm.float()  # fla builds this norm in float32
    before = copy.deepcopy(theirs.state_dict())
    ours = from_fla(theirs, backend="eager")
    assert not ours.training
    assert ours.backend == "eager"
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}
    assert ours(torch.randn(1, 9, WIDTH, dtype=torch.bfloat16)).dtype == torch.bfloat16
    for checkpoint in (ours, to_fla(ours)):
        tensors = checkpoint.weights.values() if isinstance(checkpoint, FlaCheckpoint) else checkpoint.parameters()
        with torch.no_grad():
            for tensor in tensors:
                tensor.zero_()
    assert all(torch.equal(theirs.state_dict()[key], tensor) for key, tensor in before.items())


@pytest.mark.filterwarnings("ignore:ShortConvolution")
@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("DeltaNet", "use_gate", True),
        ("DeltaNet", "use_beta", False),
        ("DeltaNet", "qk_norm", "sum"),
        ("DeltaNet", "qk_activation", "relu"),
        ("DeltaNet", "conv_bias", True),
        ("GatedDeltaNet", "use_gate", False),
        ("GatedDeltaNet", "use_short_conv", False),
        ("GatedDeltaNet", "output_gate_activation", "sigmoid"),
        ("KimiDeltaAttention", "expand_v", 2),
        ("GatedDeltaNet2", "expand_v", 2),
        ("GatedDeltaProduct", "use_output_gate", False),
        ("GatedLinearAttention", "num_kv_heads", 1),
        ("GatedLinearAttention", "clamp_min", -1.0),
        ("GatedLinearAttention", "fuse_norm", False),
    ],
)
def test_options_that_wyfolds_layers_lack_are_refused(name: str, option: str, value: Any):
    shared = {"hidden_size": WIDTH, "num_heads": 2} if name in ("DeltaNet", "GatedLinearAttention") else _GDN
    with pytest.raises(UnsupportedError, match=f"{name} has no option {option}="):
        from_fla(getattr(layers, name)(**{**shared, option: value}))


def test_options_that_flas_layers_lack_are_refused():
    with pytest.raises(UnsupportedError, match="fla's DeltaNet has no option num_v_heads=4"):
        to_fla(DeltaNet(WIDTH, 2, 4, 16))
    qwen = GatedDeltaNet(WIDTH, 2, head_dim=16)
    qwen.norm.round_before_weight = True
    with pytest.raises(UnsupportedError, match="round_before_weight"):
        to_fla(qwen)
    with pytest.raises(TypeError, match="to_fla: module must be one of DeltaNet"):
        to_fla(SoftmaxAttention(WIDTH, 2, head_dim=16))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must hold a language model"):
        to_fla(DeltaNet(WIDTH, 2, head_dim=16)).save("nowhere")


def test_other_tensors_of_a_layer_are_refused():
    theirs = layers.DeltaNet(hidden_size=WIDTH, num_heads=2)
    theirs.lora = nn.Linear(2, 2, bias=False)
    with pytest.raises(ValueError, match=r"DeltaNet must have known tensors, got lora\.weight"):
        from_fla(theirs)
    del theirs.lora, theirs.b_proj
    with pytest.raises(ValueError, match=r"DeltaNet must have the tensors b_proj\.weight"):
        from_fla(theirs)


# --- language models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", MODELS)
def test_models_have_equal_logits_and_go_back(case: str, tmp_path: Path):
    theirs, ids = model(case), tokens()
    ours = from_fla(theirs)
    assert isinstance(ours, Decoder)
    assert not ours.training
    logits = theirs(ids).logits
    close(ours(ids)[0], copy.deepcopy(theirs).double()(ids).logits, logits)
    to_fla(ours).save(tmp_path)
    back = type(theirs).from_pretrained(tmp_path)
    assert torch.equal(back(ids).logits, logits)
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[key], tensor), key


@pytest.mark.parametrize("size", ["1GB", "40KB"])
def test_folders_load_in_one_file_or_several(size: str, tmp_path: Path):
    theirs, ids = model("gdn"), tokens()
    theirs.save_pretrained(tmp_path, max_shard_size=size)
    assert (tmp_path / INDEX_FILE).exists() == (size == "40KB")
    assert torch.equal(from_fla(tmp_path)(ids)[0], from_fla(theirs)(ids)[0])
    assert torch.equal(from_fla(str(tmp_path))(ids)[0], from_fla(theirs)(ids)[0])


ATTENTION = {"num_heads": 4, "num_kv_heads": 2, "window_size": 16, "rope_theta": 100.0}


def test_models_with_softmax_attention_go_both_ways(tmp_path: Path):
    options = {"attention": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "window": 16, "rope_base": 100.0}}
    config = DecoderConfig(VOCAB, WIDTH, 5, "kda*2 attention", 2, head_dim=16, options=options)
    ours = Decoder(config)
    to_fla(ours).save(tmp_path)
    attn = json.loads((tmp_path / "config.json").read_text())["attn"]
    assert attn == {"layers": [2], "qkv_bias": False, **ATTENTION}
    back, ids = from_fla(tmp_path), tokens()
    assert back.config.layers == config.layers
    assert torch.equal(back(ids)[0], ours(ids)[0])


def test_attention_that_wyfold_lacks_is_refused(folder: Path):
    spec = {"layers": [0], "num_heads": 2}
    with pytest.raises(UnsupportedError, match="attn has no option qkv_bias"):
        from_fla(changed(folder, attn={**spec, "qkv_bias": True}))
    with pytest.raises(UnsupportedError, match="attn must be the same in all its layers"):
        from_fla(changed(folder, num_hidden_layers=2, attn=[spec, {"layers": [1], "num_heads": 4}]))
    with pytest.raises(ValueError, match="fields of attn must be known, got qk_norm"):
        from_fla(changed(folder, attn={**spec, "qk_norm": True}))
    with pytest.raises(ValueError, match="attn must have num_heads"):
        from_fla(changed(folder, attn={"layers": [0]}))
    with pytest.raises(ValueError, match="attention must have the tensors q_proj"):
        from_fla(changed(folder, num_hidden_layers=1, attn=spec))
    config = DecoderConfig(VOCAB, WIDTH, 2, "gdn attention", 2, head_dim=8)
    with pytest.raises(UnsupportedError, match="fla's Attention has no option head_dim=8"):
        to_fla(Decoder(config))


def test_a_decoder_that_fla_has_no_form_of_is_refused():
    with pytest.raises(UnsupportedError, match="layers of one kind"):
        to_fla(Decoder(DecoderConfig(hidden_size=WIDTH, num_layers=2, pattern="gdn kda", num_heads=2, head_dim=16)))
    options = {"kda": {"norm_eps": 1e-3}}
    config = DecoderConfig(hidden_size=WIDTH, num_layers=1, pattern="kda", num_heads=2, head_dim=16, options=options)
    with pytest.raises(UnsupportedError, match="one norm_eps"):
        to_fla(Decoder(config))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of fla's."""
    found = Decoder(DecoderConfig(VOCAB, WIDTH, 1, "gdn", 2, head_dim=16))
    to_fla(found).save(tmp_path)
    return tmp_path


def changed(folder: Path, **fields: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return folder


def test_unknown_fields_are_refused_by_name(folder: Path):
    from_fla(changed(folder, fuse_norm=False, torch_dtype="bfloat16", bos_token_id=7))
    with pytest.raises(ValueError, match="fields of the configuration must be known, got norm_first, share_conv"):
        from_fla(changed(folder, share_conv=True, norm_first=False))


@pytest.mark.parametrize(
    ("field", "value"),
    [("attnres_block_size", 2), ("use_l2warp", True), ("hidden_act", "powlu")],
)
def test_fields_that_the_decoder_lacks_are_refused(folder: Path, field: str, value: Any):
    with pytest.raises(UnsupportedError, match=f"from_fla: {field}="):
        from_fla(changed(folder, **{field: value}))


def test_other_model_types_are_refused(folder: Path):
    known = "delta_net, gated_deltanet, gated_deltaproduct, gla, kda"
    with pytest.raises(ValueError, match=f"model_type must be among {known}, got 'mamba2'"):
        from_fla(changed(folder, model_type="mamba2"))


def test_other_tensors_of_a_model_are_refused(folder: Path):
    with pytest.raises(ValueError, match=r"every tensor must be known, got model\.layers\.1\."):
        _, weights = to_fla(Decoder(DecoderConfig(VOCAB, WIDTH, 2, "gdn", 2, head_dim=16)))
        FlaCheckpoint({**json.loads((folder / "config.json").read_text())}, weights).save(folder)
        from_fla(folder)
    with pytest.raises(ValueError, match=r"must have the tensor model\.layers\.2\."):
        from_fla(changed(folder, num_hidden_layers=3))
    with pytest.raises(ValueError, match=r"must have the tensor lm_head\.weight"):
        from_fla(changed(folder, num_hidden_layers=2, tie_word_embeddings=False))


def test_damaged_folders_are_refused(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        from_fla(empty)
    shutil.copy(folder / "config.json", empty)
    (empty / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="pickled weights are not read"):
        from_fla(empty)
    for index, reason in (
        ("[]", "must be a JSON object"),
        ('{"weight_map": []}', "must map tensors to files"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "must name files beside it"),
        ('{"weight_map": {"a": "b.safetensors"}}', "b.safetensors is missing"),
    ):
        (empty / INDEX_FILE).write_text(index)
        with pytest.raises((ValueError, FileNotFoundError), match=reason):
            from_fla(empty)
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        from_fla(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json must be a JSON object"):
        from_fla(folder)


@pytest.mark.parametrize("source", [1, nn.Linear(2, 2), DeltaNet(WIDTH, 2, head_dim=16)])
def test_other_sources_are_refused(source: Any):
    with pytest.raises(TypeError, match="from_fla: source must be"):
        from_fla(source)


def test_defaults_are_those_of_flas_configurations():
    """Recorded from fla-core 0.6.0; a saved configuration leaves out what is a default."""
    recorded = json.loads((Path(__file__).parent / "fla_signatures.json").read_text(encoding="utf-8"))
    for model_type, name in (("delta_net", "DeltaNet"), ("gated_deltanet", "GatedDeltaNet"), ("kda", "KDA")):
        parameters = dict(recorded[f"fla.models.{model_type}.configuration_{model_type}"][f"{name}Config"]["__init__"])
        known = {key: ast.literal_eval(value) for key, value in parameters.items() if key not in WITHOUT_EFFECT}
        assert known == DEFAULTS[model_type]


# --- the installed fla -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", LAYERS)
def test_installed_layers_have_equal_outputs(case: str):
    """fla's own layer code, on a CPU with Wyfold's operators below it."""
    need_fla()
    import fla.layers
    from fla.modules import RMSNorm

    name, arguments = LAYERS[case]
    theirs = getattr(fla.layers, name)(**arguments)
    ours = from_fla(theirs)
    config, weights = to_fla(ours)
    back = getattr(fla.layers, name)(**config)
    back.load_state_dict(weights)
    x = torch.randn(2, 70, arguments["hidden_size"])
    for layer in (theirs, back):
        if isinstance(layer.o_norm, RMSNorm):  # no CPU form
            norm = nn.RMSNorm(layer.head_v_dim, eps=layer.o_norm.eps)
            norm.weight, layer.o_norm = layer.o_norm.weight, norm
    with accelerate(OPERATORS) as accelerated:
        y = theirs(x)[0]
        exact = copy.deepcopy(theirs).double()(x.double())[0]
        assert torch.equal(back(x)[0], y)
    assert not accelerated.report.left
    close(ours(x), exact, y)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window_size: tuple[int, int], **_: Any) -> Tensor:
    """The function of flash-attn that fla's attention calls on dense rows."""
    T, left = q.shape[1], window_size[0] if window_size[0] >= 0 else q.shape[1]
    distance = torch.arange(T)[:, None] - torch.arange(T)
    rows = (x.transpose(1, 2) for x in (q, k, v))
    mask = (distance >= 0) & (distance <= left)
    return nn.functional.scaled_dot_product_attention(*rows, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def _first(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return cos[: x.shape[1]].to(x), sin[: x.shape[1]].to(x)


INSTALLED = {**MODELS, "gdn, attention": ("GatedDeltaNet", {**MODELS["gdn"][1], "attn": {"layers": [1], **ATTENTION}})}


@pytest.mark.parametrize("case", INSTALLED)
def test_installed_models_have_equal_logits(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    need_fla()
    import fla.layers.attn
    import fla.models
    import fla.modules
    import fla.modules.mlp

    # fla's elementwise kernels have no CPU form.
    monkeypatch.setattr(fla.modules.mlp, "swiglu", lambda gate, up: nn.functional.silu(gate) * up)
    monkeypatch.setattr(
        fla.modules.RMSNorm,
        "forward",
        lambda self, x: nn.functional.rms_norm(x, x.shape[-1:], self.weight.to(x), self.eps),
    )
    rotary = sys.modules[fla.modules.RotaryEmbedding.__module__]
    monkeypatch.setattr(
        rotary, "rotary_embedding", lambda x, cos, sin, **_: rotary.rotary_embedding_ref(x, *_first(x, cos, sin))
    )
    monkeypatch.setattr(fla.layers.attn, "flash_attn_func", flash_attention)
    name, sizes = INSTALLED[case]
    # A list in fla 0.5.2, as before transformers 5, which now neither saves nor loads such models.
    tied = {"lm_head.weight": "model.embeddings.weight"}
    monkeypatch.setattr(getattr(fla.models, f"{name}ForCausalLM"), "_tied_weights_keys", tied)
    config = getattr(fla.models, f"{name}Config")(**sizes, fuse_norm=False, fuse_swiglu=False, fuse_cross_entropy=False)
    theirs = getattr(fla.models, f"{name}ForCausalLM")(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours, ids = from_fla(tmp_path / "theirs"), tokens()
    to_fla(ours).save(tmp_path / "back")
    back = type(theirs).from_pretrained(tmp_path / "back", fuse_norm=False, fuse_swiglu=False)
    with accelerate(OPERATORS) as accelerated, torch.no_grad():
        logits = theirs(ids, use_cache=False).logits
        exact = copy.deepcopy(theirs).double()(ids, use_cache=False).logits
        assert torch.equal(back(ids, use_cache=False).logits, logits)
    assert not accelerated.report.left
    close(ours(ids)[0], exact, logits)
