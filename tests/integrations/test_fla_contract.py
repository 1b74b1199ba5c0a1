"""The stand-in against fla 0.6.0's recorded signatures, and against the imports of programs that use fla."""

import ast
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from wyfold.integrations import fla
from wyfold.integrations.fla.stand_in import MODULES

SIGNATURES = json.loads((Path(__file__).parent / "fla_signatures.json").read_text(encoding="utf-8"))
"""Module -> name -> parameters with defaults; a class has those of `__init__` and `forward`."""

MISSING = "Wyfold stands in for fla here"

# Ascend's, and a default without which fla's own call fails.
DIFFERENT = {"get_multiprocessor_count.use_aicore", "causal_conv1d.weight"}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[fla.StandIn]:
    """The stand-in, installed over any real fla."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    with fla.install(force=True) as installed:
        yield installed


def needs_transformers(module: str) -> bool:
    return module.startswith("fla.models") and importlib.util.find_spec("transformers") is None


def written(default: Any) -> str:
    """A default value as the recorded source writes it, without torch's prefix."""
    text = str(default).removeprefix("torch.")
    return {"float": "float32", "device('cpu')": "cpu"}.get(text, text)


def source(text: str) -> Any:
    """The value of a literal; other source as it is."""
    try:
        return ast.literal_eval(text)
    except ValueError:
        return text


def accepts(function: Any, recorded: list[list[str]], name: str, skip: int = 0) -> list[str]:
    """How a function differs from recorded parameters: names in order, and defaults."""
    ours = list(inspect.signature(function).parameters.values())[skip:]
    by_name = {p.name: p for p in ours}
    order = [p.name for p in ours if p.kind is not p.KEYWORD_ONLY]
    found = []
    for place, (parameter, *default) in enumerate(recorded):
        mine = by_name.get(parameter)
        if mine is None:
            found.append(f"{name}.{parameter} is missing")
        elif mine.kind is not mine.KEYWORD_ONLY and order.index(parameter) != place:
            found.append(f"{name}.{parameter} is at {order.index(parameter)}, not {place}")
        elif default and written(source(default[0])) != written(mine.default):
            found.append(f"{name}.{parameter} is {mine.default}, not {default[0]}")
    return found


@pytest.mark.parametrize("module", SIGNATURES)
def test_names_are_flas_or_refused_by_name(module: str, stand_in: fla.StandIn):
    if needs_transformers(module):
        pytest.skip("transformers, of which fla's models are models, is not installed")
    ours = importlib.import_module(module)
    differences = []
    for name, recorded in SIGNATURES[module].items():
        if not hasattr(ours, name):
            with pytest.raises(ImportError, match=f"{MISSING}.* {module} has no {name}: "):
                exec(f"from {module} import {name}", {})
            continue
        thing = getattr(ours, name)
        if isinstance(recorded, list):
            differences += accepts(thing, recorded, name)
        elif issubclass(thing, torch.autograd.Function):
            assert thing.names == tuple(parameter for parameter, *_ in recorded["forward"])
            continue
        for method, parameters in recorded.items() if isinstance(recorded, dict) else ():
            differences += accepts(getattr(thing, method), parameters, f"{name}.{method}", skip=1)
    assert not [d for d in differences if d.split(" ")[0] not in DIFFERENT]


READ_FROM_KWARGS = {
    "chunk_delta_rule": ["chunk_size"],
    "chunk_gated_delta_product": ["chunk_indices", "chunk_indices_dp"],
    "chunk_gated_delta_rule": ["chunk_size", "use_gate_in_kernel", "A_log", "dt_bias", "transpose_state_layout"],
    "chunk_gdn2": ["chunk_size", "A_log", "dt_bias", "transpose_state_layout"],
    "chunk_iplr_delta_rule": ["chunk_size"],
    "chunk_kda": ["chunk_size", "A_log", "dt_bias", "transpose_state_layout"],
    "fused_recurrent_gated_delta_rule": ["transpose_state_layout"],
    "fused_recurrent_gdn2": ["transpose_state_layout"],
    "fused_recurrent_gla": ["transpose_state_layout"],
    "fused_recurrent_kda": ["transpose_state_layout"],
}
"""Keywords that fla's functions have behind a `**kwargs`, and those of `chunk_gated_delta_product` after 0.6.0.

`head_first` is refused on purpose (docs/migration.md).
"""


@pytest.mark.parametrize("name", READ_FROM_KWARGS)
def test_keywords_without_a_name_in_flas_signature_are_taken(name: str):
    parameters = inspect.signature(getattr(fla, name)).parameters
    assert set(READ_FROM_KWARGS[name]) <= set(parameters)
    assert "head_first" not in parameters


ELSEWHERE = {
    "chunk_gdn",
    "fused_recurrent_gdn",
    "l2_norm",
    "index_first_axis",
    "index_put_first_axis",
    "parallel_path_attention",
}
"""Names that fla assigns: aliases, and `apply` of its autograd functions."""


def test_every_function_of_the_stand_in_has_a_recorded_signature():
    recorded = {name for names in SIGNATURES.values() for name in names}
    offered = {name for names in MODULES.values() for name, thing in names.items() if callable(thing)}
    assert offered - ELSEWHERE <= recorded


# What each program imports from fla, from the released wheel of that version; "Kimi-Linear" is the model's code on the
# hub. A name after a "!" is refused, and the program then goes without.
PROGRAMS = {
    "megatron-core 0.19.2": """
        fla.modules.convolution causal_conv1d
        fla.modules.l2norm l2norm
        fla.ops.gated_delta_rule chunk_gated_delta_rule
    """,
    "ms-swift 4.6.0": """
        fla.utils tensor_cache input_guard
        fla.modules.convolution causal_conv1d
        fla.ops.gated_delta_rule chunk_gated_delta_rule
        fla.ops.gated_delta_rule.chunk chunk_gated_delta_rule
    """,
    "nemo-automodel 0.7.0": """
        fla.modules FusedRMSNormGated ShortConvolution
        fla.modules.conv causal_conv1d
        fla.modules.convolution causal_conv1d
        fla.ops.cp build_cp_context
        fla.ops.gated_delta_rule chunk_gated_delta_rule fused_recurrent_gated_delta_rule
        fla.ops.kda chunk_kda fused_recurrent_kda
        fla.ops.kda.gate fused_kda_gate
        fla.ops.cp.chunk_delta_h !pre_process_bwd_kernel_merged !merge_fwd_bwd_kernel
    """,
    "verl 0.9.1": """
        fla.modules FusedRMSNormGated
        fla.modules.convolution causal_conv1d
        fla.ops.cp.comm conv_cp_send_recv_fwd conv_cp_send_recv_bwd
        fla.ops.cp.context build_cp_context
        fla.ops.gated_delta_rule chunk_gated_delta_rule
        fla.ops.utils prepare_sequence_ids
    """,
    "axolotl 0.21.0": """
        fla.layers.utils index_first_axis pad_input get_unpad_data
        fla.modules FusedRMSNormGated ShortConvolution
        fla.modules.conv causal_conv1d
        fla.modules.convolution causal_conv1d !causal_conv1d_fwd !causal_conv1d_bwd
        fla.modules.l2norm !l2norm_fwd !l2norm_bwd
        fla.ops.gated_delta_rule chunk_gated_delta_rule
        fla.ops.gated_delta_rule.chunk !chunk_gated_delta_rule_fwd !chunk_gated_delta_rule_bwd
        fla.ops.kda chunk_kda fused_recurrent_kda
        fla.ops.kda.gate fused_kda_gate
        fla.layers.mamba !Mamba
        fla.layers.mamba2 !Mamba2
    """,
    "torchtitan 0.3.0": """
        fla.modules.conv.triton.ops CausalConv1dFunction
        fla.modules.conv.causal_conv1d causal_conv1d
        fla.ops.gated_delta_rule chunk_gated_delta_rule fused_recurrent_gated_delta_rule
        fla.ops.gated_delta_rule.chunk ChunkGatedDeltaRuleFunction
        fla.ops.gated_delta_rule.fused_recurrent FusedRecurrentFunction
    """,
    "Kimi-Linear": """
        fla.layers.utils get_unpad_data index_first_axis pad_input
        fla.modules FusedRMSNormGated ShortConvolution
        fla.ops.kda chunk_kda fused_recurrent_kda
        fla.ops.kda.gate fused_kda_gate
        fla.ops.utils.index prepare_cu_seqlens_from_mask prepare_lens_from_mask
        fla.utils tensor_cache
    """,
    "transformers 5.23.0": """
        fla.ops.gated_delta_rule chunk_gated_delta_rule fused_recurrent_gated_delta_rule
        fla.ops.kda chunk_kda fused_recurrent_kda
    """,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_find_what_they_import(program: str, stand_in: fla.StandIn):
    for line in PROGRAMS[program].strip().splitlines():
        module, *names = line.split()
        for name in names:
            if not name.startswith("!"):
                found: dict[str, Any] = {}
                exec(f"from {module} import {name}", found)
                assert callable(found[name]) or isinstance(found[name], type)
                continue
            with pytest.raises(ImportError, match=MISSING) as refusal:
                exec(f"from {module} import {name[1:]}", {})
            assert "docs/" not in str(refusal.value) and len(str(refusal.value)) < 300


def test_transformers_binds_the_stand_in(stand_in: fla.StandIn):
    pytest.importorskip("transformers", reason="transformers, which binds fla's functions, is not installed")
    hub = importlib.import_module("transformers.integrations.hub_kernels")
    names = set(hub._KERNELS_INTERNAL_PATH_MAPPINGS) & set(fla.__all__)
    assert "chunk_gated_delta_rule" in names
    for name in names:
        bound = hub.use_kernel_func_from_hub_with_fallback(name, "fla")(lambda: None)
        while "implementation" not in bound.__code__.co_freevars:
            bound = bound.__wrapped__
        assert inspect.getclosurevars(bound).nonlocals["implementation"] is getattr(fla, name)


def test_probing_for_a_missing_name_is_false(stand_in: fla.StandIn):
    """Programs ask with hasattr, getattr and try; none of them must see another kind of error."""
    ops = importlib.import_module("fla.ops")
    assert not hasattr(ops, "chunk_mesa_net") and getattr(ops, "chunk_mesa_net", 3) == 3
    with pytest.raises(AttributeError, match=rf"{MISSING}.* fla\.ops has no chunk_mesa_net"):
        ops.chunk_mesa_net  # noqa: B018
    for statement in (
        "import fla.ops.mesa_net",
        "from fla.ops.mesa_net import chunk_mesa_net",
        "from fla import nothing",
    ):
        with pytest.raises(ModuleNotFoundError, match=MISSING):
            exec(statement, {})
    assert importlib.util.find_spec("fla.ops.kda") is not None


def test_facts_are_read_when_asked_for(stand_in: fla.StandIn, monkeypatch: pytest.MonkeyPatch):
    utils = importlib.import_module("fla.utils")
    assert utils.device == utils.device_name == ("cuda" if torch.cuda.is_available() else "cpu")
    assert utils.is_amd is utils.IS_AMD and utils.check_pytorch_version("2.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    assert utils.device == "cuda" and utils.IS_NVIDIA_HOPPER and not utils.IS_NVIDIA_BLACKWELL
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert utils.device == "cuda" and utils.device_platform == "hip" and not utils.IS_NVIDIA_HOPPER
    monkeypatch.undo()
    if not torch.cuda.is_available():
        assert utils.get_all_max_shared_mem() == [-1] and not utils.check_shared_mem("ada")


def test_a_machine_without_transformers_has_all_but_the_models(stand_in: fla.StandIn, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("cache", "models"):
        monkeypatch.delitem(sys.modules, f"wyfold.integrations.fla.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "transformers" else find(name, *a)
    )
    assert importlib.import_module("fla.layers").KimiDeltaAttention is not None
    for module in ("fla.models", "fla.models.kda", "fla.models.utils"):
        with pytest.raises(ImportError, match=r"its models need transformers; pip install transformers"):
            importlib.import_module(module)
