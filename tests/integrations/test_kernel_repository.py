"""The kernel repository for `use_kernels=True`: its folder, its layers, and models that run on it.

The package `kernels` is no requirement of the tests. What it demands of a repository is restated here; where it is
installed in a version that transformers accepts, models run through it.
"""

import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.integrations.hybrids import FAMILIES, hybrid, skip_older
from torch import Tensor, nn
from torch.nn.functional import normalize

from wyfold.integrations.transformers import families, hub, kernel_mapping, patch, write_kernel_repository

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

CLOSE = 1e-5
LENGTHS = [3, 1, 12]
B, T, H, HV, K, D = 2, 16, 2, 4, 16, 8


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kernel_repository(tmp_path_factory.mktemp("hub") / "wyfold-fla")


@pytest.fixture(scope="module")
def kernel(repository: Path) -> Iterator[Any]:
    """The repository, imported by path and under the id in its metadata, as `kernels` does it."""
    build = repository / hub.VARIANT
    name = json.loads((build / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, build / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module
    for imported in [imported for imported in sys.modules if imported.partition(".")[0] == name]:
        del sys.modules[imported]


def modelling(name: str) -> ModuleType:
    skip_older(name)
    return families.FAMILIES[name].module


def stock(name: str) -> dict[str, Any]:
    """Name in transformers' kernel mapping -> what a layer replaces."""
    family, module = families.FAMILIES[name], modelling(name)
    rules = ("chunk_kda", "fused_recurrent_kda") if family.channel else ("chunk_gated_delta_rule",)
    rules = rules if family.channel else (*rules, "fused_recurrent_gated_delta_rule")
    names = (*rules, "causal_conv1d_fn", "causal_conv1d_update")
    found = {mapped: getattr(module, function) for mapped, function in zip(names, family.functions.values())}
    return {**found, "RMSNormGated": getattr(module, family.norm)}


def drawn(channel: bool) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    heads = HV if channel else H  # KDA models have as many key heads as value heads
    q, k = (normalize(torch.randn(B, T, heads, K, generator=generator), dim=-1) for _ in range(2))
    v, beta = torch.randn(B, T, HV, K, generator=generator), torch.rand(B, T, HV, generator=generator)
    decay = torch.rand(B, T, HV, K, generator=generator) if channel else torch.rand(B, T, HV, generator=generator)
    return q, k, v, -decay, beta


def far(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max() / b.detach().abs().max())


# --- the folder ------------------------------------------------------------------------------------------------------


def test_the_folder_has_the_layout_of_the_hub(repository: Path, kernel: Any):
    files = {str(path.relative_to(repository)) for path in repository.rglob("*") if path.suffix in (".py", ".json")}
    assert files == {f"{hub.VARIANT}/{name}" for name in ("__init__.py", "layers.py", "metadata.json")}
    metadata = json.loads((repository / hub.VARIANT / "metadata.json").read_text())
    assert re.fullmatch(r"[a-z][-a-z0-9]*[a-z0-9]", metadata["name"]) and metadata["backend"] == {"type": "cuda"}
    assert all(issubclass(getattr(kernel.layers, layer), nn.Module) for layer in hub.LAYERS.values())
    assert callable(kernel.chunk_gated_delta_rule) and callable(kernel.chunk_kda)


def test_a_folder_with_contents_is_refused_and_unchanged(tmp_path: Path):
    (tmp_path / "mine").write_text("text")
    for place in (tmp_path, tmp_path / "mine"):
        with pytest.raises(FileExistsError, match="write_kernel_repository: folder must be new or empty, got /"):
            write_kernel_repository(place)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    (tmp_path / "empty").mkdir()
    assert write_kernel_repository(tmp_path / "empty") == tmp_path / "empty"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "mine"]


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub, "_FILES", {"build/one": "text", "build/one/two": "a file is no folder"})
    with pytest.raises(OSError):
        write_kernel_repository(tmp_path / "hub")
    assert not list(tmp_path.iterdir())


def test_mappings_name_only_what_a_model_type_has(repository: Path, tmp_path: Path):
    gdn, kda = kernel_mapping(repository, "qwen3_next"), kernel_mapping(repository, "kimi_linear", norm=True)
    assert gdn["fused_recurrent_gated_delta_rule"] == f"{repository}:recurrent_gated_delta_rule"
    assert gdn.keys() & kda.keys() == {"causal_conv1d_fn", "causal_conv1d_update"} and "RMSNormGated" in kda
    for folder, family, message in (
        (tmp_path, "qwen3_next", "folder must be a kernel repository with build"),
        (repository, "gpt2", "family must be one of"),
        (write_kernel_repository(tmp_path / "a:b"), "qwen3_next", "folder must have a path without colon"),
    ):
        with pytest.raises(ValueError, match=f"kernel_mapping: {message}"):
            kernel_mapping(folder, family)


# --- the layers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(families.FAMILIES))
def test_layers_are_what_kernels_accepts(kernel: Any, name: str):
    """The parameters of what they replace, in number and kind; no constructor, no other attributes."""
    assert stock(name).keys() == kernel_mapping_names(name)
    for mapped, replaced in stock(name).items():
        layer = getattr(kernel.layers, hub.LAYERS[mapped])
        theirs = type(replaced).forward if isinstance(replaced, nn.Module) else getattr(replaced, "forward", replaced)
        expected = [p for p in inspect.signature(theirs).parameters.values() if p.name != "self"]
        found = list(inspect.signature(layer.forward).parameters.values())[1:]
        changed = f"transformers {transformers.__version__}: {mapped} of {name} has other parameters than the layer"
        assert [(p.name, p.kind) for p in found[:-1]] == [(p.name, p.kind) for p in expected[:-1]], changed
        assert found[-1].kind == expected[-1].kind, changed
        assert layer.__init__ is nn.Module.__init__
        members = {member for member, _ in inspect.getmembers(layer)} - {m for m, _ in inspect.getmembers(nn.Module)}
        assert members == {"has_backward", "can_torch_compile"}


def kernel_mapping_names(name: str) -> set[str]:
    family = families.FAMILIES[name]
    return {*hub._RULES[family.channel], *hub._CONVOLUTIONS, *hub._NORM}


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear"])
def test_layers_compute_what_they_replace(kernel: Any, name: str):
    replaced, layers = stock(name), {key: getattr(kernel.layers, layer)() for key, layer in hub.LAYERS.items()}
    tensors = drawn(families.FAMILIES[name].channel)
    state = torch.randn(B, HV, K, K, generator=torch.Generator().manual_seed(1))
    for rule in list(replaced)[:2]:
        options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        # Up to 5.23 models of GDN repeat the key heads themselves.
        q, k = (x.repeat_interleave(HV // x.shape[2], 2) for x in tensors[:2])
        theirs = replaced[rule](q, k, *tensors[2:], **options)
        for found, expected in zip(layers[rule](*tensors, **options), theirs):
            assert far(found, expected) < CLOSE
        assert layers[rule](*tensors)[1] is None
    x, weight = tensors[2].flatten(2).mT, torch.randn(HV * K, 4, generator=torch.Generator().manual_seed(2))
    convolved = replaced["causal_conv1d_fn"](x, weight, None, activation="silu")
    assert far(layers["causal_conv1d_fn"](x, weight, None, activation="silu"), convolved) < CLOSE
    columns, their_columns = x[..., :4].clone(), x[..., :4].clone()
    step = x[..., 4:5], weight, None, "silu"
    found = layers["causal_conv1d_update"](step[0], columns, *step[1:])
    assert far(found, replaced["causal_conv1d_update"](step[0], their_columns, *step[1:])) < CLOSE
    assert torch.equal(columns, their_columns)
    norm, gate = replaced["RMSNormGated"](K), torch.randn_like(tensors[2])
    found = type(layers["RMSNormGated"]).forward(norm, tensors[2], gate)
    assert far(found, norm(tensors[2], gate)) < CLOSE


@pytest.mark.parametrize("channel", [False, True], ids=["gdn", "kda"])
def test_layers_keep_packed_documents_apart(kernel: Any, channel: bool):
    rules, layers = list(hub._RULES[channel]), {key: getattr(kernel.layers, at)() for key, at in hub.LAYERS.items()}
    tensors = tuple(x[:1] for x in drawn(channel))
    cu = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    parts = list(zip(*(x.split(LENGTHS, 1) for x in tensors)))
    for rule in rules:
        alone = torch.cat([layers[rule](*part)[0] for part in parts], 1)
        assert far(layers[rule](*tensors, cu_seqlens=cu)[0], alone) < CLOSE
        with pytest.raises(ValueError, match=f"{rule} must be called with use_cache=False for packed documents"):
            layers[rule](*tensors, output_final_state=True, cu_seqlens=cu)
        with pytest.raises(ValueError, match=f"{rule}: boundaries must be given as cu_seq_lens_q, got seq_idx alone"):
            layers[rule](*tensors, seq_idx=torch.zeros(1, T))
    x, weight = tensors[2].flatten(2).mT, torch.randn(HV * K, 4)
    alone = torch.cat([layers["causal_conv1d_fn"](part, weight) for part in x.split(LENGTHS, 2)], 2)
    assert far(layers["causal_conv1d_fn"](x, weight, cu_seq_lens_q=cu), alone) < CLOSE


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernels_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package `kernels` in a version that transformers takes, with the CPU among the devices of a mapping."""
    kernels = pytest.importorskip("kernels", reason="kernels is not installed")
    from transformers.utils import import_utils, kernel_config

    if not import_utils.is_kernels_available():
        bounds = f"{import_utils.KERNELS_MIN_VERSION} <= kernels < {import_utils.KERNELS_MAX_VERSION}"
        pytest.skip(f"transformers {transformers.__version__} takes {bounds}, installed is {kernels.__version__}")
    devices = [*kernel_config.KERNELS_SUPPORTED_DEVICE_TYPES, "cpu"]
    monkeypatch.setattr(kernel_config, "KERNELS_SUPPORTED_DEVICE_TYPES", devices)


@pytest.mark.parametrize("name", FAMILIES)
def test_models_run_on_a_local_repository(kernels_accepted: None, repository: Path, name: str, monkeypatch: Any):
    """Logits, greedy tokens and gradients of `set_use_kernels` are the stock ones; a patch works on top."""
    from transformers import KernelConfig

    from wyfold.integrations.transformers import operators

    calls: list[str] = []
    rule = operators.delta_rule
    monkeypatch.setattr(operators, "delta_rule", lambda op, *rest: (calls.append(op), rule(op, *rest))[1])
    ids = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(1))
    model = hybrid(name)

    def results() -> tuple[Tensor, Tensor]:
        tokens = model.eval().generate(ids[:, :8], max_new_tokens=5, do_sample=False)
        return model(ids).logits.detach(), tokens

    def learned() -> Tensor:
        model.train().zero_grad()
        model(ids, labels=ids).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    (logits, tokens), gradients, module = results(), learned(), modelling(name)
    try:
        mapping = kernel_mapping(repository, name, norm=True)
        model.eval().set_use_kernels(True, KernelConfig({**mapping}, use_local_kernel=True))
        ours, our_tokens = results()
        assert far(ours, logits) < CLOSE and torch.equal(our_tokens, tokens)
        assert set(calls) == set(list(mapping)[:2])
        with patch(model) as patched:
            calls.clear()
            assert far(model(ids).logits, logits) < CLOSE
        assert patched.report.served and not patched.report.stock
        assert all(op.startswith("patch: ") for op in calls)
        calls.clear()
        model.train().set_use_kernels(True, KernelConfig({**mapping}, use_local_kernel=True))
        assert far(learned(), gradients) < CLOSE and calls
    finally:  # kernels leaves the functions of a modelling file replaced
        for function in families.FAMILIES[name].functions.values():
            getattr(module, function).__dict__.pop("forward", None)
