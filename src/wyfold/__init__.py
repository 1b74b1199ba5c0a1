"""Recurrent sequence mixers for PyTorch: DeltaNet, Gated DeltaNet, Kimi Delta Attention, DeltaProduct, GLA, TTT-Linear.

Public names and the packages `cp`, `integrations`, `layers`, `models`, `reference` and `serving` are imported on first
use (PEP 562). `import wyfold` alone does not import torch, so that the command line prints help and errors without
delay. If torch is already imported, the operators are imported too and `torch.ops.wyfold` is complete: exported
programs load after `import torch, wyfold`.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "PathKeys",
    "SequenceLayout",
    "TTTState",
    "UnsupportedError",
    "causal_conv1d",
    "checked",
    "chunk_comba",
    "chunk_delta_rule",
    "chunk_dplr_delta_rule",
    "chunk_gated_delta_product",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_gdn2",
    "chunk_gla",
    "chunk_iplr_delta_rule",
    "chunk_kda",
    "chunk_rwkv7",
    "chunk_scaled_dot_kkt",
    "chunk_ttt_linear",
    "cp",
    "doctor",
    "explain",
    "fused_beta_sigmoid",
    "fused_chunk_ttt_linear",
    "fused_gdn_gate",
    "fused_kda_gate",
    "fused_mul_recurrent_rwkv7",
    "fused_recurrent_comba",
    "fused_recurrent_delta_rule",
    "fused_recurrent_dplr_delta_rule",
    "fused_recurrent_gated_delta_product",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_gdn2",
    "fused_recurrent_gla",
    "fused_recurrent_iplr_delta_rule",
    "fused_recurrent_kda",
    "fused_recurrent_rwkv7",
    "fused_recurrent_ttt_linear",
    "integrations",
    "l2norm",
    "layers",
    "models",
    "parallel_path_attn",
    "reference",
    "rms_norm_gated",
    "serving",
    "solve_tril",
]

if TYPE_CHECKING:  # for type checkers, editors and the documentation; `_SOURCES` is the run-time equivalent
    from wyfold import cp, integrations, layers, models, reference, serving
    from wyfold.ops.comba import chunk_comba, fused_recurrent_comba
    from wyfold.ops.conv import causal_conv1d
    from wyfold.ops.delta_product import chunk_gated_delta_product, fused_recurrent_gated_delta_product
    from wyfold.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule
    from wyfold.ops.doctor import doctor
    from wyfold.ops.dplr import (
        chunk_dplr_delta_rule,
        chunk_iplr_delta_rule,
        fused_recurrent_dplr_delta_rule,
        fused_recurrent_iplr_delta_rule,
    )
    from wyfold.ops.explain import explain
    from wyfold.ops.gated_delta_rule import (
        chunk_gated_delta_rule,
        chunk_gdn,
        fused_recurrent_gated_delta_rule,
        fused_recurrent_gdn,
    )
    from wyfold.ops.gates import fused_beta_sigmoid, fused_gdn_gate, fused_kda_gate
    from wyfold.ops.gdn2 import chunk_gdn2, fused_recurrent_gdn2
    from wyfold.ops.gla import chunk_gla, fused_recurrent_gla
    from wyfold.ops.kda import chunk_kda, fused_recurrent_kda
    from wyfold.ops.norm import l2norm, rms_norm_gated
    from wyfold.ops.path_attention import PathKeys, parallel_path_attn
    from wyfold.ops.rwkv7 import chunk_rwkv7, fused_mul_recurrent_rwkv7, fused_recurrent_rwkv7
    from wyfold.ops.solve import chunk_scaled_dot_kkt, solve_tril
    from wyfold.ops.ttt_linear import (
        TTTState,
        chunk_ttt_linear,
        fused_chunk_ttt_linear,
        fused_recurrent_ttt_linear,
    )
    from wyfold.runtime.check import checked
    from wyfold.runtime.layout import SequenceLayout
    from wyfold.runtime.unsupported import UnsupportedError
else:  # hidden from type checkers, to which a module with `__getattr__` appears to have every name
    import importlib
    import sys

    _SOURCES = {
        "PathKeys": "wyfold.ops.path_attention",
        "SequenceLayout": "wyfold.runtime.layout",
        "TTTState": "wyfold.ops.ttt_linear",
        "UnsupportedError": "wyfold.runtime.unsupported",
        "causal_conv1d": "wyfold.ops.conv",
        "checked": "wyfold.runtime.check",
        "chunk_comba": "wyfold.ops.comba",
        "chunk_delta_rule": "wyfold.ops.delta_rule",
        "chunk_dplr_delta_rule": "wyfold.ops.dplr",
        "chunk_gated_delta_product": "wyfold.ops.delta_product",
        "chunk_gated_delta_rule": "wyfold.ops.gated_delta_rule",
        "chunk_gdn": "wyfold.ops.gated_delta_rule",
        "chunk_gdn2": "wyfold.ops.gdn2",
        "chunk_gla": "wyfold.ops.gla",
        "chunk_iplr_delta_rule": "wyfold.ops.dplr",
        "chunk_kda": "wyfold.ops.kda",
        "chunk_rwkv7": "wyfold.ops.rwkv7",
        "chunk_scaled_dot_kkt": "wyfold.ops.solve",
        "chunk_ttt_linear": "wyfold.ops.ttt_linear",
        "doctor": "wyfold.ops.doctor",
        "explain": "wyfold.ops.explain",
        "fused_beta_sigmoid": "wyfold.ops.gates",
        "fused_chunk_ttt_linear": "wyfold.ops.ttt_linear",
        "fused_gdn_gate": "wyfold.ops.gates",
        "fused_kda_gate": "wyfold.ops.gates",
        "fused_mul_recurrent_rwkv7": "wyfold.ops.rwkv7",
        "fused_recurrent_comba": "wyfold.ops.comba",
        "fused_recurrent_delta_rule": "wyfold.ops.delta_rule",
        "fused_recurrent_dplr_delta_rule": "wyfold.ops.dplr",
        "fused_recurrent_gated_delta_product": "wyfold.ops.delta_product",
        "fused_recurrent_gated_delta_rule": "wyfold.ops.gated_delta_rule",
        "fused_recurrent_gdn": "wyfold.ops.gated_delta_rule",
        "fused_recurrent_gdn2": "wyfold.ops.gdn2",
        "fused_recurrent_gla": "wyfold.ops.gla",
        "fused_recurrent_iplr_delta_rule": "wyfold.ops.dplr",
        "fused_recurrent_kda": "wyfold.ops.kda",
        "fused_recurrent_rwkv7": "wyfold.ops.rwkv7",
        "fused_recurrent_ttt_linear": "wyfold.ops.ttt_linear",
        "l2norm": "wyfold.ops.norm",
        "parallel_path_attn": "wyfold.ops.path_attention",
        "rms_norm_gated": "wyfold.ops.norm",
        "solve_tril": "wyfold.ops.solve",
    }
    _SUBMODULES = ("cp", "integrations", "layers", "models", "reference", "serving")

    def __getattr__(name):
        if name in _SUBMODULES:
            return importlib.import_module(f"wyfold.{name}")
        if name not in _SOURCES:
            raise AttributeError(f"module 'wyfold' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
        value = getattr(importlib.import_module(_SOURCES[name]), name)
        globals()[name] = value  # later lookups skip this function
        return value

    def __dir__():
        return sorted({*globals(), *__all__})

    if "torch" in sys.modules:
        importlib.import_module("wyfold.ops")
