"""Delta-rule sequence mixers for PyTorch: DeltaNet, Gated DeltaNet, Kimi Delta Attention, TTT-Linear."""

from wyfold.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule
from wyfold.ops.doctor import doctor
from wyfold.ops.explain import explain
from wyfold.ops.gated_delta_rule import (
    chunk_gated_delta_rule,
    chunk_gdn,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
)
from wyfold.ops.kda import chunk_kda, fused_recurrent_kda
from wyfold.runtime.check import UnsupportedError, checked
from wyfold.runtime.layout import SequenceLayout

__version__ = "0.1.0"

__all__ = [
    "SequenceLayout",
    "UnsupportedError",
    "checked",
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_kda",
    "doctor",
    "explain",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_kda",
]
