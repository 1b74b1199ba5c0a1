"""Names of the stand-in for `fla`: which module of fla's has which of Wyfold's functions and classes."""

from __future__ import annotations

from types import ModuleType

from wyfold.integrations.fla import (
    attention,
    environment,
    functions,
    gated_norms,
    gla,
    indices,
    layers,
    linear_attention,
    low_rank,
    modules,
    naive,
    padding,
    pieces,
    ranks,
    rwkv7,
    rwkv7_pieces,
    ttt,
)
from wyfold.integrations.fla import recurrences as rules

_Names = dict[str, object]
_HERE = "wyfold.integrations.fla"


def _of(module: ModuleType, *names: str) -> _Names:
    return {name: getattr(module, name) for name in names}


_DELTA = _of(rules, "chunk_delta_rule", "fused_recurrent_delta_rule")
_GDN_CHUNK = _of(rules, "chunk_gated_delta_rule", "chunk_gdn")
_GDN_STEPS = _of(rules, "fused_recurrent_gated_delta_rule", "fused_recurrent_gdn")
_GDN_NAIVE = _of(naive, "naive_chunk_gated_delta_rule", "naive_recurrent_gated_delta_rule")
_KDA = _of(rules, "chunk_kda", "fused_recurrent_kda")
_DPLR = _of(low_rank, "chunk_dplr_delta_rule", "fused_recurrent_dplr_delta_rule")
_IPLR = _of(low_rank, "chunk_iplr_delta_rule", "fused_recurrent_iplr_delta_rule")
_RWKV7_STEPS = _of(rwkv7, "fused_mul_recurrent_rwkv7", "fused_recurrent_rwkv7")
_RWKV7 = {**_of(rwkv7, "chunk_rwkv7"), **_RWKV7_STEPS}
_GDN2 = _of(low_rank, "chunk_gdn2", "fused_recurrent_gdn2")
_COMBA = _of(low_rank, "chunk_comba", "fused_recurrent_comba")
_PRODUCT = _of(rules, "chunk_gated_delta_product")
_GLA = _of(gla, "chunk_gla", "fused_recurrent_gla")


def _linear(name: str, *forms: str) -> dict[str, _Names]:
    """fla's package of one kind of linear attention, and its module of each form."""
    each = {form: _of(linear_attention, f"{form}_{name}") for form in forms}
    package = f"fla.ops.{name}"
    return {package: {k: v for names in each.values() for k, v in names.items()}} | {
        f"{package}.{form}": names for form, names in each.items()
    }


_LINEAR = {
    **_linear("simple_gla", "chunk", "fused_chunk", "fused_recurrent", "parallel"),
    **_linear("linear_attn", "chunk", "fused_chunk", "fused_recurrent"),
    **_linear("lightning_attn", "chunk", "fused_recurrent"),
    **_linear("retention", "chunk", "fused_chunk", "fused_recurrent", "parallel"),
}
_TTT = _of(ttt, "chunk_ttt_linear", "fused_chunk_ttt_linear")
_PATH = _of(attention, "parallel_path_attn")
_SOLVE = _of(pieces, "solve_tril")
_CONV = {
    **_of(modules, "ShortConvolution"),
    **_of(pieces, "causal_conv1d", "causal_conv1d_update"),
    **_of(functions, "CausalConv1dFunction"),
}
_GATED_NORMS = _of(
    gated_norms,
    "FusedLayerNormGated",
    "FusedLayerNormSwishGateLinear",
    "FusedRMSNormGated",
    "FusedRMSNormSwishGateLinear",
)
_GATED_NORM = {
    **_GATED_NORMS,
    **_of(gated_norms, "layer_norm_gated", "layer_norm_swish_gate_linear"),
    **_of(gated_norms, "rms_norm_gated", "rms_norm_swish_gate_linear"),
}
_GROUP_NORM = _of(gated_norms, "layernorm_fn", "rmsnorm_fn")
_L2 = {**_of(modules, "L2Norm"), **_of(pieces, "l2norm"), "l2_norm": pieces.l2norm}
_NORM = _of(modules, "RMSNorm")
_INDEX = _of(
    indices,
    "get_max_num_splits",
    "prepare_chunk_indices",
    "prepare_chunk_indices_static",
    "prepare_chunk_offsets",
    "prepare_cu_seqlens_from_lens",
    "prepare_cu_seqlens_from_mask",
    "prepare_lens",
    "prepare_lens_from_mask",
    "prepare_position_ids",
    "prepare_sequence_ids",
    "prepare_token_indices",
)
_COMM = _of(
    ranks,
    "all_gather_into_tensor",
    "all_reduce_sum",
    "conv_cp_send_recv_bwd",
    "conv_cp_send_recv_fwd",
    "send_recv_bwd",
    "send_recv_fwd",
)
_CONTEXT = _of(ranks, "FLACPContext", "build_cp_context")
_LAYERS = _of(layers, *layers.NAMES)

MODULES: dict[str, _Names] = {
    "fla": {},
    "fla.utils": {},
    "fla.ops": {
        **_DELTA,
        **_GDN_CHUNK,
        **_GDN_STEPS,
        **_KDA,
        **_DPLR,
        **_IPLR,
        **_of(rwkv7, "chunk_rwkv7", "fused_recurrent_rwkv7"),
        **_COMBA,
        **_PATH,
        **_PRODUCT,
        **_GLA,
        **{name: thing for names in _LINEAR.values() for name, thing in names.items()},
    },
    "fla.ops.comba": _COMBA,
    "fla.ops.comba.chunk": _of(low_rank, "chunk_comba"),
    "fla.ops.comba.fused_recurrent": _of(low_rank, "fused_recurrent_comba"),
    "fla.ops.gdn2": _GDN2,
    "fla.ops.gdn2.chunk": _of(low_rank, "chunk_gdn2"),
    "fla.ops.gdn2.fused_recurrent": _of(low_rank, "fused_recurrent_gdn2"),
    "fla.ops.generalized_delta_rule": {**_DPLR, **_IPLR},
    "fla.ops.generalized_delta_rule.dplr": _DPLR,
    "fla.ops.generalized_delta_rule.dplr.chunk": _of(low_rank, "chunk_dplr_delta_rule"),
    "fla.ops.generalized_delta_rule.dplr.fused_recurrent": _of(low_rank, "fused_recurrent_dplr_delta_rule"),
    "fla.ops.generalized_delta_rule.iplr": _IPLR,
    "fla.ops.generalized_delta_rule.iplr.chunk": _of(low_rank, "chunk_iplr_delta_rule"),
    "fla.ops.generalized_delta_rule.iplr.fused_recurrent": _of(low_rank, "fused_recurrent_iplr_delta_rule"),
    "fla.ops.rwkv7": _RWKV7,
    "fla.ops.rwkv7.chunk": _of(rwkv7, "chunk_rwkv7"),
    "fla.ops.rwkv7.channel_mixing": _of(rwkv7_pieces, "channel_mixing_rwkv7", "channel_mixing_rwkv7_torch"),
    "fla.ops.rwkv7.fused_addcmul": _of(rwkv7_pieces, "fused_addcmul_rwkv7", "torch_addcmul_rwkv7"),
    "fla.ops.rwkv7.fused_k_update": _of(rwkv7_pieces, "fused_k_rwkv7", "k_update_ref"),
    "fla.ops.rwkv7.fused_recurrent": _RWKV7_STEPS,
    "fla.ops.rwkv7.gate_output_correction": _of(rwkv7_pieces, "gate_output_correction", "gate_output_correction_ref"),
    "fla.ops.delta_rule": _DELTA,
    "fla.ops.delta_rule.chunk": _of(rules, "chunk_delta_rule"),
    "fla.ops.delta_rule.fused_recurrent": _of(rules, "fused_recurrent_delta_rule"),
    "fla.ops.delta_rule.naive": _of(naive, "delta_rule_chunkwise", "delta_rule_recurrence"),
    "fla.ops.gated_delta_rule": {**_GDN_CHUNK, **_GDN_STEPS, **_GDN_NAIVE},
    "fla.ops.gated_delta_rule.chunk": {**_GDN_CHUNK, **_of(functions, "ChunkGatedDeltaRuleFunction")},
    "fla.ops.gated_delta_rule.fused_recurrent": {**_GDN_STEPS, **_of(functions, "FusedRecurrentFunction")},
    "fla.ops.gated_delta_rule.gate": {**_of(pieces, "fused_gdn_gate"), **_of(naive, "naive_gdn_gate")},
    "fla.ops.gated_delta_rule.naive": _GDN_NAIVE,
    "fla.ops.gated_delta_product": _PRODUCT,
    "fla.ops.gated_delta_product.chunk": _PRODUCT,
    "fla.ops.gla": _GLA,
    "fla.ops.gla.chunk": _of(gla, "chunk_gla"),
    "fla.ops.gla.fused_recurrent": _of(gla, "fused_recurrent_gla"),
    **_LINEAR,
    "fla.ops.kda": _KDA,
    "fla.ops.kda.chunk": _of(rules, "chunk_kda"),
    "fla.ops.kda.fused_recurrent": _of(rules, "fused_recurrent_kda"),
    "fla.ops.kda.gate": {
        **_of(pieces, "fused_kda_gate"),
        **_of(naive, "naive_kda_gate", "naive_kda_lowerbound_gate"),
    },
    "fla.ops.kda.naive": _of(naive, "naive_chunk_kda", "naive_recurrent_kda"),
    "fla.ops.path_attn": _PATH,
    "fla.ops.path_attn.parallel": _of(attention, "parallel_path_attn", "parallel_path_attention"),
    "fla.ops.ttt": _TTT,
    "fla.ops.ttt.chunk": _of(ttt, "chunk_ttt_linear"),
    "fla.ops.ttt.fused_chunk": _of(ttt, "fused_chunk_ttt_linear"),
    "fla.ops.ttt.naive": _of(naive, "chunk_ttt_linear_ref"),
    "fla.ops.utils": {**_SOLVE, **_INDEX},
    "fla.ops.utils.index": {**_INDEX, **_of(indices, "prepare_split_cu_seqlens")},
    "fla.ops.utils.solve_tril": _SOLVE,
    "fla.ops.common": {},
    "fla.ops.common.chunk_scaled_dot_kkt": _of(pieces, "chunk_scaled_dot_kkt_fwd"),
    "fla.ops.cp": {**_COMM, **_CONTEXT},
    "fla.ops.cp.comm": _COMM,
    "fla.ops.cp.context": _CONTEXT,
    "fla.modules": {**_of(modules, "GatedMLP", "L2Norm", "RMSNorm", "ShortConvolution"), **_GATED_NORMS},
    "fla.modules.causal_conv1d": _CONV,
    "fla.modules.causal_conv1d.ops": _CONV,
    "fla.modules.conv": _CONV,
    "fla.modules.conv.causal_conv1d": _CONV,
    "fla.modules.conv.short_conv": _CONV,
    "fla.modules.conv.triton": _CONV,
    "fla.modules.conv.triton.ops": _CONV,
    "fla.modules.convolution": _CONV,
    "fla.modules.fused_norm_gate": _GATED_NORM,
    "fla.modules.l2norm": _L2,
    "fla.modules.layernorm": _NORM,
    "fla.modules.layernorm_gated": _GROUP_NORM,
    "fla.modules.mlp": _of(modules, "GatedMLP"),
    "fla.modules.norm": {**_GATED_NORM, **_L2, **_NORM},
    "fla.modules.norm.fused_norm_gate": _GATED_NORM,
    "fla.modules.norm.l2norm": _L2,
    "fla.modules.norm.layernorm": _NORM,
    "fla.modules.norm.layernorm_gated": _GROUP_NORM,
    "fla.layers": _LAYERS,
    "fla.layers.delta_net": _of(layers, "DeltaNet"),
    "fla.layers.gated_deltanet": _of(layers, "GatedDeltaNet"),
    "fla.layers.gated_deltaproduct": _of(layers, "GatedDeltaProduct"),
    "fla.layers.gdn2": _of(layers, "GatedDeltaNet2"),
    "fla.layers.gla": _of(gla, "GatedLinearAttention"),
    "fla.layers.kda": _of(layers, "KimiDeltaAttention"),
    "fla.layers.path_attn": _of(layers, "PaTHAttention"),
    "fla.layers.rwkv7": _of(layers, "RWKV7Attention"),
    "fla.layers.utils": _of(
        padding,
        "get_layer_cache",
        "get_unpad_data",
        "get_unpad_indices_and_cu",
        "index_first_axis",
        "index_put_first_axis",
        "pad_input",
        "repad_hidden_states",
        "require_cache_layer_idx",
        "unpad_hidden_states",
        "unpad_input",
        "update_layer_cache",
    ),
}
"""Modules of the stand-in, parents first, and their names, including fla's old paths."""

_CACHE = f"{_HERE}.cache", ("Cache", "FLALayer")


def _model(family: str) -> tuple[str, tuple[str, ...]]:
    return f"{_HERE}.models", tuple(f"{family}{part}" for part in ("Config", "ForCausalLM", "Model"))


_FAMILIES = {"delta_net": "DeltaNet", "gated_deltanet": "GatedDeltaNet", "kda": "KDA"}

LATER: dict[str, tuple[str, tuple[str, ...]]] = {
    "fla.utils": (f"{_HERE}.environment", tuple(environment.__all__)),
    "fla.models": (f"{_HERE}.models", tuple(name for family in _FAMILIES.values() for name in _model(family)[1])),
    "fla.models.cache_utils": _CACHE,
    "fla.models.utils": _CACHE,
    **{f"fla.models.{folder}": _model(family) for folder, family in _FAMILIES.items()},
    **{f"fla.models.{folder}.modeling_{folder}": _model(family) for folder, family in _FAMILIES.items()},
    **{f"fla.models.{folder}.configuration_{folder}": _model(family) for folder, family in _FAMILIES.items()},
}
"""Modules whose names another module has, and finds when they are asked for. Those of fla.models need transformers."""

INSTEAD = {
    "chunk_gated_delta_rule_fwd": "call chunk_gated_delta_rule, which has a gradient",
    "chunk_gated_delta_rule_bwd": "call chunk_gated_delta_rule, which has a gradient",
    "causal_conv1d_fwd": "call causal_conv1d, which has a gradient",
    "causal_conv1d_bwd": "call causal_conv1d, which has a gradient",
    "l2norm_fwd": "call l2norm, which has a gradient",
    "l2norm_bwd": "call l2norm, which has a gradient",
    "fused_chunk_delta_rule": "call chunk_delta_rule",
    "fused_chunk_gla": "call chunk_gla",
    "fused_recurrent_kda_fwd": "call wyfold.serving.decode, with states in a pool",
}
"""Remedies for missing names that programs import."""
