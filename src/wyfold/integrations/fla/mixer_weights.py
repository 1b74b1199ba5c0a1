"""Names, shapes and options of fla's recurrent layers and its Attention, and of Wyfold's layers.

fla has a projection and, except for GLA, a convolution for each of q, k and v; Wyfold has one of each for all three.
The other tensors differ in name, and KDA's dt_bias in shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold import layers
from wyfold.layers.delta_net import DeltaMixer
from wyfold.runtime.check import UnsupportedError

_FIXED: dict[str, Any] = {"use_short_conv": True, "conv_bias": False}


Mixer = DeltaMixer | layers.GatedLinearAttention | layers.GatedDeltaNet2


class Kind(NamedTuple):
    """One of the layers.

    Attributes:
        ours: Wyfold's class.
        pattern: Its name in a decoder's pattern.
        model_type, architecture: fla's names of the language model; empty if it has none.
        fixed: fla's options that Wyfold's layer has one value of.
        names: Wyfold's name -> fla's, of tensors that both have.
        conv: Whether each of the layers has a convolution.
    """

    ours: type[Mixer]
    pattern: str
    model_type: str
    architecture: str
    fixed: dict[str, Any]
    names: dict[str, str]
    conv: bool = True


_NAMES = {"beta.weight": "b_proj.weight", "norm.weight": "o_norm.weight", "out.weight": "o_proj.weight"}
_DECAY = {"decay_parameters.A_log": "A_log", "decay_parameters.dt_bias": "dt_bias"}

_LOW_RANK = {
    "decay_down.weight": "f_proj.0.weight",
    "decay_up.weight": "f_proj.1.weight",
    "gate_down.weight": "g_proj.0.weight",
    "gate_up.weight": "g_proj.1.weight",
    "gate_up.bias": "g_proj.1.bias",
}

KINDS: dict[str, Kind] = {
    "DeltaNet": Kind(
        layers.DeltaNet,
        "delta_net",
        "delta_net",
        "DeltaNetForCausalLM",
        {**_FIXED, "use_gate": False, "use_beta": True, "qk_activation": "silu", "qk_norm": "l2"},
        _NAMES,
    ),
    "GatedDeltaNet": Kind(
        layers.GatedDeltaNet,
        "gated_delta_net",
        "gated_deltanet",
        "GatedDeltaNetForCausalLM",
        {**_FIXED, "use_gate": True, "output_gate_activation": "swish"},
        {**_NAMES, **_DECAY, "decay.weight": "a_proj.weight", "gate.weight": "g_proj.weight"},
    ),
    "GatedDeltaNet2": Kind(
        layers.GatedDeltaNet2,
        "gated_delta_net2",
        "",
        "",
        _FIXED,
        {
            **{name: theirs for name, theirs in _NAMES.items() if name != "beta.weight"},
            **_DECAY,
            "erase.weight": "b_proj.weight",
            "write.weight": "w_proj.weight",
            **_LOW_RANK,
        },
    ),
    "GatedDeltaProduct": Kind(
        layers.GatedDeltaProduct,
        "gated_delta_product",
        "gated_deltaproduct",
        "GatedDeltaProductForCausalLM",
        {**_FIXED, "use_output_gate": True},
        {**_NAMES, **_DECAY, "forget.weight": "a_proj.weight", "gate.weight": "g_proj.weight"},
    ),
    "GatedLinearAttention": Kind(
        layers.GatedLinearAttention,
        "gla",
        "gla",
        "GLAForCausalLM",
        {
            "conv_bias": False,
            "use_output_gate": True,
            "fuse_norm": True,
            "elementwise_affine": True,
            "feature_map": None,
            "clamp_min": None,
        },
        {
            "decay_down.weight": "gk_proj.0.weight",
            "decay_up.weight": "gk_proj.1.weight",
            "decay_up.bias": "gk_proj.1.bias",
            "gate.weight": "g_proj.weight",
            "norm.weight": "g_norm_swish_gate.weight",
            "out.weight": "o_proj.weight",
        },
        conv=False,
    ),
    "KimiDeltaAttention": Kind(
        layers.KimiDeltaAttention,
        "kda",
        "kda",
        "KDAForCausalLM",
        _FIXED,
        {
            **_NAMES,
            **_DECAY,
            **_LOW_RANK,
        },
    ),
}
"""By the name of fla's class, which is also that of Wyfold's."""


_NARROW = ("KimiDeltaAttention", "GatedDeltaNet2")
"""Layers whose decays fla projects through V channels, and Wyfold through K. dt_bias is flat in fla."""


def our_arguments(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of Wyfold's layer, from those of fla's constructor with all defaults filled in.

    Raises:
        UnsupportedError: Wyfold's layer lacks an option.
        ValueError: Widths are not whole numbers.
    """
    for option, value in KINDS[name].fixed.items():
        found = given.get(option, value)
        if found != value and (found, value) != ("silu", "swish"):
            raise _lacking(name, option, found)
    H, width = given["num_heads"], given["hidden_size"]
    HV = given.get("num_v_heads") or H
    if name == "GatedLinearAttention" and (given.get("num_kv_heads") or H) != H:
        raise _lacking(name, "num_kv_heads", given["num_kv_heads"])
    if name in ("DeltaNet", "GatedLinearAttention"):
        K, V = (_whole(name, f"expand_{of}", width * given[f"expand_{of}"] / H) for of in "kv")
    else:
        K = given["head_dim"]
        V = _whole(name, "expand_v", K * given["expand_v"])
    if name in _NARROW and V != K:
        raise _lacking(name, "expand_v", given["expand_v"])
    sizes = {"hidden_size": width, "num_heads": H, "num_v_heads": HV, "head_dim": K, "head_v_dim": V}
    if name == "GatedLinearAttention":
        rank, normalizer = given.get("gate_low_rank_dim", 16), given.get("gate_logit_normalizer", 16)
        own = {"decay_rank": rank, "decay_normalizer": float(normalizer)}
        own["short_conv"] = given.get("conv_size", 4) if given.get("use_short_conv") else None
        return {**sizes, **own, "norm_eps": given["norm_eps"]}
    options = {name: given[name] for name in ("conv_size", "allow_neg_eigval", "norm_eps")}
    if name == "GatedDeltaProduct":
        options |= {"num_householder": given["num_householder"], "forget_gate": given["use_forget_gate"]}
    bound = {"lower_bound": given["lower_bound"]} if name == "KimiDeltaAttention" else {}
    return {**sizes, **options, **bound}


def their_arguments(layer: Mixer) -> dict[str, Any]:
    """Arguments of fla's constructor, from Wyfold's layer.

    Raises:
        UnsupportedError: fla's layer lacks an option.
    """
    name = type(layer).__name__
    K, V, H, HV = layer.head_dim, layer.head_v_dim, layer.num_heads, layer.num_v_heads
    norm: Any = layer.norm
    if getattr(norm, "round_before_weight", False):
        raise _lacking(f"fla's {name}", "round_before_weight of the norm", True)
    if isinstance(layer, layers.GatedLinearAttention):
        return _their_gla_arguments(layer)
    shared = {
        "hidden_size": layer.hidden_size,
        "num_heads": H,
        "conv_size": layer.conv.conv_size,
        "allow_neg_eigval": layer.allow_neg_eigval,
        "norm_eps": norm.eps,
    }
    if name == "DeltaNet":
        if HV != H:
            raise _lacking("fla's DeltaNet", "num_v_heads", HV)
        width = layer.hidden_size
        return {**shared, "expand_k": _expansion(H * K, width), "expand_v": _expansion(H * V, width)}
    if name in _NARROW and V != K:
        raise _lacking(f"fla's {name}", "projections of K for decays of a layer with head_v_dim", V)
    if name == "GatedDeltaNet2" and HV != H:
        raise _lacking("fla's GatedDeltaNet2", "decays and erase gates for each value head, of num_v_heads", HV)
    if name == "KimiDeltaAttention":
        bound: Any = layer.lower_bound
        shared |= {"lower_bound": bound, "safe_gate": bound is not None and bound >= -5}
    if isinstance(layer, layers.GatedDeltaProduct):
        shared |= {"num_householder": layer.updates, "use_forget_gate": layer.forget is not None}
    return {**shared, "head_dim": K, "expand_v": _expansion(V, K), "num_v_heads": HV}


def _their_gla_arguments(layer: layers.GatedLinearAttention) -> dict[str, Any]:
    K, V, H, width = layer.head_dim, layer.head_v_dim, layer.num_heads, layer.hidden_size
    if layer.num_v_heads != H:
        raise _lacking("fla's GatedLinearAttention", "num_v_heads", layer.num_v_heads)
    return {
        "hidden_size": width,
        "num_heads": H,
        "expand_k": _expansion(H * K, width),
        "expand_v": _expansion(H * V, width),
        "gate_low_rank_dim": layer.decay_down.out_features,
        "gate_logit_normalizer": layer.decay_normalizer,
        "norm_eps": layer.norm.eps,
        **({} if layer.conv is None else {"use_short_conv": True, "conv_size": layer.conv.conv_size}),
    }


def our_weights(name: str, theirs: Mapping[str, Tensor], HV: int) -> dict[str, Tensor]:
    """Tensors of Wyfold's layer, from those of fla's.

    Raises:
        ValueError: A tensor is missing or unknown.
    """
    names, conv = dict(KINDS[name].names), KINDS[name].conv or any("conv1d" in of for of in theirs)
    if name == "GatedDeltaProduct" and "a_proj.weight" not in theirs:  # without a forget gate
        for part in ("forget.weight", *_DECAY):
            del names[part]
    triples = [f"{of}_{part}.weight" for part in ("proj", *(["conv1d"] if conv else [])) for of in "qkv"]
    expected = {*names.values(), *triples}
    if missing := expected - theirs.keys():
        raise ValueError(
            f"from_fla: {name} must have the tensors {', '.join(sorted(missing))}, got none of these names"
        )
    if unknown := theirs.keys() - expected:
        raise ValueError(f"from_fla: {name} must have known tensors, got {', '.join(sorted(unknown))}")
    weights = {our_name: theirs[name] for our_name, name in names.items()}
    weights["qkv.weight"] = torch.cat([theirs[name] for name in triples[:3]])
    if conv:
        weights["conv.weight"] = torch.cat([theirs[name].squeeze(1) for name in triples[3:]])
    # fla keeps the weight of an ungated norm in float32.
    weights["norm.weight"] = weights["norm.weight"].to(weights["out.weight"].dtype)
    if name == "GatedDeltaNet2":
        _repeat_heads(weights, HV)
    if name in _NARROW:
        weights["decay_parameters.dt_bias"] = weights["decay_parameters.dt_bias"].reshape(HV, -1)
    return weights


def _repeat_heads(weights: dict[str, Tensor], HV: int) -> None:
    """Repeat what GDN-2 has for each key head in fla, and for each value head in Wyfold, in place."""
    H = weights["decay_parameters.A_log"].shape[0]
    for name in ("erase.weight", "decay_up.weight", *_DECAY):
        rows = weights[name].unflatten(0, (H, -1)).repeat_interleave(HV // H, 0)
        weights[name] = rows.flatten(0, 1)


def their_weights(layer: Mixer) -> dict[str, Tensor]:
    """Views of Wyfold's tensors, as fla's layer has them."""
    ours = {name: tensor.detach() for name, tensor in layer.state_dict().items()}
    names = KINDS[type(layer).__name__].names
    weights = {name: ours[our_name] for our_name, name in names.items() if our_name in ours}
    for of, rows in zip("qkv", ours["qkv.weight"].split(layer.channels), strict=True):
        weights[f"{of}_proj.weight"] = rows
    for of, taps in zip(
        "qkv", ours["conv.weight"].split(layer.channels) if "conv.weight" in ours else (), strict=False
    ):
        weights[f"{of}_conv1d.weight"] = taps.unsqueeze(1)
    if "dt_bias" in weights:
        weights["dt_bias"] = weights["dt_bias"].flatten()
    return weights


# --- softmax attention in some layers of a model ---------------------------------------------------------------------

_ATTENTION = {"num_kv_heads": None, "window_size": None, "rope_theta": 10_000.0}
"""Fields of `attn` that Wyfold's attention has, with fla's defaults."""


def our_attention(attn: Any, hidden_size: int) -> tuple[list[int], dict[str, Any]]:
    """Layers with softmax attention, and its arguments, from the field `attn` of a model's configuration.

    Raises:
        UnsupportedError: Its layers differ among each other, or have biases.
        ValueError: A field is unknown or missing.
    """
    specs = [] if attn is None else [attn] if isinstance(attn, Mapping) else list(attn)
    numbers: list[int] = []
    found: list[dict[str, Any]] = []
    for spec in specs:
        if missing := {"layers", "num_heads"} - spec.keys():
            raise ValueError(f"from_fla: attn must have {', '.join(sorted(missing))}, got {dict(spec)}")
        if unknown := spec.keys() - _ATTENTION.keys() - {"layers", "num_heads", "qkv_bias"}:
            raise ValueError(f"from_fla: fields of attn must be known, got {', '.join(sorted(unknown))}")
        if spec.get("qkv_bias"):
            raise _lacking("attn", "qkv_bias", True)
        heads, (kv_heads, window, base) = spec["num_heads"], (spec.get(key, _ATTENTION[key]) for key in _ATTENTION)
        numbers += spec["layers"]
        found.append(
            {
                "num_heads": heads,
                "num_kv_heads": heads if kv_heads is None else kv_heads,
                "head_dim": hidden_size // heads,
                "window": window,
                "rope_base": float(base),
            }
        )
    if any(arguments != found[0] for arguments in found):
        raise UnsupportedError(
            "from_fla: attn must be the same in all its layers", {"wyfold": "a decoder has one kind of attention"}
        )
    return numbers, found[0] if found else {}


def their_attention(layer: layers.SoftmaxAttention, numbers: list[int]) -> dict[str, Any]:
    """The field `attn` of a model's configuration.

    Raises:
        UnsupportedError: fla's heads have another width.
    """
    if layer.head_dim * layer.num_heads != layer.hidden_size:
        raise _lacking("fla's Attention", "head_dim", layer.head_dim)
    return {
        "layers": numbers,
        "num_heads": layer.num_heads,
        "num_kv_heads": layer.num_kv_heads,
        "qkv_bias": False,
        "window_size": layer.window,
        "rope_theta": layer.rope_base,
    }


def our_attention_weights(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of Wyfold's attention, from those of fla's.

    Raises:
        ValueError: A tensor is missing or unknown.
    """
    expected = [f"{of}_proj.weight" for of in "qkvo"]
    if theirs.keys() != set(expected):
        got = ", ".join(sorted(theirs)) or "none"
        raise ValueError(f"from_fla: attention must have the tensors {', '.join(expected)}, got {got}")
    return {"qkv.weight": torch.cat([theirs[name] for name in expected[:3]]), "out.weight": theirs[expected[3]]}


def their_attention_weights(layer: layers.SoftmaxAttention) -> dict[str, Tensor]:
    """Views of Wyfold's tensors, as fla's attention has them."""
    D, keys = layer.head_dim, layer.num_kv_heads * layer.head_dim
    q, k, v = layer.qkv.weight.detach().split([layer.num_heads * D, keys, keys])
    return {f"{of}_proj.weight": tensor for of, tensor in zip("qkvo", (q, k, v, layer.out.weight), strict=True)}


# --- numbers and refusals --------------------------------------------------------------------------------------------


def _expansion(width: int, unit: int) -> float:
    """width / unit, such that fla's `int(unit * expansion)` is width."""
    expansion = width / unit
    return expansion if int(unit * expansion) == width else math.nextafter(expansion, math.inf)


def _whole(name: str, what: str, width: float) -> int:
    if abs(width - round(width)) > 1e-5 * abs(width):
        raise ValueError(f"from_fla: {what} of {name} must give whole widths, got {width}")
    return round(width)


def _lacking(name: str, option: str, value: object) -> UnsupportedError:
    return UnsupportedError(
        f"{name} has no option {option}={value!r}",
        {"instead": "wyfold.integrations.fla.layers and models have all of fla's options, and load its checkpoints"},
    )
