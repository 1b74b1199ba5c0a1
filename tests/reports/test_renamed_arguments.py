"""transformers 5.24 renamed the cache argument, and a check that read the old name accepted every call.

A batch padded on the right was no longer refused when a cache was filled, nor were packed documents with a cache. A
stand-in for a modelling file has the parameters of either version, or of a future one.
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
STATE = "initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False"
CHUNK = f"query, key, value, g, beta, chunk_size=64, {STATE}, **kwargs"
RECURRENT = f"query, key, value, g, beta, {STATE}, **kwargs"
CONV = "hidden_states, weight, bias=None, activation=None, **kwargs"
UPDATE = "hidden_states, conv_state, weight, bias=None, activation=None"


def function(parameters: str) -> Any:
    """A function with the parameters of a modelling file that returns its keywords."""

    def called(*args: Any, **kwargs: Any) -> Any:
        return kwargs

    called.__signature__ = inspect.signature(eval(f"lambda {parameters}: None"))  # type: ignore[attr-defined]
    return called


@pytest.fixture
def future_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A modelling file whose parameter names can be changed."""
    module: Any = ModuleType("transformers.models.later.modeling_later")
    module.torch_chunk_gated_delta_rule = function(CHUNK)
    module.torch_recurrent_gated_delta_rule = function(RECURRENT)
    module.causal_conv1d_fn = function(CONV)
    module.causal_conv1d_update = function(UPDATE)
    module.LaterModel = type("LaterModel", (nn.Module,), {"forward": function(SIGNATURE)})
    module.LaterNorm = type("LaterNorm", (nn.Module,), {"forward": function("self, hidden_states, gate=None")})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(families.FAMILIES, "later", families.Family("later", "LaterModel", "LaterNorm"))
    return module


@pytest.mark.parametrize("by_position", [True, False])
def test_a_cache_is_seen_under_the_name_of_its_version(future_module: Any, by_position: bool):
    """And under its former name, which 5.24 accepts as a keyword and renames inside."""
    name = "cache"
    future_module.LaterModel.forward = function(SIGNATURE.replace("past_key_values", name))
    model, cache = future_module.LaterModel(), object()

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
def test_a_forward_with_other_parameters_is_refused_when_it_is_patched(future_module: Any, name: str):
    future_module.LaterModel.forward = function(", ".join(p for p in SIGNATURE.split(", ") if p != name))
    before = future_module.causal_conv1d_fn
    expected = "past_key_values or cache" if name == "past_key_values" else name.replace("*", "[*]")
    with pytest.raises(UnsupportedError, match=f"LaterModel has no parameter {expected}; known are"):
        patch("later")
    assert future_module.causal_conv1d_fn is before
    patch("later", packing=False).undo()  # which reads none of them


@pytest.mark.parametrize(
    "owner, parameters, found",
    [
        ("torch_chunk_gated_delta_rule", CHUNK.replace("initial_state", "state"), "no parameter initial_state and an"),
        ("torch_chunk_gated_delta_rule", CHUNK.replace("**", "softcap=None, **"), "an unknown parameter softcap"),
        (
            "torch_recurrent_gated_delta_rule",
            RECURRENT.replace("output_final_state=False, ", ""),
            "no parameter output_f",
        ),
        ("causal_conv1d_fn", CONV.replace("activation", "act"), "no parameter activation and an unknown"),
        ("causal_conv1d_update", UPDATE.replace("conv_state", "state"), "no parameter conv_state and an unknown"),
        (
            "causal_conv1d_update",
            "conv_state, hidden_states, weight, bias=None, activation=None",
            "its parameters in the order",
        ),
        ("LaterNorm", "self, hidden_states, z", "no parameter gate and an unknown parameter z"),
    ],
)
def test_functions_with_other_parameters_are_refused_when_they_are_patched(
    future_module: Any, owner: str, parameters: str, found: str
):
    if owner == "LaterNorm":
        future_module.LaterNorm.forward = function(parameters)
    else:
        setattr(future_module, owner, function(parameters))
    with pytest.raises(UnsupportedError, match=f"{owner}.* has {found}"):
        patch("later", norm=True)


def test_another_default_is_refused_when_it_is_patched(future_module: Any):
    """A layer that leaves the argument out would get the replacement's default."""
    future_module.torch_chunk_gated_delta_rule = function(CHUNK.replace("kernel=False", "kernel=True"))
    with pytest.raises(UnsupportedError, match="the default True for use_qk_l2norm_in_kernel, expected the default F"):
        patch("later")


def test_functions_that_are_modules_are_read_by_their_forward(future_module: Any):
    """The package `kernels` makes a module of every function; it was refused as one without parameters."""

    class Func(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return kwargs

    Func.forward.__signature__ = function(f"self, {CHUNK}").__signature__  # type: ignore[attr-defined]
    future_module.torch_chunk_gated_delta_rule = Func()
    with patch("later"):
        assert not isinstance(future_module.torch_chunk_gated_delta_rule, nn.Module)
    Func.forward.__signature__ = function(f"self, {RECURRENT}").__signature__  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match="no parameter chunk_size"):
        patch("later")


def test_a_dict_of_masks_without_the_recurrent_layers_is_refused(future_module: Any):
    """Its padding was not looked for, so a renamed layer type would have hidden it."""
    masks = {"full_attention": None, "recurrent": RIGHT["attention_mask"]}
    with (
        patch("later"),
        pytest.raises(ValueError, match=r"an entry 'linear_attention' .*got full_attention, recurrent"),
    ):
        future_module.LaterModel()(IDS, attention_mask=masks, past_key_values=object())


def test_a_layer_that_does_not_get_the_boundaries_is_refused(future_module: Any):
    """A version that passes boundaries to layers under another name would mix the documents."""

    def forward(self: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        x = torch.zeros(1, 8, 4)
        return future_module.causal_conv1d_fn(x, torch.zeros(8, 4), None, "silu", boundaries=kwargs["cu_seq_lens_q"])

    forward.__signature__ = function(SIGNATURE).__signature__  # type: ignore[attr-defined]
    future_module.LaterModel.forward = forward
    with patch("later"):
        with pytest.raises(ValueError, match="later must hand cu_seq_lens_q on to its layers"):
            future_module.LaterModel()(IDS, **PACKED)
        future_module.causal_conv1d_fn(
            torch.zeros(1, 8, 4), torch.zeros(8, 4)
        )  # outside of a model: no documents are packed


def test_arguments_beyond_the_signature_are_errors_as_in_python(future_module: Any):
    """They were dropped, and a keyword overrode a positional argument."""
    with patch("later"):
        with pytest.raises(TypeError, match="forward takes 6 positional arguments, got 7"):
            future_module.LaterModel()(IDS, None, None, None, None, None, None)
        with pytest.raises(TypeError, match="input_ids must be given once"):
            future_module.LaterModel()(IDS, input_ids=IDS)
