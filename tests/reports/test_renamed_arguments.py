"""transformers 5.24 renamed the cache argument, and a refusal that looked for the old name passed everything.

A batch padded on the right was no longer refused where a cache was filled, nor packed documents beside a cache. A
stand-in for a modelling file has the parameters of either version, or of one to come.
"""

import inspect
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wyfold import UnsupportedError
from wyfold.integrations.transformers import families, patch

pytest.importorskip("transformers", reason="transformers is not installed")

IDS = torch.zeros(1, 4, dtype=torch.int64)
RIGHT = {"attention_mask": torch.tensor([[1, 1, 1, 0]])}
PACKED = {"position_ids": torch.tensor([[0, 1, 0, 1]])}
SIGNATURE = "self, input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, **kwargs"
RULE = (
    "query, key, value, g, beta, chunk_size, initial_state, output_final_state, use_qk_l2norm_in_kernel, **model_kwargs"
)


def function(parameters: str, result: Any = None) -> Any:
    """Returns its keywords, or a result, under a signature as a modelling file has it."""

    def called(*args: Any, **kwargs: Any) -> Any:
        return kwargs if result is None else result

    kinds = inspect.Parameter
    called.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            kinds(name.strip("*"), kinds.VAR_KEYWORD)
            if name.startswith("**")
            else kinds(name, kinds.POSITIONAL_OR_KEYWORD, default=None)
            for name in parameters.split(", ")
        ]
    )
    return called


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A modelling file whose names can be changed."""
    module: Any = ModuleType("transformers.models.later.modeling_later")
    module.torch_chunk_gated_delta_rule = function(RULE)
    module.torch_recurrent_gated_delta_rule = function(RULE)
    module.causal_conv1d_fn = function("hidden_states, weight, bias, activation, **kwargs")
    module.causal_conv1d_update = function("hidden_states, conv_state, weight, bias, activation")
    module.LaterModel = type("LaterModel", (nn.Module,), {"forward": function(SIGNATURE)})
    module.LaterNorm = type("LaterNorm", (nn.Module,), {"forward": function("self, hidden_states, gate")})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(families.FAMILIES, "later", families.Family("later", "LaterModel", "LaterNorm"))
    return module


@pytest.mark.parametrize("by_position", [True, False])
def test_a_cache_is_seen_under_the_name_of_its_version(later: Any, by_position: bool):
    """And under its former one, which 5.24 takes as a keyword and renames inside."""
    name = "cache"
    later.LaterModel.forward = function(SIGNATURE.replace("past_key_values", name))
    model, cache = later.LaterModel(), object()

    def call(attention_mask: Tensor | None = None, position_ids: Tensor | None = None) -> Any:
        if by_position:
            return model(IDS, attention_mask, position_ids, cache)
        return model(IDS, attention_mask=attention_mask, position_ids=position_ids, **{name: cache})

    with patch("later"):
        with pytest.raises(ValueError, match="padding on the right"):
            call(**RIGHT)
        with pytest.raises(ValueError, match="use_cache must be False with packed documents, got a cache"):
            call(**PACKED)
        assert call()[name] is cache
        with pytest.raises(ValueError, match="padding on the right"):
            model(IDS, past_key_values=cache, **RIGHT)


@pytest.mark.parametrize("name", ["past_key_values", "position_ids", "attention_mask", "use_cache", "**kwargs"])
def test_a_forward_with_other_parameters_is_refused_when_it_is_patched(later: Any, name: str):
    later.LaterModel.forward = function(", ".join(p for p in SIGNATURE.split(", ") if p != name))
    before = later.causal_conv1d_fn
    expected = "past_key_values or cache" if name == "past_key_values" else name.replace("*", "[*]")
    with pytest.raises(UnsupportedError, match=f"LaterModel has no parameter {expected}; known are"):
        patch("later")
    assert later.causal_conv1d_fn is before
    patch("later", packing=False).undo()  # which looks at none of them


@pytest.mark.parametrize(
    "owner, parameters, missing",
    [
        ("torch_chunk_gated_delta_rule", RULE.replace("initial_state", "state"), "initial_state"),
        ("torch_recurrent_gated_delta_rule", RULE.replace("output_final_state, ", ""), "output_final_state"),
        ("causal_conv1d_fn", "hidden_states, weight, bias, act, **kwargs", "activation"),
        ("causal_conv1d_update", "hidden_states, state, weight, bias, activation", "conv_state"),
        ("LaterNorm", "self, hidden_states, z", "gate"),
    ],
)
def test_functions_with_other_parameters_are_refused_when_they_are_patched(
    later: Any, owner: str, parameters: str, missing: str
):
    if owner == "LaterNorm":
        later.LaterNorm.forward = function(parameters)
    else:
        setattr(later, owner, function(parameters))
    with pytest.raises(UnsupportedError, match=f"{owner}.* has no parameter {missing}"):
        patch("later", norm=True)


def test_a_layer_that_is_not_handed_the_boundaries_is_refused(later: Any):
    """A version that hands them to layers under another name would mix the documents."""

    def forward(self: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        x = torch.zeros(1, 8, 4)
        return later.causal_conv1d_fn(x, torch.zeros(8, 4), None, "silu", boundaries=kwargs["cu_seq_lens_q"])

    forward.__signature__ = function(SIGNATURE).__signature__  # type: ignore[attr-defined]
    later.LaterModel.forward = forward
    with patch("later"):
        with pytest.raises(ValueError, match="later must hand cu_seq_lens_q on to its layers"):
            later.LaterModel()(IDS, **PACKED)
        later.causal_conv1d_fn(torch.zeros(1, 8, 4), torch.zeros(8, 4))  # by itself: no documents are packed


def test_arguments_beyond_the_signature_are_errors_as_in_python(later: Any):
    """They were dropped, and the keyword won over the position."""
    with patch("later"):
        with pytest.raises(TypeError, match="forward takes 6 positional arguments, got 7"):
            later.LaterModel()(IDS, None, None, None, None, None, None)
        with pytest.raises(TypeError, match="input_ids must be given once"):
            later.LaterModel()(IDS, input_ids=IDS)
