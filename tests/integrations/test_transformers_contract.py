"""The installed transformers has the names and parameters that patches rely on.

A failure names what changed. Read what the change means, then adapt `integrations/transformers` and this file.
"""

import ast
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.integrations.hybrids import FAMILIES, PICKING, hybrid, skip_older

from wyfold.integrations.transformers import families
from wyfold.integrations.transformers.arguments import CACHES, FORWARD, difference
from wyfold.integrations.transformers.calls import Calls
from wyfold.integrations.transformers.masks import RECURRENT

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

KNOWN = {*FORWARD, *CACHES, "ple_input_ids"}
"""Parameters of text models whose effect on packing has been read; the last are token ids of per-layer embeddings."""
OPERATORS = ("chunk_gated_delta_rule", "chunk_kda")
"""Operators of fla that modelling files name where they have a delta rule."""

pytestmark = pytest.mark.parametrize("name", sorted(families.FAMILIES))


def module(name: str) -> ModuleType:
    skip_older(name)
    return families.FAMILIES[name].module


def changed(what: str) -> str:
    return f"transformers {transformers.__version__}: {what}"


def test_replaced_functions_have_the_parameters_of_their_replacements(name: str):
    family, calls = families.FAMILIES[name], Calls(families.FAMILIES[name], [], False)
    stock = {purpose: getattr(module(name), function) for purpose, function in family.functions.items()}
    stock["norm"] = getattr(module(name), family.norm).forward
    for purpose, function in stock.items():
        found = difference(function, calls.replacing(purpose, function))
        assert found is None, changed(f"{function.__qualname__} of {name} {found}")


def test_forward_has_only_parameters_whose_effect_is_known(name: str):
    forward = getattr(module(name), families.FAMILIES[name].model).forward
    found = [p.name for p in inspect.signature(forward).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    unknown, missing = set(found[1:]) - KNOWN, set(FORWARD) - set(found)
    assert not unknown, changed(f"forward of {name} has a new parameter {', '.join(sorted(unknown))}")
    assert not missing, changed(f"forward of {name} has no parameter {', '.join(sorted(missing))}")
    assert len(set(found) & set(CACHES)) == 1, changed(f"forward of {name} has none of the cache's names {CACHES}")


def test_layers_pass_boundaries_on_under_a_known_name(name: str):
    """Every function gets the model's keywords, with `cu_seq_lens_q`; to GDN's rules it is passed as `cu_seqlens`."""
    tree = ast.parse(inspect.getsource(module(name)))
    functions = families.FAMILIES[name].functions
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    for purpose in ("chunk", "recurrent", "conv"):
        made = [call for call in calls if call.func.id == functions[purpose]]  # type: ignore[attr-defined]
        assert made, changed(f"no layer of {name} calls {functions[purpose]}")
        for call in made:
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert None in keywords, changed(
                f"a layer of {name} calls {functions[purpose]} without the model's keywords"
            )
            renamed = {name: value for name, value in keywords.items() if name and "cu_seq" in name + value}
            assert renamed.keys() <= {"cu_seqlens"}, changed(f"{functions[purpose]} gets boundaries as {renamed}")


def test_norms_have_the_attributes_that_are_read(name: str):
    norm = getattr(module(name), families.FAMILIES[name].norm)(8)
    for attribute, kind in {"weight": torch.Tensor, "variance_epsilon": float, "activation": str}.items():
        assert isinstance(getattr(norm, attribute, None), kind), changed(f"the norm of {name} has no {attribute}")


def test_generate_prepares_masks_with_an_entry_for_recurrent_layers(name: str):
    from transformers.masking_utils import create_masks_for_generate

    module(name)
    if name not in (*FAMILIES, *PICKING):
        pytest.fail(f"{name} has no tiny model in tests/integrations/hybrids.py")
    model: Any = hybrid(name)
    mask, embedded = torch.ones(1, 4, dtype=torch.int64), torch.zeros(1, 4, 32)
    masks = create_masks_for_generate(model.config.get_text_config(), embedded, mask, None)
    assert isinstance(masks, dict) and RECURRENT in masks, changed(f"masks of {name} are {masks}")


def test_every_model_type_with_a_delta_rule_is_known(name: str):
    """One test for each known type, and one for all: types that transformers has and Wyfold does not."""
    module(name)
    folder = Path(transformers.__file__).parent / "models"
    found = {
        file.parent.name
        for file in folder.glob("*/modeling_*.py")
        if any(f'"{operator}"' in file.read_text(encoding="utf-8") for operator in OPERATORS)
    }
    assert name in found
    assert not found - families.FAMILIES.keys(), changed("model types with a delta rule that no patch serves")
